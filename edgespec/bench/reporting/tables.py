"""The report's tables, once for the terminal, Markdown and HTML: figures become text here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from edgespec.bench.reporting.draft_map import total
from edgespec.bench.specbench.folder import PLAIN
from edgespec.bench.words import counted

UNKNOWN = "–"
MOST_DIFFERENCES = 50  # of an arm; all of them are in report.json
_OTHER_WEIGHTS = "* computes with other weights than plain: another text, another speed (see Speed in seconds)."
_REPEATED = (
    "ratios and rates of the median repeat, all else of all repeats (policies keep what they learned from one to the "
    "next: the headline is of the first one alone, which has a column beside)"
)
_NO_PLACES = "These answers do not tell how many proposals reached each place; later versions count them."

Figures = Mapping[str, Any]


class Table(NamedTuple):
    """Title, headings, rows of text (the first column names the row), and a line below. long: folded away at first."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    long: bool = False


def part_tables(part: Figures) -> list[Table]:
    """All tables of one comparison; those without rows are left out."""
    tables = [summary(part), by(part, "task"), latency(part), memory(part), seconds(part), positions(part)]
    tables += [drafts(part), by(part, "category"), equality(part), differences(part), errors(part), absent(part)]
    return [table for table in tables if table.rows]


def headline(part: Figures, name: str | None) -> str:
    """The one sentence that a reader takes home; "" where there is no ratio.

    Of several repeats it is that of the first: in the later ones policies meet texts that they have seen.
    """
    if name is None:
        return ""
    arm = part["arms"][name]
    median, first = arm["speedup"], arm["first_repeat"]
    found, low = median, arm["least_task"]
    if first is not None and first["value"] is not None:
        found, low = first, first["least_task"]
    text = f"{name} decodes {found['value']:.2f} times as fast as plain"
    if found["low"] is not None:
        text += f" (95%: {found['low']:.2f} to {found['high']:.2f})"
    text += f" over {of_questions(found['questions'], part['asked'])}"
    if found is first:
        text += " in the first repeat"
    if low is not None:
        text += f"; least in {low['task']}, {low['value']:.2f}"
        if low["of"] < len(arm["by_task"]):
            text += f", of the {low['of']} tasks with two questions or more"
    if found is first:
        text += f"; {median['value']:.2f} times in the median repeat, with texts that policies had met before"
    return f"{text}."


def summary(part: Figures) -> Table:
    """One row an arm: what a terminal shows."""
    ran = _ran(part)
    repeated = any(arm["first_repeat"] for _, arm in ran)
    same = part["common"]
    columns = ["arm", "x plain", "95%", *["1st repeat"] * repeated]
    columns += [] if same is None else ["n", f"same {same}"]
    columns += ["least task", "tok/round", "accepted", "fallback"]
    columns += ["loads", "exposed s", "planning", "equal texts", "errors", "peak MiB"]
    rows = []
    for name, arm in ran:
        ratio, low, first = arm["speedup"], arm["least_task"], arm["first_repeat"]
        rows.append(
            [
                f"{name} *" if arm["other_weights"] else name,
                number(ratio["value"]),
                UNKNOWN if name == PLAIN else interval(ratio),
                *[UNKNOWN if name == PLAIN or first is None else number(first["value"])] * repeated,
                *([] if same is None else _unequal(arm)),
                UNKNOWN if low is None or name == PLAIN else f"{low['value']:.2f} {low['task']}",
                number(arm["tokens_per_round"]),
                percent(arm.get("acceptance_rate")),
                percent(arm.get("fallback_share"), 1),
                whole(arm.get("loads")),
                number(arm.get("load_seconds_exposed")),
                percent((arm.get("time_share") or {}).get("planning"), 1),
                equal(arm["equality"]),
                whole(len(arm["errors"])),
                mebibytes(arm["peak_memory_bytes"]),
            ]
        )
    marked = any(arm["other_weights"] for _, arm in ran)
    return Table("Decode speed beside plain", columns, rows, _OTHER_WEIGHTS if marked else "")


