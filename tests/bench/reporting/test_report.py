"""`edgespec bench report`: its files and its table."""

from __future__ import annotations

import json
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from edgespec.bench.reporting import style, tables, terminal
from edgespec.bench.reporting.command import FILES, publish
from edgespec.bench.reporting.definitions import DEFINITIONS
from edgespec.bench.reporting.markdown import block, escape
from edgespec.bench.reporting.tables import Table
from edgespec.bench.specbench.folder import ArmInfo
from edgespec.cli.main import main
from edgespec.errors import ConfigError
from tests.bench.reporting.samples import QA, part_of, sample_run
from tests.support.runs import failed, record, write_run

EVIL = "<script>alert('x')</script> | **b** [l](http://e.x)\n# h"


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The sample run's folder with its report, the document, and what was printed."""
    folder = sample_run(tmp_path_factory.mktemp("sample") / "run", repeats=2)
    console = Console(width=160, record=True, file=(folder / "printed").open("w"))
    document = publish([folder], folder, console)
    return folder, document, console.export_text()


def page(folder: Path) -> ET.Element:
    """The report, which is XML but for its doctype; so every tag is closed and every text escaped."""
    text = (folder / "report.html").read_text(encoding="utf-8")
    return ET.fromstring(text.removeprefix("\n" * (len(text) - len(text.lstrip()))).partition("<!doctype html>")[2])


def test_the_page_needs_nothing_else(sample: tuple[Path, dict[str, Any], str]) -> None:
    folder, _, _ = sample
    root = page(folder)
    addresses = [
        value
        for node in root.iter()
        for name, value in node.items()
        if name.rpartition("}")[2] in ("href", "src", "srcset", "action", "data")
    ]
    assert addresses, "glyphs of pictures"
    assert all(address.startswith("#") for address in addresses)
    assert not [node.tag for node in root.iter() if node.tag in ("script", "link", "iframe", "img", "object")]
    assert "@import" not in ET.tostring(root, encoding="unicode")
    assert "exact weights, at most 128 new tokens, temperature 0, order: file, repeats: 2" in "".join(root.itertext())
    assert "width=device-width" in ET.tostring(root, encoding="unicode")
    svgs = [node for node in root.iter() if node.tag.endswith("}svg")]
    assert len(svgs) == (15 if style.available() else 0)


def test_the_figures_are_in_all_forms(sample: tuple[Path, dict[str, Any], str]) -> None:
    folder, document, printed = sample
    assert json.loads((folder / "report.json").read_text(encoding="utf-8")) == json.loads(json.dumps(document))
    arms = document["parts"][0]["arms"]
    html, text = "".join(page(folder).itertext()), (folder / "report.md").read_text(encoding="utf-8")
    for name, arm in arms.items():
        assert name in html
        assert escape(name) in text
        assert name in printed
        if arm["answers"]:
            value = f"{arm['speedup']['value']:.2f}"
            assert value in html
            assert value in text
            assert value in printed
    sentence = f"edgespec decodes {arms['edgespec']['first_repeat']['value']:.2f} times as fast as plain"
    for shown in (html, printed, text.replace("\\", "")):
        assert "No module named 'flashspec'" in shown
        assert sentence in shown
    assert "signal 9 (SIGKILL)" in html
    for name, meaning in DEFINITIONS.items():
        assert name in html
        assert " ".join(meaning.split()) in html
        assert f"**{escape(name)}**: {escape(meaning)}" in text


def test_what_others_wrote_stays_text(tmp_path: Path) -> None:
    place = {"category": EVIL, "task": EVIL, "domain": EVIL}
    folder = write_run(
        tmp_path / "run",
        {"plain": [record(1, **place), record(2)], "arm": [failed(1, EVIL, **place), record(2)]},
        arms={"peer:x": ArmInfo("peer", "absent", EVIL, EVIL), "arm": ArmInfo("policy", weights=EVIL)},
        settings={"model": EVIL, "questions": EVIL},
        machine={"cpu": EVIL},
        skipped=[{"file": EVIL, "line": 3, "reason": EVIL}],
    )
    publish([folder], folder, Console(width=160, file=(tmp_path / "printed").open("w")))
    root = page(folder)
    assert not [node for node in root.iter() if node.tag in ("script", "b", "a")]
    assert "<script>alert('x')</script>" in "".join(root.itertext())
    for line in (folder / "report.md").read_text(encoding="utf-8").splitlines():
        assert "<script" not in line.replace("\\<", "")
        assert "](" not in line.replace("\\]", "")
    assert_rectangular(folder)


