"""The replay: its arithmetic on texts small enough to do by hand, and its memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from predictor import CostTable, Holding, Observation, Plan
from predictor.catch_up import PIECE
from predictor.policies.fixed import StaticPolicy
from predictor.replay import TextTrace, World, replay
from predictor.replay_memory import Ledger, Memory
from tests.predictor.replay_texts import knows, run, texts, world

U8 = np.uint8
COSTS = CostTable(
    {1: 1.0, 2: 1.2, 3: 1.4, 4: 1.6, 5: 1.8}, {"a": 0.1, "b": 0.1, "ngram": 0.0}, loads={"a": 2.5, "b": 2.5}
)


def small(**more: Any) -> TextTrace:
    """Ten tokens; draft a gets 2, 0, 4, ... right, b nothing; lookup has a match once."""
    columns = {
        "accepts": np.array([[2, 9, 9, 0, 4, 9, 9, 9, 9], [0] * 9], U8),
        "lookup_level": np.array([0] * 9, U8),
        "lookup_accepts": np.array([0] * 9, U8),
    }
    return TextTrace("code", 20, **columns | more)


def device(**more: Any) -> World:
    return World(("a", "b"), COSTS, **{"resident": ("a", "b")} | more)


def static(spec: str, text: TextTrace, at: World, seen: list[Observation] | None = None) -> Any:
    draft, gamma = spec.split("@")

    class Watched(StaticPolicy):
        def observe(self, observation: Observation) -> None:
            if seen is not None:
                seen.append(observation)

    return replay(lambda costs, _: Watched(costs, at.weighted, draft, int(gamma)), [text], at)


def test_rounds_by_hand() -> None:
    seen: list[Observation] = []
    outcome = static("a@4", small(), device(), seen)
    # From 1 known token: 2 right -> 4; 0 right -> 5; 4 right -> 10, the end.
    assert [(o.drafted, o.proposed, o.accepted, o.emitted) for o in seen] == [(4, 4, 2, 3), (4, 4, 0, 1), (4, 4, 4, 5)]
    assert outcome.tokens == 9
    read = COSTS.catch_up("a", 21)  # the prompt and the first token
    assert outcome.seconds == pytest.approx(3 * (1.8 + 4 * 0.1) + read)
    assert outcome.share == {"a": 3}
    assert outcome.gammas == {4: 3}


def test_the_block_ends_with_the_answer_and_the_last_token_is_the_targets() -> None:
    seen: list[Observation] = []
    trace = small(accepts=np.array([[9] * 9, [0] * 9], U8))
    static("a@4", trace, device(), seen)
    assert [(o.drafted, o.accepted, o.emitted) for o in seen] == [(4, 4, 5), (3, 3, 4)]
    seen.clear()
    trace = small(accepts=np.array([[9, 9, 9, 9, 9, 4, 3, 2, 1], [0] * 9], U8))
    static("a@4", trace, device(max_new_tokens=100), seen)  # ended by itself: nobody knew
    assert [(o.drafted, o.proposed, o.accepted, o.emitted) for o in seen] == [(4, 4, 4, 5), (4, 4, 4, 4)]


def test_lookup_first_and_confidence() -> None:
    seen: list[Observation] = []
    trace = small(lookup_level=np.array([3] + [0] * 8, U8), lookup_accepts=np.array([1] + [0] * 8, U8))
    static("a@4", trace, device(), seen)
    assert [(o.draft, o.accepted) for o in seen][:2] == [("ngram", 1), ("a", 4)]

    class Floored(StaticPolicy):
        def plan(self, candidates: Any, limit: int) -> Plan:
            plan = super().plan(candidates, limit)
            return Plan(plan.draft, plan.gamma, 0.5)

        def observe(self, observation: Observation) -> None:
            seen.append(observation)

    seen.clear()
    confidences = np.zeros((2, 9, 8), U8)
    confidences[:, :] = [255, 204, 102, 255, 255, 255, 255, 255]  # 1, 0.8, 0.32
    at = device()
    replay(lambda costs, _: Floored(costs, at.weighted, "a", 4), [small(confidences=confidences)], at)
    first = seen[0]
    assert (first.asked, first.drafted, first.proposed, first.accepted, first.width) == (4, 2, 2, 2, 3)
    assert first.draft_seconds == pytest.approx(3 * 0.1)  # the step that was thought better of


def test_a_load_goes_on_behind_the_rounds_and_is_seen_between_them() -> None:
    trace = small(accepts=np.array([[0] * 9, [0] * 9], U8))
    outcome = static("a@2", trace, device(resident=("b",), capacity=1))
    # 2.5 s of load: three plain steps of a second, then rounds with the draft.
    assert outcome.share == {"plain": 3 + 1, "a": 5}  # and the last token needs no draft
    assert outcome.loads == 1
    assert outcome.hidden_seconds == pytest.approx(2.5)
    assert outcome.exposed_seconds == 0
    assert outcome.fallback_share == pytest.approx(3 / 9)
    slow = static("a@2", trace, device(resident=("b",), capacity=1, slow_down=1.1))
    assert slow.seconds > outcome.seconds
    hidden = static("a@2", trace, device(resident=("b",), capacity=1, prefill=1.0))
    assert hidden.fallback_share == 0


def test_a_policy_that_waits_pays_for_it() -> None:
    class Waiting(StaticPolicy):
        def hold(self, view: Any) -> Holding | None:
            return None if view.round else Holding(("a",), "", wait=True)

    at = device(resident=("b",), capacity=1)
    outcome = replay(lambda costs, _: Waiting(costs, at.weighted, "a", 2), [small()], at)
    assert outcome.exposed_seconds == pytest.approx(2.5)
    assert outcome.hidden_seconds == 0
    assert "plain" not in outcome.share
    assert outcome.seconds > 2.5


def test_memory_evicts_cancels_and_fails() -> None:
    memory = Memory(COSTS, 2, ("a", "b"), failing=frozenset({"x"}))
    memory.retarget(("c", "b"), "a")
    assert memory.acquire() == {"b"}  # the slot of `a` is loaded into
    assert memory.advance(1.0) == []
    memory.retarget(("d", "b"), "b")
    assert (memory.loading, memory.cancelled) == ("d", 1)
    assert [name for name, _ in memory.advance(100.0)] == ["d"]
    assert memory.acquire() == {"b", "d"}
    memory.retarget(("x", "d"), "d")
    assert memory.acquire() == {"d"}
    memory.advance(100.0)
    assert (memory.failed, memory.acquire(), memory.loads) == ({"x"}, {"d"}, 1)
    memory.retarget(("x", "d", "b"), "d")
    assert memory.loading == "b"
    assert memory.wait_for("b") == (pytest.approx(COSTS.load("b")), [("b", COSTS.load("b"))])
    memory.retarget(("b", "d"), "d")
    assert memory.loading is None


def test_one_load_at_a_time() -> None:
    memory = Memory(COSTS, 2)
    memory.retarget(("a", "b"), None)
    assert memory.loading == "a"
    memory.advance(2.5)
    assert (memory.acquire(), memory.loading) == ({"a"}, "b")
    assert [name for name, _ in memory.advance(2.5)] == ["b"]


def test_how_far_a_draft_has_read() -> None:
    ledger = Ledger(256)
    assert ledger.behind("a", 401) == 256  # it looks no further back
    assert [ledger.reads("a", 401, PIECE) for _ in range(5)] == [64, 64, 64, 64, 0]
    assert ledger.candidate("a", 401).behind == 0
    assert ledger.proposes("a", 409) == (409, 0)  # a few tokens are read on the way
    assert ledger.proposes("a", 430) == (21, 21)
    assert ledger.candidate("b", 12).behind == 12


def far(**more: Any) -> TextTrace:
    """400 tokens of prompt, 99 tokens that nobody guesses."""
    nothing = np.zeros(99, U8)
    return TextTrace("code", 400, np.zeros((2, 99), U8), nothing, nothing, **more)


def test_a_draft_that_was_away_reads_in_pieces_and_runs_when_it_is_near() -> None:
    seen: list[Observation] = []
    outcome = static("a@2", far(), device(resident=("b",), capacity=1), seen)
    # Three rounds until it is loaded, and four pieces of 64 tokens; with the last one it can run.
    assert [o.draft for o in seen[:8]] == [None] * 6 + ["a"] * 2
    assert outcome.catch_up_seconds == pytest.approx(COSTS.catch_up("a", 256))
    assert outcome.fallback_share == pytest.approx(6 / 99)  # also while it reads, as live
    seen.clear()
    there = static("a@2", far(), device(), seen)
    assert seen[0].draft == "a"  # before the first round it reads all at once
    assert there.fallback_share == 0


def test_a_draft_that_is_not_wanted_reads_too_however_dear_a_piece_is() -> None:
    """The purse holds one piece at least, as live; here one takes as long as 16 rounds."""
    costs = CostTable({1: 1.0, 2: 1.0}, {"a": 0.1, "b": 0.1}, catch_up={"a": 0.01, "b": 0.25})
    nothing = np.zeros(2000, U8)
    trace = TextTrace("code", 30, np.zeros((2, 2000), U8), nothing, nothing)
    outcome = static("a@1", trace, World(("a", "b"), costs, resident=("a", "b")))
    assert 2 * 0.25 * PIECE < outcome.catch_up_seconds < 0.1 * outcome.seconds


def test_a_load_slows_down_what_runs_beside_it_and_the_policy_sees_that() -> None:
    seen: list[Observation] = []
    static("a@2", far(), device(resident=("b",), capacity=1, slow_down=2.0), seen)
    # 2.5 seconds of load: beside a round of 2 s, and half a second of the next one.
    assert [o.target_seconds for o in seen[:3]] == pytest.approx([2.0, 1.25, 1.0])


def test_every_load_is_told_also_those_of_the_prefill_and_those_that_were_waited_for() -> None:
    told: list[str] = []

    def loads(wait: bool, **more: Any) -> list[str]:
        class Wants(StaticPolicy):
            def hold(self, view: Any) -> Holding | None:
                return Holding(("a", "b"), "", wait=wait) if not view.round else None

        def make(costs: CostTable, _: Any) -> Any:
            costs.observe_load = lambda name, seconds: told.append(name)  # type: ignore[method-assign]
            return Wants(costs, ("a", "b"), "a", 1)

        told.clear()
        outcome = replay(make, [small()], device(resident=(), **more))
        assert outcome.loads == len(told)
        return list(told)

    assert loads(False, prefill=1.0) == ["a", "b"]
    assert loads(True, capacity=1) == ["a"]


def test_what_was_waited_for_in_vain_is_no_hidden_load() -> None:
    class Waiting(StaticPolicy):
        def hold(self, view: Any) -> Holding | None:
            return None if view.round else Holding(("a",), "", wait=True)

    at = device(resident=("b",), capacity=1, failing=frozenset({"a"}))
    outcome = replay(lambda costs, _: Waiting(costs, at.weighted, "a", 2), [small()], at)
    assert (outcome.loads, outcome.hidden_seconds) == (0, 0.0)
    assert outcome.exposed_seconds == pytest.approx(2.5)


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match="lookup"):
        small(lookup_level=np.zeros(3, U8))
    with pytest.raises(ValueError, match="confidences"):
        small(confidences=np.zeros((2, 3, 8), U8))


def test_a_replay_can_be_repeated_exactly_and_leaves_the_world_alone() -> None:
    made, at = texts(6), world()
    before = at.costs.to_json()
    for spec in ("edgespec", "hedge", "nightjar", "mab-async"):
        first, again = run(spec, made, at, knows), run(spec, made, at, knows)
        assert first.texts == again.texts
    assert at.costs.to_json() == before


def test_every_token_is_made_once_under_every_policy() -> None:
    made, at = texts(4, length=60), world(capacity=2)
    for spec in ("plain", "static:law@8", "mab-sync", "ucbspec", "exp3spec", "hedge", "oracle-dynamic", "edgespec"):
        outcome = run(spec, made, at, knows)
        assert [text.tokens for text in outcome.texts] == [59] * 4
        assert sum(outcome.share.values()) == outcome.rounds == sum(outcome.gammas.values())
        assert outcome.exposed_seconds == 0 or spec == "mab-sync"


def test_free_drafts_run_only_where_they_have_something_to_go_on() -> None:
    at = World(("a", "words"), COSTS, resident=("a",), free=frozenset({"words"}))
    trace = small(levels={"words": np.array([0, 0, 3] + [0] * 6, U8)}, accepts=np.full((2, 9), 1, U8))
    seen: list[Observation] = []
    outcome = static("words@1", trace, at, seen)
    assert [(o.draft, o.level) for o in seen][:2] == [(None, 0), (None, 0)]
    assert (seen[2].draft, seen[2].level) == ("words", 3)
    assert outcome.share["words"] == 1
    with pytest.raises(ValueError, match="levels"):
        small(levels={"words": np.zeros(3, U8)})


def test_a_block_ends_where_the_draft_offered_nothing() -> None:
    confidences = np.full((2, 9, 8), 255, U8)
    confidences[0, :, 2:] = 0
    seen: list[Observation] = []
    static("a@4", small(confidences=confidences), device(), seen)
    assert {(o.drafted, o.asked) for o in seen if o.draft and o.asked == 4} == {(2, 4)}


def test_rankings_are_told_what_was_seen_and_when_they_are_asked() -> None:
    asked: list[tuple[int, dict[str, float]]] = []

    def ranks(trace: TextTrace, position: int, seen: Any) -> dict[str, float]:
        asked.append((position, dict(seen)))
        return {"a": 0.5, "b": 0.4}

    def positions(**more: Any) -> list[int]:
        asked.clear()
        replay(lambda costs, _: StaticPolicy(costs, ("a", "b"), "a", 1, lookup=False), [small()], device(**more), ranks)
        return [position for position, _ in asked]

    # One right, one wrong, ...: 2 0 4 -> from 1 known token to 3, 5, 6.
    assert positions(interval=1)[:4] == [0, 1, 3, 5]
    assert asked[2][1] == {"a": 1.0}
    assert len(positions(interval=1)) > len(positions(interval=3))


def test_without_prefetching_only_what_is_wanted_most_is_loaded() -> None:
    class Wants(StaticPolicy):
        def hold(self, view: Any) -> Holding | None:
            return Holding(("a", "b"), "")

    def loads(**more: Any) -> int:
        at = device(resident=(), capacity=2, prefill=1.0, **more)
        trace = small(accepts=np.zeros((2, 9), U8))
        return replay(lambda costs, _: Wants(costs, ("a", "b"), "a", 1), [trace], at).loads

    assert loads() == 2
    assert loads(prefetch=False) == 1
