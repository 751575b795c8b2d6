"""`edgespec predictor`, from prompts to a ranker that ranks, and what is wrong with its input."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from edgespec.cli.main import main
from predictor.ranker import Ranker
from predictor.traces import INDEX, TraceReader
from tests.support.draft_sets import write_draft
from tests.support.tiny import write_tiny
from tests.support.traces import DRAFTS, sha, write_traces

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_traces(tmp_path_factory.mktemp("traces") / "t", 24)


@pytest.fixture(scope="module")
def ranker(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranker") / "ranker.onnx"
    words = ["--traces", str(traces), "--out", str(path), "--passes", "3", "--threads", "1", "-q"]
    assert main(["predictor", "train", *words]) == 0
    return path


def test_from_prompts_to_a_ranker(tmp_path: Path, capsys) -> None:
    model = write_tiny(tmp_path / "target", head_dim=16, scale=0.2)
    drafts = tmp_path / "set"
    for seed, name in enumerate(DRAFTS):
        write_draft(drafts / name, model, seed=seed)
    prompts = tmp_path / "code.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the hen {n} and {n + 1}"}) + "\n" for n in range(8)))
    traces, out = tmp_path / "traces", tmp_path / "ranker.onnx"
    engine = ["-m", str(model), "--drafts", str(drafts), "--threads", "1", "--weight-format", "float32"]
    assert main(["bench", "record", str(prompts), "--out", str(traces), *engine, "-n", "24", "--gamma-max", "2"]) == 0
    assert "8 texts, 8 of them new" in capsys.readouterr().err
    assert main(["predictor", "train", "--traces", str(traces), "--out", str(out), "--passes", "2"]) == 0
    shown = capsys.readouterr()
    assert "By domain" in shown.out
    assert "5 texts to train on, 1 to stop by, 2 held out" in shown.err
    assert re.search(r"\nkept: pass [12], \d\.\d+ bits a token\n", shown.err)
    header = TraceReader(traces).header
    mine = {draft.name: draft.fingerprint for draft in header.drafts}
    ranker = Ranker.load(out, target=header.target["fingerprint"], drafts=mine)
    assert set(ranker.names) == set(DRAFTS)
    features = ranker.features()
    features.begin([1, 2, 3])
    features.push([4, 5])
    hidden = np.zeros((5, header.hidden_size), np.float32)
    rates = ranker.rank(features.vector(hidden, hidden[0], {"left": 0.5}))
    assert all(0 <= rate <= 1 for rate in rates.values())


def test_train_prints_one_document(traces, tmp_path, capsys) -> None:
    words = ["--traces", str(traces), "--out", str(tmp_path / "r.onnx"), "--passes", "1", "--json", "--ablate"]
    assert main(["predictor", "train", *words, "--seed", "3"]) == 0
    shown = capsys.readouterr()
    document = json.loads(shown.out)
    assert set(document["trained_apart"]) == {"prompt", "recent", "prompt and recent", "all"}
    assert document["texts"] == 4
    assert "only prompt" in shown.err
    assert Ranker.load(tmp_path / "r.onnx").info.training["config"]["seed"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["r.onnx"]


def test_evaluate_leaves_out_what_it_was_trained_on(traces, ranker, tmp_path, capsys) -> None:
    out = tmp_path / "figures.json"
    more = write_traces(tmp_path / "more", 5, first=100)
    words = ["--ranker", str(ranker), "--out", str(out)]
    assert main(["predictor", "evaluate", "--traces", str(traces), str(more), "--json", *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(out.read_text())
    assert (document["texts"], document["texts_it_has_seen"]) == (4 + 5, 20)
    assert set(document["by_domain"]) == set(DRAFTS)
    assert document["definitions"]["best"]
    assert main(["predictor", "evaluate", "--traces", str(more), *words]) == 0
    shown = capsys.readouterr().out
    assert "5 texts that the ranker has not seen; drafts: left, right" in shown
    assert main(["predictor", "evaluate", "--traces", str(traces), str(more), *words]) == 0
    assert "9 texts that the ranker has not seen, 20 that it was made with are left out" in capsys.readouterr().out
    for title in ("By domain", "By what the ranker sees", "Rankings without a ranker", "prompt text"):
        assert title in shown
    assert "Trained apart" not in shown


def test_what_is_refused(traces, ranker, tmp_path, capsys) -> None:
    from predictor.traces import TraceDraft

    other_target = write_traces(tmp_path / "target", 3, target={"name": "x", "fingerprint": sha("x")})
    later = tuple(TraceDraft(name, "head", name, sha(name + " later"), 1) for name in DRAFTS)
    other_drafts = write_traces(tmp_path / "drafts", 3, drafts=later)
    damaged = write_traces(tmp_path / "damaged", 3)
    (damaged / INDEX).write_text("{}")
    bad = tmp_path / "bad.onnx"
    bad.write_bytes(ranker.read_bytes()[:500])
    evaluate, train = ["predictor", "evaluate", "--ranker"], ["predictor", "train", "--traces"]
    for words, message in (
        ([*evaluate, str(ranker), "--traces", str(other_target)], "made for another target"),
        ([*evaluate, str(ranker), "--traces", str(other_drafts)], "trained with other drafts (left, right)"),
        ([*evaluate, str(ranker), "--traces", str(damaged)], "is no index of traces"),
        ([*evaluate, str(ranker), "--traces", str(tmp_path / "nowhere")], "there are no traces"),
        ([*evaluate, str(bad), "--traces", str(traces)], "bad.onnx cannot be used"),
        ([*evaluate, str(ranker), "--traces", str(traces), "--out", str(tmp_path / "no" / "f")], "cannot be written"),
        ([*train, str(traces), str(other_target), "--out", str(tmp_path / "r.onnx")], "has another target than"),
        ([*train, str(damaged), "--out", str(tmp_path / "r.onnx")], "is no index of traces"),
        ([*train, str(traces), "--out", str(tmp_path)], "give a file in a folder that exists"),
        ([*train, str(traces), "--out", str(tmp_path / "no" / "r.onnx")], "give a file in a folder that exists"),
        ([*train, str(traces), "--out", str(tmp_path / "r.onnx"), "--passes", "0"], "from 1 to"),
    ):
        assert main(words) == 2, words
        shown = capsys.readouterr().err
        assert message in " ".join(shown.split()), shown
        assert "Traceback" not in shown
    few = write_traces(tmp_path / "few", 2)
    assert main([*train, str(few), "--out", str(tmp_path / "r.onnx")]) == 2
    assert "too few to train" in capsys.readouterr().err
    assert not (tmp_path / "r.onnx").exists()


def test_nothing_left_to_judge_on(traces, ranker, tmp_path, capsys) -> None:
    """Traces of nothing but texts that the ranker was trained on."""
    info = Ranker.load(ranker).info
    index = json.loads((traces / INDEX).read_text())
    index["texts"] = [text for text in index["texts"] if text["key"][:8] in info.training["seen"]]
    folder = tmp_path / "seen"
    folder.mkdir()
    for text in index["texts"]:
        (folder / text["file"]).write_bytes((traces / text["file"]).read_bytes())
    (folder / INDEX).write_text(json.dumps(index))
    assert main(["predictor", "evaluate", "--ranker", str(ranker), "--traces", str(folder)]) == 2
    assert "There is nothing to judge the ranker on" in capsys.readouterr().err


def test_without_an_action_there_is_help(capsys) -> None:
    assert main(["predictor"]) == 2
    assert "train" in capsys.readouterr().out
