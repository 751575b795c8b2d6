"""Traces on disk: what is written comes back, goes on where it was, and is refused when it is not whole."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import pytest

from predictor import traces
from predictor.traces import INDEX, TraceDraft, TracedText, TraceError, TraceHeader, TraceReader, TraceWriter, quantised
from tests.support.traces import GAMMA, HIDDEN, NEW, header, made_up, write_traces


def same(one: TracedText, other: TracedText) -> bool:
    fields = [(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(TracedText)]
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in fields)


@pytest.mark.parametrize("changes", [{}, {"confidences": True}, {"stride": 3}])
def test_what_is_written_comes_back(tmp_path: Path, changes) -> None:
    made = header(**changes)
    texts = [made_up(seed, made=made) for seed in range(3)]
    writer = TraceWriter(tmp_path, made)
    for text in texts:
        writer.add(text)
    writer.set_costs({"verify": {"1": 0.01}})
    reader = TraceReader(tmp_path)
    assert reader.header == made
    assert reader.costs == {"verify": {"1": 0.01}}
    assert len(reader) == 3
    assert all(same(a, b) for a, b in zip(reader, texts, strict=True))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_texts_are_read_one_at_a_time(tmp_path: Path, monkeypatch) -> None:
    write_traces(tmp_path, 3)
    read = []
    real = traces._read_shard
    monkeypatch.setattr(traces, "_read_shard", lambda folder, entry: read.append(entry.key) or real(folder, entry))
    texts = iter(TraceReader(tmp_path))
    assert read == []
    next(texts)
    assert len(read) == 1


def test_going_on(tmp_path: Path) -> None:
    write_traces(tmp_path, 2)
    with pytest.raises(TraceError, match="has traces already; go on with --resume"):
        TraceWriter(tmp_path, header())
    writer = TraceWriter(tmp_path, header(), resume=True)
    assert (len(writer), writer.damaged) == (2, [])
    assert made_up(1).key in writer
    assert made_up(2).key not in writer
    writer.add(made_up(2))
    writer.add(made_up(2))  # again: replaced
    assert len(TraceReader(tmp_path)) == 3


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"gamma_max": 4}, "gamma_max"),
        ({"target": {"name": "tiny", "fingerprint": "0" * 64}}, "target"),
        ({"drafts": (TraceDraft("left", "head", "left", "1" * 64, 10),)}, "drafts"),
    ],
)
def test_going_on_with_other_settings_is_refused(tmp_path: Path, changes, word) -> None:
    write_traces(tmp_path, 2)
    before = (tmp_path / INDEX).read_bytes()
    with pytest.raises(TraceError, match=rf"recorded with other settings \({word}\)"):
        TraceWriter(tmp_path, header(**changes), resume=True)
    assert (tmp_path / INDEX).read_bytes() == before


def _cut(content: bytes) -> bytes:
    return content[:-1]


def _flip(content: bytes) -> bytes:
    return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]


@pytest.mark.parametrize("damage", [_cut, _flip, lambda content: b"", lambda content: content + b"x"])
def test_a_damaged_shard_is_noticed_and_recorded_anew(tmp_path: Path, damage) -> None:
    write_traces(tmp_path, 3)
    file = tmp_path / f"text-{made_up(1).key}.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(TraceError, match=rf"{file.name}: is damaged .*--resume"):
        list(TraceReader(tmp_path))
    writer = TraceWriter(tmp_path, header(), resume=True)
    assert writer.damaged == [file.name]
    assert made_up(1).key not in writer
    writer.add(made_up(1))
    assert len(list(TraceReader(tmp_path))) == 3


def test_a_missing_shard(tmp_path: Path) -> None:
    write_traces(tmp_path, 2)
    (tmp_path / f"text-{made_up(0).key}.safetensors").unlink()
    with pytest.raises(TraceError, match="cannot be read"):
        list(TraceReader(tmp_path))
    assert len(TraceWriter(tmp_path, header(), resume=True)) == 1


def test_a_shard_that_does_not_fit_the_index(tmp_path: Path) -> None:
    """Whole files, but what is in them is not what the index says."""
    write_traces(tmp_path, 1)
    index = json.loads((tmp_path / INDEX).read_text())
    index["header"]["gamma_max"] = 1
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(TraceError, match="more guesses are right than could be made"):
        list(TraceReader(tmp_path))


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.update(format=2),
        lambda index: index.pop("header"),
        lambda index: index["header"].pop("stride"),
        lambda index: index["header"].update(stride=0),
        lambda index: index["header"].update(hidden_size="8"),
        lambda index: index["header"].update(extra=1),
        lambda index: index["header"].update(target={}),
        lambda index: index["header"]["drafts"].append(index["header"]["drafts"][0]),
        lambda index: index["header"]["drafts"][0].update(expected="0.5"),
        lambda index: index["header"]["drafts"][0].update(expected=float("nan")),
        lambda index: index["header"]["drafts"][0].update(expected=7),
        lambda index: index["header"]["drafts"][0].update(free="no"),
        lambda index: index["texts"][0].update(file="../../etc/passwd"),
        lambda index: index.update(costs=[]),
    ],
)
def test_a_damaged_index(tmp_path: Path, change) -> None:
    write_traces(tmp_path, 1)
    index = json.loads((tmp_path / INDEX).read_text())
    change(index)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(TraceError, match=rf"{INDEX}: is no index of traces, or damaged"):
        TraceReader(tmp_path)


def test_no_traces(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere: there are no traces"):
        TraceReader(tmp_path / "nowhere")
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(TraceError, match="no index of traces"):
        TraceReader(tmp_path)
    TraceWriter(tmp_path / "empty", header())
    with pytest.raises(TraceError, match="holds no text"):
        TraceReader(tmp_path / "empty")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepts": np.zeros((2, NEW), np.uint8)}, "accepts is"),
        ({"accepts": np.zeros((2, NEW - 1), np.int8)}, "accepts is int8"),
        ({"lookup_accepts": np.full(NEW - 1, GAMMA, np.uint8)}, "more guesses"),  # three, where one token is left
        ({"hidden": np.full((NEW, HIDDEN), np.nan, np.float16)}, "no numbers"),
        ({"hidden": np.zeros((NEW - 2, HIDDEN), np.float16)}, "rows of hidden states"),
        ({"confidences": np.zeros((2, NEW - 1, GAMMA), np.uint8)}, "against what the index says"),
        ({"answer": np.zeros(1, np.int32)}, "accepts is"),
    ],
)
def test_a_text_that_makes_no_sense_is_not_written(tmp_path: Path, change, message) -> None:
    writer = TraceWriter(tmp_path, header())
    with pytest.raises(ValueError, match=message):
        writer.add(dataclasses.replace(made_up(0), **change))
    assert len(writer) == 0
    assert [path.name for path in tmp_path.iterdir()] == [INDEX]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch) -> None:
    write_traces(tmp_path, 2)
    writer = TraceWriter(tmp_path, header(), resume=True)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TraceError, match="cannot be written"):
        writer.add(made_up(2))
    assert len(list(TraceReader(tmp_path))) == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_what_a_simulation_takes(tmp_path: Path) -> None:
    text = made_up(0, made=header(confidences=True))
    taken = text.replay()
    assert set(taken) == {"domain", "prompt_length", "accepts", "confidences", "lookup_level", "lookup_accepts"}
    assert taken["accepts"].shape == (2, NEW - 1)
    with pytest.raises(TraceError, match="--stride 1"):
        made_up(0, made=header(stride=3)).replay()


def test_headers_round_trip() -> None:
    made = header()
    assert TraceHeader.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_confidences_are_never_taken_for_no_token() -> None:
    assert [quantised(c) for c in (0.0, 0.5, 1.0)] == [1, 128, 255]
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError):
            quantised(wrong)
