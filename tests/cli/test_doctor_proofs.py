"""What `edgespec doctor` proves, of which engine; which sets it says fit; and what it says of memory without Triton."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec import selftest
from edgespec.cli import doctor, doctor_gpu, doctor_memory, doctor_place, doctor_proofs
from edgespec.cli.doctor_gpu import Probes
from edgespec.config import RuntimeConfig
from edgespec.selftest import SelfTest
from edgespec.telemetry.board import detect
from tests.cli.test_doctor_place import ORIN, RTX
from tests.support import boards
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import SHAPE
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.mark.parametrize(("device", "engine"), [("cpu", "the CPU's engine"), ("cuda", "the GPU's engine")])
def test_the_engine_that_was_tried_is_named(device: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def run(load: Any, **more: Any) -> SelfTest:
        asked.append(more)
        return SelfTest(48, 40, None if len(asked) == 1 else "with gamma 3 the output leaves plain decoding")

    monkeypatch.setattr(selftest, "run", run)
    good, bad = (doctor_proofs.lossless(lambda: None, device) for _ in range(2))
    assert asked == 2 * [{} if device == "cpu" else {"device": "cuda"}]
    assert (good.status, bad.status) == ("ok", "fail")
    assert good.detail.startswith(f"{engine}: 48 tokens equal")
    assert bad.detail.startswith(f"{engine}: with gamma 3")


def test_the_self_test_asks_for_that_engine() -> None:
    configs: list[RuntimeConfig] = []

    def load(config: RuntimeConfig) -> Any:
        configs.append(config)
        raise KeyError

    for device in ("cpu", "cuda"):
        with pytest.raises(KeyError):
            selftest.run(load, device=device)
    assert [config.device for config in configs] == ["cpu", "cuda"]


def test_bits_of_the_gpus_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor_proofs.gpu_bits("cpu")  # where nothing is promised
    assert set(found) == {"float16", "int8", "int4"}
    monkeypatch.setattr(doctor_proofs, "gpu_bits", lambda device: {"float16": True, "int4": device != "cuda"})
    check = doctor_proofs.bits(None, "cuda")
    assert (check.status, check.detail.split(" weights")[0]) == ("warn", "the GPU's engine: logits of int4")
    monkeypatch.setattr(selftest, "same_bits", lambda threads: {"exact": True})
    assert doctor_proofs.bits(1, "cpu").detail.startswith("the CPU's engine: logits are the same bits")


def test_nothing_is_tried_on_a_gpu_that_is_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_place", lambda args: doctor_place.Place("cuda", None))  # type: ignore[arg-type]
    args = argparse.Namespace()
    assert doctor._engine_here(args) == "cuda"
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    assert doctor._engine_here(args) == "cpu"


@pytest.mark.parametrize(
    ("board", "facts", "fitting"),
    [
        (boards.NANO_4, ORIN, set()),
        (boards.NANO_8, ORIN, {"llama-3.2-3b-instruct", "qwen2.5-3b-instruct", "qwen3-4b"}),
        (
            boards.DESKTOP,
            RTX,
            {"llama-3.2-3b-instruct", "qwen2.5-3b-instruct", "qwen2.5-7b-instruct", "qwen3-4b"},
        ),
    ],
)
def test_which_sets_fit(board: boards.FakeBoard, facts: Any, fitting: set[str], tmp_path: Path) -> None:
    root, config = board.write(tmp_path), RuntimeConfig(model="tiny")
    place = doctor_place.place(config, detect(root), facts, root)
    check = doctor_memory.sets(config, place)
    found = {fit.name: fit for fit in doctor_memory.set_fits(config, place)}
    assert {name for name, fit in found.items() if fit.fits} == fitting
    good, _, bad = check.detail.partition("do not: ")
    assert all((name in good) == (fit.slots >= 0) and (name in bad) == (fit.slots < 0) for name, fit in found.items())
    assert (check.name, check.status) == ("sets", "ok")
    less = doctor_memory.set_fits(config.replace(memory_budget="1GiB"), place)
    assert not any(fit.fits for fit in less)


def test_what_is_widened_is_said(tmp_path: Path) -> None:
    root = boards.DESKTOP.write(tmp_path / "board")
    board = detect(root)
    for quant, said in (("Q5_0", True), ("Q8_0", False)):
        path = write_tiny_gguf(tmp_path / f"{quant}.gguf", quant=quant, **SHAPE)
        config = RuntimeConfig(model=str(path), drafts=())
        report = doctor_memory.plan_of(config, doctor_place.place(config, board, RTX, root))
        assert report is not None
        assert bool(report.hints) == said
        assert all("has no Q5_0; edgespec convert" in hint for hint in report.hints)
        assert any("Q5_0" in line for line in report.to_json()["advice"]) == said
        on_cpu = doctor_memory.plan_of(config.replace(device="cpu"))
        assert on_cpu is not None
        assert not on_cpu.hints


def test_the_plan_without_triton(tmp_path: Path) -> None:
    root = boards.NANO_8.write(tmp_path / "board")
    config = RuntimeConfig(model=str(write_tiny(tmp_path / "m", **SHAPE)), drafts=())
    place = doctor_place.place(config, detect(root), ORIN, root)
    plans = [doctor_memory.plan_of(config, replace(place, plain=plain)) for plain in (False, True)]
    workspaces = [report.plan.beside["workspace"] for report in plans if report is not None]
    assert workspaces[1] > workspaces[0] + (8 << 20)


@pytest.mark.parametrize(
    ("changes", "plain"),
    [
        ({}, False),
        ({"version": lambda package: ""}, True),
        ({"which": lambda program: None}, True),
        ({"which": lambda program: None, "environment": {"CC": "cc"}}, False),
        ({"headers": lambda: False}, True),
    ],
)
def test_whether_kernels_can_be_compiled(changes: dict[str, Any], plain: bool) -> None:
    whole: dict[str, Any] = {
        "version": lambda package: "3.6.0",
        "which": lambda program: f"/usr/bin/{program}",
        "headers": lambda: True,
        "environment": {},
    }
    assert doctor_gpu.plain(Probes(**(whole | changes))) == plain
