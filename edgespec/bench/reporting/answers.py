"""From the records of one or several folders to pairs: an arm's answer to a question, and plain's beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from edgespec.bench.specbench.folder import ArmInfo, Record, RunFolder
from edgespec.errors import ConfigError

PLAIN = "plain"

Turns = tuple[Record, ...]  # of one question in one repeat, in order
Beside = tuple[int, int]  # folder and group: who ran beside whom
Place = tuple[Beside, str]  # and the question


class Question(NamedTuple):
    """A question of the run, and what it belongs to."""

    order: int
    id: str
    category: str
    domain: str
    task: str


class Pair(NamedTuple):
    """One question in one repeat: an arm's turns and those of the plain arm that ran beside it."""

    arm: Turns
    plain: Turns


@dataclass
class Comparison:
    """An arm beside plain. pairs: by question, one a repeat that both did. The other sets are left out of both arms:
    questions that failed in the arm, in plain, or that one of them has not answered (yet)."""

    pairs: dict[str, list[Pair]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    plain_failed: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)

    def records(self) -> list[Record]:
        """All turns of the arm that count, every repeat."""
        return [record for pairs in self.pairs.values() for pair in pairs for record in pair.arm]


class Sums(NamedTuple):
    """Of one question, medians over repeats of sums over turns. Seconds and tokens of decoding; all tokens, seconds."""

    decode_tokens: float = 0.0
    decode_s: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0


def sums(repeats: Iterable[Turns]) -> Sums:
    """The median repeat of one question."""
    each = [
        Sums(
            sum(r.decode_tokens for r in turns),
            sum(r.decode_s for r in turns),
            sum(len(r.token_ids) for r in turns),
            sum(r.seconds for r in turns),
        )
        for turns in repeats
    ]
    return Sums(*(median(values) for values in zip(*each))) if each else Sums()


class Answers:
    """What one arm did in all folders: turns by place and repeat."""

    def __init__(self, name: str, info: ArmInfo) -> None:
        self.name, self.info = name, info
        self.records: list[Record] = []
        self.turns: dict[Place, dict[int, Turns]] = {}

    def add(self, folder: int, records: Sequence[Record]) -> None:
        """Take in the records of one folder."""
        found: dict[Place, dict[int, dict[int, Record]]] = {}
        for record in records:
            _check(self.name, record)
            self.records.append(record)
            place = (folder, record.group), record.question_id
            found.setdefault(place, {}).setdefault(record.repeat, {})[record.turn] = record
        for place, repeats in found.items():
            self.turns[place] = {
                repeat: tuple(by_turn[turn] for turn in sorted(by_turn)) for repeat, by_turn in repeats.items()
            }

    def failed(self, place: Place) -> bool:
        """Whether any turn of any repeat has an error."""
        return any(record.error is not None for turns in self.turns[place].values() for record in turns)


class Part:
    """Runs that are one comparison: shards of one run, or one run alone."""

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        self.runs = list(runs)
        self.arms: dict[str, Answers] = {}
        questions: dict[str, Question] = {}
        for number, run in enumerate(self.runs):
            for name, info in run.arms.items():
                known = self.arms.setdefault(name, Answers(name, info))
                known.info = _together(known.info, info)
                known.add(number, run.records.get(name, ()))
                for r in run.records.get(name, ()):
                    questions[r.question_id] = Question(r.order, r.question_id, r.category, r.domain, r.task)
        self.questions: list[Question] = sorted(questions.values())
        if PLAIN in self.arms:  # first, whatever the order it was asked for in
            self.arms = {PLAIN: self.arms.pop(PLAIN), **self.arms}

    def names(self, kind: str) -> list[str]:
        """Its categories, domains or tasks, in the order in which they come."""
        return list(dict.fromkeys(getattr(question, kind) for question in self.questions))

    def compare(self, name: str) -> Comparison:
        """Pair an arm with plain of the same folder and group."""
        found, arm, plain = Comparison(), self.arms[name], self.arms.get(PLAIN)
        for place, repeats in arm.turns.items():
            question = place[1]
            if arm.failed(place):
                found.failed.add(question)
            elif plain is None or place not in plain.turns:
                found.missing.add(question)
            elif plain.failed(place):
                found.plain_failed.add(question)
            else:
                pairs = list(_pairs(repeats, plain.turns[place]))
                if pairs:
                    found.pairs.setdefault(question, []).extend(pairs)
                else:
                    found.missing.add(question)
        for question in found.failed | found.plain_failed:  # plain has several groups, and any of them may fail
            found.pairs.pop(question, None)
        answered = {question for _, question in arm.turns}
        found.missing |= {question.id for question in self.questions} - answered
        found.missing -= set(found.pairs)
        return found


def _pairs(mine: Mapping[int, Turns], plain: Mapping[int, Turns]) -> Iterable[Pair]:
    for repeat in sorted(mine.keys() & plain.keys()):
        pair = Pair(mine[repeat], plain[repeat])
        if [record.turn for record in pair.arm] == [record.turn for record in pair.plain]:
            yield pair


def _together(one: ArmInfo, other: ArmInfo) -> ArmInfo:
    """An arm of several folders: an error anywhere is shown, and it is absent only if it is nowhere."""
    if one is other:
        return one
    rank = {"absent": 0, "ok": 1, "error": 2}
    peaks = [info.peak_memory_bytes for info in (one, other) if info.peak_memory_bytes is not None]
    return ArmInfo(
        kind=one.kind,
        status=max(one.status, other.status, key=lambda status: rank[status]),
        message="; ".join(dict.fromkeys(info.message for info in (one, other) if info.message)),
        weights=one.weights or other.weights,
        peak_memory_bytes=max(peaks, default=None),
    )


def _check(arm: str, record: Record) -> None:
    """ConfigError for numbers that no clock and no counter gives: they would spoil every sum they are in."""
    values = {"decode_s": record.decode_s, "seconds": record.seconds, "decode_tokens": record.decode_tokens}
    if record.first_token_s is not None:
        values["first_token_s"] = record.first_token_s
    values |= {key: value for key, value in record.stats.items() if isinstance(value, float)}
    for name, value in values.items():
        if not math.isfinite(value) or value < 0:
            raise _damaged(arm, record, f"{name} is {value}")
    if record.decode_tokens and not record.decode_s:
        raise _damaged(arm, record, f"{record.decode_tokens} tokens in no time (decode_s is 0)")
    if record.decode_tokens > len(record.token_ids):
        raise _damaged(arm, record, f"decode_tokens is {record.decode_tokens} of {len(record.token_ids)} token_ids")


def _damaged(arm: str, record: Record, what: str) -> ConfigError:
    return ConfigError(
        f"The record of arm {arm!r}, question {record.question_id}, repeat {record.repeat}, turn {record.turn} is "
        f"damaged: {what}. Take its line out, and --resume measures it anew."
    )
