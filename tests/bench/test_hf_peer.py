"""The float32 peers get the very model that the file holds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from edgespec.bench.peers.base import Recorder
from edgespec.bench.peers.hf import TransformersPeer, _TokenClock, build_model, hf_config
from edgespec.errors import ModelError
from edgespec.models.spec import ModelSpec, RopeSpec
from edgespec.models.weights.opening import open_weights
from tests.support.tiny import write_tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS = [
    ("llama", {}),
    ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}, "attention_bias": True}),
    ("llama", {"tie_word_embeddings": True, "rope_theta": 500.0}),
    ("mistral", {"sliding_window": 8}),
    ("qwen2", {}),
    ("qwen3", {}),
]


@pytest.mark.parametrize(("architecture", "changes"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(v))
def test_same_logits_as_the_folder_it_was_read_from(tmp_path, architecture, changes):
    folder = write_tiny(tmp_path / "t", architecture, **changes)
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(1, 100).unsqueeze(0)
    with torch.no_grad():
        difference = (build_model(folder)(ids).logits - expected(ids).logits).abs().max()
    assert float(difference) == 0.0


def test_answers_go_on_behind_an_end_token_and_lookup_writes_the_same(tmp_path):
    folder = write_tiny(tmp_path / "t")
    prompt = [5, 6, 7, 8] * 3
    plain = TransformersPeer(str(folder), 1).generate(prompt, 40)
    # The EOS trick: declare the third token of the answer to be an end token of the model.
    ended = write_tiny(tmp_path / "e", eos_token_id=plain["token_ids"][2])
    for peer in (TransformersPeer(str(ended), 1), TransformersPeer(str(ended), 1, lookup=4)):
        reply = peer.generate(prompt, 40)
        assert reply["token_ids"] == plain["token_ids"]
        assert len(reply["token_ids"]) == 40 == sum(count for _, count in reply["emissions"])
        assert reply["emissions"][-1][0] <= reply["seconds"]


def test_the_prompt_is_not_counted_as_an_answer():
    recorder = Recorder()
    clock = _TokenClock(recorder)
    clock.put(torch.zeros(1, 7))
    clock.put(torch.zeros(1))
    clock.put(torch.zeros(1, 3))
    clock.end()
    assert [count for _, count in recorder.reply([1, 2, 3, 4])["emissions"]] == [1, 3]


SPEC = ModelSpec(
    architecture="qwen3",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=128,
    rms_norm_eps=1e-6,
    rope=RopeSpec(theta=1e4),
    tie_embeddings=True,
    windows=(None, 8, 8),
)


def test_windows_and_yarn_are_passed_on():
    rope = RopeSpec(theta=1e4, kind="yarn", factor=4.0, original_max_positions=32, mscale=0.7)
    config = hf_config(dataclasses.replace(SPEC, rope=rope))
    assert config["layer_types"] == ["full_attention", "sliding_attention", "sliding_attention"]
    assert (config["sliding_window"], config["use_sliding_window"]) == (8, True)
    yarn = config["rope_parameters"]
    assert (yarn["rope_type"], yarn["factor"], yarn["mscale"]) == ("yarn", 4.0, 0.7)
    assert yarn["original_max_position_embeddings"] == 32
    assert "attention_factor" not in yarn


@pytest.mark.parametrize(
    "changes",
    [
        {"windows": (8, 16, 8)},
        {"architecture": "llama", "windows": (8, 8, 8)},
        {"architecture": "llama", "windows": (None,) * 3, "qkv_bias": True},
        {"architecture": "qwen2", "windows": (None,) * 3},
        {"architecture": "mistral", "windows": (None,) * 3, "qkv_bias": True},
        {"windows": (None,) * 3, "mlp_bias": True},
    ],
    ids=str,
)
def test_what_transformers_cannot_express_is_refused(changes):
    with pytest.raises(ModelError, match="leave this peer out"):
        hf_config(dataclasses.replace(SPEC, **changes))


def test_folder_for_the_model_builder(tmp_path, monkeypatch):
    from edgespec.bench.peers.genai import write_hf_folder

    folder = write_tiny(tmp_path / "t")
    with open_weights(folder) as weights:
        write_hf_folder(weights, folder, tmp_path / "hf")
        embedding = weights.read("model.embed_tokens.weight")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert np.array_equal(loaded.get_input_embeddings().weight.detach().numpy(), embedding)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.decode(tokenizer("hello the tin").input_ids) == "hello the tin"
