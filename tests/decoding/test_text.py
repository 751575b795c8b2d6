"""IncrementalDecoder: the pieces joined are exactly what the `tokenizers` library decodes from all ids at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edgespec.decoding import text as text_module
from edgespec.decoding.text import NO_TEXT, UNKNOWN, IncrementalDecoder
from edgespec.models.tokenizer import Tokenizer
from tests.support.mutants import mutant
from tests.support.tokenizers import SENTENCEPIECE_WORDS, byte_ids, byte_level, sentencepiece

TOKENIZERS = {"bytes": byte_level, "pieces": sentencepiece, "pieces, no prefix": lambda: sentencepiece(False)}

HARD_TEXTS = [  # B016, B098, B100, B101
    "안녕하세요, 반갑습니다.",
    "今天天气很好，我们去公园散步吧。你觉得怎么样？",
    "👩‍👩‍👧 and 🇨🇿🇰🇷 and 👍🏽",
    "ďábel, Příliš žluťoučký kůň",
    "e\u0301 n\u0303 o\u0308\u0304",
    "  two spaces first",
    "\n\n\tlines first ",
    "x != y and a.b == c",
    "':' 'search' n't I'm",
    "\ufffd is a character \ufffd\ufffd",
    "नमस्ते ไทย עברית",
    "",
]


def check(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip_special)
    pieces = []
    for count, token in enumerate(ids, 1):
        pieces.append(decoder.push(token))
        if not decoder.pending:  # everything so far is out
            assert "".join(pieces) == tokenizer.decode(ids[:count], skip_special=skip_special)
    pieces.append(decoder.flush())
    assert "".join(pieces) == tokenizer.decode(list(ids), skip_special=skip_special)
    check_spans(decoder, pieces)
    return pieces


def check_spans(decoder: IncrementalDecoder, pieces: list[str]) -> None:
    """Spans go forward, cover every character, and only one character is shared by neighbours."""
    assert len(decoder.spans) == len(pieces) - 1
    length = len("".join(pieces))
    at = 0
    for span in decoder.spans:
        assert span != UNKNOWN
        if span != NO_TEXT:
            assert at - 1 <= span[0] <= at
            assert span[0] < span[1] <= length
            at = span[1]
    assert at == length


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_texts(kind: str, text: str) -> None:  # B016, B095, B098, B100, B101
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    pieces = check(tokenizer, ids)
    if "\ufffd" not in text:
        assert "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_cut_inside_a_character(kind: str) -> None:  # B016: max_new_tokens may end anywhere
    tokenizer = TOKENIZERS[kind]()
    ids = tokenizer.encode("a👩‍👧 ď")
    for end in range(len(ids) + 1):
        check(tokenizer, ids[:end])


# All bytes, but mostly those that begin, continue or break UTF-8 sequences.
BYTES = st.one_of(
    st.integers(0, 255),
    st.sampled_from(list(b"aZ \xc3\xa9\xe2\x82\xac\xed\xa0\xf0\x9f\x98\x80\xf4\x90\xc0\xff\xef\xbf\xbd")),
)


@settings(max_examples=400, deadline=None)
@given(
    data=st.lists(BYTES, max_size=12),
    extra=st.lists(st.integers(0, 299), max_size=4),
    skip=st.booleans(),
    seed=st.integers(0, 99),
)
@example(data=list(b"\xe2\x82"), extra=[], skip=True, seed=0)
@example(data=list(b"\xe2a\xf0\x9f\x98a\xf0\x9fa"), extra=[], skip=True, seed=0)
@example(data=list(b"\xe0\x80\x80 \xed\xa0\x80 \xf4\x90\x80\x80 \xc0\xaf"), extra=[], skip=True, seed=0)
@example(data=list(b"\xf0\x9f"), extra=[0, 266], skip=True, seed=0)
def test_any_bytes(data: list[int], extra: list[int], skip: bool, seed: int) -> None:
    """Rust's from_utf8_lossy and Python's errors="replace" agree, whatever the bytes and wherever tokens end.

    `extra`: specials, merges, filler words and ids that no token has (280-299), thrown in between.
    """
    ids = [byte_ids()[b] for b in data]
    for token in extra:
        ids.insert(random.Random(seed + token).randint(0, len(ids)), token)
    check(byte_level(), ids, skip)


@settings(max_examples=400, deadline=None)
@given(
    ids=st.lists(
        st.one_of(BYTES.map(lambda b: 3 + b), st.integers(259, 258 + len(SENTENCEPIECE_WORDS)), st.integers(0, 2)),
        max_size=14,
    ),
    skip=st.booleans(),
    prefix=st.booleans(),
)
@example(ids=[3 + 0x20, 259], skip=True, prefix=True)  # a byte token that is the stripped space
@example(ids=[259, 260, 266], skip=True, prefix=True)
@example(ids=[3 + 0xE4, 3 + 0xBD, 1, 3 + 0xA0, 262], skip=True, prefix=True)  # a special token inside a character
@example(ids=[3 + 0xE4, 3 + 0xBD, 3 + 0xA0, 3 + 0xFF, 262], skip=True, prefix=False)  # spoilt by a later byte
def test_any_sentencepiece_ids(ids: list[int], skip: bool, prefix: bool) -> None:
    check(sentencepiece(prefix), ids, skip)


def test_every_pair_of_bytes() -> None:
    """Bytes stay open only while they can become a character; then they show as exactly one."""
    ids = byte_ids()
    for first in range(0xC0, 0x100):
        for second in range(0x70, 0xD0):
            check(byte_level(), [ids[first], ids[second]])


def test_half_a_surrogate() -> None:
    decoder = IncrementalDecoder(byte_level())
    assert [decoder.push(byte_ids()[b]) for b in b"\xed\xa0"] == ["", "\ufffd\ufffd"]
    assert not decoder.pending
    assert decoder.spans == [(0, 1), (1, 2)]


def test_pending() -> None:
    decoder = IncrementalDecoder(byte_level())
    outs = [(decoder.push(byte_ids()[b]), decoder.pending) for b in b"a\xe4\xbd\xa0\xe4b"]
    assert outs == [("a", False), ("", True), ("", True), ("你", False), ("", True), ("\ufffdb", False)]
    assert decoder.spans == [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3), (3, 4)]
    decoder.push(byte_ids()[0xF0])
    assert decoder.flush() == "\ufffd"
    assert not decoder.pending


def test_spans_of_tokens_that_share_characters() -> None:
    tokenizer = byte_level()
    decoder = IncrementalDecoder(tokenizer)
    ids = byte_ids()
    for token in [ids[0xE4], 0, ids[0xBD], 259, ids[0xC3], ids[0xE4], ids[0xBD], ids[0x41]]:
        decoder.push(token)
    # E4 .. BD is one broken character, "he" two, C3 alone is broken, E4 BD again is one, then "A"
    assert decoder.spans == [(0, 1), NO_TEXT, (0, 1), (1, 3), (3, 4), (4, 5), (4, 5), (5, 6)]
    pieces = IncrementalDecoder(sentencepiece())
    for token in [1, 3 + 0xC3, 3 + 0xA9, 3 + 0x41, 266, 3 + 0xC3, 3 + 0x41]:
        pieces.push(token)
    assert pieces.spans[:5] == [NO_TEXT, (0, 1), (0, 1), (1, 2), (2, 8)]
    assert pieces.spans[5:] == [UNKNOWN, UNKNOWN]
    assert pieces.flush() == "\ufffd\ufffd"
    assert pieces.pending is False
    assert pieces.spans[5:] == [(8, 9), (9, 10)]
    stripped = IncrementalDecoder(sentencepiece())  # the text's first space is not shown
    assert [stripped.push(token) for token in [3 + 0x20, 3 + 0x20, 3 + 0x41, 262]] == ["", "", "", " Ab"]
    assert stripped.spans == [NO_TEXT, (0, 1), (1, 2), (2, 3)]


def test_replacement_characters_keep_coming() -> None:  # B097
    decoder = IncrementalDecoder(byte_level())
    for _ in range(500):
        assert decoder.push(byte_ids()[0xFF]) == "\ufffd"
        assert not decoder.pending


class Counting:
    """A tokenizer that counts the ids it is asked to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        self.decoded += len(ids)
        return self.tokenizer.decode(ids, skip_special=skip_special)


