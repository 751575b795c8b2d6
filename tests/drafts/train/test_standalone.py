"""Standalone drafts: the target's layers in torch equal transformers' and the engines', and train to a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from drafts.manifest import Manifest
from drafts.train.errors import TrainingError
from drafts.train.fit import Example, FitConfig
from drafts.train.pipeline import train_draft
from drafts.train.standalone import StandaloneFit, StandaloneModule, default_layers, draft_spec, padded, parse_layers
from drafts.train.standalone_recipe import write_checkpoint, write_tokenizer
from edgespec.models.build import build_decoder
from edgespec.models.spec import ModelSpec
from edgespec.models.tokenizer import compare_vocabularies, load_tokenizer
from edgespec.models.weights.opening import open_weights
from tests.drafts.train.support import quick, records, tiny_target, write_prompts
from tests.support.tiny_gguf import write_tiny_gguf

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 64}}),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}),
    ("qwen3", {}),
    ("mistral", {"sliding_window": 5}),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "changes"), KINDS)
def test_transformers_reads_the_checkpoint_and_agrees(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    target = tiny_target(tmp_path / "target", architecture, num_hidden_layers=4, **changes)
    layers = (0, 2, 3)
    module = StandaloneModule(target.weights, layers)
    out = tmp_path / "draft"
    out.mkdir()
    write_checkpoint(out, module, draft_spec(target.weights.spec, layers), torch.float32)
    ids = torch.randint(0, 280, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = F.linear(module(ids), module.head)
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
        theirs = model(ids).logits
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)
    with open_weights(out) as weights:
        assert weights.spec.windows == tuple((target.weights.spec.windows or (None,) * 4)[i] for i in layers)
        decoder = build_decoder(weights, device="torch-cpu")
    logits = decoder.forward(ids[0].tolist(), decoder.new_cache()).logits
    np.testing.assert_allclose(logits, ours[0].numpy(), atol=2e-4, rtol=1e-3)


def test_layers_are_chosen_by_number() -> None:
    assert parse_layers("0,1,-2,-1", 30) == (0, 1, 28, 29)
    assert default_layers(30) == (0, 1, 28, 29)
    assert default_layers(3) == (0, 1, 2)
    assert default_layers(1) == (0,)
    for wrong in ("0,x", "0,30", "3,1", "1,1", "", "-1,0"):
        with pytest.raises(TrainingError, match="--layers"):
            parse_layers(wrong, 30)


def test_a_rotary_table_that_config_json_cannot_say_is_refused(tmp_path: Path) -> None:
    spec = tiny_target(tmp_path).weights.spec
    rope = spec.rope.__class__(1e4, "factors", factors=(1.0,) * 4)
    changed = ModelSpec(**{name: getattr(spec, name) for name in spec.__dataclass_fields__} | {"rope": rope})
    with pytest.raises(TrainingError, match=r"which config\.json cannot say"):
        draft_spec(changed, (0,))


def test_a_gguf_targets_tokenizer_is_written_out(tmp_path: Path) -> None:
    file = write_tiny_gguf(tmp_path / "target.gguf")
    tokenizer = load_tokenizer(file)
    out = tmp_path / "draft"
    out.mkdir()
    write_tokenizer(out, tokenizer, file)
    again = load_tokenizer(out)
    compare_vocabularies(tokenizer, again)
    assert again.fingerprint() == tokenizer.fingerprint()
    assert again.chat_template == tokenizer.chat_template
    assert again.encode("the hen in") == tokenizer.encode("the hen in")
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(out).encode("the hen in", add_special_tokens=False) == again.encode(
        "the hen in"
    )


def examples(count: int = 6) -> list[Example]:
    rng = np.random.default_rng(0)
    found = []
    for n in range(count):
        tokens = rng.integers(0, 280, 9 + n).astype(np.int32)
        found.append(Example(tokens, 4, rng.standard_normal((len(tokens) - 1 - 2, 32)).astype(np.float16)))
    return found


def test_the_loss_and_its_gradient_are_those_of_plain_cross_entropies(tmp_path: Path, monkeypatch) -> None:
    target = tiny_target(tmp_path)
    module = StandaloneModule(target.weights, (0, 1))
    fit = StandaloneFit(examples(), module, FitConfig(1, context=1000), token_count=280, dtype=torch.float32)
    monkeypatch.setattr("drafts.train.standalone._CHUNK", 7)
    loss, _, count = fit._loss(fit.examples, 1, torch.Generator())
    loss.backward()
    got = {name: value.grad.clone() for name, value in module.tensors.items()}
    module.zero_grad()
    ids, guessing, labels, teacher = padded(fit.examples, torch.device("cpu"))
    logs = torch.log_softmax(F.linear(module(ids)[guessing], module.head[:280]), -1)
    law = torch.softmax(F.linear(teacher.float(), module.head[:280]), -1)
    plain = 0.5 * F.nll_loss(logs, labels, reduction="sum") - 0.5 * (law * logs).sum()
    plain.backward()
    assert count == len(labels) == sum(len(e.tokens) - 4 for e in fit.examples)
    torch.testing.assert_close(loss.detach(), plain.detach())
    for name, value in module.tensors.items():
        torch.testing.assert_close(got[name], value.grad, atol=1e-3, rtol=1e-3)


def test_a_run_makes_a_checkpoint_that_the_engine_drafts_with(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "target", num_hidden_layers=3)
    prompts = write_prompts(tmp_path / "code.jsonl", records(12))
    out = tmp_path / "small"
    result = train_draft(target, [prompts], out, quick(kind="standalone", name="small", layers="0,-1"), command="x")
    assert result is not None
    manifest = Manifest.read(out)
    manifest.verify(out)
    assert (manifest.kind, manifest.dtype) == ("standalone", "float16")
    assert set(manifest.files) == {
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"
    }  # fmt: skip
    assert manifest.architecture["num_layers"] == 2
    assert json.loads((out / "config.json").read_text())["num_hidden_layers"] == 2
    with open_weights(out) as weights, open_weights(tmp_path / "target") as whole:
        assert weights.spec.num_layers == 2
        name = "model.layers.1.mlp.up_proj.weight"
        moved = np.abs(weights.read(name) - whole.read("model.layers.2.mlp.up_proj.weight")).max()
        assert 1e-4 < moved < 0.2
    assert manifest.acceptance["code"].rounds > 0
