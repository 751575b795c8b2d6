"""Tokenizers rebuilt from GGUF metadata: the same ids as the original libraries give."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest

from edgespec.errors import ModelError
from edgespec.models.tokenizer import load_tokenizer
from edgespec.models.tokenizer_gguf import tokenizer_from_metadata
from tests.support.tiny import MERGES, SPECIALS
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.vocabularies import HARD_TEXTS, built, metadata, pieces

# Pre-tokenizers of GGUF files


def test_digits_split_one_by_one_for_smollm() -> None:
    tokenizer = built("smollm")
    assert pieces(tokenizer, "1234") == ["1", "2", "3", "4"]
    assert pieces(tokenizer, " 12") == ["Ġ", "1", "2"]
    assert pieces(tokenizer, "hello the") == ["hello", "Ġthe"]


def test_digits_join_for_gpt2_and_in_threes_for_llama3() -> None:
    assert pieces(built("gpt-2"), "12341") == ["1234", "1"]
    assert pieces(built("default"), "12341") == ["1234", "1"]
    assert pieces(built("llama-bpe"), "12341") == ["123", "4", "1"]
    assert pieces(built("qwen2"), "12341") == ["1", "2", "3", "4", "1"]


def test_what_joins_a_word_or_a_sign() -> None:
    assert pieces(built("gpt-2"), "'s'S") == ["'s", "'", "S"]
    assert pieces(built("qwen2"), "'s'S") == ["'s", "'S"]
    assert pieces(built("gpt-2"), "(hello!\n") == ["(", "hello", "!", "Ċ"]
    assert pieces(built("qwen2"), "(hello!\n") == ["(hello", "!Ċ"]


def test_qwen2_equals_transformers() -> None:
    from transformers import Qwen2Tokenizer

    values = metadata("qwen2")
    ids = {token: i for i, token in enumerate(values["tokenizer.ggml.tokens"])}
    merges = [tuple(m.split(" ")) for m in values["tokenizer.ggml.merges"]]
    reference = Qwen2Tokenizer(vocab=ids, merges=merges)
    reference.add_special_tokens({"additional_special_tokens": SPECIALS})
    ours = built("qwen2")
    for text in HARD_TEXTS:
        assert ours.encode(text) == reference.encode(text, add_special_tokens=False)
        assert ours.decode(ours.encode(text), skip_special=False) == unicodedata.normalize("NFC", text)


def test_llama3_adds_bos_unless_told_otherwise() -> None:
    assert built("llama-bpe").encode("hello", add_special=True)[0] == 0
    assert built("llama-bpe").encode("", add_special=True) == [0]  # B094
    assert built("llama-bpe").encode("hello")[0] != 0
    assert not built("llama-bpe", add_bos_token=False).adds_bos
    assert not built("qwen2").adds_bos
    assert built("qwen2", add_bos_token=True).adds_bos
    assert not built("qwen2", add_bos_token=True, bos_token_id=None).adds_bos


def test_padding_tokens_of_gguf_are_no_vocabulary() -> None:
    # B013, B074: fillers up to the embedding's rows do not count.
    values = metadata("qwen2")
    tokens = [*values["tokenizer.ggml.tokens"], "[PAD1]", "[PAD2]"]
    padded = built("qwen2", tokens=tokens, token_type=[*values["tokenizer.ggml.token_type"], 5, 5])
    assert padded.size == built("qwen2").size == len(tokens) - 2
    assert padded.fingerprint() == built("qwen2").fingerprint()


def test_stop_ids_of_gguf() -> None:
    assert built("smollm", eot_token_id=1, eom_token_id=2).eos_ids == (2, 1)
    assert built("smollm", eos_token_id=10**6).eos_ids == ()
    template = {"tokenizer.chat_template": "{{ m }}<|im_end|>"}
    ended = tokenizer_from_metadata(metadata("smollm", eos_token_id=0) | template, Path("m.gguf"))
    assert ended.eos_ids == (0, 2)  # B089: the template's turn end stops although the metadata omits it
    assert ended.chat_template == "{{ m }}<|im_end|>"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "bert"}, "'bert'"),
        ({"model": None}, "'None'"),
        ({"pre": "tekken"}, "'tekken'"),
        ({"tokens": None}, "tokens is missing"),
        ({"tokens": []}, "tokens is missing"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "'a' appears twice"),
        ({"token_type": [1]}, "1 token types"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["ab"]}, "not a pair of tokens"),
        ({"merges": ["q@@ z@@"]}, "pair of tokens"),
        ({"merges": ["Ġ "]}, "pair of tokens"),
        ({"tokens": ["", "a", "aa"], "token_type": [3, 1, 1], "merges": ["a a"]}, "empty control token"),
    ],
)
def test_gguf_vocabularies_that_cannot_work(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        built(**({"pre": "smollm"} | changes))
    assert words in str(caught.value)
    assert "m.gguf" in str(caught.value)


# SentencePiece


def sentencepiece(**changes: Any) -> dict[str, Any]:
    words = ["▁", "h", "e", "l", "o", "t", "▁t", "he", "ll", "▁the", "hell", "hello", "▁hello", "lo", "el"]
    scores = [-20, -21, -22, -23, -24, -25, -1, -2, -3, -4, -5, -6, -7, -8, -1.5]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words]
    values = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * 259 + [float(s) for s in scores],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items() if value is not None}


def test_sentencepiece_merges_by_score() -> None:
    tokenizer = tokenizer_from_metadata(sentencepiece(), Path("m.gguf"))
    # "el" has the best score of all pairs, so "hello" never becomes one token.
    assert pieces(tokenizer, "hello the") == ["▁", "h", "el", "lo", "▁the"]
    assert pieces(tokenizer, "é") == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("t", add_special=True)[0] == 1
    assert not tokenizer.is_byte_level
    assert tokenizer.token_bytes(5) is None
    assert tokenizer.eos_ids == (2,)


@pytest.mark.parametrize("text", [t for t in HARD_TEXTS if "im_start" not in t])
def test_sentencepiece_round_trip(text: str) -> None:
    for prefix in (True, False):
        values = sentencepiece(add_space_prefix=prefix)
        tokenizer = tokenizer_from_metadata(values, Path("m.gguf"))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_special_tokens() -> None:
    tokenizer = tokenizer_from_metadata(sentencepiece(), Path("m.gguf"))
    assert tokenizer.encode("<s>hello</s>")[0] == 1
    assert tokenizer.encode("<s>hello</s>")[-1] == 2
    assert not set(tokenizer.encode("<s>hello</s>", allow_special=False)) & {0, 1, 2}
    with pytest.raises(ModelError, match="scores"):
        tokenizer_from_metadata(sentencepiece(scores=[0.0]), Path("m.gguf"))


def test_gguf_tokens_equal_the_reference_reader(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    fields = gguf.GGUFReader(path).fields
    assert load_tokenizer(path).vocabulary() == dict(enumerate(fields["tokenizer.ggml.tokens"].contents()))
    assert fields["tokenizer.ggml.merges"].contents() == MERGES
