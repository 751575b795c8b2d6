"""`phrases.safetensors`: what is written comes back, what is damaged is refused by name."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from drafts import phrases
from drafts.phrases import FILE_NAME, PhraseDraft, PhraseTable
from edgespec.errors import DraftError
from edgespec.models.weights.files import ReadOnlyFile
from tests.support.phrases import SOME, table_of

VOCABULARY = 288
METADATA = {"format": "edgespec-phrases", "version": "1", "sizes": "1,2,3"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    table_of(SOME).write(tmp_path / FILE_NAME, VOCABULARY)
    return tmp_path / FILE_NAME


def changed(path: Path, metadata: Mapping[str, str] | None = METADATA, **tensors: np.ndarray | None) -> Path:
    """The file with other metadata, and tensors replaced, added, or (None) left out."""
    content = load_file(path) | tensors
    save_file({name: value for name, value in content.items() if value is not None}, path, metadata=metadata)
    return path


def test_what_was_written_comes_back(path: Path) -> None:
    made, read = table_of(SOME), PhraseTable.read(path, VOCABULARY)
    assert read.sizes == made.sizes
    for name in ("keys", "next", "confidence"):
        assert getattr(read, name).dtype == getattr(made, name).dtype
        assert np.array_equal(getattr(read, name), getattr(made, name))
    assert read.nbytes == 13 * len(SOME) == PhraseDraft("phrases", read).nbytes
    assert os.listdir(path.parent) == [FILE_NAME]


def test_a_failed_write_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        table_of({(1,): (2, 3)}).write(path, VOCABULARY)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [FILE_NAME]


@pytest.mark.parametrize("keep", [0, 4, 7, 100, 0.5, 0.99])
def test_a_file_that_was_cut(path: Path, keep: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    with pytest.raises(DraftError, match=str(path)):
        PhraseTable.read(path, VOCABULARY)


def test_bytes_behind_the_end_a_pipe_a_folder_and_nothing(path: Path, tmp_path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")
    os.mkfifo(tmp_path / "pipe")
    for wrong in (path, tmp_path, tmp_path / "pipe", tmp_path / "none"):
        with pytest.raises(DraftError, match=str(wrong)):
            PhraseTable.read(wrong, VOCABULARY)


KEYS = table_of(SOME).keys


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"keys": None}, "tensor keys is missing"),
        ({"next": None}, "tensor next is missing"),
        ({"confidence": None}, "tensor confidence is missing"),
        ({"extra": np.zeros(5, np.int32)}, "extra has no place in a table"),
        ({"extra": np.zeros(5, np.float32)}, "F32, which is not supported"),
        ({"keys": KEYS.astype(np.int64)}, "I64, which is not supported"),
        ({"keys": np.arange(5, dtype=np.int32)}, "keys is I32"),
        ({"next": KEYS}, "next is U64"),
        ({"confidence": np.ones(5, np.int32)}, "confidence is I32"),
        ({"next": np.zeros(4, np.int32)}, r"next is I32 \[4\]"),
        ({"confidence": np.ones((5, 1), np.uint8)}, "one number for each key"),
        ({n: getattr(table_of(SOME), n)[:, None] for n in ("keys", "next", "confidence")}, "one number for each key"),
        ({n: getattr(table_of(SOME), n)[:0] for n in ("keys", "next", "confidence")}, "has 0 phrases"),
        ({"keys": KEYS[::-1].copy()}, "ascending order"),
        ({"keys": KEYS[[0, 1, 1, 3, 4]]}, "each once"),
        ({"next": np.array([0, 1, -1, 3, 4], np.int32)}, "proposes token -1"),
        ({"next": np.array([0, 1, 288, 3, 4], np.int32)}, "proposes token 288, but the target's are 0 to 287"),
        ({"confidence": np.array([9, 9, 0, 9, 9], np.uint8)}, "a confidence is 0"),
    ],
)
def test_tensors_that_no_table_has(path: Path, tensors: dict[str, Any], words: str) -> None:
    with pytest.raises(DraftError, match=f"{path}: .*{words}"):
        PhraseTable.read(changed(path, **tensors), VOCABULARY)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (None, "format is 'None'"),
        ({**METADATA, "format": "edgespec-head"}, "no table of phrases"),
        ({**METADATA, "version": "2"}, "another version"),
        *(
            ({**METADATA, "sizes": sizes}, "it must list lengths from 1 to 8")
            for sizes in ("", "0,1", "2,1", "1,1", "1,9", "1,x", "-1", "1;2", "1,²", "12", "1," * 5000)
        ),
        ({"format": "edgespec-phrases", "version": "1"}, "sizes is 'None'"),
    ],
)
def test_headers_that_no_table_has(path: Path, metadata: dict[str, str] | None, words: str) -> None:
    with pytest.raises(DraftError, match=words) as caught:
        PhraseTable.read(changed(path, metadata), VOCABULARY)
    assert len(str(caught.value)) < 400 + len(str(path))


def test_a_table_that_is_too_large_is_refused_before_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phrases, "MOST_ENTRIES", 4)
    monkeypatch.setattr(ReadOnlyFile, "read_into", lambda *_: pytest.fail("it was read"))
    monkeypatch.setattr(ReadOnlyFile, "read", lambda self, offset, count, what: self.path.read_bytes()[offset:][:count])
    with pytest.raises(DraftError, match="has 5 phrases; a table has 1 to 4"):
        PhraseTable.read(path, VOCABULARY)
