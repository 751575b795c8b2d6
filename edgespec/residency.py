"""From loaded statuses to a working set that is held: how many slots fit, which policy decides, what it remembers."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

from drafts.base import Loadable
from edgespec import catalog
from edgespec.config import RuntimeConfig
from edgespec.errors import ConfigError, MemoryBudgetError, ModelError
from edgespec.files import write_text
from edgespec.loading import Target, check_memory, device_of
from edgespec.memory.budget import parse_budget
from edgespec.memory.plan import DraftNeed, MemoryPlan
from edgespec.memory.pressure import PressureMonitor
from edgespec.memory.topology import detect
from edgespec.memory.working_set import Lease, WorkingSet, WorkingSetEvent
from edgespec.steering import Ranks, Scheduler
from edgespec.telemetry.trace import NullTracer, Tracer
from predictor.memory import PlannerState
from predictor.planner import AutoPlanner
from predictor.policies import Policy, make_policy

if TYPE_CHECKING:
    from drafts.base import Draft
    from drafts.manifest import Manifest
    from edgespec.decoding.session import DraftStatus
    from predictor.features import TextFeatures
    from predictor.ranker import Ranker

_log = logging.getLogger(__name__)

_START_SECONDS = 60.0  # for the first drafts to be loaded, before the first prompt


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


_SLOTS, _OWN = "draft slots", "keys and values of drafts"


def slots_that_fit(config: RuntimeConfig, target: Target, drafts: Sequence[Draft]) -> tuple[int, int]:
    """How many drafts may be held (what was asked for, else as many as the budget has room for), and a slot's bytes.

    drafts: all of them, loaded or not. The slots are added to the plan, in place of those of an earlier call. Raises
    MemoryBudgetError with the numbers if as many as were asked for do not fit.
    """
    for part in [part for part in target.planned if part.endswith(_SLOTS) or part == _OWN]:
        del target.planned[part]
    weighty = [draft for draft in drafts if isinstance(draft, Loadable)]
    if not weighty:
        return 0, 0
    own = {draft.name: int(getattr(draft, "conversation_bytes", 0)) for draft in weighty}
    topology = detect(device_of(config))
    # What is free now, of which the target holds its part already.
    free = parse_budget("auto", topology) + sum(target.planned.values())
    budget = free if config.memory_budget == "auto" else parse_budget(config.memory_budget, topology)
    if config.resident is None:
        budget = min(budget, free)
    plan = MemoryPlan(
        target=sum(target.planned.values()),
        workspace=0,
        context=0,
        position=0,
        drafts=[DraftNeed(draft.name, draft.slot_bytes, own[draft.name]) for draft in weighty],
        budget=budget,
        asked=config.resident,
    )
    slots = min(plan.slots, len(weighty))
    while slots:
        need = {f"{slots} {_SLOTS}": slots * plan.slot_bytes, _OWN: sum(own.values())}
        try:
            check_memory(config, need, target.planned)
        except MemoryBudgetError:
            if config.resident is not None:
                raise
            slots -= 1  # what is free changes from one look to the next
            continue
        target.planned |= need
        break
    return slots, plan.slot_bytes


def _missing(config: RuntimeConfig, target: Target, drafts: Sequence[Loadable]) -> str:
    """Why not even the smallest draft fits, with the numbers."""
    smallest = min(drafts, key=lambda draft: draft.slot_bytes)
    try:
        check_memory(config, {f"draft {smallest.name}": smallest.slot_bytes}, target.planned)
    except MemoryBudgetError as error:
        return str(error)
    return "the memory has become short meanwhile"


class HeldDrafts:
    """The working set of an engine with what steers it. `close` joins its threads.

    no_room: why no draft with weights can be held, "" if one can.

    statuses: of all drafts. expected: acceptance of drafts with weights, as measured when they were made.
    fingerprints: of their weights, by name.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        target: Target,
        statuses: Sequence[DraftStatus],
        tracer: Tracer | NullTracer,
        *,
        expected: Mapping[str, float],
        fingerprints: Mapping[str, str],
        ranker: Ranks | None = None,
        features: Callable[[], TextFeatures] | None = None,
    ) -> None:
        self._target = target
        held = [status for status in statuses if status.loadable and status.active]
        drafts: list[Loadable] = [status.draft for status in held]  # type: ignore[misc]
        slots, slot_bytes = slots_that_fit(config, target, [status.draft for status in statuses if status.active])
        topology = detect(device_of(config))
        pressure = PressureMonitor.of(topology, slots=slots, slot_bytes=slot_bytes) if slots else None
        self.policy = _policy(config, target, [status.name for status in held], slots)
        if isinstance(self.policy, AutoPlanner):
            for name, rate in expected.items():
                self.policy.expect(name, rate)
        self.working_set = WorkingSet(
            drafts,
            slots=slots,
            slot_bytes=slot_bytes,
            rate=config.load_rate,
            drop_cache=topology.kind == "unified",
            pressure=pressure,
            tracer=tracer,
            on_event=self._happened,
        )
        self.scheduler = Scheduler(
            self.policy, self.working_set, held, target.costs, ranker=ranker, features=features, tracer=tracer
        )
        self.no_room = "" if slots or not drafts or config.resident == 0 else _missing(config, target, drafts)
        if self.no_room:
            _log.warning("no draft fits, generation goes on without them: %s", self.no_room)
        self._memory = _PolicyMemory(target, config.policy, fingerprints)
        self._memory.restore(self.policy)
        _open.add(self)

    def begin(self) -> None:
        """Fill the slots: first with what the policy wants before anything is known of a text, then with the others.

        Waits until all are there: no round runs yet.
        """
        wanted = self._fill("the slots are filled before the first text")
        deadline = time.monotonic() + _START_SECONDS
        for name in wanted[: self.working_set.capacity]:
            self.working_set.wait_for(name, max(deadline - time.monotonic(), 0.0))

    def _fill(self, reason: str) -> list[str]:
        """Want all drafts, those first that the policy wants when nothing is known of a text; returns their order."""
        wanted: list[str] = []
        try:
            wanted += self.scheduler.hold(rounds=0, rounds_left=64.0, active=None, ranking=None).wanted
        except Exception:
            _log.exception("the policy cannot say what to hold; drafts are loaded in their order")
        wanted += [status.name for status in self.scheduler.drafts if status.name not in wanted]
        self.working_set.retarget(wanted, reason=reason)
        return wanted

    def counters(self) -> Loads:
        """Takes no lock: the collector may end a stream in any thread."""
        ranker, (loads, seconds) = self.scheduler.ranker, self.working_set.glance()
        return Loads(loads, seconds, self.scheduler.exposed_seconds, 0.0 if ranker is None else ranker.seconds)

    def only(self, name: str) -> bool:
        """Hold this draft whatever the text; waits until it is there. False if it cannot be loaded."""
        self.scheduler.pinned = True
        self.working_set.retarget([name], reason="asked for", in_use=name)
        if self.working_set.wait_for(name, _START_SECONDS):
            return True
        self.any()
        return False

    def any(self) -> None:
        """Let the policy say what to hold (again)."""
        if self.scheduler.pinned:
            self.scheduler.pinned = False
            self._fill("no draft is asked for any more")

    def _happened(self, event: WorkingSetEvent) -> None:
        if event.kind == "load":
            self._target.costs.observe_load(event.draft, (event.end_ns - event.begin_ns) * 1e-9)

    def close(self) -> None:
        _open.discard(self)
        self.scheduler.close()
        self.working_set.close()
        self._memory.keep(self.policy)


