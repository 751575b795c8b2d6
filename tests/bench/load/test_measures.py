"""The figures of a stretch, on requests whose times are written down by hand."""

from __future__ import annotations

import pytest

from edgespec.bench.load.measures import Deadline, figures, latencies, loaded_seconds
from edgespec.bench.load.records import Outcome, Sample, Served, Stretch


def served(
    number: int, at: float, times: list[tuple[float, int]], outcome: Outcome = "finished", finished: float | None = None
) -> Served:
    end = times[-1][0] if times and finished is None and outcome == "finished" else finished
    return Served(number, "p", at, 10, submitted=at, finished=end, outcome=outcome, pieces=times)


def stretch(*requests: Served, seconds: float = 10.0, warm_up: float = 2.0, ended: float = 20.0) -> Stretch:
    return Stretch("none", 1.0, 0, 0, seconds, warm_up, served=list(requests), ended=ended)


DEADLINE = Deadline(1.0, 0.5)


def test_loaded_seconds_and_throughput() -> None:
    found = stretch(
        served(0, 0.0, [(1.0, 5), (3.0, 2)]),  # came in the warm-up: its tokens in the window count
        served(1, 2.5, [(3.5, 1), (4.0, 4)]),
        served(2, 8.0, [(9.0, 1), (12.0, 9)]),  # what came after the window does not
    )
    assert loaded_seconds(found) == pytest.approx((4.0 - 2.0) + (10.0 - 8.0))
    result = figures(found, DEADLINE)
    assert result["tokens"] == 2 + 5 + 1
    assert result["throughput"] == pytest.approx(8 / 4)
    assert result["tokens_per_second"] == pytest.approx(8 / 8)
    assert result["requests"] == {"asked": 2, "finished": 2, "unfinished": 0, "refused": 0, "failed": 0}


def test_a_gap_is_not_load_and_overlaps_count_once() -> None:
    found = stretch(served(0, 3.0, [(4.0, 1)]), served(1, 3.5, [(5.0, 1)]), served(2, 7.0, [(8.0, 1)]))
    assert loaded_seconds(found) == pytest.approx(2.0 + 1.0)


def test_an_unfinished_request_is_load_to_the_end() -> None:
    assert loaded_seconds(stretch(served(0, 6.0, [], "unfinished"))) == pytest.approx(4.0)


@pytest.mark.parametrize("outcome", ["refused", "failed"])
def test_what_ended_without_an_answer_is_no_load_from_then_on(outcome: Outcome) -> None:
    assert loaded_seconds(stretch(served(0, 3.0, [], outcome))) == 0.0  # of a run that did not say when
    assert loaded_seconds(stretch(served(0, 3.0, [], outcome, finished=4.5))) == pytest.approx(1.5)


def test_percentiles_are_of_the_nearest_rank() -> None:
    requests = [served(n, 0.0, [(float(n + 1), 1)]) for n in range(20)]
    found = latencies(requests, "ttft", 100.0)
    assert (found["p50"], found["p95"], found["p99"], found["mean"]) == (10.0, 19.0, 20.0, 10.5)
    assert not found["at_least"]


def test_what_never_came_is_longer_than_all() -> None:
    requests = [served(n, 0.0, [(1.0, 1)]) for n in range(9)] + [served(9, 0.0, [], "unfinished")]
    found = latencies(requests, "ttft", 21.0)
    assert (found["p50"], found["p95"], found["p99"]) == (1.0, None, None)
    assert found["mean"] == pytest.approx((9 + 21) / 10)
    assert found["at_least"]


def test_failures_are_no_times() -> None:
    requests = [served(0, 0.0, [(1.0, 1)]), served(1, 0.0, [(0.001, 1)], "failed"), served(2, 0.0, [], "refused")]
    for name in ("ttft", "tpot", "latency"):
        assert latencies(requests, name, 9.0)["n"] == (0 if name == "tpot" else 1)


def test_time_per_token_leaves_the_first_piece_out() -> None:
    (one,) = [served(0, 0.0, [(1.0, 3), (1.5, 1), (2.0, 4)])]
    assert one.tpot == pytest.approx(1.0 / 5)
    assert served(0, 0.0, [(1.0, 3)]).tpot is None


def test_goodput_counts_every_request() -> None:
    found = figures(
        stretch(
            served(0, 2.0, [(2.5, 1), (3.0, 1)]),
            served(1, 2.0, [(3.5, 1), (3.6, 1)]),  # first token late
            served(2, 2.0, [(2.5, 1), (3.5, 1)]),  # tokens too slow
            served(3, 2.0, [(2.5, 1)], "unfinished"),
            served(4, 2.0, [(2.5, 1)], "failed"),
            served(5, 2.0, [(3.0, 4)]),  # one piece: no time per token to miss
        ),
        DEADLINE,
    )
    assert found["goodput"]["share"] == pytest.approx(2 / 6)
    assert found["goodput"]["requests_per_second"] == pytest.approx(2 / 8)


def test_the_loop_over_time() -> None:
    found = stretch(served(0, 2.0, [(3.0, 1)]))
    found.samples = [
        Sample(1.0, 1.0, 9, 9, 9, 9.0, 9, 9, 9, 0.0, 9, "lend"),  # in the warm-up
        Sample(3.0, 1.0, 1, 1, 0, 0.0, 0, 0, 1, 0.9, 2, ""),
        Sample(6.0, 3.0, 4, 8, 2, 2.0, 8, 6, 10, 0.1, 0, "lend"),
        Sample(7.0, 1.0, 1, 64, 0, None, 0, 0, 0, 0.2, 0, "return"),
    ]
    loop = figures(found, DEADLINE)["loop"]
    assert loop["sequences"] == pytest.approx((1 + 12 + 1) / 5)
    assert loop["gamma"] == pytest.approx(6 / 4)  # batches of prompts alone have none
    assert loop["acceptance"] == pytest.approx(6 / 8)
    assert (loop["most_queued"], loop["least_kv_free"], loop["emitted"]) == (2, 0.1, 11)
    assert loop["elastic"] == [[6.0, "lend"], [7.0, "return"]]


def test_an_empty_stretch_says_nothing() -> None:
    found = figures(stretch(), DEADLINE)
    assert found["throughput"] is None
    assert found["goodput"]["share"] is None
    assert found["ttft"]["p50"] is None
    assert found["loop"]["gamma"] is None
