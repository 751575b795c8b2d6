"""The same arrivals in a simulated world, and simulated beside measured."""

from __future__ import annotations

import argparse
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.load import command, document, output, simulated
from edgespec.bench.load.folder import COSTS, Folder
from edgespec.bench.load.measures import Deadline
from edgespec.bench.load.records import Served, Stretch
from edgespec.bench.load.schedule import Schedule
from edgespec.bench.load.system import Arm
from edgespec.errors import ConfigError
from predictor.costs import CostTable
from predictor.load.costs import BatchCosts
from tests.bench.load.test_measuring import ABOUT
from tests.support.tiny import write_tiny

COST = {(1, 0): 0.02, (1, 3): 0.03, (8, 0): 0.05, (8, 24): 0.13}


@contextmanager
def progress(_: int):
    yield (lambda text: None), (lambda steps: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("load") / "model", max_position_embeddings=2048, head_dim=16)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / COSTS
    data = {"batch": BatchCosts(COST).to_json(), "drafts": CostTable(drafts={"draft": 0.001}).to_json()}
    path.write_text(json.dumps(data))
    return path


def load(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser, int)
    return command.run(parser.parse_args([*words, "--simulate"]), progress)


def test_simulated_and_said_to_be(model: Path, costs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", str(model), "--costs", str(costs), "--planners", "none,fixed:3", "--repeats", "2"]
    assert load(*words, "--out", str(tmp_path / "a"), "--seconds", "20", "-n", "32", "--acceptance", "0.8") == 0
    made = json.loads((tmp_path / "a" / "load.json").read_text())
    assert made["simulated"]
    assert len(made["rates"]) == 5
    first = made["to_none"]["arms"]["fixed:3"]["by_rate"]
    assert first[f"{made['rates'][0]:g}"]["value"] > 1.3  # alone, three guesses pay
    assert first[f"{made['rates'][-1]:g}"]["value"] < first[f"{made['rates'][0]:g}"]["value"]
    assert "Simulated: no clock measured this." in capsys.readouterr().out
    for name in ("report.md", "report.html"):
        text = (tmp_path / "a" / name).read_text()
        assert text.lower().count("simulated") > 5
    assert load(*words, "--out", str(tmp_path / "b"), "--seconds", "20", "-n", "32", "--acceptance", "0.8") == 0
    again = json.loads((tmp_path / "b" / "load.json").read_text())
    assert again["table"] == made["table"]


def measured_run(folder: Path, factor: float = 1.0) -> None:
    """A "measured" run that is what the world does, its seconds stretched by `factor`."""
    true = simulated.Costs(
        BatchCosts({point: factor * s for point, s in COST.items()}), CostTable(drafts={"code": factor * 0.001})
    )
    schedule = Schedule((Arm("none"), Arm("fixed:3")), (0.5, 1.5), 1, 30.0, 5.0, 90.0, 1e9)
    worlds = simulated.Worlds(true, 8, None, 7)
    kept, made = Folder(folder), []
    for turn in schedule.turns():
        arrivals = schedule.arrivals(turn.rate, turn.repeat)
        jobs = {n: simulated.Job(a.at, 30 + n, 20 + n % 9, "code", [0.7] * 8) for n, a in enumerate(arrivals)}
        stretch = worlds.stretch(turn, jobs, schedule)
        for one in stretch.served:  # as an engine counts: of 100 blocks, with places as likely as they are
            if turn.arm.planner == "fixed:3":
                one.drafts, one.reached, one.stood = {"code": 90, "plain": 10}, (100, 70, 49), (70, 49, 34)
        made.append(stretch)
        kept.keep(stretch)
    output.publish(document.build(schedule, made, Deadline(2.0, 0.2), ABOUT | {"settings": {"max sessions": 8}}), kept)
    kept.close()
    (folder / COSTS).write_text(
        json.dumps({"batch": BatchCosts(COST).to_json(), "drafts": CostTable(drafts={"code": 0.001}).to_json()})
    )


def validate(model: Path, tmp_path: Path, factor: float) -> dict[str, Any]:
    measured_run(tmp_path / "measured", factor)
    assert load("-m", str(model), "--validate", str(tmp_path / "measured"), "--out", str(tmp_path / "v")) == 0
    page = (tmp_path / "v" / "report.html").read_text()
    assert "Simulated against measured throughput" in page
    found: dict[str, Any] = json.loads((tmp_path / "v" / "load.json").read_text())["validation"]
    return found


def test_a_true_world_agrees(model: Path, tmp_path: Path) -> None:
    found = validate(model, tmp_path, 1.0)
    assert len(found["rows"]) == found["agree"] == 4
    assert abs(found["mean_error"]) < 0.05


def test_wrong_costs_are_seen(model: Path, tmp_path: Path) -> None:
    found = validate(model, tmp_path, 1.5)
    assert found["agree"] == 0
    assert found["mean_error"] > 0.3


def test_jobs_are_what_any_arm_saw() -> None:
    def one(number: int, tokens: int, outcome: Any, **more: Any) -> Served:
        return Served(number, "p", 1.0 * number, 40, outcome=outcome, pieces=[(1.0, tokens)], **more)

    left = Stretch("none", 1.0, 0, 0, 10.0, 0.0, [one(0, 9, "finished"), one(1, 3, "unfinished")])
    right = Stretch("us", 1.0, 0, 1, 10.0, 0.0, [])
    right.served = [
        one(0, 9, "finished", reused_tokens=10, drafts={"a": 3, "b": 5, "plain": 9}, reached=(96, 96), stood=(96, 0)),
        one(1, 12, "finished"),
    ]
    jobs = simulated.jobs_of([left, right])
    assert (jobs[0].prompt, jobs[0].new, jobs[0].draft) == (30, 9, "b")
    assert jobs[0].rates[0] > 0.95
    assert jobs[0].rates[1] < 0.1
    assert (jobs[1].new, jobs[1].rates[:2]) == (12, pytest.approx(jobs[0].rates[:2], abs=0.05))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--costs", "no.json"], "no.json cannot be read"),
        (["--validate", "nowhere"], "has no finished run"),
        (["--elastic", "both"], "--elastic is of live runs"),
        (["--planners", "nightjarr"], "did you mean nightjar"),
        (["--rates", "10000"], "requests in 40 s are more than"),
        (["--gamma", "3"], "as in fixed:3"),
    ],
)
def test_what_is_refused(model: Path, tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load("-m", str(model), "--out", str(tmp_path / "x"), *words)


@pytest.mark.parametrize("document", [{"table": [], "simulated": False}, [1], None])
def test_a_folder_without_an_open_load(model: Path, tmp_path: Path, document: Any) -> None:
    """As --sessions leaves one, or a run that broke off before its first stretch."""
    measured_run(tmp_path / "a")
    if document is None:
        (tmp_path / "a" / "stretches.jsonl").write_text("")
    else:
        (tmp_path / "a" / "load.json").write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="has no open load with a finished stretch"):
        load("-m", str(model), "--validate", str(tmp_path / "a"), "--out", str(tmp_path / "b"))


