"""`edgespec drafts evaluate` on a tiny model: a whole run, running again, and what is wrong with its input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drafts import heatmap, recording
from edgespec.cli.main import main
from edgespec.decoding.session import Session
from edgespec.evaluation import run as evaluation_run
from tests.support.tiny import write_tiny

WORDS = ["the hen and the hen", "in the inn", "another hen", "an error or her"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "target", head_dim=16)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights as a draft."""
    return write_tiny(tmp_path_factory.mktemp("models") / "twin", head_dim=16)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "other", head_dim=16, seed=5)


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    files = []
    for domain, texts in (("code", WORDS[:2]), ("math", WORDS[2:])):
        file = tmp_path / f"{domain}.jsonl"
        file.write_text("".join(json.dumps({"id": f"{domain}-{n}", "prompt": t}) + "\n" for n, t in enumerate(texts)))
        files.append(str(file))
    return files


def evaluate(*words: str | Path, model: Path, code: int = 0) -> None:
    common = ["-m", str(model), "--threads", "1", "--weight-format", "float32", "-n", "12", "--gammas", "1,3"]
    assert main(["drafts", "evaluate", *common, *map(str, words)]) == code


def read(out: Path) -> dict[str, Any]:
    return json.loads((out / "evaluation.json").read_text())


def cell(document: dict[str, Any], draft: str, domain: str) -> dict[str, Any]:
    (found,) = [c for c in document["cells"] if (c["draft"], c["domain"]) == (draft, domain)]
    return found


