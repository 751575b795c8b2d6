"""What is run after an interruption, of an arm that broke off, and of what failed: nothing is run twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.bench.reporting.document import build
from edgespec.bench.specbench.folder import read_run, records_file
from tests.bench.specbench.fakes import FakeArm, Fakes, answering, interrupting, picky, question, refusing


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
    arms = build([run])["parts"][0]["arms"]
    assert arms["b"]["speedup"]["value"] == pytest.approx(1), "not 2, as beside the plain of the first day"
    assert arms["c"]["speedup"]["value"] == pytest.approx(1)
    assert arms["b"]["speedup"]["questions"] == 3
    assert not [text for name in arms for text in arms[name]["warnings"]]


def test_an_arm_that_was_broken_is_not_forgotten_by_an_interrupted_resume(tmp_path: Path) -> None:
    questions = [question(n) for n in (1, 2, 3)]
    first = Fakes(tmp_path, {"plain": answering(), "b": answering()})
    refusing(first, "b", "load", "3 GiB are missing")
    first.run(questions)
    second = Fakes(tmp_path, {"plain": answering(), "b": answering()})

    def ctrl_c(made: object) -> FakeArm:
        raise KeyboardInterrupt

    second.start = ctrl_c  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        second.run(questions)
    assert read_run(tmp_path).arms["b"].status == "error"
    run = Fakes(tmp_path, {"plain": answering(), "b": answering()}).run(questions)
    assert run.arms["b"].status == "ok"
    assert {(r.group, r.session) for r in run.records["b"]} == {(1, 1)}, "with plain of its own day"


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
    once = Fakes(tmp_path, {"plain": answering(), "b": interrupting(0)})
    with pytest.raises(KeyboardInterrupt):
        once.run([question(n) for n in (1, 2, 3)])
    run = Fakes(tmp_path, {"plain": answering(), "b": answering()}).run([question(n) for n in (1, 2, 3)])
    assert [(r.question_id, r.session) for r in run.records["plain"]] == [("1", 0), ("2", 1), ("3", 1)]
    assert [(r.question_id, r.session) for r in run.records["b"]] == [("1", 1), ("2", 1), ("3", 1)]
    (warning,) = build([run])["parts"][0]["arms"]["b"]["warnings"]
    assert "in 1 question plain was measured in another session" in warning


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
