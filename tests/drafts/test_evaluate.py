"""Replayed rounds must be those of a live run; figures must be what they say they are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from drafts.base import InvalidLogits, Proposal
from drafts.evaluate import (
    FirstToken,
    GreedyChoice,
    LookupFirst,
    Plain,
    Score,
    Trajectory,
    calibration_error,
    coverage,
    first_token,
    score,
)
from drafts.figures import Bootstrap, PromptScores, difference, figures, predicted_speedup, summary
from drafts.ngram import NgramDraft
from drafts.recording import record
from edgespec.errors import DraftError, ModelError
from predictor.planner import FixedPlanner
from tests.support.scripted import (
    DRAFTERS,
    PROMPT,
    TOKENS,
    ScriptedDraft,
    TableDecoder,
    ToyDecoder,
    anti,
    drafter,
    empty,
    failing,
    mixed,
    oracle,
    plain_greedy,
    run,
    self_draft,
    session,
)

GAMMAS = (1, 2, 3, 5, 8)


def trajectory(count: int = 40, prompt: list[int] = PROMPT, eos: int | None = None) -> Trajectory:
    return record(ToyDecoder(), prompt, count, eos_ids=() if eos is None else (eos,), token_count=TOKENS)


def whole(trajectory: Trajectory) -> list[int]:
    return [*trajectory.prompt, *trajectory.answer]


class TestReplay:
    def test_an_oracle_is_always_right(self) -> None:
        recorded = trajectory(41)
        found = score(oracle(whole(recorded)), recorded, 3)
        assert (found.rounds, found.emitted, found.accepted) == (10, 40, 30)
        assert found.tries == found.hits == [10, 10, 10]
        assert found.widths == {4: 10}
        assert (found.asked, found.short) == (10, 0)

    def test_an_anti_draft_never_is(self) -> None:
        recorded = trajectory(41)
        found = score(anti(whole(recorded)), recorded, 3)
        assert (found.rounds, found.accepted, found.emitted) == (40, 0, 40)
        assert found.tries[0] == 39  # in the last round there is room for the target's own token alone
        assert sum(found.hits) == 0
        assert found.tries[1:] == [0, 0]

    def test_half_right_is_half_exactly(self) -> None:
        recorded = trajectory(41)
        half = mixed(whole(recorded), lambda at: at % 2 == 0)
        assert first_token(half, recorded) == FirstToken(40, 40, 20)
        found = score(half, recorded, 2)
        # One of every two tokens is wrong: each round gives one right guess and the target's own token.
        assert (found.rounds, found.accepted) == (20, 20)
        assert found.hits[0] == found.tries[0] == 20

    def test_the_target_itself_is_always_accepted(self) -> None:
        recorded = trajectory(40)
        for gamma in GAMMAS:
            found = score(self_draft(ToyDecoder()), recorded, gamma)
            assert found.hits == found.tries
            assert found.accepted == sum(found.hits) > 0

    def test_plain_is_one_token_a_round(self) -> None:
        found = score(Plain(), trajectory(40), 5)
        assert (found.rounds, found.emitted, found.accepted, found.proposed) == (39, 39, 0, 0)
        assert found.widths == {1: 39}
        assert score(oracle(whole(trajectory(40))), trajectory(40), 0).widths == {1: 39}

    def test_an_answer_of_one_token_has_no_round(self) -> None:
        recorded = trajectory(1)
        assert score(oracle(whole(recorded)), recorded, 3) == Score()
        assert first_token(oracle(whole(recorded)), recorded) == FirstToken()

    def test_short_blocks_and_empty_ones_are_counted(self) -> None:
        recorded = trajectory(40)
        found = score(empty(), recorded, 3)
        assert (found.short, found.asked, found.rounds) == (38, 38, 39)
        unable = ScriptedDraft(lambda t, gamma: [1], level=0)
        assert score(unable, recorded, 3).asked == 0
        assert unable.calls == []

    def test_ids_that_are_no_tokens_cut_the_block(self) -> None:
        recorded = trajectory(40)
        for bad in (-1, TOKENS, 1 << 40):
            text = whole(recorded)
            draft = ScriptedDraft(lambda t, gamma, text=text, bad=bad: [*text[len(t) : len(t) + 1], bad, 3][:gamma])
            found = score(draft, recorded, 3)
            assert found.widths.keys() <= {1, 2}
            assert found.hits[0] == found.tries[0] > 0

    def test_nothing_of_the_future_reaches_the_draft(self) -> None:
        recorded = trajectory(40)
        seen: list[list[int]] = []

        def script(tokens, gamma):
            seen.append(list(tokens))
            return [0]

        score(ScriptedDraft(script), recorded, 2)
        first_token(ScriptedDraft(script), recorded)
        assert all(tokens == whole(recorded)[: len(tokens)] for tokens in seen)
        assert max(map(len, seen)) < len(whole(recorded))

    def test_what_a_draft_raises_is_passed_on(self) -> None:
        with pytest.raises(ZeroDivisionError):
            score(failing(ZeroDivisionError()), trajectory(), 3)

    def test_confidences_are_paired_with_the_tries(self) -> None:
        recorded = trajectory(11)
        text = whole(recorded)

        class Sure(ScriptedDraft):
            def propose(self, tokens, gamma, choose, *, floor=0.0):
                guess = [*text[len(tokens) : len(tokens) + 1], TOKENS - 1, 3][:gamma]
                return Proposal(guess, [None] * len(guess), [0.9, 0.5, 0.1][: len(guess)])

        found = score(Sure(lambda t, g: []), recorded, 3)
        assert found.pairs[:2] == [(0.9, True), (0.5, False)]
        assert 0.1 not in {confidence for confidence, _ in found.pairs}
        assert len(found.pairs) == sum(found.tries)

    def test_the_floor_reaches_the_draft(self) -> None:
        floors = set()

        class Asked(ScriptedDraft):
            def propose(self, tokens, gamma, choose, *, floor=0.0):
                floors.add(floor)
                return Proposal()

        score(Asked(lambda t, g: []), trajectory(5), 3, floor=0.3)
        score(LookupFirst(Asked(lambda t, g: [])), trajectory(5), 3, floor=0.2)
        assert floors == {0.3, 0.2}

    def test_a_draft_that_reads_states_needs_them(self) -> None:
        recorded = replace(trajectory(5), hidden=None)
        draft = ScriptedDraft(lambda t, g: [])
        draft.reads_hidden = True
        with pytest.raises(DraftError, match="reads hidden states"):
            score(draft, recorded, 3)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("gamma", GAMMAS)
def test_rounds_are_those_of_a_live_run(kind: str, gamma: int) -> None:
    """Also where the answer ends by its limit or at an end token, in every place of a block."""
    target = ToyDecoder()
    prompt = [5, 6, 7, 8, 5, 6, 7]
    text = plain_greedy(target, prompt, 24)
    for count in (2, 3, 7, 24):
        for end in (None, *dict.fromkeys(text[:12])):
            recorded = trajectory(count, prompt, end)
            eos = () if end is None else (end,)
            live_session = session(target, [drafter(kind, target, [*prompt, *text])], gamma, eos_ids=eos)
            live = run(live_session, prompt, max_new_tokens=count)
            found = score(drafter(kind, target, [*prompt, *text]), recorded, gamma)
            assert live.token_ids == recorded.answer
            assert (found.rounds, found.accepted) == (live.stats.rounds, live.stats.accepted_tokens)
            by_place = [hit / tried for hit, tried in zip(found.hits, found.tries) if tried]
            assert by_place == live.stats.acceptance_by_position
            assert found.emitted == live.stats.new_tokens - 1


@pytest.mark.parametrize("gamma", GAMMAS)
def test_the_hybrid_is_what_an_engine_with_both_drafts_does(gamma: int) -> None:
    target = ToyDecoder(sharpness=3.0)
    prompt = [5, 6, 7, 8, 5, 6, 7, 9, 9, 9]
    recorded = record(target, prompt, 60, token_count=TOKENS)
    text = whole(recorded)
    model = mixed(text, lambda at: at % 5 in (1, 2))
    live_session = session(target, [NgramDraft(), model], planner=FixedPlanner(None, gamma), eos_ids=())
    live = run(live_session, prompt, max_new_tokens=60)
    found = score(LookupFirst(mixed(text, lambda at: at % 5 in (1, 2))), recorded, gamma)
    assert live.stats.draft_share["ngram"] > 0
    assert live.stats.draft_share["mixed"] > 0
    assert (found.rounds, found.accepted) == (live.stats.rounds, live.stats.accepted_tokens)


def test_the_hybrid_is_its_draft_where_lookup_has_nothing() -> None:
    recorded = Trajectory(tuple(range(20, 40)), tuple(range(2, 20)), 18, TOKENS)
    text = whole(recorded)
    assert score(LookupFirst(oracle(text)), recorded, 3).accepted == score(oracle(text), recorded, 3).accepted > 0
    assert LookupFirst(oracle(text)).name == "lookup+oracle"


class TestRecord:
    def test_it_is_the_plain_greedy_answer(self) -> None:
        assert list(trajectory(40).answer) == plain_greedy(ToyDecoder(), PROMPT, 40)

    def test_padding_rows_are_never_chosen(self) -> None:
        decoder = ToyDecoder(80)
        assert list(record(decoder, PROMPT, 30, token_count=40).answer) == plain_greedy(decoder, PROMPT, 30, tokens=40)

    def test_it_ends_with_the_end_token(self) -> None:
        text = plain_greedy(ToyDecoder(), PROMPT, 20)
        recorded = trajectory(20, eos=text[5])
        assert list(recorded.answer) == text[: text.index(text[5]) + 1]
        assert recorded.limit == 20

    def test_a_target_without_states_has_none(self) -> None:
        recorded = record(_Blind(ToyDecoder()), PROMPT, 5)
        assert recorded.hidden is None

    def test_a_damaged_target_is_named(self) -> None:
        table = np.full((TOKENS, TOKENS), np.nan)
        with pytest.raises(ModelError, match="The target produced a logits row with NaN"):
            record(TableDecoder(table), PROMPT, 5)

    def test_impossible_recordings_are_refused(self) -> None:
        with pytest.raises(ValueError):
            Trajectory((), (1,), 1, 5)
        with pytest.raises(ValueError):
            Trajectory((1,), (1, 2), 1, 5)
        with pytest.raises(ValueError):
            Trajectory((1, 2), (1, 2), 2, 5, np.zeros((2, 4), np.float32), 0)


class _Blind:
    """A target that gives no hidden states."""

    def __init__(self, inner: ToyDecoder) -> None:
        self.spec = inner.spec
        self.new_cache = inner.new_cache
        self._inner = inner

    def forward(self, tokens, cache, *, logits=None, hidden=False):
        return self._inner.forward(tokens, cache, logits=logits)


class TestGreedyChoice:
    def test_the_lowest_of_equals_among_tokens(self) -> None:
        choose = GreedyChoice(4)
        assert choose.argmax
        assert choose(np.array([0, 2, 2, 1, 9], np.float32), ()) == (1, None)

    @pytest.mark.parametrize("row", [[np.nan, 1], [np.inf, 1], [-np.inf, -np.inf], []])
    def test_rows_that_cannot_be_used(self, row: list[float]) -> None:
        with pytest.raises(InvalidLogits):
            GreedyChoice(4)(np.array(row, np.float32), ())


class TestCalibration:
    def test_perfect_and_hopeless(self) -> None:
        assert calibration_error([(1.0, True)] * 5 + [(0.0, False)] * 5) == 0
        assert calibration_error([(1.0, False), (0.0, True)]) == 1

    def test_by_hand(self) -> None:
        pairs = [(0.75, True), (0.75, False), (0.15, False), (0.15, False)]
        assert calibration_error(pairs) == pytest.approx((2 * 0.25 + 2 * 0.15) / 4)

    def test_nothing_and_nonsense(self) -> None:
        assert calibration_error([]) is None
        with pytest.raises(ValueError):
            calibration_error([(1.5, True)])


def test_coverage_counts_what_could_be_asked_for() -> None:
    recorded = Trajectory((1, 2), (9, 3, 4, 3), 8, 60)  # the first token of an answer is never proposed
    assert coverage(np.array([3, 9]), [recorded, recorded]) == (4, 6)


def made(accepted: int, rounds: int, gamma: int = 3, **changes) -> PromptScores:
    counters = {"widths": {gamma + 1: rounds}, "emitted": accepted + rounds, "proposed": gamma * rounds, **changes}
    found = Score(rounds=rounds, accepted=accepted, tries=[rounds], hits=[min(accepted, rounds)])
    for name, value in counters.items():
        setattr(found, name, value)
    return PromptScores({gamma: found}, FirstToken(10, 10, accepted % 11))


class TestFigures:
    def test_ratios_of_sums(self) -> None:
        found = figures([made(10, 10), made(0, 30)], Bootstrap("code", 2, 0), None)
        assert found["by_gamma"]["3"]["accepted_per_round"] == 0.25
        assert found["by_gamma"]["3"]["tokens_per_round"] == 1.25
        assert found["by_gamma"]["3"]["predicted_speedup"] is None
        assert found["best"] is None
        assert found["prompts"] == 2

    def test_the_interval_holds_the_truth_about_as_often_as_it_says(self) -> None:
        rng, inside = np.random.default_rng(0), 0
        for trial in range(200):
            scores = [made(int(rng.binomial(40, 0.3)), 40) for _ in range(30)]
            figure = figures(scores, Bootstrap("code", 30, trial, 500), None)["by_gamma"]["3"]
            inside += figure["low"] <= 0.3 <= figure["high"]
        assert 175 <= inside <= 200

    def test_the_same_seed_gives_the_same_interval(self) -> None:
        scores = [made(i, 20) for i in range(8)]
        one, same, other = (figures(scores, Bootstrap("code", 8, seed), None) for seed in (1, 1, 2))
        assert one == same
        assert one["by_gamma"]["3"]["low"] != other["by_gamma"]["3"]["low"]

    def test_a_few_prompts_have_no_interval(self) -> None:
        for count, known in ((1, False), (4, False), (5, True)):
            scores = [made(n, 10) for n in range(count)]
            figure = figures(scores, Bootstrap("code", count, 0), None)["by_gamma"]["3"]
            assert (figure["low"] is not None, figure["high"] is not None) == (known, known)

    def test_a_paired_difference_is_clearer_than_the_spread(self) -> None:
        rng = np.random.default_rng(1)
        base = [int(rng.integers(0, 80)) for _ in range(20)]
        others, mine = [made(b, 40) for b in base], [made(b + 4, 40) for b in base]
        found = difference(mine, others, 3, Bootstrap("code", 20, 0))
        assert found["difference"] == pytest.approx(0.1)
        assert found["low"] == pytest.approx(0.1) == found["high"]
        assert found["better_on"] == 20
        same = difference(mine, mine, 3, Bootstrap("code", 20, 0))
        assert (same["difference"], same["low"], same["high"], same["better_on"]) == (0, 0, 0, 0)

    def test_speed_by_hand(self) -> None:
        def verify(width: int) -> float:
            return 1.0 + 0.5 * (width - 1)

        score = made(20, 10).rounds[3]  # 30 tokens in 10 rounds of 4 wide: 25 s, and 30 draft tokens of 0.1 s
        assert predicted_speedup(score, 0.1, verify) == pytest.approx(30 / 28)
        assert predicted_speedup(score, 0.0, verify) == pytest.approx(30 / 25)

    def test_where_nothing_is_faster_the_best_gamma_is_none(self) -> None:
        slow = figures([made(1, 10), made(1, 10)], Bootstrap("code", 2, 0), lambda width: float(width))
        assert slow["best"] == {"gamma": 0, "speedup": 1.0}
        fast = figures([made(20, 10), made(20, 10)], Bootstrap("code", 2, 0), lambda width: 1.0)
        assert fast["best"] == {"gamma": 3, "speedup": 3.0}

    def test_seconds_are_the_median_prompt(self) -> None:
        scores = [made(1, 10, seconds=3.0), made(1, 10, seconds=6.0), made(1, 10, seconds=3000.0)]
        assert summary(scores)["seconds_per_token"] == {"3": 0.2}

    def test_prompts_without_rounds_do_not_break_it(self) -> None:
        nothing = PromptScores({3: Score()}, FirstToken())
        figure = figures([nothing, nothing], Bootstrap("code", 2, 0), lambda width: 1.0)
        assert figure["by_gamma"]["3"]["accepted_per_round"] is None
        assert figure["first_token"]["share"] is None
        assert figure["best"] is None
        both = difference([nothing, made(5, 5)], [nothing, made(4, 5)], 3, Bootstrap("code", 2, 0))
        assert both["difference"] == pytest.approx(0.2)

    def test_turns_of_a_prompt_add_up(self) -> None:
        total = PromptScores()
        total.add(PromptScores({3: Score(rounds=2, tries=[2], hits=[1])}, FirstToken(4, 4, 2), (3, 4)))
        total.add(PromptScores({3: Score(rounds=3, tries=[3, 1], hits=[1, 1])}, FirstToken(1, 1, 0), (1, 1)))
        assert total.rounds[3].rounds == 5
        assert (total.rounds[3].tries, total.rounds[3].hits) == ([5, 1], [2, 1])
        assert (total.first, total.covered) == (FirstToken(5, 5, 2), (4, 5))
