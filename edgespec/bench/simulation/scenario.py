"""One setting of a simulation: the device, how much of it drafts get, and the policy; and what a replay of it gives."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from drafts.figures import Bootstrap
from edgespec.bench.simulation.texts import Corpus, limited, ordered, shortened
from edgespec.bench.specbench.folder import PLAIN
from edgespec.errors import ConfigError
from predictor.costs import CostTable
from predictor.holding import TYPICAL_TOKENS
from predictor.planner import AutoPlanner
from predictor.policies import Policy, make_policy
from predictor.policies.base import LOOKUP
from predictor.policies.oracle import Foresight
from predictor.replay import Outcome, Replay, TextTrace, World, replay
from predictor.traces import TraceHeader

LOOKUP_SECONDS = 1e-5  # of asking a draft without weights, measured to 7 microseconds
SLOW_DOWN = 1.1  # of rounds beside a load; as measured on two cores
WINDOW = 256  # of heads; a standalone draft reads everything
OVERHEAD = 3e-4  # seconds of a round besides drafts and target
_WITH_INTERVAL = (
    "mab-sync", "mab-async", "ucbspec", "exp3spec", "hedge", "nightjar", "memspec", "oracle-static", "oracle-dynamic",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What is varied. None leaves a value as the costs have it.

    load_ratio: seconds of a load in plain steps. draft_cost: of a draft's step in plain steps. interval: rounds between
    scheduling points. new_tokens: longest answer. steepness: times the price of further tokens in a forward. ranked:
    whether there is a ranker. prefetch: see `World`.
    """

    policy: str = PLAIN
    resident: int = 2
    load_ratio: float | None = None
    draft_cost: float | None = None
    interval: int | None = None
    new_tokens: int | None = None
    steepness: float = 1.0
    order: str = "interleaved"
    seed: int = 0
    ranked: bool = True
    prefetch: bool = True


@dataclass(frozen=True)
class Base:
    """What all settings of a run share. costs: the device's. limit: texts of each domain. overhead: of a round besides
    drafts and target; what a policy takes to plan and to learn counts only as far as it is in there. window: tokens
    that a draft looks back at most. max_new_tokens: the limit that the answers had (None = as recorded)."""

    corpus: Corpus
    costs: CostTable
    limit: int | None = None
    slow_down: float = SLOW_DOWN
    overhead: float = OVERHEAD
    window: int = WINDOW
    max_new_tokens: int | None = None


def trace_costs(corpus: Corpus) -> CostTable:
    """Seconds as measured when the texts were recorded. Raises ConfigError if they were not, or are damaged."""
    costs = corpus.costs
    if not costs.get("verify"):
        raise ConfigError("The traces have no measured costs; give a --device-profile or --costs FILE.")
    try:
        return CostTable.from_json({**costs, "loads": costs.get("load_seconds", {})})
    except ValueError as error:
        raise ConfigError(
            f"The measured costs of the traces are damaged ({error}); give a --device-profile or --costs FILE."
        ) from error


def adjusted(costs: CostTable, setting: Setting, names: Sequence[str], free: Sequence[str]) -> CostTable:
    """The costs under a setting."""
    data = costs.to_json()
    plain = costs.verify(1)
    if setting.steepness != 1.0:
        widths = range(1, 18)
        data["verify"] = {str(w): plain + setting.steepness * (costs.verify(w) - plain) for w in widths}
    drafts = dict(data["drafts"])
    if setting.draft_cost is not None:
        drafts.update(dict.fromkeys(names, setting.draft_cost * plain))
    for name in (*free, LOOKUP):
        drafts.setdefault(name, LOOKUP_SECONDS)
    data["drafts"] = drafts
    if setting.load_ratio is not None:
        data["loads"] = dict.fromkeys(names, setting.load_ratio * plain)
    return CostTable.from_json(data)


def world(base: Base, setting: Setting) -> World:
    """The device of a replay under a setting."""
    corpus = base.corpus
    names, weighted = corpus.header.names, corpus.weighted
    costs = adjusted(base.costs, setting, weighted, sorted(corpus.free))
    limit = base.max_new_tokens or corpus.header.max_new_tokens
    made = World(
        names,
        costs,
        min(setting.resident, len(weighted)),
        free=corpus.free,
        resident=weighted[: setting.resident],
        slow_down=base.slow_down,
        prefill=costs.verify(16) / 16,
        overhead=base.overhead,
        window=base.window,
        max_new_tokens=min(limit, setting.new_tokens or limit),
        typical_tokens=TYPICAL_TOKENS,
        interval=setting.interval or 0,
        prefetch=setting.prefetch,
    )
    if setting.policy == LOOKUP:  # an engine that has no other draft
        return replace(made, names=(), free=frozenset(), capacity=0, resident=())
    return made


def texts(base: Base, setting: Setting) -> tuple[TextTrace, ...]:
    """The texts of a setting, in its order."""
    chosen = ordered(limited(base.corpus.texts, base.limit), setting.order, setting.seed)
    if setting.new_tokens is None:
        return chosen
    return tuple(shortened(text, max(setting.new_tokens, 2)) for text in chosen)


