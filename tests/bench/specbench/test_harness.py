"""The run with workers of a known clock: what is written down, what is not run twice, and what errors become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.reporting.figures import figures
from edgespec.bench.specbench.folder import read_run, records_file
from edgespec.bench.specbench.harness import PlainFailure, in_words
from tests.bench.specbench.fakes import END, Fakes, answering, arm, failing, question, rate

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


def test_b022_answers_of_no_token_and_of_one(tmp_path: Path) -> None:
    run = Fakes(tmp_path, {"plain": answering(ids=()), "fast": answering(ids=(5,))}).run([question(1)])
    (none,), (one,) = run.records["plain"], run.records["fast"]
    assert (none.error, none.token_ids, none.first_token_s, rate(none)) == (None, (), None, None)
    assert (one.token_ids, one.first_token_s, one.decode_tokens, rate(one)) == ((5,), 0.1, 0, None)


def test_b022_a_question_that_fails_is_an_error_and_never_a_time(tmp_path: Path) -> None:
    def picky(prompt: list[int], limit: int) -> dict[str, Any]:
        return (failing("ValueError: too difficult", alive=True) if prompt[1] == 2 else answering())(prompt, limit)

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
    ],
)
def test_a_report_that_contradicts_itself_is_an_error(tmp_path: Path, reply: Any) -> None:
    run = Fakes(tmp_path, {"plain": answering(), "odd": lambda ids, limit: reply}).run([question(1)])
    (record,) = run.records["odd"]
    assert record.error is not None
    assert record.error.startswith("its answer cannot be measured")


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


# Nothing is run twice


def interrupting(after: int) -> Any:
    """Ctrl-C comes in the answer number `after`."""
    calls = [0]

    def script(prompt: list[int], limit: int) -> dict[str, Any]:
        calls[0] += 1
        if calls[0] > after:
            raise KeyboardInterrupt
        return answering()(prompt, limit)

    return script


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5])
def test_after_ctrl_c_a_run_goes_on_where_it_stopped(tmp_path: Path, after: int) -> None:
    questions = [question(1, "1", "11"), question(2), question(3)]
    once = Fakes(tmp_path, {"plain": answering(), "b": interrupting(after)})
    with pytest.raises(KeyboardInterrupt):
        once.run(questions, repeats=2)
    assert all(worker.killed or worker.closed for worker in once.workers)  # none is left behind
    before = {name: list(found) for name, found in read_run(tmp_path).records.items()}
    assert len(before["b"]) == after
    again = Fakes(tmp_path, {"plain": answering(), "b": answering()})
    run = again.run(questions, repeats=2)
    for name, records in run.records.items():
        assert records[: len(before[name])] == before[name]
        assert len({record.key for record in records}) == len(records) == 8
    assert len(again.asked) == 16 - sum(map(len, before.values()))
    history = [ids for name, ids in again.asked if name == "b" and len(ids) > 2]
    assert all(ids[:2] == (1000, 1) and ids[-2:] == (1000, 11) for ids in history)  # turn 2 after the kept turn 1


def test_a_finished_run_starts_nothing(tmp_path: Path) -> None:
    Fakes(tmp_path, {"plain": answering(), "b": answering()}).run([question(1)])
    again = Fakes(tmp_path, {"plain": answering(), "b": answering()})
    again.run([question(1)])
    assert again.workers == []


def test_what_a_policy_learned_is_written_after_every_question(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"plain": answering(), "peer:x": answering()})
    fakes.run([question(1, "1", "2"), question(3)])
    assert [op for name, op in fakes.log if name == "plain" and op in ("call", "keep")] == [
        *("call",) * 2,  # the warm-up
        *("call",) * 2,
        "keep",
        "call",
        "keep",
    ]
    assert ("peer:x", "keep") not in fakes.log


# Workers that fail


def dying(on: set[int]) -> Any:
    def script(prompt: list[int], limit: int) -> dict[str, Any]:
        return (failing("the worker ended with code 3", alive=False) if prompt[1] in on else answering())(prompt, limit)

    return script


def test_a_worker_that_dies_is_started_once_more(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"plain": answering(), "weak": dying({2})})
    run = fakes.run([question(1), question(2), question(3)])
    assert [r.error for r in run.records["weak"]] == [None, "the worker ended with code 3", None]
    assert run.arms["weak"].status == "ok"
    assert [op for name, op in fakes.log if name == "weak"].count("load") == 2


def test_the_second_time_the_arm_has_an_error_and_the_others_go_on(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"plain": answering(), "weak": dying({2, 3}), "c": answering()})
    questions = [question(n) for n in (1, 2, 3, 4)]
    run = fakes.run(questions)
    assert run.arms["weak"].status == "error"
    assert "died twice" in run.arms["weak"].message
    assert [r.question_id for r in run.records["weak"]] == ["1", "2", "3"]
    assert len(run.records["plain"]) == len(run.records["c"]) == 4
    again = Fakes(tmp_path, {"plain": answering(), "weak": answering(), "c": answering()})
    run = again.run(questions)
    # What failed is not tried again. What was not asked is, with plain once more beside it.
    assert again.asked == [("weak", (1000, 4)), ("plain", (1000, 4))]
    assert run.arms["weak"].status == "ok"
    assert [(r.question_id, r.group, r.session) for r in run.records["weak"][3:]] == [("4", 1, 1)]
    assert [(r.question_id, r.group, r.session) for r in run.records["plain"][3:]] == [("4", 0, 0), ("4", 1, 1)]
    assert {(r.group, r.session) for r in run.records["c"]} == {(0, 0)}
    idle = Fakes(tmp_path, {name: answering() for name in ("plain", "weak", "c")})
    idle.run(questions)
    assert idle.workers == []


def test_without_plain_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"plain": dying({2, 3}), "b": answering()})
    with pytest.raises(PlainFailure, match="plain, which all others are compared with"):
        fakes.run([question(1), question(2), question(3), question(4)])
    run = read_run(tmp_path)
    assert run.arms["plain"].status == "error"
    assert [r.question_id for r in run.records["plain"]] == ["1", "2", "3"]
    assert all(worker.killed or worker.closed for worker in fakes.workers)


def test_an_arm_that_cannot_be_loaded_is_an_error_with_its_cause(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"plain": answering(), "b": answering()})
    real = fakes.start

    def start(made: Any) -> Any:
        worker = real(made)
        if made.name == "b":
            worker.request = lambda op, **fields: failing("3 GiB are missing", alive=True)([], 0)
        return worker

    fakes.start = start  # type: ignore[method-assign]
    run = fakes.run([question(1)])
    assert (run.arms["b"].status, run.arms["b"].message) == ("error", "3 GiB are missing")
    assert run.records["b"] == []
    assert len(run.records["plain"]) == 1


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
    assert [in_words(s) for s in (40.2, 700, 11100)] == ["40 s", "12 min", "3 h 05 min"]


# What is run after a --resume


def refusing(fakes: Fakes, name: str, op: str, reply: Any) -> None:
    """One arm answers one kind of request with `reply`, or fails with it."""
    real = fakes.start

    def start(made: Any) -> Any:
        worker = real(made)
        request = worker.request

        def other(asked: str, **fields: Any) -> Any:
            if made.name == name and asked == op:
                return reply if isinstance(reply, dict) else failing(reply, alive=True)([], 0)
            return request(asked, **fields)

        worker.request = other
        return worker

    fakes.start = start  # type: ignore[method-assign]


def test_an_arm_that_is_left_over_is_compared_with_plain_of_its_own_day(tmp_path: Path) -> None:
    questions = [question(n) for n in (1, 2, 3)]
    first = Fakes(tmp_path, {"plain": answering(step=0.02), "b": answering(step=0.01), "c": answering(step=0.02)})
    refusing(first, "b", "load", "3 GiB are missing")
    first.run(questions)
    in_vain = Fakes(tmp_path, {"plain": answering(), "b": answering(), "c": answering()})
    refusing(in_vain, "b", "load", "3 GiB are missing")
    assert in_vain.run(questions).arms["b"].status == "error"
    assert in_vain.asked == [], "plain alone is not worth it"
    again = Fakes(tmp_path, {"plain": answering(step=0.01), "b": answering(step=0.01), "c": answering()})  # cooler now
    run = again.run(questions)
    assert {name for name, _ in again.asked} == {"plain", "b"}
    assert {(r.group, r.session) for r in run.records["b"]} == {(1, 1)}
    arms = figures([run])["parts"][0]["arms"]
    assert arms["b"]["speedup"]["value"] == pytest.approx(1), "not 2, as beside the plain of the first day"
    assert arms["c"]["speedup"]["value"] == pytest.approx(1)
    assert arms["b"]["speedup"]["questions"] == 3
    assert not [text for name in arms for text in arms[name]["warnings"]]


def test_left_over_questions_may_be_interrupted_too(tmp_path: Path) -> None:
    questions = [question(n) for n in (1, 2, 3)]
    first = Fakes(tmp_path, {"plain": answering(), "b": answering()})
    refusing(first, "b", "load", "3 GiB are missing")
    first.run(questions)
    second = Fakes(tmp_path, {"plain": answering(), "b": interrupting(1)})
    with pytest.raises(KeyboardInterrupt):
        second.run(questions)
    third = Fakes(tmp_path, {"plain": answering(), "b": answering()})
    run = third.run(questions)
    assert sorted(r.question_id for r in run.records["b"]) == ["1", "2", "3"]
    plain = {(r.group, r.repeat, r.question_id): r.session for r in run.records["plain"]}
    apart = [r for r in run.records["b"] if plain[r.group, r.repeat, r.question_id] != r.session]
    assert len(apart) <= 1, "the question in which it was interrupted"
    idle = Fakes(tmp_path, {"plain": answering(), "b": answering()})
    idle.run(questions)
    assert idle.workers == []


def test_where_arm_and_plain_are_of_two_sessions_the_report_says_so(tmp_path: Path) -> None:
    once = Fakes(tmp_path, {"plain": answering(), "b": interrupting(2)})
    with pytest.raises(KeyboardInterrupt):
        once.run([question(n) for n in (1, 2, 3)])
    run = Fakes(tmp_path, {"plain": answering(), "b": answering()}).run([question(n) for n in (1, 2, 3)])
    assert [(r.question_id, r.session) for r in run.records["plain"]] == [("1", 0), ("2", 0), ("3", 0)]
    assert [(r.question_id, r.session) for r in run.records["b"]] == [("1", 0), ("2", 0), ("3", 1)]
    (warning,) = figures([run])["parts"][0]["arms"]["b"]["warnings"]
    assert "in 1 questions plain was measured in another session" in warning


def picky(prompt: list[int], limit: int) -> dict[str, Any]:
    return (failing("ValueError: too difficult", alive=True) if prompt[1] == 2 else answering())(prompt, limit)


def test_what_failed_is_asked_once_more_if_that_is_wanted(tmp_path: Path) -> None:
    questions = [question(1), question(2, "2", "3"), question(4)]
    Fakes(tmp_path, {"plain": answering(), "b": picky}).run(questions)
    resumed = Fakes(tmp_path, {"plain": answering(), "b": answering()})
    resumed.run(questions)
    assert resumed.asked == []
    retried = Fakes(tmp_path, {"plain": answering(), "b": picky})
    assert sum(r.error is not None for r in retried.run(questions, retry_errors=True).records["b"]) == 2
    again = Fakes(tmp_path, {"plain": answering(), "b": answering()})
    run = again.run(questions, retry_errors=True)
    assert [ids[:2] for _, ids in again.asked] == [(1000, 2)] * 2
    assert all(r.error is None for r in run.records["b"])
    assert sorted((r.question_id, r.turn) for r in run.records["b"]) == [("1", 0), ("2", 0), ("2", 1), ("4", 0)]
    assert len(records_file(tmp_path, "b").read_text().splitlines()) == 8, "nothing is taken out of the file"


def test_each_group_has_a_restart_of_its_own(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"plain": dying({2}), "b": answering(), "c": answering()})
    run = fakes.run([question(1), question(2), question(3)], ["plain", "b"], ["plain", "c"])
    assert run.arms["plain"].status == "ok"
    assert len(run.records["c"]) == 3


# What must not end a run


def test_a_worker_that_says_nonsense_at_its_end_costs_no_run(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"plain": answering(), "b": answering()})
    refusing(fakes, "b", "memory", {"ok": True})
    run = fakes.run([question(1)])
    assert len(run.records["b"]) == 1
    assert run.arms["b"].message.startswith("it answered all, and then: ")
    assert all(worker.closed or worker.killed for worker in fakes.workers)


def test_what_no_file_takes_is_an_error_of_that_answer(tmp_path: Path) -> None:
    def odd(prompt: list[int], limit: int) -> dict[str, Any]:
        reply = answering()(prompt, limit)
        wrong = {1: {"rate": float("nan")}, 2: {"device_notes": ["\ud800"]}}[prompt[1]]
        return {**reply, "stats": {**reply["stats"], **wrong}}

    fakes = Fakes(tmp_path, {"plain": answering(), "odd": odd, "rude": failing("bad \ud800", alive=True)})
    run = fakes.run([question(1), question(2)])
    assert all("cannot be measured" in str(r.error) for r in run.records["odd"])
    assert [r.error for r in run.records["rude"]] == ["bad ?"] * 2
    assert [r.error for r in run.records["plain"]] == [None] * 2


def test_who_stands_behind_a_dead_arm_does_not_lead_twice_as_often(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {name: answering() for name in ("plain", "b", "c")})
    refusing(fakes, "b", "load", "no room")
    fakes.run([question(n) for n in range(1, 7)])
    leaders = [name for name, _ in fakes.asked[::2]]
    assert leaders == ["plain", "c"] * 3
