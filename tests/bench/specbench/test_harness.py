"""The run with workers of a known clock: what is written down, in which order arms run, and what errors become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.specbench import harness
from tests.bench.specbench.fakes import END, Fakes, answering, arm, dying, picky, question, rate, refusing

LONG = tuple(range(1, 10))


def test_b022_true_rates_and_one_counter_for_all_arms(tmp_path: Path) -> None:
    blocks = answering(chunk=4, ids=(1, 2, 3, 4, 5, 6, END, *range(7, 20)))  # ends inside its second block
    fakes = Fakes(tmp_path, {"plain": answering(ids=(1, 2, 3, 4, 5, 6, END)), "fast": blocks})
    run = fakes.run([question(1)], max_new_tokens=20)
    (plain,), (fast,) = run.records["plain"], run.records["fast"]
    assert plain.token_ids == fast.token_ids == (1, 2, 3, 4, 5, 6, END)
    assert (plain.first_token_s, fast.first_token_s) == (0.1, 0.1)
    assert (plain.decode_tokens, plain.decode_s) == (6, pytest.approx(0.06))
    assert (fast.decode_tokens, fast.decode_s) == (6, pytest.approx(0.02))  # what lies behind the end is not counted
    assert rate(fast) == pytest.approx(300)
    assert (plain.round_tokens, fast.round_tokens) == ((1,) * 6, (4, 2))
    assert fast.seconds == pytest.approx(0.12)
    assert (fast.rss_bytes, fast.resident, fast.prompt_tokens) == (250_000_000, ("code",), 2)
    assert {plain.at, fast.at} == {1_900_000_000.0, 1_900_000_000.5}, "when each ended"


def test_b022_answers_of_no_token_and_of_one(tmp_path: Path) -> None:
    run = Fakes(tmp_path, {"plain": answering(ids=()), "fast": answering(ids=(5,))}).run([question(1)])
    (none,), (one,) = run.records["plain"], run.records["fast"]
    assert (none.error, none.token_ids, none.first_token_s, rate(none)) == (None, (), None, None)
    assert (one.token_ids, one.first_token_s, one.decode_tokens, rate(one)) == ((5,), 0.1, 0, None)


def test_b022_a_question_that_fails_is_an_error_and_never_a_time(tmp_path: Path) -> None:
    run = Fakes(tmp_path, {"plain": answering(), "picky": picky}).run([question(1), question(2, "2", "3"), question(4)])
    found = run.records["picky"]
    assert [(r.question_id, r.turn, r.error) for r in found if r.error] == [
        ("2", 0, "ValueError: too difficult"),
        ("2", 1, "not asked: turn 1 has no answer"),
    ]
    failed = [r for r in found if r.error]
    assert all(r.seconds == r.decode_s == 0.0 and r.first_token_s is None and not r.token_ids for r in failed)
    assert [r.question_id for r in found if not r.error] == ["1", "4"]
    assert run.arms["picky"].status == "ok"


def test_b172_b182_reading_a_long_prompt_is_in_no_rate(tmp_path: Path) -> None:
    scripts = {"plain": answering(prefill=0.1), "slow": answering(prefill=5.0)}
    run = Fakes(tmp_path, scripts).run([question(1)])
    plain, slow = run.records["plain"][0], run.records["slow"][0]
    assert rate(plain) == pytest.approx(100)
    assert rate(slow) == pytest.approx(100)
    assert slow.first_token_s == 5.0  # the first token of any kind starts the decode clock


@pytest.mark.parametrize(
    "reply",
    [
        {"token_ids": [1, 2], "emissions": [(0.1, 1)], "seconds": 0.1},
        {"token_ids": [1, 2], "emissions": [(0.2, 1), (0.1, 1)], "seconds": 0.2},
        {"emissions": []},
        {"token_ids": [1], "emissions": [(0.1, 1)]},
        "nothing of the kind",
        {"token_ids": [1, 2], "emissions": [(0.1, 1), (0.1, 1)], "seconds": 0.1},  # a token in no time
        {"token_ids": [1], "emissions": [(-0.1, 1)], "seconds": 0.1},
        {"token_ids": [-1], "emissions": [(0.1, 1)], "seconds": 0.1},
        {"token_ids": [1], "emissions": [(0.1, float("inf"))], "seconds": 0.1},
        {**answering()([1000, 1], 9), "stats": {"accepted_tokens": 3, "proposed_tokens": 2}},
    ],
)
def test_a_report_that_contradicts_itself_is_an_error(tmp_path: Path, reply: Any) -> None:
    run = Fakes(tmp_path, {"plain": answering(), "odd": lambda ids, limit: reply}).run([question(1)])
    (record,) = run.records["odd"]
    assert record.error is not None
    assert record.error.startswith("its answer cannot be measured")


def test_what_arms_do_while_they_wait_is_seen_as_disturbance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy:
        def __init__(self, worker: object, waiting: list[object]) -> None:
            self.waiting = len(waiting)

        def shares(self) -> tuple[float, float]:
            return 0.25, 0.5 * self.waiting

    monkeypatch.setattr(harness, "Watch", Busy)
    run = Fakes(tmp_path, {name: answering() for name in ("plain", "b")}).run([question(1)])
    assert [records[0].disturbance for records in run.records.values()] == [0.75, 0.75]


def test_later_turns_follow_the_arms_own_answers(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"plain": answering(ids=(5, 6, END)), "other": answering(ids=(7,))})
    run = fakes.run([question(1, "11", "12")])
    assert [ids for name, ids in fakes.asked if name == "plain"] == [(1000, 11), (1000, 11, 2000, 5, 6, 1000, 12)]
    assert [ids for name, ids in fakes.asked if name == "other"] == [(1000, 11), (1000, 11, 2000, 7, 1000, 12)]
    assert [(r.turn, r.prompt_tokens) for r in run.records["plain"]] == [(0, 2), (1, 7)]


def test_arms_take_turns_in_being_first(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {name: answering() for name in ("plain", "b", "c")})
    fakes.run([question(1), question(2), question(3)], repeats=2)
    names = [name for name, _ in fakes.asked]
    blocks = [tuple(names[i : i + 3]) for i in range(0, len(names), 3)]
    assert len(blocks) == 6
    assert all(set(block) == {"plain", "b", "c"} for block in blocks)
    assert [block[0] for block in blocks] == ["plain", "b", "c", "b", "c", "plain"]


def test_who_stands_behind_a_dead_arm_does_not_lead_twice_as_often(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {name: answering() for name in ("plain", "b", "c")})
    refusing(fakes, "b", "load", "no room")
    fakes.run([question(n) for n in range(1, 7)])
    leaders = [name for name, _ in fakes.asked[::2]]
    assert leaders == ["plain", "c"] * 3


def test_nor_does_who_stands_behind_one_that_has_done_its_part(tmp_path: Path) -> None:
    questions = [question(n) for n in range(1, 13)]
    first = Fakes(tmp_path, {"plain": answering(), "b": dying({8, 9}), "d": answering()})
    refusing(first, "d", "load", "no room")
    first.run(questions)
    late = Fakes(tmp_path, {name: answering() for name in ("plain", "b", "d")})
    late.run(questions)
    asked = late.asked[:18]  # what b has done already
    assert {name for name, _ in asked} == {"plain", "d"}
    assert [name for name, _ in asked[::2]] == [*["plain", "d"] * 4, "plain"]


def test_every_group_has_plain_beside_it_and_only_one_group_is_loaded(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {name: answering() for name in ("plain", "b", "c")})
    run = fakes.run([question(1), question(2)], ["plain", "b"], ["plain", "c"])
    assert [(r.group, r.question_id) for r in run.records["plain"]] == [(0, "1"), (0, "2"), (1, "1"), (1, "2")]
    assert {r.group for r in run.records["c"]} == {1}
    loads = [name for name, op in fakes.log if op == "load"]
    assert loads == ["plain", "b", "plain", "c"]
    assert all(worker.closed and not worker.killed for worker in fakes.workers)
    assert run.arms["c"].peak_memory_bytes == 123_000_000


def test_a_limit_is_never_exceeded_and_the_context_is_one(tmp_path: Path) -> None:  # B176
    fakes = Fakes(tmp_path, {"plain": answering(ids=LONG * 3)})
    run = fakes.run([question(1), question(2, " ".join("1" * 94))], max_new_tokens=7)
    assert [len(r.token_ids) for r in run.records["plain"]] == [7, 5]


def test_a_turn_that_outgrows_the_context_is_an_error_of_that_turn(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"plain": answering(ids=LONG)})
    run = fakes.run([question(1, " ".join("1" * 90), "3"), question(2)])
    errors = [(r.question_id, r.turn, r.error) for r in run.records["plain"]]
    assert errors == [("1", 0, None), ("1", 1, "103 prompt tokens fill the context of 100"), ("2", 0, None)]


def test_what_a_policy_learned_is_written_after_every_question(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"plain": answering(), "peer:x": answering()})
    fakes.run([question(1, "1", "2"), question(3)])
    assert [op for name, op in fakes.log if name == "plain" and op in ("call", "warm_up", "keep")] == [
        *("warm_up",) * 2,
        *("call",) * 2,
        "keep",
        "call",
        "keep",
    ]
    assert ("peer:x", "keep") not in fakes.log


def test_absent_arms_take_no_part(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"plain": answering(), "peer:x": answering()})
    run = fakes.run([question(1)], ["plain", arm("peer:x", missing="not installed (x)")])
    assert (run.arms["peer:x"].status, run.arms["peer:x"].message) == ("absent", "not installed (x)")
    assert {name for name, _ in fakes.log} == {"plain"}


def test_peers_get_the_end_tokens_and_have_no_statistics(tmp_path: Path) -> None:
    given: list[dict[str, Any]] = []
    fakes = Fakes(tmp_path, {"plain": answering(), "peer:x": answering()})
    real = fakes.start

    def start(made: Any) -> Any:
        worker = real(made)
        request = worker.request

        def keep(op: str, **fields: Any) -> dict[str, Any]:
            if made.name == "peer:x" and op == "call":
                given.append(fields)
            return request(op, **fields)

        worker.request = keep
        return worker

    fakes.start = start  # type: ignore[method-assign]
    run = fakes.run([question(1)])
    assert {call["method"] for call in given} == {"generate"}
    assert given[-1]["arguments"] == {"ids": [1000, 1], "new_tokens": 9, "eos_ids": [END]}
    assert run.records["peer:x"][0].stats == {}
    assert run.records["plain"][0].stats["round_tokens"] == [1] * 8


def test_the_time_left_is_that_of_the_answers_that_are_left(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"plain": answering()})
    fakes.run([question(n) for n in range(1, 5)])
    texts = [text for text in fakes.said if "question" in text]
    assert texts == [  # ten seconds each, by the clock of these tests; loading takes no part in it
        "plain: question 1",
        "plain: question 2, about 30 s left",
        "plain: question 3, about 20 s left",
        "plain: question 4, about 10 s left",
    ]


def test_workers_are_announced_before_any_is_started_and_only_where_there_are_some(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {name: answering() for name in ("plain", "b", "c", "d")})
    groups = ["plain", "b", arm("c", missing="not installed")], ["plain", "d"]
    fakes.run([question(1)], *groups)
    first, second = (text for text in fakes.said if "starting" in text)
    assert (first, second) == ("starting 2 workers: plain, b", "starting 2 workers: plain, d")
    assert fakes.said[0] == first
    fakes.said.clear()
    fakes.run([question(1)], *groups)
    assert fakes.said == []