def _unequal(arm: Figures) -> list[str]:
    """Of how many questions an arm is, and its ratio over those that all arms have."""
    return [whole(arm["speedup"]["questions"]), number(arm["same_questions"]["value"])]


def by(part: Figures, kind: str) -> Table:
    """Ratios of every arm in every task or category, with intervals and the number of questions."""
    counts = part[f"by_{kind}"]
    names = list(counts)
    columns = ["arm", *(f"{name} ({counts[name]})" for name in names)]
    rows = []
    for name, arm in _ran(part):
        if name != PLAIN:
            rows.append([name, *(_cell(arm[f"by_{kind}"][one], counts[one]) for one in names)])
    known = any(arm[f"by_{kind}"][one]["low"] is not None for name, arm in _ran(part) if name != PLAIN for one in names)
    note = f"Times plain{', 95% interval' if known else ''}; in brackets above, how many questions; n: of how many, "
    note += "where not of all."
    return Table(f"By {kind}", columns, rows if len(names) > 1 else [], note, long=kind == "category")


def _cell(ratio: Figures, count: int) -> str:
    words = [number(ratio["value"])]
    words += [f"({interval(ratio)})"] if ratio["low"] is not None else []
    words += [f"n={ratio['questions']}"] if ratio["value"] is not None and ratio["questions"] != count else []
    return " ".join(words)


def latency(part: Figures) -> Table:
    """Rates, the first token, and the whole turn."""
    columns = ["arm", "tokens/s", "plain's", "whole turn x plain", "95%", "first token s", "prefill tok/s", "questions"]
    columns.append("weights")
    rows = []
    for name, arm in _ran(part):
        ratio, turn = arm["speedup"], arm["whole_turn"]
        row = [number(ratio["tokens_per_second"], 1), number(ratio["plain_tokens_per_second"], 1)]
        row += [number(turn["value"]), interval(turn), number(arm["first_token_s"], 3)]
        row += [number(arm["prefill_tokens_per_second"], 0), whole(ratio["questions"])]
        rows.append([name, *row, arm["weights"] or UNKNOWN])
    return Table("Speed in seconds", columns, rows, "Plain's rate is over the same questions as the arm's.")


def memory(part: Figures) -> Table:
    """Working set, drafts and memory; energy where any arm's is known."""
    energy = any(arm.get("joules_per_token") is not None for _, arm in _ran(part))
    columns = ["arm", "loads", "hidden s", "exposed s", "switches", "fallback", "peak MiB", *["J/token"] * energy]
    columns.append("rounds by draft")
    rows = []
    for name, arm in _ran(part):
        shares = [f"{draft} {percent(share)}" for draft, share in (arm.get("draft_share") or {}).items()]
        row = [whole(arm.get("loads")), number(arm.get("load_seconds_hidden"), 1)]
        row += [
            number(arm.get("load_seconds_exposed")),
            whole(arm.get("switches")),
            percent(arm.get("fallback_share"), 1),
        ]
        row += [mebibytes(arm["peak_memory_bytes"]), *[number(arm.get("joules_per_token"), 3)] * energy]
        rows.append([name, *row, ", ".join(shares) or UNKNOWN])
    return Table("Drafts and memory", columns, rows)


def seconds(part: Figures) -> Table:
    """Where the decode seconds went."""
    names = ["target", "draft", "planning", "catch-up", "bookkeeping", "other"]
    told = [(name, arm) for name, arm in _ran(part) if arm.get("time_share")]
    rows = []
    for name, arm in told:
        row = [percent(arm["time_share"].get(one), 1) for one in names]
        rows.append([name, number(arm["decode_seconds"], 1), *row, percent(arm["ranker_share"], 1)])
    note = "Shares of the decode seconds; the ranker's pass beside them, in a thread of its own."
    return Table("Where the time went", ["arm", "decode s", *names, "ranker"], rows, note)


