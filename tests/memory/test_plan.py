"""The memory plan: K from the budget, what fits by how much, and what to change."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from edgespec.memory.plan import DraftNeed, MemoryPlan

MIB = 1 << 20


def plan(budget: int, *sizes: int, **changes: Any) -> MemoryPlan:
    """A target of 100 MiB, 50 MiB of workspace, 1024 positions of 64 KiB (64 MiB); drafts a, b, ... of sizes in MiB."""
    drafts = [DraftNeed(name, size * MIB) for name, size in zip("abcdefgh", sizes)]
    values = {"target": 100 * MIB, "beside": {"workspace": 50 * MIB}, "context": 1024, "drafts": drafts}
    return MemoryPlan(**{**values, "cache": lambda tokens: tokens * (64 << 10), "budget": budget * MIB, **changes})


def test_all_fits() -> None:
    made = plan(300, 10, 12, 8)
    assert (made.slots, made.slot_bytes, made.left) == (3, 12 * MIB, 50 * MIB)
    rows = made.rows()
    assert [(row.part, row.nbytes // MIB, row.left // MIB) for row in rows] == [
        ("target", 100, 200),
        ("workspace", 50, 150),
        ("KV cache of 1024 tokens", 64, 86),
        ("3 draft slots of 12.0 MiB", 36, 50),
        ("total", 250, 50),
    ]
    assert all(row.fits for row in rows)
    assert [(row.part, row.left // MIB) for row in made.draft_rows()] == [("c", 4), ("a", 2), ("b", 0)]
    assert made.advice() == []
    assert not made.refused


def test_k_follows_from_the_budget() -> None:
    made = plan(250, 12, 12, 12, 12)
    assert (made.slots, made.fits) == (3, True)
    assert made.advice() == [
        "3 of 4 drafts at once; one more needs 12.0 MiB",
        "--memory-budget 262MiB would fit K = 4",
        "--context 512 would free 32.0 MiB, enough for K = 4",
    ]


def test_what_was_asked_for_is_taken_as_it_is() -> None:
    fewer = plan(1000, 12, 12, 12, asked=2)
    assert (fewer.slots, fewer.advice()) == (2, [])
    clamped = plan(1000, 12, asked=5)
    assert clamped.slots == 1
    assert clamped.advice() == ["--resident 5 is more than there is to hold (drafts with weights: 1)"]
    assert plan(1000, 12, asked=0).slots == 0
    more = plan(240, 12, 12, 12, asked=3)
    assert (more.slots, more.left, more.refused) == (3, -10 * MIB, True)
    assert more.advice() == [
        "10.0 MiB are missing: as it is, this is refused",
        "--resident 2 fits",
        "--memory-budget 250MiB would fit all of it",
        "--context 512 would free 32.0 MiB, enough for all of it",
    ]
    assert [row.fits for row in more.rows()] == [True, True, True, False, False]


def test_a_draft_that_is_too_large_is_left_out() -> None:
    made = plan(250, 10, 10, 90)
    assert (made.slots, made.slot_bytes) == (2, 10 * MIB)
    assert made.draft_rows()[-1].left == -80 * MIB
    assert made.advice()[0] == "draft c is left out: one slot for it needs 54.0 MiB more"
    assert "--memory-budget 304MiB would fit one slot for every draft" in made.advice()


def test_one_large_draft_makes_all_slots_large() -> None:
    made = plan(320, 10, 10, 10, 90)
    assert made.slots == 1
    assert made.advice()[-1] == "without draft d (90.0 MiB), K = 3 fits"


def test_a_target_that_does_not_fit_is_refused() -> None:
    made = plan(120, 10)
    assert (made.slots, made.refused) == (0, True)
    assert [row.fits for row in made.rows()[:3]] == [True, False, False]
    assert made.draft_rows()[0].left == -10 * MIB
    assert made.advice()[1] == "--memory-budget 214MiB would fit all of it"


def test_drafts_that_do_not_fit_refuse_nothing() -> None:
    tables = [DraftNeed("t", always=20 * MIB)]
    made = plan(220, drafts=tables)
    assert (made.refused, made.fits) == (False, False)
    assert made.advice()[0] == "14.0 MiB are missing: drafts will be left out"
    assert made.rows()[3].part == "drafts, whatever is loaded"
    assert made.draft_rows() == []
    assert plan(300, drafts=tables).advice() == []


def test_large_amounts_are_rounded_up() -> None:
    made = plan(100, target=20 << 30)
    assert "--memory-budget 20.2GiB would fit all of it" in made.advice()


@given(
    budget=st.integers(0, 2000),
    sizes=st.lists(st.integers(1, 300), max_size=8),
    context=st.integers(1, 20_000),
    asked=st.none() | st.integers(0, 10),
)
def test_what_is_promised_holds(budget: int, sizes: list[int], context: int, asked: int | None) -> None:
    """Slots fit unless they were asked for, one more would not, and following the advice helps."""
    made = plan(budget, *sizes, context=context, asked=asked)
    if asked is None:
        assert made.slots == 0 or made.fits
        usable = [size for size in sizes if size * MIB <= made.slot_bytes]
        if made.room >= 0 and made.slots < len(usable):
            assert (made.slots + 1) * made.slot_bytes > made.room
    assert made.rows()[-1].nbytes == made.total == sum(row.nbytes for row in made.rows()[:-1])
    for line in made.advice():
        if line.startswith("--memory-budget") and "MiB" in line:
            richer = plan(int(line.split()[1].removesuffix("MiB")), *sizes, context=context, asked=asked)
            better = richer.slots > made.slots or richer.slot_bytes > made.slot_bytes or richer.fits > made.fits
            assert better
        if line.startswith("--context"):
            shorter = plan(budget, *sizes, context=int(line.split()[1]), asked=asked)
            better = shorter.slots > made.slots or shorter.slot_bytes > made.slot_bytes or shorter.fits > made.fits
            assert better
