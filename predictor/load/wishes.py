"""One working set for several texts: what each wants to hold, put together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from predictor.holding import Holding

_FALLS = 0.4  # what a text's next wish is worth, of the one before: it can use but one draft at a time
_HERE = 0.25  # votes that a draft has for being here already: a load must serve more than a hair's breadth


class Wish(NamedTuple):
    """What one text wants in memory, best first (`Holding.wanted`), and why. weight: of the text, in votes."""

    wanted: Sequence[str]
    reason: str = ""
    weight: float = 1.0


def combine(wishes: Sequence[Wish], capacity: int, resident: Collection[str] = ()) -> Holding:
    """The order in which drafts should be held for all of these texts together; first the `capacity` ones that count.

    A text gives its first wish a whole vote, and each further one a falling share; a text one of whose wishes is
    served already only gives what the next one would add (a text runs one draft at a time). Drafts are chosen one by
    one, the one of most votes first; equals go to the one that is resident, then to the one wished for earlier.
    """
    names = list(dict.fromkeys(name for wish in wishes for name in wish.wanted))
    served = [0.0] * len(wishes)
    worth = [{name: _FALLS**place for place, name in enumerate(dict.fromkeys(wish.wanted))} for wish in wishes]
    weights = [wish.weight if 0 <= wish.weight < float("inf") else 0.0 for wish in wishes]
    order: list[str] = []
    while names:
        best = max(names, key=lambda name: _votes(name, worth, served, weights) + _HERE * (name in resident))
        names.remove(best)
        order.append(best)
        for i, values in enumerate(worth):
            served[i] = max(served[i], values.get(best, 0.0))
    return Holding(tuple(order), _reason(order[: max(capacity, 0)], wishes))


def _votes(name: str, worth: Sequence[dict[str, float]], served: Sequence[float], weights: Sequence[float]) -> float:
    """What the draft adds to what is served. One that adds nothing still counts a little, for the order."""
    added = 0.0
    for values, got, weight in zip(worth, served, weights):
        value = values.get(name, 0.0)
        added += weight * (max(value - got, 0.0) + 0.01 * value)
    return added


def _reason(held: Sequence[str], wishes: Sequence[Wish]) -> str:
    if len(wishes) == 1:
        return wishes[0].reason
    firsts = [wish.wanted[0] for wish in wishes if wish.wanted]
    told = ", ".join(f"{name} ({firsts.count(name)})" for name in held)
    return f"{len(wishes)} texts at once want {told} first" if told else f"{len(wishes)} texts at once want no draft"
