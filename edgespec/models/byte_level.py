"""The alphabet of byte-level BPE: every byte is spelled as one printable character."""

from __future__ import annotations


def _bytes_by_character() -> dict[str, int]:
    """Printable Latin-1 bytes stand for themselves; the other bytes, in order, for the characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + index): b for index, b in enumerate(others)}


BYTES_BY_CHARACTER: dict[str, int] = _bytes_by_character()
