"""Ready-to-run graphs on disk, so that the second start does not convert the weights again.

A folder per (weights, format, graph version): graph.onnx, weights.bin and files.json. It is written under a temporary
name and renamed when complete; a folder whose files have other sizes than recorded is made again.
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

from edgespec.errors import MemoryBudgetError
from edgespec.models.weights import WeightFile

_FILES = "files.json"  # name -> [size, sha256]
_ABANDONED_SECONDS = 24 * 3600


def graph_folder(weights: WeightFile, weight_format: str, cache_dir: Path, *, rebuild: bool = False) -> Path:
    """The folder of the ready graph for these weights, made now if it is missing, damaged, or `rebuild` is set."""
    folder = cache_dir / _key(weights, weight_format)
    if not rebuild and _complete(folder):
        return folder
    from edgespec.models.onnx_graph import write_graph  # imports onnx, which a warm start does not need

    cache_dir.mkdir(parents=True, exist_ok=True)
    _sweep(cache_dir)
    scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=cache_dir))
    try:
        try:
            write_graph(weights, weight_format, scratch)
        except OSError as error:
            raise MemoryBudgetError(
                f"{cache_dir}: the converted model cannot be written ({error.strerror}); "
                "free disk space or set EDGESPEC_HOME."
            ) from error
        files = {path.name: [path.stat().st_size, _digest(path)] for path in scratch.iterdir()}
        (scratch / _FILES).write_text(json.dumps(files))
        if rebuild:
            shutil.rmtree(folder, ignore_errors=True)
        _publish(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _key(weights: WeightFile, weight_format: str) -> str:
    from edgespec.models.graph_version import GRAPH_VERSION

    text = f"{weights.fingerprint()}:{weight_format}:{GRAPH_VERSION}"
    return f"{weights.path.stem[:40]}-{weight_format}-{hashlib.sha256(text.encode()).hexdigest()[:20]}"


def _complete(folder: Path) -> bool:
    try:
        files = json.loads((folder / _FILES).read_text())
        return bool(files) and all((folder / name).stat().st_size == size for name, (size, _) in files.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def intact(folder: Path) -> bool:
    """Whether every file of a complete folder has the content that was written. Reads all of it."""
    if not _complete(folder):
        return False
    files = json.loads((folder / _FILES).read_text())
    return all(_digest(folder / name) == digest for name, (_, digest) in files.items())


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _sweep(cache_dir: Path) -> None:
    """Remove what a process that was killed while building left behind."""
    for left in cache_dir.glob(".building-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _publish(scratch: Path, folder: Path) -> None:
    """Rename into place. If another process was quicker its folder is as good; a damaged one is moved away first."""
    for _ in range(2):
        try:
            os.rename(scratch, folder)
            return
        except OSError:
            if _complete(folder):
                return
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(folder)
    os.rename(scratch, folder)
