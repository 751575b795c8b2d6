"""`edgespec bench simulate`: policies over recorded texts, in seconds instead of hours."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgespec.bench.arguments import names, positive
from edgespec.bench.machine import this_command
from edgespec.bench.report import write_json
from edgespec.bench.reporting import terminal
from edgespec.bench.simulation import output, tables
from edgespec.bench.simulation.devices import Device, Size, profile_names, read_device, read_size
from edgespec.bench.simulation.ranges import Range, one_or_range, single
from edgespec.bench.simulation.scenario import Base, Setting, costs_from, policy_for, trace_costs
from edgespec.bench.simulation.sweep import OWN_POLICIES, SWEEPS, Ran, Sweep, run_all, sweep
from edgespec.bench.simulation.texts import ORDERS, Corpus, limited, read_corpus, read_header, with_drafts
from edgespec.bench.simulation.validate import check, doubts, same_drafts, validated
from edgespec.bench.specbench.arms import expanded, split_specs
from edgespec.bench.specbench.folder import PLAIN, read_run
from edgespec.bench.summary import BUSY_SHARE
from edgespec.bench.words import are, counted
from edgespec.errors import ConfigError
from predictor.costs import CostTable
from predictor.policies.base import LOOKUP
from predictor.policies.oracle import CHECK_ONLY
from predictor.traces import TraceHeader

HELP = "replay recorded texts under policies, device sizes and device profiles; no model runs"
DESCRIPTION = (
    "Replay texts of 'bench record --confidences' under any policies, oracles among them, with the policies' own code "
    "and the real ranker. Results say that they are simulated."
)
RANGES = "A range, as in --resident 1..3 or --load-ratio 0.5..8, is swept as by --sweep, from one end to the other."
POLICIES = "plain,memspec@3,mab-async@3,nightjar,edgespec,oracle-static,oracle-dynamic"
SWEPT = "mab-async@3,memspec@3,edgespec,oracle-dynamic"
INTERRUPTED = 130
RESIDENT = 2  # drafts in memory, as in the papers
EVERYTHING = 1 << 20  # tokens that a standalone draft may have to read


def add_arguments(parser: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """All arguments of the command. count: converts a whole number from 1 up."""
    parser.epilog = RANGES
    add, counts, numbers = parser.add_argument, one_or_range(count), one_or_range(positive)
    add("traces", nargs="+", metavar="TRACES", help="folders of 'bench record --confidences'")
    add("--policies", metavar="A,B", help=f"specs with , or ; between (docs/policies.md); {POLICIES}")
    add("--drafts", type=names, metavar="A,B", help="only these of the recorded drafts (all); lookup is always there")
    add("--resident", type=counts, default=RESIDENT, metavar="K", help=f"drafts in memory ({RESIDENT})")
    add("--load-ratio", type=numbers, metavar="R", help="seconds of a load, in plain steps")
    add("--draft-cost", type=numbers, metavar="F", help="seconds of a draft's step, in plain steps")
    add("--interval", type=counts, metavar="N", help="rounds between scheduling points, for all policies")
    add("--new-tokens", type=counts, metavar="N", help="longest answer (as recorded)")
    add("--order", choices=ORDERS, default="interleaved", help="of the texts (interleaved domains)")
    add("--seed", type=_seed, default=0, metavar="N", help="of a shuffled order, and of policies that draw lots")
    add("--limit", type=count, metavar="N", help="at most N texts of each domain, evenly spread")
    add("--ranker", metavar="FILE", help="a ranker's file, or off (the one that goes with the target)")
    add("--all-texts", action="store_true", help="also texts that the ranker was made with")
    add("--sweep", action="append", choices=list(SWEEPS), help="vary that, for each policy; may be repeated")
    add("--jobs", type=count, metavar="N", help="processes (one a core)")
    costs = parser.add_argument_group("costs (as measured when the texts were recorded, unless given)")
    which = costs.add_mutually_exclusive_group()
    which.add_argument("--costs", metavar="FILE", help="a table of measured seconds, as in EDGESPEC_HOME/costs")
    known = ", ".join(profile_names())
    which.add_argument("--device-profile", metavar="NAME", help=f"{known}, or a file like those")
    costs.add_argument("--model", metavar="NAME", help="the target on that device (qwen2.5-7b)")
    costs.add_argument("--draft-model", metavar="NAME", help="each draft on that device (qwen2.5-0.5b)")
    add("--validate", metavar="RUNDIR", help="compare with a run of 'bench specbench' on the same questions")
    add("--out", metavar="DIR", help=f"also write {', '.join(output.FILES)}")
    add("--json", action="store_true", help="print all figures as JSON")
    add("--debug", action="store_true", help="log in detail, and show a traceback when something fails")


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise argparse.ArgumentTypeError(f"wants a whole number from 0 up, not '{text}'")
    return int(text)


def run(args: argparse.Namespace, progress: Callable[[int], Any]) -> int:
    """Simulate and print; 130 after Ctrl-C. What is wrong with the arguments is said before any text is read."""
    if (args.model or args.draft_model) and not args.device_profile:
        raise ConfigError("--model and --draft-model are sizes on a device: give a --device-profile, too.")
    if args.validate and args.device_profile:
        raise ConfigError("--validate compares with what this run's machine did: leave out --device-profile.")
    profile = _Profile.of(args)
    start, ranges = _start(args, profile)
    if args.out:
        output.writable(Path(args.out))
    folders = [Path(folder) for folder in args.traces]
    measured = None if args.validate is None else read_run(args.validate)
    recorded = read_header(folders)
    header = with_drafts(recorded, args.drafts)
    if measured is not None:
        check(measured)
        same_drafts(measured, header.names, recorded.names)
    swept = list(dict.fromkeys([*(args.sweep or ()), *ranges]))
    wanted = _policies(args, header, recorded, start.resident, swept)
    corpus = read_corpus(folders, drafts=args.drafts, ranker=args.ranker, all_texts=args.all_texts)
    base = Base(corpus, _costs(args, corpus, profile), args.limit)
    if profile is not None:
        base = replace(base, slow_down=profile.device.slow_down, overhead=0.0, window=EVERYTHING)
    settings = [replace(start, policy=policy) for policy in wanted]
    sweeps = _sweeps(args, corpus, start, profile, {name: ranges.get(name) for name in swept})
    points = [setting for each in sweeps for _, _, setting in each.settings]
    try:
        ran = _replayed(base, settings + points, progress, args.jobs)
        validation = None if measured is None else validated(base, measured)
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED
    document = _document(args, base, start, profile, ran, sweeps, validation)
    if measured is not None and validation is not None:
        document["warnings"] += doubts(measured, validation)
    if args.out:
        output.publish(document, Path(args.out))
    if args.json:
        write_json(document, "-", sys.stdout.write)
    else:
        told = [*map(terminal.shown, [document["about"], *(f"Mind: {warning}" for warning in document["warnings"])])]
        told += map(terminal.text, tables.all_tables(document))
        told += filter(None, [tables.pace(document["replayed"])])
        print("\n\n".join(told))
    return 0


def _start(args: argparse.Namespace, profile: _Profile | None) -> tuple[Setting, dict[str, Range]]:
    """What holds where nothing is varied, and the ranges that are, by the name of their sweep."""
    ranges = {name: getattr(args, field) for name, (field, *_) in SWEEPS.items() if field}
    ranges = {name: value for name, value in ranges.items() if isinstance(value, Range)}
    resident = args.resident
    if isinstance(resident, Range):  # the usual number, or what is nearest to it
        room = resident.high if profile is None else min(resident.high, profile.slots)
        resident = int(min(max(RESIDENT, resident.low), room))
    start = Setting(
        resident=resident, load_ratio=single(args.load_ratio), draft_cost=single(args.draft_cost),
        interval=single(args.interval), new_tokens=single(args.new_tokens), order=args.order, seed=args.seed,
    )  # fmt: skip
    return start, ranges


def _replayed(base: Base, settings: Sequence[Setting], progress: Callable[[int], Any], jobs: int | None) -> Ran:
    with progress(len(set(settings)) + 1) as (tell, advance):
        tell("replaying")
        return run_all(base, settings, advance, jobs)


def _policies(
    args: argparse.Namespace, header: TraceHeader, recorded: TraceHeader, resident: int, swept: Sequence[str]
) -> list[str]:
    """The policies to compare, each checked by making it. With sweeps or --validate alone, none."""
    if args.policies is None:
        return [] if swept or args.validate else split_specs(POLICIES)
    wanted = expanded(split_specs(args.policies), [draft.name for draft in header.drafts if not draft.free])
    for policy in wanted:
        draft = policy.split("@")[0].split(",")[0].partition(":")[2]
        if draft in recorded.names and draft not in header.names:
            raise ConfigError(f"{policy}: --drafts leaves {draft} out; it has {', '.join(header.names)}.")
        if policy != LOOKUP:
            policy_for(policy, CostTable(), header, capacity=resident, ahead=CHECK_ONLY)
    return wanted


def _sweeps(
    args: argparse.Namespace,
    corpus: Corpus,
    start: Setting,
    profile: _Profile | None,
    wanted: Mapping[str, Range | None],
) -> list[Sweep]:
    """wanted: names of sweeps, and the range of each if it has one."""
    policies = expanded(split_specs(args.policies or SWEPT), corpus.weighted)
    policies = [policy for policy in policies if policy != PLAIN]
    longest = max(len(answer) for answer in corpus.answers.values())
    slots = len(corpus.weighted) if profile is None else min(len(corpus.weighted), profile.slots)
    return [sweep(name, policies, start, slots, longest, within) for name, within in wanted.items()]


class _Profile:
    """A device with a target and drafts on it."""

    def __init__(self, device: Device, target: Size, draft: Size) -> None:
        self.device, self.target, self.draft = device, target, draft

    @classmethod
    def of(cls, args: argparse.Namespace) -> _Profile | None:
        if args.device_profile is None:
            return None
        target, draft = read_size(args.model or "qwen2.5-7b"), read_size(args.draft_model or "qwen2.5-0.5b")
        made = cls(read_device(args.device_profile), target, draft)
        slots, wanted = made.slots, args.resident
        least = wanted.low if isinstance(wanted, Range) else wanted
        if slots < least:
            held = f"{counted(slots, 'draft')} of {draft.name}" if slots >= 0 else "not even the target"
            raise ConfigError(
                f"{made.device.name} has room for {held} beside {target.name}, not for --resident {least}."
            )
        return made

    @property
    def slots(self) -> int:
        """Drafts that fit beside the target; -1 = not even that."""
        return self.device.slots(self.target, self.draft)

    def to_json(self) -> dict[str, Any]:
        device, target, draft = self.device, self.target, self.draft
        return {
            "name": device.name,
            "target": target.name,
            "draft": draft.name,
            "verify_ms": {str(width): 1e3 * device.forward(target, width) for width in (1, 2, 4, 6, 8)},
            "draft_ms": 1e3 * device.forward(draft, 1),
            "load_ms": 1e3 * device.load(draft),
            "read_ms": 1e3 * device.reading(draft),
            "slots": self.slots,
        }


def _costs(args: argparse.Namespace, corpus: Corpus, profile: _Profile | None) -> CostTable:
    if profile is not None:
        return profile.device.costs(profile.target, profile.draft, corpus.weighted)
    if args.costs is None:
        return trace_costs(corpus)
    try:
        return costs_from(Path(args.costs).read_text(encoding="utf-8"), corpus.weighted, corpus.free)
    except OSError as error:
        raise ConfigError(f"{args.costs} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{args.costs} is no table of measured seconds: {error}.") from error


def _document(
    args: argparse.Namespace,
    base: Base,
    start: Setting,
    profile: _Profile | None,
    ran: Ran,
    sweeps: Sequence[Sweep],
    validation: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Everything, as JSON values."""
    corpus, rows = base.corpus, iter(ran.rows)
    policies = [next(rows) for _ in range(len(ran.rows) - sum(len(each.settings) for each in sweeps))]
    varied = [
        {
            "name": each.name,
            "title": each.title,
            "axis": each.axis,
            "note": each.note,
            "points": [{"value": value, "line": line, "row": next(rows)} for value, line, _ in each.settings],
        }
        for each in sweeps
    ]
    made = {"costs_of": _costs_of(args, profile), "rows": policies, "sweeps": varied, "validation": validation}
    doubtful = _of_setting(args, corpus, profile) if policies or sweeps else []
    return {
        "command": this_command(),
        "about": _about(made, corpus, len(limited(corpus.texts, args.limit)), start),
        "warnings": [*_warnings(args, corpus, profile, sweeps), *doubtful],
        "traces": [Path(folder).name for folder in args.traces],
        "target": dict(corpus.header.target),
        "drafts": list(corpus.weighted),
        "drafts_left_out": list(corpus.left_out),
        "seen_texts_left_out": corpus.seen,
        "costs": base.costs.to_json(),
        "device": None if profile is None else profile.to_json(),
        "replayed": {
            "rounds": ran.rounds,
            "seconds": ran.seconds,
            "processes": ran.jobs,
            "rounds_per_second": ran.rates,
        },
        **made,
    }


