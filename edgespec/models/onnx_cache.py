"""Ready-to-run graphs on disk, so that the second start does not convert the weights again.

A folder per (weights, format, graph version): graph.onnx, weights.bin and sizes.json. It is written under a temporary
name and renamed when complete; a folder whose files have other sizes than recorded is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from edgespec.errors import MemoryBudgetError
from edgespec.models.weights import WeightFile

_SIZES = "sizes.json"


def graph_folder(weights: WeightFile, weight_format: str, cache_dir: Path, *, rebuild: bool = False) -> Path:
    """The folder of the ready graph for these weights, made now if it is missing, damaged, or `rebuild` is set."""
    folder = cache_dir / _key(weights, weight_format)
    if not rebuild and _complete(folder):
        return folder
    from edgespec.models.onnx_graph import write_graph  # imports onnx, which a warm start does not need

    cache_dir.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=cache_dir))
    try:
        try:
            write_graph(weights, weight_format, scratch)
        except OSError as error:
            raise MemoryBudgetError(
                f"{cache_dir}: the converted model cannot be written ({error.strerror}); "
                "free disk space or set EDGESPEC_HOME."
            ) from error
        sizes = {path.name: path.stat().st_size for path in scratch.iterdir()}
        (scratch / _SIZES).write_text(json.dumps(sizes))
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
        sizes = json.loads((folder / _SIZES).read_text())
        return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError, TypeError):
        return False


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
