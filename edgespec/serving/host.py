"""What the serving loop stands on: the engine's target and drafts, the pool of keys and values, the load planner."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from edgespec.accounts import Account
from edgespec.config import RuntimeConfig
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.errors import ConfigError, EdgespecError, ModelError, RequestTooLong
from edgespec.models.base import KVPool
from edgespec.residency import Loads
from edgespec.serving.active import Active
from edgespec.serving.batch import BatchRunner, Situation
from edgespec.serving.drafters import Drafters
from edgespec.serving.elastic import ElasticEvent, ElasticMemory
from edgespec.serving.lengths import Lengths
from edgespec.serving.loop import ServingLoop, Watcher
from edgespec.serving.measuring import batch_costs, keep
from edgespec.serving.memory import measured, need_of
from edgespec.serving.queue import RequestQueue
from edgespec.serving.records import BatchRecord, ServingStats
from edgespec.serving.request import Request
from edgespec.serving.texts import Texts
from predictor.load import BatchCosts, make_load_planner
from predictor.planner import OnlyPlanner

if TYPE_CHECKING:
    from edgespec.engine import Engine
    from edgespec.memory.working_set import WorkingSet
    from edgespec.residency import HeldDrafts

_log = logging.getLogger(__name__)


class ServingHost:
    """Made with the first request; `close` ends the loop. Raises MemoryBudgetError, ConfigError."""

    def __init__(
        self, engine: weakref.ref[Engine], config: RuntimeConfig, load_policy: str, watchers: Sequence[Watcher]
    ) -> None:
        owner = engine()
        assert owner is not None
        self._engine, self.config, self._target = engine, config, owner._target
        target = self._target
        held, sizes = owner._held, {"context": target.context, "position": target.position_bytes}
        further = 0 if held is None else held.further_bytes
        need = need_of(config, target.planned, weights=target.decoder.nbytes, further=further, **sizes)
        self._texts: Texts | None = None
        self._elastic: ElasticMemory | None = None
        self._lender: WorkingSet | None = None  # whose memory that is about
        self._elastic_off = False
        self._resident: tuple[str, ...] = ()
        self._costs = BatchCosts.guessed(target.costs, config.max_sessions)
        self._planners: dict[str, Lengths] = {}
        self._lengths(load_policy)  # refused before anything is made
        with ExitStack() as undo:
            undo.callback(target.decoder.prepare_batch, 1)  # gives back what was prepared
            need = measured(config, need, self._prepare_batch(need.slots), target.planned, **sizes)
            self._parts, self.memory_bytes = need.parts, need.total
            self.pool = self._make_pool(need.pool, held)
            undo.callback(self.pool.close)
            self._costs, self._costs_file = batch_costs(target, config.max_sessions)
            self._planners.clear()
            runner = BatchRunner(target.decoder, self._lengths(load_policy), Drafters(), together=self._together)
            self._runner = runner
            self.queue = RequestQueue(config.max_queue)
            self.loop = ServingLoop(self, runner, self.queue, config.max_sessions, watchers=watchers)
            undo.pop_all()
        target.planned.update(self._parts)
        if held is not None:
            held.plan_for(config.max_sessions)

    def _prepare_batch(self, slots: int) -> int:
        """The bytes of the graph. Without it sequences run one after the other, which is slower and the same text."""
        if self.config.max_sessions == 1:
            return 0
        try:
            return self._target.decoder.prepare_batch(slots)
        except ModelError as error:
            _log.warning("batches run one sequence after the other: %s", error)
            return 0

    def _make_pool(self, nbytes: int, held: HeldDrafts | None) -> KVPool:
        working_set = None if held is None or not self.config.elastic else held.working_set
        more = 0 if working_set is None else working_set.slots * working_set.slot_bytes
        return self._target.decoder.new_pool(
            nbytes, sequences=self.config.max_sessions, context=self._target.context, most_bytes=nbytes + more
        )

    def _lengths(self, text: str) -> Lengths:
        """The planner of that name, with what it has learned if it was there before and works. Raises ConfigError."""
        lengths = self._planners.get(text)
        if lengths is None or lengths.reason is not None:
            try:
                planner = make_load_planner(text, self._costs, self._target.costs)
            except ValueError as error:
                raise ConfigError(f"the load policy {text!r} cannot work: {error}") from error
            lengths = self._planners[text] = Lengths(planner)
        return lengths

    # From any thread

    def use(self, load_policy: str) -> None:
        """Plan loads like this from the next batch on."""
        self._runner.lengths = self._lengths(load_policy)

    def check(self, ids: list[int], params: SamplingParams) -> None:
        """Raises RequestTooLong for what the empty pool could not hold."""
        tokens = self._tokens(ids, params)
        if tokens > self.pool.most_tokens:
            raise RequestTooLong(
                f"{len(ids)} prompt tokens and up to {tokens - len(ids)} new ones need {tokens} positions of keys and "
                f"values, and the pool has {self.pool.most_tokens}: ask for fewer new tokens, or raise --kv-memory"
            )

    def _tokens(self, ids: list[int], params: SamplingParams) -> int:
        return min(len(ids) + params.max_new_tokens, self._target.context)

    def stats(self) -> ServingStats:
        """What the loop has done and does."""
        totals, lengths = self.loop.totals, self._runner.lengths
        return ServingStats(
            running=len(self.loop.actives),
            queued=len(self.queue),
            finished=totals.finished,
            failed=totals.failed,
            cancelled=totals.cancelled,
            tokens=totals.tokens,
            batches=totals.batches,
            gamma_mean=totals.gamma_mean,
            acceptance=totals.acceptance,
            load_policy=lengths.name if lengths.reason is None else f"{lengths.name} (failed: {lengths.reason})",
            pool=self.pool.stats,
            resident=self._resident,
            lent=self._elastic is not None and bool(self._elastic.lent),
            elastic=() if self._elastic is None else tuple(self._elastic.events),
            memory_bytes=self.memory_bytes,
        )

    def close(self) -> None:
        """End the loop, failing what it had. Idempotent."""
        self.loop.close()

    # From the serving thread (see `loop.Host`)

    def gone(self) -> bool:
        return self._engine() is None

    def admit(self, request: Request) -> Active:
        engine = self._engine()
        if engine is None or engine._closed:
            raise EdgespecError("the engine was closed before the answer was begun")
        ids = list(request.ids)
        with ExitStack() as undo:
            cache = self.pool.new_cache(self._tokens(ids, request.params), self.pool.match(ids))
            undo.callback(cache.release)
            held = engine._held
            if held is not None:
                held.make_way()
            (planner, policy, only), steering, withdraw = engine._choice(held), None, _nothing
            if policy is not None:
                planner = view = policy.for_text()
                if only is not None:
                    view.begin()
                    planner = OnlyPlanner(view, only)
                elif held is not None and not self._runner.lengths.plain:
                    # Under a load planner that never drafts, a text has no wishes, even if another one takes over.
                    steering, voter = self._steered(held).steering(view, request.params.max_new_tokens)
                    withdraw = voter.withdraw
                    undo.callback(withdraw)
            session = engine._session(planner)
            undo.callback(session.close)
            session.adopt(ids[: cache.length], cache)
            generation = Generation(session, ids, request.params, began_ns=request.began_ns, steering=steering)
            account = Account(Loads if held is None else held.counters, engine._sampler)
            undo.pop_all()
        return Active(request, generation, account, withdraw)

    def _steered(self, held: HeldDrafts) -> Texts:
        """The votes on the working set there is now: `add_draft` makes another one."""
        if self._texts is None or self._texts.scheduler is not held.scheduler:
            self._texts = Texts(held.scheduler)
        return self._texts

    def _together(self) -> AbstractContextManager[None]:
        """What the texts of a batch wish for is passed on as one."""
        return nullcontext() if self._texts is None else self._texts.together()

    def situation(self, queued: int) -> Situation:
        return Situation(queued, self.pool.stats.free_share)

    def after(self, record: BatchRecord, *, blocked: bool) -> BatchRecord:
        engine = self._engine()
        if record.requests and engine is not None:
            self._resident = record.resident
        event = self._step(None if engine is None else _drafts_nothing(engine, record), record.queued, blocked)
        return replace(
            record,
            pool_free=self.pool.stats.free_share,
            resident=self._resident,
            elastic=None if event is None else event.kind,
        )

    def idle(self) -> None:
        self._step(None, 0, False)

    def _step(self, gamma_zero: bool | None, queued: int, blocked: bool) -> ElasticEvent | None:
        """Move memory between drafts and pool, if it is time. If that fails it is given up; it can only cost speed."""
        try:
            return None if self._elastic_off else self._move(gamma_zero, queued, blocked)
        except Exception:
            _log.exception("memory does not move between drafts and keys and values any more")
            self._elastic_off = True
            if self._elastic is not None:
                with suppress(Exception):
                    self._elastic.give_up()
            return None

    def _move(self, gamma_zero: bool | None, queued: int, blocked: bool) -> ElasticEvent | None:
        engine = self._engine()
        held = None if engine is None else engine._held
        if not self.config.elastic or engine is None or held is None or not held.working_set.slots:
            return None
        if self._elastic is None:
            self._elastic = ElasticMemory(self.pool, held.working_set, tracer=engine.tracer)
        elif held.working_set is not self._lender:  # `add_draft` made another one
            self._elastic.of(held.working_set)
        self._lender = held.working_set
        return self._elastic.step(gamma_zero, queued, blocked=blocked)

    def ended(self) -> None:
        """The loop has ended: give back what it used."""
        with ExitStack() as stack:  # the last one first; one that fails must not keep the others
            for part in self._parts:
                stack.callback(self._target.planned.pop, part, None)
            stack.callback(self._drop_graph)
            stack.callback(self.pool.close)
            engine = self._engine()
            held = None if engine is None else engine._held
            if held is not None:
                stack.callback(held.plan_for, 1)
            if self._elastic is not None:
                stack.callback(self._elastic.close)
                if held is not None and held.working_set is not self._lender:  # what is lent is the newest one's
                    stack.callback(self._elastic.of, held.working_set)
            stack.callback(keep, self._costs, self._costs_file)

    def _drop_graph(self) -> None:
        with suppress(ModelError):  # the model is closed, and the graph with it
            self._target.decoder.prepare_batch(1)


def _drafts_nothing(engine: Engine, record: BatchRecord) -> bool | None:
    """Whether drafts with weights were not worth their time in this batch; None if it shows nothing of that.

    It shows that if one could have guessed and was not asked to, for a text that was to guess nothing. Those that are
    still loading, and texts that may not use them or have better guesses, say nothing.
    """
    weighty = {name for name, status in engine._statuses.items() if status.loadable}
    if not weighty.isdisjoint(record.drafts):
        return False
    return None if weighty.isdisjoint(record.passed) else True


def _nothing() -> None:
    pass
