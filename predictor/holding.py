"""Which drafts to keep in memory: what a policy sees, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class View:
    """What a policy sees at a scheduling point.

    round: rounds since the text began. capacity: slots usable now. drafts: all drafts with weights, in a fixed order.
    active: the one that ran last. ranking: the ranker's newest expectation of every draft, the chance that its first
    token is accepted in this text; None = there is no ranker (yet). rounds_left: expected.
    """

    round: int
    resident: frozenset[str]
    loading: frozenset[str]
    failed: frozenset[str]
    capacity: int
    drafts: tuple[str, ...]
    active: str | None
    ranking: Mapping[str, float] | None
    rounds_left: float


@dataclass(frozen=True, slots=True)
class Holding:
    """The drafts a policy wants in memory, best first (the first `capacity` of them), and why, for a person to read.

    wait: do not go on before the first of them is there. Only the baseline `mab-sync` asks for that.
    """

    wanted: tuple[str, ...]
    reason: str
    wait: bool = False


_BETTER = 0.05  # what a draft must promise above the best one here, before a load is worth a thought
_INSURANCE = 0.08  # the same for the second best, which only waits for its hour
_CLEARLY = 0.15  # so much worse than all that stays, the draft that runs may go
_DISTURBANCE = 0.1  # seconds of rounds that a second of loading costs
_PAYS = 0.5  # share of the rounds left in which a load must have paid back


class Prospect(NamedTuple):
    """What a draft promises in this text. speed: tokens a second; rate: of its first token. load, read: seconds."""

    name: str
    speed: float
    rate: float
    load: float
    read: float


def choose_holding(view: View, prospects: Mapping[str, Prospect], plain: float, round_seconds: float) -> Holding | None:
    """The set of drafts of greatest expected gain over the rounds left, minus what their loads cost.

    The best one that is here stays the first, unless another promises more than a few percent more and pays for its
    load (a share of the load's seconds, reading up on the text, and, where it takes the slot of the draft that runs,
    the rounds without one) in half of the rounds left. The other slots hold the next best; one there is replaced only
    by a draft that is better by much. The draft that runs goes only if it is clearly worse than all that stays.

    plain: tokens a second of plain steps. Returns None if there is nothing to hold.
    """
    order = sorted((p for p in prospects.values() if p.name not in view.failed), key=lambda p: -p.speed)
    if not order or view.capacity < 1:
        return None
    here = [p for p in order if p.name in view.resident or p.name in view.loading]
    kept = _kept(here, view)
    best = kept[0] if kept else None
    reason = f"{best.name} is best expected ({best.rate:.2f}) and here" if best else "nothing is here"
    newcomer = order[0]
    if best is None or newcomer.speed > max(best.speed, plain):
        promise = _promise(newcomer, best, view, plain, round_seconds)
        if promise is not None and newcomer not in kept:
            kept, reason = [newcomer, *_kept(here, view, room=view.capacity - 1)], promise
    if not view.loading:
        kept, reason = _insured(kept, order, view, reason, plain, round_seconds)
    names = [p.name for p in kept]
    if len(names) < view.capacity:  # whoever is listed would be loaded; nobody has to go
        return Holding(tuple(names), reason)
    return Holding((*names, *(p.name for p in order if p.name not in names)), reason)


def _kept(here: list[Prospect], view: View, room: int | None = None) -> list[Prospect]:
    """The best of those that are here, the draft that runs among them unless it is clearly worse; best first."""
    room = view.capacity if room is None else room
    kept = here[:room]
    active = next((p for p in here[room:] if p.name == view.active), None)
    if active is not None and kept and active.speed > kept[-1].speed * (1 - _CLEARLY):
        kept = [*kept[:-1], active]
    return kept


def _promise(new: Prospect, best: Prospect | None, view: View, plain: float, round_seconds: float) -> str | None:
    """Why the newcomer is worth its load, or None if it is not."""
    speed = plain if best is None else max(best.speed, plain)
    gain = new.speed / speed - 1  # rounds' worth of time gained, per round
    if gain <= (0 if view.round == 0 else _BETTER):
        return None
    cost = _DISTURBANCE * new.load + new.read
    if best is not None and view.capacity == 1:
        cost += new.load * max(1 - plain / best.speed, 0.0)
    back = (cost / round_seconds) / gain
    if view.round and back + new.load / round_seconds > _PAYS * view.rounds_left:
        return None
    against = "plain steps" if best is None else f"{best.name} {best.rate:.2f}"
    return f"{new.name} {new.rate:.2f} expected against {against}; pays back in {back:.0f} rounds"


def _insured(
    kept: list[Prospect], order: list[Prospect], view: View, reason: str, plain: float, round_seconds: float
) -> tuple[list[Prospect], str]:
    """The last slot for the best draft that is not here, if that is better by much than what holds it."""
    second = next((p for p in order if p not in kept), None)
    if second is None or (view.round and view.rounds_left * round_seconds < 4 * second.load):
        return kept, reason
    if len(kept) < view.capacity:
        return [*kept, second], f"{reason}; {second.name} {second.rate:.2f} is next best and has room"
    last = kept[-1]
    if len(kept) < 2 or last.name == view.active or second.speed < max(last.speed * (1 + _INSURANCE), plain):
        return kept, reason
    return [*kept[:-1], second], f"{second.name} {second.rate:.2f} is next best, instead of {last.name} {last.rate:.2f}"


TYPICAL_TOKENS = 160  # of an answer: few are as long as they are allowed to be


def rounds_left(limit: int, emitted: int, rounds: int, typical: int = TYPICAL_TOKENS) -> float:
    """Rounds that an answer of at most `limit` tokens may still take, after `emitted` tokens in `rounds` rounds.

    Nobody knows how long an answer will be: it is taken for a typical one, and a longer one for nearly done. typical:
    0 = answers are as long as the limit.
    """
    typical = typical or limit
    per_round = max(emitted / rounds, 1.0) if rounds else 1.5
    left = max(min(limit, typical) - emitted, typical / 4)
    return min(left, max(limit - emitted, 0)) / per_round
