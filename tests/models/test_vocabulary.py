"""Saving tokenizers for a warm start, and comparing the vocabularies of a target and a draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.errors import DraftError, ModelError
from edgespec.models.tokenizer import Tokenizer, compare_vocabularies, load_tokenizer
from tests.support.damage import byte_flips, survives
from tests.support.tiny import write_tiny
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.vocabularies import HARD_TEXTS, built, settings


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tiny(tmp_path_factory.mktemp("hf") / "m"))


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf"))


# Warm start


def test_saved_tokenizer_is_the_same(tmp_path: Path, tiny: Tokenizer, tiny_file: Tokenizer) -> None:
    for index, tokenizer in enumerate([tiny, tiny_file, built("qwen2"), built("llama-bpe", add_bos_token=True)]):
        tokenizer.save(tmp_path / str(index))
        loaded = Tokenizer.load(tmp_path / str(index))
        for name in ("size", "bos_id", "eos_ids", "adds_bos", "chat_template", "named_tokens", "special_tokens"):
            assert getattr(loaded, name) == getattr(tokenizer, name)
        assert loaded.fingerprint() == tokenizer.fingerprint()
        assert loaded.vocabulary() == tokenizer.vocabulary()
        assert loaded.is_byte_level == tokenizer.is_byte_level
        for text in HARD_TEXTS:
            for allow in (True, False):
                assert loaded.encode(text, allow_special=allow) == tokenizer.encode(text, allow_special=allow)
        assert sorted(p.name for p in (tmp_path / str(index)).iterdir()) == [
            "edgespec_tokenizer.json",
            "tokenizer.json",
        ]


def test_saved_fingerprint_is_the_computed_one(tmp_path: Path, tiny: Tokenizer) -> None:
    tiny.save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    loaded._fingerprint = None
    assert loaded.fingerprint() == tiny.fingerprint()


def test_damaged_cache_is_an_error(tmp_path: Path, tiny: Tokenizer) -> None:
    with pytest.raises(ModelError):
        Tokenizer.load(tmp_path)
    tiny.save(tmp_path)
    path = tmp_path / "edgespec_tokenizer.json"
    good = json.loads(path.read_text())
    for change in ({"version": 0}, {"eos_ids": None}, {"eos_ids": ["a"]}, {"size": "9"}, {"odd": 1}, {"adds_bos": 3}):
        path.write_text(json.dumps(good | change))
        with pytest.raises(ModelError, match="delete the folder"):
            Tokenizer.load(tmp_path)
    survives(path, byte_flips(json.dumps(good).encode(), 100, seed=1), lambda: Tokenizer.load(tmp_path))


# Comparing vocabularies


def other(tmp_path: Path, change: Any, **options: Any) -> Tokenizer:
    """The tiny tokenizer with its tokenizer.json edited by `change`."""
    folder = write_tiny(tmp_path / "other", **options)
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return load_tokenizer(folder)


def swap(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["w270"], vocabulary["w271"] = vocabulary["w271"], vocabulary["w270"]


def test_swapped_ids_are_refused_by_text(tmp_path: Path, tiny: Tokenizer) -> None:
    # B012
    swapped = other(tmp_path, swap)
    assert swapped.size == tiny.size
    with pytest.raises(DraftError, match="id 270 is 'w270' for the target and 'w271' for the draft"):
        compare_vocabularies(tiny, swapped)
    assert swapped.fingerprint() != tiny.fingerprint()


def test_other_special_tokens_are_refused(tmp_path: Path, tiny: Tokenizer) -> None:
    # B012: the same size, another control token.
    def rename(content: dict[str, Any]) -> None:
        content["added_tokens"][1]["content"] = "<|user|>"
        content["model"]["vocab"]["<|user|>"] = content["model"]["vocab"].pop("<|im_start|>")

    with pytest.raises(DraftError, match="id 1 is"):
        compare_vocabularies(tiny, other(tmp_path, rename))


def test_settings_and_kinds_do_not_matter(tmp_path: Path, tiny: Tokenizer, tiny_file: Tokenizer) -> None:
    # B064, B065
    compare_vocabularies(tiny, tiny_file)
    compare_vocabularies(tiny_file, tiny)
    assert tiny.fingerprint() == tiny_file.fingerprint()
    folder = write_tiny(tmp_path / "m", chat_template=None)
    changed = settings(folder, "tokenizer_config.json", eos_token="<|endoftext|>", bos_token=None, add_bos_token=True)
    compare_vocabularies(tiny, changed)
    assert changed.fingerprint() == tiny.fingerprint()


def test_draft_may_be_shorter_or_end_with_added_tokens(tmp_path: Path, tiny: Tokenizer) -> None:
    # B013, B074
    compare_vocabularies(tiny, load_tokenizer(write_tiny(tmp_path / "short", tokenizer_size=272)))
    folder = write_tiny(tmp_path / "chat")
    listed = {"280": {"content": "<|tool|>", "special": True}, "281": {"content": "tool", "special": False}}
    compare_vocabularies(tiny, settings(folder, "tokenizer_config.json", added_tokens_decoder=listed))
    longer = load_tokenizer(write_tiny(tmp_path / "long", tokenizer_size=285))
    with pytest.raises(DraftError, match="id 280 is 'w280'"):
        compare_vocabularies(tiny, longer)
    compare_vocabularies(longer, tiny)
