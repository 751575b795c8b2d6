"""Does a simulation say what a run measured? Speed-ups side by side, on the same questions, with the run's own costs.

The costs are taken from policies that always do the same, so that each is a mean of measured seconds: plain steps
give a forward over one token, `static:<draft>@g` one over g + 1 tokens, the step of the draft, its reading, and what
a round costs besides. Those arms are fitted: that they agree proves nothing. Policies that choose are predicted; of
their own seconds only those of planning are taken.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drafts.figures import LEAST_FOR_INTERVAL
from edgespec.bench.reporting.pairs import Part, sums
from edgespec.bench.simulation.scenario import LOOKUP_SECONDS, Base, Setting, row_of, simulate
from edgespec.bench.simulation.texts import Corpus, shortened
from edgespec.bench.specbench.folder import PLAIN, Record, RunFolder
from edgespec.bench.words import counted
from edgespec.errors import ConfigError
from predictor.costs import CostTable
from predictor.policies.base import LOOKUP
from predictor.replay import TextTrace

WITHIN = 0.05  # the goal: simulated and measured speed-up agree within 5%
_STATIC = re.compile(r"static:(?P<draft>[^@,]+)@(?P<gamma>\d+)(,.*)?")
_COUNTED = ("rounds", "target_seconds", "draft_seconds", "catch_up_seconds", "predictor_seconds")


@dataclass(frozen=True)
class Matched:
    """Turns of a run that were recorded, too, and that all its policies answered with that very text.

    texts: in the run's order. run: with these policies and turns only.
    """

    texts: tuple[TextTrace, ...]
    run: RunFolder


Turn = tuple[str, int]  # question, turn


def check(run: RunFolder) -> None:
    """ConfigError for a run of which no costs can be made: seen before anything is replayed."""
    if not any(_STATIC.fullmatch(arm) and run.records.get(arm) for arm in run.arms):
        raise ConfigError(
            f"The run in {run.path} has no answers of a static:DRAFT@GAMMA, and drafts' seconds are made of them. "
            "Take a run of 'bench specbench' with static or all-statics among its --policies (static is, by default)."
        )


def same_drafts(run: RunFolder, replayed: Collection[str], recorded: Collection[str]) -> None:
    """ConfigError for a run whose policies had other drafts to choose from than are replayed.

    recorded: all that the traces have. A run that does not say which it had is taken as it is.
    """
    had = run.settings.get("draft_fingerprints")
    if not isinstance(had, Mapping) or not had or set(had) == set(replayed):
        return
    lacking = [name for name in had if name not in recorded]
    if lacking:
        raise ConfigError(
            f"The run in {run.path} had {', '.join(lacking)}, which these traces lack: run 'bench record' with the "
            "drafts of the run."
        )
    raise ConfigError(f"The run in {run.path} had other drafts than are replayed here: give --drafts {','.join(had)}.")


def matched(corpus: Corpus, run: RunFolder) -> Matched:
    """The run's turns whose prompt and answer are those of a recorded text. Raises ConfigError if there are none.

    Other engines take no part: their texts are their own.
    """
    arms = [arm for arm, info in run.arms.items() if info.kind == "policy" and info.status == "ok"]
    turns: dict[Turn, dict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for arm in arms:
        for record in run.records.get(arm, ()):
            turns[record.question_id, record.turn][arm].append(record)
    texts: dict[Turn, TextTrace] = {}
    taken: set[str] = set()
    for turn, by_arm in sorted(turns.items(), key=lambda entry: (next(iter(entry[1].values()))[0].order, entry[0])):
        answer = _answer(by_arm, arms)
        text = None if answer is None else _recorded(corpus, answer, taken)
        if text is not None:
            taken.add(text.name)
            texts[turn] = text
    if not texts:
        if not run.finished:
            raise ConfigError(
                f"The run in {run.path} is not finished, and no answer that all its policies have made was recorded in "
                "these traces: wait until it ends, or go on with it (its --resume)."
            )
        raise ConfigError(
            f"None of the answers in {run.path} was recorded in these traces: run 'bench record' on the same "
            "questions, with the same model, weight format and --max-new-tokens (first turns only)."
        )
    kept = {arm: [r for r in run.records[arm] if (r.question_id, r.turn) in texts] for arm in arms}
    policies = replace(run, arms={arm: run.arms[arm] for arm in arms}, records=kept)
    return Matched(tuple(texts.values()), policies)


def _answer(by_arm: Mapping[str, Sequence[Record]], arms: Sequence[str]) -> tuple[int, tuple[int, ...]] | None:
    """(tokens of the prompt, answer) on which all arms agree, each beside plain; None = they do not."""
    records = [record for arm in arms for record in by_arm.get(arm, ())]
    beside = {(record.group, record.repeat) for record in by_arm.get(PLAIN, ())}
    if any(not any((r.group, r.repeat) in beside for r in by_arm.get(arm, ())) for arm in arms):
        return None
    answers = {(record.prompt_tokens, record.token_ids) for record in records}
    if len(answers) != 1 or any(record.error is not None or record.decode_tokens < 1 for record in records):
        return None
    return answers.pop()


def _recorded(corpus: Corpus, answer: tuple[int, tuple[int, ...]], taken: set[str]) -> TextTrace | None:
    """The text of that answer, cut where the run's limit cut it; each serves one question."""
    length, tokens = answer
    fits = [
        text
        for text in corpus.texts
        if text.prompt_length == length
        and text.name not in taken
        and tuple(corpus.answers[text.name][: len(tokens)]) == tokens
    ]
    # One that ended there goes before one that went on: their prompts may be as long and their beginnings the same.
    whole = [text for text in fits if len(corpus.answers[text.name]) == len(tokens)]
    return shortened((whole or fits)[0], len(tokens)) if fits else None


