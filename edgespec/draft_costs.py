"""Seconds of a draft's step, measured on this device before the first request, so that no plan starts from a guess."""

from __future__ import annotations

import time
from collections.abc import Iterable

from drafts.base import Draft
from drafts.evaluate import GreedyChoice
from edgespec.decoding.session import Session
from predictor.costs import CostTable

_LENGTH = 32  # of the conversation that is made up for it
_STEPS = 3
_REPEATS = 5


def cost_name(draft: Draft) -> str:
    """What a draft's seconds are filed under: heads of one architecture take the same time."""
    spec = getattr(draft, "spec", None)
    return str(spec.key) if draft.kind == "head" and spec is not None else draft.name


def measure_drafts(session: Session, names: Iterable[str], costs: CostTable) -> None:
    """Time a step of each of these drafts whose time is not known yet; afterwards the session is empty.

    A draft that fails is given up as in a round; one that is not loaded is left out.
    """
    unknown = [name for name in names if not costs.knows(name) and _loaded(session.statuses[name].draft)]
    length = min(_LENGTH, session.context - _STEPS - 1)
    if not unknown or length < 1:
        return
    try:
        session.start([0] * length)
        session.prefill(lambda: False)
        session.tokens.append(0)
        for name in unknown:
            if not costs.knows(name):  # one of the same architecture may have been timed just now
                _measure(session, name, costs)
    finally:
        session.close()


def _loaded(draft: Draft) -> bool:
    return bool(getattr(draft, "loaded", True))


def _measure(session: Session, name: str, costs: CostTable) -> None:
    choose, samples = GreedyChoice(session.token_count), []
    try:
        draft = session.draft(name)
        if not draft.level(session.tokens):
            return
        for _ in range(_REPEATS + 1):
            begin = time.perf_counter()
            steps = len(draft.propose(session.tokens, _STEPS, choose).tokens)
            samples.append((time.perf_counter() - begin) / max(steps, 1))
    except Exception as error:
        session.draft_failed(name, error)
        return
    samples = sorted(samples[1:])  # the first call reads the conversation
    costs.observe_draft(name, samples[len(samples) // 2])
