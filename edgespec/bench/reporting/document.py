"""From run folders to the report's document: every figure that is shown anywhere, as JSON values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

from edgespec.bench.reporting import merge
from edgespec.bench.reporting.counters import counters, draft_counts, empty_share, parts_exceed_total
from edgespec.bench.reporting.definitions import DEFINITIONS
from edgespec.bench.reporting.draft_map import draft_map
from edgespec.bench.reporting.equality import equality, unstable
from edgespec.bench.reporting.pairs import Answers, Comparison, Part
from edgespec.bench.reporting.ratios import Ratios, least, whole
from edgespec.bench.reporting.series import by_question, memory, regret
from edgespec.bench.reporting.terminal import shown
from edgespec.bench.reporting.timeline import timelines
from edgespec.bench.specbench.folder import PLAIN, RunFolder
from edgespec.bench.summary import BUSY_SHARE, STALE_PROMPT_FACTOR
from edgespec.bench.words import are, counted, were

FORMAT = 1
_OF_THE_FILE = ("the same file", "the file's")  # how the weights begin that are those of the model's file


def build(folders: Sequence[RunFolder]) -> dict[str, Any]:
    """The document of these runs: settings, runs, definitions, and one part for each comparison.

    Raises ConfigError if the folders do not belong together, or a record holds what cannot be.
    """
    parts = merge.parts(folders)
    place = {id(run): number for number, run in enumerate(folders)}
    return {
        "format": FORMAT,
        "settings": _settings(folders),
        "runs": [_run(run) for run in folders],
        "definitions": DEFINITIONS,
        "parts": [part_figures(part, [place[id(run)] for run in part.runs]) for part in parts],
    }


def _settings(folders: Sequence[RunFolder]) -> dict[str, Any]:
    """What they have in common, and the policies of all."""
    found = {name: value for name, value in folders[0].settings.items() if name != "shard"}
    policies = [str(policy) for run in folders for policy in run.settings.get("policies") or ()]
    return {**found, "policies": list(dict.fromkeys(policies))} if policies else found


def _run(run: RunFolder) -> dict[str, Any]:
    return {
        "folder": shown(run.path.name),
        "machine": run.machine,
        "command": run.command,
        "started": run.started,
        "version": _version(run),
        "shard": run.settings.get("shard"),
        "questions": run.questions,
        "finished": run.finished,
        "skipped": run.skipped,
    }


def part_figures(part: Part, runs: Sequence[int]) -> dict[str, Any]:
    """All figures of one comparison. runs: which of the document's."""
    comparisons = {name: part.compare(name) for name in part.arms}
    ratios, common = Ratios(part), _common(comparisons)
    return {
        "machine": part.runs[0].machine,
        "runs": list(runs),
        "questions": len(part.questions),
        "asked": part.asked,
        "common": None if common is None else len(common),
        "by_task": _count(part, "task"),
        "by_category": _count(part, "category"),
        "by_domain": _count(part, "domain"),
        "arms": {name: arm_figures(part, arm, comparisons[name], ratios, common) for name, arm in part.arms.items()},
        "draft_map": draft_map(part, comparisons),
        "regret": regret(part, comparisons),
        "memory": memory(part),
        "time_lines": timelines(part),
        "by_question": by_question(part, comparisons),
        "warnings": _part_warnings(part, comparisons),
    }


def _count(part: Part, kind: str) -> dict[str, int]:
    return {name: sum(getattr(q, kind) == name for q in part.questions) for name in part.names(kind)}


def _common(comparisons: Mapping[str, Comparison]) -> set[str] | None:
    """Questions that all arms with any answer have, to compare arms with each other; None where none has others."""
    sets = [set(comparison.pairs) for name, comparison in comparisons.items() if comparison.pairs and name != PLAIN]
    common = set.intersection(*sets) if sets else set()
    return common if any(each != common for each in sets) else None


