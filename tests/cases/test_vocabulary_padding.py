"""Target and draft of one family whose vocabularies are padded to different sizes, on every engine (B013, B062).

Both have the same weights but for the rows beyond the tokens, which are loud: a row that is looked at in the wrong
place is noticed at once, and where all is right every guess is accepted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from drafts.standalone import StandaloneSession
from edgespec import Engine, SamplingParams
from tests.support.tiny import tiny_config, tiny_tensors, write_tiny
from tests.support.tiny_engine import SHAPE

TOKENS, MOST = 280, 352
PROMPT = list(range(5, 25))
SIZES = [(320, 288), (288, 320), (TOKENS, 352), (301, TOKENS)]
ENGINES = ["cpu float32", "cpu exact", "torch-cpu float32", "cuda float32"]
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "drawn from few": {"temperature": 0.8, "top_k": 20},
}


def padded(folder: Path, rows: int, tokens: int = TOKENS) -> Path:
    """A model with `rows` rows of the vocabulary; those that it shares with others of these are the same."""
    write_tiny(folder, vocab_size=rows, tokenizer_size=tokens, **SHAPE)
    tensors = tiny_tensors(tiny_config(vocab_size=MOST, **SHAPE))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:rows].copy()
        tensors[name][TOKENS:] *= 40
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def cuda_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA engine, on the CPU and with scripted graphs."""
    import torch

    from edgespec.models.cuda import decoder as cuda_decoder
    from edgespec.models.cuda.graphs import Graphs
    from tests.models.cuda.scripted_capture import ScriptedCapture

    init = cuda_decoder.CudaDecoder.__init__

    def scripted(self: Any, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self.graphs = Graphs(ScriptedCapture())

    monkeypatch.setattr(cuda_decoder, "device_named", lambda _device: torch.device("cpu"))
    monkeypatch.setattr(cuda_decoder.CudaDecoder, "__init__", scripted)
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))


def watched(monkeypatch: pytest.MonkeyPatch, target_rows: int, real: int) -> list[int]:
    """All tokens with rows that drafts propose from now on (those without are looked at too)."""
    seen: list[int] = []
    propose = StandaloneSession.propose

    def look(self: Any, tokens: Any, gamma: int, choose: Any, *, floor: float = 0.0) -> Any:
        proposal = propose(self, tokens, gamma, choose, floor=floor)
        assert max(proposal.tokens, default=0) < real
        for token, row in zip(proposal.tokens, proposal.rows):
            if row is not None:
                seen.append(token)
                assert len(row) == target_rows
                assert not row[real:].any()
                assert row[token] > 0
                np.testing.assert_allclose(row.sum(), 1, atol=1e-4)
        return proposal

    monkeypatch.setattr(StandaloneSession, "propose", look)
    return seen


def options_of(engine: str) -> dict[str, Any]:
    device, weights = engine.split()
    return {"device": device, "weight_format": weights, "memory_budget": "4GiB", "threads": 1}


def answers(engine: Engine, real: int) -> tuple[int, ...]:
    """One of each kind; all guesses are accepted. Returns the greedy one."""
    results = {}
    for how, changes in SAMPLED.items():
        result = engine.generate(PROMPT, SamplingParams(max_new_tokens=32, ignore_eos=True, **changes))
        assert len(result.token_ids) == 32
        assert max(result.token_ids) < real
        assert result.stats.acceptance_rate > 0.9, how
        assert result.stats.draft_share["draft"] > 0
        results[how] = tuple(result.token_ids)
    return results["greedy"]


@pytest.mark.usefixtures("cuda_here")
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_draft_with_another_padding(
    tmp_path: Path, sizes: tuple[int, int], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = (padded(tmp_path / f"{name}", rows) for name, rows in zip(("target", "draft"), sizes))
    with Engine.from_pretrained(str(target), drafts=[str(draft)], gamma=3, **options_of(engine)) as opened:
        greedy = answers(opened, TOKENS)
        seen = watched(monkeypatch, sizes[0], TOKENS)  # which brings to the host what may stay on a device
        assert answers(opened, TOKENS) == greedy
    assert len(seen) > 20
    with Engine.from_pretrained(str(target), drafts=None, **options_of(engine)) as opened:
        assert opened.generate(PROMPT, SamplingParams(max_new_tokens=32, ignore_eos=True)).token_ids == greedy


@pytest.mark.usefixtures("cuda_here")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_target_with_fewer_rows_than_its_tokenizer_has_tokens(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft has rows for tokens that the target cannot write, and never proposes those."""
    target, draft = padded(tmp_path / "target", 270), padded(tmp_path / "draft", 288)
    with Engine.from_pretrained(str(target), drafts=[str(draft)], gamma=3, **options_of(engine)) as opened:
        greedy = answers(opened, 270)
        seen = watched(monkeypatch, 270, 270)
        assert answers(opened, 270) == greedy
    assert len(seen) > 20
