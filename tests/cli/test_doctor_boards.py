"""`edgespec doctor` played on made-up boards: each finding has its consequence and the command that mends it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec import selftest
from edgespec.cli import doctor, doctor_board, doctor_gpu, doctor_storage
from edgespec.cli.doctor_check import Check
from edgespec.cli.doctor_gpu import Probes, TorchFacts
from edgespec.cli.main import main
from tests.support import boards
from tests.support.boards import FakeBoard

ORIN = TorchFacts("2.9.0", "12.6", True, "Orin", 7 << 30, (8, 7), ("sm_80", "sm_87"))
THOR = TorchFacts("2.14.1+cu130", "13.0", True, "NVIDIA Thor", 120 << 30, (11, 0), ("sm_80", "sm_90", "sm_110"))
RTX = TorchFacts("2.9.0+cu126", "12.6", True, "RTX 4090", 24 << 30, (8, 9), ("sm_80", "sm_86", "sm_90"))
JP6 = "--index-url https://pypi.jetson-ai-lab.io/jp6/cu126"


def healthy(torch: TorchFacts | None, **values: Any) -> Probes:
    """A board where all is installed."""
    whole: dict[str, Any] = {
        "torch": lambda: torch,
        "providers": lambda: ("CUDAExecutionProvider", "CPUExecutionProvider"),
        "version": lambda package: "3.6.0",
        "which": lambda program: f"/usr/bin/{program}",
        "headers": lambda: True,
        "environment": {"TRITON_PTXAS_PATH": "/usr/local/cuda/bin/ptxas"},
    }
    return Probes(**{**whole, **values})


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Runs doctor on a board: (exit code, checks by name with all of a name's warnings, findings by name)."""
    monkeypatch.setattr(selftest, "run", lambda load: selftest.SelfTest(48, 40, None))

    def run(root: Path, probes: Probes) -> dict[str, Any]:
        monkeypatch.setattr(doctor, "ROOT", root)
        monkeypatch.setattr(doctor, "PROBES", probes)
        code = main(["doctor", "--json"])
        checks = json.loads(capsys.readouterr().out)["checks"]
        warned = {check["name"]: check for check in checks if check["status"] != "ok"}
        return {"code": code, "checks": {check["name"]: check for check in checks}, "warned": warned}

    return run


def warned(checks: list[Check]) -> dict[str, Check]:
    found = {check.name: check for check in checks if check.status != "ok"}
    for check in found.values():
        title, separator, consequence = check.detail.partition(": ")
        assert title, check
        assert separator, f"no consequence in {check}"
        assert consequence, check
        assert check.advice, f"no command in {check}"
    return found


OUR_CHECKS = {
    "board", "release", "power mode", "clocks", "power", "heat", "torch", "onnxruntime", "triton", "free blocks",
    "swap", "desktop",
}  # fmt: skip


@pytest.mark.parametrize(
    ("board", "torch", "findings"),
    [
        (boards.NANO_8, ORIN, {"clocks"}),
        (replace(boards.NANO_8, pinned=True), ORIN, set()),
        (boards.NANO_4, ORIN, {"power mode", "clocks", "swap", "desktop"}),
        (boards.NX_16, ORIN, {"release", "power mode", "clocks"}),
        (boards.AGX, ORIN, set()),
        (boards.THOR, THOR, {"power mode", "clocks"}),
        (boards.DESKTOP, RTX, set()),
        (boards.PLAIN, None, set()),
    ],
)
def test_each_board(
    board: FakeBoard, torch: TorchFacts | None, findings: set[str], tmp_path: Path, play: Callable[..., dict[str, Any]]
) -> None:
    seen = play(board.write(tmp_path), healthy(torch))
    assert seen["code"] == 0  # a slow board is no broken one
    assert set(seen["warned"]) & OUR_CHECKS == findings
    if not board.model:
        assert not {"power mode", "clocks", "power", "free blocks"} & set(seen["checks"])
    assert ("torch" in seen["checks"]) == (board is not boards.PLAIN)


