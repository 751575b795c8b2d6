"""From loaded statuses to a working set that is held, with the policy that decides and what it remembers."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

from drafts.base import Loadable
from edgespec import catalog
from edgespec.config import RuntimeConfig
from edgespec.draft_room import KEPT, Room, kept_bytes, slots_that_fit, why_none
from edgespec.errors import ConfigError
from edgespec.loading import Target, topology_of
from edgespec.memory.pressure import PressureMonitor
from edgespec.memory.working_set import Lease, WorkingSet, WorkingSetEvent
from edgespec.policy_memory import PolicyMemory
from edgespec.rankers import find_ranker
from edgespec.steering import Scheduler
from edgespec.telemetry.trace import NullTracer, Tracer
from predictor.planner import AutoPlanner
from predictor.policies import LockedPolicy, Policy, make_policy

if TYPE_CHECKING:
    from drafts.manifest import Manifest
    from edgespec.decoding.session import DraftStatus
    from predictor.ranker import Ranker

_log = logging.getLogger(__name__)

_REST_SECONDS = 1.0  # for a draft to leave, where the target cannot go on without its memory
_START_SECONDS = 60.0  # for the first drafts to be loaded, before the first prompt
_NO_MEANS = (MemoryError, OSError, RuntimeError)  # address space, threads: what only drafts need


@dataclass(frozen=True, slots=True)
class Loads:
    """Counters of the working set at one moment; the difference of two belongs to what happened between."""

    loads: int = 0
    seconds: float = 0.0
    exposed: float = 0.0
    ranker: float = 0.0

    def since(self, before: Loads) -> Loads:
        return Loads(
            self.loads - before.loads,
            self.seconds - before.seconds,
            self.exposed - before.exposed,
            self.ranker - before.ranker,
        )


class HeldDrafts:
    """The working set of an engine with what steers it. `close` joins its threads.

    no_room: why no draft with weights can be held, "" if one can.

    statuses: of all drafts. expected: acceptance of drafts with weights, as measured when they were made.
    fingerprints: of their weights, by name. owner: a weak reference; when that is gone without a `close`, the watching
    thread closes. lent: the memory of the slots is not there yet, see `WorkingSet.lend`.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        target: Target,
        statuses: Sequence[DraftStatus],
        tracer: Tracer | NullTracer,
        *,
        owner: Callable[[], object],
        expected: Mapping[str, float],
        fingerprints: Mapping[str, str],
        ranker: Ranker | None = None,
        lent: bool = False,
    ) -> None:
        self._config, self._target, self._tracer, self._owner = config, target, tracer, owner
        self._given_up: set[str] = set()
        self.no_room = ""
        held = [status for status in statuses if status.loadable and status.active]
        if 0 < len(held) < (config.resident or 0):
            _warn_of_resident(config.resident or 0, len(held))
        self._all = [status.draft for status in statuses if status.active]
        self._room = slots_that_fit(config, target, self._all)
        self.working_set = self._make_set([status.draft for status in held], lent)  # type: ignore[misc]
        with ExitStack() as undo:
            undo.callback(self.working_set.close)
            slots = self.working_set.slots
            if held and not slots and config.resident != 0 and not self.no_room:
                self.no_room = why_none(config, target, [status.draft for status in held])  # type: ignore[misc]
            if self.no_room:
                _log.warning("no draft fits, generation goes on without them: %s", self.no_room)
            self.policy = _policy(config, target, [status.name for status in held], slots)
            if isinstance(self.policy, AutoPlanner):
                for name, rate in expected.items():
                    self.policy.expect(name, rate)
            self._memory = PolicyMemory(config, target, fingerprints)
            self._memory.restore(self.policy)
            self.scheduler = self._make_scheduler(held, ranker if slots else None)
            undo.pop_all()
        target.planned |= self._room.parts
        _open.add(self)

    def _make_set(self, drafts: Sequence[Loadable], lent: bool) -> WorkingSet:
        """Without slots, if what they need cannot be had."""
        room, topology = self._room, topology_of(self._config)
        pressure = PressureMonitor.of(topology, slots=room.slots, slot_bytes=room.slot_bytes) if room.slots else None
        try:
            return WorkingSet(
                drafts,
                slots=room.slots,
                slot_bytes=room.slot_bytes,
                lent=lent,
                rate=self._config.load_rate,
                drop_cache=topology.kind == "unified",
                pressure=pressure,
                tracer=self._tracer,
                on_event=self._happened,
                on_look=self._look,
            )
        except _NO_MEANS as error:
            self._room = Room()
            self.no_room = f"drafts cannot be held: {str(error) or type(error).__name__}"
            return WorkingSet(drafts, slots=0)

    def _make_scheduler(self, held: Sequence[DraftStatus], ranker: Ranker | None) -> Scheduler:
        """Without the ranker, if its thread cannot be started."""
        parts, costs = (self.policy, self.working_set, held), self._target.costs
        if ranker is not None:
            try:
                return Scheduler(*parts, costs, ranker=ranker, features=ranker.features, tracer=self._tracer)
            except _NO_MEANS as error:
                _log.warning("the ranker cannot run, drafts are chosen by observation alone: %s", error)
        return Scheduler(*parts, costs, tracer=self._tracer)

    @property
    def further_bytes(self) -> int:
        """What one more conversation makes drafts keep."""
        drafts = [draft for draft in self._all if isinstance(draft, Loadable)] if self._room.parts else []
        return sum(kept_bytes(draft, 2) - kept_bytes(draft, 1) for draft in drafts)

    def plan_for(self, conversations: int) -> None:
        """Plan what drafts keep of so many conversations, also those that are added. Whether it fits is not asked."""
        further, self._target.sessions = conversations - self._target.sessions, conversations
        if self._room.parts:
            kept = self._room.parts[KEPT] + further * self.further_bytes
            self._room = replace(self._room, parts={**self._room.parts, KEPT: kept})
            self._target.planned |= self._room.parts

    def begin(self, *, wait: bool = True) -> None:
        """Fill the slots: first with what the policy wants before anything is known of a text, then with the others.

        wait: until all are there; no round runs yet.
        """
        wanted = self._fill("the slots are filled before the first text")
        if not wait:
            return
        deadline = time.monotonic() + _START_SECONDS
        for name in wanted[: self.working_set.capacity]:
            self.working_set.wait_for(name, max(deadline - time.monotonic(), 0.0))
        self.scheduler.exposed_seconds = 0.0  # no round waited, whatever the policy (`mab-sync`) did

    def _fill(self, reason: str) -> list[str]:
        """Want all drafts, those first that the policy wants when nothing is known of a text; returns their order.

        Policies that decide nothing while a text is made have said all that they will ever want.
        """
        wanted: list[str] = []
        try:
            wanted += self.scheduler.hold(rounds=0, rounds_left=64.0, active=None, ranking=None).wanted
        except Exception:
            _log.exception("the policy cannot say what to hold; drafts are loaded in their order")
        if not self._decides_once:
            wanted += [s.name for s in self.scheduler.drafts if s.active and s.name not in wanted]
            self.scheduler.retarget(wanted, reason)
        return wanted

    @property
    def _decides_once(self) -> bool:
        """Whether the policy wants nothing more than what it wants at first (under a fixed gamma nobody asks it)."""
        return self._config.gamma == "auto" and self.policy.name.partition(":")[0] in ("plain", "static")

    def counters(self) -> Loads:
        """Takes no lock: the collector may end a stream in any thread."""
        ranker, (loads, seconds) = self.scheduler.ranker, self.working_set.glance()
        return Loads(loads, seconds, self.scheduler.exposed_seconds, 0.0 if ranker is None else ranker.seconds)

    def only(self, name: str) -> bool:
        """Hold this draft whatever the text; waits until it is there. False if it cannot be loaded.

        Then, and if the waiting is interrupted, what was held before is wanted again.
        """
        before, there = self.scheduler.pinned, False
        try:
            self.scheduler.pin(name)
            there = self.working_set.wait_for(name, _START_SECONDS)
            return there
        finally:
            if not there:
                self._pin(before)

    def any(self) -> None:
        """Let the policy say what to hold (again)."""
        if self.scheduler.pinned is not None:
            self._pin(None)

    def _pin(self, name: str | None) -> None:
        self.scheduler.pin(name)
        if name is None:
            self._fill("no draft is asked for any more")

    def make_way(self) -> None:
        """Drafts that were given up since the last text leave their slots to those that wait."""
        given_up = {status.name for status in self.scheduler.drafts if not status.active}
        if given_up != self._given_up:
            self._given_up = given_up
            self._fill("a draft was given up")

    def remember(self) -> None:
        """Write down what the policy has learned so far, as `close` does."""
        self._memory.keep(self.policy)

    def _happened(self, event: WorkingSetEvent) -> None:
        if event.kind == "load":
            self._target.costs.observe_load(event.draft, (event.end_ns - event.begin_ns) * 1e-9)

    def _look(self) -> None:
        """The threads keep all of this alive, so they have to notice that nobody else wants it."""
        if self._owner() is None:
            self.close()

    def close(self, patience: float | None = None) -> None:
        """End the threads. Whatever is raised meanwhile (Ctrl-C), all parts are closed; another call does the rest.

        patience: seconds that rounds which run may still take; their drafts stay in memory after that.
        """
        with ExitStack() as stack:
            stack.callback(self.remember)
            stack.callback(self.working_set.close, patience)
            stack.callback(self.scheduler.close)
        for part in self._room.parts:
            self._target.planned.pop(part, None)
        self._room = Room()
        _open.discard(self)


