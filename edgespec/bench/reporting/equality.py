"""Whether an arm wrote what plain wrote, token by token, and whether a difference is a near tie of the target."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.bench.measure import first_difference
from edgespec.bench.reporting.pairs import Answers, Part
from edgespec.bench.specbench import fields
from edgespec.bench.specbench.folder import PLAIN, Record, RunFolder
from edgespec.bench.summary import NEAR_TIE
from edgespec.errors import ConfigError
from edgespec.files import write_text

TIES = "ties.jsonl"  # beside run.json: the target's logits at each first difference, where somebody measured them

TieKey = tuple[str, int, int, str, int, int]


class Difference(NamedTuple):
    """The first token in which an arm's answer is not plain's. before: the tokens that both wrote; arm_token and
    plain_token: what came then, None where the answer was over."""

    arm: str
    record: Record
    before: tuple[int, ...]
    arm_token: int | None
    plain_token: int | None

    @property
    def key(self) -> TieKey:
        r = self.record
        return self.arm, r.group, r.repeat, r.question_id, r.turn, len(self.before)


Gap = Mapping[str, float]  # margin: between the target's two best logits; gap: between those of the two tokens


def differences(run: RunFolder) -> list[Difference]:
    """All of one run's policies, for who wants to measure their gaps (`write_ties`). Peers promise nothing."""
    part = Part([run])
    return [
        difference
        for name, arm in part.arms.items()
        if arm.info.kind == "policy" and name != PLAIN
        for _, difference in _compared(part, arm)
        if difference is not None
    ]


def write_ties(run: RunFolder, gap_of: Callable[[Difference], Gap | None]) -> None:
    """Measure each difference of a run (None: cannot be told) and keep the gaps in its folder for the report.

    Raises ConfigError if the folder cannot be written.
    """
    lines = []
    for difference in differences(run):
        found = None if None in (difference.arm_token, difference.plain_token) else gap_of(difference)
        if found is not None:
            lines.append(json.dumps([*difference.key, {"margin": found["margin"], "gap": found["gap"]}]) + "\n")
    try:
        write_text(run.path / TIES, "".join(lines))
    except OSError as error:
        raise ConfigError(f"{run.path / TIES} cannot be written: {error.strerror}.") from error


def read_ties(folder: Path) -> dict[TieKey, dict[str, float]]:
    """The gaps that were measured; none without the file. Raises ConfigError naming a damaged line."""
    found: dict[TieKey, dict[str, float]] = {}
    file = folder / TIES
    if not file.is_file():
        return found
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
        try:
            arm, group, repeat, question, turn, at, gap = fields.parsed(line)
            values = {name: float(gap[name]) for name in ("margin", "gap")}
            if not all(map(math.isfinite, values.values())):
                raise ValueError
            found[arm, group, repeat, question, turn, at] = values
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{file}, line {number} is damaged; delete the file to report without gaps.") from None
    return found


def equality(part: Part, name: str) -> dict[str, Any]:
    """Equal and compared answers of an arm, overall and by category, and every difference.

    Every repeat counts. A later turn counts only where all turns before it were equal: else it had another prompt.
    """
    arm = part.arms[name]
    settings = part.runs[0].settings
    if float(settings.get("temperature") or 0) > 0:
        return {"checked": False, "reason": "not checked (sampling)", "differences": []}
    ties = [read_ties(run.path) for run in part.runs]
    limit = NEAR_TIE.get(str(settings.get("weight_format")), 0.0)
    by_category: dict[str, dict[str, int]] = {}
    listed = []
    for folder, (record, difference) in _by_folder(part, arm):
        count = by_category.setdefault(record.category, {"equal": 0, "compared": 0})
        count["compared"] += 1
        count["equal"] += difference is None
        if difference is not None:
            listed.append(_published(difference, ties[folder].get(difference.key), limit))
    equal, compared = (sum(count[key] for count in by_category.values()) for key in ("equal", "compared"))
    return {
        "checked": True,
        "promised": arm.info.kind == "policy",
        "equal": equal,
        "compared": compared,
        "share": equal / compared if compared else None,
        "by_category": by_category,
        "near_ties": sum(d["near_tie"] is True for d in listed),
        "faults": sum(d["near_tie"] is False for d in listed),
        "not_judged": sum(d["near_tie"] is None for d in listed),
        "differences": listed,
    }


def unstable(arm: Answers) -> list[str]:
    """Questions to which the arm's answer changed from one repeat to another."""
    changed = []
    for (_, question), repeats in arm.turns.items():
        texts = {tuple(r.token_ids for r in turns) for turns in repeats.values() if all(r.error is None for r in turns)}
        full = max((len(text) for text in texts), default=0)
        if len([text for text in texts if len(text) == full]) > 1:
            changed.append(question)
    return changed


def _published(difference: Difference, gap: Gap | None, limit: float) -> dict[str, Any]:
    record = difference.record
    # Both the two written tokens and the two best ones must be close: otherwise one of them was never a candidate.
    near = None if gap is None else max(gap["gap"], gap["margin"]) <= limit
    return {
        "question": record.question_id,
        "category": record.category,
        "repeat": record.repeat,
        "turn": record.turn,
        "position": len(difference.before),
        "near_tie": near,
        "gap": gap and gap["gap"],
        "margin": gap and gap["margin"],
    }


def _by_folder(part: Part, arm: Answers) -> Iterator[tuple[int, tuple[Record, Difference | None]]]:
    for number in range(len(part.runs)):
        for found in _compared(part, arm, number):
            yield number, found


def _compared(part: Part, arm: Answers, folder: int = 0) -> Iterator[tuple[Record, Difference | None]]:
    """Each answer that had the same prompt as plain's, with its difference."""
    plain = part.arms.get(PLAIN)
    for place, repeats in arm.turns.items():
        theirs = plain.turns.get(place, {}) if plain else {}
        if place[0][0] == folder:
            for repeat in sorted(repeats.keys() & theirs.keys()):
                yield from _turns(arm.name, repeats[repeat], theirs[repeat])


def _turns(name: str, mine: Sequence[Record], theirs: Sequence[Record]) -> Iterator[tuple[Record, Difference | None]]:
    for record, other in zip(mine, theirs):
        if record.turn != other.turn or record.error is not None or other.error is not None:
            return
        at = first_difference(record.token_ids, other.token_ids)
        if at is None:
            yield record, None
            continue
        left, right = (ids[at] if at < len(ids) else None for ids in (record.token_ids, other.token_ids))
        yield record, Difference(name, record, record.token_ids[:at], left, right)
        return
