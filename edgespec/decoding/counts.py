"""Counters of one request, and the statistics made of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from edgespec.results import DraftTally, GenerationStats
from predictor.planner import Plan

TO_SECONDS = 1e-9


class Stamps(NamedTuple):
    """`perf_counter_ns()` within a round: its begin, drafts have read up, the plan was asked for, it was made (shadows
    have guessed), the draft has guessed; the target's forward was begun and ended; its rows were taken up, judged,
    committed; the end.

    `asked`, `sent` and `taken` equal the stamp before them where nobody else has to be waited for.
    """

    begin: int
    read: int
    asked: int
    planned: int
    drafted: int
    sent: int
    verified: int
    taken: int
    accepted: int
    committed: int
    end: int


class Counts:
    """Counts rounds as they happen; `stats` derives the rest.

    Decoding lasts from the first to the last emitted token.
    """

    def __init__(self, drafts: Iterable[str], prompt_tokens: int) -> None:
        self._stats = GenerationStats(prompt_tokens=prompt_tokens)
        self._stats.draft_share = dict.fromkeys(drafts, 0)
        self._tried: list[int] = []
        self._stood: list[int] = []
        self._fallbacks = 0
        self._previous: str | None = None
        self._first = self._last = 0
        self._prefilled = 0

    def prefilled(self, reused: int, begin: int, end: int, *, complete: bool) -> None:
        self._stats.reused_tokens = reused
        self._stats.prefill_seconds = (end - begin) * TO_SECONDS
        self._prefilled = self._stats.prompt_tokens - reused if complete else 0

    def first_token(self, began: int, now: int) -> None:
        self._first = self._last = now
        self._stats.time_to_first_token_s = (now - began) * TO_SECONDS

    def round(
        self,
        plan: Plan,
        draft: str | None,
        judged: int,
        stood: int,
        at: Stamps,
        *,
        emitted: int,
        fallback: bool,
    ) -> None:
        s = self._stats
        s.rounds += 1
        s.round_tokens.append(emitted)
        s.proposed_tokens += judged
        s.accepted_tokens += stood
        s.gamma_histogram[plan.gamma] = s.gamma_histogram.get(plan.gamma, 0) + 1
        name = draft or "plain"
        s.draft_share[name] = s.draft_share.get(name, 0) + 1
        self._fallbacks += fallback
        if draft is not None:
            s.switches += self._previous not in (None, draft)
            self._previous = draft
            blocks, first, proposed, accepted = s.by_draft.get(draft, DraftTally())
            s.by_draft[draft] = DraftTally(blocks + 1, first + (stood > 0), proposed + judged, accepted + stood)
            while len(self._tried) < judged:
                self._tried.append(0)
                self._stood.append(0)
            for place in range(min(judged, stood + 1)):
                self._tried[place] += 1
                self._stood[place] += place < stood
        s.catch_up_seconds += (at.read - at.begin) * TO_SECONDS
        s.predictor_seconds += (at.planned - at.asked + at.end - at.committed) * TO_SECONDS
        s.draft_seconds += (at.drafted - at.planned) * TO_SECONDS
        s.target_seconds += (at.verified - at.sent) * TO_SECONDS
        s.bookkeeping_seconds += (at.committed - at.taken) * TO_SECONDS
        self._last = at.end

    def stats(self, drafts: Sequence[str | None]) -> GenerationStats:
        """A copy with everything derived. drafts: of the kept tokens; a stop string may have taken some back."""
        s = dataclasses.replace(self._stats)
        s.draft_share, s.gamma_histogram = dict(s.draft_share), dict(s.gamma_histogram)
        s.new_tokens = len(drafts)
        s.round_tokens = first_of(s.round_tokens, max(s.new_tokens - 1, 0))
        s.by_draft = _kept(s.by_draft, Counter(draft for draft in drafts if draft is not None))
        s.proposed_tokens = sum(tally.proposed for tally in s.by_draft.values())
        s.accepted_tokens = sum(tally.accepted for tally in s.by_draft.values())
        s.decode_seconds = (self._last - self._first) * TO_SECONDS
        s.tokens_per_second = max(s.new_tokens - 1, 0) / s.decode_seconds if s.decode_seconds else 0.0
        s.prefill_tokens_per_second = self._prefilled / s.prefill_seconds if s.prefill_seconds else 0.0
        s.mean_tokens_per_round = max(s.new_tokens - 1, 0) / s.rounds if s.rounds else 0.0
        s.acceptance_rate = s.accepted_tokens / s.proposed_tokens if s.proposed_tokens else 0.0
        s.acceptance_by_position = [stood / tried for stood, tried in zip(self._stood, self._tried) if tried]
        s.tries_by_position = [tried for tried in self._tried if tried]
        s.fallback_share = self._fallbacks / s.rounds if s.rounds else 0.0
        return s


def _kept(tallies: Mapping[str, DraftTally], kept: Mapping[str, int]) -> dict[str, DraftTally]:
    """With the guesses that are in the answer: a stop string took some back later, a broken round counted none.

    kept: how many of each draft are in it.
    """
    found = {}
    for draft in {**tallies, **kept}:
        tally, accepted = tallies.get(draft, DraftTally()), kept.get(draft, 0)
        found[draft] = tally._replace(proposed=tally.proposed - tally.accepted + accepted, accepted=accepted)
    return found


def first_of(counts: Iterable[int], total: int) -> list[int]:
    """The first counts that make up `total`, the last of them cut to fit: [3, 2, 4] and 4 -> [3, 1]."""
    kept = []
    for count in counts:
        if total <= 0:
            break
        kept.append(min(count, total))
        total -= count
    return kept
