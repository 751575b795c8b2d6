"""What the serving loop shows of itself: one record a batch, and counters of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgespec.models.kv.blocks import PoolStats
    from edgespec.serving.elastic import ElasticEvent


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One iteration of the loop. Seconds; `time` is `time.perf_counter()` at its begin.

    requests: ids of those whose rounds it was, in the order of drafts (None: plain), gammas (tokens planned), drafted
    (guessed), accepted and emitted (first tokens of prefills not among them). sequences: of the target's forward, those
    in prefill included. rows: tokens of the target's forward, of which prefill_rows were of prompts. draft_seconds,
    draft_work: as `predictor.load.BatchOutcome` has them, what is guessed only to be compared apart.
    queued: requests that wait. pool_free: share of the KV pool that is not promised. resident: drafts
    in memory. passed: drafts that could have guessed for a text that was to guess nothing. elastic: what became of the
    drafts' memory after this batch (see `ElasticEvent.kind`), None: nothing.
    """

    time: float
    sequences: int
    rows: int
    prefill_rows: int = 0
    requests: tuple[str, ...] = ()
    drafts: tuple[str | None, ...] = ()
    gammas: tuple[int, ...] = ()
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    emitted: tuple[int, ...] = ()
    draft_seconds: float = 0.0
    draft_work: float = 0.0
    target_seconds: float = 0.0
    seconds: float = 0.0
    queued: int = 0
    pool_free: float = 1.0
    resident: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    elastic: str | None = None


@dataclass(frozen=True, slots=True)
class ServingStats:
    """Counters since serving began, and what is so now.

    running: requests in the loop, those in prefill included. gamma_mean: planned tokens per round. acceptance: accepted
    of the guessed tokens. tokens: emitted. pool: of keys and values.
    resident: drafts in memory. lent: whether the drafts' memory serves as KV now. elastic: the last such changes.
    memory_bytes: of the KV pool and of what batches need, as planned. load_policy: if it has failed, that and why, too;
    then nothing is drafted until one is chosen again.
    """

    running: int = 0
    queued: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0
    batches: int = 0
    gamma_mean: float = 0.0
    acceptance: float = 0.0
    load_policy: str = ""
    pool: PoolStats | None = None
    resident: tuple[str, ...] = ()
    lent: bool = False
    elastic: tuple[ElasticEvent, ...] = ()
    memory_bytes: int = 0


class Totals:
    """Adds records up. Written by the serving thread (`failed` also by who closes); any may read the counters."""

    def __init__(self) -> None:
        self.finished = self.failed = self.cancelled = 0
        self.tokens = self.batches = 0
        self._rounds = self._planned = self._drafted = self._accepted = 0

    def batch(self, record: BatchRecord, first_tokens: int) -> None:
        """first_tokens: that came with prefills."""
        self.batches += 1
        self.tokens += sum(record.emitted) + first_tokens
        self._rounds += len(record.gammas)
        self._planned += sum(record.gammas)
        self._drafted += sum(record.drafted)
        self._accepted += sum(record.accepted)

    @property
    def gamma_mean(self) -> float:
        return self._planned / self._rounds if self._rounds else 0.0

    @property
    def acceptance(self) -> float:
        return self._accepted / self._drafted if self._drafted else 0.0