def test_a_simulated_run_validates_nothing(model: Path, costs: Path, tmp_path: Path) -> None:
    words = ["-m", str(model), "--costs", str(costs), "--planners", "none", "--repeats", "1", "--rates", "1"]
    assert load(*words, "--out", str(tmp_path / "a"), "--seconds", "5") == 0
    with pytest.raises(ConfigError, match="was simulated itself"):
        load("-m", str(model), "--validate", str(tmp_path / "a"), "--out", str(tmp_path / "b"))


def test_a_simulated_load_that_changes(model: Path, costs: Path, tmp_path: Path, capsys: Any) -> None:
    steep = BatchCosts({(1, 0): 0.02, (1, 3): 0.022, (8, 0): 0.05, (8, 24): 0.4})  # to guess pays beside few
    costs.write_text(json.dumps(json.loads(costs.read_text()) | {"batch": steep.to_json()}))
    words = ["-m", str(model), "--costs", str(costs), "--planners", "none,fixed:3,goodput", "--repeats", "1"]
    words += ["-n", "32", "--arrivals", "steps", "--rates", "2", "--seconds", "60", "--acceptance", "0.8"]
    assert load(*words, "--out", str(tmp_path / "a")) == 0
    assert "By part of the load" in capsys.readouterr().out
    made = json.loads((tmp_path / "a" / "load.json").read_text())
    table = {(part["name"], entry["arm"]): entry for part in made["parts"] for entry in part["table"]}
    gammas = {key: entry["mean_gamma"]["value"] for key, entry in table.items()}
    assert gammas["low", "goodput"] > gammas["high", "goodput"] < gammas["low again", "goodput"]
    assert gammas["low", "none"] == gammas["high", "none"] == 0


def test_drafts_filed_under_architectures_have_their_seconds() -> None:
    steps = {"slow": 0.003, "quick": 0.001, "ngram": 1e-5}
    filed = CostTable({1: 0.02}, steps, loads={"quick": 0.5}, catch_up={"slow": 1.0, "quick": 2.0})
    made = simulated.Costs(BatchCosts(COST), filed).serving(["code", "ngram"])
    assert (made.drafts.draft("code"), made.drafts.catch_up("code", 3), made.drafts.load("code")) == (0.001, 6.0, 0.5)
    assert made.drafts.draft("ngram") == 1e-5
    assert made.drafts.catch_up("ngram", 1) == filed.catch_up("ngram", 1)
    nothing = simulated.Costs(BatchCosts(COST), CostTable({1: 0.02}, {"ngram": 1e-5}))
    assert nothing.serving(["code"]) is nothing