def arm_figures(
    part: Part, arm: Answers, comparison: Comparison, ratios: Ratios, common: set[str] | None = None
) -> dict[str, Any]:
    """Everything about one arm. Its counters are over the turns that count, every repeat.

    common: questions that all arms have, if some arm has others.
    """
    records = comparison.records()
    failures = [r for r in arm.records if r.error is not None]
    first = comparison.first_repeat()
    by_task = ratios.by(comparison, "task")
    domains = part.names("domain")
    return {
        "kind": arm.info.kind,
        "status": arm.info.status,
        "message": arm.info.message,
        "weights": arm.info.weights,
        "other_weights": _other_weights(arm, part.arms.get(PLAIN)),
        "speedup": ratios.of(comparison),
        "first_repeat": None if first is None else _with_least(first, ratios),
        "whole_turn": ratios.of(comparison, amounts=whole),
        "same_questions": None if common is None else ratios.of(comparison.over(common)),
        "by_task": by_task,
        "by_category": ratios.by(comparison, "category"),
        "least_task": least(by_task),
        "questions": {
            "counted": len(comparison.pairs),
            "failed": sorted(comparison.failed),
            "plain_failed": sorted(comparison.plain_failed - comparison.failed),
            "missing": _missing(part, arm, comparison),
        },
        "answers": len(records),
        "errors": [
            {"question": r.question_id, "category": r.category, "repeat": r.repeat, "turn": r.turn, "message": r.error}
            for r in failures
        ],
        **counters(records),
        "by_domain": {domain: _domain([r for r in records if r.domain == domain]) for domain in domains},
        "peak_memory_bytes": arm.info.peak_memory_bytes or max((r.rss_bytes for r in arm.records), default=0) or None,
        "equality": equality(part, arm.name),
        "warnings": _warnings(part, arm, comparison),
    }


def _with_least(comparison: Comparison, ratios: Ratios) -> dict[str, Any]:
    return {**ratios.of(comparison), "least_task": least(ratios.by(comparison, "task"))}


def _other_weights(arm: Answers, plain: Answers | None) -> bool:
    """Whether it computes with other weights than plain, as far as their words tell."""
    words = [one.info.weights for one in (arm, plain) if one is not None]
    if len(words) < 2 or not all(words):
        return False
    left, right = ("the file" if text.startswith(_OF_THE_FILE) else text.split(";")[0] for text in words)
    return left != right


def _domain(records: Sequence[Any]) -> dict[str, Any]:
    told = counters(records)
    drafts = draft_counts(records)
    total = sum(drafts.values())
    return {
        "acceptance_rate": told.get("acceptance_rate"),
        "tokens_per_round": told["tokens_per_round"],
        "draft_share": {name: count / total for name, count in drafts.items()},
    }


def _missing(part: Part, arm: Answers, comparison: Comparison) -> int:
    """Questions that this arm or plain has not answered, those that nobody was asked yet among them."""
    return len(comparison.missing - comparison.failed - comparison.plain_failed) + part.unasked(arm.name)


def _warnings(part: Part, arm: Answers, comparison: Comparison) -> list[str]:
    """What makes an arm's figures doubtful."""
    found = []
    sampled = float(part.runs[0].settings.get("temperature") or 0) > 0
    busy = [r for r in arm.records if (r.disturbance or 0.0) > BUSY_SHARE]
    if busy:
        share = f"{len(busy)} of {counted(len(arm.records), 'answer')}"
        most = max(r.disturbance or 0.0 for r in busy)
        found.append(f"other processes used more than {BUSY_SHARE:.0%} of the machine in {share}, at most {most:.0%}")
    broken = sum(parts_exceed_total(record) for record in arm.records if record.error is None)
    if broken:
        found.append(f"in {counted(broken, 'answer')} the parts of the time add up to more than the whole")
    drift = _later_over_first(comparison)
    if drift is not None and drift > STALE_PROMPT_FACTOR:
        found.append(f"the last repeat ran {drift:.2f} times as fast as the first: it is warmed up, or it remembers")
    empty = empty_share(comparison.records())
    if empty:
        found.append(
            f"its fallback share has the {empty:.1%} of rounds in it in which a draft proposed nothing, as earlier "
            "versions counted"
        )
    apart = comparison.apart()
    if apart:
        found.append(
            f"in {counted(len(apart), 'question')} plain was measured in another session (a --resume lies between), "
            "when the machine may have been faster or slower"
        )
    changed = [] if sampled else unstable(arm)
    if changed:
        count = counted(len(changed), "question")
        found.append(f"the answer to {count} changed from one repeat to another: {_some(changed)}")
    missing = _missing(part, arm, comparison)
    if missing and arm.info.status == "ok" and arm.records:
        share = f"{missing} of {counted(part.asked_of(arm.name), 'question')}"
        found.append(f"{share} {are(missing)} not answered (yet), by this arm or by plain")
    return found