@pytest.mark.parametrize(
    "tokens", [[266], [3 + 0xE4, 3 + 0xBD, 3 + 0xA0], [3 + 0xE4, 3 + 0xBD, 3 + 0xA0, 266], [259], [3 + 0xFF]]
)
def test_linear_time(tokens: list[int]) -> None:  # B097
    counting = Counting(sentencepiece())
    decoder = IncrementalDecoder(counting)  # type: ignore[arg-type]
    for token in tokens * 500:
        decoder.push(token)
    decoder.flush()
    assert counting.decoded <= 4 * len(tokens) * 500


@pytest.mark.parametrize(
    "old, new",
    [
        ('("replace")', '("ignore")'),
        ('return self._utf8.decode(b"", final=True)', 'return ""'),
        ("return not _is_surrogate(both)", "return True"),
        ("if _is_surrogate(self", "if False and (self"),
        ("start += 1", "start += 0"),
        ("self._length + self.pending", "self._length"),
        ("self._context = [token]", "pass"),
        ("self._shown = len(text)", "self._shown = len(text) - 1"),
        ("before = self.flush(spans)", "before = ''"),
        ("missing = places[-1] + 1 - length", "missing = 0"),
        ("if self._skip_special and", "if"),
    ],
)
def test_planted_faults(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    monkeypatch.setitem(globals(), "IncrementalDecoder", mutant(text_module, old, new).IncrementalDecoder)
    caught = 0
    for run in (
        test_pending,
        test_spans_of_tokens_that_share_characters,
        lambda: check(sentencepiece(), [3 + 0x20, 259, 262, 3 + 0xC3, 3 + 0xA9, 262, 262], False),
        lambda: check(sentencepiece(), [3 + 0x20, 1, 262], False),
        lambda: test_linear_time([266]),
        test_half_a_surrogate,
    ):
        try:
            run()
        except AssertionError:
            caught += 1
    assert caught
