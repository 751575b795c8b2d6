"""Budgets in words, and plans that do not fit."""

from __future__ import annotations

import pytest

from edgespec.errors import ConfigError, MemoryBudgetError
from edgespec.memory.budget import check_fits, format_bytes, parse_budget, parse_bytes
from edgespec.memory.topology import Topology

GIB, MIB = 2**30, 2**20


def machine(total: int, available: int) -> Topology:
    return Topology("discrete", total, lambda: (available, total))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1234, 1234),
        ("1234", 1234),
        ("1GiB", GIB),
        (" 1.5 gib ", 3 * GIB // 2),
        ("2G", 2 * GIB),
        ("500MB", 500_000_000),
        ("64k", 65536),
        (".5MiB", MIB // 2),
        ("10B", 10),
        ("50%", 4 * GIB),
        ("100%", 8 * GIB),
    ],
)
def test_amounts(value: str | int, expected: int) -> None:
    assert parse_budget(value, machine(8 * GIB, GIB)) == expected


@pytest.mark.parametrize(
    "value",
    [
        "",
        "GiB",
        "-1",
        "1e9",
        "nan",
        "inf",
        "1 cup",
        "101%",
        "0",
        "0%",
        0,
        -5,
        True,
        1.5,
        None,
        "1,5GiB",
        "1GiB 2",
        "1%%",
    ],
)
def test_what_cannot_be_read(value: object) -> None:
    with pytest.raises(ConfigError, match=r"the memory budget .* cannot be read: give bytes, or a form such as 1GiB"):
        parse_budget(value, machine(8 * GIB, GIB))  # type: ignore[arg-type]


def test_percentages_need_a_whole() -> None:
    with pytest.raises(ConfigError):
        parse_bytes("50%")


def test_auto_leaves_a_tenth_and_at_least_256_mib() -> None:
    assert parse_budget("auto", machine(16 * GIB, 10 * GIB)) == 9 * GIB
    assert parse_budget("auto", machine(16 * GIB, GIB)) == GIB - 256 * MIB
    assert parse_budget("auto", machine(16 * GIB, 100 * MIB)) == 0


def test_more_than_there_is() -> None:
    with pytest.raises(MemoryBudgetError, match=r"the memory budget 9GiB is more than the 8\.0 GiB"):
        parse_budget("9GiB", machine(8 * GIB, 8 * GIB))


def test_a_plan_that_fits_says_nothing() -> None:
    check_fits({"target": GIB, "KV cache": MIB}, GIB + MIB, GIB + MIB)
    check_fits({"target": GIB}, GIB)
    check_fits({}, 0, 0)


def test_a_plan_over_the_budget_is_refused_with_the_numbers() -> None:
    with pytest.raises(MemoryBudgetError) as caught:
        check_fits({"target": GIB, "KV cache": 512 * MIB}, GIB, 64 * GIB)
    assert str(caught.value) == (
        "1.5 GiB are needed (target 1.0 GiB, KV cache 512.0 MiB) but the memory budget is 1.0 GiB; "
        "raise --memory-budget, or use a smaller model or --context; edgespec doctor shows what fits"
    )


def test_where_drafts_are_held_fewer_of_them_are_an_answer() -> None:
    with pytest.raises(MemoryBudgetError, match=r"or use fewer drafts at once \(--resident\), a smaller model or"):
        check_fits({"target": GIB, "7 draft slots": 512 * MIB}, GIB)


def test_a_plan_over_what_is_free_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        MemoryBudgetError, match=r"1\.0 GiB are needed \(target 1\.0 GiB\) but only 100\.0 MiB are free"
    ):
        check_fits({"target": GIB}, 2 * GIB, 100 * MIB)
    with pytest.raises(MemoryBudgetError):
        check_fits({"target": 1}, 2, 0)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * MIB, "5.0 MiB"), (3 * 2**40, "3.0 TiB")]
)
def test_sizes_as_text(count: int, text: str) -> None:
    assert format_bytes(count) == text
