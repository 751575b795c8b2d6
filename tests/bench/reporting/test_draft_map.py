"""What came of every draft's blocks in every domain, by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench.reporting.samples import QA, part_of
from tests.support.runs import failed, record


def test_drafts_by_domain_over_all_policies(tmp_path: Path) -> None:
    def told(**tallies: tuple[int, int, int, int]) -> dict[str, Any]:
        return {"stats": {"by_draft": {name: list(counts) for name, counts in tallies.items()}}}

    plain = [record(1), record(2, **QA), record(3, **QA)]
    records = {
        "plain": plain,
        "memspec": [record(1, **told(ngram=(2, 1, 6, 2), qa=(4, 2, 12, 3))), record(2, **told(qa=(5, 5, 10, 9)), **QA)],
        "edgespec": [record(2, **told(qa=(3, 0, 3, 0), phrases=(1, 1, 1, 1)), **QA), failed(3, **QA)],
    }
    found = part_of(tmp_path, records)["draft_map"]
    assert found["domains"] == ["chat", "qa"]
    assert list(found["drafts"]) == ["qa", "phrases", "ngram"], "a domain's own first, lookup last"
    assert found["drafts"]["qa"]["qa"] == {
        "blocks": 8, "first": 5, "proposed": 13, "accepted": 9,
        "first_share": pytest.approx(5 / 8), "acceptance_rate": pytest.approx(9 / 13),
    }  # fmt: skip
    assert found["drafts"]["qa"]["chat"]["first_share"] == pytest.approx(0.5)
    assert list(found["drafts"]["ngram"]) == ["chat"], "what it was not asked in is no 0"
    assert found["left_out"] is None
    assert part_of(tmp_path / "2", {"plain": plain})["draft_map"]["drafts"] == {}
