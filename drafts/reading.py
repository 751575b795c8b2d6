"""Reading a draft's files at the pace of a load."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from drafts.base import LoadControl

PIECE_BYTES = 1 << 20  # between two updates of a sha256: half a millisecond, in which other threads run


def open_to_read(path: Path) -> int:
    """A file descriptor of `path`; opening a named pipe does not hang. Raises OSError."""
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def sha256_at_pace(path: Path, nbytes: int, scratch: memoryview, control: LoadControl) -> str:
    """The sha256 (hex) of the first `nbytes` of a file, read through `scratch`, whose content is lost.

    Raises OSError (which names the file), DraftError for a file that is shorter, LoadCancelled.
    """
    digest, step = hashlib.sha256(), min(PIECE_BYTES, len(scratch))
    fd = open_to_read(path)
    try:
        for begin in range(0, nbytes, step):
            piece = scratch[: min(step, nbytes - begin)]
            control.read(fd, piece, begin)
            digest.update(piece)
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        os.close(fd)
    return digest.hexdigest()
