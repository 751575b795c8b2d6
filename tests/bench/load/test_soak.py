"""The soak: a sound engine passes, and each kind of fault is found by the line of the verdict that is for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from edgespec.bench.load.records import Ask, Sample
from edgespec.bench.load.soak import KINDS, Look, Soak, Soaked, _Moving, to_json, verdict
from edgespec.decoding.params import SamplingParams
from tests.bench.load.fakes import FakeRequest, FakeSystem, failing, virtual

ASKS = [Ask(n, 0.0, f"p{n}", (n + 1, 2), 9) for n in range(4)]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch):
    with virtual(monkeypatch):
        yield


def soak(system: FakeSystem, seconds: float = 150.0, stuck_s: float = 20.0) -> Soaked:
    return Soak(system, ASKS, seconds=seconds, rate=1.5, stuck_s=stuck_s).run()


def failed(soaked: Soaked) -> set[str]:
    return {finding.name for finding in verdict(soaked, len(soaked.differences)) if not finding.ok}


def test_a_sound_engine_passes() -> None:
    soaked = soak(FakeSystem(max_sessions=3))
    assert failed(soaked) == set(), verdict(soaked, len(soaked.differences))
    assert set(soaked.counts) == set(KINDS)
    assert soaked.counts["wrong"].keys() == {"rejected"}
    assert set(soaked.counts["leaves"]) == {"finished", "cancelled"}
    assert soaked.counts["deadline"]["cancelled"] > 0
    assert soaked.counts["whole"].keys() == {"finished"}
    assert soaked.compared > 100
    assert len(soaked.looks) >= 150
    assert to_json(soaked, verdict(soaked, 0), {})["passed"]


def test_a_wrong_text_is_found() -> None:
    assert failed(soak(FakeSystem(max_sessions=3, wrong=[40]))) == {"texts as alone"}


def test_an_error_is_found() -> None:
    soaked = soak(FakeSystem(max_sessions=3, faults={33: failing("the KV pool is broken")}))
    assert failed(soaked) == {"no error"}
    assert "the KV pool is broken" in soaked.errors[0]


def test_a_request_that_never_ends_is_found() -> None:
    class Forgets(FakeSystem):
        def _emit(self, request: FakeRequest) -> int:
            return 0 if request.ids[0] == 2 and request.done == 3 else super()._emit(request)

    soaked = soak(Forgets(max_sessions=30))
    assert "no stuck request" in failed(soaked)
    assert "has not moved for" in soaked.stuck[0]


def test_an_engine_that_stands_still_is_found() -> None:
    class Stands(FakeSystem):
        def _emit(self, request: FakeRequest) -> int:
            return 0 if next(self.numbers) > 60 else super()._emit(request)

    assert "no stuck request" in failed(soak(Stands(max_sessions=2)))


def test_to_wait_long_in_the_queue_is_not_to_be_stuck() -> None:
    soaked = soak(FakeSystem(max_sessions=1, step=0.35), seconds=18.0, stuck_s=6.0)
    assert soaked.stuck == []
    assert max(look.queued for look in soaked.looks) > 4  # of 2 s or more each


def test_a_cancel_that_is_not_heard_is_found() -> None:
    class Deaf(FakeSystem):
        def _step(self, request: FakeRequest) -> None:
            if request.reason == "early":
                request.reason = None
            super()._step(request)

        def _emit(self, request: FakeRequest) -> int:
            return 0 if request.done == 5 else super()._emit(request)

    assert "no stuck request" in failed(soak(Deaf(max_sessions=50)))


def test_a_wrong_request_that_is_taken_is_found() -> None:
    class Takes(FakeSystem):
        def submit(self, prompt: Any, params: SamplingParams, **more: Any) -> FakeRequest:
            return super().submit(prompt or [1, 2], params, **more)

    assert "was taken" in " ".join(soak(Takes(max_sessions=3)).errors)


def test_an_answer_that_is_cancelled_by_nobody_is_found() -> None:
    class Cancels(FakeSystem):
        def submit(self, prompt: Any, params: SamplingParams, **more: Any) -> FakeRequest:
            made = super().submit(prompt, params, **more)
            if sum(made.ids) == 5:
                made.cancel()
            return made

    assert "nobody asked for that" in " ".join(soak(Cancels(max_sessions=3)).errors)


def test_blocks_that_do_not_come_back() -> None:
    class Leaks(FakeSystem):
        def state(self) -> Mapping[str, Any]:
            return {**super().state(), "pool_free": 7}

    assert failed(soak(Leaks(max_sessions=3))) == {"KV blocks come back"}


def looks(rss: Sequence[float], threads: Sequence[int]) -> Soaked:
    made = Soaked(seconds=400.0)
    made.looks = [Look(float(n), int(r * 2**20), t, 10, 0, 0) for n, (r, t) in enumerate(zip(rss, threads))]
    return made


@pytest.mark.parametrize(
    ("rss", "threads", "found"),
    [
        ([500.0] * 400, [9] * 400, set()),
        ([300.0 + min(n, 80) for n in range(400)], [9] * 400, set()),  # it grows while it warms up
        ([500.0 + n / 4 for n in range(400)], [9] * 400, {"memory is flat"}),
        ([500.0] * 400, [9 + n // 40 for n in range(400)], {"threads do not grow"}),
    ],
)
def test_growth(rss: Sequence[float], threads: Sequence[int], found: set[str]) -> None:
    assert failed(looks(rss, threads)) == found


@pytest.mark.parametrize("moves", [False, True])
def test_what_nobody_reads_moves_as_long_as_batches_do(moves: bool) -> None:
    """On a slow board an answer takes longer than that, and one whose client does not read has no pieces."""
    system, now = FakeSystem(), [0.0]
    made = Soak(system, ASKS, seconds=1.0, rate=1.0, stuck_s=5.0)
    made._clock, made._begin = (lambda: now[0]), 0.0
    for number, (kind, status) in enumerate((("unread", "running"), ("whole", "queued"))):
        handle = FakeRequest([1], SamplingParams(), (1,))
        handle.status = status
        made._moving[number] = _Moving(handle, kind, 0.0, status)
    now[0] = 9.0
    made._batch(Sample(9.0, 0.1, 1, 1, 1, 0.0, 0, 0, int(moves), None, None, ""))
    made._find_stuck(Look(10.0, 0, 0, 0, 1, 1))
    assert bool(made.soaked.stuck) != moves
