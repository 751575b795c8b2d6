"""The run and what is published of it, with workers whose clock is known."""

from __future__ import annotations

import pytest

from edgespec.bench import summary, watch
from edgespec.bench.prompts import Prompt
from edgespec.bench.speed import Run
from tests.bench.fakes import FakeChannel, clocked, contender, failing, plan

CODE, MATHS = Prompt("code 1", "code", ""), Prompt("maths 1", "maths", "")
COPY, PROSE = Prompt("edit 1", "edit", ""), Prompt("prose 1", "prose", "")
LONG = Prompt("prefill 900", "prefill", "")


def steady(chunk=1, factor=1.0, first=0, stats=None):
    """Answers any prompt: `chunk` tokens a step, `factor` times as fast as the fake clock."""

    def script(ids, new_tokens):
        tokens = [ids[0] + first + i for i in range(new_tokens)]
        return {**clocked(tokens, chunk=chunk, prefill=0.1 / factor, step=0.01 / factor), "stats": stats or {}}

    return script


def execute(scripts, prompts=(CODE, MATHS), log=None, **changes):
    """Run a plan over fake channels; returns (result, rows by name, channels)."""
    channels = []

    def start(chosen):
        channels.append(FakeChannel(chosen.name, scripts[chosen.name], log))
        return channels[-1]

    made = [changes.pop(name, contender(name)) for name in list(scripts)]
    result = Run(plan(made, list(prompts), **changes), start, check_missing=False).run()
    return result, {row["name"]: row for row in summary.rows(result)}, channels


def test_true_rates_memory_and_ratio():  # B022
    result, rows, channels = execute({"ngram": steady(chunk=4), "plain": steady()}, prompts=(CODE, MATHS, LONG))
    assert rows["ngram"]["decode_tokens_per_second"] == pytest.approx(400)
    assert rows["plain"]["decode_tokens_per_second"] == pytest.approx(100)
    assert rows["plain"]["prefill_tokens_per_second"] == pytest.approx(2 / 0.1)
    assert rows["plain"]["peak_memory_bytes"] == 123_000_000
    assert rows["plain"]["first_token_seconds"] == pytest.approx(0.1)
    assert all(row["status"] == "ok" and not row["warnings"] for row in rows.values())
    ratios = summary.ratios(result)
    assert ratios["ngram/plain"] == pytest.approx(4)
    assert ratios["ngram/plain (min)"] == pytest.approx(4)
    assert "plain/llama.cpp" not in ratios
    assert all(channel.closed for channel in channels)


def test_contenders_take_turns_and_another_one_starts_each_time():
    log: list[tuple[str, str]] = []
    execute({"a": steady(), "b": steady(), "c": steady()}, prompts=(CODE,), log=log)
    calls = [name for name, op in log if op == "call"]
    assert calls[:6] == ["a", "a", "b", "b", "c", "c"]  # warm-up, before anything is measured
    assert calls[6:] == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_warm_up_is_not_measured():
    calls = 0

    def slow_at_first(ids, new_tokens):
        nonlocal calls
        calls += 1
        return clocked(list(range(new_tokens)), step=5.0 if calls <= 2 else 0.01)

    _, rows, _ = execute({"plain": slow_at_first})
    assert rows["plain"]["decode_by_group"]["domain"]["min"] == pytest.approx(100)


def test_the_graph_is_prepared_in_another_process_than_the_measured_one():
    log: list[tuple[str, str]] = []
    _, _, channels = execute({"plain": steady()}, log=log)
    assert len(channels) == 2
    assert [op for _, op in log][:2] == ["prepare", "load"]
    assert channels[0].closed


def test_a_ratio_is_the_median_over_pairs_of_the_same_prompt_and_repeat():
    """The machine is ten times as fast in the second repeat: medians of each, divided, would say 1.5."""

    def with_rates(*rates):
        left = list(rates)
        return lambda ids, new_tokens: steady(factor=1.0 if ids[0] == 7 else left.pop(0))(ids, new_tokens)

    scripts = {"ngram": with_rates(3.0, 20.0, 2.0), "plain": with_rates(1.0, 10.0, 2.0)}
    result, _, _ = execute(scripts, prompts=(CODE,))
    ratios = summary.ratios(result)
    assert ratios["ngram/plain"] == pytest.approx(2.0)
    assert (ratios["ngram/plain (min)"], ratios["ngram/plain (max)"]) == (pytest.approx(1.0), pytest.approx(3.0))


