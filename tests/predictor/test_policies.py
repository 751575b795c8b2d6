"""The published policies: their steps, one by one, and the texts that name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from predictor import PLAIN, Candidate, CostTable, Observation, Plan, Policy, View
from predictor.policies import POLICIES, make_policy
from predictor.policies.oracle import Leg

NAMES = ("general", "code", "math", "law")
COSTS = {width: 1.0 + 0.1 * (width - 1) for width in range(1, 12)}


class NoFuture:
    """Whatever the drafts, the first one is best, in its first way."""

    def foresee(self, own: Any, common: Any, rounds: int | None, capacity: int) -> list[Leg]:
        draft = next(iter(own), None)
        ways = common if draft is None else own[draft]
        return [Leg(ways[0], common[-1], 0)]

    def behind(self, draft: str) -> int:
        return 0


def policy(spec: str, drafts: tuple[str, ...] = NAMES, capacity: int = 2, **more: Any) -> Policy:
    costs = CostTable(COSTS, dict.fromkeys(drafts, 0.05))
    return make_policy(spec, costs, drafts, capacity=capacity, trace=NoFuture(), **more)


def view(resident: str = "", loading: str = "", ranking: Mapping[str, float] | None = None, **more: Any) -> View:
    fields: dict[str, Any] = {
        "round": 4, "failed": frozenset(), "capacity": 2, "drafts": NAMES, "active": None, "rounds_left": 50.0,
    }  # fmt: skip
    return View(
        resident=frozenset(resident.split()), loading=frozenset(loading.split()), ranking=ranking, **fields | more
    )


def candidates(*names: str, lookup: int = 0) -> list[Candidate]:
    return [*(Candidate(name, 1) for name in names), Candidate("ngram", lookup, free=True)]


def ran(draft: str | None, accepted: int, gamma: int, seconds: float = 1.0) -> Observation:
    level = 1 if draft else 0
    return Observation(
        draft, level, gamma, gamma, accepted, gamma + 1, 0.05 * gamma, seconds, asked=gamma, emitted=accepted + 1
    )


def step(chosen: Policy, resident: str, accepted: int = 0) -> Plan:
    """One round in which the plan's draft gets so many right."""
    plan = chosen.plan(candidates(*resident.split()), 100)
    chosen.shadows(plan, candidates(*resident.split()))
    chosen.observe(ran(plan.draft, min(accepted, plan.gamma), plan.gamma))
    return plan


# Names


