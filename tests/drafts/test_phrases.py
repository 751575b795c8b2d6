"""Tables of phrases: what is found in them, and that a draft of one is used as the others are."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafts import zoo
from drafts.base import Choose, FloatArray
from drafts.evaluate import LookupFirst, Trajectory, score
from drafts.ngram import NgramDraft
from drafts.phrases import FILE_NAME, LEVELS, PhraseDraft, PhraseSession, step
from drafts.recording import record
from edgespec.cli.main import main
from edgespec.decoding.session import DraftStatus
from edgespec.evaluation.document import draft_entry
from edgespec.evaluation.run import with_hybrids
from predictor.planner import _PRIORS, AutoPlanner, FixedPlanner
from tests.support.draft_sets import edit, facts_of, write_draft
from tests.support.phrases import SOME, Phrases, draft_of, key_of, table_of, write_phrases
from tests.support.scripted import PROMPT, TOKENS, ToyDecoder, oracle, plain_greedy, run, session
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import GREEDY, QUESTION, SHAPE, load, plain


def never(row: FloatArray, proposed: Sequence[int]) -> tuple[int, FloatArray | None]:
    raise AssertionError("a table has no logits")


CHOOSE: Any = never


# What is found


def test_hashes_of_arrays_are_those_of_numbers() -> None:
    rng = random.Random(0)
    before = [0, 1, (1 << 64) - 1, *(rng.randrange(1 << 64) for _ in range(100))]
    tokens = [0, 49151, 1, *(rng.randrange(1 << 24) for _ in range(100))]
    made = step(np.array(before, np.uint64), np.array(tokens, np.uint64))
    assert made.dtype == np.uint64
    assert made.tolist() == [step(b, t) for b, t in zip(before, tokens)]
    grams = [gram for size in (1, 2, 3) for gram in np.ndindex(*(20,) * size)]
    assert len({key_of(gram) for gram in grams}) == len(grams)  # order and length count, token 0 too


def test_the_longest_known_phrase_decides() -> None:
    draft = draft_of(SOME)
    for text, found in (
        ([1, 9, 4, 5], (8, 255)),
        ([1, 1, 4, 5], (7, 200)),
        ([4, 5], (7, 200)),
        ([1, 5], (6, 150)),
        ([5], (6, 150)),
        ([5, 1], None),
        ([], None),
    ):
        assert draft.find(text) == found


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_equals_the_brute_force(data: st.DataObject) -> None:
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    sizes = data.draw(st.sampled_from([(1,), (2,), (1, 2, 3), (2, 4), (3, 5, 8)]))
    known = {
        tuple(rng.randrange(3) for _ in range(rng.choice(sizes))): (rng.randrange(4), rng.randrange(1, 256))
        for _ in range(rng.randrange(1, 30))
    }
    session = draft_of(known, sizes).open()
    text: list[int] = []
    for _ in range(12):
        if text and rng.random() < 0.3:
            length = rng.randrange(len(text))
            session.crop(length)
            del text[length:]
        text += [rng.randrange(3) for _ in range(rng.randrange(1, 4))]

        def following(text: list[int]) -> tuple[int, int] | None:
            return next((known[tuple(text[-n:])] for n in reversed(sizes) if tuple(text[-n:]) in known), None)

        found, guess = following(text), list(text)
        assert session.level(text) == (0 if found is None else LEVELS[found[1]])
        while len(guess) < len(text) + 5 and (found := following(guess)):
            guess.append(found[0])
        assert session.propose(text, 5, CHOOSE).tokens == guess[len(text) :]


def test_a_block_is_a_chain_of_look_ups() -> None:
    draft = draft_of(SOME)
    proposal = draft.open().propose([9, 4], 8, CHOOSE)
    assert proposal.tokens == [5, 8]  # (9 4) has no entry of its own; 8 after (9 4 5) ends it
    assert proposal.rows == [None, None]
    assert proposal.confidences == [80 / 255, 1.0]
    assert draft.open().propose([5, 7], 5, CHOOSE).tokens == [4, 5, 7, 4, 5]
    assert draft.open().propose([5, 7], 2, CHOOSE).tokens == [4, 5]
    nothing = draft.open().propose([1], 3, CHOOSE)
    assert (nothing.tokens, nothing.rows, nothing.confidences) == ([], [], [])


def test_the_floor_ends_a_block_before_the_unlikely_token() -> None:
    session = draft_of({(1,): (2, 204), (2,): (3, 204), (3,): (4, 204)}).open()  # 0.8, 0.64, 0.512
    lengths = [len(session.propose([1], 3, CHOOSE, floor=floor)) for floor in (0, 0.51, 0.52, 0.63, 0.65, 0.81)]
    assert lengths == [3, 3, 2, 2, 1, 0]


def test_a_crop_that_is_forgotten_shows() -> None:
    # The mutation: without it the text of the same length would be taken for the one before.
    session = draft_of(SOME).open()
    assert session.level([1, 4]) > 0
    session.crop(1)
    assert session.level([1, 1]) == 0
    assert session.propose([1, 1], 2, CHOOSE).tokens == []


def test_proposing_looks_up_only_what_level_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    draft, texts = draft_of(SOME), []
    find = draft.find
    monkeypatch.setattr(draft, "find", lambda text: texts.append(list(text)) or find(text))
    session = draft.open()
    for _ in range(3):
        session.level([1, 9, 4, 5])
    assert session.propose([1, 9, 4, 5], 1, CHOOSE).tokens == [8]
    assert texts == [[1, 9, 4, 5]]


def test_levels_rise_with_confidence_and_mean_what_the_planner_assumes() -> None:
    assert list(LEVELS) == sorted(LEVELS)
    assert len(LEVELS) == 256
    assert set(LEVELS) == set(range(2, len(_PRIORS)))
    for confidence in range(60, 255):  # entries below 0.2 are rare, at the upper end the guess is meant to be careful
        prior = _PRIORS[LEVELS[confidence]]
        assert abs(min(confidence / 255, 0.75) - prior) < 0.1


def test_a_closed_draft_holds_nothing_and_finds_nothing() -> None:
    draft = draft_of(SOME)
    session = draft.open()
    session.close()
    assert session.level([4]) > 0
    draft.close()
    assert draft.nbytes == 0
    assert session.level([4, 4]) == 0


# In rounds


def learned(text: Sequence[int], confidence: int = 230) -> Phrases:
    """A table that knows two of three places of a text, and one more thing that is wrong."""
    known = {tuple(text[at - 3 : at]): (text[at], confidence) for at in range(3, len(text)) if at % 3}
    return {**known, tuple(text[9:12]): ((text[12] + 1) % TOKENS, 60)}


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_the_text_is_the_plain_one(gamma: int) -> None:
    target = ToyDecoder()
    text = plain_greedy(target, PROMPT, 30)
    draft = draft_of(learned([*PROMPT, *text]))
    made = session(target, [draft], gamma, eos_ids=())
    first = run(made, PROMPT, max_new_tokens=30)
    assert list(first.token_ids) == text
    assert first.stats.accepted_tokens > 0
    assert 0 < first.stats.accepted_tokens < first.stats.proposed_tokens  # one is wrong
    again = run(made, [*PROMPT, *text[:7]], max_new_tokens=23)  # after a cut in the middle
    assert list(again.token_ids) == text[7:]


def test_it_costs_nothing_to_ask_so_the_planner_scores_it_in_every_round() -> None:
    target = ToyDecoder()
    text = plain_greedy(target, PROMPT, 60)
    whole = [*PROMPT, *text]
    wrong = {tuple(whole[at - 3 : at]): ((whole[at] + 1) % TOKENS, 120) for at in range(3, len(whole))}
    assert DraftStatus(NgramDraft()).free
    assert not DraftStatus(oracle(whole)).free
    planner = AutoPlanner()
    result = run(session(target, [draft_of(wrong)], planner=planner, eos_ids=()), PROMPT, max_new_tokens=60)
    assert list(result.token_ids) == text
    assert result.stats.draft_share["plain"] > 50  # it is hardly ever used, and known better in every round
    assert planner._arm("phrases", LEVELS[120]).rates()[0] < 0.05


def test_the_planners_floor_reaches_it() -> None:
    floors: list[float] = []

    class Seen(PhraseDraft):
        def open(self, states: Any = None) -> PhraseSession:
            return _Seen(self)

    class _Seen(PhraseSession):
        def propose(self, tokens: Sequence[int], gamma: int, choose: Choose, *, floor: float = 0.0):
            floors.append(floor)
            return super().propose(tokens, gamma, choose, floor=floor)

    target = ToyDecoder()
    text = plain_greedy(target, PROMPT, 30)
    draft = Seen("phrases", table_of(learned([*PROMPT, *text])))
    run(session(target, [draft], planner=AutoPlanner(), eos_ids=()), PROMPT, max_new_tokens=30)
    assert any(floor > 0 for floor in floors)


# In evaluations


@pytest.fixture(scope="module")
def recorded() -> Trajectory:
    return record(ToyDecoder(sharpness=3.0), [5, 6, 7, 8, 5, 6, 7, 9, 9, 9], 60, token_count=TOKENS)


def whole(recorded: Trajectory) -> list[int]:
    return [*recorded.prompt, *recorded.answer]


@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_lookup_then_phrases_is_what_an_engine_with_both_does(recorded: Trajectory, gamma: int) -> None:
    draft = draft_of(learned(whole(recorded)))
    drafts = [NgramDraft(), draft]
    made = session(ToyDecoder(sharpness=3.0), drafts, planner=FixedPlanner(None, gamma), eos_ids=())
    live = run(made, list(recorded.prompt), max_new_tokens=60)
    hybrid = LookupFirst(draft)
    found = score(hybrid, recorded, gamma)
    assert hybrid.name == "lookup+phrases"
    assert live.stats.draft_share["ngram"] > 0
    assert live.stats.draft_share["phrases"] > 0
    assert (found.rounds, found.accepted) == (live.stats.rounds, live.stats.accepted_tokens)


def test_phrases_go_before_a_model_only_where_they_are_sure(recorded: Trajectory) -> None:
    text = whole(recorded)
    model = oracle(text)
    wrong = {ngram: ((token + 1) % TOKENS, confidence) for ngram, (token, confidence) in learned(text, 150).items()}
    level = LEVELS[150]
    rows = {least: LookupFirst(model, phrases=draft_of(wrong), least=least) for least in (level, level + 1)}
    assert rows[level].name == "lookup+phrases+oracle"
    taken, left = (score(rows[least], recorded, 3) for least in (level, level + 1))
    assert score(LookupFirst(model), recorded, 3).accepted == left.accepted
    assert taken.accepted < left.accepted
    assert rows[level].nbytes == draft_of(wrong).nbytes + model.nbytes


def test_rows_and_their_parts_are_named() -> None:
    lookup, table, other = NgramDraft(), draft_of(SOME), draft_of(SOME, name="more")
    model = oracle([1, 2, 3])
    rows = with_hybrids([model, lookup, table, other])
    assert [row.name for row in rows] == [
        "plain",
        "ngram",
        "oracle",
        "phrases",
        "more",
        "lookup+oracle",
        "lookup+phrases",
        "lookup+more",
        "lookup+phrases+oracle",
    ]
    assert [row.name for row in with_hybrids([model, table])] == ["plain", "oracle", "phrases"]
    assert draft_entry(rows[-1], "code", {}, None)["front"] == [
        {"draft": "ngram", "least_level": 1},
        {"draft": "phrases", "least_level": 6},
    ]
    assert draft_entry(model, "code", {}, None)["front"] == []


# As a draft of a set


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(zoo, "BUILT_IN", tmp_path / "shipped")
    return write_tiny(tmp_path / "models" / "tiny", **SHAPE)


def test_an_engine_takes_it_from_a_set_behind_the_models(target: Path, tmp_path: Path) -> None:
    folder = tmp_path / "home" / "drafts" / "tiny"
    with load(target, drafts=None) as engine:
        text = [*engine.encode(QUESTION), *plain(engine, QUESTION)]
    write_phrases(folder / "all", target, {tuple(text[at - 2 : at]): (text[at], 200) for at in range(2, len(text))})
    write_draft(folder / "code", target)
    with load(target) as engine:
        assert engine.drafts == dict.fromkeys(("ngram", "code", "all"), "active")
        info = engine.draft_infos()[-1]
        assert (info.kind, info.domain) == ("phrases", "general")
        assert info.nbytes == 13 * len({tuple(text[at - 2 : at]) for at in range(2, len(text))})
        assert engine._target.planned["draft all"] > info.nbytes
        engine.use_draft("all")
        engine.gamma = 3
        result = engine.generate(QUESTION, GREEDY)
        assert list(result.token_ids) == text[-GREEDY.max_new_tokens :]
        assert result.stats.draft_share["all"] > 0


def test_what_was_measured_of_it_does_not_replace_what_its_levels_say(target: Path, tmp_path: Path) -> None:
    from drafts.manifest import Acceptance

    folder = write_phrases(tmp_path / "phrases", target, acceptance={"code": Acceptance(0.2, 0.2, 0.1, 0.3, 9)})
    with load(target, drafts=[str(folder)]) as engine:
        assert [engine._held.policy._arm("phrases", level).rates()[0] for level in (2, 6)] == pytest.approx([0.3, 0.75])


def test_verify_looks_into_it(target: Path, tmp_path: Path) -> None:
    folder, facts = write_phrases(tmp_path / "phrases", target), facts_of(target)
    findings = list(zoo.verify(zoo.read_entry(folder), facts))
    assert [(f.check, f.ok) for f in findings] == [(c, True) for c in ("manifest", "files", "target", "weights")]
    assert findings[-1].detail == "5 phrases of up to 3 tokens"
    # A table whose hashes are right and whose tokens the target does not have.
    edit(folder, "vocab_size = 288", "vocab_size = 8")
    smaller = dataclasses.replace(facts, vocab_size=8)
    assert "proposes token 8" in list(zoo.verify(zoo.read_entry(folder), smaller))[-1].detail
    edit(folder, FILE_NAME, "other.safetensors")
    (folder / FILE_NAME).rename(folder / "other.safetensors")
    assert "lists no phrases.safetensors" in list(zoo.verify(zoo.read_entry(folder), smaller))[-1].detail


@pytest.mark.parametrize("knows", [True, False])
def test_the_live_check_of_verify(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], knows: bool
) -> None:
    known = {(token,): (token, 200) for token in range(288)} if knows else {(1, 2, 3): (4, 200)}
    folder = write_phrases(tmp_path / "phrases", target, known)
    flags = ["--threads", "1", "--weight-format", "float32"]
    assert main(["drafts", "verify", str(folder), "-m", str(target), *flags]) == 0
    live = next(line for line in capsys.readouterr().out.splitlines() if "live:" in line)
    assert "FAILED" not in live
    assert ("proposed tokens accepted" in live) == knows
    assert ("nothing was proposed" in live) != knows


def test_a_table_for_another_target_is_refused(target: Path, tmp_path: Path) -> None:
    folder = write_phrases(tmp_path / "phrases", target)
    other = write_tiny(tmp_path / "models" / "other", seed=5, **SHAPE)
    with load(other, drafts=[str(folder)]) as engine:
        assert "made for another target, tiny" in engine.drafts["phrases"]
        assert engine.generate(QUESTION, GREEDY).token_ids == plain(engine, QUESTION)
