"""Many settings in several processes, and how they end early."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.simulation import sweep as sweeping
from edgespec.bench.simulation.scenario import Base, Setting, simulate
from edgespec.errors import ConfigError
from tests.bench.simulation import made

MANY = [
    Setting(f"{policy}@{gamma}")
    for policy in ("static:left", "static:right", "memspec", "hedge")
    for gamma in (1, 2, 3)
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return made.base(tmp_path_factory.mktemp("sweep") / "traces", 2)


def ignore(_: int) -> None:
    pass


def test_a_process_that_is_killed_is_said(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "simulate", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(ConfigError, match="--jobs 1"):
        sweeping.run_all(base, MANY, ignore, jobs=2)


def test_after_ctrl_c_nothing_that_waits_is_begun(base: Base, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def slow(of: Base, setting: Setting) -> Any:
        (tmp_path / setting.policy.replace(":", "_")).touch()
        time.sleep(0.05)
        return simulate(of, setting)

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeping, "simulate", slow)
    with pytest.raises(KeyboardInterrupt):
        sweeping.run_all(base, MANY, interrupted, jobs=2)
    time.sleep(0.5)
    assert len(list(tmp_path.iterdir())) < len(MANY) - 3


def test_the_ablation_says_what_it_cannot_tell_apart() -> None:
    assert "mab-async" in sweeping.sweep("prefetch", [], Setting(), 3, 40).note
    assert not sweeping.sweep("gamma", [], Setting(), 3, 40).note
