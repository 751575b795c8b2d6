"""Whether the texts are right: each request's tokens beside what the target writes when it is alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from edgespec.bench.load.records import Ask, Served, Stretch
from edgespec.bench.measure import first_difference
from edgespec.bench.summary import NEAR_TIE

Key = tuple[tuple[int, ...], int]  # the prompt's tokens and the most new ones: all that a greedy text depends on
Gap = Mapping[str, float]
GapOf = Callable[[list[int], int, int], Gap | None]
_MOST_LISTED = 50


class Difference(NamedTuple):
    """The first token that is another one. position: in the answer; before: all tokens in front, the prompt's too.
    left, right: what the request has there, and what was expected; None = the answer was over."""

    arm: str
    rate: float
    repeat: int
    number: int
    name: str
    position: int
    before: tuple[int, ...]
    left: int | None
    right: int | None


class Reference(NamedTuple):
    """The tokens that are expected. of: whose they are (order of its stretch, number); None = the target's, alone."""

    ids: tuple[int, ...]
    of: tuple[int, int] | None = None


def key_of(ask: Ask) -> Key:
    """What the text of a request depends on."""
    return ask.ids, ask.new


def reference_of(asks: Mapping[int, Ask], stretches: Iterable[Stretch], arm: str) -> dict[Key, Reference]:
    """The whole answers of one arm, where nobody asked the target alone."""
    found: dict[Key, Reference] = {}
    for stretch in stretches:
        if stretch.arm == arm:
            for one in stretch.served:
                if one.outcome == "finished" and one.number in asks:
                    found.setdefault(key_of(asks[one.number]), Reference(one.ids, (stretch.order, one.number)))
    return found


def differences(
    stretch: Stretch, asks: Mapping[int, Ask], reference: Mapping[Key, Reference]
) -> tuple[int, int, list[Difference]]:
    """How many answers were compared, how many had nothing to be compared with (an answer is no check of itself), and
    those that differ. Of an answer that was cut off, what came must be the beginning of the expected one."""
    compared, without, found = 0, 0, []
    for one in stretch.served:
        if not one.ids or one.outcome not in ("finished", "unfinished"):
            continue
        expected = reference.get(key_of(asks[one.number]))
        if expected is None or expected.of == (stretch.order, one.number):
            without += 1
            continue
        compared += 1
        at = differs_at(one, expected.ids)
        if at is not None:
            left, right = (ids[at] if at < len(ids) else None for ids in (one.ids, expected.ids))
            before = (*asks[one.number].ids, *one.ids[:at])
            found.append(
                Difference(stretch.arm, stretch.rate, stretch.repeat, one.number, one.name, at, before, left, right)
            )
    return compared, without, found


def differs_at(one: Served, expected: Sequence[int]) -> int | None:
    """The place of the first token that is wrong, None if all are right."""
    at = first_difference(one.ids, tuple(expected))
    cut_off = one.outcome != "finished" and at == len(one.ids)
    return None if cut_off else at


def judged(compared: int, found: Sequence[Difference], weight_format: str, gap_of: GapOf) -> dict[str, Any]:
    """Equal and compared answers, and each difference with how near a tie it was.

    A difference is a near tie if both the two tokens and the two best ones are close in the target's logits; any other
    is a fault, also one whose gap cannot be told. The same place is measured once.
    """
    limit = NEAR_TIE.get(weight_format, 0.0)
    gaps: dict[tuple[Any, ...], Gap | None] = {}
    listed, ties = [], 0
    for each in found:
        gap = None
        if each.left is not None and each.right is not None:
            key = (each.before, each.left, each.right)
            if key not in gaps:
                gaps[key] = gap_of(list(each.before), each.left, each.right)
            gap = gaps[key]
        near = gap is not None and max(gap["gap"], gap["margin"]) <= limit
        ties += near
        listed.append(
            {
                "arm": each.arm, "rate": each.rate, "repeat": each.repeat, "number": each.number, "prompt": each.name,
                "position": each.position, "near_tie": near, "gap": gap and gap["gap"],
                "margin": gap and gap["margin"],
            }
        )  # fmt: skip
    return {
        "compared": compared,
        "equal": compared - len(found),
        "near_ties": ties,
        "faults": len(found) - ties,
        "differences": listed[:_MOST_LISTED],
    }
