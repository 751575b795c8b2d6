"""Recorded texts as replays take them: which, in what order, cut where, and ranked by what a live run would see."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from edgespec.bench.simulation import texts as module
from edgespec.bench.simulation.scenario import Base, Setting, simulate
from edgespec.bench.simulation.texts import Rankings, as_trace, limited, ordered, read_corpus, shortened
from edgespec.errors import ConfigError
from predictor.costs import CostTable
from predictor.features import RECENT
from predictor.traces import TraceDraft, TraceWriter
from tests.bench.simulation.made import COSTS, FakeRanker, folder, header, text
from tests.support import traces


def test_free_drafts_have_the_level_of_their_confidence() -> None:
    trace = as_trace(text(0), header())
    assert set(trace.levels) == {"words"}
    assert trace.levels["words"][:4].tolist() == [6, 0, 0, 6]  # 200/255 = 0.78


def test_a_shortened_text_is_what_recording_a_shorter_answer_gives() -> None:
    whole = text(1)
    answer = whole.answer[:20]
    again = shortened(as_trace(whole, header()), 20)
    left = np.arange(19, 0, -1)
    assert again.accepts.shape == (3, 19)
    assert again.accepts.tolist() == np.minimum(whole.accepts[:, :19], left).tolist()
    again.__post_init__()
    cut = dataclasses.replace(
        whole, answer=answer, accepts=again.accepts, lookup_level=again.lookup_level,
        lookup_accepts=again.lookup_accepts, confidences=again.confidences, hidden=whole.hidden[:-20],
    )  # fmt: skip
    cut.check(header())  # as strict as reading traces
    long = as_trace(whole, header())
    assert shortened(long, 400) is long


def test_orders_and_limits(tmp_path: Path) -> None:
    made = read_corpus([folder(tmp_path / "a", 8)], ranker="off").texts
    assert [t.domain for t in ordered(made, "interleaved")[:4]] == ["left", "right", "left", "right"]
    assert ordered(made, "file") == made
    shuffled = ordered(made, "shuffled", 1)
    assert shuffled != made
    assert sorted(t.name for t in shuffled) == sorted(t.name for t in made)
    assert ordered(made, "shuffled", 1) == shuffled
    some = limited(made, 2)
    assert [t.domain for t in some].count("left") == [t.domain for t in some].count("right") == 2
    assert limited(made, None) == made
    assert limited(made, 99) == made


def test_texts_of_several_folders_are_taken_once(tmp_path: Path) -> None:
    corpus = read_corpus([folder(tmp_path / "a", 3), folder(tmp_path / "b", 5)], ranker="off")
    assert len(corpus.texts) == 5
    assert corpus.weighted == ("left", "right")
    assert corpus.free == {"words"}


def test_texts_that_the_ranker_was_made_with_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, seen = folder(tmp_path / "a", 4), [text(0).key[:8], text(1).key[:8]]
    ranker = FakeRanker()
    ranker.info = dataclasses.make_dataclass("Info", ["training"])({"seen": "".join(seen)})  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "_ranker", lambda *_: ranker)
    corpus = read_corpus([where])
    assert (len(corpus.texts), corpus.seen) == (2, 2)
    assert len(read_corpus([where], all_texts=True).texts) == 4
    ranker.info.training["seen"] = "".join(text(seed).key[:8] for seed in range(4))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="--all-texts"):
        read_corpus([where])


def test_the_ranker_sees_what_a_live_run_would_show_it() -> None:
    ranker, whole = FakeRanker(), text(0)
    rankings = Rankings(ranker)  # type: ignore[arg-type]
    rankings.learn(whole, header())
    trace = as_trace(whole, header())
    rankings(trace, 0, {})
    rankings(trace, 7, {"right": 0.25, "words": 1.0})
    rankings(trace, 7, {"right": 0.25, "words": 1.0})  # is known
    assert len(ranker.asked) == 2
    live = ranker.features()
    live.begin(whole.prompt.tolist())
    assert np.array_equal(ranker.asked[0], live.vector(None, None, {}))
    live.push(whole.answer[:7].tolist())
    read = len(whole.hidden) - (len(whole.answer) - 1) + 6  # rows of the prompt that were kept, and six tokens
    rows = whole.hidden[:read].astype(np.float32)[-RECENT:]
    assert np.allclose(ranker.asked[1], live.vector(rows, whole.prompt_hidden, {"right": 0.25}), atol=1e-6)


@pytest.mark.parametrize(("changes", "message"), [({"confidences": False}, "confidences"), ({"stride": 2}, "stride")])
def test_traces_that_rounds_cannot_be_made_of_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_corpus([folder(tmp_path / "a", 2, **changes)], ranker="off")


def test_folders_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    other = [dataclasses.replace(draft, fingerprint=traces.sha("new")) for draft in header().drafts]
    assert isinstance(other[0], TraceDraft)
    with pytest.raises(ConfigError, match=r"b was recorded with other drafts than .*a"):
        read_corpus([folder(tmp_path / "a", 2), folder(tmp_path / "b", 2, drafts=tuple(other))], ranker="off")
    with pytest.raises(ConfigError, match="nothing"):
        read_corpus([tmp_path / "nothing"], ranker="off")


def test_drafts_that_are_left_out_were_never_there(tmp_path: Path) -> None:
    """As traces in which only the others were recorded."""
    both = folder(tmp_path / "both", 6)
    corpus = read_corpus([both], drafts=["right"], ranker="off")
    alone = header(drafts=header().drafts[1:2])
    writer = TraceWriter(tmp_path / "alone", alone)
    for seed in range(6):
        whole = text(seed)
        confidences = None if whole.confidences is None else whole.confidences[1:2]
        writer.add(dataclasses.replace(whole, accepts=whole.accepts[1:2], confidences=confidences))
    expected = read_corpus([tmp_path / "alone"], ranker="off")
    assert corpus.header == expected.header
    assert corpus.left_out == ("left", "words")
    assert not corpus.free
    costs = CostTable.from_json({**COSTS, "loads": COSTS["load_seconds"]})
    for policy in ("edgespec", "memspec@3", "oracle-dynamic", "static:right@3"):
        setting = Setting(policy, resident=1)
        found, wanted = simulate(Base(corpus, costs), setting), simulate(Base(expected, costs), setting)
        assert found == wanted
        assert "left" not in found.share
    everything = read_corpus([both], ranker="off")
    assert simulate(Base(everything, costs), Setting("edgespec", resident=1)) != found


def test_drafts_come_in_the_order_in_which_they_are_named(tmp_path: Path) -> None:
    where = folder(tmp_path / "a", 2)
    whole, turned = read_corpus([where], ranker="off"), read_corpus([where], drafts=["words", "right"], ranker="off")
    assert (turned.weighted, turned.free, turned.left_out) == (("right",), {"words"}, ("left",))
    for before, after in zip(whole.texts, turned.texts):
        assert before.confidences is not None
        assert after.confidences is not None
        assert np.array_equal(after.accepts, before.accepts[[2, 1]])
        assert np.array_equal(after.confidences, before.confidences[[2, 1]])
        assert np.array_equal(after.levels["words"], before.levels["words"])
    assert read_corpus([where], drafts=["ngram", "left"], ranker="off").weighted == ("left",)


def test_the_ranker_answers_for_the_drafts_that_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def find(*arguments: object) -> tuple[None, list[str]]:
        asked.append(arguments[-1])
        return None, []

    monkeypatch.setattr(module, "find", find)
    read_corpus([folder(tmp_path / "a", 2)], drafts=["right", "words"])
    assert asked == [{"right": traces.sha("right")}]


@pytest.mark.parametrize(
    ("drafts", "message"),
    [
        (["rigth"], "'rigth' was not recorded; did you mean right"),
        (["x"], "'x' was not recorded; known are left, right, words"),
        (["left", "right", "left"], "left twice"),
        (["words"], "no draft with weights"),
        (["ngram"], "no draft with weights"),
    ],
)
def test_drafts_that_cannot_be_replayed_are_named(tmp_path: Path, drafts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_corpus([folder(tmp_path / "a", 2)], drafts=drafts, ranker="off")
