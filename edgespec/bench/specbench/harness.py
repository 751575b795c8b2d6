"""The run: every question through every arm in turn, each turn written down as soon as it is measured.

What is written down already is not run again, so that a run which was interrupted goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from edgespec.bench.measure import Answer, measure
from edgespec.bench.reporting.checks import possible
from edgespec.bench.specbench.arms import Arm
from edgespec.bench.specbench.folder import PLAIN, TRACES, Record, RunWriter, file_name, record_line
from edgespec.bench.specbench.questions import Question
from edgespec.bench.specbench.schedule import Beside, beside, rotated, turns
from edgespec.bench.speed import ANSWER_SECONDS, LOAD_SECONDS, Channel
from edgespec.bench.watch import Watch
from edgespec.bench.words import counted, duration
from edgespec.bench.workers import WorkerFailure
from edgespec.decoding.counts import first_of
from edgespec.errors import PromptError

WARM_UP_TOKENS = 16
SECONDS_A_TOKEN = 3.0  # at most, or the worker hangs
_DAMAGED = (ValueError, TypeError, KeyError, AttributeError, OverflowError)  # what a wrong reply makes `measure` raise


class ArmChannel(Channel, Protocol):
    """What the run needs of a worker (workers.Worker; tests use others)."""

    def resident_bytes(self) -> int: ...


class Texts(Protocol):
    """Messages to ids and back (bench.model.PromptEncoder)."""

    @property
    def stop_ids(self) -> frozenset[int]: ...

    def conversation(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...

    def text(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. groups: arms that are in memory together, each group with plain of its own.

    context: most tokens of prompt and answer together. warm_up: token ids that every arm answers before it is timed.
    retry_errors: ask once more what failed before this run was gone on with.
    """

    questions: Sequence[Question]
    groups: Sequence[Sequence[Arm]]
    repeats: int
    max_new_tokens: int
    context: int
    warm_up: list[int]
    temperature: float = 0.0
    retry_errors: bool = False

    def answers(self) -> int:
        """(arm, question, repeat) in all."""
        return self.repeats * len(self.questions) * sum(map(len, self.groups))


class PlainFailure(WorkerFailure):
    """The arm that all others are compared with cannot go on."""


