"""Ranges on the command line, and what is swept for them."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from edgespec.bench import cli
from edgespec.bench.simulation import command
from edgespec.bench.simulation.ranges import Range, one_or_range, single
from edgespec.errors import ConfigError
from tests.bench.simulation import made
from tests.bench.simulation.test_command import simulate


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(made.folder(tmp_path_factory.mktemp("ranges") / "traces", 4))


def sweeps(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, list[Any]]:
    """The values of each sweep, and of "rows" how many drafts were in memory."""
    assert simulate(*arguments, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    found = {each["name"]: list(dict.fromkeys(p["value"] for p in each["points"])) for each in document["sweeps"]}
    return {**found, "rows": [row["resident"] for row in document["rows"]]}


def test_a_number_or_two() -> None:
    counted = one_or_range(cli._count)
    assert (counted("3"), counted("1..3"), counted("2..2")) == (3, Range(1, 3), Range(2, 2))
    assert one_or_range(float)("0.5..8") == Range(0.5, 8.0)
    assert (single(3), single(Range(1, 3))) == (3, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--load-ratio", "8..0.5"], "as in 0.5..8, not '8..0.5'"),
        (["--load-ratio", "fast"], "wants a number above 0, not 'fast'"),
        (["--draft-cost", "0..1"], "wants a number above 0, not '0'"),
        (["--resident", "1..N"], "wants a whole number from 1 up, not 'N'"),
        (["--resident", "1..2.5"], "wants a whole number from 1 up, not '2.5'"),
        (["--interval", "..4"], "wants a whole number from 1 up, not ''"),
    ],
)
def test_what_is_no_range_is_said(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser, cli._count)
    with pytest.raises(SystemExit):
        parser.parse_args(["traces", *words])
    assert message in capsys.readouterr().err


def test_a_range_is_a_sweep_from_one_end_to_the_other(traces: str, capsys: pytest.CaptureFixture[str]) -> None:
    named = ("--policies", "memspec@3")
    assert sweeps(capsys, traces, "--resident", "1..2", "--load-ratio", "0.5..8") == {
        "resident": [1, 2], "load-ratio": [0.5, 1, 2, 2.7, 4, 8], "rows": [],
    }  # fmt: skip
    ratio = ("--sweep", "load-ratio", "--load-ratio", "0.6..3")
    found = sweeps(capsys, traces, *named, *ratio, "--draft-cost", "0.1..0.1")
    assert found == {"load-ratio": [0.6, 1, 2, 2.7, 3], "draft-cost": [0.1], "rows": [2, 2]}
    found = sweeps(capsys, traces, *named, "--interval", "3..8", "--new-tokens", "10..100", "--resident", "1..1")
    assert found == {"interval": [3, 4, 8], "length": [10, 16, 32, 40], "resident": [1], "rows": [1, 1]}


def test_every_point_of_a_range_has_its_value(traces: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(traces, "--policies", "static:left@3", "--draft-cost", "0.05..0.4", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    points = document["sweeps"][0]["points"]
    assert [point["row"]["draft_cost"] for point in points] == [point["value"] for point in points]
    speeds = [point["row"]["speedup"] for point in points]
    assert speeds == sorted(speeds, reverse=True)
    assert speeds[0] > speeds[-1] > 0
    assert document["rows"][1]["draft_cost"] is None  # beside the sweep, as the costs have it


def test_a_range_beyond_what_there_is_ends_there_or_is_refused(traces: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweeps(capsys, traces, "--resident", "1..9")["resident"] == [1, 2]
    with pytest.raises(ConfigError, match=r"3\.\.4 of --resident begins above 2"):
        simulate(traces, "--resident", "3..4")
    with pytest.raises(ConfigError, match=r"50\.\.60 of --new-tokens begins above 40"):
        simulate(traces, "--new-tokens", "50..60")


def test_a_range_of_slots_ends_where_the_device_is_full(
    traces: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.Device, "slots", lambda *_: 1)
    named = ("--device-profile", "agx-orin", "--policies", "memspec@3")
    assert sweeps(capsys, traces, *named, "--resident", "1..2") == {"resident": [1], "rows": [1, 1]}
    assert simulate(traces, *named, "--resident", "1..2") == 0
    assert "Mind: Only 1 of 2 drafts fit" in capsys.readouterr().out
    assert simulate(traces, *named, "--resident", "1..1") == 0
    assert "Mind: Only" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"room for 1 draft of .* not for --resident 2"):
        simulate(traces, *named, "--resident", "2..3")
