"""power_mode.sh: modes by name whatever their number, and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.boards import Stubs, make_board, run, snapshot


@pytest.fixture
def board(root: Path, stubs: Stubs) -> Path:
    make_board(root, "nano-8")
    status = root / "var/lib/nvpmodel/status"
    stubs.add("nvpmodel", f'if [[ "$1" == -m ]]; then printf "pmode:%04d fmode:x\\n" "$2" >"{status}"; fi')
    stubs.add("jetson_clocks", 'if [[ "${1:-}" == --store ]]; then echo stored >"$2"; fi')
    return root


def mode(board: Path, stubs: Stubs, *arguments: str, code: int = 0) -> str:
    done = run("power_mode.sh", "--root", str(board), *arguments, stubs=stubs)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_the_list_marks_the_one_in_force(board: Path, stubs: Stubs) -> None:
    assert mode(board, stubs).splitlines() == ["  0 15W", "* 1 25W", "  2 MAXN_SUPER"]


def test_without_apply_nothing_changes(board: Path, stubs: Stubs) -> None:
    before = snapshot(board)
    for arguments in (["set", "maxn_super"], ["clocks", "max"], ["revert"]):
        mode(board, stubs, *arguments)
    assert snapshot(board) == before
    assert stubs.calls == []


def test_set_twice_and_revert_gives_the_mode_before_the_first(board: Path, stubs: Stubs) -> None:
    assert "revert:" in mode(board, stubs, "set", "MAXN_SUPER", "--apply")
    mode(board, stubs, "set", "0", "--apply")
    assert "in force already" in mode(board, stubs, "set", "15W", "--apply")
    mode(board, stubs, "revert", "--apply")
    assert stubs.calls == ["nvpmodel -m 2", "nvpmodel -m 0", "nvpmodel -m 1"]
    assert "No power mode was changed" in mode(board, stubs, "revert", "--apply")


def test_a_mode_that_the_board_lacks_is_answered_with_those_it_has(board: Path, stubs: Stubs) -> None:
    assert "it has 15W, 25W, MAXN_SUPER" in mode(board, stubs, "set", "40W", "--apply", code=1)
    assert stubs.calls == []


def test_clocks_are_stored_once_and_brought_back(board: Path, stubs: Stubs) -> None:
    for _ in range(2):
        mode(board, stubs, "clocks", "max", "--apply")
    mode(board, stubs, "clocks", "restore", "--apply")
    kept = f"{board}/var/lib/edgespec/clocks"
    expected = [f"--store {kept}", "", "", f"--restore {kept}"]
    assert stubs.calls == [f"jetson_clocks {arguments}" for arguments in expected]
    assert not Path(kept).exists()
    assert "No clocks were stored" in mode(board, stubs, "clocks", "restore", "--apply")


def test_a_mode_that_nvpmodel_refuses_is_an_error(board: Path, stubs: Stubs) -> None:
    stubs.add("nvpmodel", "exit 1")
    assert "need a reboot" in mode(board, stubs, "set", "15W", "--apply", code=1)


def test_a_machine_without_power_modes_says_so(root: Path, stubs: Stubs) -> None:
    assert "this is no Jetson" in mode(make_board(root, "x86"), stubs, code=1)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["sett", "3"], "unknown action 'sett 3'"),
        (["set"], "set wants the name or the ID"),
        (["set", "15W", "25W"], "set wants one name or ID"),
        (["clocks"], "unknown action 'clocks'"),
    ],
)
@pytest.mark.parametrize("name", ["nano-8", "x86"])
def test_wrong_words_are_named_on_any_machine(
    root: Path, stubs: Stubs, name: str, words: list[str], answer: str
) -> None:
    assert answer in mode(make_board(root, name), stubs, *words, "--apply", code=1)
    assert stubs.calls == []