def _later_over_first(comparison: Comparison) -> float | None:
    """Decode speed of the last repeat / of the first, over questions that have several."""
    first, last = [0.0, 0.0], [0.0, 0.0]
    for pairs in comparison.pairs.values():
        by_repeat = {pair.arm[0].repeat: pair.arm for pair in pairs}
        if len(by_repeat) > 1:
            for total, turns in ((first, by_repeat[min(by_repeat)]), (last, by_repeat[max(by_repeat)])):
                total[0] += sum(r.decode_tokens for r in turns)
                total[1] += sum(r.decode_s for r in turns)
    if not first[0] or not last[1]:
        return None
    return (last[0] / last[1]) / (first[0] / first[1])


def _part_warnings(part: Part, comparisons: dict[str, Comparison]) -> list[str]:
    found = []
    unfinished = [shown(run.path.name) for run in part.runs if not run.finished]
    if unfinished:
        found.append(f"not finished, --resume goes on with it: {', '.join(unfinished)}")
    found += _lacking({str(run.settings.get("shard") or "1/1") for run in part.runs})
    versions = {_version(run) for run in part.runs}
    if len(versions) > 1:
        found.append(f"the runs are of several versions of edgespec: {', '.join(sorted(versions))}")
    if len({merge.machine_key(run.machine) for run in part.runs}) > 1:
        found.append("the runs are of different machines: ratios pair arms of one machine, tokens a second mix them")
    held = sorted({str(run.machine["slots"]) for run in part.runs if "slots" in run.machine})
    if len(held) > 1:
        found.append(f"the runs held different numbers of drafts in memory: {', '.join(held)}")
    lines = ((one.get(name) for name in ("file", "line", "reason")) for run in part.runs for one in run.skipped)
    skipped = list(dict.fromkeys(f"{file}, line {line}: {reason}" for file, line, reason in lines))  # shards share them
    if skipped:
        count = f"{counted(len(skipped), 'line')} of the question files {were(len(skipped))} skipped"
        found.append(f"{count} ({skipped[0]}{'; the others are under Skipped lines' if len(skipped) > 1 else ''})")
    sets = {frozenset(c.pairs) for name, c in comparisons.items() if c.pairs and name != PLAIN}
    if len(sets) > 1:
        found.append("not every arm has the same questions: compare arms with each other by the column same N")
    if PLAIN not in part.arms or not comparisons[PLAIN].pairs:
        found.append("there is no answer of plain, so that there is nothing to compare with")
    return found


def _lacking(shards: Collection[str]) -> list[str]:
    """That shards of the run are not here, if so: "i/n" is an n-th of it."""
    counts = [shard.partition("/")[2] for shard in shards]
    if not all(count.isdecimal() and int(count) for count in counts):
        return []
    if sum(Fraction(1, int(count)) for count in counts) >= 1:
        return []
    here = ", ".join(sorted(shards))
    if len(set(counts)) > 1:
        return [f"the shards that are here ({here}) are not the whole run"]
    return [f"only {len(shards)} of {counts[0]} shards of the run {are(len(shards))} here: {here}"]


def _version(run: RunFolder) -> str:
    code = run.machine.get("code")
    return f"{run.version} (code {code})" if code else run.version


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (" ..." if len(names) > most else "")