def test_groups_are_published_apart():
    def script(ids, new_tokens):
        return steady(chunk=4 if ids[0] == 11 else 1)(ids, new_tokens)  # 11: the second prompt, the copying one

    result, rows, _ = execute({"ngram": script, "plain": steady()}, prompts=(CODE, COPY, PROSE))
    ratios = summary.ratios(result)
    assert ratios["ngram/plain copying"] == pytest.approx(4)
    assert ratios["ngram/plain prose"] == pytest.approx(1)
    assert rows["ngram"]["decode_tokens_per_second"] == pytest.approx(100)
    assert rows["ngram"]["decode_by_group"]["copying"]["median"] == pytest.approx(400)
    assert rows["ngram"]["decode_by_prompt"] == {
        "code 1": pytest.approx(100),
        "edit 1": pytest.approx(400),
        "prose 1": pytest.approx(100),
    }


def test_a_prompt_that_fails_is_shown_and_left_out_of_every_contender():  # B022
    def throws(ids, new_tokens):
        if ids[0] == 11:
            raise failing("ValueError: too difficult", alive=True)
        return steady(chunk=4)(ids, new_tokens)

    def plain(ids, new_tokens):
        return steady(factor=7.0 if ids[0] == 11 else 1.0)(ids, new_tokens)

    result, rows, _ = execute({"ngram": throws, "plain": plain})
    assert rows["ngram"]["status"] == "partial"
    assert [f["prompt"] for f in rows["ngram"]["failed"]] == ["maths 1"] * 3
    assert "too difficult" in rows["ngram"]["failed"][0]["message"]
    assert rows["plain"]["excluded"] == ["maths 1"]
    assert rows["plain"]["decode_by_group"]["domain"] == {
        "median": pytest.approx(100),
        "min": pytest.approx(100),
        "max": pytest.approx(100),
        "runs": 3,
    }
    assert summary.ratios(result)["ngram/plain"] == pytest.approx(4)


def test_a_report_that_contradicts_itself_is_a_failure_not_a_time():
    def lies(ids, new_tokens):
        reply = clocked(list(range(new_tokens)))
        return {**reply, "emissions": [*reply["emissions"], (1.0, 50)]} if ids[0] != 7 else reply

    _, rows, _ = execute({"plain": lies})
    assert rows["plain"]["status"] == "error"
    assert rows["plain"]["decode_tokens_per_second"] is None


@pytest.mark.parametrize("when", ["load", "later"])
def test_a_contender_that_dies_has_an_error_and_no_time_and_burdens_nobody(when):
    calls = 0

    def dies(ids, new_tokens):
        nonlocal calls
        calls += 1
        if when == "later" and calls == 4:
            raise failing("a failure that burdens all, until this contender is out", alive=True)
        if calls > (1 if when == "load" else 5):
            raise failing("the worker was ended by signal 9", alive=False)
        return steady()(ids, new_tokens)

    result, rows, channels = execute({"llama.cpp": dies, "plain": steady()})
    assert rows["llama.cpp"]["status"] == "error"
    assert "signal 9" in rows["llama.cpp"]["message"]
    assert rows["llama.cpp"]["decode_tokens_per_second"] is None
    assert rows["plain"]["status"] == "ok"
    assert rows["plain"]["answers"] == 6
    assert rows["plain"]["excluded"] == []
    assert summary.ratios(result) == {}
    assert any(channel.killed for channel in channels if channel.name == "llama.cpp")


def test_a_contender_that_is_not_installed_is_missing_with_the_extra_to_install():
    absent = contender("llama.cpp", packages=("surely_not_installed",))
    result = Run(plan([absent], [CODE]), lambda c: pytest.fail("started a missing contender")).run()
    (row,) = summary.rows(result)
    assert row["status"] == "missing"
    assert "edgespec[bench]" in row["message"]


def test_interruption_leaves_no_worker_behind():
    def interrupted(ids, new_tokens):
        if ids[0] != 7:
            raise KeyboardInterrupt
        return steady()(ids, new_tokens)

    channels = []

    def start(chosen):
        channels.append(FakeChannel(chosen.name, interrupted if chosen.name == "b" else steady()))
        return channels[-1]

    with pytest.raises(KeyboardInterrupt):
        Run(plan(["a", "b"], [CODE]), start, check_missing=False).run()
    assert all(channel.killed or channel.closed for channel in channels)
    assert sum(channel.killed for channel in channels) == 2


