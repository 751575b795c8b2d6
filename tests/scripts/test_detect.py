"""detect.sh: valid JSON about every board, and about machines that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.telemetry import board
from tests.scripts.boards import make_board, run, snapshot


def detect(root: Path, **more: Any) -> dict[str, Any]:
    done = run("detect.sh", "--root", str(root), **more)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nano-4", {"l4t": "36.4.3", "jetpack": "6.2", "sm": 87, "soc": "tegra234", "module": "p3767-0004"}),
        ("nano-8", {"l4t": "36.4.7", "jetpack": "6.2.1", "sm": 87, "cuda": "12.6.11", "module": "p3767-0005"}),
        ("nx-16", {"l4t": "36.5.0", "jetpack": "6.2.2", "wheel_index": "https://pypi.jetson-ai-lab.io/jp6/cu126"}),
        ("agx", {"l4t": "35.4.1", "jetpack": "5", "wheel_index": None, "module": "p3701-0005"}),
        ("thor", {"l4t": "38.4.0", "jetpack": "7.1", "sm": 110, "wheel_index": "pypi"}),
        (
            "x86",
            {
                "jetson": False,
                "l4t": None,
                "model": None,
                "sm": None,
                "power_mode": {"id": None, "name": None, "known": []},
            },
        ),
    ],
)
def test_boards(root: Path, name: str, expected: dict[str, Any]) -> None:
    found = detect(make_board(root, name))
    assert {key: found[key] for key in expected} == expected
    assert found["jetson"] == (name != "x86")
    assert found["memory_mb"]["free_4mb_blocks"] == 61
    assert found["swap_mb"] == {"total": 1855, "zram": 1855}
    if name != "x86":
        assert found["power_mode"] == {"id": 1, "name": "25W", "known": ["15W", "25W", "MAXN_SUPER"]}


def test_what_is_wrong_is_said_with_its_consequence(root: Path) -> None:
    make_board(root, "nano-8", storage="/dev/mmcblk0p1")
    (root / "proc/buddyinfo").write_text("Node 0, zone Normal 1 1 2\n")
    (root / "proc/meminfo").write_text("MemTotal: 7789568 kB\nMemAvailable: 500000 kB\n")
    text = " | ".join(detect(root)["warnings"])
    for part in ("36.4.7", "SD card", "desktop", "zram", "fragmented (2 free", "only 488 MB"):
        assert part in text


def test_a_board_in_order_has_no_warnings(root: Path) -> None:
    found = detect(make_board(root, "nx-16", desktop=False, zram=False))
    assert found["warnings"] == []
    assert found["storage"] == "nvme"
    assert found["desktop"] is False


def test_an_empty_root_is_no_error(root: Path) -> None:
    found = detect(root)
    assert found["jetson"] is False
    assert found["memory_mb"] == {"total": None, "available": None, "free_4mb_blocks": None}


def test_a_container_without_device_tree_is_recognised_by_what_is_mounted(root: Path) -> None:
    (root / "tmp").mkdir()
    (root / "etc").mkdir()
    (root / "tmp/nv_jetson_model").write_text("NVIDIA Jetson Orin Nano")
    (root / ".dockerenv").touch()
    found = detect(root)
    assert (found["jetson"], found["container"], found["l4t"]) == (True, True, None)
    assert "mount /etc/nv_tegra_release" in found["warnings"][0]
    (root / "etc/nv_tegra_release").write_text("# R36 (release), REVISION: 5.0, GCID: 1\n")
    assert detect(root)["jetpack"] == "6.2.2"


def test_odd_text_stays_valid_json(root: Path) -> None:
    make_board(root, "nano-8")
    (root / "proc/device-tree/model").write_bytes(b'A "board"\\ with\ttab\x01\xff and\nline\0')
    assert detect(root)["model"].startswith('A "board"\\ with\ttab')


def test_it_changes_nothing(root: Path) -> None:
    before = snapshot(make_board(root, "nano-8"))
    detect(root)
    assert snapshot(root) == before


def test_the_root_may_come_from_the_environment(root: Path) -> None:
    done = run("detect.sh", env={"EDGESPEC_ROOT": str(make_board(root, "thor"))})
    assert json.loads(done.stdout)["soc"] == "tegra264"


@pytest.mark.parametrize(
    "l4t",
    [
        "34.1.1",
        "35.4.1",
        "36.3.0",
        "36.4",
        "36.4.0",
        "36.4.3",
        "36.4.4",
        "36.4.5",
        "36.4.7",
        "36.5.0",
        "36.6.0",
        "38.2.1",
        "38.3.0",
        "38.4.0",
        "39.2.1",
        "99.1",
    ],
)
def test_doctor_says_the_same_of_a_release(root: Path, l4t: str) -> None:
    make_board(root, "nano-8")
    major, _, rest = l4t.partition(".")
    (root / "etc/nv_tegra_release").write_text(f"# R{major} (release), REVISION: {rest}, GCID: 1, BOARD: generic\n")
    assert (detect(root)["jetpack"] or "") == board.detect(root).jetpack


@pytest.mark.parametrize("soc", sorted(board._SM))
def test_doctor_says_the_same_of_a_chip(root: Path, soc: str) -> None:
    make_board(root, "nano-8")
    (root / "proc/device-tree/compatible").write_bytes(f"nvidia,p3450-0000\0nvidia,{soc}".encode())
    assert detect(root)["sm"] == board.detect(root).sm == board._SM[soc]
