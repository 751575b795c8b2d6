"""Small files of /proc, /sys and /etc: whatever cannot be read is None, never an exception.

Such files vanish (a driver is unloaded), refuse (debugfs wants root), and fail while they are read (a thermal zone
whose block is power-gated raises EAGAIN or ENODATA), and nothing of that is a reason to stop.
"""

from __future__ import annotations

from pathlib import Path

SYSTEM_ROOT = Path("/")  # readers take another one in tests


def text(path: Path) -> str | None:
    """The file's text as it is; device-tree strings keep their closing NUL."""
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError:
        return None


def line(path: Path) -> str:
    """The file's text without white space and NULs around it, "" if it cannot be read."""
    return (text(path) or "").strip("\0 \t\n")


def number(path: Path) -> int | None:
    """The whole number that the file holds."""
    try:
        return int(line(path))
    except ValueError:
        return None


def matching(folder: Path, pattern: str) -> list[Path]:
    """The paths in `folder` that match, sorted; none if it cannot be listed."""
    try:
        return sorted(folder.glob(pattern))
    except OSError:
        return []
