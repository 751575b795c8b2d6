"""Which memory `edgespec doctor` plans: the GPU's own, the one that CPU and GPU share, or the machine's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec import loading, selftest
from edgespec.cli import doctor, doctor_memory, doctor_place
from edgespec.cli.doctor_gpu import Probes, TorchFacts
from edgespec.cli.main import main
from edgespec.config import RuntimeConfig
from edgespec.errors import ConfigError
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.footprint import CUDA_CONTEXT, CUDA_PROCESS
from edgespec.models.weights.opening import open_weights
from edgespec.telemetry.board import detect
from tests.support import boards
from tests.support.boards import FakeBoard
from tests.support.draft_sets import write_draft, write_standalone
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import SHAPE

MIB = 1 << 20
ORIN = TorchFacts("2.9.0", "12.6", True, "Orin", 7 << 30, (8, 7), ("sm_87",), free_bytes=1 << 30)
RTX = TorchFacts("2.9.0", "12.6", True, "RTX 4090", 24 << 30, (8, 9), ("sm_89",), free_bytes=20 << 30)
# board, what torch says, kind of memory, bytes free for the plan before CUDA takes its part
BOARDS = [
    (boards.NANO_8, ORIN, "unified", 6800 * MIB),
    (boards.NANO_4, ORIN, "unified", boards.NANO_4.free * MIB),
    (boards.DESKTOP, RTX, "discrete", (20 << 30) + CUDA_CONTEXT),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "tiny", **SHAPE)


def settings(model: Path, *drafts: Path, **values: Any) -> RuntimeConfig:
    return RuntimeConfig.load(model=str(model), drafts=[str(draft) for draft in drafts], **values)


def planned(config: RuntimeConfig, board: FakeBoard, facts: TorchFacts, root: Path) -> doctor_memory.PlanReport:
    report = doctor_memory.plan_of(config, doctor_place.place(config, detect(root), facts, root))
    assert report is not None
    return report


@pytest.mark.parametrize(("board", "facts", "kind", "free"), BOARDS)
def test_the_budget_is_of_the_memory_that_the_engine_takes(
    board: FakeBoard, facts: TorchFacts, kind: str, free: int, model: Path, tmp_path: Path
) -> None:
    root = board.write(tmp_path / "board")
    report = planned(settings(model), board, facts, root)
    assert report.topology.kind == kind
    reserve = {"unified": free // 10, "discrete": (free - CUDA_CONTEXT) // 10}[kind]
    assert abs(report.plan.budget - (free - reserve)) <= 1
    first = report.plan.beside
    assert sum(first[part] for part in first if part.startswith("CUDA") and "graphs" not in part) == (
        CUDA_PROCESS if kind == "unified" else CUDA_CONTEXT
    )
    assert ("pinned buffers" in first) == (kind == "unified")
    assert set(report.host) == ({"pinned buffers"} if kind == "discrete" else set())
    asked = planned(settings(model, memory_budget="1500MiB"), board, facts, root)
    assert asked.plan.budget == 1500 * MIB


@pytest.mark.parametrize(("board", "facts", "kind", "free"), BOARDS)
@pytest.mark.parametrize("context", [64, 100, 256])
def test_what_is_planned_holds_what_the_engine_takes(
    board: FakeBoard, facts: TorchFacts, kind: str, free: int, context: int, model: Path, tmp_path: Path
) -> None:
    """Target, keys and values, static tensors, and a draft in its slot, part by part."""
    root, draft = board.write(tmp_path / "board"), write_standalone(tmp_path / "big", model, **SHAPE)
    report = planned(settings(model, draft, context=context), board, facts, root)
    plan = report.plan
    assert (plan.context, plan.slots) == (context, 1)
    with open_weights(model) as weights:
        decoder = CudaDecoder(weights, device="cpu", dtype="float16", positions=context)
    decoder.new_cache(context).reserve(context)
    assert plan.cache(context) == decoder.pool.nbytes
    assert plan.target >= decoder.model.nbytes
    assert plan.beside["workspace"] >= decoder.steps.nbytes + decoder.model.cos.nbytes + decoder.model.sin.nbytes
    with open_weights(draft) as weights:
        small = CudaDecoder(weights, device="cpu", dtype="float16", positions=context)
    small.new_cache(context).reserve(context)
    assert plan.slot_bytes >= small.model.nbytes + small.pool.nbytes + small.steps.nbytes
    assert plan.total == sum(row.nbytes for row in plan.rows()[:-1])


def test_the_engine_plans_what_doctor_plans(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`loading` refuses by the same parts; what CUDA has taken when it started is not asked for again."""
    root, checked = boards.DESKTOP.write(tmp_path / "board"), []
    config = settings(model, device="cuda", memory_budget="2GiB")
    place = doctor_place.place(config, detect(root), RTX, root)
    monkeypatch.setattr(loading, "topology_of", lambda _config: place.topology)
    monkeypatch.setattr(loading, "check_fits", lambda need, budget, *free: checked.append((sum(need.values()), free)))
    with open_weights(model) as weights:
        context, parts = loading._fitting_context(config, weights)
    report = doctor_memory.plan_of(config, place)
    assert report is not None
    assert context == report.plan.context
    assert sum(parts.values()) == report.plan.total
    assert set(parts) == {"target", "KV cache", *report.plan.beside}
    assert checked == [(report.plan.total, ()), (report.plan.total - CUDA_CONTEXT, (RTX.free_bytes,))]