def test_a_whole_run(prompts, model, twin, other, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    evaluate(*prompts, "--drafts", f"{twin},{other}", "--against", "other", "--out", out, model=model)
    document = read(out)
    rows = ["plain", "ngram", "twin", "other", "lookup+twin", "lookup+other"]
    assert [draft["name"] for draft in document["drafts"]] == rows
    assert len(document["cells"]) == len(rows) * 2
    for domain in ("code", "math"):
        right = cell(document, "twin", domain)
        assert right["by_gamma"]["3"]["acceptance_by_position"] == [1.0] * 3
        assert right["first_token"]["share"] == 1.0
        assert cell(document, "plain", domain)["by_gamma"]["3"]["accepted_per_round"] == 0
        assert cell(document, "plain", domain)["by_gamma"]["3"]["tokens_per_round"] == 1
        assert cell(document, "plain", domain)["by_gamma"]["3"]["predicted_speedup"] == 1
    found = cell(document, "other", "code")["by_gamma"]["3"]
    by_prompt = [p["accepted_and_rounds"]["other"]["3"] for p in document["by_prompt"] if p["domain"] == "code"]
    assert [found["accepted"], found["rounds"]] == [sum(column) for column in zip(*by_prompt)]
    differences = {(d["draft"], d["against"]) for d in document["differences"]}
    assert differences == {(row, "other") for row in ("plain", "ngram", "twin")} | {("lookup+twin", "lookup+other")}
    assert {"1", "2", "3", "4"} == set(document["costs"]["verify"])
    assert document["prompts"]["domains"] == {"code": 2, "math": 2}
    assert document["definitions"]
    assert (out / "heatmap.png").read_bytes().startswith(b"\x89PNG") or not heatmap.available()
    told = capsys.readouterr()
    shown = told.out
    assert "has evaluation.json" in told.err
    assert "Accepted draft tokens a round, gamma 3" in shown
    assert "lookup+twin" in shown


def test_running_again_uses_what_was_recorded(prompts, model, twin, tmp_path, monkeypatch) -> None:
    flags = ["--drafts", twin, "--cache", tmp_path / "cache"]
    evaluate(*prompts, *flags, "--out", tmp_path / "one", model=model)
    monkeypatch.setattr(evaluation_run, "record", lambda *args, **kwargs: pytest.fail("recorded again"))
    evaluate(*prompts, *flags, "--out", tmp_path / "two", model=model)
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    assert one["prompts"]["recorded"] == {"now": 4, "reused": 0, "damaged": 0}
    assert two["prompts"]["recorded"] == {"now": 0, "reused": 4, "damaged": 0}
    assert one["by_prompt"] == two["by_prompt"]
    intervals = [[(c["by_gamma"]["3"]["low"], c["by_gamma"]["3"]["high"]) for c in d["cells"]] for d in (one, two)]
    assert intervals[0] == intervals[1]


def test_ctrl_c_keeps_what_was_recorded(prompts, model, tmp_path, monkeypatch, capsys) -> None:
    flags = ["--drafts", "ngram", "--cache", tmp_path / "cache", "--out", tmp_path / "out"]
    done = []

    def interrupted(*args, **kwargs):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(1)
        return recording.record(*args, **kwargs)

    monkeypatch.setattr(evaluation_run, "record", interrupted)
    evaluate(*prompts, *flags, model=model, code=130)
    assert "interrupted after 2 of 4 prompts; recorded answers are kept in" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []
    monkeypatch.setattr(evaluation_run, "record", recording.record)
    evaluate(*prompts, *flags, model=model)
    assert read(tmp_path / "out")["prompts"]["recorded"] == {"now": 2, "reused": 2, "damaged": 0}


def test_the_json_on_stdout_is_the_document(prompts, model, tmp_path, capsys) -> None:
    evaluate(*prompts, "--drafts", "ngram", "--json", "--cache", "off", "--limit", "1", model=model)
    document = json.loads(capsys.readouterr().out)
    assert document["prompts"]["used"] == 2
    assert document["parameters"]["gammas"] == [1, 3]
    assert cell(document, "ngram", "code")["by_gamma"]["3"]["low"] is None  # one prompt has no interval


def test_questions_with_all_turns(model, tmp_path, monkeypatch) -> None:
    file = tmp_path / "question.jsonl"
    lines = [{"question_id": n, "category": c, "turns": WORDS[n : n + 2]} for n, c in enumerate(("coding", "stem"))]
    file.write_text("\n".join(map(json.dumps, lines)))
    asked = []
    monkeypatch.setattr(Session, "check", _noting(asked, Session.check))
    evaluate(file, "--turns", "all", "--drafts", "ngram", "--out", tmp_path, model=model)
    document = read(tmp_path)
    assert document["prompts"]["domains"] == {"code": 1, "chat": 1}
    assert {c["category"] for c in document["categories"]} == {"coding", "stem"}
    assert len(asked) == 4
    first, second = asked[:2]
    assert second[: len(first)] == first  # the second turn follows the target's own answer to the first
    assert len(second) > len(first) + 12
    evaluate(file, "--drafts", "ngram", "--out", tmp_path, "--domain", "one", model=model)
    assert read(tmp_path)["prompts"]["domains"] == {"one": 2}


def _noting(asked: list[list[int]], check):
    def noted(self, prompt):
        asked.append(list(prompt))
        return check(self, prompt)

    return noted


def test_prompts_that_do_not_fit_are_skipped(prompts, model, tmp_path, capsys) -> None:
    with Path(prompts[0]).open("a") as file:
        file.write(json.dumps({"prompt": "x" * 600}) + "\nnot json\n")
    evaluate(*prompts, "--drafts", "ngram", "--out", tmp_path, model=model)
    skipped = read(tmp_path)["prompts"]["skipped"]
    assert sorted(entry["line"] for entry in skipped) == [3, 4]
    shown = capsys.readouterr().out
    assert "2 lines of the prompt files were skipped" in shown
    assert "line 4: it is not JSON" in shown


def test_no_prompt_fits(model, tmp_path, capsys) -> None:
    file = tmp_path / "code.jsonl"
    file.write_text(json.dumps({"prompt": "x" * 600}))
    evaluate(file, "--drafts", "ngram", "--out", tmp_path, model=model, code=2)
    assert "No prompt could be used" in capsys.readouterr().err
    assert not (tmp_path / "evaluation.json").exists()


def test_drafts_that_fail_leave_the_others(prompts, model, twin, tmp_path, capsys) -> None:
    evaluate(*prompts, "--drafts", f"{twin},{tmp_path / 'missing'}", "--out", tmp_path, model=model, code=1)
    document = read(tmp_path)
    reasons = {draft["name"]: draft["reason"] for draft in document["drafts"]}
    assert reasons["twin"] is None
    assert "missing" in reasons["missing"]
    assert "missing was not evaluated" in capsys.readouterr().out
    assert cell(document, "twin", "code")


def test_a_draft_that_fails_on_the_way(prompts, model, twin, tmp_path, monkeypatch) -> None:
    real = evaluation_run.score

    def failing(draft, *args, **kwargs):
        if draft.name.endswith("twin"):
            raise RuntimeError("out of luck")
        return real(draft, *args, **kwargs)

    monkeypatch.setattr(evaluation_run, "score", failing)
    evaluate(*prompts, "--drafts", twin, "--out", tmp_path, model=model, code=1)
    document = read(tmp_path)
    reasons = {draft["name"]: draft["reason"] for draft in document["drafts"]}
    assert reasons["twin"] == reasons["lookup+twin"] == "RuntimeError: out of luck"
    assert {c["draft"] for c in document["cells"]} == {"plain", "ngram"}


def test_what_is_refused_before_any_work(prompts, model, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(evaluation_run, "record", lambda *args, **kwargs: pytest.fail("recorded"))
    file = tmp_path / "file"
    file.write_text("")
    wrong = [
        (["--out", file], "--out"),
        (["--against", "nobody"], "--against nobody is not among"),
        (["--drafts", "auto,ngram"], "auto alone"),
        (["--drafts", tmp_path / "missing"], "missing"),
        (["--gammas", "0"], "1,2,3,5"),
        (["--gammas", "1,x"], "1,2,3,5"),
        (["--max-new-tokens", "1"], "from 2 up"),
        (["--floor", "1"], "from 0 to below 1"),
        (["--limit", "0"], "from 1 up"),
        (["--drafts", "ngram", tmp_path / "missing.jsonl"], "cannot be read"),
        (["--drafts", "ngram", file], "has no prompt: empty"),
    ]
    for words, message in wrong:
        evaluate("--drafts", "ngram", *words, *prompts, model=model, code=2)
        assert message in capsys.readouterr().err


def test_without_matplotlib_there_is_no_picture(prompts, model, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(heatmap, "available", lambda: False)
    evaluate(*prompts, "--drafts", "ngram", "--out", tmp_path, model=model)
    assert read(tmp_path)["cells"]
    assert not (tmp_path / "heatmap.png").exists()
    assert "edgespec[plots]" in capsys.readouterr().err
