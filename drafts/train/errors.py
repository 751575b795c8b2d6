"""What can go wrong in training a draft, in words for the user."""

from __future__ import annotations

import errno
from pathlib import Path

from edgespec.errors import EdgespecError


class TrainingError(EdgespecError):
    """A draft cannot be trained: prompts, caches, disk, or the training itself. What was done before is kept."""


def unwritable(path: Path, error: OSError, kept: str) -> TrainingError:
    """The error for a file that could not be written. kept: what is there, and stays usable."""
    advice = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make its folder writable"
    reason = error.strerror or type(error).__name__
    return TrainingError(f"{path}: cannot be written ({reason}). {kept} Then {advice} and run the same command again.")
