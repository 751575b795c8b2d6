"""memory_setup.sh: a plan, the same plan done, and everything as before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.boards import Stubs, make_board, run, snapshot

SYSTEMCTL = """
units="{root}/etc/systemd/system"
case "$1" in
  set-default) ln -sfn "/lib/systemd/system/$2" "$units/default.target" ;;
  disable) rm "$units/multi-user.target.wants/$2.service" ;;
  enable) ln -s "/etc/systemd/system/$2.service" "$units/multi-user.target.wants/$2.service" ;;
esac
"""


@pytest.fixture
def board(root: Path, stubs: Stubs) -> Path:
    make_board(root, "nano-8")
    stubs.add("systemctl", SYSTEMCTL.format(root=root))
    stubs.add("fallocate", ': >"$3"')
    stubs.add(
        "df", 'printf "Filesystem 1024-blocks Used Available Capacity Mounted\\n/dev/nvme0n1p1 1 1 104857600 1%% /\\n"'
    )
    for name in ("mkswap", "swapon", "swapoff"):
        stubs.add(name)
    return root


def setup(board: Path, stubs: Stubs, *arguments: str, code: int = 0) -> str:
    done = run("memory_setup.sh", "--root", str(board), *arguments, stubs=stubs)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def changes(stubs: Stubs) -> list[str]:
    return [call for call in stubs.calls if not call.startswith("df ")]


def test_the_plan_says_all_and_does_nothing(board: Path, stubs: Stubs) -> None:
    before = snapshot(board)
    text = setup(board, stubs)
    assert text.count("command:") == text.count("revert:") == 3
    assert "Nothing was changed" in text
    setup(board, stubs, "revert")
    setup(board, stubs, "drop-caches")
    assert snapshot(board) == before
    assert changes(stubs) == []


def test_apply_again_and_revert(board: Path, stubs: Stubs) -> None:
    before = snapshot(board)
    setup(board, stubs, "--apply")
    after = snapshot(board)
    assert after["etc/systemd/system/default.target"].endswith("multi-user.target")
    assert "/var/lib/edgespec/swapfile none swap sw 0 0\n" in after["etc/fstab"]
    assert after["etc/fstab"].startswith(before["etc/fstab"])
    count = len(changes(stubs))
    assert setup(board, stubs, "--apply").count("nothing to do") == 3
    assert snapshot(board) == after
    assert len(changes(stubs)) == count
    setup(board, stubs, "revert", "--apply")
    ours = "var/lib/edgespec/memory_setup"
    assert {k: v for k, v in snapshot(board).items() if k != ours} == before
    assert snapshot(board)[ours] == ""
    assert "Nothing was changed by this script" in setup(board, stubs, "revert", "--apply")


def test_only_the_steps_asked_for(board: Path, stubs: Stubs) -> None:
    setup(board, stubs, "--steps", "zram", "--apply")
    assert changes(stubs) == ["systemctl disable nvzramconfig"]
    setup(board, stubs, "revert", "--apply")
    assert changes(stubs)[1:] == ["systemctl enable nvzramconfig"]


def test_what_was_so_before_is_not_ours_to_revert(root: Path, stubs: Stubs) -> None:
    make_board(root, "nano-8", desktop=False, zram=False)
    stubs.add("systemctl")
    assert setup(root, stubs, "--steps", "text-mode,zram", "--apply").count("nothing to do") == 2
    assert "Nothing was changed by this script" in setup(root, stubs, "revert", "--apply")
    assert stubs.calls == []


def test_no_swap_file_on_an_sd_card_or_a_full_disk(board: Path, stubs: Stubs) -> None:
    stubs.add("df", 'printf "Filesystem\\n/dev/mmcblk0p1 1 1 104857600 1%% /\\n"')
    assert "wears out" in setup(board, stubs, "--steps", "swap", "--apply")
    stubs.add("df", 'printf "Filesystem\\n/dev/nvme0n1p1 1 1 10485760 1%% /\\n"')
    assert "10 GB free, 20 are wanted" in setup(board, stubs, "--steps", "swap", "--apply")
    assert changes(stubs) == []


@pytest.mark.parametrize("failing", ["fallocate", "mkswap", "swapon"])
def test_a_swap_file_that_fails_half_way_leaves_nothing(board: Path, stubs: Stubs, failing: str) -> None:
    before = snapshot(board)
    stubs.add(failing, "exit 1")
    assert "what was begun is removed" in setup(board, stubs, "--steps", "swap", "--apply", code=1)
    ours = "var/lib/edgespec/memory_setup"
    assert {k: v for k, v in snapshot(board).items() if k != ours} == before
    assert "Nothing was changed by this script" in setup(board, stubs, "revert", "--apply")


def test_caches_are_dropped_on_request(board: Path, stubs: Stubs) -> None:
    setup(board, stubs, "drop-caches", "--apply")
    assert (board / "proc/sys/vm/drop_caches").read_text() == "3\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "zram,nvargus-daemon"], "unknown step 'nvargus-daemon'"),
        (["--swap-gb", "0"], "from 1 to 99"),
        (["--steps", ""], "--steps wants a value"),
        (["--swap-file", "relative"], "a full path"),
        (["--swap-file", "/a b;rm -rf"], "a full path"),
        (["plan", "revert"], "only one action"),
        (["--frobnicate"], "unknown argument"),
        (["--root", "/not/there"], "wants a folder"),
    ],
)
def test_wrong_arguments(board: Path, stubs: Stubs, arguments: list[str], words: str) -> None:
    before = snapshot(board)
    assert words in setup(board, stubs, *arguments, "--apply", code=1)
    assert snapshot(board) == before
