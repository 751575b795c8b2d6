"""Opening a model's weights: a GGUF file, or safetensors of floats, of edgespec's own quantised form, GPTQ or AWQ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edgespec.errors import ModelError
from edgespec.models.spec import ModelSpec, check_consistency, required_tensors
from edgespec.models.spec_gguf import ROPE_FACTORS, canonical_name
from edgespec.models.weights.files import Reader, ReadOnlyFile, TensorEntry, read_json
from edgespec.models.weights.gguf_file import GGUFFile
from edgespec.models.weights.quantisation import INTEGER_TYPES, Scheme, assembled, scheme_of, without_zero_biases
from edgespec.models.weights.safetensors_file import FLOAT_TYPES, SafetensorsFile, open_shards
from edgespec.models.weights.stored import PlainTensor, Stored
from edgespec.models.weights.weight_file import WeightFile

_PIECE = 8 << 20  # bytes compared at a time
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", ".attn_rot_embd.weight")  # tables that older files carry; we compute them


def open_weights(path: Path, reader: Reader | None = None) -> WeightFile:
    """Open a `.gguf` file, a `.safetensors` file beside its config.json, or a model folder with either.

    Reads headers only. reader: how they, and the weights later, are read; see `ReadOnlyFile`. Raises ModelError for
    whatever is missing, incomplete, corrupt, inconsistent or unsupported.
    """
    path = Path(path)
    try:
        return _open_folder(path, reader) if path.is_dir() else _open_file(path, reader)
    except OSError as error:
        raise ModelError(f"{path}: cannot be opened ({error.strerror}).") from error


def _open_file(path: Path, reader: Reader | None) -> WeightFile:
    if not path.exists():
        raise ModelError(f"{path}: does not exist; give a .gguf file or a model folder.")
    if path.suffix.lower() == ".gguf":
        return _open_gguf(path, reader)
    if path.suffix.lower() == ".safetensors":
        return _open_safetensors(path, path.parent, path, reader)
    if path.suffix.lower() in (".bin", ".pt", ".pth", ".ckpt"):
        raise ModelError(f"{path}: pickled checkpoints are not read, they can run code; use safetensors or GGUF.")
    raise ModelError(f"{path}: is neither a .gguf nor a .safetensors file.")


def _open_folder(folder: Path, reader: Reader | None) -> WeightFile:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if single.exists():
        return _open_safetensors(folder, folder, single, reader)
    if index.exists():
        return _open_safetensors(folder, folder, index, reader)
    if any((folder / name).exists() for name in ("quantize_config.json", "quant_config.json")):
        found = sorted(p for p in folder.iterdir() if p.suffix == ".safetensors")
        if len(found) == 1:  # older tools name the file after the model
            return _open_safetensors(folder, folder, found[0], reader)
    return _open_gguf(only_gguf(folder), reader)


def only_gguf(folder: Path) -> Path:
    """The one .gguf file of a folder; ModelError if there is none or more than one."""
    found = sorted(p for p in folder.iterdir() if p.suffix.lower() == ".gguf")
    if len(found) == 1:
        return found[0]
    if found:
        raise ModelError(f"{folder}: holds {len(found)} .gguf files; give the path of one of them.")
    raise ModelError(f"{folder}: holds neither model.safetensors nor a .gguf file.")


def _open_gguf(path: Path, reader: Reader | None) -> WeightFile:
    opened = GGUFFile(path, reader)
    try:
        spec = ModelSpec.from_gguf(opened.metadata, {n: t.shape for n, t in opened.tensors.items()}, source=str(path))
        tensors: dict[str, Stored] = {}
        for name, entry in opened.tensors.items():
            if name == ROPE_FACTORS:
                spec = _with_rope_factors(spec, entry)
            elif not name.endswith(_IGNORED_SUFFIXES):
                tensors[canonical_name(name) or name] = PlainTensor(entry)
        return WeightFile(path, spec, tensors, [opened], opened.metadata, permuted=spec.architecture == "llama")
    except BaseException:
        opened.close()
        raise


def _open_safetensors(path: Path, folder: Path, source: Path, reader: Reader | None) -> WeightFile:
    """source: the safetensors file, or the index of several."""
    config, scheme = _settings(folder)
    types = FLOAT_TYPES if scheme is None else {**FLOAT_TYPES, **INTEGER_TYPES}
    if source.suffix == ".json":
        files = open_shards(source, types=types, reader=reader)
    else:
        files = [SafetensorsFile(source, types=types, reader=reader)]
    try:
        generation = folder / "generation_config.json"
        spec = ModelSpec.from_config(
            config,
            source=str(folder / "config.json"),
            generation_config=read_json(generation) if generation.exists() else None,
        )
        entries = {n: t for f in files for n, t in f.tensors.items() if not n.endswith(_IGNORED_SUFFIXES)}
        tensors = assembled(path, entries, scheme)
        if spec.tie_embeddings and "lm_head.weight" in tensors:
            # A copy of the embedding is redundant; a different head wins over the flag, as in transformers.
            if _same_content(tensors["lm_head.weight"], tensors.get("model.embed_tokens.weight")):
                del tensors["lm_head.weight"]
            else:
                spec = replace(spec, tie_embeddings=False)
        if scheme is not None and scheme.method != "edgespec":
            tensors = without_zero_biases(tensors, required_tensors(spec))
        return WeightFile(path, spec, tensors, list(files), {}, permuted=False)
    except BaseException:
        for opened in files:
            opened.close()
        raise


def _settings(folder: Path) -> tuple[Mapping[str, Any], Scheme | None]:
    """config.json without what it says about quantisation, and that."""
    config_path = folder / "config.json"
    if not config_path.exists():
        raise ModelError(f"{config_path}: is missing; a safetensors model needs its config.json.")
    config = read_json(config_path)
    scheme = scheme_of(folder, config)
    return {key: value for key, value in config.items() if key != "quantization_config"}, scheme


def _with_rope_factors(spec: ModelSpec, entry: TensorEntry) -> ModelSpec:
    """llama-3 files carry the divisors of the rotary frequencies as a tensor."""
    source = f"{entry.file.path}: tensor {entry.name}"
    if entry.kind != "F32" or entry.shape != (spec.head_dim // 2,) or spec.rope.kind != "default":
        raise ModelError(
            f"{source} cannot be applied (type {entry.kind}, shape {list(entry.shape)}, rope {spec.rope.kind})."
        )
    raw = entry.file.read(entry.offset, entry.nbytes, f"tensor {entry.name}")
    factors = tuple(np.frombuffer(raw, "<f4").astype(float).tolist())
    return check_consistency(replace(spec, rope=replace(spec.rope, kind="factors", factors=factors)), source)


def _same_content(one: Stored, other: Stored | None) -> bool:
    if other is None or one.kind != other.kind or one.shape != other.shape or len(one.parts) != len(other.parts):
        return False
    return all(_same_bytes(*pair) for pair in zip(one.parts, other.parts))


def _same_bytes(one: TensorEntry, other: TensorEntry) -> bool:
    if one.nbytes != other.nbytes:
        return False
    for start in range(0, one.nbytes, _PIECE):
        count = min(_PIECE, one.nbytes - start)
        pieces = [e.file.read(e.offset + start, count, f"tensor {e.name}") for e in (one, other)]
        if pieces[0] != pieces[1]:
            return False
    return True


__all__ = ["ReadOnlyFile", "WeightFile", "only_gguf", "open_weights"]
