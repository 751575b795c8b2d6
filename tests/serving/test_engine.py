"""Many requests at once on a real engine with a tiny model: texts, memory, settings, drafts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgespec import Engine, SamplingParams
from edgespec.errors import ConfigError, MemoryBudgetError, ParameterError, PromptError, RequestTooLong
from tests.cases.test_threads import together
from tests.serving.engines import GREEDY, PROMPTS, WAIT, load
from tests.support.held import NAMES, make_held_target


def waits_for(engine: Engine, count: int) -> None:
    """In the serving thread: until so many have been submitted, of which none is over."""
    until = time.monotonic() + WAIT
    while (now := engine.serving) is not None and now.queued + now.running < count and time.monotonic() < until:
        time.sleep(0.001)


def seeded(seed: int, temperature: float = 1.0) -> SamplingParams:
    return SamplingParams(max_new_tokens=24, temperature=temperature, seed=seed, ignore_eos=True)


# Texts


@pytest.mark.parametrize("weight_format", ["float32", "exact", "int8"])
@pytest.mark.parametrize("load_policy", ["edgespec", "fixed:3"])
def test_greedy_texts_at_once_are_those_alone(folder: Path, weight_format: str, load_policy: str) -> None:
    with load(folder, weight_format=weight_format, load_policy=load_policy) as engine:
        asked = [SamplingParams(max_new_tokens=40 + 4 * i, ignore_eos=True) for i in range(8)]
        prompts = [*PROMPTS, "the hen and the " * 8, "one one one one"]
        alone = [engine.generate(prompt, params).token_ids for prompt, params in zip(prompts, asked)]
        records: list[Any] = []
        engine.watch(records.append)
        engine.watch(lambda record: waits_for(engine, 8) if len(records) == 1 else None)
        for _ in range(2):  # the second time over prefixes that are there already
            many = engine.generate(prompts, asked)
            assert [result.token_ids for result in many] == alone
        assert max(record.sequences for record in records) == 8
        assert engine._target.decoder.batch_slots == 8
        if load_policy == "fixed:3":
            assert sum(sum(record.accepted) for record in records) > 40
        assert engine.serving is not None
        assert engine.serving.pool is not None
        assert engine.serving.pool.hit_tokens > 0
        assert engine.serving.pool.used == engine.serving.pool.promised == 0


@pytest.mark.parametrize("neighbours", [0, 1, 5])
def test_a_seeded_text_depends_on_nothing_that_runs_beside_it(engine: Engine, neighbours: int) -> None:
    for params in (seeded(1), seeded(2, 0.4), seeded(3, 1.5)):
        alone = engine.generate(PROMPTS[0], params).token_ids
        first = engine.submit(PROMPTS[0], params)
        others = [engine.submit(prompt, SamplingParams(temperature=1.0)) for prompt in PROMPTS[:neighbours]]
        assert first.result(WAIT).token_ids == alone
        for other in others:
            other.cancel()
            other.result(WAIT)


def test_all_forms_of_many_prompts(engine: Engine) -> None:
    texts = engine.generate(PROMPTS[:3], GREEDY)
    ids = engine.generate([engine.encode(prompt) for prompt in PROMPTS[:3]], GREEDY)
    messages = engine.generate([[{"role": "user", "content": prompt}] for prompt in PROMPTS[:3]], GREEDY)
    assert [r.token_ids for r in texts] == [r.token_ids for r in ids] == [r.token_ids for r in messages]
    one = engine.generate([{"role": "user", "content": PROMPTS[0]}], GREEDY)  # a conversation, no list of prompts
    assert one.token_ids == texts[0].token_ids
    assert engine.generate(engine.encode(PROMPTS[0]), GREEDY).token_ids == texts[0].token_ids
    raw = engine.generate(PROMPTS[:2], GREEDY, raw=True)
    assert [r.token_ids for r in raw] == [engine.generate(p, GREEDY, raw=True).token_ids for p in PROMPTS[:2]]


def test_what_is_wrong_with_one_of_many_is_said_before_anything_runs(engine: Engine) -> None:
    engine.start_serving()
    assert engine.serving is not None
    before = engine.serving.batches
    with pytest.raises(PromptError):
        engine.generate(["fine", ""], GREEDY)
    with pytest.raises(PromptError):
        engine.generate([[5, 6], [10**6]])
    with pytest.raises(ParameterError, match="2 prompts came with 1"):
        engine.generate(["a", "b"], [GREEDY])
    with pytest.raises(ParameterError, match="on_delta"):
        engine.generate(["a", "b"], on_delta=print)  # type: ignore[call-overload]
    with pytest.raises(ParameterError, match="deadline_s"):
        engine.submit("a", deadline_s=0)
    with pytest.raises(ParameterError, match="deadline_s is '5'"):
        engine.submit("a", deadline_s="5")  # type: ignore[arg-type]
    for wrong in (10**400, float("nan"), True):
        with pytest.raises(ParameterError, match=r"deadline_s is .*; allowed: None, or seconds above 0"):
            engine.submit("a", deadline_s=wrong)
    for params in ({"temperature": 1}, {}, 5):
        with pytest.raises(ParameterError, match="allowed: a SamplingParams"):
            engine.submit("a", params)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="allowed: a SamplingParams"):
        engine.generate(["a"], 5)  # type: ignore[call-overload]
    with pytest.raises(ParameterError, match="allowed: a SamplingParams"):
        engine.generate(["a", "b"], [GREEDY, {"seed": 1}])  # type: ignore[list-item]
    with pytest.raises(PromptError):
        engine.submit([])
    with pytest.raises(ParameterError):
        engine.submit("a", SamplingParams(logit_bias={10**6: 1.0}))
    with pytest.raises(PromptError):
        engine.generate([])
    assert engine.serving.batches == before


def test_more_prompts_than_the_queue_takes(folder: Path) -> None:
    with load(folder, (), max_sessions=2, max_queue=3) as engine:
        few = SamplingParams(max_new_tokens=3, ignore_eos=True)
        alone = engine.generate("one", few).token_ids
        assert [result.token_ids for result in engine.generate(["one"] * 20, few)] == [alone] * 20


def test_an_engine_for_one_at_a_time_serves_in_turn(folder: Path) -> None:
    with load(folder, max_sessions=1) as engine:
        alone = [engine.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]
        assert [result.token_ids for result in engine.generate(PROMPTS, GREEDY)] == alone
        assert engine._target.decoder.batch_slots == 1


def test_more_sequences_than_a_batch_has_slots(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgespec.serving.memory.slots_for", lambda sessions: 4)
    long = SamplingParams(max_new_tokens=80, ignore_eos=True)  # the first must not be over before the last is read
    with load(folder, max_sessions=16) as engine:
        prompts = [f"{i} and {i}" for i in range(16)]
        alone = [engine.generate(prompt, long).token_ids for prompt in prompts]
        records: list[Any] = []
        engine.watch(records.append)
        engine.watch(lambda record: waits_for(engine, 16) if len(records) == 1 else None)
        assert [result.token_ids for result in engine.generate(prompts, long)] == alone
        assert engine._target.decoder.batch_slots == 4
        assert max(record.sequences for record in records) == 16


def test_torch_serves_as_well(folder: Path) -> None:
    with load(folder, ("ngram",), device="torch-cpu") as engine:
        alone = [engine.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]
        assert [result.token_ids for result in engine.generate(PROMPTS, GREEDY)] == alone


def test_a_conversation_and_requests_share_an_engine(engine: Engine) -> None:
    expected = engine.generate(PROMPTS[0], GREEDY).token_ids
    chat = engine.conversation()
    turns = [chat.send("hello there", GREEDY).token_ids for _ in range(2)]

    def talk() -> list[Any]:
        other = engine.conversation()
        return [other.send("hello there", GREEDY).token_ids for _ in range(2)]

    def ask() -> Any:
        return engine.submit(PROMPTS[0], GREEDY).result(WAIT).token_ids

    results = together([talk, ask, ask, talk, ask, ask])
    assert [results[0], results[3]] == [turns, turns]
    assert [results[1], results[2], results[4], results[5]] == [expected] * 4


def test_requests_from_eight_threads(engine: Engine) -> None:
    alone = [engine.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]
    jobs = [lambda i=i: [engine.submit(p, GREEDY).result(WAIT).token_ids for p in PROMPTS] for i in range(8)]
    assert together(jobs) == [alone] * 8


def test_a_prefix_is_read_once(folder: Path) -> None:
    with load(folder, ()) as engine:
        shared = list(range(70, 70 + 64)) * 3
        first = engine.submit([*shared, 5], GREEDY).result(WAIT)
        second = engine.submit([*shared, 6], GREEDY).result(WAIT)
        assert first.stats.reused_tokens == 0
        assert second.stats.reused_tokens >= 128
        assert second.token_ids == engine.generate([*shared, 6], GREEDY).token_ids


# Memory and settings


def test_a_request_that_could_never_fit_is_refused_with_numbers(folder: Path) -> None:
    with load(folder, ()) as engine:
        position, context = engine.spec.position_bytes(), engine.context
    with load(folder, (), kv_memory=128 * position) as engine:
        with pytest.raises(RequestTooLong, match=r"100 prompt tokens and up to 60 new ones need 160 .* pool has 128"):
            engine.submit([5] * 100, SamplingParams(max_new_tokens=60))
        with pytest.raises(RequestTooLong):
            engine.generate([[5], [5] * 100], SamplingParams(max_new_tokens=60))
        assert len(engine.submit([5] * 100, SamplingParams(max_new_tokens=20, ignore_eos=True)).result(WAIT).token_ids)
        with pytest.raises(PromptError):
            engine.submit([5] * context)
        requests = [engine.submit([5 + i] * 60, SamplingParams(max_new_tokens=40, ignore_eos=True)) for i in range(6)]
        assert {len(request.result(WAIT).token_ids) for request in requests} == {40}  # one after the other


def test_what_does_not_fit_the_budget_is_refused_with_numbers(folder: Path) -> None:
    with load(folder, (), memory_budget="1GiB", kv_memory="2GiB") as engine:
        with pytest.raises(MemoryBudgetError, match=r"serving 8 requests at once does not fit: .*KV pool 2.0 GiB"):
            engine.submit("a")
        assert engine.serving is None
        assert engine.generate("a", GREEDY).stats.new_tokens == 24  # one at a time goes on


def test_the_plan_knows_of_the_pool_while_it_is_there(folder: Path) -> None:
    with load(folder, (), kv_memory="64MiB") as engine:
        before = dict(engine._target.planned)
        engine.start_serving()
        planned = engine._target.planned
        assert planned["KV cache"] == before["KV cache"]  # a conversation may run beside a full pool
        assert planned["KV pool"] == 64 << 20
        assert planned["batch graph"] == engine._target.decoder._batch.nbytes  # what it really takes
        assert engine.serving.memory_bytes == planned["KV pool"] + planned["batch graph"]
    assert engine._target.planned == before


def test_a_load_policy_that_is_none_is_refused(folder: Path, engine: Engine) -> None:
    with load(folder, (), load_policy="edgspec") as wrong:
        with pytest.raises(ConfigError, match=r"load policy 'edgspec' cannot work: .*did you mean edgespec"):
            wrong.submit("a")
        assert wrong.serving is None
    engine.start_serving()
    with pytest.raises(ConfigError, match="fixed needs"):
        engine.load_policy = "fixed"
    assert engine.load_policy == "edgespec"


def test_the_load_policy_changes_between_batches(folder: Path) -> None:
    with load(folder) as engine:
        records: list[Any] = []
        end = engine.watch(records.append)
        gammas = {}
        for name in ("none", "fixed:2", "none"):
            engine.load_policy = name
            records.clear()
            engine.generate(PROMPTS, GREEDY)
            gammas[name] = {gamma for record in records for gamma in record.gammas}
        assert gammas["none"] == {0}
        assert {1, 2} >= gammas["fixed:2"] - {0} != set()
        end()
        records.clear()
        engine.generate(PROMPTS, GREEDY)
        assert records == []


def test_a_fixed_gamma_is_fixed_for_all(folder: Path) -> None:
    with load(folder, ("itself",), gamma=2) as engine:
        many = engine.generate(PROMPTS, GREEDY)
        for result in many:
            assert set(result.stats.gamma_histogram) <= {0, 1, 2}
            assert result.stats.acceptance_rate == 1.0


# Drafts with weights


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    target = make_held_target(tmp_path, monkeypatch)
    with load(target, ("auto",), resident=2, load_policy="fixed:2") as engine:
        yield engine


def test_texts_with_several_heads_of_which_some_are_away(held: Engine) -> None:
    alone = [held.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]
    for _ in range(2):
        assert [result.token_ids for result in held.generate(PROMPTS, GREEDY)] == alone
    assert held.working_set is not None
    assert held.working_set.counters.waits_in_round == 0
    assert held.serving is not None
    assert len(held.serving.resident) == 2
    assert set(held.serving.resident) < set(NAMES)
    assert all(status.active for status in held._statuses.values())


def test_cancelled_while_drafts_are_loaded(held: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert held.working_set is not None
    expected = held.generate(PROMPTS[1], GREEDY).token_ids
    others = [name for name in NAMES if held.drafts[name] != "active"]
    entered, go = threading.Event(), threading.Event()

    def slow(draft: Any, slot: Any, control: Any) -> None:
        entered.set()
        while not go.wait(0.002):
            control.checkpoint()
        real(draft, slot, control)

    kind = type(held._statuses[others[0]].draft)
    real = kind.load
    monkeypatch.setattr(kind, "load", slow)
    first = held.submit(PROMPTS[0], SamplingParams(max_new_tokens=400, ignore_eos=True))
    second = held.submit(PROMPTS[1], GREEDY)
    next(iter(first))
    until = time.monotonic() + WAIT
    while not entered.wait(0.02) and time.monotonic() < until:  # the texts may wish for something else meanwhile
        held.working_set.retarget(others, reason="a test")
    assert entered.is_set()
    first.cancel()
    assert first.result(WAIT).finish_reason == "cancelled"
    assert first.result().token_ids
    assert second.result(WAIT).token_ids == expected
    go.set()
    assert held.working_set.idle(WAIT)


def test_a_draft_may_be_added_while_requests_run(held: Engine) -> None:
    expected = [held.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]
    requests = [held.submit(prompt, GREEDY) for prompt in PROMPTS * 4]
    held.add_draft("ngram")
    for i, request in enumerate(requests):
        assert request.result(WAIT).token_ids == expected[i % len(PROMPTS)]


def test_heads_that_fail_while_all_use_them(held: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [held.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]

    failed: list[int] = []

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        failed.append(1)
        raise RuntimeError("it broke")

    for status in held._statuses.values():
        monkeypatch.setattr(status.draft, "open", fail)
    assert [result.token_ids for result in held.generate(PROMPTS, GREEDY)] == expected
    assert failed
    assert any(not held._statuses[name].active for name in NAMES)


def test_drafts_leave_when_keys_and_values_are_short_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request is lost or other than alone, whatever the drafts' memory is used for meanwhile."""
    target = make_held_target(tmp_path, monkeypatch)
    with load(target, ("auto",)) as engine:
        block = engine.spec.position_bytes() * 64
        expected = [engine.generate(prompt, GREEDY).token_ids for prompt in PROMPTS]
    with load(target, ("auto",), resident=2, load_policy="none", kv_memory=4 * block) as engine:
        engine.start_serving()
        until, kinds = time.monotonic() + WAIT, list[str]()
        engine.watch(lambda record: kinds.append(record.elastic) if record.elastic else None)
        while "lend" not in kinds and time.monotonic() < until:
            results = [engine.submit(prompt, GREEDY) for prompt in PROMPTS * 4]
            assert [request.result(WAIT).token_ids for request in results] == expected * 4
        assert kinds[:2] == ["leave", "lend"]
        while (serving := engine.serving) is not None and serving.lent and time.monotonic() < until:
            time.sleep(0.05)
        assert serving is not None
        assert [event.kind for event in serving.elastic][:3] == ["leave", "lend", "return"]
        assert engine.working_set is not None
        assert engine.working_set.capacity == 2
        assert engine.working_set.idle(WAIT)
        assert "active" in [engine.drafts[name] for name in NAMES]
