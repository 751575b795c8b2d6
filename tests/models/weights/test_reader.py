"""Weights that are read by another's reader, as a load of a draft is."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.errors import ModelError
from edgespec.models.weights.opening import open_weights
from tests.support.tiny import write_tiny
from tests.support.tiny_gguf import write_tiny_gguf


def test_all_is_read_by_the_reader_that_was_given(tmp_path: Path) -> None:
    """Headers too; what it raises names the file, except what calls a load off."""

    class CalledOff(Exception):
        pass

    folder, asked = write_tiny(tmp_path / "m"), []

    def reader(fd: int, into: memoryview, offset: int) -> None:
        asked.append(len(into))
        into[:] = os.pread(fd, len(into), offset)

    with open_weights(folder) as expected, open_weights(folder, reader) as weights:
        for name in weights.names():
            np.testing.assert_array_equal(weights.read(name), expected.read(name))
    assert sum(asked) >= (folder / "model.safetensors").stat().st_size

    def failing(error: Exception) -> Any:
        def read(fd: int, into: memoryview, offset: int) -> None:
            raise error

        return read

    with pytest.raises(ModelError, match=r"model.safetensors: the header cannot be read \(Input/output error\)"):
        open_weights(folder, failing(OSError(5, "Input/output error")))
    with pytest.raises(CalledOff):
        open_weights(write_tiny_gguf(tmp_path / "m.gguf"), failing(CalledOff()))
