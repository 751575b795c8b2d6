"""What a load is put on: an engine that takes many requests, or something that behaves like one."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from edgespec.bench.load.records import Sample

if TYPE_CHECKING:
    from edgespec.config import RuntimeConfig
    from edgespec.decoding.params import SamplingParams
    from edgespec.engine import Engine
    from edgespec.results import GenerationResult, TextDelta
    from edgespec.serving.records import BatchRecord


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to serve: a load planner, and whether the drafts' memory may become KV blocks. name: "PLANNER", or
    "PLANNER pinned"."""

    planner: str
    elastic: bool = True

    @property
    def name(self) -> str:
        return self.planner if self.elastic else f"{self.planner} pinned"


class Handle(Protocol):
    """A request on its way (edgespec's `Request`)."""

    @property
    def status(self) -> str: ...
    def __aiter__(self) -> AsyncIterator[TextDelta]: ...
    def result(self, timeout: float | None = None) -> GenerationResult: ...
    def cancel(self, reason: str = "cancelled") -> None: ...


class System(Protocol):
    """All that the bench asks of what it loads. `use` and `alone` are called when nothing runs; they may take long."""

    @property
    def max_sessions(self) -> int: ...
    @property
    def context(self) -> int: ...
    def use(self, arm: Arm) -> None: ...
    def submit(self, prompt: Any, params: SamplingParams, *, deadline_s: float | None = None) -> Handle: ...
    def alone(self, ids: Sequence[int], params: SamplingParams) -> GenerationResult: ...
    def watch(self, callback: Callable[[Sample], None]) -> Callable[[], None]: ...
    def state(self) -> Mapping[str, Any]: ...
    def close(self) -> None: ...


class EngineSystem:
    """A real engine. Planners change on the engine that is there; elastic memory is a matter of how it is built, so
    another choice of it builds another engine."""

    def __init__(
        self, config: RuntimeConfig, arm: Arm, open_engine: Callable[[RuntimeConfig], Engine] | None = None
    ) -> None:
        """Raises what loading a model raises."""
        self._config, self._open = config, open_engine or _opened
        self._listeners: list[Callable[[Sample], None]] = []
        self._engine: Engine | None = None
        self._arm = arm
        self.use(arm)

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    @property
    def max_sessions(self) -> int:
        return int(self._config.max_sessions)

    @property
    def context(self) -> int:
        return self.engine.context

    def use(self, arm: Arm) -> None:
        """Serve like this from now on."""
        if self._engine is not None and arm.elastic == self._arm.elastic:
            if arm.planner != self._arm.planner:
                self._engine.load_policy = arm.planner
        else:
            self.close()
            gc.collect()  # the old engine's buffers are gone before the new one plans its memory
            self._engine = self._open(self._config.replace(load_policy=arm.planner, elastic=arm.elastic))
            self._engine.watch(self._tell)
            self._engine.start_serving()
        self._arm = arm

    def submit(self, prompt: Any, params: SamplingParams, *, deadline_s: float | None = None) -> Handle:
        return self.engine.submit(prompt, params, deadline_s=deadline_s)

    def alone(self, ids: Sequence[int], params: SamplingParams) -> GenerationResult:
        """The answer without neighbours; a greedy one without drafts. (A seed's text depends on how many tokens are
        drafted, which is the same for each request with a seed.)"""
        engine, gamma = self.engine, self.engine.gamma
        engine.gamma = 0 if params.greedy else gamma
        try:
            return engine.generate(list(ids), params)
        finally:
            engine.gamma = gamma

    def watch(self, callback: Callable[[Sample], None]) -> Callable[[], None]:
        """Call with every batch, from the serving thread. Returns what ends that."""
        self._listeners.append(callback)
        return lambda: self._listeners.remove(callback)

    def _tell(self, record: BatchRecord) -> None:
        for listener in list(self._listeners):
            listener(sample_of(record))

    def state(self) -> Mapping[str, Any]:
        """running, queued, and the pool's free and total blocks, as far as they are known."""
        serving = self.engine.serving
        if serving is None:
            return {}
        found: dict[str, Any] = {"running": serving.running, "queued": serving.queued}
        if serving.pool is not None:
            found |= {"pool_total": serving.pool.total, "pool_free": serving.pool.available}
        return found

    def costs(self) -> dict[str, Any] | None:
        """What was measured of this engine: seconds of forwards ("batch") and of drafts ("drafts"); None before it
        served."""
        host = self.engine._host
        if host is None:
            return None
        return {"batch": host._costs.to_json(), "drafts": self.engine._target.costs.to_json()}

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def _opened(config: RuntimeConfig) -> Engine:
    from edgespec.engine import Engine

    return Engine.from_pretrained(config=config)


def sample_of(record: BatchRecord) -> Sample:
    """The engine's `BatchRecord` as the bench keeps it; its time is set by who takes it in."""
    gammas = record.gammas
    return Sample(
        time=record.time,
        seconds=record.seconds,
        sequences=record.sequences,
        rows=record.rows,
        queued=record.queued,
        gamma=sum(gammas) / len(gammas) if gammas else None,
        drafted=sum(record.drafted),
        accepted=sum(record.accepted),
        emitted=sum(record.emitted),
        kv_free=record.pool_free,
        resident=len(record.resident),
        elastic=record.elastic or "",
        draft_seconds=record.draft_seconds,
        target_seconds=record.target_seconds,
    )
