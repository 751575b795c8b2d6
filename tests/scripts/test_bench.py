"""bench.sh: what spoils numbers is found first, the warm-up does not count, and the result is one JSON object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.telemetry.tegrastats import parse
from tests.scripts.boards import Stubs, make_board, run
from tests.support.tegrastats_lines import ALL

# A line of tegrastats from an Orin Nano (8 GB).
TEGRASTATS = (
    "04-19-2026 01:31:10 RAM 519/7607MB (lfb 61x4MB) CPU [0%@1728,off] EMC_FREQ 0%@3199 GR3D_FREQ 0%@[1018] "
    "cpu@48.906C gpu@49.593C tj@51.25C VDD_IN 5971mW/5971mW VDD_CPU_GPU_CV 1669mW/1669mW"
)
EDGESPEC = """
if [[ "$1" == --version ]]; then echo "edgespec 9"; exit; fi
count="{folder}/count"; n=$(( $(cat "$count" 2>/dev/null || echo 0) + 1 )); echo "$n" >"$count"
case "$*" in *"--draft off"*) speed=10 ;; *) speed=$((20 + n)) ;; esac
((n > 2)) || speed=1  # the warm-up of each kind
printf '{{"token_ids": [1, 2, 3], "stats": {{"tokens_per_second": %s}}}}\\n' "$speed"
"""


@pytest.fixture
def board(root: Path, stubs: Stubs) -> Path:
    stubs.real_python()
    stubs.add("edgespec", EDGESPEC.format(folder=stubs.folder))
    stubs.add("tegrastats", f'for _ in 1 2 3; do echo "{TEGRASTATS}"; done; exec sleep 30')
    return make_board(root, "nx-16", desktop=False, zram=False)


def bench(board: Path, stubs: Stubs, out: Path, *arguments: str, code: int = 0) -> str:
    done = run("bench.sh", "--root", str(board), "--out", str(out), *arguments, stubs=stubs)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def result_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "bench.json").read_text())
    return found


def test_the_result_has_all_that_a_number_depends_on(board: Path, stubs: Stubs, tmp_path: Path) -> None:
    bench(board, stubs, tmp_path / "out", "--runs", "3", "--model", "m", "--draft", "ngram,code", "--tokens", "3")
    found = result_of(tmp_path / "out")
    assert [run["run"] for run in found["runs"]["plain"]] == [1, 2, 3]
    assert found["median_tokens_per_second"] == {"plain": 10, "drafts": 26}  # runs 4, 6, 8 of all, not the warm-up
    assert found["speedup"] == 2.6
    assert found["board"]["power_mode"]["name"] == "25W"
    assert found["edgespec"] == "edgespec 9"
    watts = {"mean_watts": 5.971, "peak_watts": 5.971, "peak_celsius": 51.25}
    assert {key: found["tegrastats"][key] for key in watts} == watts
    assert any("--model m" in call and "--draft ngram,code" in call for call in stubs.calls)


def test_what_spoils_numbers_stops_it_unless_forced(board: Path, stubs: Stubs, tmp_path: Path) -> None:
    (board / "proc/swaps").write_text("Filename Type Size Used Priority\n/swap file 16000000 2048000 -2\n")
    assert "2000 MB of swap are in use" in bench(board, stubs, tmp_path / "out", code=1)
    assert stubs.calls == []
    bench(board, stubs, tmp_path / "out", "--runs", "1", "--force")
    assert "swap" in result_of(tmp_path / "out")["preflight"][0]


def test_without_tegrastats_power_is_null(board: Path, stubs: Stubs, tmp_path: Path) -> None:
    stubs.add("tegrastats", "exit 1")
    bench(board, stubs, tmp_path / "out", "--runs", "1")
    assert result_of(tmp_path / "out")["tegrastats"]["mean_watts"] is None


def test_runs_of_an_earlier_bench_do_not_count(board: Path, stubs: Stubs, tmp_path: Path) -> None:
    for runs in ("3", "1"):
        bench(board, stubs, tmp_path / "out", "--runs", runs)
    assert len(result_of(tmp_path / "out")["runs"]["drafts"]) == 1


def test_a_run_that_fails_ends_it(board: Path, stubs: Stubs, tmp_path: Path) -> None:
    stubs.add("edgespec", "exit 2")
    assert "the plain run 0 failed" in bench(board, stubs, tmp_path / "out", code=1)
    assert not (tmp_path / "out/bench.json").exists()


@pytest.mark.parametrize("arguments", [["--runs", "0"], ["--tokens", "x"], ["--model"]])
def test_wrong_arguments(board: Path, stubs: Stubs, tmp_path: Path, arguments: list[str]) -> None:
    assert "wants a" in bench(board, stubs, tmp_path / "out", *arguments, code=1)


def test_the_watts_of_every_board(board: Path, stubs: Stubs, tmp_path: Path) -> None:
    """As the engine's own reader of tegrastats has them: AGX Orin has no rail of the whole board, but its parts."""
    for number, line in enumerate(ALL):
        stubs.add("tegrastats", f"for _ in 1 2 3; do echo '{line}'; done; exec sleep 30")
        bench(board, stubs, tmp_path / str(number), "--runs", "1", "--tokens", "3")
        read = parse(line)
        assert read is not None
        found = result_of(tmp_path / str(number))["tegrastats"]["mean_watts"]
        assert found == (None if read.watts is None else pytest.approx(read.watts, abs=0.001))
