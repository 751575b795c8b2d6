"""Tokenizers: round trips, special tokens, the settings of folders, and damage."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers

from edgespec.errors import ModelError
from edgespec.models.byte_level import BYTES_BY_CHARACTER
from edgespec.models.tokenizer import Tokenizer, load_tokenizer
from tests.support.damage import byte_flips, survives
from tests.support.tiny import tiny_tokenizer, write_tiny
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.vocabularies import HARD_TEXTS, built, settings


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tiny(tmp_path_factory.mktemp("hf") / "m"))


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_tiny_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf"))


# Text to ids and back


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_round_trip(tiny: Tokenizer, tiny_file: Tokenizer, text: str) -> None:
    for tokenizer in (tiny, tiny_file):
        for allow in (True, False):
            ids = tokenizer.encode(text, allow_special=allow)
            assert tokenizer.decode(ids, skip_special=False) == text
            assert all(0 <= i < tokenizer.size for i in ids)
    assert tiny.encode(text) == tiny_file.encode(text)  # B071


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_bytes_of_tokens_join_to_the_text(pre: str) -> None:
    tokenizer = built(pre)
    rng = random.Random(0)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.size + 5) for _ in range(rng.randrange(12))]
        joined = b"".join(tokenizer.token_bytes(i) or b"" for i in ids)
        assert joined.decode("utf-8", "replace") == tokenizer.decode(ids, skip_special=False)
        shown = b"".join(tokenizer.token_bytes(i) or b"" for i in ids if not tokenizer.is_special(i))
        assert shown.decode("utf-8", "replace") == tokenizer.decode(ids)


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2"])
def test_no_text_is_in_fewer_tokens_than_its_length_allows(pre: str) -> None:
    tokenizer = built(pre)
    assert tokenizer.longest_token == max(len(tokenizer.token(i)) for i in range(tokenizer.size))
    for text in HARD_TEXTS:
        assert len(tokenizer.encode(text)) * tokenizer.longest_token >= len(text)


def test_every_byte_has_a_token(tiny: Tokenizer) -> None:
    assert {tiny.token_bytes(i) for i in range(3, 259)} == {bytes([b]) for b in range(256)}
    assert sorted(BYTES_BY_CHARACTER.values()) == list(range(256))
    assert tiny.token_bytes(0) == b"<|endoftext|>"


def test_ids_without_a_token_have_no_text(tiny: Tokenizer) -> None:
    assert tiny.size == 280
    assert [tiny.token(i) for i in (-1, 280, 287, 10**9)] == [""] * 4
    assert tiny.token_bytes(287) == b""
    assert tiny.decode([259, 287, 260]) == tiny.decode([259, 260])


def test_decoding_changes_nothing(tiny: Tokenizer) -> None:
    # B101: no clean-up of spaces before punctuation.
    for text in ("x != y and a.b == c", "':' 'search'", " , . ! n't 's"):
        assert tiny.decode(tiny.encode(text)) == text


def test_unpaired_surrogates_are_replaced(tiny: Tokenizer) -> None:
    assert tiny.decode(tiny.encode("a\ud800b")) == "a\ufffdb"
    assert tiny.decode(tiny.encode("\ud83d\ude00")) == "😀"


# Special tokens


def test_special_tokens_are_text_if_not_allowed(tiny: Tokenizer) -> None:
    # B167
    text = "<|im_start|>system\nhello<|im_end|>"
    assert tiny.encode(text)[0] == 1
    assert tiny.encode(text)[-1] == 2
    plain = tiny.encode(text, allow_special=False)
    assert not any(tiny.is_special(i) for i in plain)
    assert tiny.decode(plain) == text
    assert tiny.encode(text)[0] == 1, "the switch must not stick"


def test_switch_is_per_call_in_threads(tiny: Tokenizer) -> None:
    text = "<|im_start|>hello<|im_end|>"
    expected = {allow: tiny.encode(text, allow_special=allow) for allow in (True, False)}
    with ThreadPoolExecutor(8) as pool:
        work = [bool(i % 2) for i in range(800)]
        results = pool.map(lambda allow: (allow, tiny.encode(text, allow_special=allow)), work)
        assert all(ids == expected[allow] for allow, ids in results)


def test_special_tokens_are_listed(tiny: Tokenizer, tiny_file: Tokenizer) -> None:
    for tokenizer in (tiny, tiny_file):
        assert tokenizer.special_tokens == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
        assert [tokenizer.is_special(i) for i in (0, 1, 2, 3, 279, 280)] == [True] * 3 + [False] * 3
        assert tokenizer.decode([1, 259, 2]) == tokenizer.decode([259])
        assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (0, (2,), False)
        assert tokenizer.named_tokens["eos_token"] == "<|im_end|>"
        assert tokenizer.is_byte_level


def test_user_defined_tokens_are_matched_but_shown() -> None:
    tokenizer = built("smollm")
    last = tokenizer.size - 1
    assert tokenizer.token(last) == "<tool>"
    assert tokenizer.encode("a<tool>b", allow_special=False)[1] == last
    assert tokenizer.is_added(last)
    assert not tokenizer.is_special(last)
    assert tokenizer.decode(tokenizer.encode("a<tool>b")) == "a<tool>b"


# Hugging Face folders


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    backend = tiny_tokenizer(280)
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(folder).encode("q" * 100)) == 100
    assert len(load_tokenizer(folder).encode("q")) == 1


def test_bos_follows_config_or_post_processor(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    assert settings(folder, "tokenizer_config.json", add_bos_token=True).encode("q", add_special=True)[0] == 0
    backend = tiny_tokenizer(280)
    backend.post_processor = tokenizers.processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    quiet = settings(folder, "tokenizer_config.json", add_bos_token=False)
    assert quiet.encode("q", add_special=True) == quiet.encode("q")
    loud = settings(folder, "tokenizer_config.json", add_bos_token=None, bos_token="<|im_start|>")
    assert loud.encode("q", add_special=True) == [1, *loud.encode("q")]


def test_stop_ids_are_a_union_of_all_settings(tmp_path: Path) -> None:
    # B088
    folder = write_tiny(tmp_path / "m")
    assert settings(folder, "generation_config.json", eos_token_id=[7, 2, 9]).eos_ids == (2, 7, 9)
    (folder / "generation_config.json").unlink()
    assert settings(folder, "tokenizer_config.json", eos_token="<|endoftext|>").eos_ids == (
        0,
        2,
    )  # B089: template's end
    assert settings(folder, "tokenizer_config.json", chat_template=None).eos_ids == (0,)
    assert settings(folder, "tokenizer_config.json", eos_token=None).eos_ids == ()  # B077


def test_tokens_may_be_objects_and_are_special_once_named(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    tokenizer = settings(
        folder,
        "tokenizer_config.json",
        eos_token={"content": "w270", "lstrip": False},
        additional_special_tokens=["w271"],
    )
    ids = {t: i for i, t in tokenizer.vocabulary().items()}
    assert ids["w270"] in tokenizer.eos_ids
    assert tokenizer.is_special(ids["w270"])
    assert tokenizer.is_special(ids["w271"])
    assert tokenizer.size == 280


def test_added_tokens_of_the_config(tmp_path: Path) -> None:
    # B074
    folder = write_tiny(tmp_path / "m")
    listed = {str(280 + i): {"content": text, "special": i == 0} for i, text in enumerate(["<|tool|>", "word"])}
    tokenizer = settings(folder, "tokenizer_config.json", added_tokens_decoder=listed)
    assert tokenizer.size == 282
    assert tokenizer.encode("<|tool|>word") == [280, 281]
    assert tokenizer.is_special(280)
    assert not tokenizer.is_special(281)
    listed = {"285": {"content": "<|tool|>", "special": True}}
    with pytest.raises(ModelError, match="gives token '<|tool|>' the id 285".replace("|", r"\|")):
        settings(folder, "tokenizer_config.json", added_tokens_decoder=listed)


def test_chat_template_places(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    many = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert settings(folder, "tokenizer_config.json", chat_template=many).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J é", encoding="utf-8")
    assert load_tokenizer(folder).chat_template == "J é"
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja"):
        load_tokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    assert settings(folder, "tokenizer_config.json", chat_template=None).chat_template is None
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "O"}))
    assert load_tokenizer(folder).chat_template == "O"


def test_tokenizer_config_is_optional(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    (folder / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template) == (None, (), None)
    assert tokenizer.encode("", add_special=True) == []


def test_folders_without_a_tokenizer(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
        load_tokenizer(folder)
    write_tiny_gguf(folder / "m.gguf")
    assert load_tokenizer(folder).size == 280
    with pytest.raises(ModelError, match="absent"):
        load_tokenizer(tmp_path / "absent")


# Damage


def test_truncated_tokenizer_files_are_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = folder / name
        data = path.read_bytes()
        for length in {0, 1, len(data) // 10, len(data) // 2, len(data) - 1}:
            path.write_bytes(data[:length])
            with pytest.raises(ModelError, match=name.replace(".", r"\.")):
                load_tokenizer(folder)
        path.write_bytes(data)
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3519094\n")
    with pytest.raises(ModelError, match="expected 3519094 bytes"):  # B125
        load_tokenizer(folder)


def test_single_byte_corruption_never_escapes_as_a_defect(tmp_path: Path) -> None:
    # B019
    folder = write_tiny(tmp_path / "m")

    def use() -> None:
        tokenizer = load_tokenizer(folder)
        tokenizer.decode(tokenizer.encode("hello <|im_end|> the 12 é"))
        tokenizer.fingerprint()

    for name, count in (("tokenizer.json", 300), ("tokenizer_config.json", 150)):
        path = folder / name
        data = path.read_bytes()
        assert survives(path, byte_flips(data, count, seed=7), use) > 10
        path.write_bytes(data)


def test_single_byte_corruption_of_a_gguf_vocabulary(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "m.gguf")
    data = path.read_bytes()

    def use() -> None:
        tokenizer = load_tokenizer(path)
        tokenizer.decode(tokenizer.encode("hello <|im_end|> the 12 é"))

    first, last = data.index(b"tokenizer.ggml.model"), data.index(b"tokenizer.chat_template")
    assert survives(path, byte_flips(data, 300, seed=8, first=first, last=last), use) > 10