def run_costs(matched: Matched, corpus: Corpus, fallback: CostTable) -> tuple[CostTable, float]:
    """Costs and overhead of a round, from the run's fixed policies. Raises ConfigError without plain or any static.

    fallback: for drafts and loads of which the run says nothing.
    """
    plain = _sums(matched, PLAIN)
    if not plain.get("rounds"):
        raise ConfigError("The run has no plain answers that were recorded, too.")
    fixed = {arm: _sums(matched, arm) for arm in matched.run.arms if _STATIC.fullmatch(arm)}
    fixed = {arm: found for arm, found in fixed.items() if found.get("rounds")}
    if not fixed:
        raise ConfigError(
            f"No static:DRAFT@GAMMA of the run in {matched.run.path} has answers that were recorded, too: the seconds "
            "of drafts are made of them. Run 'bench record' on the same questions."
        )
    data: dict[str, Any] = fallback.to_json()
    verify = {1: plain["target_seconds"] / plain["rounds"]}
    widths: dict[int, list[float]] = defaultdict(list)
    drafts, reads = dict(data["drafts"]), dict(data.get("catch_up", {}))
    for arm, found in fixed.items():
        name, gamma = _arm(arm)
        # Rounds at the end of an answer are narrower and some find no guess: seconds are shared out by planned width.
        one = found["narrow"] * verify[1]
        widths[gamma + 1].append((found["target_seconds"] - one) / max(found["rounds"] - found["narrow"], 1))
        mine = found["share"].get(name, 0)
        if name in corpus.weighted and mine:
            drafts[name] = found["draft_seconds"] / (mine * gamma)
            reads[name] = found["catch_up_seconds"] / max(found["read"], 1)
    verify |= {width: sum(seconds) / len(seconds) for width, seconds in widths.items()}
    known = [drafts[name] for name in corpus.weighted if name in drafts]
    usual = sum(known) / len(known) if known else 0.05 * verify[1]
    drafts = {**dict.fromkeys(corpus.weighted, usual), **drafts}
    drafts |= dict.fromkeys((*corpus.free, LOOKUP), LOOKUP_SECONDS)
    load = _load(matched)
    loads = data.get("loads", {}) if load is None else dict.fromkeys(corpus.weighted, load)
    rests = [_rest(found) for found in (plain, *fixed.values())]
    return CostTable(verify, drafts, loads=loads, catch_up=reads), max(sum(rests) / len(rests), 0.0)


def _arm(static: str) -> tuple[str, int]:
    """Draft and gamma of `static:<draft>@<gamma>`."""
    found = _STATIC.fullmatch(static)
    assert found is not None
    return found["draft"], int(found["gamma"])


def _sums(matched: Matched, arm: str) -> dict[str, Any]:
    """Counters of an arm over the matched turns."""
    total: dict[str, Any] = defaultdict(float)
    share: dict[str, int] = defaultdict(int)
    for record in matched.run.records.get(arm, ()):
        stats = record.stats
        for key in _COUNTED:
            total[key] += stats.get(key, 0)
        total["decode_s"] += record.decode_s
        total["narrow"] += stats.get("gamma_histogram", {}).get("0", 0)
        total["read"] += min(record.prompt_tokens, 256)
        for draft, rounds in stats.get("draft_share", {}).items():
            share[draft] += rounds
    return {**total, "share": share}


def _rest(found: Mapping[str, Any]) -> float:
    """Seconds of a round that neither drafts nor the target took."""
    named = found["target_seconds"] + found["draft_seconds"] + found["catch_up_seconds"]
    return float(found["decode_s"] - named) / float(found["rounds"])


def _planning(matched: Matched, arm: str) -> float:
    """Seconds of a round in which the arm's policy planned and learned; drafts that guessed along included."""
    found = _sums(matched, arm)
    return float(found.get("predictor_seconds", 0.0) / max(found.get("rounds", 0), 1))


