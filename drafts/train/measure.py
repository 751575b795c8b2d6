"""How often the finished draft is right, on held-out prompts, with the text and the states of the engine itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drafts.evaluate import Score, Trajectory, score
from drafts.figures import Bootstrap
from drafts.manifest import Acceptance
from drafts.train.errors import TrainingError

if TYPE_CHECKING:
    from drafts.base import Draft
    from edgespec.models.base import Decoder

GAMMA = 3


def check_hidden(decoder: Decoder, name: str) -> None:
    """TrainingError unless the engine hands out hidden states of `name`."""
    hidden = decoder.forward([0], decoder.new_cache(8), logits=0, hidden=True).hidden
    if hidden is None or hidden.shape != (1, decoder.spec.hidden_size):
        raise TrainingError(
            f"{name}: its engine gives no hidden states, which a head draft reads; train a standalone one."
        )


def acceptance(draft: Draft, trajectories: Sequence[Trajectory], domain: str, *, seed: int = 0) -> Acceptance:
    """Accepted tokens a round at gamma 3, with a 95% interval from resampling the prompts."""
    scores = [score(draft, trajectory, GAMMA) for trajectory in trajectories]
    total = Score()
    for one in scores:
        total.add(one)
    if not total.rounds:
        raise TrainingError("the target ends every held-out answer at once: there is nothing to measure a draft on.")
    bootstrap = Bootstrap(domain, len(scores), seed)
    ratios = bootstrap.ratios([one.accepted for one in scores], [one.rounds for one in scores])
    low, high = bootstrap.interval(ratios)
    first = total.hits[0] / total.tries[0] if total.tries and total.tries[0] else 0.0
    mean = total.accepted / total.rounds
    if low is None or high is None:  # of too few prompts: it may be anything that can be
        low, high = 0.0, float(GAMMA)
    return Acceptance(round(first, 4), round(mean, 4), round(low, 4), round(high, 4), total.rounds)
