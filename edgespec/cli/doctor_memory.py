"""The memory plan of `edgespec doctor`: from the configured model and drafts, by headers and manifests alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from edgespec import catalog, loading
from edgespec.cli.terminal import Output
from edgespec.draft_loading import sources
from edgespec.errors import ConfigError, EdgespecError
from edgespec.memory import topology
from edgespec.memory.budget import format_bytes, parse_budget
from edgespec.memory.plan import DraftNeed, MemoryPlan, Row
from edgespec.models.build import planned_bytes
from edgespec.models.weights import WeightFile, open_weights
from edgespec.serving.memory import ServingNeed, fitted

if TYPE_CHECKING:
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
        return [
            Row(f"graph for batches of {need.slots}", need.batch, left + need.drafts),
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
    """A plan with what it was made from. notes: drafts that are not in it, and why."""

    plan: MemoryPlan
    topology: topology.Topology
    available: int
    notes: tuple[str, ...] = ()
    serving: Serving | None = None

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
            "fits": plan.fits,
            "serving": None if self.serving is None else [_row(row) for row in self.serving.rows()],
            "advice": plan.advice() + ([] if self.serving is None else self.serving.advice()),
            "notes": list(self.notes),
        }


def plan_of(config: RuntimeConfig) -> PlanReport | None:
    """The memory plan of these settings; None if the model is not on this machine. Raises EdgespecError."""
    facts, path = loading.target_facts(config), catalog.located(config.model, home=config.home)
    if facts is None or path is None:
        return None
    there = topology.detect(loading.device_of(config))
    available = there.available_bytes()
    budget = min(parse_budget(config.memory_budget, there), available)
    with open_weights(path) as weights:
        spec = weights.spec
        target, position = _weight_bytes(weights, config), loading.position_bytes(spec)
        workspace = loading.WORKSPACE
        context = config.context or loading.fitting_context(config, spec, budget - target - workspace)
        needs, notes = _draft_needs(config, facts, context, spec.tie_embeddings)
    plan = MemoryPlan(target, workspace, context, position, needs, budget, config.resident)
    return PlanReport(plan, there, available, tuple(notes), _serving(config, plan))


def _serving(config: RuntimeConfig, plan: MemoryPlan) -> Serving | None:
    """None for a plan that does not fit without it."""
    if not plan.fits:
        return None
    further = sum(draft.further for draft in plan.drafts) if plan.slots else 0
    sizes = {"weights": plan.target, "context": plan.context, "position": plan.position}
    need = fitted(config, **sizes, room=plan.left, further=further)
    return Serving(config.max_sessions, need, plan.left - need.total, plan.position)


def _draft_needs(
    config: RuntimeConfig, facts: TargetFacts, context: int, tied: bool
) -> tuple[list[DraftNeed], list[str]]:
    """What each draft takes, each once, and what cannot be said."""
    needs: dict[str, DraftNeed] = {}
    notes = []
    for source in sources(config, facts):
        name = source if isinstance(source, str) else source.name
        if name == "ngram" or name in needs:
            continue
        try:
            need = _checkpoint(name, config, context) if isinstance(source, str) else _of(source, config, context, tied)
        except (EdgespecError, OSError) as error:
            notes.append(f"draft {name} is not in the plan: {error}")
            continue
        needs[name] = need
    return list(needs.values()), notes


def _of(entry: Entry, config: RuntimeConfig, context: int, tied: bool) -> DraftNeed:
    from drafts import zoo
    from drafts.head import conversation_bytes, loaded_bytes

    manifest = entry.manifest
    if manifest is None:
        raise ConfigError(entry.problem)
    if manifest.kind == "phrases":
        return DraftNeed(entry.name, always=manifest.nbytes)
    if manifest.kind == "standalone":
        with open_weights(entry.folder) as weights:
            return _standalone(entry.name, weights, config, context)
    spec = zoo.head_spec(manifest)
    kept = conversation_bytes(spec, manifest.target.vocab_size)
    return DraftNeed(entry.name, loaded_bytes(spec, tied), kept, kept)


def _checkpoint(name: str, config: RuntimeConfig, context: int) -> DraftNeed:
    path = catalog.located(name, home=config.home)
    if path is None:
        raise ConfigError(f"it is not on this machine; fetch it with: edgespec pull {name}")
    with open_weights(path) as weights:
        return _standalone(name, weights, config, context)


def _standalone(name: str, weights: WeightFile, config: RuntimeConfig, context: int) -> DraftNeed:
    """Keys and values of one conversation count as the slot's."""
    kept = min(context, weights.spec.max_positions) * loading.position_bytes(weights.spec)
    return DraftNeed(name, _weight_bytes(weights, config) + kept, further=kept)


def _weight_bytes(weights: WeightFile, config: RuntimeConfig) -> int:
    return planned_bytes(weights, loading.device_of(config), config.weight_format)


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
    return f"{parts}; K = {plan.slots} of {held} drafts in memory at once"


def show(report: PlanReport, output: Output) -> None:
    """Print the plan as tables: the parts, the drafts, and what to change."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    plan = report.plan
    there = report.topology
    name = f"{there.name}, " if there.name else ""
    output.line()
    output.line(f"Memory plan ({name}{there.kind} memory, {format_bytes(report.available)} free now)")
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
    for line in plan.advice() + ([] if report.serving is None else report.serving.advice()):
        output.line(f"- {line}")