class Harness:
    """Runs a plan. start: makes an arm's worker. announce: what is said at once; tell: what is being done; advance: so
    many answers are done. now: seconds since the epoch.

    Whatever happens, no worker is left behind. PlainFailure if plain itself cannot run.
    """

    def __init__(
        self,
        plan: Plan,
        writer: RunWriter,
        start: Callable[[Arm], ArmChannel],
        texts: Texts,
        *,
        announce: Callable[[str], None] = lambda text: None,
        tell: Callable[[str], None] = lambda text: None,
        advance: Callable[[int], None] = lambda count: None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._plan, self._writer, self._start, self._texts = plan, writer, start, texts
        self._announce, self._tell, self._advance = announce, tell, advance
        self._clock, self._now = clock, now
        self._workers: dict[str, ArmChannel] = {}
        self._restarted: set[str] = set()
        self._prepared: set[str] = set()
        records = writer.run.records
        self._done = {
            arm: {record.key: record for record in found if record.error is None or not plan.retry_errors}
            for arm, found in records.items()
        }
        self._known = {arm: {record.key[:3] for record in found} for arm, found in records.items()}
        self._session = max((record.session for found in records.values() for record in found), default=-1) + 1
        # Until it is started again: who is interrupted before that must find it broken once more.
        self._broken = {name for name, info in writer.run.arms.items() if info.status == "error"}
        self._left = self._measured = 0
        self._seconds = 0.0  # of the questions that were asked

    def run(self) -> None:
        plan = self._plan
        self._left = plan.answers()
        try:
            for number, group in enumerate(plan.groups):
                self._run_group(number, group)
        finally:
            for worker in self._workers.values():
                worker.kill()

    def _run_group(self, number: int, arms: Sequence[Arm]) -> None:
        self._restarted.clear()
        who = self._beside(number, arms)
        wanted = [arm for arm in arms if self._wanted(arm, who)]
        if wanted:
            self._announce(f"starting {counted(len(wanted), 'worker')}: {', '.join(arm.name for arm in wanted)}")
        for arm in arms:
            if arm in wanted:
                self._open(arm)
            elif arm.name in self._broken and not arm.missing:  # it broke at the last of its questions
                self._writer.arm(arm.name, status="ok", message="")
        for repeat, question, leader in turns(self._plan.questions, self._plan.repeats):
            steps = len(arms)
            for group, names in who[repeat, question.key]:
                if group != number and not self._accompanied(names, (group, repeat, question.key)):
                    continue
                running = [arm for arm in arms if arm.name in names and arm.name in self._workers]
                for arm in rotated(running, leader, repeat):
                    if arm.name in self._workers:  # still
                        self._question(arm, question, repeat, group)
                    if steps:  # plain may have more than one
                        steps -= 1
                        self._step(1)
            self._step(steps)
        self._close(arms)

    def _step(self, count: int) -> None:
        self._left -= count
        self._advance(count)

    def _beside(self, number: int, arms: Sequence[Arm]) -> Beside:
        places = [(repeat, question.key) for repeat, question, _ in turns(self._plan.questions, self._plan.repeats)]
        names = [arm.name for arm in arms if not arm.missing]
        return beside(places, number, names, PLAIN, self._known, groups=len(self._plan.groups), broken=self._broken)

    def _accompanied(self, names: Collection[str], key: tuple[int, int, str]) -> bool:
        """Whether plain would not be alone there: what it is run for once more may have failed again."""
        others = [name for name in names if name != PLAIN]
        return any(name in self._workers or (*key, 0) in self._done[name] for name in others)

    def _wanted(self, arm: Arm, who: Beside) -> bool:
        if arm.missing:
            self._writer.arm(arm.name, status="absent", message=arm.missing)
            return False
        done = self._done[arm.name]
        return any(
            (group, repeat, question.key, turn) not in done
            for repeat in range(self._plan.repeats)
            for question in self._plan.questions
            for group, names in who[repeat, question.key]
            if arm.name in names
            for turn in range(len(question.turns))
        )

    # Workers

    def _open(self, arm: Arm) -> None:
        """Prepare in a process of its own (its memory must not count), load in another, warm up."""
        self._tell(f"{arm.name}: loading")
        try:
            self._prepare(arm)
            self._load(arm)
        except (WorkerFailure, *_DAMAGED) as failure:
            self._give_up(arm, said(failure))
        else:
            self._writer.arm(arm.name, status="ok", message="")

    def _prepare(self, arm: Arm) -> None:
        own = {"policy": "", "policy_memory": ""}  # the rest is what files are built from
        same = json.dumps([arm.factory, {**arm.options, "config": {**arm.options.get("config", {}), **own}}])
        if same in self._prepared:
            return
        builder = self._start(arm)
        try:
            builder.request("prepare", timeout=LOAD_SECONDS, factory=arm.factory, options=arm.options)
        except BaseException:  # Ctrl-C above all: nobody waits for it to end by itself
            builder.kill()
            raise
        builder.close()
        self._prepared.add(same)

    def _load(self, arm: Arm) -> None:
        worker = self._workers[arm.name] = self._start(arm)
        worker.request("load", timeout=LOAD_SECONDS, factory=arm.factory, options=arm.options)
        # Two prompts: thread pools, first-use allocations and caches of shapes are not what is measured.
        for ids in (self._plan.warm_up, self._plan.warm_up * 2):
            if arm.is_policy:  # not by `answer`, which the policy would learn from
                self._call(arm, "warm_up", ids, WARM_UP_TOKENS, temperature=self._plan.temperature)
            else:
                self._ask(arm, ids, WARM_UP_TOKENS, {})

    def _died(self, arm: Arm, message: str) -> None:
        """Start it once more; the second time it has an error."""
        self._workers.pop(arm.name).kill()
        if arm.name in self._restarted:
            self._give_up(arm, f"it died twice; the last time: {message}")
            return
        self._restarted.add(arm.name)
        self._tell(f"{arm.name}: died, starting it again")
        try:
            self._load(arm)
        except (WorkerFailure, *_DAMAGED) as failure:
            self._give_up(arm, f"it died ({message}) and could not be started again: {said(failure)}")

    def _give_up(self, arm: Arm, message: str) -> None:
        worker = self._workers.pop(arm.name, None)
        if worker is not None:
            worker.kill()
        self._writer.arm(arm.name, status="error", message=message)
        self._writer.save()
        if arm.name == PLAIN:
            raise PlainFailure(f"{PLAIN}, which all others are compared with, cannot go on: {message}", alive=False)

    def _close(self, arms: Sequence[Arm]) -> None:
        """Ask for what is known at the end only, and let the workers go."""
        for arm in arms:
            worker = self._workers.pop(arm.name, None)
            if worker is None:
                continue
            self._workers[arm.name] = worker
            try:
                peak = int(worker.request("memory", timeout=60.0)["peak_memory_bytes"])
                known = self._writer.run.arms[arm.name].peak_memory_bytes or 0
                self._writer.arm(arm.name, peak_memory_bytes=max(peak, known))
                if arm.is_policy:
                    file = self._writer.run.path / TRACES / f"{file_name(arm.name)}.json"
                    worker.request("call", timeout=60.0, method="write_trace", arguments={"path": str(file)})
            except (WorkerFailure, *_DAMAGED) as failure:
                self._writer.arm(arm.name, message=f"it answered all, and then: {said(failure)}")
            self._workers.pop(arm.name)
            worker.close()
        self._writer.save()

    # Questions

    def _question(self, arm: Arm, question: Question, repeat: int, group: int) -> None:
        """All turns that were not run yet; later ones follow the arm's own answers to those before."""
        messages: list[dict[str, str]] = []
        failed: str | None = None
        asked, began = False, self._clock()
        for turn, text in enumerate(question.turns):
            record = self._done[arm.name].get((group, repeat, question.key, turn))
            if record is None:
                if arm.name not in self._workers:
                    return
                place = _place(question, repeat, turn, group, self._session)
                if failed is None:
                    self._tell(f"{arm.name}: question {question.id}{self._time_left()}")
                    record = self._turn(arm, [*messages, {"role": "user", "content": text}], place)
                    asked = True
                else:
                    record = self._keep(arm, dataclasses.replace(place, error=f"not asked: {failed}"))
            if record.error is not None and failed is None:
                failed = f"turn {turn + 1} has no answer"
            messages += exchange(text, self._texts.text(record.token_ids))
        if asked:
            self._remember(arm)
            self._measured += 1
            self._seconds += self._clock() - began

    def _turn(self, arm: Arm, messages: Sequence[Mapping[str, str]], place: Record) -> Record:
        """Ask, measure what comes, and write it down; whatever goes wrong is an error and never a time."""
        death = ""
        try:
            record = self._answer(arm, messages, place)
        except PromptError as error:
            record = dataclasses.replace(place, error=said(error))
        except WorkerFailure as failure:
            record = dataclasses.replace(place, error=said(failure))
            death = "" if failure.alive else said(failure)
        except _DAMAGED as error:
            record = dataclasses.replace(place, error=f"its answer cannot be measured: {said(error)}")
        self._keep(arm, record)
        if death:
            self._died(arm, death)
        return record

    def _answer(self, arm: Arm, messages: Sequence[Mapping[str, str]], place: Record) -> Record:
        ids = self._texts.conversation(messages)
        room = self._plan.context - len(ids)
        if room < 1:
            raise PromptError(f"{len(ids)} prompt tokens fill the context of {self._plan.context}")
        worker = self._workers[arm.name]
        watch = Watch(worker, [other for name, other in self._workers.items() if name != arm.name])
        label = {"question": place.question_id, "domain": place.domain, "turn": place.turn, "repeat": place.repeat}
        answer, reply = self._ask(arm, ids, min(self._plan.max_new_tokens, room), label)
        disturbance = min(sum(watch.shares()), 1.0)  # the other arms are other processes, too, though they only wait
        record = dataclasses.replace(
            place,
            **_measured(arm, answer, reply),
            rss_bytes=worker.resident_bytes(),
            disturbance=disturbance,
            at=round(self._now(), 3),
        )
        possible(record)  # what no report or file takes is a damaged answer: it costs this one, and not the report
        record_line(record)
        return record

    def _ask(self, arm: Arm, ids: list[int], limit: int, label: dict[str, Any]) -> tuple[Answer, dict[str, Any]]:
        stop_ids = self._texts.stop_ids
        if arm.is_policy:
            reply = self._call(arm, "answer", ids, limit, label=label, temperature=self._plan.temperature)
        else:
            reply = self._call(arm, "generate", ids, limit, eos_ids=sorted(stop_ids))
        stats = reply.get("stats") or {}
        return measure(
            len(ids), reply["token_ids"], reply["emissions"], limit=limit, eos_ids=stop_ids, stats=stats
        ), reply

    def _call(self, arm: Arm, method: str, ids: list[int], limit: int, **more: Any) -> Any:
        timeout = max(ANSWER_SECONDS, SECONDS_A_TOKEN * limit)
        arguments = {"ids": ids, "new_tokens": limit, **more}
        return self._workers[arm.name].request("call", timeout=timeout, method=method, arguments=arguments)["result"]

    def _keep(self, arm: Arm, record: Record) -> Record:
        self._writer.append(arm.name, record)
        self._done[arm.name][record.key] = record
        return record

    def _remember(self, arm: Arm) -> None:
        """What a policy learned is written after each question, not at the end: a run may be ended at any time."""
        if not arm.is_policy or arm.name not in self._workers:
            return
        try:
            self._workers[arm.name].request("call", timeout=60.0, method="keep", arguments={})
        except WorkerFailure as failure:
            if not failure.alive:
                self._died(arm, said(failure))

    def _time_left(self) -> str:
        if not self._measured:
            return ""
        return f", about {duration(self._seconds / self._measured * self._left)} left"


def exchange(question: str, answer: str) -> list[dict[str, str]]:
    """A turn that is over, as messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def said(error: BaseException) -> str:
    """Its message as text that any file takes: half characters become question marks."""
    return str(error).encode("utf-8", "replace").decode("utf-8")


def _place(question: Question, repeat: int, turn: int, group: int, session: int) -> Record:
    return Record(
        question_id=question.key,
        category=question.category,
        domain=question.domain,
        task=question.task,
        repeat=repeat,
        turn=turn,
        order=question.order,
        group=group,
        session=session,
    )


def _measured(arm: Arm, answer: Answer, reply: Mapping[str, Any]) -> dict[str, Any]:
    """An answer as fields of a record. What was cut off at an end token, or beyond the limit, took no time."""
    cut = len(answer.token_ids) < len(reply["token_ids"])
    seconds = (answer.first_token_s or 0.0) + answer.decode_s if cut else float(reply["seconds"])
    rounds = [int(count) for count in answer.stats.get("round_tokens", ())]
    return {
        "prompt_tokens": answer.prompt_tokens,
        "token_ids": answer.token_ids,
        "round_tokens": tuple(first_of(rounds, max(len(answer.token_ids) - 1, 0))),
        "first_token_s": answer.first_token_s,
        "decode_tokens": answer.decode_tokens,
        "decode_s": answer.decode_s,
        "seconds": seconds,
        "stats": answer.stats if arm.is_policy else {},
        "resident": tuple(map(str, reply.get("resident", ()))),
    }
