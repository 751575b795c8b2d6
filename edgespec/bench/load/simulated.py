"""`--simulate`: the same arrivals in a world without clocks (`predictor.load.world`), and how true that is."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgespec.bench.load import document as documents
from edgespec.bench.load import output, preparing, tables
from edgespec.bench.load.arrivals import MAKE, POISSON
from edgespec.bench.load.compare import NONE
from edgespec.bench.load.folder import COSTS, Folder, read
from edgespec.bench.load.measures import Deadline
from edgespec.bench.load.prompts import Pool
from edgespec.bench.load.records import Sample, Served, Stretch
from edgespec.bench.load.running import tell
from edgespec.bench.load.schedule import Capacity, Schedule, Turn, seed_of
from edgespec.bench.load.system import Arm
from edgespec.bench.model import PromptEncoder
from edgespec.errors import ConfigError
from predictor.costs import CostTable
from predictor.load.costs import BatchCosts
from predictor.load.making import make_load_planner
from predictor.load.world import Batch, Job, World

GAMMA_MAX = 8
WITHIN = 0.1  # of measured throughput: what counts as agreeing
_DRAFT = "draft"
_OPEN_LOAD = {"simulated", "arms", "rates", "deadline", "settings", "conditions", "table"}  # of a load.json

Progress = Callable[[int], Any]


@dataclass(frozen=True)
class Costs:
    """Measured seconds. guessed: they are not."""

    batch: BatchCosts
    drafts: CostTable
    guessed: bool = False

    @classmethod
    def read(cls, path: Path) -> Costs:
        """Raises ConfigError."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            return cls(BatchCosts.from_json(data["batch"]), CostTable.from_json(data["drafts"]))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no table of measured seconds of 'bench load': {error}.") from error

    @classmethod
    def of_nothing(cls) -> Costs:
        drafts = CostTable()
        return cls(BatchCosts.guessed(drafts), drafts, guessed=True)

    def serving(self, names: Iterable[str]) -> Costs:
        """With the seconds of these drafts as well. A run files those of drafts with weights under architectures; who
        has no entry gets the usual architecture's (the middle one)."""
        table = self.drafts.to_json()
        filed = [name for name in table["drafts"] if name in table.get("catch_up", {})]
        lacking = [name for name in names if name not in table["drafts"]]
        if not filed or not lacking:
            return self
        usual = sorted(filed, key=table["drafts"].__getitem__)[(len(filed) - 1) // 2]
        for seconds in table.values():
            if usual in seconds:
                seconds.update(dict.fromkeys(lacking, seconds[usual]))
        return replace(self, drafts=CostTable.from_json(table))

    def copy(self) -> Costs:
        """For a planner, which learns."""
        return Costs(BatchCosts.from_json(self.batch.to_json()), CostTable.from_json(self.drafts.to_json()))


class Worlds:
    """One world for every arm; what a planner learned stays from stretch to stretch, as in an engine."""

    def __init__(self, costs: Costs, max_sessions: int, kv_tokens: int | None, seed: int) -> None:
        self._costs, self._max, self._kv, self._seed = costs, max_sessions, kv_tokens, seed
        self._worlds: dict[str, World] = {}

    def world(self, planner: str) -> World:
        if planner not in self._worlds:
            known = self._costs.copy()
            made = make_load_planner(planner, known.batch, known.drafts, gamma_max=GAMMA_MAX, seed=self._seed)
            self._worlds[planner] = World(
                made, self._costs.batch, self._costs.drafts, max_sessions=self._max, kv_tokens=self._kv,
                gamma_max=GAMMA_MAX, seed=self._seed,
            )  # fmt: skip
        return self._worlds[planner]

    def stretch(self, turn: Turn, jobs: Mapping[int, Job], schedule: Schedule) -> Stretch:
        """One load of one arm. jobs: by the number of the request."""
        numbers = sorted(jobs, key=lambda number: jobs[number].time)
        result = self.world(turn.arm.planner).run([jobs[number] for number in numbers], until=schedule.limit_s)
        stretch = Stretch(turn.arm.name, turn.rate, turn.repeat, turn.order, schedule.seconds, schedule.warm_up)
        for number, done in zip(numbers, result.requests):
            finished = None if math.isnan(done.finished) else done.finished
            stretch.served.append(
                Served(
                    number, "", done.time, jobs[number].prompt, submitted=done.time, finished=finished,
                    outcome="unfinished" if finished is None else "finished", pieces=list(done.pieces),
                )
            )  # fmt: skip
        stretch.samples = [_sample(batch) for batch in result.batches]
        stretch.ended = result.seconds
        return stretch

    def capacity(self, jobs: Sequence[Job]) -> Capacity:
        """Of plain decoding with every place taken."""
        crowd = [job._replace(time=0.0) for job in jobs[: 4 * self._max]]
        result = World(
            make_load_planner(NONE, *_both(self._costs.copy())), self._costs.batch, self._costs.drafts,
            max_sessions=self._max, keep_batches=False,
        ).run(crowd)  # fmt: skip
        return Capacity(result.throughput, sum(job.new for job in crowd) / len(crowd))


def _both(costs: Costs) -> tuple[BatchCosts, CostTable]:
    return costs.batch, costs.drafts


def _sample(batch: Batch) -> Sample:
    gamma = sum(batch.lengths) / len(batch.lengths) if batch.lengths else None
    return Sample(
        batch.time + batch.seconds, batch.seconds, batch.sequences, batch.rows, batch.queued, gamma, batch.drafted,
        batch.accepted, batch.emitted, None, None, "",
    )  # fmt: skip


def run(args: argparse.Namespace, planners: Sequence[str], progress: Progress) -> int:
    """Simulate and report; nothing of it is measured, and everything says so."""
    if args.arms_elastic != "on":
        raise ConfigError("--elastic is of live runs: a simulated world has no drafts' memory to lend.")
    out = Path(args.out).expanduser()
    config = preparing.config_of(args, out)
    if args.validate is not None:
        return _validate(args, config, out, progress)
    schedule = preparing.schedule_of(args, args.planners or planners)
    costs = Costs.of_nothing() if args.costs is None else Costs.read(Path(args.costs).expanduser()).serving([_DRAFT])
    pool, skipped = _pool(args, config)
    worlds = Worlds(costs, config.max_sessions, None, args.seed)
    sample = _jobs_of(pool, schedule, 1.0, 0, args.acceptance, seconds=4.0 * config.max_sessions)
    schedule = replace(schedule, limit_s=math.inf).settled(worlds.capacity(list(sample.values())))
    schedule = replace(schedule, limit_s=preparing.limit_of(args))
    folder = Folder(out)
    stretches = []
    with progress(schedule.stretches) as (say, advance):
        for turn in schedule.turns():
            say(f"{turn.arm.name} at {turn.rate:g} requests/s")
            jobs = _jobs_of(pool, schedule, turn.rate, turn.repeat, args.acceptance)
            stretches.append(worlds.stretch(turn, jobs, schedule))
            folder.keep(stretches[-1])
            advance(1)
    about = preparing.about(args, config, "Simulated serving under load", skipped) | _simulated(costs)
    about["settings"]["acceptance"] = args.acceptance
    return _publish(args, documents.build(schedule, stretches, args.deadline, about), folder)


def _simulated(costs: Costs) -> dict[str, Any]:
    machine = "Simulated: " + ("seconds are guessed." if costs.guessed else "with measured seconds of forwards.")
    return {"simulated": True, "machine": machine}


def _publish(args: argparse.Namespace, document: dict[str, Any], folder: Folder) -> int:
    document["headline"] = output.headline(document)
    output.publish(document, folder)
    folder.close()
    tell(args, document, tables.short(document))
    return 0


def _pool(args: argparse.Namespace, config: Any) -> tuple[Pool, Any]:
    """Prompts as token ids, by the model's tokenizer alone."""
    from edgespec import catalog

    encoder = PromptEncoder(Path(catalog.resolve(config.model, home=config.home)))
    return preparing.read_pool(args, encoder.chat, config.context or 1 << 20)


def _jobs_of(
    pool: Pool, schedule: Schedule, rate: float, repeat: int, acceptance: float, seconds: float | None = None
) -> dict[int, Job]:
    """A job for every request; each answer is as long as it may be."""
    place = schedule.rates.index(rate) if rate in schedule.rates else 0
    at_rate = replace(schedule, rates=schedule.rates or (rate,), seconds=seconds or schedule.seconds)
    arrivals = at_rate.arrivals(at_rate.rates[place], repeat)
    asks = pool.asks(arrivals, seed_of(schedule.seed, place, repeat))
    rates = [acceptance] * GAMMA_MAX
    return {ask.number: Job(ask.at, len(ask.ids), ask.new, _DRAFT, rates) for ask in asks}


# Beside a measured run


def _validate(args: argparse.Namespace, config: Any, out: Path, progress: Progress) -> int:
    """The measured run's requests, texts and costs; its throughput beside the simulated one."""
    measured_at = Path(args.validate).expanduser()
    measured, stretches = read(measured_at)
    if not isinstance(measured, dict) or not measured.keys() >= _OPEN_LOAD or not stretches:
        raise ConfigError(f"{measured_at} has no open load with a finished stretch: --sessions and --soak are none.")
    if measured["simulated"]:
        raise ConfigError(f"{measured_at} was simulated itself: give the folder of a measured run.")
    costs = Costs.read(Path(args.costs).expanduser() if args.costs else measured_at / COSTS)
    arms = tuple(Arm(name) for name in measured["arms"] if not name.endswith(" pinned"))
    first, kind = stretches[0], measured["settings"].get("arrivals")
    schedule = Schedule(
        arms, tuple(measured["rates"]), max(s.repeat for s in stretches) + 1, first.seconds, first.warm_up,
        max(s.ended for s in stretches), math.inf, kind=kind if kind in MAKE else POISSON,
    )  # fmt: skip
    places = {(s.rate, s.repeat) for s in stretches}
    jobs = {place: jobs_of([s for s in stretches if (s.rate, s.repeat) == place]) for place in places}
    costs = costs.serving({str(job.draft) for of_place in jobs.values() for job in of_place.values()})
    worlds = Worlds(costs, int(measured["settings"]["max sessions"]), None, args.seed)
    made = []
    turns = [turn for turn in schedule.turns() if (turn.rate, turn.repeat) in places]
    folder = Folder(out)
    with progress(len(turns)) as (say, advance):
        for turn in turns:
            say(f"{turn.arm.name} at {turn.rate:g} requests/s")
            made.append(worlds.stretch(turn, jobs[turn.rate, turn.repeat], schedule))
            folder.keep(made[-1])
            advance(1)
    limit = measured["deadline"]
    about = preparing.about(args, config, "Simulated serving under load", ()) | _simulated(costs)
    about |= {"conditions": measured["conditions"], "settings": measured["settings"]}
    document = documents.build(schedule, made, Deadline(limit["ttft_s"], limit["tpot_s"]), about)
    document["validation"] = compared(measured, document)
    return _publish(args, document, folder)


def jobs_of(stretches: Sequence[Stretch]) -> dict[int, Job]:
    """What the requests of one rate and repeat were, from all arms that answered them: the longest answer, the draft
    that most rounds used, and how often its guesses stood at each place."""
    by_number: dict[int, list[Served]] = {}
    for one in (one for stretch in stretches for one in stretch.served):
        by_number.setdefault(one.number, []).append(one)
    usual = _rates([one for served in by_number.values() for one in served])
    longest = max((one.tokens for served in by_number.values() for one in served), default=1)
    found = {}
    for number, served in by_number.items():
        whole = [one.tokens for one in served if one.outcome == "finished"]
        used: Counter[str] = Counter()
        for one in served:
            used.update({name: count for name, count in one.drafts.items() if name != "plain"})
        draft = used.most_common(1)[0][0] if used else _DRAFT
        prompt = min(max(one.prompt_tokens - one.reused_tokens, 1) for one in served)
        found[number] = Job(served[0].at, prompt, max(whole, default=longest), draft, _rates(served, usual))
    return found


def _rates(served: Sequence[Served], usual: Sequence[float] = ()) -> list[float]:
    """By place: the share of guesses that stood of those that reached it; where too few did, as usual, or as before."""
    rates: list[float] = []
    for place in range(GAMMA_MAX):
        reached = sum(one.reached[place] for one in served if place < len(one.reached))
        stood = sum(one.stood[place] for one in served if place < len(one.stood))
        before = usual[place] if place < len(usual) else rates[-1] if rates else 0.5
        rates.append((stood + 4 * before) / (reached + 4))
    return rates


def compared(measured: Mapping[str, Any], simulated: Mapping[str, Any]) -> dict[str, Any] | None:
    """Throughput of each rate and arm that both have."""
    rows = []
    for entry in simulated["table"]:
        other = tables.place(measured, entry["rate"], entry["arm"])
        if other is None or other["throughput"]["value"] is None or entry["throughput"]["value"] is None:
            continue
        real, made = other["throughput"]["value"], entry["throughput"]["value"]
        row = {"rate": entry["rate"], "arm": entry["arm"], "measured": real, "simulated": made}
        rows.append(row | {"error": made / real - 1})
    if not rows:
        return None
    return {
        "rows": rows,
        "within": WITHIN,
        "agree": sum(abs(row["error"]) <= WITHIN for row in rows),
        "mean_error": sum(row["error"] for row in rows) / len(rows),
    }
