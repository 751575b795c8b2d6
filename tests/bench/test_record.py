"""`edgespec bench record`: every draft at every position; what stands in a trace is what a live draft would do."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pytest

from drafts.base import InvalidLogits, Proposal
from drafts.evaluate import Trajectory, first_token, score
from drafts.head import HeadDraft
from drafts.ngram import NgramDraft
from drafts.recording import record
from edgespec.bench import cli
from edgespec.bench import record as record_module
from edgespec.bench.record import score_positions
from edgespec.bench.record_command import last_of_each
from edgespec.errors import ConfigError, DraftError
from edgespec.evaluation.prompts import Item
from predictor.features import PROMPT_WINDOW, RECENT
from predictor.traces import TraceReader
from tests.support.draft_sets import write_draft, write_standalone
from tests.support.engines import load
from tests.support.tiny import write_tiny
from tests.support.tiny_head import fitted_head

pytest.importorskip("onnxruntime")

NEW, GAMMA = 24, 3
WORDS = ["the hen and the hen", "in the inn", "another hen", "an error or her"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "target", head_dim=16, scale=0.2)


@pytest.fixture(scope="module")
def drafts(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sets") / "set"
    for seed, name in enumerate(("general", "code")):
        write_draft(folder / name, model, seed=seed)
    write_standalone(folder / "small", model, head_dim=16)
    return folder


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    files = []
    for domain, texts in (("code", WORDS[:2]), ("math", WORDS[2:])):
        file = tmp_path / f"{domain}.jsonl"
        file.write_text("".join(json.dumps({"id": f"{domain}-{n}", "prompt": t}) + "\n" for n, t in enumerate(texts)))
        files.append(str(file))
    return files


def run(*words: str | Path, model: Path, quiet: bool = True) -> int:
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers(dest="command"))
    common = ["-m", str(model), "--threads", "1", "--weight-format", "float32", *["-q"] * quiet]
    sizes = ["-n", str(NEW), "--gamma-max", str(GAMMA)]
    return cli.run(parser.parse_args(["bench", "record", *common, *sizes, *map(str, words)]))


@pytest.fixture(scope="module")
def recorded(model: Path) -> tuple[HeadDraft, Trajectory]:
    """A head that is often right about the answer, and the answer."""
    target = load(model, "cpu")
    trajectory = record(target, [7, 8, 9, 10, 11, 7, 8], 40, token_count=280)
    weights = fitted_head(target, [[*trajectory.prompt, *trajectory.answer[:25]]])
    return HeadDraft("head", weights.spec, weights, target, threads=1), trajectory


def test_whole_blocks_and_blocks_that_stop_agree(recorded) -> None:
    draft, trajectory = recorded
    whole = score_positions(draft, trajectory, 4, whole_blocks=True)
    short = score_positions(draft, trajectory, 4)
    assert np.array_equal(whole.accepts, short.accepts)
    assert whole.accepts.max() >= 2  # else this says little
    assert (whole.accepts == 0).any()
    assert whole.confidences[:-4].all()
    assert not short.confidences.any()


@pytest.mark.parametrize("whole", [True, False])
def test_it_is_what_rounds_find(recorded, whole: bool) -> None:
    """Rounds of a live run land on some of the positions; there they accept what the trace says."""
    draft, trajectory = recorded
    found = score_positions(draft, trajectory, 4, whole_blocks=whole)
    once = first_token(draft, trajectory)
    assert (found.accepts > 0).sum() == once.hits
    rounds = score(draft, trajectory, 4)
    done, accepted, count = 1, 0, 0
    while done < len(trajectory.answer):
        stood = int(found.accepts[done - 1])
        accepted, count, done = accepted + stood, count + 1, done + stood + 1
    assert (accepted, count) == (rounds.accepted, rounds.rounds)


def test_every_few_positions_are_the_same_ones(recorded) -> None:
    draft, trajectory = recorded
    every = score_positions(draft, trajectory, 3)
    some = score_positions(draft, trajectory, 3, stride=4)
    assert np.array_equal(some.accepts, every.accepts[::4])


@pytest.mark.parametrize("whole", [True, False])
def test_lookup_gives_its_level(whole: bool) -> None:
    trajectory = Trajectory((1, 2, 3, 4, 1, 2), (3, 4, 1, 9, 9), 5, 50)
    found = score_positions(NgramDraft(), trajectory, 3, whole_blocks=whole)
    assert found.level.tolist() == [3, 4, 5, 0]
    assert found.accepts.tolist() == [2, 1, 0, 0]  # after 3, 4, 1 it goes on with 2; a 9 was never seen before


class _Odd:
    """A draft that hands over what it likes."""

    name = kind = "odd"
    reads_hidden = False
    nbytes = 0

    def __init__(self, proposal) -> None:
        self.proposal = proposal

    def open(self, states=None):
        return self

    def level(self, tokens) -> int:
        return 1

    def propose(self, tokens, gamma, choose, *, floor=0.0):
        return self.proposal(choose)

    def close(self) -> None:
        self.closed = True


def test_a_draft_that_fails_is_an_error_and_closed() -> None:
    trajectory = Trajectory((1, 2), (3, 4, 5), 3, 50)
    odd = _Odd(lambda choose: choose(np.full(50, np.nan, np.float32), []))
    with pytest.raises(InvalidLogits):
        score_positions(odd, trajectory, 2)
    assert odd.closed
    more = _Odd(lambda choose: Proposal([4, 5, 6, 7]))  # more than was asked for
    assert score_positions(more, trajectory, 1).accepts.tolist() == [1, 0]
    assert score_positions(more, trajectory, 2, whole_blocks=True).accepts.tolist() == [2, 0]


def test_a_whole_run(prompts, model, drafts, tmp_path) -> None:
    out = tmp_path / "traces"
    assert run(*prompts, "--drafts", drafts, "--out", out, "--confidences", model=model) == 0
    reader = TraceReader(out)
    header, texts = reader.header, list(reader)
    assert sorted(header.names) == ["code", "general", "small"]
    from drafts.zoo import read_set

    manifests = {entry.name: entry.manifest for entry in read_set(drafts).entries}
    for draft in header.drafts:
        assert draft.fingerprint == manifests[draft.name].weights_fingerprint
        assert not draft.free
    assert (header.gamma_max, header.stride, header.max_new_tokens, header.confidences) == (GAMMA, 1, NEW, True)
    assert (header.recent, header.prompt_window) == (RECENT, PROMPT_WINDOW)
    assert [(text.name, text.domain) for text in texts] == [
        (f"{domain}-{n}", domain) for domain in ("code", "math") for n in (0, 1)
    ]
    target = load(model, "cpu")
    for text in texts:
        again = record(target, text.prompt.tolist(), NEW, token_count=280)
        assert text.answer.tolist()[: len(again.answer)] == list(again.answer)[: len(text.answer)]
        rows = min(len(text.prompt), RECENT) + len(text.answer) - 1
        np.testing.assert_allclose(
            text.hidden, again.hidden[: len(text.prompt) + len(text.answer) - 1][-rows:], atol=5e-3
        )
        np.testing.assert_allclose(text.prompt_hidden, again.hidden[: len(text.prompt)].mean(axis=0), atol=1e-4)
        assert text.replay()["accepts"].shape == (3, len(text.answer) - 1)
        heads = [place for place, draft in enumerate(header.drafts) if draft.kind == "head"]
        assert text.confidences[heads][:, :-GAMMA].all()
    costs = reader.costs
    assert {*costs["verify"]} == {"1", "2", "3", "4"}
    assert costs["drafts"].keys() == costs["load_seconds"].keys() == {"code", "general", "small"}
    assert 0 <= costs["disturbance"] <= 1
    assert all(seconds > 0 for seconds in (*costs["drafts"].values(), *costs["load_seconds"].values()))


def test_going_on_after_an_interruption(prompts, model, drafts, tmp_path, monkeypatch, capsys) -> None:
    out, flags = tmp_path / "traces", ["--drafts", drafts / "code"]
    real, asked = record_module.record, []

    def interrupted(target, prompt, *args, **kwargs):
        asked.append(prompt)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return real(target, prompt, *args, **kwargs)

    monkeypatch.setattr(record_module, "record", interrupted)
    assert run(*prompts, *flags, "--out", out, "--cache", "off", model=model) == 130
    assert "2 texts are kept in" in capsys.readouterr().err
    before = {path.name: path.read_bytes() for path in out.glob("*.safetensors")}
    assert len(before) == 2
    with pytest.raises(ConfigError, match="go on with --resume"):
        run(*prompts, *flags, "--out", out, "--cache", "off", model=model)
    assert run(*prompts, *flags, "--out", out, "--cache", "off", "--resume", model=model) == 0
    assert len(asked) == 5  # the two that were missing
    assert len(list(TraceReader(out))) == 4
    assert all((out / name).read_bytes() == content for name, content in before.items())
    victim = out / next(iter(before))
    victim.write_bytes(victim.read_bytes()[:-10])
    assert run(*prompts, *flags, "--out", out, "--cache", "off", "--resume", model=model) == 0
    assert "1 damaged texts are recorded anew" in capsys.readouterr().err
    assert len(asked) == 6
    assert victim.read_bytes() == before[victim.name]
    with pytest.raises(ConfigError, match=r"other settings \(.*drafts\)"):
        run(*prompts, "--drafts", drafts / "general", "--out", out, "--resume", model=model)


def test_costs_that_were_interrupted_are_measured_by_a_resume(prompts, model, drafts, tmp_path, monkeypatch) -> None:
    words = (*prompts, "--drafts", drafts / "code", "--out", tmp_path / "traces")
    real = record_module.Recorder.measure

    def interrupted(*args) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(record_module.Recorder, "measure", interrupted)
    assert run(*words, model=model) == 130
    reader = TraceReader(tmp_path / "traces")
    assert (len(reader), reader.costs) == (4, {})
    monkeypatch.setattr(record_module.Recorder, "measure", real)
    assert run(*words, "--resume", model=model) == 0
    assert TraceReader(tmp_path / "traces").costs["verify"]
    monkeypatch.setattr(record_module.Recorder, "measure", interrupted)
    assert run(*words, "--resume", model=model) == 0, "what is there is not measured again"


def test_what_is_left_out_is_named_and_counted(prompts, model, drafts, tmp_path, capsys) -> None:
    with Path(prompts[0]).open("a") as stream:
        stream.write("{half\n" + json.dumps({"prompt": "the hen " * 2000}) + "\n")
    out = tmp_path / "traces"
    assert run(*prompts, "--drafts", drafts / "code", "--out", out, model=model, quiet=False) == 0
    err = capsys.readouterr().err
    assert f"left out: {prompts[0]}, line 3: it is not JSON\n" in err
    assert f"left out: {prompts[0]}, line 4: The prompt has " in err
    assert "4 texts, 4 of them new" in err
    assert "2 prompts skipped" in err


def test_the_last_of_each_domain(prompts, model, drafts, tmp_path) -> None:
    out = tmp_path / "traces"
    run(*prompts, "--drafts", drafts / "code", "--out", out, "--last", "1", "--stride", "2", model=model)
    assert [text.name for text in TraceReader(out)] == ["code-1", "math-1"]
    items = [Item(str(n), d, d, ("x",), "f", n) for n, d in enumerate("abcabcabc")]
    assert [item.name for item in last_of_each(items, 2)] == ["3", "6", "4", "7", "5", "8"]


def test_what_is_refused(prompts, model, drafts, tmp_path) -> None:
    out = tmp_path / "traces"
    with pytest.raises(DraftError, match="traces need drafts that work: missing"):
        run(*prompts, "--drafts", f"{drafts / 'code'},{tmp_path / 'missing'}", "--out", out, model=model)
    with pytest.raises(DraftError, match="there are none"):
        run(*prompts, "--drafts", "ngram", "--out", out, model=model)
    with pytest.raises(ConfigError, match=r"has no draft.toml"):
        run(*prompts, "--drafts", write_tiny(tmp_path / "bare", head_dim=16), "--out", out, model=model)
    with pytest.raises(ConfigError, match="--gamma-max must be at most"):
        run(*prompts, "--gamma-max", "17", "--out", out, model=model)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        run(*prompts, "--drafts", drafts / "code", "--out", tmp_path / "file" / "t", model=model)
    assert not out.exists()
