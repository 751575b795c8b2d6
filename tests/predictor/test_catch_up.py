"""Who reads up in a round, and how much."""

from __future__ import annotations

from predictor.catch_up import FREELY, PIECE, CatchUp, Reading, able
from predictor.planner import Candidate


def lagging(name: str, behind: int) -> Candidate:
    return Candidate(name, 1, False, behind=behind)


def test_nobody_reads_who_hardly_lags() -> None:
    candidates = [lagging("a", FREELY), lagging("b", 0), Candidate("ngram", 3, True)]
    assert CatchUp().choose(candidates, "a") is None
    assert able(candidates) == candidates


def test_the_preferred_one_reads_all_before_the_first_round_and_pieces_later() -> None:
    catch_up = CatchUp()
    candidates = [lagging("a", 300), lagging("b", 256)]
    assert catch_up.choose(candidates, "b") == Reading("b", 256)
    catch_up.earn(0.015)
    assert catch_up.choose(candidates, "b") == Reading("b", PIECE)
    assert able([candidates[0], lagging("b", 3)]) == [lagging("b", 3)]


def test_the_others_take_turns_within_their_share() -> None:
    catch_up = CatchUp()
    candidates = [lagging("a", 300), lagging("b", 300)]
    assert catch_up.choose(candidates, "elsewhere") is None  # nothing was earned yet
    assert catch_up.choose(candidates, None) == Reading("a", 300)
    catch_up.took(PIECE, 0.003)
    chosen, seconds, rounds = [], 0.0, 0
    while len(chosen) < 6:
        rounds += 1
        catch_up.earn(0.015)
        reading = catch_up.choose(candidates, "resident elsewhere")
        if reading is not None:
            chosen.append(reading.draft)
            assert reading.limit == PIECE
            seconds += 0.003
            catch_up.took(PIECE, 0.003)
    assert chosen == ["a", "b"] * 3
    assert 0.02 < seconds / (rounds * 0.015) < 0.045


def test_where_a_ranker_speaks_only_the_preferred_one_reads_unless_it_is_away() -> None:
    catch_up = CatchUp()
    here = [lagging("a", 300), lagging("b", 4)]
    for _ in range(100):
        catch_up.earn(0.015)
    assert catch_up.choose(here, "b", informed=True) is None
    assert catch_up.choose(here, "b", informed=False) == Reading("a", PIECE)
    assert catch_up.choose(here, "away", informed=True) == Reading("a", PIECE)
    assert catch_up.choose(here, "a", informed=True) == Reading("a", PIECE)


def test_the_preferred_one_does_not_read_what_does_not_pay() -> None:
    catch_up, candidates = CatchUp(), [lagging("a", 300), lagging("b", 300)]
    asked: list[tuple[Candidate, object]] = []

    def pays(candidate: Candidate, among: object) -> bool:
        asked.append((candidate, among))
        return False

    assert catch_up.choose(candidates, "b", informed=True, pays=pays) is None
    assert asked == [(candidates[1], candidates)]
    assert catch_up.choose(candidates, None, informed=True, pays=pays) is None
    catch_up.earn(10.0)
    assert catch_up.choose(candidates, "b", informed=True, pays=pays) is None
    reading = catch_up.choose(candidates, "b", informed=False, pays=pays)
    assert reading == Reading("a", PIECE), "where nobody knows how they would do, the share of all is for finding out"


def test_what_is_not_spent_does_not_pile_up() -> None:
    catch_up = CatchUp()
    for _ in range(10_000):
        catch_up.earn(0.015)
    catch_up.took(PIECE, 0.003)
    bought = 0
    while catch_up.choose([lagging("a", 10_000)], None) is not None:
        catch_up.took(PIECE, 0.003)
        bought += 1
        assert bought < 10
    assert bought
