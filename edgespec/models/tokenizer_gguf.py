"""The tokenizer of a GGUF file, rebuilt from its metadata with the `tokenizers` library.

A GGUF file holds the vocabulary, the merges or scores, and the *name* of the pre-tokenizer; what the name stands for is
defined here as in the original tokenizer.json of the model family, so that ids equal the original's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from edgespec.errors import ModelError
from edgespec.models.tokenizer import Tokenizer, TokenizerSettings, guarded
from edgespec.models.weights.gguf_file import GGUFFile

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PRE_TOKENIZERS = {
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "gpt-2": "gpt2",
    "gpt2": "gpt2",
    "default": "gpt2",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}


def tokenizer_from_gguf(path: Path) -> Tokenizer:
    """See `load_tokenizer`."""
    file = GGUFFile(path)
    file.close()
    return tokenizer_from_metadata(file.metadata, path)


def tokenizer_from_metadata(metadata: dict[str, Any], path: Path) -> Tokenizer:
    """The tokenizer that GGUF `metadata` (as `GGUFFile` reads it) describes; `path` names the file in errors."""
    vocabulary = _Vocabulary(metadata, path)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        backend, adds_bos = _byte_level(vocabulary)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(vocabulary), True
    else:
        raise ModelError(f"{path}: tokenizer.ggml.model is {str(kind)[:60]!r}; only 'gpt2' and 'llama' are supported.")
    vocabulary.add_tokens(backend)
    explicit = metadata.get("tokenizer.ggml.add_bos_token")
    bos_id = vocabulary.token_id("bos")
    named = {f"{n}_token": vocabulary.token_id(n) for n in ("bos", "eos")}
    named |= {"unk_token": vocabulary.token_id("unknown"), "pad_token": vocabulary.token_id("padding")}
    eos = [vocabulary.token_id(name) for name in ("eos", "eot", "eom")]
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        TokenizerSettings(
            bos_id=bos_id,
            eos_ids=tuple(dict.fromkeys(i for i in eos if i is not None)),
            adds_bos=(explicit if isinstance(explicit, bool) else adds_bos) and bos_id is not None,
            chat_template=template if isinstance(template, str) else None,
            named_tokens={name: vocabulary.tokens[i] for name, i in named.items() if i is not None},
        ),
    )


class _Vocabulary:
    """Tokens, their types and merges or scores, checked."""

    def __init__(self, metadata: dict[str, Any], path: Path) -> None:
        self.metadata = metadata
        self.path = path
        self.tokens: list[str] = self._list("tokens", str)
        self.types: list[int] = self._list("token_type", int) if "tokenizer.ggml.token_type" in metadata else []
        if not self.types:
            self.types = [_NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise ModelError(f"{path}: has {len(self.tokens)} tokens but {len(self.types)} token types; it is corrupt.")
        while self.types and self.types[-1] == _UNUSED:  # fillers up to the embedding's rows
            self.types.pop()
            self.tokens = self.tokens[: len(self.types)]
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(t for i, t in enumerate(self.tokens) if self.ids[t] != i)
            raise ModelError(f"{path}: token {twice[:80]!r} appears twice in the vocabulary; the file is corrupt.")

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(values, list) or not values or type(values[0]) is not kind:
            raise ModelError(
                f"{self.path}: tokenizer.ggml.{key} is missing or damaged; the file has no usable tokenizer."
            )
        return values

    def merges(self) -> list[tuple[str, str]]:
        """Pairs of tokens, each of which joins into a token. Checked here: the library panics on some damage."""
        result: list[tuple[str, str]] = []
        for merge in self._list("merges", str):
            cut = merge.find(" ", 1)
            left, right = merge[:cut], merge[cut + 1 :]
            if cut < 0 or not right or not {left, right, left + right} <= self.ids.keys():
                raise ModelError(
                    f"{self.path}: tokenizer.ggml.merges holds {merge[:80]!r}, which is not a pair of tokens that make "
                    "a token; the file is corrupt."
                )
            result.append((left, right))
        return result

    def scores(self) -> list[float]:
        scores: list[float] = self._list("scores", float)
        if len(scores) < len(self.tokens):
            raise ModelError(f"{self.path}: has {len(self.tokens)} tokens but {len(scores)} scores; it is corrupt.")
        return scores

    def token_id(self, name: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int and 0 <= value < len(self.tokens) else None

    def add_tokens(self, backend: tokenizers.Tokenizer) -> None:
        """Register control and user-defined tokens, which are matched in text before anything is split."""
        special = [t for t, kind in zip(self.tokens, self.types, strict=True) if kind in (_CONTROL, _UNKNOWN)]
        words = [t for t, kind in zip(self.tokens, self.types, strict=True) if kind == _USER]
        if "" in special or "" in words:
            raise ModelError(f"{self.path}: the vocabulary has an empty control token; it is corrupt.")
        backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
        backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in words])


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    pre = vocabulary.metadata.get("tokenizer.ggml.pre", "default")
    family = _PRE_TOKENIZERS.get(pre) if isinstance(pre, str) else None
    if family is None:
        supported = ", ".join(_PRE_TOKENIZERS)
        raise ModelError(
            f"{vocabulary.path}: tokenizer.ggml.pre is {str(pre)[:60]!r}, which is not supported ({supported})."
        )
    merges = vocabulary.merges()

    def build() -> tokenizers.Tokenizer:
        bpe = models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=family == "llama3")
        backend = tokenizers.Tokenizer(bpe)
        backend.pre_tokenizer = _pre_tokenizer(family)
        backend.decoder = decoders.ByteLevel()
        if family == "qwen2":
            backend.normalizer = normalizers.NFC()
        return backend

    return guarded(build, vocabulary.path), family == "llama3"


def _pre_tokenizer(family: str) -> Any:
    if family == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if family == "digits":
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    digits = r"\p{N}{1,3}" if family == "llama3" else r"\p{N}"
    pattern = Regex("|".join([_CONTRACTIONS, _WORDS, digits, _REST]))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece BPE ("llama"): merges come from the scores, unknown characters fall back to byte tokens."""
    unknown = vocabulary.token_id("unknown")
    prefix = vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", True)
    merges = _merges_from_scores(vocabulary)

    def build() -> tokenizers.Tokenizer:
        bpe = models.BPE(
            vocab=vocabulary.ids,
            merges=merges,
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        backend = tokenizers.Tokenizer(bpe)
        steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
        backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        undo: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix else undo)
        return backend

    return guarded(build, vocabulary.path)


def _merges_from_scores(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to join two tokens into a third, best resulting score first (SentencePiece merges by score)."""
    ids, scores = vocabulary.ids, vocabulary.scores()
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind not in (_NORMAL, _USER) or len(token) > 256:
            continue
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], left, right, (token[:cut], token[cut:])))
    found.sort()
    return [pair for *_, pair in found]
