"""Workers that die, cannot be loaded, or say nonsense: what becomes of their arm, and of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.specbench.folder import read_run
from edgespec.bench.specbench.harness import PlainFailure
from tests.bench.specbench.fakes import Fakes, answering, dying, failing, question, refusing


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
    assert sorted(again.asked) == [("plain", (1000, 4)), ("weak", (1000, 4))]
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


def test_each_group_has_a_restart_of_its_own(tmp_path: Path) -> None:
    fakes = Fakes(tmp_path, {"plain": dying({2}), "b": answering(), "c": answering()})
    run = fakes.run([question(1), question(2), question(3)], ["plain", "b"], ["plain", "c"])
    assert run.arms["plain"].status == "ok"
    assert len(run.records["c"]) == 3


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