@cache  # said once, however often the working set is made again
def _warn_of_resident(asked: int, there: int) -> None:
    _log.warning("resident = %d is more than there is to hold (drafts with weights: %d)", asked, there)


_open: WeakSet[HeldDrafts] = WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that the interpreter ends inside ONNX Runtime takes the process down with an abort."""
    with ExitStack() as stack:  # one that cannot be closed must not keep the others
        for held in list(_open):
            stack.callback(held.close)


class CurrentSet:
    """What is resident now, for conversations that outlive a working set: `Engine.add_draft` makes another one."""

    def __init__(self, held: Callable[[], HeldDrafts | None]) -> None:
        self._held = held

    def acquire(self) -> AbstractContextManager[Lease]:
        held = self._held()
        return nullcontext(Lease(0, _nothing, _nothing)) if held is None else held.working_set.acquire()

    def shrink(self, reason: str) -> None:
        """One draft less, until the watcher of the device's memory finds room for it; waits a moment until it left."""
        held = self._held()
        if held is not None and held.working_set.capacity:
            held.working_set.set_capacity(held.working_set.capacity - 1, reason)
            held.working_set.wait_for_rest(_REST_SECONDS)


def _nothing(_ticket: int) -> None:
    pass


def hold_drafts(
    config: RuntimeConfig,
    target: Target,
    statuses: Sequence[DraftStatus],
    manifests: Mapping[str, Manifest],
    tracer: Tracer | NullTracer,
    *,
    owner: Callable[[], object],
    wait: bool = True,
    lent: bool = False,
) -> HeldDrafts:
    """A working set of these drafts, with the ranker made for them if there is one, that loads its first drafts.

    wait: until these are there. owner, lent: see `HeldDrafts`.
    """
    weighty = {
        status.name: manifests[status.name] for status in statuses if status.loadable and status.name in manifests
    }
    # Free drafts say by their level what to expect.
    expected = {name: manifest.expected for name, manifest in weighty.items() if manifest.expected is not None}
    fingerprints = {name: manifest.weights_fingerprint for name, manifest in weighty.items()}
    ranker = _ranker(target.facts.fingerprint, weighty, catalog.home(config.home))
    held = HeldDrafts(
        config,
        target,
        statuses,
        tracer,
        owner=owner,
        expected=expected,
        fingerprints=fingerprints,
        ranker=ranker,
        lent=lent,
    )
    try:
        held.begin(wait=wait)
    except BaseException:
        held.close()
        raise
    return held


def _policy(config: RuntimeConfig, target: Target, names: list[str], slots: int) -> Policy:
    try:
        policy = make_policy(config.policy, target.costs, names, capacity=slots)
        return policy if isinstance(policy, AutoPlanner) else LockedPolicy(policy)
    except ValueError as error:
        raise ConfigError(f"the policy {config.policy!r} cannot work: {error}") from error


def _ranker(target: str, manifests: Mapping[str, Manifest], home: Path) -> Ranker | None:
    found, reasons = find_ranker(target, manifests, home)
    for reason in reasons:
        _log.warning("%s Drafts are chosen %s", reason, "by another ranker" if found else "by observation alone")
    return found