_open: WeakSet[HeldDrafts] = WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that the interpreter ends inside ONNX Runtime takes the process down with an abort."""
    for held in list(_open):
        held.close()


class CurrentSet:
    """What is resident now, for conversations that outlive a working set: `Engine.add_draft` makes another one."""

    def __init__(self, held: Callable[[], HeldDrafts | None]) -> None:
        self._held = held

    @property
    def capacity(self) -> int:
        held = self._held()
        return 0 if held is None else held.working_set.capacity

    def acquire(self) -> AbstractContextManager[Lease]:
        held = self._held()
        return nullcontext(Lease(0, _nothing, _nothing)) if held is None else held.working_set.acquire()


def _nothing(_ticket: int) -> None:
    pass


def hold_drafts(
    config: RuntimeConfig,
    target: Target,
    statuses: Sequence[DraftStatus],
    manifests: Mapping[str, Manifest],
    tracer: Tracer | NullTracer,
) -> HeldDrafts:
    """A working set of these drafts, with the ranker made for them if there is one; its first drafts are loaded."""
    weighty = {
        status.name: manifests[status.name] for status in statuses if status.loadable and status.name in manifests
    }
    # Free drafts say by their level what to expect.
    expected = {name: manifest.expected for name, manifest in weighty.items() if manifest.expected is not None}
    fingerprints = {name: manifest.weights_fingerprint for name, manifest in weighty.items()}
    ranker = _ranker(target, catalog.home(config.home), fingerprints)
    held = HeldDrafts(
        config,
        target,
        statuses,
        tracer,
        expected=expected,
        fingerprints=fingerprints,
        ranker=ranker,
        features=None if ranker is None else ranker.features,
    )
    try:
        held.begin()
    except BaseException:
        held.close()
        raise
    return held


def _policy(config: RuntimeConfig, target: Target, names: list[str], slots: int) -> Policy:
    try:
        return make_policy(config.policy, target.costs, names, capacity=slots)
    except ValueError as error:
        raise ConfigError(f"the policy {config.policy!r} cannot work: {error}") from error


class _PolicyMemory:
    """What a policy learned, kept from run to run: bound to device, model, drafts and policy.

    A damaged file is set aside, a folder that cannot be written costs nothing but the memory.
    """

    def __init__(self, target: Target, policy: str, fingerprints: Mapping[str, str]) -> None:
        text = json.dumps([target.costs_file.stem, policy, sorted(fingerprints.items())])
        self.file: Path = target.costs_file.parent.parent / "policies" / f"{_digest(text)}.json"

    def restore(self, policy: Policy) -> None:
        try:
            content = self.file.read_bytes()
        except OSError:
            return
        if not isinstance(policy, AutoPlanner):
            return
        try:
            policy.restore(PlannerState.from_json(json.loads(content)))
        except Exception as error:  # whatever it holds, it is only a saving
            aside = self.file.with_suffix(".damaged")
            _log.warning("what was learned about drafts (%s) is damaged and set aside: %s", self.file, error)
            with suppress(OSError):
                self.file.replace(aside)

    def keep(self, policy: Policy) -> None:
        if not isinstance(policy, AutoPlanner):
            return
        with suppress(OSError, ModelError, RuntimeError):  # the last: a text that still runs changes it meanwhile
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.file, json.dumps(policy.state().to_json()))


def _ranker(target: Target, home: Path, fingerprints: Mapping[str, str]) -> Ranker | None:
    """The ranker made for this target and these drafts: the user's own before the one that comes with the program.

    None is no fault: drafts are then chosen by observation.
    """
    if not fingerprints:
        return None
    from predictor.ranker import ZOO, find

    found, reasons = find([home / "rankers", ZOO], target.facts.fingerprint, fingerprints)
    for reason in reasons:
        _log.warning("%s Drafts are chosen %s", reason, "by another ranker" if found else "by observation alone")
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
