"""safetensors files and folders: the header parser, shards, and damage of every kind."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from edgespec.errors import ModelError
from edgespec.models.weights.opening import open_weights
from edgespec.models.weights.safetensors_file import SafetensorsFile
from tests.support.damage import byte_flips, survives
from tests.support.tiny import tiny_config, tiny_tensors, write_tiny


def read_all(path: Path) -> dict[str, np.ndarray]:
    with open_weights(path) as weights:
        return {name: weights.read(name) for name in weights.names()}


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_all(path)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model")


def shard(folder: Path, parts: int = 3) -> dict[str, str]:
    """Split model.safetensors into `parts` files with an index; returns the weight map."""
    config = json.loads((folder / "config.json").read_text())
    tensors = tiny_tensors(config)
    names = {name: f"model-{i % parts:05d}.safetensors" for i, name in enumerate(tensors)}
    for file in set(names.values()):
        save_file({n: t for n, t in tensors.items() if names[n] == file}, folder / file)
    write_index(folder, names)
    (folder / "model.safetensors").unlink()
    return names


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_weights_come_back_exactly(tmp_path: Path, architecture: str) -> None:
    folder = write_tiny(tmp_path / "m", architecture)
    expected = tiny_tensors(tiny_config(architecture))
    for path in (folder, folder / "model.safetensors"):
        tensors = read_all(path)
        assert tensors.keys() == expected.keys()
        for name, array in tensors.items():
            np.testing.assert_array_equal(array, expected[name])


def test_half_precision_files_are_widened_exactly(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file as save_torch

    kinds = {"F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
    for kind, dtype in kinds.items():
        tensors = {name: torch.from_numpy(array).to(dtype) for name, array in tiny_tensors(tiny_config()).items()}
        save_torch(tensors, folder / "model.safetensors")
        with open_weights(folder) as weights:
            for name, tensor in tensors.items():
                assert weights.kind(name) == kind
                np.testing.assert_array_equal(weights.read(name), tensor.float().numpy())


def test_shards_equal_one_file(folder: Path) -> None:
    expected = read_all(folder)
    shard(folder)
    tensors = read_all(folder)
    assert tensors.keys() == expected.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(array, expected[name])


def test_missing_shard_is_named(folder: Path) -> None:
    shard(folder)
    (folder / "model-00001.safetensors").unlink()
    assert "model-00001.safetensors: is missing" in refusal(folder)


def test_shard_without_its_tensor_or_with_a_second_copy_is_refused(folder: Path) -> None:
    names = shard(folder)
    write_index(folder, names | {"model.norm.weight": "model-00002.safetensors"})
    message = refusal(folder)
    assert "model.norm.weight" in message
    assert "model-00002.safetensors" in message
    write_index(folder, names)
    tensors = tiny_tensors(tiny_config())
    mine = {n: t for n, t in tensors.items() if names[n] == "model-00002.safetensors"}
    save_file(mine | {"model.norm.weight": tensors["model.norm.weight"]}, folder / "model-00002.safetensors")
    assert "model.norm.weight is in another file" in refusal(folder)


@pytest.mark.parametrize(
    "target", ["../model/secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", 7, None, "a\0b"]
)
def test_shards_outside_the_folder_are_refused(folder: Path, target: Any) -> None:
    shutil.copy(folder / "model.safetensors", folder / "secret.safetensors")
    names = shard(folder)
    write_index(folder, names | {"model.norm.weight": target})
    assert "not a file of this folder" in refusal(folder)


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "{", '{"weight_map": 1}']
)
def test_damaged_index_is_refused(folder: Path, index: str) -> None:
    shard(folder)
    (folder / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in refusal(folder)


# Damage


def rewrite(folder: Path, change: Any) -> str:
    """Let `change` edit the header of model.safetensors, and return the refusal of the result."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    text = change(header)
    raw = (text if isinstance(text, str) else json.dumps(header)).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])
    message = refusal(folder)
    assert str(folder) in message
    path.write_bytes(data)
    return message


def test_truncated_anywhere_is_refused(folder: Path) -> None:
    # B019
    path = folder / "model.safetensors"
    data = path.read_bytes()
    lengths = {0, 1, 7, 8, 9, len(data) - 1} | {int(len(data) * share) for share in (0.1, 0.5, 0.9, 0.999)}
    for length in sorted(lengths | set(range(0, len(data), 1501))):
        path.write_bytes(data[:length])
        message = refusal(folder)
        assert "model.safetensors" in message
        if length > 8000:
            assert "tensor " in message
            assert f"expected {len(data)} bytes, the file has {length}" in message


def test_zero_filled_tails_are_refused_by_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for share in (0.0, 0.1, 0.5, 0.9, 0.99, 0.999):
        kept = int(len(data) * share)
        path.write_bytes(data[:kept] + bytes(len(data) - kept))
        message = refusal(folder)
        assert "model.safetensors" in message
        assert share == 0 or "tensor " in message