def _costs_of(args: argparse.Namespace, profile: _Profile | None) -> str:
    """Whose costs policies are replayed at."""
    if profile is not None:
        return f"costs of a model of {profile.device.name}"
    return "costs measured with the traces" if args.costs is None else f"costs of {Path(args.costs).name}"


def _about(document: Mapping[str, Any], corpus: Corpus, texts: int, start: Setting) -> str:
    """What was simulated. texts: how many are replayed."""
    seen = f" ({corpus.seen} that the ranker was made with are left out)" if corpus.seen else ""
    drafts = counted(len(corpus.weighted), "draft with weights", "drafts with weights")
    drafts += f" and {', '.join(sorted(corpus.free))}" if corpus.free else ""
    drafts += f" (without {', '.join(corpus.left_out)})" if corpus.left_out else ""
    measured, where = document["validation"], document["costs_of"]
    slots = _slots_told(document, min(start.resident, len(corpus.weighted)))
    if measured is not None and not document["rows"] and not document["sweeps"]:
        slots, where = str(min(measured["resident"], len(corpus.weighted))), "costs of the run"
        texts = measured["texts"]
    target = corpus.header.target.get("name", "a target")
    return f"Simulated. {counted(texts, 'text')}{seen} of {target}, {drafts}, {slots} in memory, {where}."


