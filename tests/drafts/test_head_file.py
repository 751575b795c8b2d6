"""`head.safetensors`: what is written comes back, what is damaged is refused by name."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from drafts.head import HeadFile, HeadSpec, HeadWeights, Int8Matrix, write_head_file
from edgespec.errors import DraftError
from tests.support.tiny_head import TINY, random_head, random_tensors, tiny_spec, write_head

SPEC = tiny_spec()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_head(tmp_path)


def changed(path: Path, **tensors: np.ndarray | None) -> Path:
    """The file with some tensors replaced, added, or (None) left out; "_q" at a name's end stands for ".q"."""
    content = load_file(path)
    for name, value in tensors.items():
        name = name.replace("__", ".")
        if value is None:
            del content[name]
        else:
            content[name] = value
    save_file(content, path)
    return path


# Round trip


def test_what_was_written_comes_back(path: Path) -> None:
    read, made = HeadFile.read(path, SPEC), random_head()
    for name, tensor in made.tensors().items():
        found = read.tensors()[name]
        assert found.dtype == tensor.dtype
        assert np.array_equal(found, tensor), name
    assert read.nbytes == sum(tensor.nbytes for tensor in made.tensors().values())
    assert os.listdir(path.parent) == [path.name]


def test_eight_bits_are_half_a_step_off_at_most() -> None:
    matrix = random_tensors(SPEC)["fc"]
    matrix[0, :32] = 0
    matrix[1, :32] = 1e-12  # less than the smallest scale: rounds to zero
    quantised = Int8Matrix.quantised(matrix)
    error = np.abs(quantised.dequantised() - matrix).reshape(len(matrix), -1, 32)
    largest = np.abs(matrix).reshape(error.shape).max(axis=-1, keepdims=True)
    assert (error <= largest / 127 * 0.56 + 1e-9).all()  # half a step, and the rounding of the scale itself
    assert not quantised.q[0, :32].any()


def test_quantising_again_changes_nothing() -> None:
    once = Int8Matrix.quantised(random_tensors(SPEC)["down"])
    again = Int8Matrix.quantised(once.dequantised())
    assert np.abs(again.dequantised() - once.dequantised()).max() < 1e-3


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
def test_weights_that_have_no_blocks_are_refused(value: float) -> None:
    tensors = random_tensors(SPEC)
    tensors["o"][3, 5] = value
    with pytest.raises(DraftError, match="NaN, infinity, or numbers too large"):
        HeadWeights.quantised(SPEC, tensors)


@pytest.mark.parametrize("name", ["fc", "mlp_norm", "vocab"])
def test_training_cannot_forget_or_misshape_a_tensor(name: str) -> None:
    tensors = random_tensors(SPEC)
    short = {**tensors, name: tensors[name][:-1]}
    with pytest.raises(DraftError, match=name):
        HeadWeights.quantised(SPEC, short)
    del tensors[name]
    with pytest.raises(DraftError, match="needs the tensors"):
        HeadWeights.quantised(SPEC, tensors)


def test_a_failed_write_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_head_file(path, random_head(seed=5))
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


# Damage


