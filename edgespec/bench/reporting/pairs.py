"""From the records of one or several folders to pairs: an arm's answer to a question, and plain's beside it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from edgespec.bench.reporting.checks import check
from edgespec.bench.specbench.folder import PLAIN, ArmInfo, Record, RunFolder

Turns = tuple[Record, ...]  # of one question in one repeat, in order
Beside = tuple[int, int]  # folder and group: who ran beside whom
Place = tuple[Beside, str]  # and the question


class AskedQuestion(NamedTuple):
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

    def apart(self) -> list[str]:
        """Questions whose plain was measured in another session: before or after a --resume."""
        return [question for question, pairs in self.pairs.items() if any(map(_apart, pairs))]

    def first_repeat(self) -> Comparison | None:
        """The same over the first repeat alone, in which no text was seen before; None without any other."""
        if all(pair.arm[0].repeat == 0 for pairs in self.pairs.values() for pair in pairs):
            return None
        first = {name: [pair for pair in pairs if pair.arm[0].repeat == 0] for name, pairs in self.pairs.items()}
        return Comparison({name: pairs for name, pairs in first.items() if pairs})

    def over(self, questions: Collection[str]) -> Comparison:
        """The same over these questions alone."""
        return Comparison({name: pairs for name, pairs in self.pairs.items() if name in questions})


def _apart(pair: Pair) -> bool:
    return [record.session for record in pair.arm] != [record.session for record in pair.plain]


class Sums(NamedTuple):
    """Of one question, over all its turns. Tokens and seconds of decoding; all tokens, seconds."""

    decode_tokens: float = 0.0
    decode_s: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0


def sums(repeats: Iterable[Turns]) -> Sums:
    """One question as its median repeat has it: the one of median decode rate, and for the whole turn that of its own
    median rate."""
    decoding: list[tuple[float, float]] = []
    whole: list[tuple[float, float]] = []
    for turns in repeats:
        decoding.append((sum(r.decode_tokens for r in turns), sum(r.decode_s for r in turns)))
        whole.append((sum(len(r.token_ids) for r in turns), sum(r.seconds for r in turns)))
    return Sums(*_median(decoding), *_median(whole)) if decoding else Sums()


def _median(amounts: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The (tokens, seconds) of median rate; halfway between the two in the middle of an even number."""
    ordered = sorted(amounts, key=lambda amount: amount[0] / amount[1] if amount[1] else 0.0)
    half = (len(ordered) - 1) // 2
    left, right = ordered[half], ordered[-1 - half]
    return (left[0] + right[0]) / 2, (left[1] + right[1]) / 2


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
            check(self.name, record)
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
    """Runs that are one comparison: shards of one run, or one run alone. questions: those that any arm was asked."""

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        self.runs = list(runs)
        self.arms: dict[str, Answers] = {}
        self._had: dict[str, set[str]] = {}  # by arm: questions of the runs that have it
        questions: dict[str, AskedQuestion] = {}
        for number, run in enumerate(self.runs):
            begun = {record.question_id for records in run.records.values() for record in records}
            for name, info in run.arms.items():
                self._had.setdefault(name, set()).update(begun)
                known = self.arms.setdefault(name, Answers(name, info))
                known.info = _together(known.info, info)
                known.add(number, run.records.get(name, ()))
                for r in run.records.get(name, ()):
                    questions[r.question_id] = AskedQuestion(r.order, r.question_id, r.category, r.domain, r.task)
        self.questions: list[AskedQuestion] = sorted(questions.values())
        # All that were to be asked: a run that was interrupted has not begun some of them.
        self.asked = max(sum(run.questions for run in self.runs), len(self.questions))
        if PLAIN in self.arms:  # first, whatever the order it was asked for in
            self.arms = {PLAIN: self.arms.pop(PLAIN), **self.arms}

    def unasked(self, name: str) -> int:
        """Questions of the runs with this arm that no arm was asked (yet)."""
        return max(self.asked_of(name) - len(self._had[name]), 0)

    def asked_of(self, name: str) -> int:
        """Questions that this arm was to be asked: those of the runs that have it."""
        return max(sum(run.questions for run in self.runs if name in run.arms), len(self._had[name]))

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
        found.missing |= self._had[name] - answered
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


def fixed(name: str) -> bool:
    """Whether a policy does not choose among drafts, so that it is a yardstick for those that do."""
    return name == "ngram" or name.startswith("static:") or name == PLAIN
