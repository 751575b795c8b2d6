"""How close the target's logits were where an arm wrote another token than plain, for the report's near ties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from edgespec.bench.specbench.folder import RunFolder
from edgespec.bench.specbench.harness import Texts, exchange
from edgespec.bench.specbench.questions import Question
from edgespec.bench.workers import WorkerFailure

if TYPE_CHECKING:
    from edgespec.bench.reporting.equality import Difference


class Gaps(Protocol):
    """Measures a difference by teacher forcing (bench.extras.Probes)."""

    def gap(self, weight_format: str, ids: list[int], left: int, right: int) -> dict[str, float]: ...


def measure_ties(run: RunFolder, questions: Sequence[Question], texts: Texts, probes: Gaps) -> None:
    """Write the gaps of all differences into the run's folder; what cannot be measured is left out, and is no tie."""
    from edgespec.bench.reporting.equality import write_ties

    by_key = {question.key: question for question in questions}
    records = {(arm, *record.key): record for arm, found in run.records.items() for record in found}
    weight_format = str(run.settings["weight_format"])

    def gap_of(difference: Difference) -> Mapping[str, float] | None:
        left, right, record = difference.arm_token, difference.plain_token, difference.record
        if left is None or right is None:
            return None
        turns = by_key[record.question_id].turns
        messages: list[dict[str, str]] = []
        for turn in range(record.turn):
            answer = records[difference.arm, record.group, record.repeat, record.question_id, turn]
            messages += exchange(turns[turn], texts.text(answer.token_ids))
        ids = texts.conversation([*messages, {"role": "user", "content": turns[record.turn]}])
        try:
            return probes.gap(weight_format, [*ids, *difference.before], left, right)
        except WorkerFailure:
            return None

    write_ties(run, gap_of)
