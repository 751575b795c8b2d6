"""A conversation between a tiny head and the reference of its architecture, token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from drafts.base import FloatArray, Proposal
from drafts.head import HeadDraft, HeadSpec, HeadWeights
from drafts.states import HiddenStates
from edgespec.models.base import Decoder
from tests.support.head_reference import HeadReference, Step
from tests.support.scripted import ToyDecoder
from tests.support.tiny_head import random_head, tiny_spec

TOKENS = 120
SPEC = tiny_spec(window=8, vocab_rows=64)


class Best:
    """The choice of a greedy request without any processor."""

    argmax = True

    def __call__(self, row: FloatArray, proposed: Sequence[int]) -> tuple[int, FloatArray | None]:
        raise AssertionError("a draft takes its own argmax")


BEST = Best()


class Talk:
    """A conversation with random hidden states: what a session knows, and what the reference says to it."""

    def __init__(self, draft: HeadDraft, target: Decoder, weights: HeadWeights, temperature: float = 1.0) -> None:
        self._parts = target, weights, temperature
        self.vocab = weights.vocab
        self.states = HiddenStates(draft.spec.hidden_size, draft.window)
        self.session = draft.open(self.states)
        self.rng = np.random.default_rng(7)
        self.rows = target.spec.vocab_size
        self.tokens: list[int] = []
        self.hidden: dict[int, FloatArray] = {}

    @cached_property
    def reference(self) -> HeadReference:
        target, weights, temperature = self._parts
        every = range(self.rows)
        return HeadReference(weights, target.embed(every), target.head_rows(every), temperature)

    def say(self, count: int, *, seen: bool = True) -> None:
        """`count` more tokens; the target has seen all but the last of the text, or (not `seen`) nobody read along."""
        begin = max(len(self.tokens) - 1, 0)
        self.tokens += self.rng.integers(0, self.rows, count).tolist()
        new = self.rng.standard_normal((len(self.tokens) - 1 - begin, self.states.hidden_size)).astype(np.float32)
        self.hidden.update(zip(range(begin, len(self.tokens) - 1), new))
        if seen:
            self.states.write(begin, new)

    def cut(self, length: int) -> None:
        del self.tokens[length:]
        self.session.crop(length)
        self.states.crop(length - 1)

    def expected(self, gamma: int, follow: Sequence[int] | None = None) -> list[Step]:
        """The guesses after the text as it is; call it after `propose`."""
        window, end = self.reference.spec.window, len(self.tokens) - 1
        # Rows that the session read in time count even if their states are gone by now.
        assert self.session.begin <= max(self.states.begin, end - window)
        first = max(self.session.begin, end - window)
        hidden = np.array([self.hidden[position] for position in range(first, end)])
        return self.reference.propose(self.tokens, hidden, first, gamma, follow)

    def error(self, proposal: Proposal, steps: Sequence[Step]) -> float:
        """The largest difference of a confidence; 1 for another token."""
        assert len(proposal.tokens) == len(proposal.confidences) == len(proposal.rows) == len(steps)
        same = [token == self.vocab[step.place] for token, step in zip(proposal.tokens, steps)]
        differences = [abs(c - step.confidence) for c, step in zip(proposal.confidences, steps)]
        return max(differences) if all(same) else 1.0


def toy() -> ToyDecoder:
    return ToyDecoder(TOKENS, hidden=32, seed=2)


def vocab_of(spec: HeadSpec, rows: int = TOKENS) -> list[int]:
    return sorted(random.Random(1).sample(range(rows), spec.vocab_rows))


def make(
    spec: HeadSpec = SPEC, target: Decoder | None = None, seed: int = 3, temperature: float = 1.3
) -> tuple[HeadDraft, Talk]:
    target = target or toy()
    weights = random_head(spec, vocab_of(spec), seed)
    draft = HeadDraft("tiny", spec, weights, target, temperature=temperature, threads=1)
    return draft, Talk(draft, target, weights, temperature)