def _load(matched: Matched) -> float | None:
    """Seconds of a load, mean of all that were completed."""
    count = seconds = 0.0
    for records in matched.run.records.values():
        for record in records:
            count += record.stats.get("loads", 0)
            seconds += record.stats.get("load_seconds_hidden", 0.0) + record.stats.get("load_seconds_exposed", 0.0)
    return seconds / count if count else None


def doubts(run: RunFolder, found: Mapping[str, Any]) -> list[str]:
    """What makes a comparison (of `validated`) doubtful, as sentences."""
    told = []
    asked, questions = counted(found["asked"], "question"), found["compared"]
    if not run.finished:
        told.append(f"The run is not finished: all its policies have answered {found['answered']} of {asked}.")
    if questions < (found["asked"] if run.finished else found["answered"]):
        told.append(
            f"The comparison has {questions} of {asked}: the others were not recorded, failed, were answered in "
            "different words by different policies, or not by all."
        )
    if found["texts"] < LEAST_FOR_INTERVAL:
        answers = counted(found["texts"], "answer")
        told.append(f"The comparison has {answers}: below {LEAST_FOR_INTERVAL} there is no verdict.")
    if (run.settings.get("repeats") or 1) > 1:
        told.append(
            "The run repeats its questions: measured is the median repeat, in which policies that learn had met the "
            "texts before; simulated is once through."
        )
    return told


def _progress(run: RunFolder, found: Matched) -> dict[str, int]:
    """Questions that the run has, that all its policies have answered, and that are compared."""
    answered = [{r.question_id for r in run.records[arm] if r.error is None} for arm in found.run.arms]
    begun = {record.question_id for records in run.records.values() for record in records}
    compared = {record.question_id for records in found.run.records.values() for record in records}
    return {
        "asked": max(run.questions, len(begun)),
        "answered": len(set.intersection(*answered)),
        "compared": len(compared),
    }


def validated(base: Base, run: RunFolder) -> dict[str, Any]:
    """Every policy arm of the run: measured and simulated speed-up over plain.

    agree: of the predicted ones; None where there are too few answers to tell.
    """
    corpus, resident, limit = base.corpus, _slots(run), _number(run, "max_new_tokens", run.settings)
    found = matched(corpus, run)
    part = Part([found.run])
    measured = {arm: _measured(part, arm) for arm in found.run.arms if arm != PLAIN}  # also says what is damaged
    costs, overhead = run_costs(found, corpus, base.costs)
    mine = replace(
        base, corpus=replace(corpus, texts=found.texts), costs=costs, overhead=overhead, limit=None,
        max_new_tokens=limit,
    )  # fmt: skip
    start = Setting(resident=resident, order="file")
    plain = simulate(mine, start)
    rows = []
    for arm, value in measured.items():
        setting = replace(start, policy=arm)
        outcome, planning = simulate(mine, setting), 0.0
        if not _STATIC.fullmatch(arm):
            # Guessing along is simulated; what fixed policies take to plan is in the overhead.
            planning = _planning(found, arm) - _usual_planning(found) - outcome.shadow_seconds / max(outcome.rounds, 1)
            planning = max(planning, 0.0)
            outcome = simulate(replace(mine, overhead=overhead + planning), setting)
        row = row_of(setting, outcome, plain) | {"arm": arm, "measured": value, "planning_seconds": planning}
        rows.append(row | {"error": row["speedup"] / value - 1, "fitted": bool(_STATIC.fullmatch(arm))})
    predicted = [row for row in rows if not row["fitted"]]
    agree = sum(abs(row["error"]) <= WITHIN for row in predicted)
    return {
        "run": str(run.path),
        **_progress(run, found),
        "texts": len(found.texts),
        "resident": resident,
        "costs": costs.to_json(),
        "overhead_seconds": overhead,
        "within": WITHIN,
        "predicted": len(predicted),
        "agree": agree if len(found.texts) >= LEAST_FOR_INTERVAL else None,
        "rows": rows,
    }


def _usual_planning(found: Matched) -> float:
    """Of plain and the fitted arms, as it is part of the overhead."""
    fixed = [arm for arm in found.run.arms if arm == PLAIN or _STATIC.fullmatch(arm)]
    return sum(_planning(found, arm) for arm in fixed) / len(fixed)


def _measured(part: Part, arm: str) -> float:
    """Speed-up of an arm as the run's report has it: beside the plain of its own group, repeat by repeat."""
    mine = plain = 0.0
    for pairs in part.compare(arm).pairs.values():
        mine += sums(pair.arm for pair in pairs).decode_s
        plain += sums(pair.plain for pair in pairs).decode_s
    return plain / mine


def _slots(run: RunFolder) -> int:
    """Drafts that the run held at once."""
    if run.machine.get("slots") is not None:
        return _number(run, "slots", run.machine)
    return _number(run, "resident", run.settings)


def _number(run: RunFolder, key: str, values: Mapping[str, Any]) -> int:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"The run in {run.path} cannot be simulated: its {key} is {value!r}, not a whole number.")
    return value