def _slots_told(document: Mapping[str, Any], usual: int) -> str:
    """How many drafts are in memory. usual: where that is not varied."""
    sweeps = document["sweeps"]
    values = [point["value"] for each in sweeps if each["name"] == "resident" for point in each["points"]]
    if not values or values[0] == values[-1]:
        return str(values[0] if values else usual)
    others = document["rows"] or len(sweeps) > 1
    return f"{values[0]} to {values[-1]}{f' ({usual} where that is not varied)' if others else ''}"


def _warnings(args: argparse.Namespace, corpus: Corpus, profile: _Profile | None, sweeps: Sequence[Sweep]) -> list[str]:
    found = []
    if profile is not None:
        found.append("The device is a roofline of numbers from data sheets; nothing was measured on one.")
        found.append(
            f"What is accepted was recorded with {corpus.header.target.get('name', 'another target')} and its drafts."
        )
    if corpus.rankings is None:
        found.append("There is no ranker for this target; policies that rank go by what they see.")
    if args.all_texts:
        found.append("Texts that the ranker was made with are among them: it looks better than it is.")
    own = [each.name for each in sweeps if each.name in OWN_POLICIES]
    if own and args.policies:
        found.append(f"--sweep {' and '.join(own)} compares policies of its own, not those of --policies.")
    most = args.resident.high if isinstance(args.resident, Range) else math.inf
    wanted = min(most, len(corpus.weighted))
    if profile is not None and profile.slots < wanted and any(each.name == "resident" for each in sweeps):
        found.append(f"Only {profile.slots} of {len(corpus.weighted)} drafts fit: the sweep of slots ends there.")
    return found


def _of_setting(args: argparse.Namespace, corpus: Corpus, profile: _Profile | None) -> list[str]:
    """What is doubtful about the slots and the costs that policies are replayed with."""
    found, wanted, held = [], args.resident, len(corpus.weighted)
    if (wanted.high if isinstance(wanted, Range) else wanted) > max(held, RESIDENT):  # nobody asked for the usual ones
        asked = f"{wanted.low:g}..{wanted.high:g}" if isinstance(wanted, Range) else wanted
        only = counted(held, "draft with weights", "drafts with weights")
        found.append(f"--resident {asked}: there {are(held)} only {only}, and no more can be in memory.")
    busy = corpus.costs.get("disturbance")
    if profile is None and args.costs is None and isinstance(busy, float) and busy > BUSY_SHARE:
        found.append(
            f"Other processes used {busy:.0%} of the machine while the costs of the traces were measured: what depends "
            "on them may be wrong. Record on an idle machine, or give --costs FILE."
        )
    return found
