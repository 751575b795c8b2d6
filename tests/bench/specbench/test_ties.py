"""Near ties: the target is asked at exactly the place where an arm left plain's text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.bench.extras import Probes
from edgespec.bench.reporting.equality import read_ties
from edgespec.bench.specbench.folder import Record, read_run
from edgespec.bench.specbench.ties import measure_ties
from tests.bench.specbench.fakes import FakeTexts, failing, question
from tests.support.runs import record, write_run

QUESTIONS = [question(1, "11", "12"), question(2, "22")]


class Gaps:
    def __init__(self) -> None:
        self.asked: list[Any] = []

    def gap(self, *given: Any) -> dict[str, float]:
        self.asked.append(given)
        if given[1][1] == 22:
            failing("the probe died", alive=False)([], 0)
        return {"margin": 0.25, "gap": 0.125}


def answer(number: int, turn: int, *ids: int) -> Record:
    return record(number, turn=turn, rounds=[1] * (len(ids) - 1), token_ids=ids)


def test_the_history_up_to_the_difference_is_what_the_arm_had(tmp_path: Path) -> None:
    first = answer(1, 0, 5, 6)
    plain = [first, answer(1, 1, 7, 8, 9), answer(2, 0, 1, 2)]
    other = [first, answer(1, 1, 7, 8, 4), answer(2, 0, 1, 3)]
    folder = write_run(tmp_path / "run", {"plain": plain, "edgespec": other}, settings={"weight_format": "int8"})
    probes = Gaps()
    measure_ties(read_run(folder), QUESTIONS, FakeTexts(), probes)
    assert probes.asked == [
        ("int8", [1000, 11, 2000, 5, 6, 1000, 12, 7, 8], 4, 9),
        ("int8", [1000, 22, 1], 3, 2),
    ]
    assert read_ties(folder) == {("edgespec", 0, 0, "1", 1, 2): {"margin": 0.25, "gap": 0.125}}


def test_the_probe_computes_where_the_run_did() -> None:
    asked: list[dict[str, Any]] = []

    class Here:
        def request(self, op: str, **fields: Any) -> dict[str, Any]:
            asked.append(fields)
            return {"result": {"margin": 0.0, "gap": 0.0}}

    probes = Probes(Path("model"), 2, lambda name: Here(), device="cuda")  # type: ignore[arg-type, return-value]
    probes.gap("float32", [1], 2, 3)
    assert asked[0]["options"]["device"] == "cuda"