def test_names_break_no_table_and_command_no_terminal(tmp_path: Path) -> None:
    table = Table("a|b", ["<b>", "2"], [["x|<img src=y>", "\x1b[2J"]], "note *n*")
    made = block(table, level=2)
    assert made.startswith("## a\\|b\n\n| \\<b\\> | 2 |\n| --- | --- |\n")
    assert "| x\\|\\<img src=y\\> | ?\\[2J |" in made
    assert "\x1b" not in made + terminal.text(table)
    command = "\x1b]0;x\x07"
    folder = write_run(
        tmp_path / "run",
        {"plain": [record(1), record(2)], f"b{command}": [failed(1, command), record(2)]},
        arms={"peer:x": ArmInfo("peer", "absent", command, command)},
        machine={"cpu": command},
    )
    with (tmp_path / "printed").open("w") as file:
        publish([folder], folder, Console(width=160, file=file))
    printed = (tmp_path / "printed").read_text()
    assert "?]0;x?" in printed
    assert "\x1b" not in printed + (folder / "report.md").read_text()


def test_plain_has_no_ratio_to_itself(sample: tuple[Path, dict[str, Any], str]) -> None:
    part = sample[1]["parts"][0]
    assert "plain" not in [row[0] for row in tables.by(part, "task").rows]
    assert tables.summary(part).rows[0][:4] == ["plain", "1.00", "–", "–"]
    assert (part["common"], tables.summary(part).rows[0][4]) == (23, "24"), "edgespec failed at one"


@pytest.mark.usefixtures("no_pictures")
def test_what_is_not_of_the_same_kind_is_marked(tmp_path: Path) -> None:
    place = {"category": "qa", "task": "qa", "domain": "qa"}
    plain = [record(q, repeat=r, **(place if q > 5 else {})) for q in range(1, 7) for r in (0, 1)]
    folder = write_run(
        tmp_path / "run",
        {"plain": plain, "peer:x": [*plain[:2], *plain[10:]], "arm": plain},
        arms={"peer:x": ArmInfo("peer", weights="float32, dequantised")},
        settings={"resident": None},
        machine={"slots": 2},
    )
    console = Console(width=160, record=True, file=(tmp_path / "printed").open("w"))
    document = publish([folder], folder, console)
    (part,), printed = document["parts"], console.export_text()
    assert [row[0] for row in tables.summary(part).rows] == ["plain", "peer:x *", "arm"]
    assert [row[3] for row in tables.summary(part).rows] == ["–", "1.00", "1.00"]
    assert [row[-1] for row in tables.latency(part).rows] == ["the file's", "float32, dequantised", "the file's"]
    by_task = {row[0]: row[1:] for row in tables.by(part, "task").rows}
    assert by_task["peer:x"] == ["1.00 n=1", "1.00"]
    assert by_task["arm"][0] == "1.00 (1.00–1.00)"
    for text in ("peer:x *", "computes with other weights", "1st repeat", "drafts in memory at once: 2 (what fitted)"):
        assert text in printed
        assert text in "".join(page(folder).itertext())