def test_header_entries_that_cannot_be_true(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"

    def entry(**changes: Any) -> str:
        return rewrite(folder, lambda header: header[name].update(changes))

    assert f"tensor {name} has shape [32, 64] but the config asks for [64, 32]" in entry(shape=[32, 64])
    assert "occupies" in entry(shape=[64, 33])
    assert "damaged" in entry(shape=[-64, 32])
    assert "damaged" in entry(shape=[64.0, 32])
    assert "damaged" in entry(shape="64x32")
    assert "damaged" in entry(shape=[1 << 60, 1 << 60])
    assert "damaged" in entry(data_offsets=[5])
    assert "damaged" in entry(data_offsets=[8192, 0])
    assert "damaged" in entry(data_offsets=None)
    assert "I64, which is not supported" in entry(dtype="I64")
    assert "F8_E4M3, which is not supported" in entry(dtype="F8_E4M3")
    assert "damaged" in rewrite(folder, lambda header: header.update({name: 5}))
    assert "overlap" in rewrite(
        folder, lambda h: h[name].update(data_offsets=h[name.replace("0", "1")]["data_offsets"])
    )
    assert "does not fit" in rewrite(
        folder, lambda h: h[name].update(data_offsets=[o + (1 << 30) for o in h[name]["data_offsets"]])
    )
    assert f"tensor {name} is missing" in rewrite(folder, _rename(name, "model.layers.0.mlp.up_projx.weight"))  # B131
    assert "tensor extra.weight has no place" in rewrite(folder, lambda h: h.update(_empty("extra.weight", h)))
    assert "need" in rewrite(folder, lambda h: h.pop(name))
    assert "__metadata__" in rewrite(folder, lambda h: h.update(__metadata__=3))
    assert "appears twice" in rewrite(folder, lambda h: json.dumps(h)[:-1] + f', "{name}": {json.dumps(h[name])}}}')
    assert "not valid JSON" in rewrite(folder, lambda h: json.dumps(h)[:-1])
    assert "model.safetensors" in rewrite(folder, lambda h: "[" * 100_000)
    assert "model.safetensors" in rewrite(folder, lambda h: '{"a":' * 100_000)


def _rename(name: str, other: str) -> Any:
    return lambda header: header.update({other: header.pop(name)})


def _empty(name: str, header: dict[str, Any]) -> dict[str, Any]:
    del header
    return {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}


def test_header_length_is_bounded(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for length in (0, 1, len(data), 1 << 32, (1 << 64) - 1):
        path.write_bytes(length.to_bytes(8, "little") + data[8:])
        assert "model.safetensors" in refusal(folder)


def test_json_is_bounded_by_what_it_is_for(folder: Path) -> None:
    """Parsed it takes many times its size; a few hundred megabytes of brackets would take a board down."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes((33 << 20).to_bytes(8, "little") + b"{")
    os.truncate(path, 40 << 20)
    assert "not a safetensors file" in refusal(folder)
    path.write_bytes(data)
    for name in ("config.json", "generation_config.json"):
        before = (folder / name).read_bytes() if (folder / name).exists() else b"{}"
        (folder / name).write_bytes(b"[")
        os.truncate(folder / name, 17 << 20)
        assert "are too many for such a file" in refusal(folder)
        (folder / name).write_bytes(before)


def test_other_files_are_named_for_what_they_are(folder: Path) -> None:
    # B125
    path = folder / "model.safetensors"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 269060552\n")
    assert "incomplete, expected 269060552 bytes" in refusal(folder)
    path.write_bytes(b"")
    assert "empty" in refusal(folder)
    path.write_bytes(b"\n<html><body>Access denied</body></html>")
    assert "web page" in refusal(folder)
    path.write_bytes(b"x" * 1000)
    assert "not a safetensors file" in refusal(folder)
    path.unlink()
    path.mkdir()
    assert "not a regular file" in refusal(folder)


def test_single_byte_corruption_never_escapes_as_a_defect(folder: Path) -> None:
    # B019
    path = folder / "model.safetensors"
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    refusals = survives(path, byte_flips(data, 400, seed=3, last=header), lambda: read_all(folder))
    assert refusals > 300
    survives(path, byte_flips(data, 60, seed=4, first=header), lambda: read_all(folder))
    path.write_bytes(data)
    config = folder / "config.json"
    survives(config, byte_flips(config.read_bytes(), 300, seed=5), lambda: read_all(folder))


def test_closing_releases_the_file(folder: Path) -> None:
    file = SafetensorsFile(folder / "model.safetensors")
    file.close()
    file.close()
    with pytest.raises(ModelError, match="closed"):
        file.file.read(0, 8, "tensor x")
