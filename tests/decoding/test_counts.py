"""What is counted: shares, rates, seconds, and who guessed what."""

from __future__ import annotations

import pytest

from drafts import NgramDraft
from edgespec.decoding.counts import Counts, Stamps, first_of
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.results import GenerationStats
from predictor import FixedPlanner
from predictor.planner import Plan
from tests.support.scripted import (
    PROMPT,
    ScheduledPlanner,
    ToyDecoder,
    anti,
    empty,
    mixed,
    oracle,
    run,
    self_draft,
    session,
)


@pytest.mark.parametrize("gamma", [1, 2, 3, 8])
def test_b178_shares_are_exact(text: list[int], gamma: int) -> None:
    count = 1 + 2 * (gamma + 1) * 2
    for kind, rate in ((oracle, 1.0), (anti, 0.0)):
        stats = run(session(None, [kind(text)], gamma), PROMPT, max_new_tokens=count).stats
        assert stats.acceptance_rate == rate
    # Wrong at every second position: with gamma 2 every round has one right and one wrong guess.
    half = mixed(text, lambda at: (at - len(PROMPT)) % 2 == 0)
    stats = run(session(None, [half], 2), PROMPT, max_new_tokens=22).stats
    assert (stats.acceptance_rate, stats.acceptance_by_position) == (0.5, [1.0, 0.0])
    assert (stats.rounds, stats.proposed_tokens, stats.accepted_tokens) == (11, 20, 10)  # the last one is plain
    assert stats.mean_tokens_per_round == 21 / 11


def test_every_counter_of_a_mixed_run(text: list[int]) -> None:
    planner = ScheduledPlanner([("a", 3), ("b", 2), (None, 0), ("a", 1), ("gone", 4), ("none", 2)])
    chat = session(None, [oracle(text, "a"), anti(text, "b"), empty("none")], planner=planner)
    stats = run(chat, PROMPT, max_new_tokens=21).stats
    # a3: 4 tokens, b2: 1, plain: 1, a1: 2, gone (unknown): 1, none (nothing proposed): 1; twice over is 20.
    assert stats.rounds == 12
    assert stats.new_tokens == 21
    assert stats.mean_tokens_per_round == 20 / 12
    assert stats.round_tokens == [4, 1, 1, 2, 1, 1] * 2
    assert stats.draft_share == {"a": 4, "b": 2, "none": 0, "plain": 6}
    assert stats.by_draft == {"a": (4, 4, 8, 8), "b": (2, 0, 4, 0)}  # blocks, first tokens, proposed, accepted
    assert stats.gamma_histogram == {3: 2, 2: 3, 0: 5, 1: 2}  # the last plan, none 2, is clipped to 0
    assert (stats.proposed_tokens, stats.accepted_tokens) == (12, 8)
    assert stats.acceptance_by_position == [4 / 6, 1.0, 1.0]
    assert stats.tries_by_position == [6, 2, 2]
    assert stats.switches == 4
    assert stats.fallback_share == 0, "to propose nothing is none: test_reading_all has those that are"
    assert stats.prompt_tokens == len(PROMPT)


def test_b188_the_draft_is_asked_for_the_planned_gamma_and_never_for_more_than_can_be_used(text: list[int]) -> None:
    draft = anti(text)
    run(session(None, [draft], 5), PROMPT, max_new_tokens=9)
    # After the first token 8 may follow; a round emits gamma + 1 at most, here always 1.
    assert [gamma for _, gamma in draft.calls] == [5, 5, 5, 4, 3, 2, 1]
    assert [length for length, _ in draft.calls] == [5, 6, 7, 8, 9, 10, 11]


def test_b175_parts_never_exceed_the_whole_and_rates_leave_prefill_out(text: list[int]) -> None:
    for drafts in ([], [oracle(text)], [NgramDraft(), self_draft(ToyDecoder())]):
        stats = run(
            session(None, drafts, planner=None if drafts else FixedPlanner(None, 0)), PROMPT, max_new_tokens=30
        ).stats
        parts = stats.predictor_seconds + stats.draft_seconds + stats.target_seconds + stats.bookkeeping_seconds
        assert 0 < parts <= stats.decode_seconds
        assert stats.tokens_per_second == 29 / stats.decode_seconds
        assert stats.prefill_tokens_per_second == 4 / stats.prefill_seconds
        assert stats.time_to_first_token_s >= stats.prefill_seconds


