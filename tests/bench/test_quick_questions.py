"""The questions that ship with edgespec, and the target that asks them."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from edgespec import bench
from edgespec.bench.specbench.questions import MT_BENCH, TASKS, read_questions, task_of

QUESTIONS = Path(bench.__file__).parent / "data" / "questions.jsonl"
ROOT = Path(__file__).resolve().parents[2]


def test_every_category_of_spec_bench_is_asked_and_no_line_is_left_out():
    items, ids, skipped = read_questions(QUESTIONS)
    assert skipped == []
    counts = Counter(item.category for item in items)
    single = {"translation", "summarization", "qa", "math_reasoning", "rag"}
    assert set(counts) == {*TASKS, *single}
    assert all(counts[category] == (2 if category in single else 1) for category in counts)
    assert sorted(ids.values()) == list(range(1, len(items) + 1))
    assert all(len(item.turns) == (2 if task_of(item.category) == MT_BENCH else 1) for item in items)


def test_the_target_asks_them():
    if shutil.which("make") is None or not (ROOT / "Makefile").is_file():
        pytest.skip("no make, or no Makefile beside the tests")
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "make bench-quick " in told
    planned = subprocess.run(["make", "-n", "bench-quick"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    again = ["make", "-n", "bench-quick", "OUT=runs/x", "RESUME=1"]
    assert "--resume" not in planned
    assert "--resume" in subprocess.run(again, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"--questions {QUESTIONS.relative_to(ROOT)}" in planned
