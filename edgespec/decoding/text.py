"""From token ids to text, one token at a time, with exactly the characters that decoding all ids at once gives."""

from __future__ import annotations

import codecs
import re
import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from edgespec.models.tokenizer import Tokenizer

Span = tuple[int, int]  # characters [start, end) of the whole text that a token contributes to

NO_TEXT: Span = (sys.maxsize, 0)  # a token that shows nothing: starts after every cut, ends before everything
UNKNOWN: Span = (sys.maxsize, sys.maxsize)  # its characters are not decided yet

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class IncrementalDecoder:
    """Decodes token by token: the pieces joined equal `tokenizer.decode(all ids)`, and no piece is ever taken back.

    A character whose bytes are not complete is held back until the next token or `flush` decides it. Linear time.

    spans: for every pushed token the characters it contributes to, NO_TEXT or UNKNOWN; final once they are known.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self.spans: list[Span] = []
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        byte_level = tokenizer.is_byte_level
        self._pieces: _Pieces = _BytePieces(tokenizer) if byte_level else _ContextPieces(tokenizer, skip_special)

    def push(self, token: int) -> str:
        """The text that is certain now and was not before (may be empty)."""
        self.spans.append(NO_TEXT)
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        return self._pieces.push(token, self.spans)

    @property
    def pending(self) -> bool:
        """True while tokens were pushed whose characters are not decided."""
        return self._pieces.pending

    def flush(self) -> str:
        """The end of the text, where incomplete characters show as U+FFFD. Nothing may be pushed afterwards."""
        return self._pieces.flush(self.spans)


class _Pieces(Protocol):
    @property
    def pending(self) -> bool: ...

    def push(self, token: int, spans: list[Span]) -> str: ...

    def flush(self, spans: list[Span]) -> str: ...


class _BytePieces:
    """Byte-level BPE: every token is a piece of one UTF-8 stream, so a standard incremental decoder is all it takes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    @property
    def pending(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def push(self, token: int, spans: list[Span]) -> str:
        data = self._tokenizer.token_bytes(token)
        if not data:
            return ""
        open_bytes = self._utf8.getstate()[0]
        start = self._length
        if open_bytes and not _continues(open_bytes, data):
            start += 1  # what was open becomes one U+FFFD, which this token has no part in
        piece = self._utf8.decode(data)
        if _is_surrogate(self._utf8.getstate()[0]):
            piece += self._utf8.decode(b"", final=True)
        self._length += len(piece)
        spans[-1] = (start, self._length + self.pending)  # open bytes become exactly one character, whichever it is
        return piece

    def flush(self, spans: list[Span]) -> str:
        return self._utf8.decode(b"", final=True)


def _continues(open_bytes: bytes, data: bytes) -> bool:
    """True if the first byte of `data` belongs to the character that `open_bytes` began."""
    both = open_bytes + data[:1]
    try:
        codecs.utf_8_decode(both, "strict", False)
    except UnicodeDecodeError:
        return False
    return not _is_surrogate(both)


def _is_surrogate(open_bytes: bytes) -> bool:
    """The one beginning that cannot become a character any more, but which Python's decoder keeps open: two U+FFFD."""
    return len(open_bytes) == 2 and open_bytes[0] == 0xED and open_bytes[1] >= 0xA0


class _ContextPieces:
    """Any other tokenizer whose decoding is concatenation but for its first token (SentencePiece): decode with context.

    The context is the last token that showed text (so that the first-token rule strikes it and not the new one), and
    the run of byte tokens (<0xE4>...) after it: such a run is decided as a whole, when another token ends it, because
    one invalid byte turns all of it into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._context: list[int] = []
        self._shown = 0  # characters of decode(context) that are out already
        self._run = bytearray()
        self._run_places: list[int] = []  # of the run's tokens in `spans`
        self._length = 0

    @property
    def pending(self) -> bool:
        return bool(self._run)

    def push(self, token: int, spans: list[Span]) -> str:
        byte = _BYTE_TOKEN.fullmatch(self._tokenizer.token(token))
        if byte:
            self._context.append(token)
            self._run.append(int(byte[1], 16))
            self._run_places.append(len(spans) - 1)
            spans[-1] = UNKNOWN
            return ""
        before = self.flush(spans)
        self._context.append(token)
        piece = self._decoded()
        if piece:
            self._context = [token]
            self._shown = len(self._tokenizer.decode(self._context, skip_special=self._skip_special))
            spans[-1] = (self._length, self._length + len(piece))
            self._length += len(piece)
        return before + piece

    def flush(self, spans: list[Span]) -> str:
        """Decide the run of byte tokens, if there is one."""
        if not self._run:
            return ""
        piece = self._decoded()
        for place, (start, end) in zip(self._run_places, _run_spans(bytes(self._run), len(piece)), strict=True):
            spans[place] = (self._length + start, self._length + end) if end > 0 else NO_TEXT
        self._length += len(piece)
        self._run.clear()
        self._run_places.clear()
        return piece

    def _decoded(self) -> str:
        """What `context` shows beyond what is out."""
        text = self._tokenizer.decode(self._context, skip_special=self._skip_special)
        piece = text[self._shown :]
        self._shown = len(text)
        return piece


def _run_spans(run: bytes, length: int) -> list[Span]:
    """For each byte of a run the characters it is part of, where the whole run shows `length` characters."""
    try:
        run.decode("utf-8")
        places = [-1]
        for byte in run:
            places.append(places[-1] + (byte & 0xC0 != 0x80))
        del places[0]
    except UnicodeDecodeError:
        places = list(range(len(run)))  # one U+FFFD for every byte
    missing = places[-1] + 1 - length  # the first token's space, where the decoder strips it
    return [(max(0, place - missing), place - missing + 1) for place in places]
