"""Several texts at once on one policy: what was learned is common; ranking, preference, lock-in are each text's own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from edgespec.decoding.guard import Guarded
from predictor import AutoPlanner, Candidate, CostTable, FixedPlanner, Observation, make_policy
from predictor.acceptance import Acceptance
from predictor.planner import NOTHING_TO_DRAFT, Forecast, OnlyPlanner
from predictor.policies import POLICIES, LockedPolicy, View
from predictor.policies.edgespec import EdgePolicy
from predictor.policies.oracle import CHECK_ONLY

NAMES = ("code", "math", "law")
COSTS = {width: 1.0 + 0.2 * (width - 1) for width in range(1, 12)}
CANDIDATES = [Candidate(name, 1) for name in NAMES]
NGRAM = Candidate("ngram", 3, free=True)
WITHOUT_FORESIGHT = [name for name in POLICIES if not name.startswith("oracle")]


def policy(name: str = "edgespec") -> Any:
    spec = "static:code@4" if name == "static" else name
    costs = CostTable(COSTS, dict.fromkeys(NAMES, 0.05))
    return make_policy(spec, costs, NAMES, capacity=3, seed=4, trace=CHECK_ONLY)  # type: ignore[arg-type]


def seen(draft: str, accepted: int, *, asked: int = 4, batch: int = 1) -> Observation:
    return Observation(
        draft, 1, asked, asked, accepted, asked + 1, 0.2, 1.8, asked=asked, emitted=accepted + 1, batch=batch
    )


def view(round: int = 0, **changes: Any) -> View:
    here = frozenset(NAMES)
    return dataclasses.replace(View(round, here, frozenset(), frozenset(), 3, NAMES, None, None, 60.0), **changes)


def test_a_text_learns_for_all_but_its_recent_past_is_its_own() -> None:
    shared = EdgePolicy(CostTable(COSTS, {"code": 0.05}), ["code"])
    good, bad, idle = (shared.for_text() for _ in range(3))
    for text in (good, bad, idle):
        text.begin()
    for _ in range(30):
        good.observe(seen("code", 4))
        bad.observe(seen("code", 0))
    rates = [text.forecast([CANDIDATES[0]], 8).rates[0] for text in (good, bad, idle)]
    assert rates[0] > 0.8 > rates[2] > rates[1] < 0.3
    assert good.plan([CANDIDATES[0]], 8).gamma > 2
    assert bad.plan([CANDIDATES[0]], 8).gamma == 0
    history = shared._arm("code", 1).history()[0]
    assert 30 < history[0][1] <= 60  # tries of both, discounted
    assert shared.state().arms[("code", 1)].tried == history


def test_one_text_after_the_other_is_as_without_views() -> None:
    def decided(by: Any, text_of: Any) -> list[Any]:
        found = []
        for accepted in (4, 0, 2):
            text = text_of(by)
            text.begin()
            text.rank({"code": 0.3 + 0.1 * accepted, "math": 0.4})
            for _ in range(12):
                plan = text.plan(CANDIDATES, 20)
                if plan.draft:
                    text.observe(seen(plan.draft, min(accepted, plan.gamma), asked=plan.gamma))
                found.append((plan, text.forecast(CANDIDATES, 20)))
        return found

    for name in ("edgespec",):
        assert decided(policy(name), lambda p: p) == decided(policy(name), lambda p: p.for_text())


@pytest.mark.parametrize("name", WITHOUT_FORESIGHT)
def test_texts_do_not_overwrite_each_other(name: str) -> None:
    """Two texts whose rounds alternate want what each of them wants when it is alone (where nothing is drawn)."""
    made = LockedPolicy(policy(name))
    first, second = made.for_text(), made.for_text()
    rankings = {"code": 0.9, "math": 0.2, "law": 0.1}, {"code": 0.1, "math": 0.2, "law": 0.9}
    for text, ranking in zip((first, second), rankings):
        text.begin()
        text.rank(ranking)
    for text, ranking in zip((first, second), rankings):
        text.hold(view(ranking=ranking))
    if name in ("edgespec", "memspec", "nightjar"):
        assert (first.preferred(), second.preferred()) == ("code", "law")
    assert second.informed() == first.informed()
    wanted = first.preferred()
    second.observe(seen("law", 0))
    second.hold(view(4, ranking=rankings[1]))
    second.begin()
    assert first.preferred() == wanted
    for text in (first, second):
        forecast = text.forecast([*CANDIDATES, NGRAM], 5)
        assert len(forecast.rates) == len(forecast.offered) <= 5
        assert (forecast.draft is None) == (name == "plain")
        assert text.forecast([*CANDIDATES, NGRAM], 0) == NOTHING_TO_DRAFT
        assert text.forecast([], 5) == NOTHING_TO_DRAFT


@pytest.mark.parametrize("name", WITHOUT_FORESIGHT)
def test_a_forecast_is_of_the_draft_that_would_run(name: str) -> None:
    ours, theirs = policy(name), policy(name)
    for one in (ours, theirs):
        one.begin()
        one.hold(view())
    plan, forecast = ours.plan([*CANDIDATES, NGRAM], 6), theirs.forecast([*CANDIDATES, NGRAM], 6)
    assert forecast.draft == plan.draft or plan.draft is None


def test_a_forecast_learns_from_rounds_also_under_the_published_ones() -> None:
    made = policy("static")
    text = made.for_text()
    text.begin()
    before = text.forecast(CANDIDATES, 4).rates
    for _ in range(20):
        text.observe(seen("code", 4))
    assert text.forecast(CANDIDATES, 4).rates[0] > before[0] + 0.2
    assert made.for_text().forecast(CANDIDATES, 4).rates[0] > before[0] + 0.2


def test_a_batchs_seconds_are_no_verify_times_but_the_rounds() -> None:
    for made in (policy("edgespec"), policy("memspec")):
        before = list(made.costs.curve(8))
        text = made.for_text()
        text.begin()
        for _ in range(20):
            text.observe(seen("code", 2, batch=8)._replace(target_seconds=50.0))
        assert list(made.costs.curve(8)) == before
    shared = EdgePolicy(CostTable(COSTS), NAMES)
    text = shared.for_text()
    text.observe(seen("code", 2, batch=8)._replace(target_seconds=50.0))
    assert shared._clock.round_seconds > 50


def test_shadows_of_all_texts_come_out_of_one_purse() -> None:
    shared = AutoPlanner(CostTable({1: 1.0, 2: 1.1}, dict.fromkeys(NAMES, 0.1)))
    texts = [shared.for_text() for _ in range(8)]
    for text in texts:
        text.begin()
    asked, rounds = 0, 20
    for _ in range(rounds):
        for text in texts:
            asked += len(text.shadows(text.plan([], 0), CANDIDATES))
    begun, earned = 0.015 * 64, 0.015 * 8 * rounds
    assert 10 < asked <= (begun + earned) / 0.1


def test_a_view_leaves_what_is_anothers_alone_from_the_first_moment() -> None:
    shared = policy("edgespec")
    shared.begin()
    shared.rank({"code": 0.9})
    shared.hold(view())
    text = shared.for_text()
    text.rank({"code": 0.1, "law": 0.2})
    text.hold(view(resident=frozenset({"law"})))
    assert shared._ranking == {"code": 0.9}
    assert shared._heard == set(NAMES)


def test_fixed_planners_say_that_gamma_is_not_to_be_chosen() -> None:
    forecast = FixedPlanner("code", 3).forecast([Candidate("code", 1, behind=9)], 10)
    assert forecast == Forecast("code", (0.5,) * 3, (1.0,) * 3, 9, 3)
    assert FixedPlanner(None, 3).forecast(CANDIDATES, 2).fixed == 2
    assert FixedPlanner("code", 3).forecast([], 10).fixed == 0
    assert AutoPlanner().seeded().forecast(CANDIDATES, 10).fixed == 3
    assert AutoPlanner().forecast(CANDIDATES, 10).fixed is None
    only = OnlyPlanner(AutoPlanner(), "math")
    assert only.forecast(CANDIDATES, 10).draft == "math"
    assert only.forecast(CANDIDATES[:1], 10) == NOTHING_TO_DRAFT


@pytest.mark.parametrize(
    "said",
    [
        Forecast("code", (0.5, float("nan")), (1.0, 1.0)),
        Forecast("code", (1.5,), (1.0,)),
        Forecast("code", (0.5,), (1.0, 1.0)),
        Forecast("code", ("x",), (1.0,)),  # type: ignore[arg-type]
        None,
    ],
)
def test_a_forecast_that_is_none_ends_guessing_and_nothing_else(said: Any) -> None:
    class Odd(AutoPlanner):
        def forecast(self, candidates: Any, limit: int) -> Any:
            return said

    guarded = Guarded(Odd())
    assert guarded.forecast(CANDIDATES, 4) == NOTHING_TO_DRAFT
    assert guarded.forecast(CANDIDATES, 4).draft is None
    assert guarded.off


def test_a_forecast_of_a_draft_that_cannot_run_or_of_too_much_is_cut() -> None:
    class Odd(AutoPlanner):
        def forecast(self, candidates: Any, limit: int) -> Any:
            return Forecast("away" if limit == 1 else "code", [0.5] * 9, [1.0] * 9, -4, 12)

    guarded = Guarded(Odd())
    assert guarded.forecast(CANDIDATES, 1).draft is None
    assert guarded.forecast(CANDIDATES, 4) == Forecast("code", [0.5] * 4, [1.0] * 4, 0, 4)
    assert not guarded.off


def test_rates_of_a_text_follow_the_long_run_that_others_change() -> None:
    common = Acceptance(0.5, 4)
    one, other = common.for_text(), common.for_text()
    before = one.rates()[0]
    for _ in range(50):
        other.update(4, 4)
    assert one.rates()[0] > before + 0.2
    one.expect(0.1)
    assert one.rates()[0] < 0.2 < other.rates()[0]
    assert common.for_text().rates()[0] > 0.8
