"""One request: planning, cleaning, streaming, cancelling, traces."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from drafts import NgramDraft
from drafts.base import Proposal
from edgespec.decoding.drafting import clean
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.sampling import LogitsPipeline
from edgespec.errors import ModelError, ParameterError
from edgespec.telemetry.trace import Tracer
from predictor import AutoPlanner, CostTable
from predictor.planner import Candidate, Plan
from tests.support.scripted import (
    PROMPT,
    TOKENS,
    ScheduledPlanner,
    ScriptedDraft,
    ToyDecoder,
    anti,
    empty,
    failing,
    mixed,
    oracle,
    plain_greedy,
    run,
    self_draft,
    session,
    short,
)

# Plans


def test_gamma_zero_looks_at_no_draft(text: list[int]) -> None:
    class Untouchable:
        name, kind, nbytes = "x", "standalone", 0

        def open(self) -> Any:
            raise AssertionError("opened")

        def close(self) -> None:
            pass

    result = run(session(None, [Untouchable()], 0), PROMPT, max_new_tokens=20)
    assert list(result.token_ids) == text[4:24]
    assert result.stats.gamma_histogram == {0: 19}
    assert result.stats.draft_share == {"x": 0, "plain": 19}


def test_the_plan_is_made_before_the_tokens_it_is_for_exist(text: list[int]) -> None:
    """Invariant 1: the choice of draft and gamma never looks at the tokens being judged."""
    log: list[str] = []
    target = ToyDecoder()
    target.after = lambda: log.append("forward")
    chat = session(target)

    class Planner(ScheduledPlanner):
        def plan(self, candidates: Sequence[Candidate], limit: int) -> Plan:
            log.append("plan")
            assert chat.tokens == text[: len(chat.tokens)]
            assert len(chat.tokens) == chat.valid + 1
            return super().plan(candidates, limit)

    draft = oracle(text, "o")
    script = draft.script
    draft.script = lambda t, gamma: (log.append("propose"), script(t, gamma))[1]
    chat = session(target, [draft], planner=Planner([("o", 2)]))
    run(chat, PROMPT, max_new_tokens=10)
    assert log == ["forward"] + ["plan", "propose", "forward"] * 3


def test_the_planner_hears_what_happened(text: list[int]) -> None:
    planner = ScheduledPlanner([("m", 3), (None, 0), ("e", 2), ("f", 2)])
    drafts = [mixed(text, lambda at: at == 6, "m"), empty("e"), failing(RuntimeError("x"), "f")]
    run(session(None, drafts, planner=planner), PROMPT, max_new_tokens=7)
    seen = [(o.draft, o.level, o.drafted, o.proposed, o.accepted, o.width, o.caught_up) for o in planner.seen]
    assert seen[:4] == [
        ("m", 1, 3, 3, 1, 4, 5),
        (None, 0, 0, 0, 0, 1, 0),
        ("e", 1, 0, 1, 0, 1, 8),  # asked for nothing in return: as good as a wrong guess
        ("f", 1, 0, 1, 0, 1, 9),
    ]
    assert all(o.target_seconds > 0 and o.draft_seconds >= 0 for o in planner.seen)
    assert [limit for _, limit in planner.asked] == [5, 3, 2, 1]


def test_shadows_are_scored_against_what_was_emitted(text: list[int]) -> None:
    planner = ScheduledPlanner([(None, 0), ("o", 3)])
    planner.shadowed = ("s",)
    shadow = mixed(text, lambda at: at == 7, "s")
    run(session(None, [oracle(text, "o"), shadow], planner=planner), PROMPT, max_new_tokens=12)
    # plain emits 5; oracle emits 6..9 (7 wrong in the shadow); plain emits 10; oracle emits 11..14.
    assert [(c.name, proposed, right) for c, proposed, right in planner.credits] == [
        ("s", 1, 1),
        ("s", 2, 1),
        ("s", 1, 1),
        ("s", 4, 4),
    ]


def test_a_failing_shadow_costs_nothing(text: list[int]) -> None:
    planner = ScheduledPlanner([(None, 0)])
    planner.shadowed = ("failing",)
    result = run(session(None, [failing(RuntimeError("x"))], planner=planner), PROMPT, max_new_tokens=12)
    assert list(result.token_ids) == text[4:16]
    assert planner.credits == []


def test_a_planner_that_breaks_the_rules_is_clipped(text: list[int]) -> None:
    planner = ScheduledPlanner([("oracle", 100), ("unknown", 3), ("oracle", -1), (None, 5)])
    draft = oracle(text)
    result = run(session(None, [draft], planner=planner), PROMPT, max_new_tokens=20)
    assert list(result.token_ids) == text[4:24]
    assert draft.calls == [(5, 18)]


def test_auto_planning_on_the_real_path_climbs_with_an_oracle_and_stays_off_an_anti(text: list[int]) -> None:
    long = PROMPT + plain_greedy(ToyDecoder(max_positions=1000), PROMPT, 600)
    costs = dict.fromkeys(range(1, 12), 0.01)

    class Frozen(CostTable):
        def observe_verify(self, width: int, seconds: float) -> None:
            pass

        def observe_draft(self, name: str, seconds: float) -> None:
            pass

    target = ToyDecoder(max_positions=1000)
    good = run(
        session(target, [oracle(long)], planner=AutoPlanner(Frozen(costs, {"oracle": 0.001}), 6)),
        PROMPT,
        max_new_tokens=600,
    )
    assert list(good.token_ids) == long[4:]
    assert max(good.stats.gamma_histogram, key=lambda gamma: good.stats.gamma_histogram[gamma]) == 6
    bad = run(
        session(target, [anti(long)], planner=AutoPlanner(Frozen(costs, {"anti": 0.001}))), PROMPT, max_new_tokens=600
    )
    assert list(bad.token_ids) == long[4:]
    assert bad.stats.gamma_histogram[0] > 500


# What drafts return


@pytest.mark.parametrize(
    ("guess", "kept"),
    [
        ([3, 4, 5], [3, 4, 5]),
        ([3, 4, 5, 6, 7], [3, 4, 5]),
        ([3, -1, 5], [3]),
        ([-1, -1, -1], []),
        ([3, 4, TOKENS], [3, 4]),
        ([TOKENS + 3], []),
        ([2**40], []),
        ([np.int64(3), np.int32(4)], [3, 4]),
        ([], []),
    ],
)
def test_b014_guesses_are_cut_at_what_is_no_token(guess: list[Any], kept: list[int], text: list[int]) -> None:
    pipeline = _pipeline()
    cleaned = clean(Proposal(guess, [None] * len(guess)), 3, pipeline)
    assert cleaned.tokens == kept
    assert all(type(token) is int for token in cleaned.tokens)
    assert cleaned.rows == [None] * len(kept)
    draft = ScriptedDraft(lambda t, gamma: guess)
    result = run(session(None, [draft], 3), PROMPT, max_new_tokens=30)
    assert list(result.token_ids) == text[4:34]


def _pipeline(**params: Any) -> LogitsPipeline:
    return LogitsPipeline(
        SamplingParams(**params), vocab_rows=TOKENS + 4, token_count=TOKENS, eos_ids=(), prompt=PROMPT
    )


def _row(**changes: Any) -> np.ndarray:
    row = np.zeros(TOKENS + 4, np.float32)
    row[3] = row[4] = 0.5
    for place, value in changes.items():
        row[int(place[1:])] = value
    return row


@pytest.mark.parametrize(
    "row",
    [
        _row()[:-1],
        _row()[None],
        _row(_3=0.0, _5=0.5),
        _row(_3=np.nan),
        _row(_6=np.nan),
        _row(_6=-0.5, _7=0.5),
        _row(_6=0.5),
        _row(_6=np.inf),
        np.zeros(TOKENS + 4, np.float32),
    ],
)
def test_a_row_that_is_not_the_law_of_its_guess_drops_the_proposal(row: np.ndarray) -> None:
    good = Proposal([3, 4], [_row(), None])
    assert clean(good, 2, _pipeline(temperature=1.0)).rows == good.rows
    with pytest.raises(ValueError):
        clean(Proposal([3], [row]), 2, _pipeline(temperature=1.0))
    assert clean(Proposal([3], [row]), 2, _pipeline()).rows == [None]  # greedy: rows mean nothing


@pytest.mark.parametrize("wrong", [Proposal([3, 4], [None]), Proposal(["a"], [None]), Proposal([2.0], [None])])  # type: ignore[list-item]
def test_what_no_draft_may_return_is_a_failure_of_the_draft(wrong: Proposal, text: list[int]) -> None:
    with pytest.raises((ValueError, TypeError)):
        clean(wrong, 3, _pipeline())
    draft = empty()
    draft.propose = lambda tokens, gamma, choose: wrong  # type: ignore[method-assign]
    chat = session(None, [draft], 3)
    assert list(run(chat, PROMPT, max_new_tokens=20).token_ids) == text[4:24]
    assert not chat.statuses["empty"].active


# Streaming and ending


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_cancelled_after_any_step_everything_ends_at_the_same_token(steps: int, text: list[int]) -> None:
    chat = session(None, [oracle(text)], 3)
    generation = Generation(chat, PROMPT, SamplingParams(max_new_tokens=40))
    for _ in range(steps):
        assert generation.step()
    generation.cancel()
    assert not generation.step()
    result = generation.result
    assert result.finish_reason == "cancelled"
    assert list(result.token_ids) == text[4 : 4 + max(0, 4 * steps - 3)]
    if steps:
        assert chat.tokens == PROMPT + list(result.token_ids)
    last = generation.take()
    assert last is not None
    assert last.finish_reason == "cancelled"
    assert generation.take() is None
    assert not generation.step()
    nxt = run(chat, text[:20], max_new_tokens=10)
    assert list(nxt.token_ids) == text[20:30]


def test_leaving_the_stream_early_ends_the_answer(text: list[int]) -> None:
    chat = session(None, [oracle(text)], 3)
    generation = Generation(chat, PROMPT, SamplingParams(max_new_tokens=40))
    stream = generation.deltas()
    next(stream)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert generation.result.finish_reason == "cancelled"
    assert chat.tokens == text[: len(PROMPT) + 5]
    generation.close()
    generation.close()


def test_cancel_from_another_thread(text: list[int]) -> None:
    target = ToyDecoder(max_positions=100_000)
    target._positions = np.zeros((100_001, 16), np.float32)
    started = threading.Event()
    target.after = started.set
    target._window = 5
    generation = Generation(session(target), PROMPT, SamplingParams(max_new_tokens=90_000))
    worker = threading.Thread(target=lambda: list(generation.deltas()))
    worker.start()
    assert started.wait(10)
    generation.cancel()
    worker.join(10)
    assert not worker.is_alive()
    assert generation.result.finish_reason == "cancelled"


def test_b137_what_the_target_raises_is_passed_on_after_what_was_ready(text: list[int]) -> None:
    target = ToyDecoder()

    def trip() -> None:
        if len(target.calls) == 2:
            raise ModelError("device lost")

    target.before = trip
    chat = session(target, [oracle(text)], 1)
    generation = Generation(chat, PROMPT, SamplingParams(max_new_tokens=40))
    got: list[int] = []
    with pytest.raises(ModelError, match="device lost"):
        got.extend(token for delta in generation.deltas() for token in delta.token_ids)
    assert got == text[4:7]
    assert generation.result.finish_reason == "cancelled"
    assert list(generation.result.token_ids) == got
    target.before = lambda: None
    assert list(run(chat, PROMPT, max_new_tokens=20).token_ids) == text[4:24]


def test_parameters_are_checked_against_the_model_before_any_work() -> None:
    target = ToyDecoder()
    for params in ({"logit_bias": {TOKENS: 1.0}}, {"stop_token_ids": [TOKENS]}):
        with pytest.raises(ParameterError):
            Generation(session(target), PROMPT, SamplingParams(**params))  # type: ignore[arg-type]
    assert target.calls == []


# Returned data


@pytest.mark.parametrize("kind", [oracle, anti, short, "ngram", "self"])
def test_b058_logprobs_are_those_of_plain_decoding_whoever_guessed(kind: Any, text: list[int]) -> None:
    target = ToyDecoder()
    plain = run(session(target, [], 0), PROMPT, max_new_tokens=30, logprobs=3, repetition_penalty=1.3)
    draft = {"ngram": NgramDraft(), "self": self_draft(target)}[kind] if isinstance(kind, str) else kind(text)
    drafted = run(session(target, [draft], 4), PROMPT, max_new_tokens=30, logprobs=3, repetition_penalty=1.3)
    assert drafted.logprobs == plain.logprobs
    assert drafted.logprobs is not None
    assert [entry.token_id for entry in drafted.logprobs] == list(drafted.token_ids)
    assert all(len(entry.top) == 3 and entry.margin >= 0 for entry in drafted.logprobs)
    assert run(session(target), PROMPT, max_new_tokens=3).logprobs is None


# Traces


def test_rounds_are_traced_whole_and_in_parts(text: list[int]) -> None:
    tracer = Tracer()
    run(session(None, [oracle(text)], 3, tracer=tracer), PROMPT, max_new_tokens=9)
    names = [event.name for event in tracer.events()]
    parts = ["round", "plan", "draft", "verify", "accept", "commit", "learn"]
    assert names == ["prefill", *parts, *parts]
    events = {event.name: event for event in tracer.events()[-7:]}
    assert events["round"].args == {"draft": "oracle", "gamma": 3, "accepted": 3}
    assert events["verify"].args == {"width": 4}
    ends = [events[name].end_ns for name in parts[1:]]
    assert ends == sorted(ends)
    assert events["plan"].begin_ns >= events["round"].begin_ns
    assert events["learn"].end_ns == events["round"].end_ns