def positions(part: Figures) -> Table:
    """Acceptance by place in the block, and how long blocks were."""
    drafted = [(name, arm) for name, arm in _ran(part) if arm.get("proposed_tokens")]
    places = min(max((len(arm["acceptance_by_position"]) for _, arm in drafted), default=0), 8)
    rows = []
    for name, arm in drafted:
        shares = arm["acceptance_by_position"][:places]
        row = [percent(share) for share in shares] + [UNKNOWN] * (places - len(shares))
        lengths = ", ".join(f"{gamma}: {percent(share)}" for gamma, share in arm["gamma_share"].items())
        rows.append([name, *row, lengths])
    columns = ["arm", *(f"place {place + 1}" for place in range(places)), "rounds by gamma"]
    return Table("Acceptance by position", columns, rows, "" if places else _NO_PLACES, long=True)


def drafts(part: Figures) -> Table:
    """First tokens accepted of every draft in every domain, with the number of its blocks."""
    found = part["draft_map"]
    rows = []
    for draft, cells in found["drafts"].items():
        of_domains = [cells.get(domain) for domain in found["domains"]]
        rows.append([draft, *(_of_blocks(cell) for cell in (total(cells.values()), *of_domains))])
    note = "In brackets: blocks, of all policies together. A draft has them where a policy chose it."
    columns = ["draft", "all", *found["domains"]]
    return Table("First tokens accepted, by draft and domain", columns, rows, note, long=True)


def _of_blocks(cell: Figures | None) -> str:
    return UNKNOWN if cell is None else f"{percent(cell['first_share'])} ({cell['blocks']:,})"


def equality(part: Figures) -> Table:
    """Equal texts by category."""
    names = list(part["by_category"])
    rows = []
    for name, arm in _ran(part):
        found = arm["equality"]
        if not found["checked"]:
            rows.append([name, found["reason"], *[UNKNOWN] * (len(names) + 1)])
            continue
        counts = [found["by_category"].get(one) for one in names]
        kinds = {"near ties": "near_ties", "not near": "faults", "not judged": "not_judged"}
        told = ", ".join(f"{found[key]} {kind}" for kind, key in kinds.items() if found[key])
        if not found["promised"]:
            told = "other engine, not promised"
        cells = [UNKNOWN if count is None else f"{count['equal']}/{count['compared']}" for count in counts]
        rows.append([name, equal(found), told or UNKNOWN, *cells])
    return Table("Same text as plain", ["arm", "all", "differences", *names], rows)


def differences(part: Figures) -> Table:
    """The first different token of every answer of a policy that is not plain's."""
    words = {True: "near tie", False: "NOT NEAR", None: "not judged"}
    rows = []
    for name, arm in _ran(part):
        if arm["equality"].get("promised"):
            for d in arm["equality"]["differences"][:MOST_DIFFERENCES]:
                place = [d["question"], d["category"], str(d["turn"] + 1), str(d["repeat"] + 1), str(d["position"])]
                rows.append([name, *place, words[d["near_tie"]], number(d["gap"], 4), number(d["margin"], 4)])
    columns = ["arm", "question", "category", "turn", "repeat", "token", "kind", "gap", "margin"]
    note = "Gap: logits between the two tokens; margin: between the target's two best."
    return Table("Texts that differ", columns, rows, note, long=True)


def errors(part: Figures) -> Table:
    """Answers that failed; they are in no time."""
    rows = [
        [name, e["question"], e["category"], str(e["turn"] + 1), str(e["repeat"] + 1), e["message"]]
        for name, arm in part["arms"].items()
        for e in arm["errors"]
    ]
    return Table("Errors", ["arm", "question", "category", "turn", "repeat", "message"], rows)


def absent(part: Figures) -> Table:
    """Arms that did not run, or broke off."""
    rows = [[name, arm["status"], arm["message"]] for name, arm in part["arms"].items() if arm["status"] != "ok"]
    return Table("Arms that are absent or ended", ["arm", "status", "why"], rows)


