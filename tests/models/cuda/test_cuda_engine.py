"""The whole program on the CUDA engine, whose device is the CPU here; and when that engine is chosen."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from edgespec import Engine
from edgespec.config import RuntimeConfig
from edgespec.decoding.params import SamplingParams
from edgespec.errors import ConfigError
from edgespec.loading import device_of
from edgespec.models import build
from edgespec.models.cuda import decoder as cuda_decoder
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.cuda.graphs import Graphs
from edgespec.models.weights.opening import open_weights
from tests.models.cuda.scripted_capture import ScriptedCapture

PROMPT = list(range(5, 25))
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)


@pytest.fixture
def decoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[CudaDecoder]:
    """All that were made, on the CPU, with scripted graphs."""
    made: list[CudaDecoder] = []
    init = CudaDecoder.__init__

    def watched(self: CudaDecoder, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self.graphs = Graphs(ScriptedCapture())
        made.append(self)

    monkeypatch.setattr(cuda_decoder, "device_named", lambda _device: torch.device("cpu"))
    monkeypatch.setattr(CudaDecoder, "__init__", watched)
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    return made


def captures(decoder: CudaDecoder) -> int:
    return decoder.graphs._capture.made  # type: ignore[union-attr]


def freed(decoder: CudaDecoder) -> bool:
    return not hasattr(decoder, "model")


def test_two_drafts_take_turns_in_one_slot(folders: list[Path], decoders: list[CudaDecoder]) -> None:
    """One decoder serves both, no round captures, the text is the plain one, and the end frees all."""
    options: dict[str, Any] = {"device": "cuda", "weight_format": "float32", "memory_budget": "4GiB"}
    with Engine.from_pretrained(str(folders[0]), drafts=None, **options) as engine:
        plain = engine.generate(PROMPT, PARAMS).token_ids
        assert captures(decoders[0]) == 10  # what gamma "auto" may ask for, and the widest
    assert [freed(each) for each in decoders] == [True]
    decoders.clear()
    drafts = [str(folder) for folder in folders]
    with Engine.from_pretrained(str(folders[0]), drafts=drafts, resident=1, gamma=3, **options) as engine:
        target, draft = decoders
        before = captures(target), captures(draft)
        assert before[0] == 5
        shares = []
        for name in list(engine.drafts) * 2:
            engine.use_draft(name)
            result = engine.generate(PROMPT, PARAMS)
            assert result.token_ids == plain
            shares.append(result.stats.acceptance_rate)
        assert shares[0] == shares[2] == 1.0 > shares[1] == shares[3]  # each time with its own weights
        assert len(decoders) == 2
        assert (captures(target), captures(draft)) == before
        engine.working_set.set_capacity(0, "memory is short")  # type: ignore[union-attr]
        assert engine.working_set.wait_for_rest(5.0)  # type: ignore[union-attr]
        assert freed(draft)
        assert engine.generate(PROMPT, PARAMS).token_ids == plain
    assert freed(target)


def test_requests_at_once(folders: list[Path], decoders: list[CudaDecoder]) -> None:
    options: dict[str, Any] = {"device": "cuda", "weight_format": "float32", "memory_budget": "4GiB", "gamma": 2}
    with Engine.from_pretrained(str(folders[0]), drafts=[str(folders[1])], **options) as engine:
        alone = [engine.generate(PROMPT[:length], PARAMS).token_ids for length in (5, 11, 20)]
        together = engine.generate([PROMPT[:length] for length in (5, 11, 20)], PARAMS)
        assert [each.token_ids for each in together] == alone


# Which engine "auto" means


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvgpu").touch()
    build.cuda_works.cache_clear()
    return tmp_path


def test_without_a_driver_torch_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # an import would fail
    assert not build.cuda_works(tmp_path)


def test_torch_for_cpus_beside_a_driver(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not build.cuda_works(driver)


@pytest.mark.parametrize("fault", ["no kernel image is available for execution on the device\nmore", ""])
def test_a_device_that_does_not_compute_is_not_used(
    fault: str, driver: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> torch.Tensor:
        if fault:
            raise RuntimeError(fault)
        return torch.zeros(64)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", broken)
    with caplog.at_level(logging.WARNING):
        assert not build.cuda_works(driver)
        assert not build.cuda_works(driver)
    assert len(caplog.records) == 1
    assert (fault.partition("\n")[0] or "a small sum is wrong") in caplog.text


def test_a_device_that_computes(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", lambda count, device: ones(count))
    assert build.cuda_works(driver)


@pytest.mark.parametrize(
    ("device", "weight_format", "works", "meant"),
    [
        ("auto", "exact", True, "cuda"),
        ("auto", "exact", False, "cpu"),
        ("auto", "int8", True, "cpu"),  # which only the CPU's engine has
        ("cpu", "exact", True, "cpu"),
        ("cuda", "exact", False, "cuda"),
    ],
)
def test_the_engine_that_is_meant(
    device: str, weight_format: str, works: bool, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.loading.cuda_works", lambda: works)
    assert device_of(RuntimeConfig(device=device, weight_format=weight_format)) == meant  # type: ignore[arg-type]


def test_no_cuda_here(folders: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path))
    with open_weights(folders[0]) as weights, pytest.raises(ConfigError, match="finds no CUDA device"):
        build.build_decoder(weights, device="cuda")
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        Engine.from_pretrained(str(folders[0]), drafts=None, device="cuda")
