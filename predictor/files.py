"""Writing a file whole or not at all. `predictor` imports nothing of the other packages, so this is its own."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` in one durable step. Raises OSError."""
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    try:
        with temporary.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
