"""Ready-to-run graphs on disk, so that the second start does not convert the weights again.

A folder per (weights, format, graph version): graph.onnx, weights.bin and files.json. It is written under a temporary
name and renamed when complete; a folder whose files have another size or content than recorded is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from pathlib import Path

from filelock import FileLock

from edgespec.errors import ConfigError
from edgespec.files import sha256_of
from edgespec.models.weights.opening import WeightFile

_FILES = "files.json"  # name -> [size, sha256]
_ABANDONED_SECONDS = 24 * 3600


def graph_folder(weights: WeightFile, weight_format: str, cache_dir: Path) -> Path:
    """The folder of the ready graph for these weights, made now if it is missing or damaged.

    Raises ModelError for damaged weights, ConfigError if `cache_dir` cannot be used.
    """
    folder = cache_dir / _key(weights, weight_format)
    if intact(folder):
        return folder
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(cache_dir / ".lock"):  # of several processes one builds, the others find it done
            if not intact(folder):
                _sweep(cache_dir)
                _build(weights, weight_format, folder)
    except OSError as error:
        raise ConfigError(
            f"{cache_dir}: the converted model cannot be written ({error.strerror or error}); "
            "free disk space, or set EDGESPEC_HOME to a folder that you can write to."
        ) from error
    return folder


def _build(weights: WeightFile, weight_format: str, folder: Path) -> None:
    from edgespec.models.onnx.graph import write_graph  # imports onnx, which a warm start does not need

    scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        write_graph(weights, weight_format, scratch)
        files = {path.name: [path.stat().st_size, sha256_of(path)] for path in scratch.iterdir()}
        (scratch / _FILES).write_text(json.dumps(files))
        if folder.is_symlink() or folder.is_file():
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)
        os.rename(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _key(weights: WeightFile, weight_format: str) -> str:
    from edgespec.models.onnx.graph_version import GRAPH_VERSION

    text = f"{weights.fingerprint()}:{weight_format}:{GRAPH_VERSION}"
    return f"{weights.path.stem[:40]}-{weight_format}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


def intact(folder: Path) -> bool:
    """Whether every file of the folder has the size and content that were written. Reads all of it."""
    try:
        files = json.loads((folder / _FILES).read_text())
        if any((folder / name).stat().st_size != size for name, (size, _) in files.items()):
            return False
        return bool(files) and all(sha256_of(folder / name) == digest for name, (_, digest) in files.items())
    except (OSError, ValueError, AttributeError, TypeError, RecursionError):
        return False


def _sweep(cache_dir: Path) -> None:
    """Remove what a process that was killed while building left behind."""
    for left in cache_dir.glob(".building-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