def test_a_fresh_orin_nano_in_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(selftest, "run", lambda load: selftest.SelfTest(48, 40, None))
    board = replace(boards.NANO_8, mode=0, zram=3810, graphical=True)
    monkeypatch.setattr(doctor, "ROOT", board.write(tmp_path))
    monkeypatch.setattr(doctor, "PROBES", healthy(None, version=lambda package: "", providers=lambda: ()))
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()

    def after(start: str) -> str:
        return lines[next(number for number, line in enumerate(lines) if line.startswith(start)) + 1].strip()

    assert "ok    board: Jetson Orin Nano 8GB (tegra234, SM 8.7), L4T 36.4.3, JetPack 6.2, CUDA 12.6.68" in lines
    mode = "warn  power mode: 15W (of 15W, 25W, MAXN_SUPER, 7W): 25W gives 36 to 47% more tokens a second"
    assert after(mode) == "sudo nvpmodel -m 1"
    assert after("warn  clocks: GPU 306 of 1020 MHz; the memory's needs root, not pinned: ").startswith("sudo jetson_c")
    assert after("warn  torch: torch is not installed: ") == f"pip install --force-reinstall torch {JP6}"
    assert after("warn  onnxruntime: ").endswith(f"onnxruntime-gpu {JP6}")
    assert after("warn  triton: Triton is not installed: ").endswith(f"triton {JP6}")
    assert after("warn  swap: 3.7 GiB of swap lie in compressed memory (zram): ").startswith("sudo systemctl disable")
    assert after("warn  desktop: ") == "sudo systemctl set-default multi-user.target && sudo reboot"
    assert "ok    power: 6.0 W now (VDD_CPU_GPU_CV 1.7 W, VDD_IN 6.0 W, VDD_SOC 2.3 W)" in lines
    assert "ok    memory: 6.6 GiB free of 7.4 GiB (limits of containers included)" in lines
    assert "ok    free blocks: 61 free blocks of 4.0 MiB" in lines
    assert "ok    heat: 50 C (gpu), not throttled" in lines


# Board, release, power, heat


def test_the_allocation_regression(tmp_path: Path) -> None:
    found = warned(doctor_board.checks(boards.NX_16.write(tmp_path)))["release"]
    assert "error 12" in found.detail
    assert "r36.5" in found.advice
    later = replace(boards.NX_16, l4t="36.5.0").write(tmp_path / "later")
    assert "release" not in warned(doctor_board.checks(later))


def test_an_old_jetpack(tmp_path: Path) -> None:
    found = warned(doctor_board.checks(replace(boards.NANO_8, l4t="35.4.1").write(tmp_path)))["release"]
    assert "JetPack 5" in found.detail


@pytest.mark.parametrize(
    ("board", "command"),
    [
        (replace(boards.NANO_8, mode=3), "sudo nvpmodel -m 1"),  # 7W: 25W is its best
        (replace(boards.NANO_8, modes=((0, "15W"), (1, "7W")), mode=1), "sudo nvpmodel -m 0"),  # before the Super modes
        (boards.NX_16, "sudo nvpmodel -m 0"),
        (replace(boards.AGX, mode=2), "sudo nvpmodel -m 0"),
        (boards.THOR, "sudo nvpmodel -m 0"),
        (replace(boards.NANO_8, mode=2), None),
        (replace(boards.NANO_8, mode=9), None),
        (replace(boards.NANO_8, mode=None), None),
        (replace(boards.NANO_8, modes=()), None),
    ],
)
def test_power_modes(board: FakeBoard, command: str | None, tmp_path: Path) -> None:
    found = warned(doctor_board.checks(board.write(tmp_path))).get("power mode")
    assert (found and found.advice) == command


