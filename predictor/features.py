"""What a ranker looks at: numbers about a text that cost next to nothing, kept up to date token by token.

Two views of the target's hidden states (the mean over the last `RECENT` positions and over the prompt's last
`PROMPT_WINDOW`), two bags of hashed words (Weinberger et al. 2009, "Feature Hashing for Large Scale Multitask
Learning": signed, so that collisions cancel on average), how much of the text is copied from the prompt, lengths, and
how often each draft's first token was right of late. Every part may be missing; a flag says so, and its numbers are 0.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

VERSION = 1  # raise when the meaning of any number changes: rankers are made for one version
RECENT = 32  # tokens, and rows of hidden states
PROMPT_WINDOW = 256  # of the prompt's rows, at most
BUCKETS = 256  # of each bag
SCALARS = (
    "hidden_recent?",
    "hidden_prompt?",
    "recent?",
    "recent_share",
    "prompt_length",
    "new_length",
    "copied",
    "run",
)
MIN_RUN = 2  # tokens in a row that the prompt holds, until they count as copied

FloatArray = npt.NDArray[np.float32]

_UNIGRAM, _BIGRAM, _MIX = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0xFF51AFD7ED558CCD
_WORD = (1 << 64) - 1
_LONG = 8.0  # lengths are given as log(1 + n) over this, about log(3000)
_LONGEST_RUN = 8


class Layout:
    """Where each part of a vector lies, for a target's hidden size and the drafts a ranker knows, in order."""

    def __init__(self, hidden_size: int, drafts: Sequence[str]) -> None:
        if hidden_size < 1 or not drafts or len(set(drafts)) < len(drafts):
            raise ValueError(f"features of hidden size {hidden_size} for drafts {list(drafts)}")
        self.hidden_size = hidden_size
        self.drafts = tuple(drafts)
        sizes = {
            "hidden_recent": hidden_size,
            "hidden_prompt": hidden_size,
            "text_recent": BUCKETS,
            "text_prompt": BUCKETS,
            "scalars": len(SCALARS),
            "rates": len(drafts),
            "known": len(drafts),
        }
        self.parts: dict[str, slice] = {}
        begin = 0
        for name, size in sizes.items():
            self.parts[name] = slice(begin, begin + size)
            begin += size
        self.size = begin

    def scalar(self, name: str) -> int:
        """The place of one of `SCALARS`."""
        return self.parts["scalars"].start + SCALARS.index(name)


def bucket(*tokens: int) -> tuple[int, int]:
    """(place in a bag, sign) of one token or of two in a row. The same on every machine and in every run."""
    if len(tokens) == 1:
        word = (tokens[0] + 1) * _UNIGRAM & _WORD
    else:
        word = ((tokens[0] + 1) * _BIGRAM ^ (tokens[1] + 1) * _UNIGRAM) & _WORD
    word ^= word >> 33  # MurmurHash3's finaliser
    word = word * _MIX & _WORD
    word ^= word >> 29
    return word % BUCKETS, 1 if word >> 63 else -1


