"""Both engines behind one name for parametrised tests, and transformers' own classes as their reference."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from edgespec.models.base import Decoder
from edgespec.models.build import build_decoder
from edgespec.models.weights.opening import open_weights

_NO_ONNX = find_spec("edgespec.models.onnx.decoder") is None or find_spec("onnxruntime") is None
ENGINES = [
    pytest.param("torch", id="torch"),
    pytest.param("cpu", id="onnx", marks=pytest.mark.skipif(_NO_ONNX, reason="the ONNX engine is not there")),
]


def load(path: Path, engine: str, weight_format: str = "float32") -> Decoder:
    """The model at `path` on `engine` ("torch" or "cpu", see `build_decoder`), with one thread."""
    with open_weights(path) as weights:
        return build_decoder(weights, device=engine, weight_format=weight_format, threads=1)


@dataclass(frozen=True)
class Reference:
    """What transformers computes: logits float32 [n, vocab], hidden float32 [n, hidden] after the final norm."""

    logits: np.ndarray
    hidden: np.ndarray


def reference(folder: Path, tokens: list[int]) -> Reference:
    """One uncached eager pass of transformers' class for the model in `folder`; fails if it invents any weight."""
    import torch
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    assert model.dtype == torch.float32
    assert not any(loading.values()), loading
    with torch.inference_mode():
        hidden = model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return Reference(model.lm_head(hidden).numpy(), hidden.numpy())