def test_every_policy_can_be_made_and_says_its_name() -> None:
    for name in POLICIES:
        made = policy("static:code@4" if name == "static" else name)
        assert made.name.split(":")[0] == name
        assert 1 <= made.interval() <= 16
        made.begin()
        made.rank(dict.fromkeys(NAMES, 0.5))
        made.hold(view("general code", round=0, ranking=dict.fromkeys(NAMES, 0.5)))
        plan = made.plan(candidates("general", "code"), 2)
        assert plan.gamma <= 2
        made.plan(candidates("general", "code"), 1)
        assert made.plan([], 5) == PLAIN
        assert made.seeded().plan(candidates("general"), 2).gamma == 2 or name == "plain"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("memspek", "did you mean memspec"),
        ("zzz", "there are edgespec, plain"),
        ("", "name"),
        ("static", "static:general@4"),
        ("static:cod@4", "did you mean code"),
        ("static:zzz@4", "there are general, code, math, law, ngram"),
        ("static:code@0", "gamma is a number from 1 to 64"),
        ("static:code@-1", "gamma"),
        ("static:code@x", "gamma"),
        ("static:code@65", "gamma"),
        ("memspec@", "gamma"),
        ("memspec:code", "chooses its drafts itself"),
        ("nightjar:ngram", "not known"),
        ("plain@3", "leave out the gamma"),
        ("memspec,lookup=yes", "on or off"),
        ("memspec,n=0", "1 to 1000"),
        ("memspec,fast=on", "its options are: lookup, n"),
        ("memspec,fast", "option=value"),
        ("mab-async,c=-1", "0 to 1000"),
        ("mab-async,c=nan", "0 to 1000"),
        ("ucbspec,c=1", "not known"),
        ("edgespec,n=4", "not known"),
    ],
)
def test_a_spec_that_is_none_says_what_to_write(spec: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        policy(spec)
    assert message in str(caught.value)


def test_an_oracle_needs_a_recorded_text() -> None:
    with pytest.raises(ValueError, match="replay"):
        make_policy("oracle-dynamic", CostTable(COSTS), NAMES, capacity=2)


def test_options() -> None:
    made = policy("memspec@6,n=2,lookup=off")
    assert made.interval() == 2
    made.hold(view("code", ranking={"code": 0.5}))
    assert made.plan(candidates("code", lookup=5), 100) == Plan("code", 6)


# What all share


@pytest.mark.parametrize("spec", [name for name in POLICIES if name not in ("plain", "static", "edgespec")])
def test_lookup_runs_first_where_two_tokens_match(spec: str) -> None:
    made = policy(spec + "@4" if "oracle" in spec else spec)
    made.begin()
    made.hold(view("code", ranking={"code": 0.9}))
    plans = [made.plan(candidates("code", lookup=2), 100) for _ in range(40)]
    assert {plan.draft for plan in plans} <= {"ngram", None}
    assert any(plan.draft == "ngram" for plan in plans)
    one = [made.plan(candidates("code", lookup=1), 100) for _ in range(40)]
    assert all(plan.draft != "ngram" for plan in one)


def test_static_runs_its_draft_or_nothing() -> None:
    made = policy("static:code@3")
    holding = made.hold(view("general", round=0))
    assert holding is not None
    assert holding.wanted == ("code",)
    assert made.plan(candidates("general", "code"), 100) == Plan("code", 3)
    assert made.plan(candidates("general", "code"), 2) == Plan("code", 2)
    assert made.plan(candidates("general"), 100) == PLAIN
    assert made.preferred() == "code"
    lookup = policy("static:ngram@3")
    assert lookup.plan(candidates("code", lookup=1), 100) == Plan("ngram", 3)
    assert lookup.preferred() is None


def test_plain_holds_nothing() -> None:
    made = policy("plain")
    assert made.off
    holding = made.hold(view("code", round=0))
    assert holding is not None
    assert holding.wanted == ()


# MemSpec, a scripted example of the paper's steps (K = 2)


def ranking(**p: float) -> dict[str, float]:
    return {**dict.fromkeys(NAMES, 0.0), **p}


def test_memspec_does_exactly_the_papers_steps() -> None:
    made = policy("memspec")
    assert made.interval() == 4

    def point(resident: str, loading: str = "", **p: float) -> tuple[set[str], str | None]:
        """A scheduling point: what the memory will hold, and the draft that runs."""
        seen = view(resident, loading, ranking(**p))
        made.rank(seen.ranking or {})
        holding = made.hold(seen)
        assert holding is not None
        return set(holding.wanted[:2]), made.plan(candidates(*resident.split()), 100).draft

    made.begin()
    # Nothing is active yet: both of the top two come in, whatever was there.
    assert point("general math", code=0.9, law=0.5, math=0.3)[0] == {"code", "law"}
    # They are there: the argmax becomes active.
    assert point("code law", code=0.9, law=0.5, math=0.3) == ({"code", "law"}, "code")
    # Another order within the set: a switch, no load.
    assert point("code law", code=0.4, law=0.5, math=0.3) == ({"code", "law"}, "law")
    # math enters the top two instead of law, which is active and protected; code is of the two. No victim: no load,
    # and the argmax of what is resident runs.
    assert point("code law", code=0.5, law=0.1, math=0.6) == ({"code", "law"}, "code")
    # Now law is neither wanted nor active: evicted, math starts to load; code goes on.
    assert point("code law", code=0.5, law=0.1, math=0.6) == ({"code", "math"}, "code")
    # Still loading: it takes a slot, nothing else is started, although general is in the top two.
    assert point("code", "math", code=0.2, general=0.9, math=0.6) == ({"code", "math"}, "code")
    # It is there and becomes active, after the memory was looked at: code was active then, and could not go.
    assert point("code math", code=0.2, general=0.9, math=0.6) == ({"code", "math"}, "math")
    # Now it can, for general.
    assert point("code math", code=0.2, general=0.9, math=0.6) == ({"math", "general"}, "math")


def test_memspec_evicts_the_lowest_predicted() -> None:
    made = policy("memspec", capacity=3)
    made.begin()
    made.hold(view("code general law", ranking=ranking(code=0.9, general=0.5, law=0.4), capacity=3))
    found = made.hold(view("code general law", ranking=ranking(code=0.9, math=0.8, law=0.2, general=0.3), capacity=3))
    assert found is not None
    assert set(found.wanted[:3]) == {"code", "math", "general"}
    assert found.wanted[3:] == ("law",)


def test_memspec_chooses_at_scheduling_points_only() -> None:
    made = policy("memspec")
    made.begin()
    made.hold(view("code law", ranking=ranking(code=0.9, law=0.5)))
    made.rank(ranking(code=0.1, law=0.9))
    assert {step(made, "code law").draft for _ in range(10)} == {"code"}
    made.hold(view("code law", ranking=ranking(code=0.1, law=0.9)))
    assert step(made, "code law") == Plan("law", 4)
    assert made.preferred() == "law"


# Bandits over drafts


@pytest.mark.parametrize("spec", ["mab-sync", "mab-async", "ucbspec"])
def test_each_draft_is_tried_once_first_in_every_text(spec: str) -> None:
    made = policy(spec)
    for _ in range(2):
        made.begin()
        pulled = []
        for _ in NAMES:
            holding = made.hold(view("general"))
            assert holding is not None
            assert holding.wait == (spec == "mab-sync" and holding.wanted[0] != "general")
            pulled.append(holding.wanted[0])
            for _ in range(4):
                step(made, pulled[-1], 2)
        assert pulled == list(NAMES)


@pytest.mark.parametrize("spec", ["mab-async", "ucbspec"])
def test_equal_arms_are_kept_in_the_order_of_the_drafts(spec: str) -> None:
    """Not in that of a set, which another run would have otherwise."""
    drafts = tuple(f"draft-{number}" for number in range(9))
    made = policy(spec, drafts, capacity=9)
    made.begin()
    holding = made.hold(view(" ".join(drafts), capacity=9, drafts=drafts))
    assert holding is not None
    assert holding.wanted == drafts


def test_mab_async_runs_the_best_resident_until_its_arm_is_there_and_keeps_the_arm_until_it_ran() -> None:
    made = policy("mab-async")
    made.begin()
    made.hold(view("general"))
    step(made, "general", 4)
    made.hold(view("general"))
    assert made.preferred() == "code"
    for _ in range(3):
        assert step(made, "general", 4).draft == "general"
        made.hold(view("general", "code"))
        assert made.preferred() == "code"
    assert step(made, "general code", 0).draft == "code"
    made.hold(view("general code"))
    assert made.preferred() == "math"


def test_a_failed_arm_is_not_pulled() -> None:
    for spec in ("mab-async", "exp3spec"):
        made = policy(spec, drafts=("general", "code"))
        made.begin()
        for _ in range(30):
            made.hold(view("general", failed=frozenset({"code"}), drafts=("general", "code")))
            step(made, "general", 2)
        assert spec != "mab-async" or made.preferred() == "general"


def test_rounds_of_lookup_are_no_pulls() -> None:
    made: Any = policy("mab-async")
    made.begin()
    made.hold(view("general"))
    made.observe(ran("ngram", 4, 4))
    assert made._bandit.counts == [0, 0, 0, 0]


def test_exp3_updates_only_what_its_arm_did() -> None:
    made: Any = policy("exp3spec", seed=1)
    made.begin()
    made.hold(view("general code math law"))
    arm = made.preferred()
    other = next(name for name in NAMES if name != arm)
    made.observe(ran(other, 0, 4))
    assert made.hold(view(" ".join(NAMES))) is None  # it never ran
    made.observe(ran(arm, 1, 4))
    made.observe(ran(arm, 3, 4))
    made.hold(view(" ".join(NAMES)))
    assert made._bandit._losses[NAMES.index(arm)] == pytest.approx((1 - 3 / 5) / 0.25)


def test_hedge_hears_every_resident_draft_in_every_round_and_brings_in_who_was_not_heard() -> None:
    made: Any = policy("hedge")
    made.begin()
    able = candidates("general", "code")
    holding = made.hold(view("general code"))
    assert holding.wanted[0] in ("math", "law") or set(holding.wanted[:2]) >= {"general"}
    for _ in range(40):
        plan = made.plan(able, 100)
        shadows = made.shadows(plan, able)
        assert {plan.draft, *(s.name for s in shadows)} == {"general", "code"}
        assert {s.shadow for s in shadows} == {4}
        made.observe(ran(plan.draft, 4 if plan.draft == "code" else 0, 4))
        for shadow in shadows:
            made.credit(shadow, 1, 0) if shadow.name == "general" else made.credit(shadow, 4, 4)
    assert [made.plan(able, 100).draft for _ in range(20)].count("code") >= 18
    holding = made.hold(view("general code"))
    assert holding.wanted[0] == "code"
    assert set(holding.wanted[1:2]) <= {"math", "law"}
    assert "not heard" in holding.reason


# Nightjar


def test_nightjar_learns_seconds_per_token_and_charges_the_catch_up_once() -> None:
    made: Any = policy("nightjar:code@3")
    made.begin()
    assert made.hold(view("general")).wanted == ("code",)
    best = {0: 1.0, 1: 0.8, 2: 0.5, 3: 0.9}
    for _ in range(600):
        plan = made.plan(candidates("code"), 100)
        assert plan.draft in ("code", None)
        steps = 0.05 * plan.gamma
        seconds = best[plan.gamma] - steps
        made.observe(Observation(plan.draft, 1, plan.gamma, plan.gamma, 0, plan.gamma + 1, steps, seconds, emitted=1))
    means = made._planner._timelines[""].means
    assert means[0] == pytest.approx(1.0)
    assert means[2] == pytest.approx(0.5, abs=0.01)
    plans = [made.plan(candidates("code"), 100).gamma for _ in range(100)]
    assert plans.count(2) > 50
    far = [c._replace(behind=400) if c.name == "code" else c for c in candidates("code")]
    made.plan(far, 100)
    assert made._switch() == pytest.approx(400 * 0.25 * 0.05)


def test_nightjar_follows_the_ranking_where_no_draft_is_given() -> None:
    made = policy("nightjar")
    made.begin()
    holding = made.hold(view("general", ranking=ranking(law=0.7, code=0.2)))
    assert holding is not None
    assert holding.wanted == ("law",)
    assert made.preferred() == "law"


def test_nightjar_learns_nothing_from_rounds_in_which_nothing_could_propose() -> None:
    made: Any = policy("nightjar:code")
    for _ in range(50):
        plan = made.plan(candidates(), 100)
        made.observe(Observation(None, 0, 0, 0, 0, 1, 0.0, 1.0, emitted=1))
        assert plan == PLAIN
    assert not any(made._planner._timelines[""].counts[1:])


def test_mab_async_keeps_a_tried_arm_too_until_it_ran() -> None:
    made = policy("mab-async,c=0.1", drafts=("general", "code"))
    made.begin()
    for name, rounds in (("general", 2), ("code", 1)):
        made.hold(view("general code", drafts=("general", "code")))
        assert made.preferred() == name
        for _ in range(rounds):
            step(made, "general code", 0)
    for _ in range(5):  # both brought nothing, code was tried less; what the stand-in does changes nothing
        made.hold(view("general", "code", drafts=("general", "code")))
        assert made.preferred() == "code"
        assert step(made, "general", 4).draft == "general"
    step(made, "general code", 0)
    made.hold(view("general code", drafts=("general", "code")))
    assert made.preferred() == "general"