class TextFeatures:
    """Features of one text: `begin` with the prompt, `push` what is committed, `vector` when a ranking is wanted.

    `begin` costs a few microseconds a token of the prompt, `push` as much a token, `vector` the same whatever the
    length. Not locked: it belongs to the thread that commits.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._places = {name: place for place, name in enumerate(layout.drafts)}
        self._prompt_bag = np.zeros(BUCKETS, np.float32)
        self._recent_bag = np.zeros(BUCKETS, np.float32)  # whole numbers: adding and taking away is exact
        self.begin(())

    def begin(self, prompt: Sequence[int]) -> None:
        """Another text, of which the prompt is known."""
        pairs = list(pairwise(prompt))
        self._prompt_pairs = set(pairs)
        self._prompt_length, self._new_length = len(prompt), 0
        self._recent: deque[tuple[list[tuple[int, int]], bool]] = deque()  # buckets of a token, and whether copied
        self._recent_bag[:] = 0
        self._copied = self._run = 0
        self._last: int | None = prompt[-1] if len(prompt) else None
        self._prompt_bag[:] = 0
        for token in prompt:
            place, sign = bucket(token)
            self._prompt_bag[place] += sign
        for pair in pairs:
            place, sign = bucket(*pair)
            self._prompt_bag[place] += sign
        _normalise(self._prompt_bag)

    def push(self, tokens: Sequence[int]) -> None:
        """These were committed."""
        for token in tokens:
            words = [bucket(token)]
            copied = False
            if self._last is not None:
                words.append(bucket(self._last, token))
                copied = (self._last, token) in self._prompt_pairs
            self._run = min(self._run + 1, _LONGEST_RUN) if copied else 0
            self._add(words, 1)
            self._recent.append((words, copied))
            self._copied += copied
            if len(self._recent) > RECENT:
                old, was_copied = self._recent.popleft()
                self._add(old, -1)
                self._copied -= was_copied
            self._last = token
        self._new_length += len(tokens)

    def _add(self, words: Sequence[tuple[int, int]], count: int) -> None:
        for place, sign in words:
            self._recent_bag[place] += count * sign

    def vector(
        self,
        hidden_recent: FloatArray | None,
        hidden_prompt_mean: FloatArray | None,
        acceptance: Mapping[str, float],
    ) -> FloatArray:
        """A new float32 [layout.size].

        hidden_recent: [n, hidden_size], the target's states (after the final norm) of the last n <= `RECENT` positions
        that it has read, prompt included; None before there are any. hidden_prompt_mean: [hidden_size], their mean over
        the prompt's last `PROMPT_WINDOW` rows; None before. acceptance: for drafts that were tried on this text, the
        share of first tokens that were right lately; names that are not the layout's are ignored. Raises ValueError for
        hidden states of another size.
        """
        layout = self.layout
        parts, out = layout.parts, np.zeros(layout.size, np.float32)
        scalars = out[parts["scalars"]]
        if hidden_recent is not None and len(hidden_recent):
            rows = hidden_recent[-RECENT:]
            if rows.ndim != 2 or rows.shape[1] != layout.hidden_size:
                raise ValueError(f"hidden states of shape {hidden_recent.shape}, not [n, {layout.hidden_size}]")
            np.mean(rows, axis=0, dtype=np.float32, out=out[parts["hidden_recent"]])
            scalars[0] = 1
        if hidden_prompt_mean is not None:
            if hidden_prompt_mean.shape != (layout.hidden_size,):
                raise ValueError(f"a mean of shape {hidden_prompt_mean.shape}, not [{layout.hidden_size}]")
            out[parts["hidden_prompt"]] = hidden_prompt_mean
            scalars[1] = 1
        count = len(self._recent)
        if count:
            bag = out[parts["text_recent"]]
            bag[:] = self._recent_bag
            _normalise(bag)
            scalars[2] = 1
            scalars[3] = count / RECENT
            scalars[6] = self._copied / count
            scalars[7] = self._run / _LONGEST_RUN if self._run >= MIN_RUN else 0.0
        scalars[4] = math.log1p(self._prompt_length) / _LONG
        scalars[5] = math.log1p(self._new_length) / _LONG
        out[parts["text_prompt"]] = self._prompt_bag
        rates, known = parts["rates"].start, parts["known"].start
        for name, rate in acceptance.items():
            place = self._places.get(name)
            if place is not None:
                out[rates + place] = rate
                out[known + place] = 1
        return out


def _normalise(bag: FloatArray) -> None:
    """Make the bag's length 1, unless it is empty."""
    norm = math.sqrt(float(np.dot(bag, bag)))
    if norm > 0:
        bag /= norm


_SEEN = 0.8  # of what was seen of a draft's first guesses


def lately(before: float | None, right: bool) -> float:
    """How often a draft's first guess was right of late, after one more; before: None = it is the first."""
    return float(right) if before is None else _SEEN * before + (1 - _SEEN) * right