def test_the_memory_s_clock_where_root_reads_it(tmp_path: Path) -> None:
    root = replace(boards.NANO_8, pinned=True).write(tmp_path)
    boards.put(root, "sys/kernel/debug/bpmp/debug/clk/emc/rate", "2133000000\n")
    boards.put(root, "sys/kernel/debug/bpmp/debug/clk/emc/max_rate", "3199000000\n")
    (check,) = doctor_board.clocks(root)
    assert "memory 2133 of 3199 MHz" in check.detail


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"throttled": ("gpu-throttle-alert",)}, "the GPU is too hot, 50 C (gpu): the device lowers its clocks"),
        ({"celsius": (("tj", 94.0),)}, "94 C (tj) is near the limit: "),
    ],
)
def test_heat(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    found = warned(doctor_board.checks(replace(boards.NANO_8, **change).write(tmp_path)))["heat"]
    assert found.detail.startswith(words)


def test_an_unknown_board_and_a_container(tmp_path: Path) -> None:
    strange = replace(boards.NANO_8, model="ACME Box", compatible="acme,x1\0nvidia,tegra234\0")
    found = warned(doctor_board.checks(strange.write(tmp_path / "strange")))["board"]
    assert "'ACME Box' is not a board that edgespec knows" in found.detail
    container = replace(boards.NANO_8, model="", rails=(), modes=(), mode=None, gpu="", celsius=())
    checks = doctor_board.checks(container.write(tmp_path / "container"))
    assert "no /proc/device-tree" in warned(checks)["board"].detail
    assert {check.name: check.status for check in checks if check.name != "board"} == {
        "power mode": "ok",
        "clocks": "ok",
        "power": "ok",
    }


def test_rails_without_a_total(tmp_path: Path) -> None:
    board = replace(boards.AGX, rails=(("VDD_GPU_SOC", 19000, 126),))
    (check,) = doctor_board.power(board.write(tmp_path))
    assert check.detail == "no total: VDD_GPU_SOC 2.4 W"


# GPU and its packages


JETPACK_6 = boards.NANO_8
DRIVERLESS = TorchFacts("2.9.0", "12.6")


@pytest.mark.parametrize(
    ("board", "facts", "words", "command"),
    [
        (JETPACK_6, None, "torch is not installed", f"pip install --force-reinstall torch {JP6}"),
        (boards.THOR, None, "torch is not installed", "pip install --force-reinstall torch"),
        (JETPACK_6, TorchFacts("2.9.0+cpu"), "is built without CUDA", JP6),
        (
            JETPACK_6,
            TorchFacts("2.14.1", "13.0"),
            "is built for CUDA 13.0, this board has CUDA 12.6.68",
            JP6,
        ),
        (JETPACK_6, DRIVERLESS, "this user or container may not use it", "--runtime nvidia"),
        (boards.DESKTOP, DRIVERLESS, "the driver does not work with CUDA 12.6", "nvidia-smi"),
        (JETPACK_6, TorchFacts("2.9.0", error="libcudnn.so.8: cannot open"), "cannot be imported: libcudnn", JP6),
        (JETPACK_6, TorchFacts("2.9.0", error="GLIBCXX_3.4.32 not found"), "newer C++ library", "libstdc++6"),
        (JETPACK_6, replace(ORIN, total_bytes=0), "reports no memory at all", "sudo reboot"),
        (JETPACK_6, replace(ORIN, error="named symbol not found"), "fails on this GPU: named symbol", JP6),
        (boards.THOR, replace(THOR, archs=("sm_90", "sm_120")), "no kernels for this GPU (11.0; it has sm_90", "torch"),
    ],
)
def test_torch(board: FakeBoard, facts: TorchFacts | None, words: str, command: str, tmp_path: Path) -> None:
    found = warned(doctor_gpu.checks(board.write(tmp_path), healthy(facts)))
    assert set(found) == {"torch"}
    assert words in found["torch"].detail
    assert found["torch"].detail.endswith(": the CUDA engine cannot run, only the CPU engine")
    assert command in found["torch"].advice


def test_torch_with_an_older_chip_s_kernels_is_fine(tmp_path: Path) -> None:
    """The general aarch64 wheels have sm_80 but not sm_87, and run."""
    facts = replace(ORIN, archs=("sm_80", "sm_90"))
    checks = doctor_gpu.checks(JETPACK_6.write(tmp_path), healthy(facts))
    assert warned(checks) == {}
    assert "by kernels of an older chip of its family" in checks[0].detail


@pytest.mark.parametrize(
    ("archs", "capability", "covered"),
    [
        (("sm_87",), (8, 7), True),
        (("sm_80",), (8, 7), True),
        (("sm_89",), (8, 7), False),
        (("sm_75", "sm_90"), (8, 7), False),
        (("compute_75",), (8, 7), True),
        (("compute_90",), (8, 7), False),
        (("sm_100",), (11, 0), False),
        (("sm_110",), (11, 0), True),
        (("sm_110a",), (11, 0), True),
        (("sm_90a",), (9, 0), True),
        (("sm_80a",), (8, 7), False),
        (("gfx90a", "", "sm_"), (9, 0), False),
        ((), (8, 7), False),
        (("sm_87",), (), False),
    ],
)
def test_which_kernels_run_where(archs: tuple[str, ...], capability: tuple[int, ...], covered: bool) -> None:
    assert doctor_gpu.covers(archs, capability) is covered


@pytest.mark.parametrize(
    ("values", "words", "command"),
    [
        ({"version": lambda package: ""}, "Triton is not installed", JP6),
        ({"which": lambda program: None}, "no C compiler", "sudo apt install gcc"),
        ({"headers": lambda: False}, "headers are missing", "sudo apt install python3-dev"),
        ({"environment": {}}, "TRITON_PTXAS_PATH is not set", "export TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas"),
        ({"environment": {"TRITON_PTXAS_PATH": "/x/ptxas"}}, "is /x/ptxas, which is not there", "export TRITON_PTXAS"),
    ],
)
def test_triton(values: dict[str, Any], words: str, command: str, tmp_path: Path) -> None:
    found = warned(doctor_gpu.checks(JETPACK_6.write(tmp_path), healthy(ORIN, **values)))
    assert set(found) == {"triton"}
    assert words in found["triton"].detail
    assert command in found["triton"].advice


def test_ptxas_that_is_not_installed(tmp_path: Path) -> None:
    root = replace(boards.THOR, ptxas=False).write(tmp_path)
    found = warned(doctor_gpu.checks(root, healthy(THOR, environment={})))["triton"]
    assert found.advice == "sudo apt install cuda-nvcc-13-0"


def test_a_desktop_needs_no_ptxas_of_its_own_and_takes_another_compiler(tmp_path: Path) -> None:
    probes = healthy(RTX, environment={"CC": "/opt/cc"}, which=lambda program: None)
    assert warned(doctor_gpu.checks(boards.DESKTOP.write(tmp_path), probes)) == {}


def test_onnxruntime_without_cuda(tmp_path: Path) -> None:
    probes = healthy(ORIN, providers=lambda: ("CPUExecutionProvider",))
    found = warned(doctor_gpu.checks(JETPACK_6.write(tmp_path), probes))["onnxruntime"]
    assert found.advice == f"pip uninstall -y onnxruntime && pip install --force-reinstall onnxruntime-gpu {JP6}"


def test_without_a_gpu_nothing_is_asked(tmp_path: Path) -> None:
    def asked(*_arguments: object) -> Any:
        raise AssertionError("asked")

    probes = Probes(torch=asked, providers=asked, version=asked, which=asked, headers=asked)
    assert doctor_gpu.checks(boards.PLAIN.write(tmp_path), probes) == []


@pytest.mark.slow
def test_this_installation_s_torch() -> None:
    facts = doctor_gpu.probe_torch()
    if facts is None:
        pytest.skip("torch is not installed")
    assert facts.error == ""
    assert facts.version == doctor_gpu.installed("torch")


def test_a_torch_that_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_gpu, "installed", lambda package: "9.9")
    monkeypatch.setattr(doctor_gpu, "_TORCH_PROBE", "import os; os.abort()")
    facts = doctor_gpu.probe_torch()
    assert facts is not None
    assert facts.version == "9.9"
    assert facts.error  # "it ended with -6", or what the interpreter says of it
    monkeypatch.setattr(doctor_gpu, "_TORCH_PROBE", "raise ImportError('libcublas.so.12: cannot open')")
    facts = doctor_gpu.probe_torch()
    assert facts is not None
    assert facts.error == "ImportError: libcublas.so.12: cannot open"
    monkeypatch.setattr(doctor_gpu, "installed", lambda package: "")
    assert doctor_gpu.probe_torch() is None


