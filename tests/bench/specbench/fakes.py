"""A run without a model: questions, texts and workers whose every answer and every second is known."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgespec.bench.specbench.arms import Arm
from edgespec.bench.specbench.folder import ArmInfo, Record, RunFolder, RunWriter, has_run, read_run
from edgespec.bench.specbench.harness import Harness, Plan
from edgespec.bench.specbench.questions import Question
from edgespec.bench.workers import WorkerFailure
from tests.bench.fakes import FakeChannel, clocked
from tests.support.runs import MACHINE, SETTINGS

END = 99  # the end token
Script = Callable[[list[int], int], dict[str, Any]]
# The question file of the command's tests.
LINES = [
    {"question_id": 81, "category": "coding", "turns": ["the hen and the hen", "and in the"]},
    {"question_id": 401, "category": "math_reasoning", "turns": ["he ran in the an"]},
]


class FakeTexts:
    """A message is its role's number and then its words, which are numbers. An answer's text is its ids."""

    stop_ids = frozenset({END})

    def conversation(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [i for m in messages for i in (1000 if m["role"] == "user" else 2000, *map(int, m["content"].split()))]

    def text(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids if i != END)


class FakeArm(FakeChannel):
    """A worker without a process, which logs what it is asked: (arm, prompt ids)."""

    def request(self, op: str, *, timeout: float = 1.0, **fields: Any) -> dict[str, Any]:
        if op != "call" or fields["method"] in ("answer", "generate"):
            return super().request(op, timeout=timeout, **fields)
        self.log.append((self.name, fields["method"]))
        if fields["method"] == "warm_up":
            self.script(fields["arguments"]["ids"], fields["arguments"]["new_tokens"])
        return {"ok": True, "result": None}

    def resident_bytes(self) -> int:
        return 250_000_000


def question(number: int, *turns: str, **changes: Any) -> Question:
    texts = turns or (str(number),)
    given = {"id": number, "category": "qa", "domain": "qa", "turns": texts, "file": "q.jsonl", "line": number}
    return Question(**{**given, "order": number - 1, **changes})  # type: ignore[arg-type]


def answering(*, chunk: int = 1, ids: Sequence[int] = tuple(range(1, 10)), **clock: float) -> Script:
    """The same answer to everything, `chunk` tokens a step."""

    def script(prompt: list[int], limit: int) -> dict[str, Any]:
        answer = list(ids[:limit])
        reply = clocked(answer, chunk=chunk, **clock)
        rounds = [count for _, count in reply["emissions"][1:]]
        seconds = reply["emissions"][-1][0] if answer else 0.1
        return {**reply, "stats": {"round_tokens": rounds}, "seconds": seconds, "resident": ["code"]}

    return script


def arm(name: str, **changes: Any) -> Arm:
    kind = "peer" if name.startswith("peer:") else "policy"
    return dataclasses.replace(Arm(name, kind, "module:Class", {"model": name}, "the file's"), **changes)


class Fakes:
    """Runs plans with scripted arms in one folder; a script that is a list is used up, one worker after the other."""

    def __init__(self, folder: Path, scripts: Mapping[str, Script | list[Script]]) -> None:
        self.folder = folder
        self.scripts = {name: list(s) if isinstance(s, list) else s for name, s in scripts.items()}
        self.log: list[tuple[str, str]] = []
        self.said: list[str] = []
        self.workers: list[FakeArm] = []
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        self.epoch = itertools.count(1_900_000_000.0, 0.5)  # what a clock on the wall shows, from look to look

    def start(self, arm: Arm) -> FakeArm:
        """The builder of an arm is a worker that is asked for nothing."""
        worker = FakeArm(arm.name, self._script(arm.name), self.log)
        self.workers.append(worker)
        return worker

    def _script(self, name: str) -> Script:
        def script(prompt: list[int], limit: int) -> dict[str, Any]:
            kept = self.scripts[name]
            if prompt[0] != 1000:  # the warm-up
                return answering()(prompt, limit)
            self.asked.append((name, tuple(prompt)))
            return (kept[0] if isinstance(kept, list) else kept)(prompt, limit)

        return script

    def run(self, questions: Sequence[Question], *groups: Sequence[str | Arm], **changes: Any) -> RunFolder:
        """To its end, going on with what is in the folder; what was written comes back as it is read."""
        made = [[a if isinstance(a, Arm) else arm(a) for a in group] for group in groups or (list(self.scripts),)]
        settings: dict[str, Any] = {"repeats": 1, "max_new_tokens": 9, "context": 100, "warm_up": [7, 8], **changes}
        plan = Plan(questions, made, **settings)
        infos = {a.name: ArmInfo(a.kind) for group in made for a in group}
        self.folder.mkdir(exist_ok=True)
        if has_run(self.folder):
            run = dataclasses.replace(read_run(self.folder), finished=False)
        else:
            run = RunFolder(self.folder, SETTINGS, MACHINE, arms=infos, questions=len(questions))
        writer = RunWriter(run)
        try:
            ticks = itertools.count(step=10.0)
            harness = Harness(
                plan,
                writer,
                self.start,
                FakeTexts(),
                announce=self.said.append,
                tell=self.said.append,
                clock=lambda: next(ticks),
                now=lambda: next(self.epoch),
            )
            harness.run()
        finally:
            writer.save()
            writer.close()
        return read_run(self.folder)


def rate(record: Record) -> float | None:
    """Tokens per second after the first emission."""
    return record.decode_tokens / record.decode_s if record.decode_s else None


def failing(message: str, *, alive: bool) -> Script:
    def script(prompt: list[int], limit: int) -> dict[str, Any]:
        raise WorkerFailure(message, alive=alive)

    return script


def interrupting(after: int) -> Script:
    """Ctrl-C comes in the answer number `after`."""
    calls = [0]

    def script(prompt: list[int], limit: int) -> dict[str, Any]:
        calls[0] += 1
        if calls[0] > after:
            raise KeyboardInterrupt
        return answering()(prompt, limit)

    return script


def dying(on: set[int]) -> Script:
    """Its process ends at the questions of these numbers."""

    def script(prompt: list[int], limit: int) -> dict[str, Any]:
        return (failing("the worker ended with code 3", alive=False) if prompt[1] in on else answering())(prompt, limit)

    return script


def picky(prompt: list[int], limit: int) -> dict[str, Any]:
    """It fails at question 2, and lives."""
    return (failing("ValueError: too difficult", alive=True) if prompt[1] == 2 else answering())(prompt, limit)


def refusing(fakes: Fakes, name: str, op: str, reply: Any) -> None:
    """One arm answers one kind of request with `reply`, or fails with it."""
    real = fakes.start

    def start(made: Any) -> Any:
        worker = real(made)
        request = worker.request

        def other(asked: str, **fields: Any) -> Any:
            if made.name == name and asked == op:
                return reply if isinstance(reply, dict) else failing(reply, alive=True)([], 0)
            return request(asked, **fields)

        worker.request = other
        return worker

    fakes.start = start  # type: ignore[method-assign]


def command_limit() -> int:
    """Warm-up answers are longer than those of these tests."""
    return 16


class Workers:
    """In place of real processes. asked: (arm, prompt ids); after `stop_after` answers comes Ctrl-C."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.asked: list[tuple[str, tuple[int, ...]]] = []
        self.made: list[FakeArm] = []
        self._stop_after = stop_after

    def __call__(self, name: str, *, threads: int) -> FakeArm:
        def script(prompt: list[int], limit: int) -> dict[str, Any]:
            if limit < command_limit():
                if self._stop_after is not None and len(self.asked) >= self._stop_after:
                    raise KeyboardInterrupt
                self.asked.append((name, tuple(prompt)))
            return answering(ids=(105, 106, 107))(prompt, limit)

        self.made.append(FakeArm(name, script))
        return self.made[-1]
