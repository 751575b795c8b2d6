"""What an engine tells its working set and its policy, and what it holds before the first text."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine, SamplingParams, residency
from edgespec.errors import DraftError
from edgespec.memory.pressure import PressureMonitor, Step
from edgespec.memory.states import State
from edgespec.memory.topology import process_memory
from predictor.planner import AutoPlanner
from tests.support.held import NAMES, make_held_target
from tests.support.tiny_engine import QUESTION, load, plain

LONG = SamplingParams(max_new_tokens=40, ignore_eos=True)
WAIT = 10.0


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("handed")


@pytest.fixture
def target(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_held_target(home, monkeypatch)


def resident(engine: Engine) -> list[str]:
    assert engine.working_set is not None
    return [name for name, state in engine.working_set.states().items() if state.state is State.RESIDENT]


def test_an_engine_shrinks_when_memory_is_short(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short:
        def check(self, now: float, capacity: int) -> Step | None:
            return Step(0, "nothing is left") if capacity else None

    monkeypatch.setattr(PressureMonitor, "of", lambda *_, **__: Short())
    with load(target, resident=2, gamma=3) as engine:
        engine.working_set.tick()
        assert engine.working_set.idle(WAIT)
        assert resident(engine) == []
        result = engine.generate(QUESTION, LONG)
        assert result.token_ids == plain(engine, QUESTION, LONG)
        assert result.stats.draft_share["plain"] == result.stats.rounds


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="has no page cache to advise")
@pytest.mark.parametrize(("kind", "drops"), [("unified", True), ("cpu", False)])
def test_what_was_read_is_given_back_where_it_competes_with_weights(
    target: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, drops: bool
) -> None:
    advice, topology_of = [], residency.topology_of
    monkeypatch.setattr(residency, "topology_of", lambda config: replace(topology_of(config), kind=kind))
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: advice.append(given[-1]))
    with load(target, resident=2, gamma=3):
        assert (os.POSIX_FADV_DONTNEED in advice) == drops


def test_the_policy_hears_what_loads_take_and_what_drafts_promise(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected: dict[str, float] = {}
    monkeypatch.setattr(AutoPlanner, "expect", lambda self, name, rate: expected.update({name: rate}))
    with load(target, resident=4, gamma="auto") as engine:
        manifests = engine._drafts.manifests
        assert expected == {name: manifests[name].expected for name in NAMES}
        assert all(rate is not None for rate in expected.values())
        measured = engine._target.costs.to_json()["loads"]
        taken = [state.load_seconds for state in engine.working_set.states().values()]
        assert min(taken) / 2 < min(measured.values()) < 2 * max(taken)


def test_a_draft_that_was_given_up_is_not_resident_to_the_policy(target: Path) -> None:
    with load(target, resident=2, gamma="auto") as engine:
        lost, kept = resident(engine)
        views = []
        engine._held.policy.hold = lambda view: views.append(view)
        engine._statuses[lost].failed(DraftError("damaged"))
        engine._held.scheduler.hold(rounds=1, rounds_left=9.0, active=None, ranking=None)
        assert views[0].resident == {kept}
        assert lost in views[0].failed
        assert lost not in views[0].drafts


def test_rounds_without_the_draft_that_is_wanted_most_are_counted(target: Path) -> None:
    with load(target, resident=1, gamma="auto") as engine:
        (here,) = resident(engine)
        away = next(name for name in NAMES if name != here)
        engine._held.policy.hold = lambda view: None
        engine._held.policy.preferred = lambda: away
        assert engine.generate(QUESTION, LONG).stats.fallback_share == 1.0
        engine._held.policy.preferred = engine._held.policy.reads = lambda: here
        engine._held.policy.pays_to_read = lambda lagging, candidates: True
        assert engine.generate(QUESTION, LONG).stats.fallback_share < 0.2


@pytest.mark.parametrize(
    ("policy", "held"), [("plain", []), ("static:math@3", ["math"]), ("mab-sync,n=1", ["general", "chat"])]
)
def test_what_is_held_before_the_first_text(target: Path, policy: str, held: list[str]) -> None:
    with load(target, resident=2, gamma="auto", policy=policy) as engine:
        assert len(resident(engine)) == len(held)
        assert policy.startswith("mab") or resident(engine) == held
        assert engine._held.scheduler.exposed_seconds == 0.0


def test_a_seed_writes_the_same_text_however_many_drafts_fit(target: Path) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=7, ignore_eos=True)
    texts = set()
    with load(target, resident=4, gamma="auto") as engine:
        for capacity in (4, 3, 0):
            engine.working_set.set_capacity(capacity, "test")
            assert engine.working_set.idle(WAIT)
            texts.add(engine.generate(QUESTION, params).token_ids)
    assert len(texts) == 1


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="measures resident memory")
def test_memory_is_flat_over_many_loads_of_heads(target: Path) -> None:
    sizes = []
    with load(target, resident=1, gamma=3) as engine:
        for turn in range(100):
            engine.working_set.retarget([NAMES[turn % 4]], reason="test")
            assert engine.working_set.wait_for(NAMES[turn % 4], WAIT)
            if turn % 10 == 9:
                engine.generate(QUESTION, LONG)
                gc.collect()
                sizes.append(process_memory())
        assert engine.working_set.counters.loads >= 100
    assert max(sizes[5:]) - max(sizes[:5]) < 2 << 20
