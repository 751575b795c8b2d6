"""A closed loop: so many conversations at once, each asking again when it was answered. Total speed, and fairness."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from drafts.figures import LEAST_FOR_INTERVAL
from edgespec.bench.load import runner
from edgespec.bench.load.compare import median
from edgespec.bench.load.measures import latencies, loop
from edgespec.bench.load.pictures import over_rates
from edgespec.bench.load.prompts import Pool
from edgespec.bench.load.records import Served, Stretch
from edgespec.bench.load.system import Arm, System
from edgespec.bench.load.tables import interval, number, ratio
from edgespec.bench.reporting.pictures import Picture
from edgespec.bench.reporting.tables import UNKNOWN, Table
from edgespec.bench.words import counted

DEFINITIONS = {
    "tokens/s": "of all sessions together, from the end of the warm-up to the time at which no new request is made; "
    "prefill is in it",
    "slowest/fastest": "the slowest session's tokens a second over the fastest one's; each session's tokens after the "
    "first of each answer, over the seconds from the first to the last; 0 if one asked and got nothing in the window. "
    "Waiting for a place is not in it",
    "least/most": "the tokens of the session that got least over those of the one that got most, in the window: "
    "waiting is in it, and so is how long answers are",
    "interval": f"95% by bootstrap over repeats; of fewer than {LEAST_FOR_INTERVAL} repeats the least and the most",
    "lost": "requests that neither ended nor were refused: none may be",
    "memory": "resident memory of the process at the end over that after the warm-up",
}


def run(
    system: System,
    arms: Sequence[Arm],
    counts: Sequence[int],
    pool: Pool,
    *,
    repeats: int,
    seconds: float,
    warm_up: float,
    limit_s: float,
    exact: bool,
    say: Callable[[str], None],
    advance: Callable[[int], None],
    keep: Callable[[Stretch], None],
) -> list[Stretch]:
    """One stretch for each repeat, number of sessions and arm, in turn; `rate` is the number of sessions. The session
    n asks the same prompts in every arm. After Ctrl-C what there is."""
    found: list[Stretch] = []
    for repeat in range(repeats):
        for count in counts:
            first = (repeat + count) % len(arms)
            for arm in (*arms[first:], *arms[:first]):
                say(f"{arm.name}, {count} sessions, repeat {repeat + 1}")
                system.use(arm)
                stretch = Stretch(arm.name, float(count), repeat, len(found), seconds, warm_up)
                _one(system, stretch, pool, limit_s, exact)
                found.append(stretch)
                keep(stretch)
                advance(1)
                if stretch.interrupted:
                    return found
    return found


def _one(system: System, stretch: Stretch, pool: Pool, limit_s: float, exact: bool) -> None:
    async def work(stop: asyncio.Event) -> None:
        await runner.closed_loop(
            system, pool.endless(stretch.repeat), stretch, stop, sessions=int(stretch.rate), limit_s=limit_s,
            params=runner.to_the_limit if exact else runner.greedy,
        )  # fmt: skip

    runner.measure(work, stretch)


def figures(stretch: Stretch) -> dict[str, Any]:
    """Of one stretch, as JSON values."""
    begin, end = stretch.window
    tokens = sum(count for one in stretch.served for time, count in one.pieces if begin <= time < end)
    numbers = sorted({one.session for one in stretch.served if one.session is not None})
    got = {n: _tokens(stretch, n) for n in numbers}
    paces = {n: pace for n in numbers if (pace := _pace(stretch.served, n) if got[n] else 0.0) is not None}
    outcomes = [one.outcome for one in stretch.served]
    rss = [size for time, size in stretch.rss if time >= begin]
    return {
        "tokens": tokens,
        "throughput": tokens / (end - begin) if end > begin else None,
        "paces": {str(n): pace for n, pace in paces.items()},
        "fairness": _least_of_most(paces.values()),
        "share": _least_of_most(got.values()),
        "asked": len(outcomes),
        "finished": outcomes.count("finished"),
        "refused": outcomes.count("refused"),
        "failed": outcomes.count("failed"),
        "lost": outcomes.count("unfinished"),
        "ttft": latencies(stretch.served, "ttft", stretch.ended),
        "loop": loop([s for s in stretch.samples if begin <= s.time < end]),
        "memory": rss[-1] / rss[0] if rss else None,
    }


def _tokens(stretch: Stretch, session: int) -> int:
    """What came of a session's requests within the window."""
    begin, end = stretch.window
    mine = (one for one in stretch.served if one.session == session)
    return sum(count for one in mine for time, count in one.pieces if begin <= time < end)


def _least_of_most(values: Collection[float]) -> float | None:
    return min(values) / max(values) if values and max(values) > 0 else None


def _pace(served: Sequence[Served], session: int) -> float | None:
    """Tokens a second while it was served."""
    mine = [one for one in served if one.session == session and one.tpot is not None]
    tokens = sum(one.tokens - one.pieces[0][1] for one in mine)
    seconds = sum(one.pieces[-1][0] - one.pieces[0][0] for one in mine)
    return tokens / seconds if seconds > 0 else None


