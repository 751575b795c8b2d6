"""The parts of serving by themselves: votes, memory, lengths, drafters (for queue and handle see test_request)."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from edgespec.config import RuntimeConfig
from edgespec.errors import MemoryBudgetError
from edgespec.memory.working_set import WorkingSet
from edgespec.serving import memory
from edgespec.serving.drafters import Drafters
from edgespec.serving.lengths import Lengths
from edgespec.serving.records import BatchRecord
from edgespec.serving.texts import Texts
from edgespec.steering import RankerThread, Scheduler
from predictor import CostTable
from predictor.load import BatchCosts, make_load_planner
from predictor.planner import PLAIN, Forecast
from predictor.policies import make_policy
from tests.support.loadables import ScriptedDraft

MIB = 1 << 20


# Votes


def scheduler(names: str, slots: int) -> tuple[Scheduler, WorkingSet]:
    drafts = [ScriptedDraft(name) for name in names]
    working_set = WorkingSet(drafts, slots=slots)
    policy = make_policy("edgespec", CostTable(), list(names), capacity=slots)
    statuses = [SimpleNamespace(name=name, active=True, loadable=True) for name in names]
    return Scheduler(policy, working_set, statuses, CostTable()), working_set  # type: ignore[arg-type]


def test_what_several_texts_want_is_put_together() -> None:
    common, working_set = scheduler("abcd", 2)
    with working_set:
        texts = Texts(common)
        voters = [texts.steering(common.policy.for_text(), 10)[1] for _ in range(3)]
        for voter, wanted in zip(voters, ("ab", "ac", "da")):
            assert voter.retarget(list(wanted), "a text")
        assert working_set._books.schedule.wanted[:2] == ("a", "d")
        voters[0].withdraw()
        voters[1].withdraw()
        voters[2].retarget(["c", "b"], "it has turned")
        assert working_set._books.schedule.wanted == ("c", "b")
        common.pin("a")
        assert not voters[2].retarget(["d"], "no matter")
        assert working_set._books.schedule.wanted == ("a",)
    common.close()


def test_the_votes_of_one_batch_are_passed_on_once(monkeypatch: pytest.MonkeyPatch) -> None:
    common, working_set = scheduler("abcd", 2)
    with working_set:
        texts, asked = Texts(common), []
        retarget, states = working_set.retarget, working_set.states
        monkeypatch.setattr(
            working_set, "retarget", lambda *args, **more: asked.append(more) or retarget(*args, **more)
        )
        monkeypatch.setattr(working_set, "states", lambda: asked.append("states") or states())
        voters = [texts.steering(common.policy.for_text(), 10)[1] for _ in range(3)]
        with texts.together():
            for voter, wanted, active in zip(voters, ("ab", "ac", "da"), (None, "c", None)):
                voter.retarget(list(wanted), "a text", in_use=active)
                assert voter.states() is voters[0].states()
            assert asked == ["states"]
        assert [each for each in asked if each != "states"] == [{"reason": ANY, "in_use": "c"}]
        assert working_set._books.schedule.wanted[:2] == ("a", "d")
        with texts.together():
            pass
        assert len(asked) == 2  # nobody has voted
        with texts.together():  # one that waits for a load does not wait for what nobody was told of
            voters[0].retarget(["b"], "a text")
            voters[0].settle()
            assert len(asked) == 3
        assert len(asked) == 3
    common.close()


def test_a_working_set_that_fails_does_not_fail_the_batch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    common, working_set = scheduler("ab", 1)
    with working_set:
        texts = Texts(common)
        voter = texts.steering(common.policy.for_text(), 10)[1]
        monkeypatch.setattr(common, "retarget", lambda *args, **more: 1 / 0)
        with texts.together():
            voter.retarget(["a"], "a text")
        assert "the working set is left as it is" in caplog.text
    common.close()


def test_each_text_has_its_own_questions_to_the_ranker() -> None:
    busy, go = threading.Event(), threading.Event()

    class Slow:
        def rank(self, features: np.ndarray) -> dict[str, float]:
            busy.set()
            assert go.wait(10)
            return {"a": float(features[0])}

    ranker = RankerThread(Slow())
    try:
        ranker.ask(1, np.full(1, 0.1, np.float32))
        assert busy.wait(10)
        for ticket, rate in ((2, 0.2), (3, 0.9), (3, 0.3)):
            ranker.ask(ticket, np.full(1, rate, np.float32))
        go.set()
        for ticket in (1, 2, 3):
            ranking = ranker.take(ticket, 10)
            assert ranking is not None
            assert ranking["a"] == pytest.approx(ticket / 10)
        assert ranker.answers == 3  # of text 3 the newest question only
        assert ranker.take(3) is None
    finally:
        ranker.close()


# Memory


def need(room: int, **settings: Any) -> memory.ServingNeed:
    config = RuntimeConfig(home=Path("x"), **settings)
    return memory.fitted(config, weights=100 * MIB, context=1024, position=MIB // 16, room=room)


def test_the_pool_takes_what_is_left_up_to_every_context_in_full() -> None:
    assert need(10_000 * MIB) == memory.ServingNeed(8 * 64 * MIB, 100 * MIB, 8)
    assert need(300 * MIB) == memory.ServingNeed(200 * MIB, 100 * MIB, 8)
    assert need(0) == memory.ServingNeed(32 * MIB, 100 * MIB, 8)  # 512 positions, which do not fit
    assert need(10_000 * MIB, max_sessions=1) == memory.ServingNeed(64 * MIB, 0, 1)
    assert need(10_000 * MIB, max_sessions=9, device="torch-cpu") == memory.ServingNeed(9 * 64 * MIB, 0, 16)
    assert need(0, kv_memory="7MiB").pool == 7 * MIB


def test_what_drafts_keep_of_further_requests_is_counted() -> None:
    config = RuntimeConfig(home=Path("x"))
    sizes = {"weights": 100 * MIB, "context": 1024, "position": MIB // 16}
    need = memory.fitted(config, **sizes, room=300 * MIB, further=10 * MIB)
    assert need == memory.ServingNeed(130 * MIB, 100 * MIB, 8, 70 * MIB)
    assert need.total == 300 * MIB


def test_the_pool_is_beside_the_one_conversation_that_is_planned() -> None:
    """It may run while the pool is full."""
    config = RuntimeConfig(memory_budget="600MiB", home=Path("x"))
    planned = {"target": 300 * MIB, "KV cache": 64 * MIB}
    need = memory.need_of(config, planned, weights=100 * MIB, context=1024, position=MIB // 16)
    assert need.parts == {"batch graph": 100 * MIB, "KV pool": 136 * MIB}
    assert sum(planned.values()) + need.total == 600 * MIB


def test_what_the_graph_really_takes_counts() -> None:
    planned = {"target": 300 * MIB, "KV cache": 64 * MIB}
    sizes = {"context": 1024, "position": MIB // 16}
    config = RuntimeConfig(memory_budget="600MiB", home=Path("x"))
    need = memory.need_of(config, planned, weights=100 * MIB, **sizes)
    assert memory.measured(config, need, 90 * MIB, planned, **sizes).pool == need.pool
    assert memory.measured(config, need, 120 * MIB, planned, **sizes).parts == {
        "batch graph": 120 * MIB,
        "KV pool": 116 * MIB,
    }
    with pytest.raises(MemoryBudgetError, match=r"32.0 MiB for keys and values and 250.0 MiB for batches"):
        memory.measured(config, need, 250 * MIB, planned, **sizes)
    asked = config.replace(kv_memory=130 * MIB)
    need = memory.need_of(asked, planned, weights=100 * MIB, **sizes)
    with pytest.raises(MemoryBudgetError, match="does not fit"):
        memory.measured(asked, need, 120 * MIB, planned, **sizes)


def test_a_budget_that_is_too_small_is_named_with_all_numbers() -> None:
    config = RuntimeConfig(memory_budget="400MiB", home=Path("x"))
    planned = {"target": 300 * MIB, "KV cache": 64 * MIB}
    with pytest.raises(MemoryBudgetError, match=r"serving 8 requests .* budget is 400.0 MiB.* --kv-memory") as caught:
        memory.need_of(config, planned, weights=100 * MIB, context=1024, position=MIB // 16)
    assert "32.0 MiB for keys and values and 100.0 MiB for batches" in str(caught.value)


# Lengths


class FakeGeneration:
    def __init__(self, forecast: Forecast, limit: int = 9) -> None:
        self._forecast, self.limit = forecast, limit

    def forecast(self, looked: Any) -> Forecast:
        return self._forecast


def active(key: int, forecast: Forecast) -> Any:
    return SimpleNamespace(
        key=key, generation=FakeGeneration(forecast), session=SimpleNamespace(tokens=[1] * (10 + key))
    )


def test_plans_are_the_planners_lengths_of_each_texts_own_draft() -> None:
    planner = make_load_planner("fixed:2", BatchCosts.guessed(CostTable()), CostTable())
    chosen = Lengths(planner)
    assert not chosen.direct
    asked = [
        (active(0, Forecast("a", (0.9,) * 4, (1.0,) * 4)), None),
        (active(1, Forecast(None, (), ())), None),
        (active(2, Forecast("b", (0.5,) * 3, (1.0,) * 3, 0, 3)), None),
        (active(3, Forecast("a", (0.5,), (1.0,))), None),
    ]
    plans = chosen.plans(asked, queued=3, kv_free=0.5, prefill_rows=16)  # type: ignore[arg-type]
    assert [(plan.draft, plan.gamma) for plan in plans] == [("a", 2), (None, 0), ("b", 3), ("a", 1)]
    assert plans[1] is PLAIN
    assert plans[2].floor == 0.0


def test_what_came_of_a_batch_is_told_unless_one_failed_on_the_way() -> None:
    told: list[Any] = []
    planner = SimpleNamespace(
        name="edgespec:8", floor=0.25, lengths=lambda view: [2] * len(view.running), observe=told.append
    )
    chosen = Lengths(planner)  # type: ignore[arg-type]
    assert chosen.direct
    asked = [(active(i, Forecast("a", (0.9,) * 4, (1.0,) * 4)), None) for i in range(2)]
    (first, _) = chosen.plans(asked, queued=0, kv_free=1.0, prefill_rows=0)  # type: ignore[arg-type]
    assert first.floor == 0.25
    record = BatchRecord(1.0, 2, 6, requests=("x", "y"), drafted=(2, 1), accepted=(1, 0), emitted=(2, 1), seconds=0.5)
    chosen.observe(record)
    assert (told[0].lengths, told[0].accepted, told[0].rows, told[0].seconds) == ((2, 1), (1, 0), 6, 0.5)
    assert [one.context for one in told[0].view.running] == [10, 11]
    chosen.plans(asked, queued=0, kv_free=1.0, prefill_rows=0)  # type: ignore[arg-type]
    chosen.observe(BatchRecord(1.0, 1, 3, requests=("x",)))
    chosen.observe(record)  # nothing was planned
    assert len(told) == 1


# Drafters


def test_texts_of_one_draft_take_turns_and_drafts_work_beside_each_other() -> None:
    drafters, both, done = Drafters(2), threading.Barrier(2, timeout=10), list[tuple[str, int]]()

    def job(name: str, number: int) -> Any:
        def work() -> None:
            if number == 0:
                both.wait()  # the other draft runs at the same time
            done.append((name, number))

        return work

    drafters.run([("a", job("a", 0)), ("b", job("b", 0)), ("a", job("a", 1)), (None, lambda: done.append(("-", 0)))])
    drafters.close()
    assert sorted(done) == [("-", 0), ("a", 0), ("a", 1), ("b", 0)]
    assert done.index(("a", 0)) < done.index(("a", 1))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("edgespec-drafts")]


def jobs(done: list[str]) -> Any:
    return [(name, lambda name=name: done.append(name)) for name in "abca"]


def test_where_no_thread_can_be_had_all_is_done_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    drafters, done = Drafters(), list[str]()
    drafters.run(jobs(done))
    drafters.close()
    assert sorted(done) == ["a", "a", "b", "c"]


def test_nothing_guesses_any_more_when_one_of_them_has_failed() -> None:
    drafters, go, done = Drafters(2), threading.Event(), list[int]()

    def slow() -> None:
        assert go.wait(10)
        done.append(1)

    def fail() -> None:
        threading.Timer(0.05, go.set).start()
        raise KeyError("it should not")

    with pytest.raises(KeyError):
        drafters.run([("a", slow), ("b", fail)])
    assert done == [1]
    drafters.close()


def test_drafts_work_on_after_the_main_thread_has_ended() -> None:
    """Threads of a program may use an engine that the main thread has left to them."""
    code = """
import threading, time
from edgespec.serving.drafters import Drafters
def work():
    threading.main_thread().join()
    time.sleep(0.1)
    drafters, done = Drafters(), []
    drafters.run([(name, lambda name=name: done.append(name)) for name in "abca"])
    drafters.close()
    print("".join(sorted(done)))
threading.Thread(target=work).start()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout.strip(), ended.stderr) == ("aabc", "")
