"""A whole run on the fake engine: order, capacity, texts, interruption, limits, and the document made of it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.load import document, output, tables
from edgespec.bench.load.arrivals import Arrival
from edgespec.bench.load.folder import STATE, Folder, read
from edgespec.bench.load.measures import Deadline
from edgespec.bench.load.measuring import Measured, Measuring, answer_tokens
from edgespec.bench.load.prompts import Pool, Prompt
from edgespec.bench.load.records import Outcome, Served, Stretch
from edgespec.bench.load.schedule import Schedule
from edgespec.bench.load.system import Arm
from edgespec.errors import ConfigError
from tests.bench.load.fakes import FakeSystem, failing, virtual

ABOUT: dict[str, Any] = {
    "title": "Load", "headline": "", "simulated": False, "conditions": "a fake", "machine": "nowhere",
    "command": "edgespec bench load", "settings": {"max sessions": 2}, "warnings": [], "texts": None,
    "validation": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch):
    with virtual(monkeypatch):
        yield


def encode(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def pool() -> Pool:
    texts = ["a bb ccc", "dddd ee", "f gg hhhhh i"]
    return Pool([Prompt(t[:2], t, tuple(encode(t))) for t in texts], encode, new=8, context=512)


def schedule(*arms: Arm, **changes: Any) -> Schedule:
    values = {"rates": (0.5, 2.0), "repeats": 2, "seconds": 20.0, "warm_up": 2.0, "limit_s": 60.0, "most_s": 3600.0}
    return Schedule(arms or (Arm("none"), Arm("fixed:1"), Arm("us")), **{**values, **changes})


def measure(
    system: FakeSystem, made: Schedule | None = None, keep: Callable[[Stretch], None] = lambda s: None, **more: Any
) -> Measured:
    return Measuring(system, made or schedule(), pool(), keep=keep, **more).run()


def test_a_run(tmp_path: Path) -> None:
    system = FakeSystem(max_sessions=2, speeds={"us": 3, "fixed:1": 2})
    folder = Folder(tmp_path / "run")
    measured = measure(system, keep=folder.keep)
    assert [(s.rate, s.repeat) for s in measured.stretches] == sorted(
        ((r, n) for n in range(2) for r in (0.5, 2.0) for _ in range(3)), key=lambda place: (place[1], place[0])
    )
    assert measured.capacity is not None
    assert 10 < measured.capacity.tokens_per_second < 20  # two at a time, a token each 0.1 s, less the prompts
    assert (measured.compared, measured.differences) == (sum(len(s.served) for s in measured.stretches), [])
    assert (measured.alone, measured.uncompared) == (3, 0)
    assert all(one.outcome == "finished" for s in measured.stretches for one in s.served)
    for begin in range(0, 12, 3):
        group = measured.stretches[begin : begin + 3]
        assert len({tuple((one.at, one.name) for one in s.served) for s in group}) == 1

    made = document.build(measured.schedule, measured.stretches, Deadline(2.0, 0.2), ABOUT)
    (verdict,) = made["verdicts"]
    assert verdict["best_fixed"] == "fixed:1"
    assert verdict["to_none"]["value"] > 1.3
    assert verdict["to_fixed"]["value"] > 1.05
    assert made["to_none"]["arms"]["none"]["value"] == pytest.approx(1.0)
    made["headline"] = output.headline(made)
    assert made["headline"].startswith("us: ")
    assert made["headline"].endswith("times that of fixed:1.")  # no word of a best one, where one ran
    output.publish(made, folder)
    folder.close()
    again, stretches = read(tmp_path / "run")
    assert again == json.loads(json.dumps(made))
    figures = [
        row["figures"] for row in document.build(measured.schedule, stretches, Deadline(2.0, 0.2), ABOUT)["stretches"]
    ]
    for mine, theirs in zip(figures, (row["figures"] for row in made["stretches"])):
        assert mine["throughput"] == pytest.approx(theirs["throughput"], rel=1e-4)
        assert mine["requests"] == theirs["requests"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("<svg") >= 6
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page
    assert "| us |" in (tmp_path / "run" / "report.md").read_text()
    with pytest.raises(ConfigError, match="There is a run"):
        Folder(tmp_path / "run")


def test_elastic_memory_on_and_off_are_compared(tmp_path: Path) -> None:
    measured = measure(FakeSystem(), schedule(Arm("none"), Arm("us"), Arm("us", elastic=False), repeats=1))
    made = document.build(measured.schedule, measured.stretches, Deadline(2.0, 0.2), ABOUT)
    assert made["arms"] == ["none", "us", "us pinned"]
    assert sum(e["elastic_events"] for e in made["table"] if e["arm"] == "us") > 0
    assert sum(e["elastic_events"] for e in made["table"] if e["arm"] == "us pinned") == 0
    assert "Elastic memory" in output.drawn(made)


def test_a_wrong_token_is_found() -> None:
    class Wrong(FakeSystem):
        def _text(self, ids: Sequence[int], params: Any) -> tuple[int, ...]:
            tokens = super()._text(ids, params)
            return (*tokens[:2], 98, *tokens[3:]) if self.arm.planner == "us" else tokens

        def alone(self, ids: Sequence[int], params: Any) -> Any:
            self.arm = Arm("none")
            return super().alone(ids, params)

    measured = measure(Wrong())
    assert {d.arm for d in measured.differences} == {"us"}
    assert {d.position for d in measured.differences} == {2}
    assert measured.differences[0].left == 98


def test_one_planner_without_answers_alone_compares_nothing_with_itself() -> None:
    trace = tuple(Arrival(float(n), f"word {'x' * n}", None, 3) for n in range(5))
    made = schedule(Arm("us"), rates=(), trace=trace, repeats=1)
    measured = Measuring(FakeSystem(), made, pool()).run(alone=False)
    assert (measured.compared, measured.uncompared, measured.alone) == (0, 5, 0)


def test_the_length_of_answers_counts_those_that_were_cut_off() -> None:
    def served(tokens: int, outcome: Outcome) -> Served:
        return Served(0, "p", 0.0, 1, outcome=outcome, pieces=[(1.0, tokens)] if tokens else [])

    assert answer_tokens([served(n, "finished") for n in (2, 4, 9)]) == pytest.approx(5)
    assert answer_tokens([served(64, "finished"), served(30, "unfinished"), served(64, "finished")]) == 64
    # The short ones ended; the long ones had 100 tokens when time was up.
    found = [served(10, "finished")] * 5 + [served(100, "unfinished")] * 5 + [served(0, "refused")]
    assert answer_tokens(found) == pytest.approx(55)
    assert answer_tokens([]) == 0


def test_failures_are_counted_and_the_run_goes_on() -> None:
    measured = measure(FakeSystem(faults={n: failing() for n in range(60, 300, 7)}))
    outcomes = [one.outcome for s in measured.stretches for one in s.served]
    assert 0 < outcomes.count("failed") < len(outcomes) / 3
    made = document.build(measured.schedule, measured.stretches, Deadline(2.0, 0.2), ABOUT)
    assert any("requests failed" in text for text in made["warnings"])
    assert any("failed" in table.columns and "1" in str(table.rows) for table in tables.all_tables(made))


def test_an_engine_that_does_nothing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"Nothing came of 8 s under full load: EdgespecError: no memory"):
        measure(FakeSystem(faults={n: failing("no memory") for n in range(1000)}))


def test_a_rate_that_never_ends() -> None:
    with pytest.raises(ConfigError, match="Give a rate below"):
        measure(FakeSystem(step=1.0), schedule(rates=(5.0,), limit_s=20.0))


def test_time_is_up() -> None:
    ticks = itertools.count(0.0, 40.0)
    measured = measure(FakeSystem(), schedule(most_s=300.0), now=lambda: next(ticks))
    assert 0 < len(measured.stretches) < 12
    assert measured.left_out == 12 - len(measured.stretches)


def test_ctrl_c_in_the_middle_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Stretch] = []
    real = asyncio.Event.wait

    async def wait(self: asyncio.Event) -> bool:
        if len(kept) == 2:  # as if Ctrl-C had come five seconds into the third stretch
            asyncio.get_running_loop().call_later(5.0, self.set)
        return await real(self)

    monkeypatch.setattr(asyncio.Event, "wait", wait)
    measured = measure(FakeSystem(), keep=kept.append)
    assert len(measured.stretches) == len(kept) == 3
    assert measured.interrupted
    assert measured.stretches[2].window == (2.0, pytest.approx(5.0, abs=0.2))
    assert measured.compared > 0
    made = document.build(measured.schedule, measured.stretches, Deadline(2.0, 0.2), ABOUT)
    assert "The run was interrupted" in " ".join(made["warnings"])


def test_requests_that_are_stuck_end_the_run_with_what_was_measured(tmp_path: Path) -> None:
    kept: list[Stretch] = []
    system = FakeSystem()

    def keep(stretch: Stretch) -> None:
        kept.append(stretch)
        if len(kept) == 2:  # the third one hangs
            system.deaf, system.step = True, 1000.0

    measured = measure(system, keep=keep)
    assert len(measured.stretches) == len(kept) == 3
    assert measured.interrupted
    assert "did not end within" in measured.stuck == kept[2].stuck
    assert "unfinished" in [one.outcome for one in kept[2].served]
    assert measured.alone == 0  # nothing more is asked of an engine that hangs
    assert measured.compared > 0
    made = document.build(measured.schedule, measured.stretches, Deadline(2.0, 0.2), ABOUT | {"headline": "."})
    assert any(text.startswith("The run ended early: requests") for text in made["warnings"])
    assert "The run was interrupted" not in " ".join(made["warnings"])
    folder = Folder(tmp_path / "run")
    output.publish(made, folder)
    assert (tmp_path / "run" / "report.html").exists()


def test_the_table_says_at_which_rate_requests_did_come() -> None:
    measured = measure(FakeSystem(), schedule(Arm("none"), rates=(1.0,), repeats=1))
    made = document.build(measured.schedule, measured.stretches, Deadline(2.0, 0.2), ABOUT)
    came = len(measured.stretches[0].counted()) / 18.0
    (row,) = tables.throughput(made).rows
    assert tables.throughput(made).columns[:2] == ["rate", "came"]
    assert row[1] == f"{came:.2f}"


def test_recorded_arrivals_bring_their_own_prompts() -> None:
    trace = tuple(Arrival(float(n), f"word {'x' * n}", None, 3) for n in range(5))
    measured = measure(FakeSystem(), schedule(Arm("none"), Arm("us"), rates=(), trace=trace, repeats=1))
    assert [len(s.served) for s in measured.stretches] == [5, 5]
    assert all(one.tokens <= 3 for s in measured.stretches for one in s.served)
    assert measured.alone == 5


def test_a_run_of_which_nothing_is_kept_leaves_its_folder_as_it_was(tmp_path: Path) -> None:
    """Else a refused rate would keep the corrected command from the same folder."""
    folder = Folder(tmp_path / "run")
    (tmp_path / "run" / STATE).mkdir()
    (tmp_path / "run" / STATE / "learned.json").touch()
    with pytest.raises(ConfigError, match="Give a rate below"):
        measure(FakeSystem(step=1.0), schedule(rates=(5.0,), limit_s=20.0), keep=folder.keep)
    folder.close()
    assert not (tmp_path / "run").exists()
    (tmp_path / "old" / STATE).mkdir(parents=True)
    (tmp_path / "old" / "notes").touch()
    Folder(tmp_path / "old").close()
    assert {file.name for file in (tmp_path / "old").iterdir()} == {STATE, "notes"}
    folder = Folder(tmp_path / "run")
    folder.write("x.json", "{}\n")
    folder.close()
    assert (tmp_path / "run" / "x.json").exists()
    with pytest.raises(ConfigError, match="There is a run"):
        Folder(tmp_path / "run")


def test_the_parts_of_a_load_that_changes_are_told_apart(tmp_path: Path) -> None:
    system = FakeSystem(max_sessions=2, speeds={"us": 3, "fixed:1": 2})
    changing = schedule(
        Arm("none"), Arm("us"), Arm("goodput"), rates=(1.2,), repeats=1, seconds=60.0, limit_s=180.0, kind="steps"
    )  # fmt: skip
    measured = measure(system, changing)
    made = document.build(measured.schedule, measured.stretches, Deadline(2.0, 0.2), ABOUT)
    low, high, again = made["parts"]
    assert [part["name"] for part in made["parts"]] == ["low", "high", "low again"]
    asked = [sum(entry["requests"]["asked"] for entry in part["table"]) for part in made["parts"]]
    assert asked[1] > 2 * (asked[0] + asked[2])
    assert sum(asked) == sum(entry["requests"]["asked"] for entry in made["table"])
    running = [part["table"][0]["mean_sequences"]["value"] for part in (low, high)]
    assert running[1] > running[0]
    tokens = [sum(row["table"][0]["tokens_per_second"]["value"] * (row["end"] - row["begin"]) for row in made["parts"])]
    assert tokens == [pytest.approx(made["table"][0]["tokens_per_second"]["value"] * 58)]
    assert again["to_none"]["arms"]["us"]["by_rate"]["1.2"]["value"] > 1
    rows = tables.parts(made).rows
    assert len(rows) == 9
    assert [row[:3] for row in rows[3:5]] == [["1.2", "high (3/s)", "none"], ["1.2", "high (3/s)", "us"]]
    assert rows[3][4] == "1.000"
    speeds = [f"{entry['throughput']['value']:.1f}" for part in made["parts"] for entry in part["table"]]
    assert [row[3] for row in rows] == speeds
    assert len(set(speeds)) > 3
    assert tables.parts(made).columns[-3:] == ["queued (mean)", "TTFT p50 s", "TPOT p50 s"]
    assert {len(row) for row in rows} == {len(tables.parts(made).columns)}
    assert tables.parts(made) in tables.short(made)
    assert [picture["title"] for picture in output.drawn(made)["Over time"]][1].startswith("Gamma of the planners")
    unchanging = schedule(*changing.arms, rates=(1.2,))
    steady = document.build(unchanging, measured.stretches, Deadline(2.0, 0.2), ABOUT)
    assert steady["parts"] == []
    assert "By part of the load" not in [table.title for table in tables.all_tables(steady)]
    assert len(output.drawn(steady)["Over time"]) == 1
