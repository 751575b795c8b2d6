"""Writing files whole or not at all, and telling what is in them."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Replace `path` by `text` (UTF-8) in one durable step: never half of it, and a failure leaves the old file.

    private: nobody but its owner may read it. Its folder must exist. Raises OSError.
    """
    write_bytes(path, text.encode("utf-8"), private=private)


def write_bytes(path: Path, content: bytes, *, private: bool = False) -> None:
    """Replace `path` by `content`, as `write_text` does."""
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}"  # not mkstemp: its files are for their owner alone
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sha256_of(path: Path) -> str:
    """The sha256 (hex) of a file, read in pieces. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb") as source:
        while block := source.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
