"""GPTQ and AWQ folders: the numbers are those that were packed, on both engines, and what cannot be read says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from edgespec.errors import ModelError
from edgespec.models.onnx.linear import load_blocks
from edgespec.models.weights.opening import open_weights
from edgespec.models.weights.quantised import Layout
from tests.support.engines import load
from tests.support.packed import SHAPE, VARIANTS, Packed, write_packed
from tests.support.tiny import write_tiny

CUTS = ((0, 1), (1, 1), (2, 5), (7, 1), (8, 52))
UP = "model.layers.1.mlp.up_proj"


def cpu_flags() -> str:
    info = Path("/proc/cpuinfo")
    return info.read_text() if info.exists() else ""


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_numbers_are_those_that_were_packed(tmp_path: Path, variant: str) -> None:
    made = write_packed(tmp_path, **VARIANTS[variant])
    with open_weights(tmp_path) as weights:
        assert set(weights.names()) == made.weights.keys()
        for name, expected in made.weights.items():
            np.testing.assert_array_equal(weights.read(name), expected)
            own = weights.quantised(name)
            packed = name.removesuffix(".weight") + ".qweight" in made.tensors
            assert (own is not None) == packed == (weights.layout(name) is not None)
            if own is not None:
                np.testing.assert_array_equal(own.dequantise(), expected)


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({"symmetric": True, "group": 64}, Layout(4, 64, "symmetric")),
        ({"group": -1}, Layout(4, 128, "zeros")),
        ({"bits": 8, "symmetric": True}, Layout(8, 32, "symmetric")),
        ({"bits": 8}, Layout(8, 32, "shift", 4)),
    ],
)
def test_the_simplest_form_that_says_the_same(tmp_path: Path, options: dict[str, Any], layout: Layout) -> None:
    write_packed(tmp_path, **options)
    with open_weights(tmp_path) as weights:
        own = weights.quantised(f"{UP}.weight")
        assert own is not None
        assert own.layout == layout


def test_a_zero_point_of_zero_borrows_from_its_neighbour(tmp_path: Path) -> None:
    """Less one in each number is one subtraction, so 0x50 becomes 0x3f, which is not 16 and 4 again."""
    made = write_packed(tmp_path)
    name = f"{UP}.qzeros"
    zeros = made.tensors[name].copy()
    zeros.view(np.uint32)[0, 0] = (0x07654050 - 0x11111111) % 2**32
    swap(made, "qzeros", zeros)
    with open_weights(tmp_path) as weights:
        own = weights.quantised(f"{UP}.weight")
    assert own is not None
    assert own.zero is not None
    assert own.zero[:8, 0].tolist() == [0, 5, 0, 4, 5, 6, 7, 0]


@pytest.mark.parametrize("said", [True, False])
def test_inputs_out_of_order_are_dequantised_only(tmp_path: Path, said: bool) -> None:
    made = write_packed(tmp_path, shuffled=True)
    if not said:
        made.settings(desc_act=False)
    with open_weights(tmp_path) as weights:
        for name, expected in made.weights.items():
            np.testing.assert_array_equal(weights.read(name), expected)
            assert weights.quantised(name) is None


@pytest.mark.parametrize("variant", ["gptq", "gptq, groups of 64", "gptq, groups of 128", "gptq, symmetric", "awq"])
@pytest.mark.parametrize(("engine", "weight_format"), [("torch", "float32"), ("cpu", "float32"), ("cpu", "exact")])
def test_both_engines_run_them(tmp_path: Path, variant: str, engine: str, weight_format: str) -> None:
    """Against the same numbers as an ordinary float32 checkpoint."""
    made = write_packed(tmp_path / "packed", **VARIANTS[variant])
    ordinary = write_tiny(tmp_path / "plain", **SHAPE)
    save_file(made.weights, ordinary / "model.safetensors")
    tokens = np.random.default_rng(0).integers(3, 270, 24).tolist()
    truth = load(ordinary, "torch", "float32")
    found = load(tmp_path / "packed", engine, weight_format)
    expected = truth.forward(tokens, truth.new_cache()).logits
    logits = found.forward(tokens, found.new_cache()).logits
    if weight_format == "float32":
        np.testing.assert_allclose(logits, expected, atol=2e-4)
    else:  # activations, and what the file has in float16, are rounded to 8 bits
        assert np.abs(logits - expected).mean() < 0.08 * expected.std()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cpu_engine_keeps_their_numbers(tmp_path: Path, variant: str) -> None:
    made = write_packed(tmp_path, **VARIANTS[variant])
    with open_weights(tmp_path) as weights:
        for name, expected in made.weights.items():
            if weights.layout(name) is None:
                continue
            blocks = load_blocks(weights, name, "exact")
            assert blocks is not None
            assert blocks.bits == VARIANTS[variant].get("bits", 4)
            numbers = blocks.scale[..., None] * (blocks.q.astype(np.float32) - 2 ** (blocks.bits - 1))
            if blocks.shift is not None:
                numbers = numbers + blocks.shift[..., None]
            np.testing.assert_allclose(numbers.reshape(expected.shape), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("group", [64, 128])
def test_logits_do_not_depend_on_how_tokens_are_cut(tmp_path: Path, group: int) -> None:
    write_packed(tmp_path, group=group)
    decoder = load(tmp_path, "cpu", "exact")
    tokens = np.random.default_rng(0).integers(3, 270, 60).tolist()
    whole = decoder.forward(tokens, decoder.new_cache()).logits.copy()
    cache = decoder.new_cache()
    pieces = [decoder.forward(tokens[at : at + size], cache).logits.copy() for at, size in CUTS]
    if "avx512_vnni" in cpu_flags():  # seen there, as with groups of 32
        np.testing.assert_array_equal(np.concatenate(pieces), whole)
    else:
        assert np.abs(np.concatenate(pieces) - whole).mean() < 0.08 * whole.std()


def test_settings_in_files_of_their_own(tmp_path: Path) -> None:
    """As older tools write them, with a file named after the model."""
    for method, name in (("gptq", "quantize_config.json"), ("awq", "quant_config.json")):
        made = write_packed(tmp_path / method, method)
        config = json.loads((made.folder / "config.json").read_text())
        settings = config.pop("quantization_config")
        if method == "awq":
            settings = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
        (made.folder / "config.json").write_text(json.dumps(config))
        (made.folder / name).write_text(json.dumps(settings))
        (made.folder / "model.safetensors").rename(made.folder / "tiny-4bit-32g.safetensors")
        with open_weights(made.folder) as weights:
            np.testing.assert_array_equal(weights.read(f"{UP}.weight"), made.weights[f"{UP}.weight"])


def test_biases_of_zeros_that_some_tools_add_are_left_out(tmp_path: Path) -> None:
    made = write_packed(tmp_path)
    made.tensors[f"{UP}.bias"] = np.zeros(256, np.float16)
    made.save()
    with open_weights(tmp_path) as weights:
        assert f"{UP}.bias" not in weights.names()
    made.tensors[f"{UP}.bias"][7] = 1
    made.save()
    with pytest.raises(ModelError, match=r"up_proj.bias has no place"):
        open_weights(tmp_path)


# What cannot be read


def drop(made: Packed, part: str) -> None:
    del made.tensors[f"{UP}.{part}"]
    made.save()


def swap(made: Packed, part: str, array: np.ndarray) -> None:
    made.tensors[f"{UP}.{part}"] = array
    made.save()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda m: m.settings(bits=3), "weights of 3 bits are not supported \\(4 and 8 are\\)"),
        (lambda m: m.settings(bits="four"), "bits is 'four', it must be a whole number"),
        (lambda m: m.settings(group_size=0), "group_size is 0"),
        (lambda m: m.settings(group_size=None), "group_size is 'None'"),
        (lambda m: m.settings(checkpoint_format="marlin"), "in the format 'marlin' are not supported"),
        (lambda m: m.settings(quant_method="bitsandbytes"), "method 'bitsandbytes', which are not supported"),
        (lambda m: m.settings(dynamic={"+:.*down.*": {"bits": 8}}), "mixed quantisation is not supported"),
        (lambda m: m.settings(dynamic=5), "dynamic is '5', it must be an object"),
        (lambda m: m.settings(dynamic=["-:.*"]), "it must be an object"),
        (lambda m: m.settings(bits=8), "mixed quantisation is not supported"),
        (lambda m: m.settings(group_size=64), "mixed quantisation is not supported"),
        (lambda m: drop(m, "scales"), "up_proj.scales is missing"),
        (lambda m: drop(m, "qzeros"), "up_proj.qzeros is missing"),
        (lambda m: drop(m, "qweight"), "up_proj.qweight is missing"),
        (lambda m: swap(m, "qweight", m.tensors[f"{UP}.qweight"][:8].copy()), "does not fit 4 bits in groups of 32"),
        (lambda m: swap(m, "qweight", m.tensors[f"{UP}.qweight"].astype(np.float32)), "has type F32"),
        (lambda m: swap(m, "g_idx", np.zeros(64, np.int32)), "g_idx has shape"),
        (lambda m: swap(m, "weight", np.ones((256, 128), np.float16)), "both quantised and not"),
    ],
)
def test_refusals_when_opened(tmp_path: Path, spoil: Any, words: str) -> None:
    made = write_packed(tmp_path)
    spoil(made)
    with pytest.raises(ModelError, match=words):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("scales", lambda a: np.where(np.arange(256) == 3, np.float16(np.inf), a), "scales holds NaN or infinity"),
        ("scales", np.zeros_like, "ends with zeros only"),
        ("g_idx", np.zeros_like, "g_idx does not give each of 4 groups 32 inputs"),
        ("g_idx", lambda a: a - 1, "g_idx does not give each"),
    ],
)
def test_refusals_when_read(tmp_path: Path, part: str, change: Any, words: str) -> None:
    made = write_packed(tmp_path)
    swap(made, part, np.ascontiguousarray(change(made.tensors[f"{UP}.{part}"])))
    with open_weights(tmp_path) as weights:
        for use in (weights.read, weights.quantised):
            with pytest.raises(ModelError, match=words):
                use(f"{UP}.weight")


def test_layers_left_out_of_quantisation_are_read_as_floats(tmp_path: Path) -> None:
    """What modules_to_not_convert, and "-:" patterns of dynamic, do: such a layer has an ordinary weight."""
    made = write_packed(tmp_path)
    made.settings(dynamic={"-:.*up_proj.*": {}})
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del made.tensors[f"{UP}.{part}"]
    swap(made, "weight", made.weights[f"{UP}.weight"])
    with open_weights(tmp_path) as weights:
        assert weights.kind(f"{UP}.weight") == "F32"
        np.testing.assert_array_equal(weights.read(f"{UP}.weight"), made.weights[f"{UP}.weight"])


def test_other_versions_of_awq_are_refused(tmp_path: Path) -> None:
    made = write_packed(tmp_path, "awq")
    made.settings(version="gemv")
    with pytest.raises(ModelError, match="AWQ weights of version 'gemv' are not supported"):
        open_weights(tmp_path)


def test_other_versions_of_awq_as_other_tools_name_them(tmp_path: Path) -> None:
    made = write_packed(tmp_path, "awq")
    made.settings(version=None, checkpoint_format="gemm", format="gemm")
    open_weights(tmp_path).close()
    made.settings(checkpoint_format="gemv_fast")
    with pytest.raises(ModelError, match="version 'gemv_fast' are not supported"):
        open_weights(tmp_path)
    made.settings(checkpoint_format=None, format="GEMM", dynamic={"layers.1": {"bits": 8}})
    with pytest.raises(ModelError, match="mixed quantisation is not supported"):
        open_weights(tmp_path)


@pytest.mark.parametrize("change", [{"bits": 8}, {"group": 64}])
def test_one_layer_packed_otherwise_is_refused(tmp_path: Path, change: dict[str, int]) -> None:
    """As mixed checkpoints are whose settings do not say so."""
    made, other = write_packed(tmp_path / "a"), write_packed(tmp_path / "b", **change)
    made.tensors |= {name: array for name, array in other.tensors.items() if name.startswith(UP)}
    made.save()
    with pytest.raises(ModelError, match=r"up_proj.*a checkpoint with mixed quantisation is not supported"):
        open_weights(made.folder)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_settings_that_name_the_wrong_format(tmp_path: Path, version: str, bits: int) -> None:
    made = write_packed(tmp_path, symmetric=True, bits=bits, version=version)
    with open_weights(tmp_path) as weights:
        np.testing.assert_array_equal(weights.read(f"{UP}.weight"), made.weights[f"{UP}.weight"])
    wrong = "gptq_v2" if version == "gptq" else "gptq"
    made.settings(checkpoint_format=wrong)
    with open_weights(tmp_path) as weights:
        for use in (weights.read, weights.quantised):
            with pytest.raises(ModelError, match=f'settings say {wrong}; set "checkpoint_format": "{version}"'):
                use(f"{UP}.weight")


def test_the_fingerprint_sees_every_part(tmp_path: Path) -> None:
    made = write_packed(tmp_path)
    found = set()
    for part in (None, "qweight", "qzeros", "scales"):
        if part is not None:
            changed = made.tensors[f"{UP}.{part}"].copy()
            changed.view(np.uint8)[-1, -1] ^= 1
            swap(made, part, changed)
        with open_weights(tmp_path) as weights:
            found.add(weights.fingerprint())
    assert len(found) == 4
