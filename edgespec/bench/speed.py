"""The speed benchmark's run: every contender answers every prompt in turn, several times over.

Order: for each repeat, for each prompt, all contenders one right after the other, a different one first each time. So
two contenders are always compared on runs that lie seconds apart, and slow drift of the machine meets all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from edgespec.bench.measure import Answer, measure
from edgespec.bench.peers.base import Contender
from edgespec.bench.prompts import Prompt
from edgespec.bench.watch import Watch
from edgespec.bench.workers import WorkerFailure

PREFILL_NEW_TOKENS = 1
LOAD_SECONDS = 1800.0
ANSWER_SECONDS = 600.0


class Channel(Protocol):
    """What the run needs of a worker (workers.Worker; tests use others)."""

    def request(self, op: str, *, timeout: float = ..., **fields: Any) -> dict[str, Any]: ...

    def cpu_seconds(self) -> float: ...

    def close(self) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. `ids[name]` are the token ids of the prompt `name`, the same ones for everybody."""

    model: Path
    contenders: Sequence[Contender]
    prompts: Sequence[Prompt]
    ids: dict[str, list[int]]
    warm_up: list[int]
    repeats: int = 5
    new_tokens: int = 128
    threads: int = 2

    def prompts_of(self, contender: Contender) -> list[Prompt]:
        """The prompts that this contender runs."""
        return [prompt for prompt in self.prompts if prompt.group in contender.groups]

    def steps(self) -> int:
        """Number of answers in the whole run."""
        return self.repeats * sum(len(self.prompts_of(contender)) for contender in self.contenders)


@dataclass(frozen=True, slots=True)
class Failure:
    """One prompt that a contender could not answer."""

    prompt: str
    repeat: int
    message: str


@dataclass(slots=True)
class Result:
    """All that was measured, by contender name.

    answers[name][(prompt, repeat)]. errors[name]: why a contender has no numbers. missing[name]: why it took no part.
    """

    plan: Plan
    answers: dict[str, dict[tuple[str, int], Answer]] = field(default_factory=dict)
    failures: dict[str, list[Failure]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    peak_memory: dict[str, int] = field(default_factory=dict)
    disturbance: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    repeated_faster: dict[str, float] = field(default_factory=dict)

    def excluded(self) -> set[tuple[str, int]]:
        """(prompt, repeat) that some contender failed at: left out for all, so that all are judged by the same work."""
        return {(failure.prompt, failure.repeat) for failures in self.failures.values() for failure in failures}

    def kept(self, name: str) -> dict[tuple[str, int], Answer]:
        """A contender's answers that count."""
        excluded = self.excluded()
        return {key: answer for key, answer in self.answers.get(name, {}).items() if key not in excluded}


class Run:
    """Runs a plan. `start(contender)` makes a worker; `progress(text)` is called before each answer, `step()` after."""

    def __init__(
        self,
        plan: Plan,
        start: Callable[[Contender], Channel],
        *,
        progress: Callable[[str], None] = lambda text: None,
        step: Callable[[], None] = lambda: None,
        check_missing: bool = True,
    ) -> None:
        self.plan = plan
        self.result = Result(plan)
        self._start = start
        self._progress = progress
        self._step = step
        self._check_missing = check_missing
        self._workers: dict[str, Channel] = {}

    def run(self) -> Result:
        """Do it all. Whatever happens, no worker is left behind."""
        try:
            for contender in self.plan.contenders:
                self._open(contender)
            for repeat, prompt, contender in self._schedule():
                if contender.name in self._workers:
                    self._progress(f"{contender.name}: {prompt.name} ({repeat + 1}/{self.plan.repeats})")
                    self._answer(contender, prompt, repeat)
                self._step()
            for name, worker in list(self._workers.items()):
                self._ask_memory(name, worker)
        except BaseException:
            for worker in self._workers.values():
                worker.kill()
            raise
        for worker in self._workers.values():
            worker.close()
        return self.result

    def _schedule(self) -> Iterator[tuple[int, Prompt, Contender]]:
        turn = 0
        for repeat in range(self.plan.repeats):
            for prompt in self.plan.prompts:
                here = [contender for contender in self.plan.contenders if prompt.group in contender.groups]
                first = turn % len(here) if here else 0
                turn += 1
                for contender in here[first:] + here[:first]:
                    yield repeat, prompt, contender

    def _open(self, contender: Contender) -> None:
        """Prepare in a process of its own (its memory must not count), load in another, warm up."""
        reason = contender.missing(self.plan.model) if self._check_missing else None
        if reason:
            self.result.missing[contender.name] = reason
            return
        options = {"model": str(self.plan.model), "threads": self.plan.threads, **contender.options}
        order = {"factory": contender.factory, "options": options}
        self._progress(f"{contender.name}: preparing")
        try:
            builder = self._start(contender)
            try:
                builder.request("prepare", timeout=LOAD_SECONDS, **order)
            finally:
                builder.close()
            worker = self._workers[contender.name] = self._start(contender)
            worker.request("load", timeout=LOAD_SECONDS, **order)
            # Two warm-up answers: thread pools, first-use allocations and caches of shapes are not what is measured.
            for ids in (self.plan.warm_up, self.plan.warm_up * 2):
                self._ask(worker, ids, 16)
        except (WorkerFailure, ValueError) as failure:
            self._give_up(contender.name, str(failure))

    def _ask(self, worker: Channel, ids: list[int], new_tokens: int) -> Answer:
        arguments = {"ids": ids, "new_tokens": new_tokens}
        reply = worker.request("call", timeout=ANSWER_SECONDS, method="generate", arguments=arguments)["result"]
        return measure(len(ids), reply["token_ids"], reply["emissions"], limit=new_tokens, stats=reply.get("stats"))

    def _answer(self, contender: Contender, prompt: Prompt, repeat: int) -> None:
        name, worker = contender.name, self._workers[contender.name]
        new_tokens = PREFILL_NEW_TOKENS if prompt.group == "prefill" else self.plan.new_tokens
        watch = Watch(worker, [other for key, other in self._workers.items() if key != name])
        try:
            answer = self._ask(worker, self.plan.ids[prompt.name], new_tokens)
        except WorkerFailure as failure:
            if not failure.alive:
                self._give_up(name, str(failure))
                return
            self.result.failures.setdefault(name, []).append(Failure(prompt.name, repeat, str(failure)))
        except ValueError as error:
            self.result.failures.setdefault(name, []).append(Failure(prompt.name, repeat, str(error)))
        else:
            self.result.answers.setdefault(name, {})[(prompt.name, repeat)] = answer
        self.result.disturbance.setdefault(name, []).append(watch.shares())

    def _ask_memory(self, name: str, worker: Channel) -> None:
        try:
            self.result.peak_memory[name] = int(worker.request("memory", timeout=60.0)["peak_memory_bytes"])
        except WorkerFailure as failure:
            self._give_up(name, str(failure))

    def _give_up(self, name: str, message: str) -> None:
        """The contender has an error: none of its times are published, and what it failed at burdens nobody else."""
        self.result.errors[name] = message
        self.result.answers.pop(name, None)
        self.result.failures.pop(name, None)
        worker = self._workers.pop(name, None)
        if worker is not None:
            worker.kill()