def warnings(part: Figures) -> list[str]:
    """What makes figures doubtful; one line for what holds for several arms."""
    by_text: dict[str, list[str]] = {}
    for name, arm in part["arms"].items():
        for text in arm["warnings"]:
            by_text.setdefault(text, []).append(name)
    ran = len(_ran(part))
    found = []
    for text, names in by_text.items():
        found.append(f"{'every arm' if len(names) == ran > 2 else ', '.join(names)}: {text}")
    return [*part["warnings"], *found]


def settings(document: Figures) -> Table:
    """What decided the figures."""
    rows = [[name, _plain(value)] for name, value in document["settings"].items()]
    return Table("Settings", ["setting", "value"], rows, long=True)


def runs(document: Figures) -> Table:
    """The folders that were read."""
    rows = []
    for run in document["runs"]:
        row = [run["folder"], str(run["questions"]), "yes" if run["finished"] else "no", machine(run["machine"])]
        rows.append([*row, run["started"], run["version"], _plain(run["shard"]), run["command"]])
    columns = ["run", "questions", "finished", "machine", "started", "version", "shard", "command"]
    return Table("Runs", columns, rows, long=True)


def skipped(document: Figures) -> Table:
    """Lines of question files that were left out."""
    rows = [
        [run["folder"], *(_plain(one.get(key)) for key in ("file", "line", "reason"))]
        for run in document["runs"]
        for one in run["skipped"]
    ]
    return Table("Skipped lines", ["run", "file", "line", "reason"], rows)


def conditions(document: Figures) -> str:
    """The settings that a reader must know to read any figure, in one line."""
    found = document["settings"]
    words = {
        "weight_format": "{} weights", "max_new_tokens": "at most {} new tokens", "temperature": "temperature {:g}",
        "order": "order: {}", "repeats": "repeats: {}", "resident": "drafts in memory at once: {}",
    }  # fmt: skip
    told = [text.format(found[name]) for name, text in words.items() if found.get(name) is not None]
    if (found.get("repeats") or 1) > 1:
        told.append(_REPEATED)
    if found.get("keep_memory"):
        told.append("policies began with what they had learned before")
    slots = sorted({str(run["machine"]["slots"]) for run in document["runs"] if "slots" in run["machine"]})
    if found.get("resident") is None and slots:
        told.append(f"{words['resident'].format(' or '.join(slots))} (what fitted)")
    return ", ".join(told)


def machine(found: Figures) -> str:
    """Processor, cores, threads and memory in a few words."""
    size = found.get("memory_bytes")
    words = [str(found["cpu"])] if found.get("cpu") else []
    words += [f"{found['cores']} cores"] if found.get("cores") else []
    words += [f"{found['threads']} threads used"] if found.get("threads") else []
    words += [f"{size / 2**30:.0f} GiB"] if isinstance(size, (int, float)) else []
    return ", ".join(words) or "a machine that is not described"


def _ran(part: Figures) -> list[tuple[str, Figures]]:
    return [(name, arm) for name, arm in part["arms"].items() if arm["answers"] or arm["errors"]]


def _plain(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return UNKNOWN if value is None else str(value)


def of_questions(count: int, asked: int) -> str:
    """ "18 questions", or "9 of 18 questions" where the others have no answer."""
    return counted(count, "question") if count == asked else f"{count} of {counted(asked, 'question')}"


def number(value: float | None, digits: int = 2) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def percent(value: float | None, digits: int = 0) -> str:
    return UNKNOWN if value is None else f"{value:.{digits}%}"


def whole(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}"


def mebibytes(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value / 2**20:.0f}"


def interval(ratio: Figures) -> str:
    return UNKNOWN if ratio["low"] is None else f"{ratio['low']:.2f}–{ratio['high']:.2f}"


def equal(found: Figures) -> str:
    if not found["checked"]:
        return str(found["reason"])
    return f"{found['equal']}/{found['compared']}" if found["compared"] else UNKNOWN
