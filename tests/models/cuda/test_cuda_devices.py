"""Which device is meant, and where steps are captured: what torch says of devices needs none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgespec.kernels import ops
from edgespec.models.cuda import decoder as cuda_decoder
from edgespec.models.cuda import devices
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.cuda.devices import capture_on, device_named, placed
from edgespec.models.cuda.guesses import DeviceTokens


@pytest.fixture(autouse=True)
def _second_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def guesses_on(device: str) -> DeviceTokens:
    ids: Any = SimpleNamespace(device=torch.device(device), shape=(3,))
    return DeviceTokens(ids)


def test_the_device_is_named_as_its_tensors_name_it() -> None:
    own = torch.device("cuda", 1)
    assert torch.device("cuda") != own  # which is why
    assert device_named("cuda") == device_named(torch.device("cuda")) == device_named("cuda:1") == placed(own) == own
    assert device_named("cuda:0") == torch.device("cuda", 0)
    assert device_named("cpu") == torch.zeros(1).device


def test_a_target_takes_the_guesses_of_its_own_device() -> None:
    """Else each round would look twice, and no draft's time would be known."""
    target: Any = SimpleNamespace(device=device_named("cuda"))
    assert CudaDecoder.takes(target, guesses_on("cuda:1"))
    assert not CudaDecoder.takes(target, guesses_on("cuda:0"))
    assert not CudaDecoder.takes(target, [1, 2])
    guesses = guesses_on("cuda:1")
    assert cuda_decoder._on_device([7] + guesses, target.device) == (guesses, [7, 0, 0, 0])


def test_steps_are_captured_where_kernels_know_all_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "TorchCapture", lambda device: f"on {device}")
    for side, captured in (("triton", "on cuda:1"), ("torch", None)):
        monkeypatch.setattr(ops, "backend", lambda _device, side=side: side)
        assert capture_on(device_named("cuda")) == captured
        assert capture_on(torch.device("cpu")) is None
