"""Small tokenizers of both kinds, wrapped as the product's `Tokenizer`."""

from __future__ import annotations

import functools
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from edgespec.models.tokenizer import Tokenizer, TokenizerSettings
from tests.support.tiny import tiny_tokenizer

SENTENCEPIECE_WORDS = ["▁", "▁▁", "a", "b", "l", "o", "▁a", "▁hello", "hello", "lo", "é", "�", ".", ",", "▁.", "\n"]


def wrapped(backend: Backend, **settings: Any) -> Tokenizer:
    return Tokenizer(backend, TokenizerSettings(**settings))


@functools.cache
def byte_level() -> Tokenizer:
    """Ids 0-2 are special, 3-258 the bytes, 259-266 merges ("he", "ll", " t", " the", ...), then filler words."""
    return wrapped(tiny_tokenizer(), bos_id=0, eos_ids=(2,))


@functools.cache
def byte_ids() -> dict[int, int]:
    """Byte -> id of `byte_level()`."""
    tokenizer = byte_level()
    data = {i: tokenizer.token_bytes(i) for i in range(3, 259)}
    return {value[0]: i for i, value in data.items() if value is not None}


@functools.cache
def sentencepiece(prefix: bool = True) -> Tokenizer:
    """Llama 2's kind: ▁ for spaces, <0xNN> for bytes, the first space stripped (if `prefix`). Ids 0-2 are special."""
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{i:02X}>" for i in range(256)], *SENTENCEPIECE_WORDS]
    merges = [("▁", "▁"), ("▁", "a"), ("l", "o"), ("▁", "hello"), ("▁", ".")]
    bpe = models.BPE({t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = Backend(bpe)
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix else undo)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens[:3]])
    return wrapped(backend, bos_id=1, eos_ids=(2,), adds_bos=True)