@pytest.mark.parametrize("keep", [0, 4, 7, 100, 0.3, 0.999])
def test_a_file_that_was_cut(path: Path, keep: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    with pytest.raises(DraftError, match=str(path)):
        HeadFile.read(path, SPEC)


def test_bytes_behind_the_end(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DraftError, match="corrupt"):
        HeadFile.read(path, SPEC)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(DraftError, match=str(path)):
            HeadFile.read(path, SPEC)


@pytest.mark.parametrize("tensor", ["fc__q", "fc__scale", "out_norm", "vocab"])
def test_missing_and_foreign_tensors(path: Path, tensor: str) -> None:
    with pytest.raises(DraftError, match=f"{tensor.replace('__', '.')} is missing"):
        HeadFile.read(changed(path, **{tensor: None}), SPEC)
    write_head(path.parent)
    with pytest.raises(DraftError, match="extra has no place in a head"):
        HeadFile.read(changed(path, extra=np.zeros(3, np.float32)), SPEC)


@pytest.mark.parametrize(
    ("tensor", "value"),
    [
        ("fc__q", np.zeros((32, 32), np.int8)),
        ("fc__q", np.zeros((32, 64), np.float32)),
        ("o__scale", np.zeros((32, 2), np.float32)),
        ("vocab", np.arange(97, dtype=np.int32)),
        ("vocab", np.arange(96, dtype=np.float32)),
        ("mlp_norm", np.ones(32, np.float16)),
    ],
)
def test_other_shapes_and_types(path: Path, tensor: str, value: np.ndarray) -> None:
    with pytest.raises(DraftError, match="do not belong together"):
        HeadFile.read(changed(path, **{tensor: value}), SPEC)


def test_types_that_no_head_has(path: Path) -> None:
    with pytest.raises(DraftError, match="I64, which is not supported"):
        HeadFile.read(changed(path, vocab=np.arange(96, dtype=np.int64)), SPEC)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("tensor", ["qkv__scale", "embed_norm"])
def test_numbers_that_are_none(path: Path, tensor: str, value: float) -> None:
    content = load_file(path)[tensor.replace("__", ".")]
    content.flat[1] = value
    with pytest.raises(DraftError, match="holds NaN or infinity"):
        HeadFile.read(changed(path, **{tensor: content}), SPEC)


@pytest.mark.parametrize("vocab", [[5, 4], [4, 4], [-1, 0]])
def test_vocabularies_that_are_not_ascending(path: Path, vocab: list[int]) -> None:
    ids = np.arange(100, 100 + SPEC.vocab_rows, dtype=np.int32)
    ids[:2] = vocab
    with pytest.raises(DraftError, match="ascending order"):
        HeadFile.read(changed(path, vocab=ids), SPEC)


def test_a_header_that_lies(path: Path) -> None:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["fc.q"]["shape"] = [1 << 40, 64]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    with pytest.raises(DraftError, match=r"fc\.q has shape"):
        HeadFile.read(path, SPEC)


def test_a_pipe_is_no_draft_and_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DraftError, match="not a regular file"):
        HeadFile.read(tmp_path / "pipe", SPEC)


# The architecture's numbers


def test_numbers_survive_the_way_through_a_mapping() -> None:
    assert HeadSpec.from_mapping(SPEC.to_mapping()) == SPEC
    assert HeadSpec.from_mapping({**SPEC.to_mapping(), "rope_theta": 10000}).key == SPEC.key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 33}, "multiple of 32"),
        ({"intermediate_size": 40}, "multiple of 32"),
        ({"num_heads": 1, "num_kv_heads": 1}, "num_heads . head_dim"),
        ({"head_dim": 8, "num_heads": 8}, "multiple of 16"),
        ({"num_kv_heads": 3}, "cannot share"),
        ({"window": 0}, "window"),
        ({"window": True}, "window"),
        ({"vocab_rows": 1.5}, "vocab_rows"),
        ({"vocab_rows": 1 << 40}, "vocab_rows"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps"),
        ({"layers": 2}, "has no number 'layers'"),
    ],
)
def test_numbers_that_no_head_has(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftError, match=message):
        HeadSpec.from_mapping({**SPEC.to_mapping(), **change})


def test_a_number_that_is_missing() -> None:
    with pytest.raises(DraftError, match="needs the number 'rope_theta'"):
        HeadSpec.from_mapping(TINY)


@pytest.mark.parametrize("field", SPEC.to_mapping())
def test_every_number_is_part_of_the_key(field: str) -> None:
    value = SPEC.to_mapping()[field]
    other = {"num_kv_heads": 4}.get(field, value * 2)
    assert HeadSpec.from_mapping({**SPEC.to_mapping(), field: other}).key != SPEC.key