def spec(setting: Setting) -> str:
    """The policy with the setting's interval, where it has an option for it. Lookup alone is left to our planner."""
    if setting.policy == LOOKUP:
        return "edgespec"
    name = setting.policy.split("@")[0].split(":")[0].split(",")[0]
    given = any(part.startswith("n=") for part in setting.policy.split(",")[1:])
    if setting.interval is None or name not in _WITH_INTERVAL or given:
        return setting.policy
    return f"{setting.policy},n={setting.interval}"


def policy_for(
    spec: str, costs: CostTable, header: TraceHeader, *, capacity: int, ahead: Foresight, seed: int = 0
) -> Policy:
    """The policy that a spec names, for recorded texts. Raises ConfigError for one that cannot be made, or that wants
    longer blocks than were recorded."""
    free = [draft.name for draft in header.drafts if draft.free]
    weighted = [draft.name for draft in header.drafts if not draft.free]
    try:
        policy = make_policy(
            spec, costs, weighted, capacity=capacity, trace=ahead, seed=seed, gamma_max=header.gamma_max,
            free=(*free, LOOKUP),
        )  # fmt: skip
    except ValueError as error:
        raise ConfigError(f"{error}.") from error
    gamma = max(getattr(policy, "gamma", 0), getattr(policy, "gamma_max", 0))
    if gamma > header.gamma_max:
        raise ConfigError(
            f"{spec} proposes {gamma} tokens, and blocks of at most {header.gamma_max} were recorded: "
            f"take a gamma up to that, or record with a longer one."
        )
    return policy


def simulate(base: Base, setting: Setting) -> Outcome:
    """Replay the setting. Raises ConfigError for a policy that cannot be made."""
    device, corpus = world(base, setting), base.corpus
    header = corpus.header if device.names else replace(corpus.header, drafts=())

    def make(costs: CostTable, ahead: Replay) -> Policy:
        policy = policy_for(spec(setting), costs, header, capacity=device.capacity, ahead=ahead, seed=setting.seed)
        if isinstance(policy, AutoPlanner):
            for draft in header.drafts:
                if not draft.free and draft.expected is not None:
                    policy.expect(draft.name, draft.expected)
        return policy

    return replay(make, texts(base, setting), device, corpus.rankings if setting.ranked and device.capacity else None)


def row_of(setting: Setting, found: Outcome, plain: Outcome) -> dict[str, Any]:
    """Everything about one replay, as JSON values; speed-ups are seconds of `plain` over seconds, same texts."""
    mine, theirs = [text.seconds for text in found.texts], [text.seconds for text in plain.texts]
    bootstrap = Bootstrap("simulation", len(mine), 0)
    low, high = bootstrap.interval(bootstrap.ratios(theirs, mine))
    domains = Counter(sorted(text.domain for text in found.texts))
    return {
        **asdict(setting),
        "texts": len(found.texts),
        "tokens": found.tokens,
        "seconds": found.seconds,
        "rounds": found.rounds,
        "tokens_per_second": found.speed,
        "speedup": plain.seconds / found.seconds,
        "low": low,
        "high": high,
        "by_domain": {name: found.domain_speed(name) / plain.domain_speed(name) for name in domains},
        "texts_by_domain": dict(domains),
        "tokens_per_round": found.tokens / max(found.rounds, 1),
        "fallback_share": found.fallback_share,
        "loads": found.loads,
        "cancelled": found.cancelled,
        "switches": found.switches,
        "load_seconds_hidden": found.hidden_seconds,
        "load_seconds_exposed": found.exposed_seconds,
        "shadow_seconds": found.shadow_seconds,
        "catch_up_seconds": found.catch_up_seconds,
        "draft_share": dict(sorted(found.share.items(), key=lambda entry: -entry[1])),
        "gamma_histogram": {str(gamma): rounds for gamma, rounds in sorted(found.gammas.items())},
    }


def baseline(setting: Setting) -> Setting:
    """Plain decoding of the same texts on the same device: what is not about drafts."""
    return replace(
        Setting(), order=setting.order, seed=setting.seed, new_tokens=setting.new_tokens, steepness=setting.steepness
    )


def costs_from(text: str, names: Sequence[str], free: Collection[str] = ()) -> CostTable:
    """A table of costs from JSON, as `edgespec` keeps them. Raises ValueError for what is none, or does not say what a
    step of each of these drafts takes.

    Steps filed under an architecture, if it is the only one, serve the drafts that are not named.
    """
    data: Mapping[str, Any] = json.loads(text)
    table = CostTable.from_json(data)
    missing = [name for name in names if name not in data["drafts"]]
    if not missing:
        return table
    others = sorted(set(data["drafts"]) - {*names, *free, LOOKUP})
    if len(others) != 1:
        told = f"its {', '.join(others)} may be any of them" if others else "nor one of an architecture"
        raise ValueError(f"it has no step of {', '.join(missing)}, {told}")
    for name in missing:
        table.file_under(name, others[0])
    full = table.to_json()
    readers: Mapping[str, Callable[[str], float]] = {
        "drafts": table.draft, "loads": table.load, "catch_up": lambda name: table.catch_up(name, 1),
    }  # fmt: skip
    for key, seconds in readers.items():
        full[key] = full.get(key, {}) | {name: seconds(name) for name in missing}
    return CostTable.from_json(full)
