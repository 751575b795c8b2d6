"""A round by itself; and once more, plainly, where the target finds no memory for it."""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING

from edgespec.decoding.halves import Looked, Seen
from edgespec.models.cuda.memory import out_of_memory

if TYPE_CHECKING:
    from edgespec.decoding.round import Generation


def run_round(generation: Generation) -> Seen:
    """Plan, guess, verify and finish under one lease.

    If memory runs out, a draft makes room (outside of the lease that would hold it) and the round is made again without
    any. Nothing was committed before the target answered, so what was guessed is as good as rejected. Only a text with
    a seed keeps its guesses, which are of free drafts: without them it would be another text.
    """
    with generation.session.leased() as resident:
        looked = generation.look()
        prepared = generation.prepare(looked, generation.plan(looked))
        try:
            logits = generation.session.verify(prepared.proposal.guesses)
        except Exception as error:
            if not out_of_memory(error):
                raise
            short = MemoryError(str(error))  # the error itself may hold memory
        else:
            return generation.finish(prepared, logits, resident)
    generation.session.make_room(short)
    with generation.session.leased() as resident:
        if not generation.seeded:
            now = perf_counter_ns()
            looked = Looked(None, now, now)  # no candidates
            prepared = generation.prepare(looked, generation.plan(looked))
        logits = generation.session.verify(prepared.proposal.guesses)
        return generation.finish(prepared, logits, resident)
