"""`edgespec bench simulate` from its flags to its files, and what it refuses before anything is read or replayed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.simulation import command, tables
from edgespec.bench.simulation.output import FILES
from edgespec.bench.specbench.folder import RunFolder
from edgespec.errors import ConfigError
from tests.bench.simulation import made


@contextmanager
def progress(_: int) -> Iterator[tuple[Callable[[str], None], Callable[[int], None]]]:
    yield (lambda text: None), (lambda steps: None)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(made.folder(tmp_path_factory.mktemp("command") / "traces", 6))


def simulate(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser, int)
    return command.run(parser.parse_args([*arguments, "--ranker", "off", "--jobs", "1"]), progress)


def test_tables_and_files(traces: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "out"
    assert simulate(traces, "--policies", "edgespec,memspec@3", "--sweep", "load-ratio", "--out", str(out)) == 0
    shown = capsys.readouterr().out
    assert "Simulated. 6 texts" in shown
    assert "edgespec" in shown
    document = json.loads((out / "simulation.json").read_text(encoding="utf-8"))
    assert [row["policy"] for row in document["rows"]] == ["plain", "edgespec", "memspec@3"]
    assert len(document["sweeps"][0]["points"]) == 12
    assert {path.name for path in out.iterdir()} == set(FILES)
    assert "| policy |" in (out / "simulation.md").read_text(encoding="utf-8")
    page = (out / "simulation.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 2
    assert "<script" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")  # nothing is fetched
    for text in (page.split("How it was run")[1], (out / "simulation.md").read_text(encoding="utf-8")):
        assert "edgespec" in text
        assert "traces" in text
        assert "left, right" in text


def test_plain_is_there_without_being_asked_for(traces: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(traces, "--policies", "static:words@1", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert (rows[0]["policy"], rows[0]["speedup"]) == ("plain", 1.0)
    assert rows[1]["draft_share"]["words"] > 0


def test_lookup_alone_has_no_other_draft_and_all_statics_are_one_each(
    traces: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(traces, "--policies", "ngram,all-statics", "--json") == 0
    rows = {row["policy"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert list(rows) == ["plain", "ngram", "static:left@3", "static:right@3"]
    assert set(rows["ngram"]["draft_share"]) == {"plain"}  # nothing to look up in these texts
    assert rows["static:left@3"]["draft_share"]["left"] > 0


def test_a_device_profile_gives_the_costs_and_says_so(traces: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(traces, "--policies", "static:left@3", "--device-profile", "orin-nano-super", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["device"]["target"] == "qwen2.5-7b"
    assert document["rows"][0]["tokens_per_second"] == pytest.approx(1e3 / document["device"]["verify_ms"]["1"])
    assert any("roofline" in warning for warning in document["warnings"])


def test_settings_of_the_command_line_count(traces: str, capsys: pytest.CaptureFixture[str]) -> None:
    def rows(*more: str) -> dict[str, Any]:
        assert simulate(traces, "--policies", "static:left@3", "--json", *more) == 0
        return dict(json.loads(capsys.readouterr().out)["rows"][1])

    usual = rows()
    assert rows("--draft-cost", "0.5")["seconds"] > usual["seconds"]
    assert rows("--new-tokens", "10")["tokens"] < usual["tokens"]
    assert rows("--limit", "1")["texts"] == 2
    slow = rows("--load-ratio", "20", "--resident", "1", "--order", "file")
    assert slow["load_ratio"] == 20.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "edgspec"], "did you mean edgespec"),
        (["--policies", "static:lefd@3"], "did you mean left"),
        (["--model", "qwen2.5-3b"], "--device-profile"),
        (["--device-profile", "orin"], "orin-nano-8gb"),
        (["--device-profile", "orin-nano-8gb", "--resident", "6"], "room for 4"),
        (["--costs", "none.json"], "cannot be read"),
        (["--validate", "nothing"], "There is no run"),
        (["--validate", "nothing", "--device-profile", "agx-orin"], "leave out --device-profile"),
        (["--policies", "static:left@4"], "at most 3"),
        (["--drafts", "lefd"], "was not recorded; did you mean left"),
        (["--drafts", "words"], "no draft with weights"),
        (["--drafts", "right", "--policies", "static:left@3"], "static:left@3: --drafts leaves left out; it has right"),
        (["--drafts", "right", "--policies", "nightjar:left", "--sweep", "resident"], "leaves left out"),
    ],
)
def test_what_cannot_work_is_refused(traces: str, arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(traces, *arguments)


def test_bad_arguments_are_found_before_texts_are_read(
    traces: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("texts were read")

    monkeypatch.setattr(command, "read_corpus", read)
    (tmp_path / "file").touch()
    for arguments in (["--policies", "nonsense"], ["--out", str(tmp_path / "file")], ["--validate", "none"]):
        with pytest.raises(ConfigError):
            simulate(traces, *arguments)


def test_a_seed_is_a_whole_number_from_0_up(traces: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        simulate(traces, "--order", "shuffled", "--seed=-1")
    assert "wants a whole number from 0 up, not '-1'" in capsys.readouterr().err


def test_a_damaged_table_of_costs_is_named(traces: str, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    for content in ("[]", "{}", "[" * 100_000, '{"verify": {"0": 1}, "drafts": {}}', "no"):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"costs\.json is no table"):
            simulate(traces, "--costs", str(file))


def test_ctrl_c_leaves_nothing_half_written(
    traces: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_all", interrupted)
    assert simulate(traces, "--out", str(tmp_path / "out")) == 130
    assert "interrupted" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_what_the_flags_cannot_do_is_said(
    traces: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.Device, "slots", lambda *_: 1)
    arguments = ("--device-profile", "agx-orin", "--resident", "1", "--sweep", "resident", "--policies", "memspec@3")
    assert simulate(traces, *arguments, "--sweep", "prefetch", "--out", str(tmp_path)) == 0
    document = json.loads((tmp_path / "simulation.json").read_text(encoding="utf-8"))
    assert {point["value"] for point in document["sweeps"][0]["points"]} == {1}
    shown = capsys.readouterr().out
    assert "Mind: Only 1 of 2 drafts fit" in shown
    assert "Mind: --sweep prefetch compares policies of its own" in shown
    assert "mab-async" in shown.split("Prediction, prefetching, and both")[1]  # the table's own note
    assert "- Only 1 of 2 drafts fit" in (tmp_path / "simulation.md").read_text(encoding="utf-8")


def test_a_validation_by_the_median_repeat_says_so(
    traces: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("check", "same_drafts"):
        monkeypatch.setattr(command, name, lambda *_: None)
    found = {"rows": [], "agree": 0, "predicted": 0, "within": 0.05, "texts": 6, "resident": 2}
    found |= {"asked": 6, "answered": 6, "compared": 6}
    monkeypatch.setattr(command, "validated", lambda *_: found)
    for repeats, told in ((1, 0), (3, 1)):
        run = RunFolder(Path("run"), {"repeats": repeats}, finished=True)
        monkeypatch.setattr(command, "read_run", {"run": run}.__getitem__)
        assert simulate(traces, "--validate", "run", "--json") == 0
        warnings = json.loads(capsys.readouterr().out)["warnings"]
        assert sum("measured is the median repeat" in text for text in warnings) == told


def test_rates_are_those_of_policies_in_one_process(traces: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(traces, "--policies", "plain,memspec@3", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    replayed = document["replayed"]
    assert set(replayed["rounds_per_second"]) == {"memspec@3"}
    assert replayed["rounds"] == document["rows"][1]["rounds"]
    assert simulate(traces, "--policies", "plain,memspec@3") == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert "round" not in first
    assert last.startswith(f"{replayed['rounds']:,} rounds replayed in ")
    assert last.endswith(" s (1 process).")


def test_only_the_drafts_that_are_named_take_part(traces: str, capsys: pytest.CaptureFixture[str]) -> None:
    named = ("--drafts", "right", "--policies", "all-statics,edgespec", "--sweep", "resident")
    assert simulate(traces, *named, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in document["rows"]] == ["plain", "static:right@3", "edgespec"]
    assert (document["drafts"], document["drafts_left_out"]) == (["right"], ["left", "words"])
    assert "1 draft with weights (without left, words), 1 in memory" in document["about"]
    assert {point["value"] for point in document["sweeps"][0]["points"]} == {1}
    assert {point["line"] for point in document["sweeps"][0]["points"]} == {"static:right@3", "edgespec"}
    for row in document["rows"]:
        assert set(row["draft_share"]) <= {"right", "plain"}


def test_oracles_are_said_to_be_no_bounds_where_there_are_any(traces: str, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*policies: str) -> int:
        assert simulate(traces, "--policies", ",".join(policies), "--sweep", "resident") == 0
        return capsys.readouterr().out.count("oracle-dynamic may be below oracle-static, and in one domain below plain")

    assert told("memspec@3") == 0
    assert told("memspec@3", "oracle-static") == 2  # under both tables


def test_domains_are_given_with_their_texts_and_intervals_of_few_with_a_caution(
    traces: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*more: str) -> str:
        assert simulate(traces, "--policies", "memspec@3", "--out", str(tmp_path), *more) == 0
        return capsys.readouterr().out

    caution = "narrower than it ought to be"
    usual, least = shown(), shown("--limit", "1")
    assert "left (3)  right (3)" in usual
    assert caution in usual
    assert "left (1)  right (1)" in least
    assert caution not in least  # of two texts there is no interval
    rows = json.loads((tmp_path / "simulation.json").read_text(encoding="utf-8"))["rows"]
    notes = [tables.policies([row | {"texts": texts} for row in rows], "costs").note for texts in (4, 5, 19, 20)]
    assert [caution in note for note in notes] == [False, True, True, False]
    written = (tmp_path / "simulation.md").read_text(encoding="utf-8")
    assert f"of fewer than about 20 it is {caution}" in written
    for term in ("tok/round", "fallback", "loads, switches", "catch-up, shadows"):
        assert f"- **{term}**" in written


def test_every_table_says_whose_costs_it_has(traces: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*more: str) -> str:
        assert simulate(traces, "--policies", "memspec@3", "--sweep", "interval", *more) == 0
        return capsys.readouterr().out

    file = tmp_path / "mine.json"
    file.write_text(json.dumps(made.COSTS), encoding="utf-8")
    for costs, more in (
        ("costs measured with the traces", ()),
        ("costs of mine.json", ("--costs", str(file))),
        ("costs of a model of ", ("--device-profile", "agx-orin")),
    ):
        found = shown(*more)
        assert f"\nPolicies, at {costs}" in found
        assert f"At {costs}" in found
        assert found.count("Planning costs nothing here.") == 2


def test_what_is_in_memory_is_said(traces: str, capsys: pytest.CaptureFixture[str]) -> None:
    def first(*more: str) -> str:
        assert simulate(traces, *more) == 0
        return capsys.readouterr().out.splitlines()[0]

    named = ("--policies", "memspec@3")
    assert "2 drafts with weights and words, 1 in memory" in first(*named, "--resident", "1")
    assert "1 to 2 in memory" in first("--resident", "1..2")
    assert "1 to 2 (2 where that is not varied) in memory" in first(*named, "--resident", "1..2")
    assert "1 to 2 (1 where that is not varied) in memory" in first(*named, "--resident", "1", "--sweep", "resident")


def test_more_slots_than_drafts_are_said_to_be_too_many(traces: str, capsys: pytest.CaptureFixture[str]) -> None:
    def minds(*more: str) -> list[str]:
        assert simulate(traces, "--policies", "memspec@3", *more, "--json") == 0
        return [text for text in json.loads(capsys.readouterr().out)["warnings"] if "--resident" in text]

    assert minds() == minds("--resident", "2") == minds("--drafts", "left") == []
    assert minds("--resident", "9") == [
        "--resident 9: there are only 2 drafts with weights, and no more can be in memory."
    ]
    assert minds("--resident", "1..9", "--drafts", "left") == [
        "--resident 1..9: there is only 1 draft with weights, and no more can be in memory."
    ]


def test_costs_that_were_measured_on_a_busy_machine_are_doubted(
    traces: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def doubted(disturbance: Any, *more: str) -> bool:
        folder = made.folder(tmp_path / f"{disturbance}{len(more)}", 2, {**made.COSTS, "disturbance": disturbance})
        assert simulate(str(folder), "--policies", "memspec@3", *more, "--json") == 0
        told = json.loads(capsys.readouterr().out)["warnings"]
        return any("Other processes used" in text for text in told)

    file = tmp_path / "costs.json"
    file.write_text(json.dumps(made.COSTS), encoding="utf-8")
    assert doubted(0.25)
    assert not doubted(0.1)
    assert not doubted("much")
    assert not doubted(0.25, "--costs", str(file))
    assert not doubted(0.25, "--device-profile", "agx-orin", "--resident", "1")
