"""A draft that reads in small pieces has read the whole prompt before the first round, and cancelling stays prompt."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from drafts import standalone
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.session import Session
from predictor.planner import FixedPlanner
from tests.support.scripted import TOKENS, ToyDecoder, plain_greedy, self_draft, session

PROMPT = [2 + at * 7 % (TOKENS - 2) for at in range(120)]
PARAMS = SamplingParams(max_new_tokens=30, ignore_eos=True)


class Wanting:
    """Wants one draft most, and hears what is read up; `act` is called then."""

    def __init__(self, draft: str) -> None:
        self.draft = draft
        self.read: list[int] = []

    def begin(self, prompt: Sequence[int]) -> None: ...

    def chunk(self) -> None: ...

    def first(self, tokens: Sequence[int], session: Session) -> None: ...

    def round(self, *_: object) -> None: ...

    def saw(self, draft: str, right: bool) -> None: ...

    def read_up(self, draft: str, tokens: int, seconds: float) -> None:
        self.read.append(tokens)

    def preferred(self) -> str:
        return self.draft

    def reads(self) -> str:
        return self.draft

    def pays_to_read(self, *_: object) -> None: ...

    def informed(self) -> bool:
        return False


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setattr(standalone, "CHUNK", 16)
    target = ToyDecoder()
    return session(target, [self_draft(target, "self")], planner=FixedPlanner("self", 3))


def test_it_reads_all_of_it_before_the_first_round(chat: Session) -> None:
    steering = Wanting("self")
    generation = Generation(chat, PROMPT, PARAMS, steering=steering)
    for _ in generation.deltas():
        pass
    assert list(generation.result.token_ids) == plain_greedy(ToyDecoder(), PROMPT, 30)
    assert steering.read == [len(PROMPT)]
    assert generation.stats.draft_share.get("plain", 0) <= 1  # the last token of all needs no draft
    assert generation.stats.fallback_share == 0.0


def test_it_stops_reading_when_the_answer_is_cancelled(chat: Session) -> None:
    steering = Wanting("self")
    generation = Generation(chat, PROMPT, PARAMS, steering=steering)
    generation.step()
    lagging = chat.draft("self")
    catch_up = lagging.catch_up  # type: ignore[attr-defined]

    def cancelled(tokens: Sequence[int], limit: int) -> int:
        generation.cancel()
        return int(catch_up(tokens, limit))

    lagging.catch_up = cancelled  # type: ignore[attr-defined]
    generation.step()
    assert steering.read == [16]


def test_a_round_in_which_the_draft_that_is_wanted_most_still_reads_is_a_fallback(chat: Session) -> None:
    """Here it begins to lag in the middle of the answer, and reads in pieces from then on."""
    steering = Wanting("self")
    generation = Generation(chat, PROMPT, PARAMS, steering=steering)
    generation.step()
    generation.step()
    chat.draft("self").crop(0)
    generation.step()
    generation.close()
    assert steering.read[1:] == [64]
    assert generation.stats.fallback_share == 0.5