def test_without_a_gpu_that_computes_the_cpu_is_planned(model: Path, tmp_path: Path) -> None:
    root, config = boards.DESKTOP.write(tmp_path / "board"), settings(model)
    broken = replace(RTX, error="no kernel image")
    for facts in (None, broken, replace(RTX, available=False)):
        place = doctor_place.place(config, detect(root), facts, root)
        assert (place.device, place.topology.kind) == ("cpu", "cpu")
        assert place.topology.available_bytes() == boards.DESKTOP.free * MIB
        with pytest.raises(ConfigError, match='device "cuda" is asked for, but cannot be used here: '):
            doctor_place.place(settings(model, device="cuda"), detect(root), facts, root)
    only_cpu = settings(model, weight_format="int8")  # a format that the GPU's engine does not have
    assert doctor_place.place(only_cpu, detect(root), RTX, root).device == "cpu"


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    monkeypatch.setattr(selftest, "run", lambda load: selftest.SelfTest(48, 40, None))
    monkeypatch.setattr(selftest, "same_bits", lambda threads: {})

    def run(root: Path, facts: TorchFacts | None, *flags: str) -> str:
        asked: list[TorchFacts | None] = []
        monkeypatch.setattr(doctor, "ROOT", root)
        monkeypatch.setattr(doctor, "PROBES", Probes(torch=lambda: asked.append(facts) or facts, providers=lambda: ()))
        main(["doctor", *flags])
        assert len(asked) <= 1  # torch takes most of a minute to import on a slow card
        return capsys.readouterr().out

    return run


def test_the_table_of_a_gpu_with_its_own_memory(model: Path, tmp_path: Path, play: Callable[..., str]) -> None:
    root, draft = boards.DESKTOP.write(tmp_path / "board"), write_draft(tmp_path / "code", model)
    flags = ("--model", str(model), "--draft", str(draft))
    out = play(root, RTX, *flags)
    assert "ok    engine: cuda, in the GPU's own memory" in out
    assert "Memory plan (the GPU's own memory, 20.0 GiB free now)" in out
    for part in ("CUDA context (assumed)", "CUDA graphs (assumed)", "workspace", "KV cache of 256 tokens"):
        assert f"│ {part} " in out
    assert "graph for batches" not in out  # a second copy of the weights is what ONNX Runtime needs, not this engine
    assert "- pinned buffers take 16." in out
    assert "- small drafts (heads) run on the CPU: " in out
    data = json.loads(play(root, RTX, *flags, "--json"))
    assert data["memory"]["device"]["kind"] == "discrete"
    assert data["memory"]["host_bytes"]["pinned buffers"] > 16 * MIB


def test_an_engine_that_cannot_run_is_one_failure(model: Path, tmp_path: Path, play: Callable[..., str]) -> None:
    out = play(boards.PLAIN.write(tmp_path / "board"), None, "--model", str(model), "--device", "cuda")
    assert out.count("fail  ") == 1
    assert 'fail  engine: device "cuda" is asked for, but cannot be used here: torch is not installed, or' in out
    assert "warn  memory plan: not made: " in out
