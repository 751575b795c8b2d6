"""Texts that have broken tokenizers, and small vocabularies as GGUF metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgespec.models.byte_level import BYTES_BY_CHARACTER
from edgespec.models.tokenizer import Tokenizer, load_tokenizer
from edgespec.models.tokenizer_gguf import tokenizer_from_metadata
from tests.support.tiny import SPECIALS

HARD_TEXTS = [
    "",
    " ",
    "hello the world",
    "  two  spaces   and\ttabs\t\t and \n\n newlines \r\n end ",
    "don't I'LL we've it's 'quoted' ''",
    "12345 3.14159 007 ٣٤٥ ²³ Ⅷ ½ x1y22z333",
    "x != y and a.b == c; {'k': [1, 2]} <<>> /* */ #!$%&",
    "ď Ď é è ñ ü ß ø å œ ﬁ ſ",
    "cafe\u0301 n\u0303 a\u0308\u0304 \u0915\u094d\u0937",
    "한국어 텍스트 你好，世界。 こんにちは ภาษาไทย עברית العربية",
    "👩‍👩‍👧 🇨🇿 👍🏽 🏴󠁧󠁢󠁥󠁮󠁧󠁿 😀😀",
    "\u200b zero\u200dwidth \ufeff bom \u00a0nbsp \u2028 line",
    "null \x00 bell \x07 escape \x1b del \x7f",
    "<|im_start|>user\nhello<|im_end|>\n<|endoftext|>",
    "<|im_start|",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 20,
    "\ufffd already replaced \ufffd",
]


def metadata(pre: str, **changes: Any) -> dict[str, Any]:
    """A byte-level vocabulary whose merges make words, spaces and digit runs visible."""
    alphabet = sorted(BYTES_BY_CHARACTER)
    pairs = ["h e", "l l", "he ll", "hell o", "Ġ t", "Ġt he", "Ġ hello", "1 2", "12 3", "123 4", "Ġ 1", "' s", "Ġ Ġ"]
    pairs += ["Ċ Ċ", "! !", "Ġ !", "' S", "Ċ Ġ", "( hello", "! Ċ"]
    tokens = [*SPECIALS, *alphabet, *(p.replace(" ", "") for p in pairs), "<tool>"]
    values = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3] * 3 + [1] * (len(tokens) - 4) + [4],
        "merges": pairs,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items() if value is not None}


def built(pre: str, **changes: Any) -> Tokenizer:
    return tokenizer_from_metadata(metadata(pre, **changes), Path("m.gguf"))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token(i) for i in tokenizer.encode(text)]


def settings(folder: Path, name: str, **changes: Any) -> Tokenizer:
    """The tokenizer of `folder` after a change in its JSON file `name`."""
    path = folder / name
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(values | changes))
    return load_tokenizer(folder)
