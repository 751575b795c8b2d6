"""The memory plan of `edgespec doctor`: from the configured model and drafts, by headers and manifests alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from edgespec import catalog, loading
from edgespec.cli.doctor_check import Check
from edgespec.cli.doctor_place import MEMORY, Place, of_engine
from edgespec.cli.terminal import Output
from edgespec.draft_loading import sources
from edgespec.errors import ConfigError, EdgespecError
from edgespec.memory import topology
from edgespec.memory.budget import format_bytes, parse_budget
from edgespec.memory.plan import DraftNeed, MemoryPlan, Row
from edgespec.models.footprint import Footprint, footprint
from edgespec.models.weights.opening import WeightFile, open_weights
from edgespec.models.weights.safetensors_file import FLOAT_TYPES
from edgespec.serving.memory import ServingNeed, fitted
from edgespec.set_fits import fitting

if TYPE_CHECKING:
    from drafts.hub_sets import SetFit
    from drafts.zoo import Entry, TargetFacts
    from edgespec.config import RuntimeConfig

_WIDTH = 100


@dataclass(frozen=True)
class Serving:
    """What several requests at once take. left: bytes of the budget after all of it, negative: so much is missing.

    position: bytes of keys and values of one token.
    """

    sessions: int
    need: ServingNeed
    left: int
    position: int

    def rows(self) -> list[Row]:
        pool = f"KV pool of {self.need.pool // self.position} tokens"
        left, need = self.left + self.need.pool, self.need
        drafts = [Row("drafts, of all these requests", need.drafts, left)] if need.drafts else []
        graph = Row(f"graph for batches of {need.slots}", need.batch, left + need.drafts)
        return [
            *([graph] if need.batch else []),
            *drafts,
            Row(f"{pool}, {self.sessions} requests at once", need.pool, self.left),
        ]

    def advice(self) -> list[str]:
        if self.left >= 0:
            return []
        missing = format_bytes(-self.left)
        return [f"serving {self.sessions} requests at once: {missing} are missing; see --max-sessions and --kv-memory"]


@dataclass(frozen=True)
class PlanReport:
    """A plan with what it was made from. notes: drafts that are not in it. hints: what would make the model smaller.

    host: bytes of the host's memory by what takes them, where the plan is of the GPU's own.
    """

    plan: MemoryPlan
    topology: topology.Topology
    available: int
    host: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    serving: Serving | None = None
    hints: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        plan, there = self.plan, self.topology
        device = {"kind": there.kind, "name": there.name, "soc": topology.soc(there.root)}
        return {
            "device": {**device, "total_bytes": there.total_bytes, "available_bytes": self.available},
            "budget_bytes": plan.budget,
            "context": plan.context,
            "slots": plan.slots,
            "slot_bytes": plan.slot_bytes,
            "parts": [_row(row) for row in plan.rows()],
            "drafts": [_row(row) for row in plan.draft_rows()],
            "host_bytes": dict(self.host),
            "fits": plan.fits,
            "serving": None if self.serving is None else [_row(row) for row in self.serving.rows()],
            "advice": [*plan.advice(), *([] if self.serving is None else self.serving.advice()), *self.hints],
            "notes": list(self.notes),
        }


def plan_of(config: RuntimeConfig, place: Place | None = None) -> PlanReport | None:
    """The memory plan of these settings; None if the model is not on this machine. Raises EdgespecError.

    place: of the engine, None = the one that would be loaded in this process.
    """
    facts, path = loading.target_facts(config), catalog.located(config.model, home=config.home)
    if facts is None or path is None:
        return None
    place = place or of_engine(config)
    planner = _Planner(config, place)
    there = place.topology
    with open_weights(path) as weights:
        spec, size = weights.spec, planner.footprint(weights)
        gone, budget = sum(size.before().values()), _budget(config, place, size)
        context = config.context or loading.fitting_context(config, spec.max_positions, size, budget - gone)
        needs, notes = planner.needs(facts, context, spec.tie_embeddings)
        hints = planner.hints(weights)
    beside = {**size.before(), **size.beside(context)}
    plan = MemoryPlan(size.weights, beside, context, size.cache, needs, budget, config.resident)
    serving = _serving(config.replace(device=place.device), plan, size.position)
    return PlanReport(plan, there, there.available_bytes(), planner.host(size, plan), tuple(notes), serving, hints)


def set_fits(config: RuntimeConfig, place: Place | None = None) -> list[SetFit]:
    """How the sets of models on the hub fit, with the engine of `place` (None: as in `plan_of`)."""
    there = place or of_engine(config)
    return fitting(_Planner(config, there).footprint, lambda size: _budget(config, there, size))


def sets(config: RuntimeConfig, place: Place) -> Check:
    """The same as a line of the report."""
    found = set_fits(config, place)
    good = [f"{fit.name} ({fit.held} drafts at once)" for fit in found if fit.fits]
    alone = [f"{fit.name} (without drafts)" for fit in found if not fit.slots]
    short = [fit.name for fit in found if fit.slots < 0]
    groups = {"fit now": [*good, *alone], "do not": short}
    detail = "; ".join(f"{words}: {', '.join(names)}" for words, names in groups.items() if names)
    return Check("sets", "ok", f"{detail}; edgespec drafts pull lists them")


def _budget(config: RuntimeConfig, place: Place, size: Footprint) -> int:
    """Bytes that may be used, with those that the engine's library has taken already where it was started."""
    gone = sum(size.before().values()) if place.started else 0
    budget = parse_budget(config.memory_budget, place.topology)
    return min(budget + (gone if config.memory_budget == "auto" else 0), place.topology.available_bytes() + gone)