def assert_rectangular(folder: Path) -> None:
    """Every table of the Markdown has as many cells in each row."""
    text = (folder / "report.md").read_text(encoding="utf-8")
    found = re.findall(r"(?:^\|.*\n)+", text, flags=re.M)
    assert len(found) >= 5
    for table in found:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_tables_of_markdown_are_rectangular(sample: tuple[Path, dict[str, Any], str]) -> None:
    assert_rectangular(sample[0])


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time, and have tests of their own."""
    monkeypatch.setattr(style, "available", lambda: False)


@pytest.mark.usefixtures("no_pictures")
def test_without_matplotlib_there_are_no_pictures(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", {"plain": [record(1)], "arm": [record(1)]})
    publish([folder], folder, Console(file=(tmp_path / "printed").open("w")))
    text = "".join(page(folder).itertext())
    assert "There are no pictures here: pictures need matplotlib" in text
    said = "Memory over time is left out: 2 turns of run, of an earlier version, do not say when they were measured."
    assert said in text
    assert said in (folder / "report.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("records", [{"plain": []}, {"plain": [failed(1)]}, {"plain": [record(1)]}])
def test_a_run_with_next_to_nothing(tmp_path: Path, records: dict[str, Any]) -> None:
    folder = write_run(tmp_path / "run", records, finished=False)
    publish([folder], tmp_path / "out", Console(file=(tmp_path / "printed").open("w")))
    assert "not finished" in "".join(page(tmp_path / "out").itertext())


@pytest.mark.usefixtures("no_pictures")
def test_sampling_and_several_machines(tmp_path: Path) -> None:
    records = {"plain": [record(1)], "arm": [record(1, token_ids=tuple(range(11)))]}
    folders = [
        write_run(tmp_path / cpu, records, machine={"cpu": cpu}, settings={"temperature": 1.0})
        for cpu in ("left", "right")
    ]
    publish(folders, tmp_path / "out", Console(file=(tmp_path / "printed").open("w")))
    text = "".join(page(tmp_path / "out").itertext())
    assert "not checked (sampling)" in text
    assert {"left, 2 cores", "right, 2 cores"} <= {
        found.rpartition(", 2 threads")[0] for found in re.findall(r"\w+, 2 cores, 2 threads", text)
    }


@pytest.mark.usefixtures("no_pictures")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "a", {"plain": [record(1)], "arm": [record(1, step=0.005)]}, settings={"shard": "1/2"})
    two = write_run(tmp_path / "b", {"plain": [record(2)], "arm": [record(2, step=0.005)]}, settings={"shard": "2/2"})
    assert main(["bench", "report", str(one)]) == 0
    assert all((one / file).is_file() for file in FILES)
    assert "2.00" in capsys.readouterr().out
    assert main(["bench", "report", str(one), str(two), "--out", str(tmp_path / "both")]) == 0
    assert json.loads((tmp_path / "both" / "report.json").read_text(encoding="utf-8"))["parts"][0]["questions"] == 2
    assert not (two / "report.json").exists()


def test_energy_has_a_column_where_it_is_known(tmp_path: Path) -> None:
    known, unknown = record(1, stats={"energy_joules": 1.1}), record(1)
    part = part_of(tmp_path, {"plain": [unknown], "arm": [known]})
    column = tables.memory(part).columns.index("J/token")
    assert [row[column] for row in tables.memory(part).rows] == ["–", "0.100"]
    none = tables.memory(part_of(tmp_path / "2", {"plain": [unknown], "arm": [unknown]}))
    assert "J/token" not in none.columns
    assert {len(row) for row in none.rows} == {len(none.columns)}


def test_a_caption_speaks_of_intervals_where_there_are_some(tmp_path: Path) -> None:
    records = [record(q, **(QA if q > 4 else {})) for q in range(1, 9)]
    part = part_of(tmp_path, {"plain": records, "arm": records})
    assert tables.by(part, "task").note.startswith("Times plain; in brackets above, how many")
    more = [*records, record(9, **QA)]
    part = part_of(tmp_path / "2", {"plain": more, "arm": more})
    assert tables.by(part, "task").note.startswith("Times plain, 95% interval; in brackets above")


def test_every_column_has_its_meaning(sample: tuple[Path, dict[str, Any], str]) -> None:
    part, told = sample[1]["parts"][0], "; ".join(DEFINITIONS)
    assert "rounds by draft" in tables.memory(part).columns
    for word in ("switches", "J/token", "bookkeeping", "other", "rounds by gamma", "rounds by draft", "lookup first"):
        assert word in told


@pytest.mark.usefixtures("no_pictures")
def test_a_folder_whose_name_is_no_utf_8(tmp_path: Path) -> None:
    odd = write_run(Path(os.fsdecode(bytes(tmp_path) + b"/r\xff")), {"plain": [record(1)]}, finished=False)
    with (tmp_path / "printed").open("w", encoding="utf-8") as file:
        publish([odd], odd, Console(width=160, file=file))
    text = (odd / "report.md").read_text(encoding="utf-8")
    assert "goes on with it: r?" in text
    assert json.loads((odd / "report.json").read_text(encoding="utf-8"))["runs"][0]["folder"] == "r?"
    assert "1 turn of r?, of an earlier version" in text


def test_bad_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "a", {"plain": [record(1)]})
    assert main(["bench", "report", str(one), str(one)]) == 2
    assert "--out" in capsys.readouterr().err
    assert main(["bench", "report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    (one / "records" / "plain.jsonl").write_text("{}\n", encoding="utf-8")
    assert main(["bench", "report", str(one)]) == 2
    assert "plain.jsonl, line 1" in capsys.readouterr().err


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    one = write_run(tmp_path / "a", {"plain": [record(1)]})
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="--out"):
        publish([one], tmp_path / "file", Console(file=(tmp_path / "printed").open("w")))