def build(stretches: Sequence[Stretch], about: Mapping[str, Any]) -> dict[str, Any]:
    """The document of a closed loop."""
    rows = [stretch.head() | {"figures": figures(stretch)} for stretch in stretches]
    whole = [row for row in rows if row["figures"]["throughput"] is not None]  # one that Ctrl-C cut short has none
    arms = list(dict.fromkeys(row["arm"] for row in whole))
    table = []
    for count in sorted({row["rate"] for row in whole}):
        for arm in arms:
            mine = [row for row in whole if (row["rate"], row["arm"]) == (count, arm)]
            if mine:
                table.append({"sessions": int(count), "arm": arm, **_place(mine, whole, arm)})
    return {**about, "table": table, "stretches": rows, "definitions": DEFINITIONS}


def _place(mine: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], arm: str) -> dict[str, Any]:
    found = [row["figures"] for row in mine]
    one = {r["repeat"]: r["figures"]["throughput"] for r in rows if r["arm"] == arm and r["rate"] == 1}
    pairs = [row["figures"]["throughput"] / one[row["repeat"]] for row in mine if one.get(row["repeat"])]
    return {
        "throughput": median([f["throughput"] for f in found]),
        "to_one": median(pairs),
        "fairness": median([f["fairness"] for f in found]),
        "share": median([f["share"] for f in found]),
        "ttft_p50": median([f["ttft"]["p50"] for f in found]),
        "ttft_p99": median([f["ttft"]["p99"] for f in found]),
        "gamma": median([f["loop"]["gamma"] for f in found]),
        "memory": max((f["memory"] for f in found if f["memory"] is not None), default=None),
        **{kind: sum(f[kind] for f in found) for kind in ("asked", "finished", "refused", "failed", "lost")},
    }


def table(document: Mapping[str, Any]) -> Table:
    """One row a number of sessions and planner."""
    cells = []
    for entry in document["table"]:
        memory = UNKNOWN if entry["memory"] is None else f"{entry['memory']:.3f}"
        cells.append(
            [
                str(entry["sessions"]), entry["arm"], number(entry["throughput"]["value"], 1),
                interval_of(entry["throughput"]), ratio(entry["to_one"]), interval(entry["to_one"]),
                number(entry["fairness"]["value"], 2), number(entry["share"]["value"], 2),
                number(entry["ttft_p50"]["value"], 2), number(entry["ttft_p99"]["value"], 2),
                number(entry["gamma"]["value"], 2),
                *(str(entry[kind]) for kind in ("finished", "refused", "failed", "lost")), memory,
            ]
        )  # fmt: skip
    columns = ["sessions", "planner", "tokens/s", "interval", "x one session", "interval"]
    columns += ["slowest/fastest", "least/most", "TTFT p50", "TTFT p99"]
    columns += ["gamma", "finished", "refused", "failed", "lost", "memory"]
    return Table("Sessions at once", columns, cells, "Medians over repeats.")


def pictures(document: Mapping[str, Any]) -> Iterator[tuple[str, Picture]]:
    """Total speed and fairness by the number of sessions. Call inside `style.drawing()`."""
    counts = sorted({entry["sessions"] for entry in document["table"]})
    if len(counts) < 2:
        return
    arms = list(dict.fromkeys(entry["arm"] for entry in document["table"]))
    table = [entry | {"rate": entry["sessions"]} for entry in document["table"]]
    shown = {"arms": arms, "rates": counts, "table": table}
    made = over_rates(shown, lambda entry: entry["throughput"], "tokens/s", axis="sessions at once")
    yield "Sessions", Picture("total", "Tokens a second of all sessions", "Bars: intervals over repeats.", made)
    made = over_rates(shown, lambda entry: entry["fairness"], "slowest/fastest", top=1.05, axis="sessions at once")
    yield "Sessions", Picture("fairness", "The slowest session's pace beside the fastest one's", "1 is fair.", made)


def interval_of(found: Mapping[str, Any]) -> str:
    return UNKNOWN if found["low"] is None else f"{found['low']:.1f}-{found['high']:.1f}"


def headline(document: Mapping[str, Any]) -> str:
    """Of the most sessions."""
    known = [entry for entry in document["table"] if entry["to_one"]["value"] is not None]
    if not known:
        return ""
    most = max(known, key=lambda entry: (entry["sessions"], entry["arm"] == "edgespec"))
    return (
        f"{counted(most['sessions'], 'session')} with {most['arm']}: {most['to_one']['value']:.2f} times the tokens a "
        f"second of one; the slowest has {number(most['fairness']['value'], 2)} of the fastest one's pace and the "
        f"least served {number(most['share']['value'], 2)} of the most served one's tokens; "
        f"{counted(most['lost'], 'request')} lost."
    )