def _serving(config: RuntimeConfig, plan: MemoryPlan, position: int) -> Serving | None:
    """None for a plan that does not fit without it."""
    if not plan.fits:
        return None
    further = sum(draft.further for draft in plan.drafts) if plan.slots else 0
    sizes = {"weights": plan.target, "context": plan.context, "position": position}
    need = fitted(config, **sizes, room=plan.left, further=further)
    return Serving(config.max_sessions, need, plan.left - need.total, position)


class _Planner:
    """What target and drafts take with the engine of one place."""

    def __init__(self, config: RuntimeConfig, place: Place) -> None:
        self._config = config
        self._device = place.device
        self._kind, self._plain = place.topology.kind, place.plain

    def footprint(self, weights: WeightFile) -> Footprint:
        unified, weight_format = self._kind == "unified", self._config.weight_format
        return footprint(weights, self._device, weight_format, unified=unified, plain=self._plain)

    def hints(self, weights: WeightFile) -> tuple[str, ...]:
        """About matrices that the file has in few bits, and the GPU's engine can only keep as float16."""
        if self._device != "cuda" or self._config.weight_format != "exact":
            return ()
        matrices = [name for name in weights.names() if len(weights.shape(name)) == 2 and weights.layout(name) is None]
        wide = [name for name in matrices if weights.kind(name) not in FLOAT_TYPES]
        if not wide:
            return ()
        taken = format_bytes(sum(2 * math.prod(weights.shape(name)) for name in wide))
        kinds = ", ".join(sorted({weights.kind(name) for name in wide}))
        return (f"{taken} of it are float16: the GPU's engine has no {kinds}; edgespec convert makes that 4 or 8 bits",)

    def host(self, size: Footprint, plan: MemoryPlan) -> dict[str, int]:
        """What lies in the host's memory, where the GPU has its own."""
        pinned = size.pinned(plan.context) if self._kind == "discrete" else 0
        return {"pinned buffers": pinned} if pinned else {}

    def needs(self, facts: TargetFacts, context: int, tied: bool) -> tuple[list[DraftNeed], list[str]]:
        """What each draft takes, each once, and what cannot be said."""
        needs: dict[str, DraftNeed] = {}
        notes = []
        for source in sources(self._config, facts):
            name = source if isinstance(source, str) else source.name
            if name == "ngram" or name in needs:
                continue
            try:
                needs[name] = (
                    self._checkpoint(name, context) if isinstance(source, str) else self._of(source, context, tied)
                )
            except (EdgespecError, OSError) as error:
                notes.append(f"draft {name} is not in the plan: {error}")
        return list(needs.values()), notes

    def _of(self, entry: Entry, context: int, tied: bool) -> DraftNeed:
        from drafts import zoo
        from drafts.head import conversation_bytes, loaded_bytes

        manifest = entry.manifest
        if manifest is None:
            raise ConfigError(entry.problem)
        if manifest.kind == "phrases":
            return DraftNeed(entry.name, always=manifest.nbytes)
        if manifest.kind == "standalone":
            with open_weights(entry.folder) as weights:
                return self._standalone(entry.name, weights, context)
        spec = zoo.head_spec(manifest)
        kept = conversation_bytes(spec, manifest.target.vocab_size)
        return DraftNeed(entry.name, loaded_bytes(spec, tied), kept, kept)

    def _checkpoint(self, name: str, context: int) -> DraftNeed:
        path = catalog.located(name, home=self._config.home)
        if path is None:
            raise ConfigError(f"it is not on this machine; fetch it with: edgespec pull {name}")
        with open_weights(path) as weights:
            return self._standalone(name, weights, context)

    def _standalone(self, name: str, weights: WeightFile, context: int) -> DraftNeed:
        """Keys and values of one conversation count as the slot's."""
        positions, size = min(context, weights.spec.max_positions), self.footprint(weights)
        return DraftNeed(name, size.slot(positions), further=size.cache(positions))


