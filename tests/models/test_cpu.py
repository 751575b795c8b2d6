"""Cores that may be used: affinity and container quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edgespec.models.cpu import usable_cores, usable_threads


@pytest.mark.parametrize(("quota", "cores"), [("150000 100000", 1.5), ("max 100000", None), ("", None), ("1 0", None)])
def test_the_quota_of_a_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: float | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(quota)
    assert usable_cores(tmp_path) == (cores or 3)


def test_without_control_groups_and_on_part_of_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    assert usable_cores(tmp_path) == 3
    monkeypatch.setattr("edgespec.models.cpu.usable_cores", lambda: 0.3)
    assert usable_threads() == 1