def test_equality_by_kind_with_gaps():  # B184
    def differs(ids, new_tokens):
        reply = steady()(ids, new_tokens)
        if ids[0] == 11:
            reply["token_ids"][4] = 99
        return reply

    asked = []

    def gap(weight_format, ids, left, right):
        asked.append((weight_format, ids, left, right))
        return {"gap": 1e-4, "margin": 1e-4}

    own = {n: contender(n, options={"weight_format": "float32"}) for n in ("ngram-float32", "plain-float32")}
    scripts = {"ngram-float32": differs, "plain-float32": steady()}
    result, _, _ = execute(scripts, prompts=(CODE, COPY, LONG), repeats=2, **own)
    report = summary.equality(result, gap)["ngram-float32"]
    assert report["by_kind"] == {"code": {"equal": 2, "compared": 2}, "edit": {"equal": 0, "compared": 2}}
    assert (report["near_ties"], report["faults"]) == (2, 0)
    assert report["differences"][0] | {"gap": 0, "margin": 0} == {
        "prompt": "edit 1",
        "repeat": 1,
        "position": 4,
        "near_tie": True,
        "gap": 0,
        "margin": 0,
    }
    # Teacher-forced over the prompt and the tokens both agree on, nothing after.
    assert asked[0] == ("float32", [11, 12, 11, 12, 13, 14], 99, 15)


@pytest.mark.parametrize("measured", [{"gap": 0.4, "margin": 0.0}, {"gap": 0.0, "margin": 0.4}])
def test_a_difference_without_a_near_tie_is_a_fault(measured):
    own = {n: contender(n, options={"weight_format": "float32"}) for n in ("ngram-float32", "plain-float32")}
    result, _, _ = execute({"ngram-float32": steady(first=1), "plain-float32": steady()}, prompts=(CODE,), **own)
    assert summary.equality(result, lambda *a: measured)["ngram-float32"]["faults"] == 3
    assert summary.equality(result)["ngram-float32"]["faults"] == 3  # nobody looked: not excused


def test_speed_that_grows_with_every_repeat_is_reported():  # B173
    seen: dict[int, int] = {}

    def remembers(ids, new_tokens):
        seen[ids[0]] = seen.get(ids[0], 0) + 1
        return steady(factor=float(seen[ids[0]]))(ids, new_tokens)

    _, rows, _ = execute({"plain": remembers, "ngram": steady()})
    assert any("kept between runs" in warning for warning in rows["plain"]["warnings"])
    assert rows["ngram"]["warnings"] == []


def test_answers_that_are_short_or_change_are_reported():
    calls = 0

    def odd(ids, new_tokens):
        nonlocal calls
        calls += 1
        return clocked([calls] * (new_tokens - 1))

    _, rows, _ = execute({"plain": odd})
    assert any("shorter than 9" in warning for warning in rows["plain"]["warnings"])
    assert any("changed from one repeat" in warning for warning in rows["plain"]["warnings"])


def test_engine_counters_and_parts_that_exceed_the_whole():  # B175, B178, B179
    stats = {"rounds": 2, "decode_seconds": 0.02, "proposed_tokens": 12, "accepted_tokens": 6, "target_seconds": 0.018}
    stats |= {"draft_seconds": 0.001, "bookkeeping_seconds": 0.001}
    impossible = {**stats, "target_seconds": 9.0}
    _, rows, _ = execute({"ngram": steady(chunk=4, stats=stats), "plain": steady(stats=impossible)})
    assert rows["ngram"]["tokens_per_forward"] == pytest.approx(4)  # 8 tokens after the first in 2 forwards
    assert rows["ngram"]["acceptance_rate"] == pytest.approx(0.5)
    assert rows["ngram"]["bookkeeping_share"] == pytest.approx(0.05)
    assert rows["ngram"]["warnings"] == []
    assert any("add up to more" in warning for warning in rows["plain"]["warnings"])


class BusyChannel(FakeChannel):
    """Its process uses processor time whenever anybody looks."""

    spent = 0.0

    def cpu_seconds(self):
        self.spent += 1.0
        return self.spent


def test_waiting_contenders_that_use_the_processor_are_reported(monkeypatch):
    monkeypatch.setattr(watch, "SHORTEST", 0.0)
    monkeypatch.setattr(watch, "_busy_seconds", lambda: 0.0)
    channels = {"a": FakeChannel, "b": BusyChannel}
    run = Run(plan(["a", "b"], [CODE]), lambda c: channels[c.name](c.name, steady()), check_missing=False)
    rows = {row["name"]: row for row in summary.rows(run.run())}
    assert any("waiting contenders" in warning for warning in rows["a"]["warnings"])
    assert not any("waiting contenders" in warning for warning in rows["b"]["warnings"])
