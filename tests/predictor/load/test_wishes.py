"""What several texts want in memory, put together."""

from __future__ import annotations

from predictor.load import Wish, combine


def test_one_text_gets_what_it_wants() -> None:
    holding = combine([Wish(("code", "math"), "code is best")], 2)
    assert holding.wanted == ("code", "math")
    assert holding.reason == "code is best"


def test_each_text_gets_its_first_wish_before_any_gets_its_second() -> None:
    wishes = [Wish(("code", "math")), Wish(("code", "math")), Wish(("law", "code"))]
    assert combine(wishes, 2).wanted[:2] == ("code", "law")


def test_the_draft_of_most_texts_comes_first_and_the_reason_counts_them() -> None:
    wishes = [Wish(("code",)), Wish(("law", "code")), Wish(("law",))]
    holding = combine(wishes, 1)
    assert holding.wanted[0] == "law"
    assert "law (2)" in holding.reason


def test_what_is_here_stays_unless_clearly_more_is_wanted_elsewhere() -> None:
    even = [Wish(("code", "math")), Wish(("math", "code"))]
    assert combine(even, 1, {"math"}).wanted[0] == "math"
    assert combine(even, 1, {"code"}).wanted[0] == "code"
    assert combine([*even, Wish(("code", "math"))], 1, {"math"}).wanted[0] == "code"


def test_nothing_is_lost_or_doubled_and_nobody_may_want_anything() -> None:
    wishes = [Wish(("a", "b", "a")), Wish(("c",)), Wish(())]
    assert sorted(combine(wishes, 1).wanted) == ["a", "b", "c"]
    assert combine([], 3).wanted == ()
    assert combine([Wish(()), Wish(())], 3).wanted == ()
    assert combine([Wish(("a",), weight=float("nan")), Wish(("b",))], 1).wanted[0] == "b"
