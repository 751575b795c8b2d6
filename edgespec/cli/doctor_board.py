"""`edgespec doctor` on a Jetson: board and release, power, clocks, heat. Pure functions over a root folder.

Facts about boards are from NVIDIA's Jetson Linux Developer Guide unless a line says otherwise.
"""

from __future__ import annotations

from pathlib import Path

from edgespec.cli.doctor_check import Check, finding
from edgespec.telemetry import board as boards
from edgespec.telemetry import thermal
from edgespec.telemetry.board import Board
from edgespec.telemetry.rails import find_rails, total
from edgespec.telemetry.system_files import number

REGRESSED = "36.4.7"
SWEET_SPOT = "25W"


def checks(root: Path) -> list[Check]:
    """All of this file, for the board of this root. On other computers: what it is, and its heat."""
    board = boards.detect(root)
    found = [Check("board", "ok", str(board)), *release(board, root)]
    if board.jetson:
        found += [*power_mode(board, root), *clocks(root), *power(root)]
    return [*found, *heat(root)]


def release(board: Board, root: Path) -> list[Check]:
    """What is wrong with the release, or with what can be known about the board."""
    if not board.jetson:
        return []
    found = []
    if not board.module:
        found.append(_unknown(board, root))
    if board.l4t == REGRESSED:
        # github.com/hokwangchoi/jetson-orin-nano-benchmarks
        found.append(
            finding(
                "release",
                f"L4T {REGRESSED} (JetPack 6.2.1) refuses large allocations",
                "models fail to load with 'error 12' although memory is free; L4T 36.5 (JetPack 6.2.2) mends it",
                "sudo sed -i s/r36.4/r36.5/ /etc/apt/sources.list.d/nvidia-l4t-apt-source.list"
                " && sudo apt update && sudo apt dist-upgrade",
            )
        )
    elif board.jetpack_major is not None and board.jetpack_major < 6:
        found.append(
            finding(
                "release",
                f"L4T {board.l4t} is JetPack {board.jetpack_major}",
                "edgespec is made for JetPack 6 and 7; there are no torch wheels for it and Python 3.10",
                "flash JetPack 6.2.2 or newer: https://developer.nvidia.com/embedded/jetpack",
            )
        )
    return found


def _unknown(board: Board, root: Path) -> Check:
    if not board.name and not (root / "proc/device-tree").exists():
        return finding(
            "board",
            "the board cannot be told",
            "this container has no /proc/device-tree; what is known comes from the release file and the driver",
            "on the host: cat /proc/device-tree/model > /tmp/nv_jetson_model, then docker run --runtime nvidia"
            " -v /tmp/nv_jetson_model:/tmp/nv_jetson_model -v /etc/nv_tegra_release:/etc/nv_tegra_release ...",
        )
    return finding(
        "board",
        f"'{board.name}' is not a board that edgespec knows",
        "it works with general settings, which may not be the fastest",
        "edgespec doctor --json  (please send its output with an issue)",
    )


def power_mode(board: Board, root: Path) -> list[Check]:
    """Warns in a mode below 25W (Orin Nano: the most tokens a joule), or below the fastest (other boards)."""
    modes = boards.power_modes(root)
    if modes.current is None:
        return [Check("power mode", "ok", "not told here (nvpmodel -q tells it on the host)")]
    names = ", ".join(modes.names[key] for key in sorted(modes.names)) or "modes not listed"
    wanted = modes.fastest()
    if "Orin Nano" in board.module and modes.number_of(SWEET_SPOT) is not None:
        wanted = modes.number_of(SWEET_SPOT) or 0, SWEET_SPOT
    if wanted is None or not modes.slower(wanted[1]):
        return [Check("power mode", "ok", f"{modes.name} (of {names})")]
    gain = f"its clocks are lower than those of {wanted[1]}, and so are the tokens a second"
    if "Orin Nano" in board.module and (modes.name, wanted[1]) == ("15W", SWEET_SPOT):
        gain = "25W gives 36 to 47% more tokens a second"  # smolhub.com/posts/jetson-nano-super-benchmark-non-reasoning
    return [finding("power mode", f"{modes.name} (of {names})", gain, f"sudo nvpmodel -m {wanted[0]}")]


def clocks(root: Path) -> list[Check]:
    """Whether the GPU's clock is pinned, and the memory's clock, which only root may read."""
    gpu, memory = boards.gpu_clock(root), _memory_clock(root)
    if gpu is None or gpu.pinned is None:
        return [Check("clocks", "ok", f"the GPU's are not told here; {memory}")]
    now = f"GPU {_mhz(gpu.hertz)} of {_mhz(gpu.most)} MHz; {memory}"
    if gpu.pinned:
        return [Check("clocks", "ok", f"{now}; pinned")]
    return [
        finding(
            "clocks",
            f"{now}, not pinned",
            "they rise late in short bursts, so first tokens are slow and measurements vary",
            "sudo jetson_clocks --store && sudo jetson_clocks  (--restore takes it back)",
        )
    ]


def _memory_clock(root: Path) -> str:
    folder = root / "sys/kernel/debug/bpmp/debug/clk/emc"
    rate, most = number(folder / "rate"), number(folder / "max_rate")
    if rate is None:
        return "the memory's needs root"
    return f"memory {_mhz(rate)} of {_mhz(most)} MHz"


def _mhz(hertz: int | None) -> str:
    return "?" if hertz is None else f"{hertz / 1e6:.0f}"


def power(root: Path) -> list[Check]:
    rails = {rail.name: watts for rail in find_rails(root) if (watts := rail.watts()) is not None}
    if not rails:
        detail = "no sensor is readable here, so answers have no energy; jtop or tegrastats may tell it"
        return [Check("power", "ok", detail)]
    whole = total(rails)
    parts = ", ".join(f"{name} {watts:.1f} W" for name, watts in sorted(rails.items()))
    return [Check("power", "ok", f"{whole:.1f} W now ({parts})" if whole is not None else f"no total: {parts}")]


def heat(root: Path) -> list[Check]:
    """The hottest zone, and what slows the device down now."""
    zones = thermal.temperatures(root)
    causes = thermal.throttling(root, find_rails(root))
    hottest = max(zones, key=lambda name: zones[name], default=None)
    now = "" if hottest is None else f"{zones[hottest]:.0f} C ({hottest})"
    if causes:
        return [
            finding(
                "heat",
                f"{'; '.join(causes)}{', ' + now if now else ''}",
                "the device lowers its clocks by itself, and the tokens a second with them",
                "give it air or a fan, or a lower power mode: sudo nvpmodel -q lists them",
            )
        ]
    if hottest is not None and zones[hottest] >= thermal.HOT_CELSIUS:
        return [
            finding(
                "heat",
                f"{now} is near the limit",
                "from about 90 C on the device lowers its clocks by itself",
                "give it air or a fan, or a lower power mode: sudo nvpmodel -q lists them",
            )
        ]
    return [Check("heat", "ok", f"{now}, not throttled")] if now else []
