"""A conversion that was interrupted is gone on with, and ends with the very bytes of one that was not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from edgespec.errors import ConfigError, ModelError
from edgespec.models.convert import folder as convert_folder
from edgespec.models.convert import journal as convert_journal
from edgespec.models.weights.opening import open_weights
from tests.support.convert_killed import contents
from tests.support.packed import SHAPE, converted, write_packed
from tests.support.tiny import tiny_config, tiny_tensors, write_tiny
from tests.support.tiny_gguf import write_tiny_gguf

UP = "model.layers.1.mlp.up_proj.weight"
SHARDS = 60_000


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "source", **SHAPE)


def interrupt(source: Path, out: Path, after: int, error: BaseException | None = None, **options: Any) -> None:
    """A conversion that ends with `error` (KeyboardInterrupt) once `after` tensors are written."""
    seen = 0

    def report(name: str, done: int, total: int) -> None:
        nonlocal seen
        if seen == after:
            raise error or KeyboardInterrupt
        seen += 1

    with pytest.raises(type(error) if error else KeyboardInterrupt):
        converted(source, out, options.pop("bits", 4), report=report, **options)


def go_on(source: Path, out: Path, bits: int = 4, **options: Any) -> tuple[list[str], list[str]]:
    """(tensors that were converted now, notes)."""
    made: list[str] = []
    notes: list[str] = []
    converted(source, out, bits, report=lambda name, done, total: made.append(name), note=notes.append, **options)
    return made[:-1], notes


def same(one: Path, other: Path) -> bool:
    return contents(one) == contents(other)


@pytest.mark.parametrize("shards", [SHARDS, 10**9])
def test_interrupted_before_each_tensor(source: Path, tmp_path: Path, shards: int) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    kinds = converted(source, whole, shard_bytes=shards)
    with open_weights(source) as weights:
        names = weights.names()
    for after in range(len(names) + 1):
        interrupt(source, out, after, shard_bytes=shards)
        assert (tmp_path / ".out.converting").is_dir() == (after > 0)
        options = {"shard_bytes": shards}
        if after == len(names) // 2:
            again = converted(source, out, **options)
            assert {k: (v.tensors, v.error, v.squares, v.forms) for k, v in again.items()} == {
                k: (v.tensors, v.error, v.squares, v.forms) for k, v in kinds.items()
            }
        else:
            made, notes = go_on(source, out, **options)
            assert made == names[after:]
            assert len(notes) == (after > 0)
        assert same(whole, out)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source", "whole"]
        for path in out.iterdir():
            path.unlink()
        out.rmdir()


@pytest.mark.parametrize("kind", ["floats", "gguf"])
def test_killed_at_every_step(tmp_path: Path, kind: str) -> None:
    """With os._exit in the middle of each write, rename and removal, and half of each write done."""
    shape = {**SHAPE, "num_hidden_layers": 1}
    if kind == "gguf":
        source = write_tiny_gguf(tmp_path / "m.gguf", quant="Q4_1", **shape)
    else:
        source = write_tiny(tmp_path / "source", **shape)
    (tmp_path / "work").mkdir()
    command = [sys.executable, "-m", "tests.support.convert_killed", str(source), str(tmp_path / "work"), "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 50  # steps


def test_interrupted_again_and_again(source: Path, tmp_path: Path) -> None:
    converted(source, tmp_path / "whole", 8)
    for _ in range(6):
        interrupt(source, tmp_path / "out", 3, bits=8)
    made, _ = go_on(source, tmp_path / "out", 8)
    assert len(made) == 21 - 18
    assert same(tmp_path / "whole", tmp_path / "out")


def test_a_packed_checkpoint_whose_inputs_turn_out_of_order(tmp_path: Path) -> None:
    """What a tensor becomes shows only when it is read: the journal says it."""
    made = write_packed(tmp_path / "source", shuffled=True, bits=8)
    made.settings(desc_act=False)
    converted(tmp_path / "source", tmp_path / "whole", 8)
    for after in (2, 9, 15):
        interrupt(tmp_path / "source", tmp_path / f"out-{after}", after, bits=8)
        go_on(tmp_path / "source", tmp_path / f"out-{after}", 8)
        assert same(tmp_path / "whole", tmp_path / f"out-{after}")


# What is not gone on with


def _another_group(source: Path) -> dict[str, Any]:
    return {"group": 64}


def _other_bits(source: Path) -> dict[str, Any]:
    return {"bits": 8}


def _another_program(source: Path) -> dict[str, Any]:
    return {"program": "9.9"}


def _written_anew(source: Path) -> dict[str, Any]:
    os.utime(source / "model.safetensors", ns=(1, 1))
    return {}


def _other_numbers(source: Path) -> dict[str, Any]:
    tensors = tiny_tensors(tiny_config(**SHAPE), 1)
    stamp = (source / "model.safetensors").stat().st_mtime_ns
    save_file(tensors, source / "model.safetensors")
    os.utime(source / "model.safetensors", ns=(stamp, stamp))
    return {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_another_group, "it was made with other settings (group)"),
        (_other_bits, "it was made with other settings (bits)"),
        (_another_program, "it was made by another version of edgespec"),
        (_written_anew, "it was made of another source, or of one that was changed since"),
        (_other_numbers, "it was made of another source, or of one that was changed since"),
    ],
)
def test_what_changed_is_named(source: Path, tmp_path: Path, change: Any, said: str) -> None:
    interrupt(source, tmp_path / "out", 10)
    options = change(source)
    made, notes = go_on(source, tmp_path / "out", **options)
    assert len(made) == 21
    assert notes == [f"the conversion that was interrupted is not gone on with: {said}; starting anew."]
    converted(source, tmp_path / "whole", options.pop("bits", 4), **options)
    assert same(tmp_path / "whole", tmp_path / "out")


def test_another_number_of_threads_goes_on(source: Path, tmp_path: Path) -> None:
    from edgespec.models.convert.conversion import Wanted, convert
    from edgespec.models.tokenizer import load_tokenizer

    interrupt(source, tmp_path / "out", 10)
    notes: list[str] = []
    with open_weights(source) as weights:
        convert(weights, load_tokenizer(source), tmp_path / "out", Wanted(4), threads=1, note=notes.append)
    assert notes == ["going on with the conversion that was interrupted: 10 of 21 tensors are written."]


# Damage


def test_a_damaged_journal(source: Path, tmp_path: Path) -> None:
    """Each line once changed, once cut: what stands before it is kept."""
    converted(source, tmp_path / "whole")
    journal = tmp_path / ".out.converting" / convert_journal.NAME
    for index in (0, 1, 2, 6, 10):
        for cut in (False, True):
            interrupt(source, tmp_path / "out", 10)
            lines = journal.read_bytes().splitlines(keepends=True)
            assert len(lines) == 11
            spoilt = lines[index][:20] if cut else lines[index].replace(b'"', b"'", 1)
            journal.write_bytes(b"".join([*lines[:index], spoilt, *([] if cut else lines[index + 1 :])]))
            made, notes = go_on(source, tmp_path / "out")
            assert len(made) == 21 - max(index - 1, 0)
            if index == 0:
                assert notes == [
                    "the conversion that was interrupted is not gone on with: its journal is damaged; starting anew."
                ]
            assert same(tmp_path / "whole", tmp_path / "out")
            for path in (tmp_path / "out").iterdir():
                path.unlink()
            (tmp_path / "out").rmdir()


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\0" * 5000, b"[]\n", b"00000000 {}\n", b"5b4c8e46 {}\n"])
def test_a_journal_that_is_none(source: Path, tmp_path: Path, content: bytes) -> None:
    interrupt(source, tmp_path / "out", 5)
    (tmp_path / ".out.converting" / convert_journal.NAME).write_bytes(content)
    made, _ = go_on(source, tmp_path / "out")
    assert len(made) == 21
    converted(source, tmp_path / "whole")
    assert same(tmp_path / "whole", tmp_path / "out")


@pytest.mark.parametrize("what", ["changed", "cut", "zeros", "gone"])
def test_bytes_that_are_not_what_the_journal_says(source: Path, tmp_path: Path, what: str) -> None:
    """As a power failure leaves them: the journal was written, some of the tensors were not."""
    interrupt(source, tmp_path / "out", 12, shard_bytes=SHARDS)
    parts = sorted((tmp_path / ".out.converting").glob("part-*"))
    assert len(parts) > 3
    content = bytearray(parts[2].read_bytes())
    if what == "changed":
        content[-100] ^= 1
    elif what == "zeros":
        content[-3000:] = bytes(3000)
    elif what == "cut":
        del content[-1:]
    parts[2].write_bytes(content)
    if what == "gone":
        parts[2].unlink()
    made, notes = go_on(source, tmp_path / "out", shard_bytes=SHARDS)
    assert 21 - 12 < len(made) < 21
    assert f"{21 - len(made)} of 21 tensors are written" in notes[0]
    converted(source, tmp_path / "whole", shard_bytes=SHARDS)
    assert same(tmp_path / "whole", tmp_path / "out")


def test_strangers_in_the_folder_do_not_stay(source: Path, tmp_path: Path) -> None:
    interrupt(source, tmp_path / "out", 10)
    work = tmp_path / ".out.converting"
    (work / "extra").mkdir()
    (work / "config.json").write_text("{}")
    (work / "part-9").write_text("x")
    (work / "link").symlink_to(source)
    with (work / "part-1").open("ab") as part:
        part.write(b"x" * 500_000)
    go_on(source, tmp_path / "out")
    converted(source, tmp_path / "whole")
    assert same(tmp_path / "whole", tmp_path / "out")
    assert (source / "model.safetensors").exists()


def test_what_is_kept_after_an_error_and_what_is_not(source: Path, tmp_path: Path) -> None:
    """A full disk is mended and gone on with; a damaged source is fetched again, so nothing of it is kept."""
    work = convert_folder.work_folder(tmp_path / "out")
    notes: list[str] = []
    interrupt(source, tmp_path / "out", 10, ConfigError("disk full"), note=notes.append)
    assert notes == [f"what was converted is kept in {work}; the same command goes on with it."]
    assert work.is_dir()
    interrupt(source, tmp_path / "out", 3, ModelError("damaged"))
    assert not work.exists()


def test_what_is_kept_counts_as_room_on_the_disk(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    interrupt(source, tmp_path / "out", 20)
    held = sum(path.stat().st_blocks * 512 for path in (tmp_path / ".out.converting").iterdir())
    usage = shutil._ntuple_diskusage(10**9, 0, (64 << 20) + 200_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    convert_folder.check_disk(tmp_path / "out", 200_000 + held)
    with pytest.raises(ConfigError, match="free some space"):
        convert_folder.check_disk(tmp_path / "out", 200_001 + held)
