"""`edgespec convert`: flags, what it prints, exit codes, Ctrl-C, and an answer from the folder it wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.cli.main import main
from tests.support.packed import SHAPE, write_packed
from tests.support.tiny import write_tiny
from tests.support.tiny_gguf import write_tiny_gguf


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "source", vocab_size=320, **SHAPE)


def convert(*words: str | Path) -> int:
    return main(["convert", *map(str, words)])


def test_the_table_and_the_folder(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert convert(source, "--dtype", "int4", "--group", "64", "--out", out) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[-1] == str(out)
    (row,) = [line.split() for line in lines if line.startswith("up_proj")]
    assert row[1] == "2"
    assert 2 < float(row[-6].rstrip("%")) < 12
    assert " ".join(row[-5:]) == "int4, groups of 64, zeros"
    assert any("embed_tokens" in line and "int8, groups of 64, symmetric" in line for line in lines)
    assert "40 of the 320 rows of the vocabulary are padding" in printed.err
    assert "converted 100% of" in printed.err
    assert convert(source, "--dtype", "int8", "--out", out, "--force", "-q") == 0
    assert capsys.readouterr() == (f"{out}\n", "")


def test_the_folder_answers(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(source, "--dtype", "int4", "--out", tmp_path / "out", "-q") == 0
    capsys.readouterr()
    for device in ("cpu", "torch-cpu"):
        words = [
            "generate",
            "the hen",
            "-m",
            str(tmp_path / "out"),
            "-n",
            "8",
            "--ignore-eos",
            "--json",
            "--draft",
            "off",
        ]
        assert main([*words, "--device", device]) == 0
        assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dtype", "int3"], "--dtype 'int3' is unknown; it is int4 or int8"),
        (["--dtype", "int4", "--group", "48"], "--group is 48; it must be 32, 64 or 128"),
        (["--dtype", "int8", "--zeros"], "--zeros is for int4"),
        (["--dtype", "int4", "--zeros", "--symmetric"], "not allowed with argument"),
        (["--dtype", "int4", "--embeddings", "int2"], "--embeddings 'int2' is unknown"),
        (["--dtype", "int4", "--shard-size", "big"], "--shard-size 'big' is not a size"),
        (["--dtype", "int4", "--shard-size", "10kB"], "not a size of at least 1MB"),
        (["--dtype", "int4", "--threads", "0"], "--threads is 0"),
        ([], "--dtype"),
    ],
)
def test_wrong_flags(
    source: Path, tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(source, *words, "--out", tmp_path / "out") == 2
    assert said in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_what_is_there_and_what_is_not(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert convert(source, "--dtype", "int4", "--out", source) == 2
    assert "holds the model that is to be converted" in capsys.readouterr().err
    (tmp_path / "out").mkdir()
    assert convert(source, "--dtype", "int4", "--out", tmp_path / "out") == 2
    assert "is there already" in capsys.readouterr().err
    assert convert(tmp_path / "nothing", "--dtype", "int4", "--out", tmp_path / "new") == 2
    assert "there is no file or folder" in capsys.readouterr().err


def test_rounding_once_more_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_packed(tmp_path / "shuffled", shuffled=True)
    assert convert(tmp_path / "shuffled", "--dtype", "int4", "--out", tmp_path / "a") == 0
    assert "weights stored as GPTQ4 are rounded once more" in capsys.readouterr().err
    write_packed(tmp_path / "ordered")
    assert convert(tmp_path / "ordered", "--dtype", "int4", "--out", tmp_path / "b") == 0
    printed = capsys.readouterr()
    assert "rounded" not in printed.err
    assert "int4, groups of 32, zeros, kept" in printed.out


def test_the_licence_of_a_gguf_file(tmp_path: Path) -> None:
    source = write_tiny_gguf(tmp_path / "m.gguf", metadata={"general.license": "mit"}, **SHAPE)
    assert convert(source, "--dtype", "int8", "--out", tmp_path / "out", "-q") == 0
    record = json.loads((tmp_path / "out/config.json").read_text())["edgespec_quantisation"]
    assert record["source"]["licence"] == "mit"


def test_the_same_command_goes_on_after_ctrl_c(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that takes long enough to be interrupted when the first quarter is reported."""
    source = write_tiny(tmp_path / "source", **{**SHAPE, "vocab_size": 60_000, "num_hidden_layers": 24})
    words = ["convert", str(source), "--dtype", "int4", "--out"]
    child = subprocess.Popen(
        [sys.executable, "-m", "edgespec.cli.main", *words, str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
    )
    assert child.stderr is not None
    for line in child.stderr:
        if line.startswith("converted"):
            child.send_signal(signal.SIGINT)
            break
    said = child.stderr.read()
    assert child.wait(60) == 130
    child.stderr.close()
    work = tmp_path / ".out.converting"
    assert f"what was converted is kept in {work}; the same command goes on with it" in said
    assert sorted(p.name for p in tmp_path.iterdir()) == [work.name, "source"]
    assert main([*words, str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert "note: going on with the conversion that was interrupted:" in printed.err
    assert main([*words, str(tmp_path / "whole")]) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == printed.out.splitlines()[:-1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source", "whole"]
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
