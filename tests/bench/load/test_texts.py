"""Texts beside those of the target alone: what counts as different, as a near tie, and as a fault."""

from __future__ import annotations

from edgespec.bench.load.records import Ask, Outcome, Served, Stretch
from edgespec.bench.load.texts import Reference, differences, judged, reference_of

ASKS = {n: Ask(n, 0.0, f"p{n}", (n, 1), 4) for n in range(6)}
RIGHT = {((n, 1), 4): Reference((10, 11, 12, 13)) for n in range(5)}


def served(number: int, ids: tuple[int, ...], outcome: Outcome = "finished") -> Served:
    return Served(number, f"p{number}", 0.0, 2, outcome=outcome, ids=ids)


def stretch(*requests: Served, arm: str = "us") -> Stretch:
    return Stretch(arm, 1.0, 0, 0, 1.0, 0.0, served=list(requests))


def test_what_differs() -> None:
    compared, without, found = differences(
        stretch(
            served(0, (10, 11, 12, 13)),
            served(1, (10, 11, 99, 13)),
            served(2, (10, 11, 12)),  # whole, but too short
            served(3, (10, 11), "unfinished"),  # right as far as it came
            served(4, (10, 12), "unfinished"),
            served(5, (1, 2)),  # nobody knows what it should be
        ),
        ASKS,
        RIGHT,
    )
    assert (compared, without) == (5, 1)
    assert [(d.number, d.position, d.left, d.right) for d in found] == [
        (1, 2, 99, 12), (2, 3, None, 13), (4, 1, 12, 11),
    ]  # fmt: skip
    assert found[0].before == (1, 1, 10, 11)


def test_failed_and_refused_requests_have_no_text() -> None:
    assert differences(stretch(served(0, (9,), "failed"), served(1, (), "refused")), ASKS, RIGHT) == (0, 0, [])


def test_without_answers_alone_one_arm_is_the_reference() -> None:
    whole = stretch(served(0, (1, 2, 3)), served(1, (4,), "unfinished"), arm="none")
    reference = reference_of(ASKS, [whole, stretch(served(0, (7,)))], "none")
    assert reference == {((0, 1), 4): Reference((1, 2, 3), (0, 0))}
    assert differences(whole, ASKS, reference) == (0, 2, [])  # an answer is no check of itself
    other = Stretch("us", 1.0, 0, 1, 1.0, 0.0, served=[served(0, (1, 2, 9))])
    compared, without, found = differences(other, ASKS, reference)
    assert (compared, without, len(found)) == (1, 0, 1)


def test_near_ties_and_faults() -> None:
    _, _, found = differences(
        stretch(served(0, (10, 98)), served(1, (10, 99)), served(2, (10, 98)), served(3, (10, 97))), ASKS, RIGHT
    )
    gaps = {98: {"gap": 0.2, "margin": 0.1}, 99: {"gap": 0.2, "margin": 3.0}}
    asked = []

    def gap_of(before: list[int], left: int, right: int) -> dict[str, float] | None:
        asked.append((tuple(before), left, right))
        return gaps.get(left)

    result = judged(9, [*found, found[0]], "exact", gap_of)
    assert (result["compared"], result["equal"]) == (9, 4)
    assert [d["near_tie"] for d in result["differences"]] == [True, False, True, False, True]
    assert (result["near_ties"], result["faults"]) == (3, 2)  # a gap that cannot be told is no tie
    assert len(asked) == 4  # the same place once
    assert judged(9, found, "float32", gap_of)["faults"] == 4


def test_an_answer_that_ends_too_soon_is_a_fault_without_being_measured() -> None:
    _, _, found = differences(stretch(served(0, (10,))), ASKS, RIGHT)
    assert judged(1, found, "exact", lambda *_: 1 / 0)["faults"] == 1
