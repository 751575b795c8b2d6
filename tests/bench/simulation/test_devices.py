"""Device profiles: the roofline's arithmetic, the files that come along, and what is wrong with others."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.bench.simulation.devices import POSITION, PROFILES, Device, Size, profile_names, read_device, read_size
from edgespec.errors import ConfigError

DEVICE = Device("d", 100e9, 0.5, 5e9, 1e12, 0.5, 1e-6, 10, 1e-4, 1e9, 1e-10, 1.05)
MODEL = Size("m", 4e9, 3e9, 1e9, 20, 1000)


def test_a_forward_is_bound_by_memory_then_by_arithmetic() -> None:
    rest = 1000 * POSITION / 50e9 + 20 * 10 * 1e-6 + 1e-4
    assert DEVICE.forward(MODEL, 1) == pytest.approx(3e9 / 50e9 + rest)
    assert DEVICE.forward(MODEL, 15) == pytest.approx(DEVICE.forward(MODEL, 1))
    assert DEVICE.forward(MODEL, 30) == pytest.approx(2e9 * 30 / 0.5e12 + rest)
    assert DEVICE.load(MODEL) == pytest.approx(4.0 + 0.4)


def test_costs_are_those_of_the_roofline() -> None:
    draft = Size("x", 0.4e9, 0.4e9, 0.5e9, 10, 100)
    costs = DEVICE.costs(MODEL, draft, ["a", "b"])
    assert costs.verify(4) == pytest.approx(DEVICE.forward(MODEL, 4))
    assert costs.draft("b") == pytest.approx(DEVICE.forward(draft, 1))
    assert costs.load("a") == pytest.approx(DEVICE.load(draft))
    assert costs.catch_up("a", 64) == pytest.approx(DEVICE.forward(draft, 64))
    assert DEVICE.slots(MODEL, draft) == 2
    assert DEVICE.slots(Size("big", 6e9, 6e9, 1e9, 1, 1), draft) == -1


def test_profiles_keep_to_the_figures_that_they_were_made_from() -> None:
    """NVIDIA's own figures for Qwen2.5-7B int4 on both modes of the Orin Nano. The efficiencies were taken from such
    figures: this proves no prediction, it keeps roofline and profiles together."""
    assert {"orin-nano-8gb", "orin-nano-super", "agx-orin"} <= set(profile_names())
    target = read_size("qwen2.5-7b")
    for name, published in (("orin-nano-8gb", 14.2), ("orin-nano-super", 21.75)):
        assert 1 / read_device(name).forward(target, 1) == pytest.approx(published, rel=0.1)
    assert read_device("agx-orin").forward(target, 1) < read_device("orin-nano-super").forward(target, 1)


def test_every_number_of_a_profile_says_where_it_is_from() -> None:
    for name in profile_names():
        lines = (PROFILES / f"{name}.toml").read_text(encoding="utf-8").splitlines()
        for line in lines:
            if "=" in line and not line.startswith(("#", "name", "[")):
                assert len(line.split("#", 1)[1]) > 8, line


def test_a_file_of_ones_own_and_what_is_wrong_with_it(tmp_path: Path) -> None:
    good = (PROFILES / "orin-nano-super.toml").read_text(encoding="utf-8")
    mine = tmp_path / "mine.toml"
    mine.write_text(good.replace("bandwidth_gb_s = 102.0", "bandwidth_gb_s = 51"), encoding="utf-8")
    assert read_device(str(mine)).bandwidth == 51e9
    for wrong, message in (
        (good.replace("bandwidth_gb_s = 102.0", "bandwidth_gb_s = -1"), "bandwidth_gb_s must be a number above 0"),
        (good.replace("bandwidth_gb_s = 102.0", "bandwidth_gb_s = true"), "not True"),
        (good.replace("[launch]", "[lunch]"), r"\[launch\] is missing"),
        (good.replace("kernel_us", "kernels_us"), "kernels_us is not known"),
        (good.replace("efficiency = 0.75", "efficiency = 1.75"), "efficiency"),
        ("not toml", "no TOML"),
    ):
        mine.write_text(wrong, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            read_device(str(mine))
    with pytest.raises(ConfigError, match="orin-nano-super"):
        read_device("orin-nano")
    with pytest.raises(ConfigError, match=r"cannot be read"):
        read_device(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match=r"qwen2\.5-3b"):
        read_size("qwen")
