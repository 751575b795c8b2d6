"""`edgespec bench`: from flags to the published document, with fake contenders in real workers."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from pathlib import Path

import pytest

from edgespec.bench import cli, contenders, extras, prompts
from edgespec.bench.model import PromptEncoder, open_decoder
from edgespec.bench.peers.base import Contender
from edgespec.bench.peers.own import Probe
from edgespec.bench.workers import WorkerFailure
from edgespec.errors import ConfigError
from tests.support.runs import record, write_run
from tests.support.tiny import write_tiny

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("bench") / "model", max_position_embeddings=2048, head_dim=16)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers(dest="command"))
    return parser.parse_args(["bench", *words])


def fake(name: str, **options) -> Contender:
    return Contender(name, "tests.bench.fakes:FakePeer", "fake", options)


def speed(monkeypatch, capsys, model, made, *words: str):
    monkeypatch.setattr(contenders, "CONTENDERS", tuple(made))
    args = parse("speed", "-m", str(model), "--quick", "--repeats", "1", "--answers-only", "--json", *words)
    code = cli.run(args)
    return code, json.loads(capsys.readouterr().out)


def test_the_published_document(monkeypatch, capsys, model, tmp_path):
    out = tmp_path / "speed.json"
    made = [fake("plain"), fake("ngram", chunk=4), Contender("llama.cpp", "no:where", "x", packages=("not_installed",))]
    code, document = speed(monkeypatch, capsys, model, made, "--out", str(out))
    assert code == 0
    assert json.loads(out.read_text()) == document
    assert set(document) == {"machine", "commands", "rows", "ratios"}
    assert set(document["machine"]) == {"cpu", "cores", "threads", "memory_bytes", "os", "python", "versions", "code"}
    assert document["machine"]["threads"] == 2
    rows = {row["name"]: row for row in document["rows"]}
    assert rows["plain"]["decode_tokens_per_second"] == pytest.approx(100)
    assert rows["ngram"]["decode_tokens_per_second"] == pytest.approx(400, rel=0.05)  # the last chunk is not full
    assert rows["plain"]["prefill_tokens_per_second"] == pytest.approx(900 / 0.1)
    assert rows["plain"]["peak_memory_bytes"] > 5e6
    assert rows["llama.cpp"]["status"] == "missing"
    assert document["ratios"]["ngram/plain"] == pytest.approx(4, rel=0.05)
    assert rows["ngram"]["equality"]["faults"] == 0
    assert set(rows["ngram"]["equality"]["by_kind"]) == {*prompts.DOMAINS, *prompts.COPYING, *prompts.PROSE}


def test_an_error_is_a_row_without_times_and_exit_code_1(monkeypatch, capsys, model):
    code, document = speed(monkeypatch, capsys, model, [fake("plain"), fake("ngram", mode="exits")])
    assert code == 1
    row = document["rows"][1]
    assert row["status"] == "error"
    assert "out of luck" in row["message"]
    assert row["decode_tokens_per_second"] is row["prefill_tokens_per_second"] is row["peak_memory_bytes"] is None


def test_tables_for_people(monkeypatch, capsys, model):
    monkeypatch.setattr(contenders, "CONTENDERS", (fake("plain"), fake("ngram", mode="no load")))
    monkeypatch.setenv("COLUMNS", "120")
    cli.run(parse("speed", "-m", str(model), "--quick", "--repeats", "1", "--answers-only"))
    printed = capsys.readouterr().out
    assert "plain" in printed
    assert "100.0" in printed
    assert "FileNotFoundError: weights.bin" in printed


def test_interruption_writes_nothing(monkeypatch, capsys, model, tmp_path):
    monkeypatch.setattr(cli, "Run", lambda *a, **k: (_ for _ in ()).throw(KeyboardInterrupt))
    out = tmp_path / "speed.json"
    assert cli.run(parse("speed", "-m", str(model), "--out", str(out))) == 130
    assert not out.exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "words",
    [
        ("speed", "--contenders", "plain,fast"),
        ("speed", "--contenders", ","),
        ("speed", "-n", "100000"),
        ("fidelity", "--formats", "exact,int3"),
    ],
    ids=" ".join,
)
def test_values_that_cannot_be(words, model):
    with pytest.raises(ConfigError):
        cli.run(parse(*words, "-m", str(model)))


def test_every_ratio_and_every_pair_names_a_contender():
    names = {contender.name for contender in contenders.CONTENDERS}
    for ratio in contenders.RATIOS:
        assert {ratio.over, ratio.under} <= names
        for side in (ratio.over, ratio.under):
            (found,) = [c for c in contenders.CONTENDERS if c.name == side]
            assert set(ratio.groups) <= set(found.groups), f"{ratio.name}: {side} never runs {ratio.groups}"
    assert {name for pair in contenders.SAME_TEXT for name in pair} <= names


def test_prompts_are_of_the_announced_kinds_and_lengths(model):
    kinds = {prompt.kind for prompt in prompts.PROMPTS}
    assert kinds == {*prompts.DOMAINS, *prompts.COPYING, *prompts.PROSE}
    assert len({prompt.name for prompt in prompts.PROMPTS}) == len(prompts.PROMPTS)
    assert {prompt.kind for prompt in prompts.select(quick=True)} == kinds
    encoder = PromptEncoder(model)
    assert len(encoder.exactly(prompts.LONG_TEXT, 900)) == 900
    assert len(encoder.exactly("short", 900)) == 900
    assert encoder.chat("hello")[:1] == [encoder.tokenizer.special_tokens["<|im_start|>"]]


def test_probe_widths_and_gap(model):
    probe = Probe(str(model), 1, "float32")
    ids = [3 + i % 50 for i in range(216)]
    widths = probe.widths(ids, 200, [1, 2, 16], 3)
    assert list(widths) == ["1", "2", "16"]
    assert all(milliseconds > 0 for milliseconds in widths.values())
    decoder = open_decoder(model, weight_format="float32", threads=1)
    row = decoder.forward([5, 6, 7], decoder.new_cache()).logits[-1]
    best, second = row.argsort()[::-1][:2]
    found = probe.gap([5, 6, 7], int(second), 9)
    assert found["margin"] == pytest.approx(float(row[best] - row[second]), abs=1e-5)
    assert found["gap"] == pytest.approx(abs(float(row[second] - row[9])), abs=1e-5)
    probe.close()


def test_fidelity_of_a_tiny_model(capsys, model, tmp_path):
    pytest.importorskip("torch")
    text = tmp_path / "text.txt"
    text.write_text("the tin then " * 30)
    words = ["fidelity", "-m", str(model), "--text", str(text), "--tokens", "50", "--formats", "float32,int8", "--json"]
    assert cli.run(parse(*words, "--threads", "1")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["positions"] == 50
    exact, coarse = document["rows"]
    assert (exact["name"], exact["positions"], exact["top1_agreement"]) == ("float32", 50, 1.0)
    assert exact["kl_max"] < 1e-8
    assert exact["cosine_min"] > 0.999999
    assert coarse["kl_mean"] > exact["kl_max"]


def test_warm_start_is_the_whole_process_without_the_first(tmp_path):
    marker = tmp_path / "started"
    slow_once = ["/bin/sh", "-c", f"test -e {marker} || sleep 0.5; touch {marker}"]
    assert 0 < extras.warm_start(slow_once, 3) < 0.4
    with pytest.raises(WorkerFailure, match="no such model"):
        extras.warm_start(["/bin/sh", "-c", "echo no such model >&2; exit 2"], 1)
    assert "PYTHONPATH" in os.environ


def test_b158_a_table_is_printed_in_any_encoding(monkeypatch, tmp_path):
    folder = write_run(tmp_path / "run", {"plain": [record(1)], "edgespec": [record(1)]})
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed := io.BytesIO(), encoding="ascii"))
    assert cli.run(parse("report", str(folder))) == 0
    sys.stdout.flush()
    assert "\\u2013" in printed.getvalue().decode("ascii"), "what is not known"
