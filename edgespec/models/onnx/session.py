"""Opening a converted graph in ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from edgespec.errors import ConfigError, ModelError
from edgespec.models.cpu import usable_threads

if TYPE_CHECKING:
    import onnxruntime as ort


def open_session(folder: Path, threads: int | None) -> ort.InferenceSession:
    """The graph in `folder`. threads: None = the cores that this process may use.

    Raises ConfigError without ONNX Runtime, ModelError if the graph cannot be loaded.
    """
    return _opened(str(folder / "graph.onnx"), folder, threads)


def open_batch_session(folder: Path, slots: int, threads: int | None) -> tuple[ort.InferenceSession, int]:
    """The batch graph made of the graph in `folder`, and the bytes of memory that its weights take. Raises as above."""
    from edgespec.models.onnx.batch_graph import batch_graph, packed_bytes  # imports onnx

    try:
        graph, packed = batch_graph(folder, slots), packed_bytes(folder)
    except Exception as error:  # of reading the file, or of protobuf, whose errors derive from Exception alone
        raise ModelError(f"{folder}: the converted model cannot be read ({str(error)[:200]}).") from error
    return _opened(graph, folder, threads), packed


def _opened(graph: str | bytes, folder: Path, threads: int | None) -> ort.InferenceSession:
    """`graph`: a file in `folder`, or a graph in memory whose weight file is there."""
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise ConfigError("the CPU engine needs ONNX Runtime: pip install 'edgespec[cpu]'.") from error
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or usable_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Workers spin while a forward runs, and sleep as soon as it ends: waiting for input must not cost a core.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if isinstance(graph, bytes):
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    try:
        return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises classes of its own, all derived from Exception
        raise ModelError(f"{folder}: ONNX Runtime cannot load the converted model ({str(error)[:200]}).") from error