def test_the_clock_of_the_first_token_starts_with_the_request(monkeypatch: pytest.MonkeyPatch, text: list[int]) -> None:
    now = [0]

    def clock() -> int:
        now[0] += 1000
        return now[0]

    for module in ("round", "drafting"):
        monkeypatch.setattr(f"edgespec.decoding.{module}.perf_counter_ns", clock)
    generation = Generation(
        session(None, [oracle(text)], 3), PROMPT, SamplingParams(max_new_tokens=9), began_ns=-5_000_000
    )
    list(generation.deltas())
    stats = generation.stats
    assert stats.time_to_first_token_s == pytest.approx(5e-3, rel=0.01)
    # Two rounds of eight stamps each; the time between rounds belongs to decoding but to none of its parts.
    assert stats.decode_seconds == pytest.approx(16e-6)
    assert stats.target_seconds == stats.draft_seconds == pytest.approx(2e-6)


def test_one_token_and_none(text: list[int]) -> None:
    target = ToyDecoder()
    draft = oracle(text)
    chat = session(target, [draft], 5)
    one = run(chat, PROMPT, max_new_tokens=1)
    assert (one.token_ids, one.finish_reason, one.stats.rounds) == ((text[4],), "length", 0)
    assert one.stats.tokens_per_second == one.stats.mean_tokens_per_round == 0.0
    calls, before = len(target.calls), list(chat.tokens)
    none = run(chat, PROMPT, max_new_tokens=0)
    assert (none.token_ids, none.text, none.finish_reason) == ((), "", "length")
    assert len(target.calls) == calls
    assert draft.calls == []
    assert chat.tokens == before


def test_round_tokens_end_where_the_answer_ends(text: list[int]) -> None:
    chat = session(None, [oracle(text)], 3)
    answer = text[len(PROMPT) :]
    place = next(i for i in (2, 3, 5, 6, 7) if answer[i] not in answer[:i])  # not where a block ends anyway
    cut = run(chat, PROMPT, max_new_tokens=8, stop_token_ids=(answer[place],)).stats
    assert cut.round_tokens == ([4, place - 4] if place > 4 else [place])
    assert first_of([4, 4, 4], 6) == [4, 2]  # as when a stop string takes tokens back
    assert first_of([4, 4], 0) == []
    assert first_of([2], 5) == [2]


def test_tallies_of_drafts_have_what_is_in_the_answer() -> None:
    counts = Counts(["a", "b"], 4)
    stamps = Stamps(*[0] * 11)
    for draft, judged, stood in (("a", 3, 3), ("b", 2, 0), ("a", 2, 1)):
        counts.round(Plan(draft, 3), draft, judged, stood, stamps, emitted=stood + 1, fallback=False)
    whole = (None, "a", "a", "a", None, None, "a", None)
    assert counts.stats(whole).by_draft == {"a": (2, 2, 5, 4), "b": (1, 0, 2, 0)}
    # A stop string took all but the first two back; Ctrl-C came before the round of c was counted.
    for drafts, tallies in ((whole[:2], {"a": (2, 2, 2, 1)}), ((*whole, "c"), {"a": (2, 2, 5, 4), "c": (0, 0, 1, 1)})):
        stats = counts.stats(drafts)
        assert stats.by_draft == {**tallies, "b": (1, 0, 2, 0)}
        assert stats.accepted_tokens == sum(tally.accepted for tally in stats.by_draft.values())
        assert stats.proposed_tokens == sum(tally.proposed for tally in stats.by_draft.values())


def test_statistics_can_be_read_while_it_runs(text: list[int]) -> None:
    generation = Generation(session(None, [oracle(text)], 3), PROMPT, SamplingParams(max_new_tokens=30))
    assert generation.stats == GenerationStats(prompt_tokens=4, draft_share={"oracle": 0})
    seen = []
    while generation.step():
        seen.append((generation.stats.rounds, generation.stats.new_tokens))
    assert seen == [(i, 1 + 4 * i) for i in range(8)]
    snapshot = generation.stats
    snapshot.draft_share["oracle"] = 99
    assert generation.stats.draft_share == {"oracle": 7, "plain": 1}


# Who guessed what


def test_every_token_knows_who_guessed_it(text: list[int]) -> None:
    planner = ScheduledPlanner([("m", 3), ("o", 2)])
    chat = session(None, [mixed(text, lambda at: at == 7, "m"), oracle(text, "o")], planner=planner)
    generation = Generation(chat, PROMPT, SamplingParams(max_new_tokens=10))
    deltas = list(generation.deltas())
    assert generation.result.drafts == (None, "m", "m", None, "o", "o", None, "m", "m", None)
    # 4: first token; 5, 6 right, 7 corrected by m; 8, 9 right, 10 the bonus of o; 11, 12 right (clipped), 13 bonus.
    assert [(d.draft, d.accepted) for d in deltas if d.token_ids] == [(None, 0), ("m", 2), ("o", 2), ("m", 2)]