def policy_problems(config: RuntimeConfig, plan: MemoryPlan) -> list[str]:
    """Why a policy that was asked for cannot work with these drafts; nothing if it can."""
    from predictor.costs import CostTable
    from predictor.load import BatchCosts, make_load_planner
    from predictor.policies import make_policy

    try:
        make_policy(config.policy, CostTable(), [d.name for d in plan.drafts if d.slot], capacity=plan.slots)
    except ValueError as error:
        return [str(error)]
    try:
        make_load_planner(config.load_policy, BatchCosts.guessed(CostTable()), CostTable())
    except ValueError as error:
        return [str(error)]
    return []


def _row(row: Row) -> dict[str, Any]:
    return {**asdict(row), "fits": row.fits}


def summary(report: PlanReport) -> str:
    """The plan in one line."""
    plan = report.plan
    parts = f"{format_bytes(plan.total)} planned of a budget of {format_bytes(plan.budget)}"
    held = sum(draft.slot > 0 for draft in plan.drafts)
    if not held:
        return f"{parts}; no drafts with weights"
    return f"{parts}; {plan.slots} of {held} drafts with weights in memory at once (K = {plan.slots})"


def show(report: PlanReport, output: Output) -> None:
    """Print the plan as tables: the parts, the drafts, and what to change."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    plan = report.plan
    name = f"{report.topology.name}, " if report.topology.name else ""
    output.line()
    output.line(f"Memory plan ({name}{MEMORY[report.topology.kind]}, {format_bytes(report.available)} free now)")
    parts = Table("part", "needs", "fits", "left of the budget", box=box.ROUNDED)
    drafts = Table("draft", "needs", "fits a slot", "left of the slot", box=box.ROUNDED)
    parts.add_row("budget", "", "", format_bytes(plan.budget))
    tables = [(parts, plan.rows()), (drafts, plan.draft_rows())]
    if report.serving is not None:
        several = Table("several requests at once", "needs", "fits", "left of the budget", box=box.ROUNDED)
        tables.append((several, report.serving.rows()))
    for table, rows in tables:
        for row in rows:
            left = format_bytes(row.left) if row.fits else f"{format_bytes(-row.left)} missing"
            table.add_row(row.part, format_bytes(row.nbytes), "yes" if row.fits else "NO", left)
    console = Console(file=None, width=_WIDTH, record=False, color_system=None)
    for table, _rows in tables:
        if table.row_count:
            with console.capture() as captured:
                console.print(table)
            for line in captured.get().splitlines():
                output.line(line)
    for line in [*_remarks(report), *plan.advice(), *([] if report.serving is None else report.serving.advice())]:
        output.line(f"- {line}")


def _remarks(report: PlanReport) -> Iterator[str]:
    """What the tables do not say of themselves."""
    yield from report.hints
    heads = any(draft.slot and draft.always for draft in report.plan.drafts)
    if heads:
        yield (
            "a loaded draft takes several times its file: its part of the target's tables is laid out for it, and "
            "ONNX Runtime keeps copies of its weights"
        )
    for part, nbytes in report.host.items():
        yield f"{part} take {format_bytes(nbytes)} of the host's memory, beside this plan"
    if heads and report.topology.kind == "discrete":
        yield "small drafts (heads) run on the CPU: their slots lie in the host's memory, but count here all the same"
