"""`edgespec` in replays beside the published policies, and its decisions one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from predictor import Candidate, CostTable, Observation, View
from predictor.policies.edgespec import LONGEST, SHORTEST, EdgePolicy
from predictor.replay import TextTrace
from tests.predictor.replay_texts import (
    DOMAINS,
    FLAT,
    GENERAL,
    MANIFEST,
    NAMES,
    OTHER,
    OWN,
    STEEP,
    accepted,
    knows,
    run,
    text,
    texts,
    world,
)

MIXED = texts(24)
PERMUTED = {name: NAMES[(place + 2) % len(NAMES)] for place, name in enumerate(NAMES)}


def is_wrong(trace: TextTrace, position: int, seen: Mapping[str, float]) -> Mapping[str, float]:
    """A ranker that takes every draft for another one."""
    return {PERMUTED[name]: rate for name, rate in DOMAINS[trace.domain].items()}


# Beside the others


@pytest.mark.parametrize(("verify", "share"), [(FLAT, 0.98), (STEEP, 0.96)], ids=["flat", "steep"])
def test_with_a_good_ranker_it_is_near_the_oracle_of_the_same_gamma_and_above_what_was_published(
    verify: Mapping[int, float], share: float
) -> None:
    at = world(verify)
    ours = run("edgespec", MIXED, at, knows)
    assert ours.speed >= share * run("oracle-dynamic@4", MIXED, at).speed
    assert ours.fallback_share < 0.05
    for other in ("mab-sync", "mab-async", "ucbspec", "exp3spec", "hedge", "nightjar"):
        assert ours.speed > run(other, MIXED, at, knows).speed
    assert ours.speed > (1.0 if verify is FLAT else 0.96) * run("memspec", MIXED, at, knows).speed
    assert ours.speed >= 1.4 * run("mab-async", MIXED, at).speed
    assert ours.exposed_seconds == 0


def test_the_oracles_are_in_order() -> None:
    at = world(capacity=2, prefill=1.0)  # the first load is over when the text begins
    dynamic, static = run("oracle-dynamic", MIXED, at).speed, run("oracle-static", MIXED, at).speed
    assert dynamic >= static
    for name in NAMES:
        for gamma in (2, 4, 6):
            assert static >= run(f"static:{name}@{gamma}", MIXED, replace(at, resident=(name,))).speed
    assert run("oracle-dynamic@4", MIXED, at).speed >= 0.99 * run("oracle-static@4", MIXED, at).speed


@pytest.mark.parametrize("verify", [FLAT, STEEP], ids=["flat", "steep"])
def test_without_a_ranker_it_is_no_worse_than_the_best_static_draft(verify: Mapping[int, float]) -> None:
    at = world(verify)
    ours = run("edgespec", MIXED, at).speed
    for name in NAMES:
        for gamma in (2, 4):
            assert ours >= 0.97 * run(f"static:{name}@{gamma}", MIXED, replace(at, resident=(name,))).speed


def test_on_texts_of_one_kind_it_is_as_good_as_the_right_static_draft() -> None:
    rng = np.random.default_rng(5)
    made, at = [text("law", rng) for _ in range(12)], world()
    best = max(run(f"static:law@{gamma}", made, replace(at, resident=("law",))).speed for gamma in (3, 4, 6, 8))
    assert run("edgespec", made, at, knows).speed >= 0.95 * best
    assert run("edgespec", made, at).speed >= 0.95 * best


@pytest.mark.parametrize(
    ("rankings", "share"),
    [(None, 0.98), (lambda *_: dict.fromkeys(NAMES, 0.25), 0.99), (lambda *_: dict.fromkeys(NAMES, 0.7), 0.975)],
    ids=["no ranker", "a ranker", "an optimist"],
)
def test_on_hopeless_text_it_is_as_good_as_plain_decoding(rankings: Any, share: float) -> None:
    """Every manifest and, in the last case, the ranker promise much more than there is."""
    rng = np.random.default_rng(3)
    made = [text("chat", rng, dict.fromkeys(NAMES, 0.25)) for _ in range(20)]
    at = world(STEEP)
    assert run("edgespec", made, at, rankings).speed >= share * run("plain", made, at).speed


def test_a_wrong_ranker_costs_little() -> None:
    for verify in (FLAT, STEEP):
        at = world(verify)
        wrong, none = run("edgespec", MIXED, at, is_wrong).speed, run("edgespec", MIXED, at).speed
        assert wrong >= 0.8 * none
        assert wrong > run("mab-async", MIXED, at).speed


def test_a_text_that_turns_is_followed_by_ranking() -> None:
    def rates(domain: str) -> np.ndarray:
        return np.array([DOMAINS[domain][name] for name in NAMES])

    half = 150
    turning = np.concatenate([np.tile(rates(d)[:, None], half) for d in ("code", "law")], axis=1)
    made = [text("code", np.random.default_rng(1), turning, 2 * half)]
    at = world(resident=("code", "general"))
    ours = run("edgespec", made, at, lambda _, position, seen: DOMAINS["code" if position < half else "law"])
    assert ours.share["law"] > 0.3 * ours.rounds
    assert ours.share["code"] > 0.3 * ours.rounds
    alone = run("edgespec", made, at)
    assert alone.share["law"] > 0.1 * alone.rounds  # found by trying out


def test_text_to_and_fro_does_not_thrash() -> None:
    """A ranking that changes its mind at every scheduling point, between two equally good drafts."""
    rng = np.random.default_rng(2)
    made = [text("chat", rng, dict.fromkeys(NAMES, 0.5), 400) for _ in range(3)]
    calls = Counter[str]()

    def swings(trace: TextTrace, position: int, seen: Mapping[str, float]) -> Mapping[str, float]:
        calls["all"] += 1
        up = ("code", "law") if calls["all"] % 2 else ("math", "chat")
        return {name: 0.6 if name in up else 0.45 for name in NAMES}

    ours = run("edgespec", made, world(), swings)
    assert calls["all"] > 80
    assert ours.loads <= 0.1 * calls["all"]
    theirs = run("memspec", made, world(), swings)
    assert theirs.loads > 3 * ours.loads


@pytest.mark.parametrize("capacity", [0, 1, 3, 5])
def test_any_number_of_slots(capacity: int) -> None:
    at = world(capacity=capacity)
    for rankings in (knows, None):
        ours = run("edgespec", MIXED[:8], at, rankings)
        assert ours.tokens == 8 * 127
        assert ours.speed >= 0.97 * run("plain", MIXED[:8], at).speed


def test_a_draft_that_cannot_be_loaded_is_passed_over() -> None:
    at = world(failing=frozenset({"code", "law"}), resident=("general", "math"))
    ours = run("edgespec", MIXED[:8], at, knows)
    assert not {"code", "law"} & set(ours.share)
    assert ours.share["math"] > 0


# One by one


def policy(load: float = 0.08, **rates: float) -> EdgePolicy:
    costs = CostTable(FLAT, dict.fromkeys(NAMES, 0.001), loads=dict.fromkeys(NAMES, load))
    made = EdgePolicy(costs, NAMES)
    for name, rate in {**MANIFEST, **rates}.items():
        made.expect(name, rate)
    made.begin()
    return made


def view(*resident: str, rounds: int = 8, **more: Any) -> View:
    fields: dict[str, Any] = {
        "loading": frozenset(), "failed": frozenset(), "capacity": 2, "drafts": NAMES, "active": None,
        "ranking": None, "rounds_left": 80.0,
    }  # fmt: skip
    return View(round=rounds, resident=frozenset(resident), **fields | more)


def seen(made: EdgePolicy, draft: str, accepted: int, rounds: int) -> None:
    for _ in range(rounds):
        made.observe(Observation(draft, 1, 4, 4, accepted, 5, 0.004, FLAT[5], asked=4, emitted=accepted + 1))


def test_the_reason_can_be_read() -> None:
    made = policy()
    made.rank({"general": 0.41, "code": 0.62, "math": 0.2, "law": 0.2, "chat": 0.2})
    holding = made.hold(view("general", "math", active="general"))
    assert holding is not None
    assert holding.wanted[:2] == ("code", "general")
    assert holding.reason.startswith("code 0.62 expected against general 0.41; pays back in ")
    assert made.preferred() == "code"


def test_what_is_observed_outweighs_the_ranking_within_some_twenty_tries() -> None:
    made = policy()
    made.rank(DOMAINS["code"])
    two = [Candidate("code", 1), Candidate("general", 1)]
    assert made.plan(two, 50).draft == "code"
    for _ in range(3):  # the ranker insists
        seen(made, "code", 0, 6)
        made.rank(DOMAINS["code"])
    assert made.plan(two, 50).draft != "code"


def test_a_ranking_is_for_one_text_and_answers_are_averaged() -> None:
    made = policy()
    made.rank({"code": 0.2})
    made.rank({"code": 0.8, "nobody": 0.9, "law": float("nan")})
    assert made._ranking == {"code": pytest.approx(0.5)}
    made.begin()
    assert made._ranking == {}
    assert made._arm("code", 1).rates()[0] == pytest.approx(0.9 * OWN)


def test_a_draft_that_has_to_read_much_first_is_priced() -> None:
    made = policy()
    made.rank({**dict.fromkeys(NAMES, OTHER), "code": 0.62, "law": 0.6})
    made.costs.observe_catch_up("code", 100, 1.0)
    near, far = Candidate("code", 1), Candidate("code", 1, behind=100)
    assert made.plan([near, Candidate("law", 1)], 50).draft == "code"
    assert made.plan([far, Candidate("law", 1)], 50).draft == "law"


def test_a_draft_reads_only_what_the_rest_of_the_text_pays_for() -> None:
    made = policy()
    made.rank({**dict.fromkeys(NAMES, OTHER), "code": 0.7})
    made.costs.observe_catch_up("code", 100, 0.03)
    code, law = Candidate("code", 1, behind=200), Candidate("law", 1)

    def pays(left: float, behind: int, *others: Candidate) -> bool:
        made.hold(view("code", "law", rounds_left=left))
        lagging = code._replace(behind=behind)
        return made.pays_to_read(lagging, [lagging, *others])

    assert pays(80, 200, law)
    assert made.preferred() == made.reads() == "code"
    assert not pays(5, 200, law), "the text is nearly over"
    assert (made.preferred(), made.reads()) == (None, "code")
    assert not pays(80, 4000, law), "there is too much to read"
    for _ in range(8):  # answers are averaged
        made.rank({**dict.fromkeys(NAMES, OTHER), "code": 0.7, "law": 0.7})
    assert not pays(80, 200, law), "another one that can run is as good"
    assert pays(80, 200, law._replace(behind=500)), "it cannot run either"
    assert made.preferred() is not None
    pays(5, 200, law)
    assert "code" in made._unread
    made.hold(view("law"))
    assert "code" not in made._unread, "it went, and is wanted as any other"
    pays(5, 200, law)
    made.begin()
    assert made.preferred() is not None, "that was another text"
    made.rank({**dict.fromkeys(NAMES, OTHER), "code": 0.7})
    assert made.pays_to_read(code, [code, law]), "nobody has said how long this one will be"


def test_lookup_that_does_most_leaves_less_for_a_draft_to_pay_for() -> None:
    made = policy()
    made.rank({**dict.fromkeys(NAMES, OTHER), "code": 0.7})
    made.costs.observe_catch_up("code", 100, 0.03)
    made.hold(view("code"))
    code = Candidate("code", 1, behind=200)
    assert made.pays_to_read(code, [code])
    for _ in range(200):
        made.observe(Observation("ngram", 3, 4, 4, 4, 5, 0.0, FLAT[5], asked=4, emitted=5))
    assert not made.pays_to_read(code, [code])


def test_without_a_ranker_a_draft_that_was_never_seen_reads_whatever_it_promises() -> None:
    made = policy(code=0.0)
    made.hold(view("code"))
    code = Candidate("code", 1, behind=4000)
    assert made.pays_to_read(code, [code])
    assert made.preferred() == made.reads()
    seen(made, "code", 0, 6)
    assert not made.pays_to_read(code, [code]), "it is known by now"
    known = policy(code=0.0)
    known.rank({**dict.fromkeys(NAMES, OTHER), "code": 0.0})
    assert not known.pays_to_read(code, [code]), "the ranker tells"


def test_where_reading_is_dear_and_lookup_good_it_is_as_good_as_lookup_alone() -> None:
    """A large draft and long prompts: what it brings in the rest of a text is less than its reading takes."""

    def copied(trace: TextTrace) -> TextTrace:
        rights = accepted(np.array([0.75]), np.random.default_rng(3), 128)[0]
        return replace(trace, prompt_length=1500, lookup_level=np.full(127, 4, np.uint8), lookup_accepts=rights)

    steps = dict.fromkeys(NAMES, 0.15 * STEEP[1]) | {"ngram": 0.0}
    reading = dict.fromkeys(NAMES, STEEP[1] / 100)
    costs = CostTable(STEEP, steps, loads=dict.fromkeys(NAMES, 0.2), catch_up=reading)
    dear = replace(world(), window=1 << 20, costs=costs)
    made = [copied(trace) for trace in texts(12)]
    lookup = replace(dear, names=(), capacity=0, resident=())
    alone = run("edgespec", [replace(trace, accepts=trace.accepts[:0]) for trace in made], lookup)
    assert run("edgespec", made, dear, knows).speed > 0.97 * alone.speed


def test_without_a_ranker_unheard_drafts_are_brought_in_while_the_best_disappoints() -> None:
    made = policy()
    seen(made, "general", 0, 30)
    seen(made, "math", 0, 30)
    heard, resident = [], ["general", "math"]
    for _ in range(24):
        holding = made.hold(view(*resident))
        assert holding is not None
        new = [name for name in holding.wanted[:2] if name not in resident]
        assert len(new) <= 2
        if new:
            assert "not heard" in holding.reason or "expected" in holding.reason or "next best" in holding.reason
            heard += new
            resident = list(holding.wanted[:2])
            for name in new:
                seen(made, name, 0, 30)
    assert set(heard) == {"code", "law", "chat"}
    assert len(heard) <= 6
    content = policy()
    seen(content, "code", 4, 30)
    for _ in range(10):
        holding = content.hold(view("general", "code"))
        assert holding is not None
        assert holding.wanted[0] == "code"
        assert "not heard" not in holding.reason


@pytest.mark.parametrize(("load", "rounds"), [(0.0, SHORTEST), (0.08, 4), (0.3, 11), (60.0, LONGEST)])
def test_the_interval_follows_the_measured_load(load: float, rounds: int) -> None:
    made = policy(load)
    made.observe(Observation(None, 0, 0, 0, 0, 1, 0.0, 0.03, emitted=1))
    assert made.interval() == rounds


def test_a_ranker_that_is_wrong_loses_its_weight_and_a_right_one_keeps_it() -> None:
    wrong, right = policy(), policy()
    for made, rate in ((wrong, 0.05), (right, 0.9)):
        for _ in range(6):
            made.begin()
            made.rank({"code": rate})
            seen(made, "code", 4, 20)
    assert wrong._trust.share < 0.3 < 0.8 < right._trust.share
    assert not wrong._informed


def test_the_choice_never_depends_on_the_tokens_being_judged() -> None:
    """Two texts that are equal up to a position lead to equal plans up to there, whatever follows."""
    rng = np.random.default_rng(9)
    first = text("code", rng, length=200)
    turned = first.accepts.copy()
    cut = 80
    for column in range(turned.shape[1]):  # guesses that reach beyond the cut are wrong from there on
        reach = max(cut - column, 0)
        turned[:, column] = np.minimum(turned[:, column], reach)
    second = replace(first, accepts=turned)

    def plans(trace: TextTrace, spec: str) -> list[tuple[int, Any]]:
        from predictor.policies import make_policy
        from predictor.replay import Replay

        at = world()
        running = Replay(at, knows)
        made = make_policy(spec, at.known_costs(), NAMES, capacity=2, seed=1)
        done: list[tuple[int, Any]] = []
        plan = made.plan

        def watched(candidates: Any, limit: int) -> Any:
            done.append((running.position, plan(candidates, limit)))
            return done[-1][1]

        made.plan = watched  # type: ignore[method-assign]
        running.policy = made
        running.text(trace)
        return done

    for spec in ("edgespec", "memspec", "nightjar", "mab-async", "hedge", "exp3spec"):
        one, other = plans(first, spec), plans(second, spec)
        shared = [entry for entry in one if entry[0] <= cut - 20]
        assert len(shared) > 10
        assert other[: len(shared)] == shared


def test_b190_two_policies_share_nothing() -> None:
    first, second = policy(), policy()
    first.rank(DOMAINS["law"])
    seen(first, "general", 0, 50)
    first.hold(view("general", "law"))
    assert second._ranking == {}
    assert second.preferred() is None
    assert second._arm("general", 1).rates()[0] == pytest.approx(0.9 * GENERAL)
    first.reset()
    assert first._arm("general", 1).rates()[0] == pytest.approx(0.9 * GENERAL)


def test_the_dynamic_oracle_loads_what_comes_next_while_something_else_runs() -> None:
    halves = [np.array([DOMAINS[domain][name] for name in NAMES]) for domain in ("code", "law", "math")]
    turning = np.concatenate([np.tile(rates[:, None], 60) for rates in halves], axis=1)
    made = [text("code", np.random.default_rng(1), turning, 180)]
    outcome = run("oracle-dynamic@4", made, world(resident=("code", "general")))
    assert outcome.loads >= 2
    assert outcome.fallback_share < 0.03