# Memory and storage


def test_fragmentation(tmp_path: Path) -> None:
    found = warned(doctor_storage.fragmentation(replace(boards.NANO_8, blocks=2).write(tmp_path)))
    assert "only 2 free blocks of 4.0 MiB" in found["free blocks"].detail
    assert "error 12" in found["free blocks"].detail
    assert doctor_storage.fragmentation(replace(boards.PLAIN, blocks=0).write(tmp_path / "plain")) == []
    assert doctor_storage.fragmentation(boards.put(tmp_path, "a/etc/nv_tegra_release", "").parent.parent) == []


@pytest.mark.parametrize("text", ["", "Node 0\n", "Node 0, zone Normal\n", "Node 0, zone Normal a b c\n"])
def test_strange_buddyinfo(text: str, tmp_path: Path) -> None:
    boards.put(tmp_path, "proc/buddyinfo", text)
    assert doctor_storage.free_blocks(tmp_path)[1] == 0


@pytest.mark.parametrize("board", [boards.NANO_8, boards.PLAIN])
def test_swapped_out_pages_are_found_anywhere(board: FakeBoard, tmp_path: Path) -> None:
    found = warned(doctor_storage.swap(replace(board, swapped=900).write(tmp_path)))["swap"]
    assert found.detail.startswith("900.0 MiB of 16.0 GiB are swapped out: ")


