"""Damaged copies of files: what a fault can do to a download, a disk or a header."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from edgespec.errors import EdgespecError


def byte_flips(data: bytes, count: int, seed: int, first: int = 0, last: int | None = None) -> Iterator[bytes]:
    """`count` copies of `data` with one byte of [first, last) replaced; the same seed gives the same copies."""
    rng = random.Random(seed)
    for _ in range(count):
        position = rng.randrange(first, len(data) if last is None else last)
        value = rng.choice([0, 1, 0x7F, 0x80, 0xFF, data[position] ^ (1 << rng.randrange(8)), rng.randrange(256)])
        yield data[:position] + bytes([value]) + data[position + 1 :]


def survives(path: Path, damaged: Iterator[bytes], use: Callable[[], object]) -> int:
    """Write each damaged content to `path` and `use` it: only EdgespecError may come out. Returns how often it did."""
    messages: list[str] = []
    for content in damaged:
        path.write_bytes(content)
        try:
            use()
        except EdgespecError as error:
            messages.append(str(error))
    assert all(0 < len(message) < 1500 for message in messages)
    return len(messages)
