"""What the tests of the CUDA engine share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.session import Session
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.tokenizer import load_tokenizer
from edgespec.models.weights.opening import open_weights
from predictor.planner import FixedPlanner
from tests.models.cuda.scripted_capture import ScriptedCapture

TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 280, 60)]


def load(folder: Path, graphs: bool = True) -> CudaDecoder:
    with open_weights(folder) as weights:
        decoder = CudaDecoder(weights, device="cpu")
    if graphs:
        decoder.graphs._capture = ScriptedCapture()
    return decoder


def answer(target: CudaDecoder, folder: Path, drafts: list[Any], gamma: int, **params: Any) -> Generation:
    tokenizer = load_tokenizer(folder)
    planner = FixedPlanner(drafts[0].name if drafts else None, gamma)
    session = Session(target, tokenizer, drafts, planner=planner, eos_ids=())
    generation = Generation(session, TOKENS[:10], SamplingParams(max_new_tokens=40, **params))
    while generation.step():
        pass
    return generation