def test_a_desktop_on_a_large_board_stays(tmp_path: Path) -> None:
    assert doctor_storage.desktop(replace(boards.AGX, graphical=True).write(tmp_path)) == []
    assert doctor_storage.desktop(replace(boards.PLAIN, graphical=True).write(tmp_path / "plain")) == []


@pytest.mark.parametrize(
    ("kind", "speed", "slow"),
    [
        ("NVMe", 1.4e9, False),
        ("NVMe", None, False),
        ("SD or eMMC card", None, True),
        ("SD or eMMC card", 250e6, True),
        ("", 67e6, True),
        ("SSD", 500e6, False),
    ],
)
def test_storage(kind: str, speed: float | None, slow: bool) -> None:
    found = warned(doctor_storage.storage(kind, speed))
    assert bool(found) == slow
    if slow:
        assert "EDGESPEC_HOME" in found["storage"].advice


def test_doctor_says_what_models_are_read_from(tmp_path: Path, play: Callable[..., dict[str, Any]]) -> None:
    from edgespec import catalog

    home = catalog.home(None)
    home.mkdir(parents=True, exist_ok=True)
    (home / "model.bin").write_bytes(b"\0" * (9 << 20))
    root = boards.PLAIN.write(tmp_path)
    boards.on_disk(root, home, "mmcblk1")
    found = play(root, healthy(None))["warned"]["storage"]
    assert found["detail"].startswith("models are read from SD or eMMC card (")
    assert "/s): " in found["detail"]


def test_read_speed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\0" * (9 << 20))
    speed = doctor_storage.read_speed(file)
    assert speed is not None
    assert speed > 1e6
    (tmp_path / "small").write_bytes(b"\0" * 1000)
    assert doctor_storage.read_speed(tmp_path / "small") is None
    assert doctor_storage.read_speed(tmp_path / "none") is None
