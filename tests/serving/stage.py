"""A serving loop over the toy decoder, whose batches can be held up and counted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter_ns
from typing import Any

from edgespec.accounts import Account
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.session import DraftStatus
from edgespec.models.kv.blocks import NoRoom
from edgespec.serving.active import Active
from edgespec.serving.batch import BatchRunner, Situation
from edgespec.serving.drafters import Drafters
from edgespec.serving.lengths import Lengths
from edgespec.serving.loop import ServingLoop
from edgespec.serving.queue import RequestQueue
from edgespec.serving.records import BatchRecord
from edgespec.serving.request import Request
from predictor import CostTable
from predictor.load import BatchCosts, make_load_planner
from predictor.planner import FixedPlanner, Planner
from tests.support.scripted import ToyDecoder, session

WAIT = 20.0  # seconds; far more than anything takes


def lengths(text: str = "edgespec") -> Lengths:
    """The load planner of that name, on costs of its own."""
    costs = CostTable()
    return Lengths(make_load_planner(text, BatchCosts.guessed(costs), costs))


class Stage:
    """The host of a loop. room: texts that fit at once. planner: of each text, by default three tokens a round."""

    def __init__(
        self,
        target: ToyDecoder | None = None,
        drafts: Iterable[Any] = (),
        *,
        planner: Callable[[], Planner] = lambda: FixedPlanner(None, 3),
        most: int = 8,
        queue: int = 1000,
        room: int = 1000,
        load: str = "edgespec",
        prefill_rows: int = 64,
        threads: int = 4,
        residency: Any = None,
    ) -> None:
        self.target = target or ToyDecoder()
        self.statuses = [DraftStatus(draft) for draft in drafts]
        self._planner, self._most, self._room, self._residency = planner, most, room, residency
        self.queue = RequestQueue(queue)
        self.gate = threading.Event()  # batches wait for it
        self.gate.set()
        self.before_batch: dict[int, Callable[[], object]] = {}  # what happens right before the batch of that number
        self._batches = 0
        self.records: list[BatchRecord] = []
        self.admitted: list[str] = []
        self.is_gone = False
        self.idles = 0
        self.events: list[str] = []
        self.runner = BatchRunner(
            self.target,  # type: ignore[arg-type]
            lengths(load),
            Drafters(threads),
            prefill_rows=prefill_rows,
        )
        self.loop: ServingLoop | None = None

    def submit(self, prompt: Sequence[int], deadline: float | None = None, **params: Any) -> Request:
        request = Request(
            list(prompt),
            SamplingParams(**params),
            began_ns=perf_counter_ns(),
            deadline=deadline,
            wake=self.queue.wake,
            served_here=self.queue.served_here,
        )
        self.queue.put(request)
        return request

    @contextmanager
    def serving(self) -> Iterator[Stage]:
        """Requests that were submitted before are there when the first batch is made."""
        self.loop = ServingLoop(self, self.runner, self.queue, self._most, watchers=(self.records.append,))
        try:
            yield self
        finally:
            self.gate.set()
            self.loop.close()

    def ran(self, *requests: Request) -> list[Any]:
        """Serve these until they are over; their results."""
        with self.serving():
            return [request.result(WAIT) for request in requests]

    # What the loop calls

    def gone(self) -> bool:
        return self.is_gone

    def admit(self, request: Request) -> Active:
        if len(self.admitted) - len(self.events) >= self._room:
            raise NoRoom("there is no room")
        made = session(self.target, self.statuses, planner=self._planner(), residency=self._residency)
        generation = Generation(made, list(request.ids), request.params, began_ns=request.began_ns)
        self.admitted.append(request.id)
        return Active(request, generation, Account(), lambda: self.events.append(f"released {request.id}"))

    def situation(self, queued: int) -> Situation:
        assert self.gate.wait(WAIT)
        action = self.before_batch.pop(self._batches, None)
        self._batches += 1
        if action is not None:
            action()
        return Situation(queued)

    def after(self, record: BatchRecord, *, blocked: bool) -> BatchRecord:
        return replace(record, elastic="blocked" if blocked else None)

    def idle(self) -> None:
        self.idles += 1

    def ended(self) -> None:
        self.events.append("ended")
