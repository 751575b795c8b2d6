"""Prompt lookup: the text's own continuation of the longest suffix that occurred before. No weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from drafts.base import Choose, Proposal

if TYPE_CHECKING:
    from drafts.states import HiddenStates


class NgramDraft:
    """Looks the last `max_ngram` .. `min_ngram` tokens up in the conversation so far, longest first.

    Among equally long matches the most recent one is taken. Longer matches are right more often, so the level that the
    planner learns about is the length of the match.
    """

    kind = "ngram"
    reads_hidden = False
    free = True

    def __init__(self, max_ngram: int = 6, min_ngram: int = 2, *, name: str = "ngram") -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram, not {min_ngram} and {max_ngram}")
        self.name = name
        self.sizes = range(max_ngram, min_ngram - 1, -1)

    @property
    def nbytes(self) -> int:
        return 0

    def open(self, states: HiddenStates | None = None) -> NgramSession:
        return NgramSession(self.sizes)

    def close(self) -> None:
        pass


class NgramSession:
    """The index of one conversation: for every n-gram that something follows, where its last continuation starts.

    Each committed token is indexed once (one entry per size). A crop throws the index away; the next call rebuilds it.
    """

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._starts: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # n-grams that end before or at this position are in the index
        self._match_at = -1  # the length of the text that `_match` was found for
        self._match = (0, 0)

    def level(self, tokens: Sequence[int]) -> int:
        return self._find(tokens)[0]

    def propose(self, tokens: Sequence[int], gamma: int, choose: Choose, *, floor: float = 0.0) -> Proposal:
        matched, start = self._find(tokens)
        if not matched:
            return Proposal()
        guess = list(tokens[start : start + gamma])
        # A match that runs into the end of the text is a period: what follows is the guess itself, once more.
        while len(guess) < gamma:
            guess.append(guess[len(guess) - (len(tokens) - start)])
        return Proposal(guess, [None] * gamma)

    def _find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(length of the longest suffix that occurred before, where its most recent continuation starts), or (0, 0)."""
        end = len(tokens)
        if end == self._match_at:
            return self._match
        self._index(tokens)
        found = (0, 0)
        for size in self._sizes:
            if size < end:
                start = self._starts.get(tuple(tokens[end - size : end]))
                if start is not None:
                    found = (size, start)
                    break
        self._match, self._match_at = found, end
        return found

    def _index(self, tokens: Sequence[int]) -> None:
        """Index every n-gram that has a successor: one that ends with the text would only match itself."""
        if self._indexed >= len(tokens):  # the text lost what followed the last indexed n-grams
            self.crop(0)
        starts, sizes = self._starts, self._sizes
        for end in range(self._indexed + 1, len(tokens)):
            for size in sizes:
                if size <= end:
                    starts[tuple(tokens[end - size : end])] = end
            self._indexed = end

    def crop(self, length: int) -> None:
        self._match_at = -1
        if length < self._indexed:
            self._starts.clear()
            self._indexed = 0

    def close(self) -> None:
        self.crop(0)
