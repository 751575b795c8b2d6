"""How a safetensors folder is quantised: what its settings say, and which of its tensors belong together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edgespec.errors import ModelError
from edgespec.models.weights.files import TensorEntry, read_json
from edgespec.models.weights.gguf_types import KINDS
from edgespec.models.weights.stored import PlainTensor, Stored
from edgespec.models.weights.stored_packed import OwnMatrix, PackedMatrix

OWN_KEY = "edgespec_quantisation"
OWN_VERSION = 1
_OWN_PARTS = ("q", "scale", "zero", "shift")
_PACKED_PARTS = ("qweight", "qzeros", "scales", "g_idx")
INTEGER_TYPES = {"I32": 4, "I64": 8, "U8": 1, "I8": 1}


@dataclass(frozen=True, slots=True)
class Scheme:
    """method "edgespec" needs no more. bits, group (-1: all inputs), plus_one, acts: as `PackedMatrix` has them."""

    method: Literal["edgespec", "gptq", "awq"]
    bits: int = 4
    group: int = 128
    plus_one: bool = False
    acts: bool = False


def scheme_of(folder: Path, config: Mapping[str, Any]) -> Scheme | None:
    """What the folder's settings say about quantised tensors; None for ordinary weights.

    Settings lie in config.json, or in files of their own (quantize_config.json, quant_config.json) that older tools
    write. Raises ModelError for methods, formats and numbers of bits that are not supported.
    """
    own = config.get(OWN_KEY)
    if own is not None:
        version = own.get("version") if isinstance(own, dict) else None
        if version != OWN_VERSION:
            raise ModelError(
                f"{folder / 'config.json'}: {OWN_KEY} has version {str(version)[:20]}, this edgespec reads "
                f"{OWN_VERSION}; convert the model again."
            )
        return Scheme("edgespec")
    settings, source = config.get("quantization_config"), folder / "config.json"
    if settings is None:
        for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
            if (folder / name).exists():
                source = folder / name
                settings = {"quant_method": method, **read_json(source)}
                break
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise ModelError(f"{source}: quantization_config must be an object.")
    method = str(settings.get("quant_method", "")).lower()
    if method == "gptq":
        return _gptq(settings, source)
    if method == "awq":
        return _awq(settings, source)
    raise ModelError(
        f"{source}: quantization_config asks for pre-quantised weights of method {method[:40]!r}, which are not "
        "supported (gptq and awq are); use the original checkpoint or a GGUF file."
    )


def _gptq(settings: Mapping[str, Any], source: Path) -> Scheme:
    bits, group = _numbers(settings, source, "bits", "group_size", (4, 8))
    form = str(settings.get("checkpoint_format") or settings.get("format") or "gptq")
    if settings.get("is_marlin_format"):
        form = "marlin"
    if form not in ("gptq", "gptq_v2"):
        raise ModelError(
            f"{source}: GPTQ weights in the format {form[:40]!r} are not supported (gptq and gptq_v2 are); "
            "use the original checkpoint."
        )
    _refuse_mixed(settings, source)
    return Scheme("gptq", bits, group, plus_one=form == "gptq", acts=settings.get("desc_act") is True)


def _awq(settings: Mapping[str, Any], source: Path) -> Scheme:
    names = ("w_bit", "q_group_size") if "w_bit" in settings else ("bits", "group_size")
    bits, group = _numbers(settings, source, *names, (4,))
    version = str(settings.get("version") or settings.get("checkpoint_format") or settings.get("format") or "gemm")
    version = version.lower()
    if version != "gemm":
        raise ModelError(
            f"{source}: AWQ weights of version {version[:40]!r} are not supported (gemm is); "
            "use the original checkpoint."
        )
    _refuse_mixed(settings, source)
    return Scheme("awq", bits, group)


def _refuse_mixed(settings: Mapping[str, Any], source: Path) -> None:
    """Keys "-:pattern" of `dynamic` only leave layers unquantised; all others give layers settings of their own."""
    dynamic = settings.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise ModelError(f"{source}: dynamic is {str(dynamic)[:40]!r}, it must be an object.")
    different = [key for key in dynamic if not key.startswith("-:")]
    if different:
        raise ModelError(
            f"{source}: gives some layers settings of their own ({different[0][:60]!r}); a checkpoint with mixed "
            "quantisation is not supported."
        )


def _numbers(
    settings: Mapping[str, Any], source: Path, bits_key: str, group_key: str, known: tuple[int, ...]
) -> tuple[int, int]:
    bits, group = settings.get(bits_key), settings.get(group_key)
    for key, value in ((bits_key, bits), (group_key, group)):
        if type(value) is not int:
            raise ModelError(f"{source}: {key} is {str(value)[:40]!r}, it must be a whole number.")
    assert isinstance(bits, int)
    assert isinstance(group, int)
    if bits not in known:
        raise ModelError(
            f"{source}: weights of {bits} bits are not supported ({' and '.join(map(str, known))} are); "
            "use the original checkpoint or a GGUF file."
        )
    if group != -1 and group < 1:
        raise ModelError(f"{source}: {group_key} is {group}, it must be -1 or a positive number.")
    return bits, group


def assembled(path: Path, entries: Mapping[str, TensorEntry], scheme: Scheme | None) -> dict[str, Stored]:
    """The tensors of a safetensors folder by the name of the weight that each is. Raises ModelError for loose parts."""
    names = _OWN_PARTS if scheme and scheme.method == "edgespec" else _PACKED_PARTS if scheme else ()
    plain: dict[str, Stored] = {}
    grouped: dict[str, dict[str, TensorEntry]] = {}
    for name, entry in entries.items():
        stem, _, part = name.rpartition(".")
        if part in names:
            grouped.setdefault(stem, {})[part] = entry
        elif entry.kind not in KINDS:
            raise ModelError(f"{entry.file.path}: tensor {name[:200]} has type {entry.kind}, which is not supported.")
        else:
            plain[name] = PlainTensor(entry)
    for stem, parts in grouped.items():
        stored: Stored
        if scheme is None or scheme.method == "edgespec":
            weight, stored = stem, OwnMatrix(stem, parts)
        else:
            weight = f"{stem}.weight"
            stored = PackedMatrix(
                stem,
                parts,
                awq=scheme.method == "awq",
                bits=scheme.bits,
                group=scheme.group,
                plus_one=scheme.plus_one,
                acts=scheme.acts,
            )
        if weight in plain:
            raise ModelError(f"{path}: tensor {weight} is there both quantised and not; the checkpoint is damaged.")
        plain[weight] = stored
    return plain


def without_zero_biases(tensors: Mapping[str, Stored], required: Mapping[str, Any]) -> dict[str, Stored]:
    """Without the biases that some GPTQ tools add to every layer, all zeros, where the model has none."""
    return {
        name: stored
        for name, stored in tensors.items()
        if name in required or not name.endswith(".bias") or np.any(stored.read())
    }
