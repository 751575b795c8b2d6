"""Interruption at every point, and planted rollback faults that these tests must see (invariant 6)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from drafts import NgramDraft
from edgespec.decoding import round as round_module
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.session import Session
from edgespec.decoding.stopping import Answer
from tests.support.scripted import (
    ScheduledPlanner,
    ToyCache,
    ToyDecoder,
    ToyTokenizer,
    oracle,
    plain_greedy,
    run,
    self_draft,
    session,
)

PROMPT = [5, 6, 7, 8, 9]
BEFORE = [5, 6, 7, 20, 21, 22]  # a turn before, which shares its beginning
FIRST = PROMPT + plain_greedy(ToyDecoder(), PROMPT, 12)
TURN = SamplingParams(max_new_tokens=12, logprobs=0, stop=[ToyTokenizer().decode(FIRST[-5:-2])])
SECOND = [*FIRST[:12], 20, 21, 22]  # the next turn keeps some of the answer
WHOLE = SECOND + plain_greedy(ToyDecoder(), SECOND, 20)


def chat(target: ToyDecoder) -> Session:
    """Rounds by the twin of the target, lookup, and nobody."""
    planner = ScheduledPlanner([("self", 3), ("ngram", 2), (None, 0), ("self", 2)])
    return session(target, [self_draft(target), NgramDraft(max_ngram=2, min_ngram=1)], planner=planner, chunk=4)


def check_invariant(target: ToyDecoder, session: Session) -> None:
    assert session.valid <= len(session.tokens)
    if session._cache is not None:
        assert target.holds(session._cache, session.tokens[: session.valid])  # type: ignore[arg-type]


def check_next_turn(target: ToyDecoder, session: Session) -> None:
    """The turn after the trouble equals a cold session's, and the twin still sees exactly what the target sees."""
    target.before = target.after = lambda: None
    check_invariant(target, session)
    session.planner = ScheduledPlanner([("self", 3)])
    result = run(session, SECOND, max_new_tokens=20)
    assert list(result.token_ids) == WHOLE[len(SECOND) :]
    assert result.stats.acceptance_rate == 1.0
    assert session.tokens == WHOLE
    check_invariant(target, session)


def interrupted(session: Session, error: type[BaseException]) -> Generation:
    """Turn 1 until the trouble; what was delivered by then must be a beginning of the right answer."""
    generation = Generation(session, PROMPT, SamplingParams(max_new_tokens=12))
    delivered: list[int] = []
    with pytest.raises(error):
        delivered.extend(token for delta in generation.deltas() for token in delta.token_ids)
    assert delivered == FIRST[len(PROMPT) :][: len(delivered)]
    result = generation.result
    assert list(result.token_ids) == FIRST[len(PROMPT) :][: len(result.token_ids)]
    return generation


# At every line


class _Trip:
    """Raises KeyboardInterrupt at the n-th executed line of the decoding loop or the drafts, as a signal would."""

    FILES = (
        "decoding/session.py",
        "decoding/round.py",
        "decoding/drafting.py",
        "decoding/stopping.py",
        "drafts/ngram.py",
        "drafts/standalone.py",
    )

    def __init__(self, at: int) -> None:
        self._left = at
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.endswith(self.FILES):
            return None
        if event == "line":
            self.count += 1
            self._left -= 1
            if self._left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> _Trip:
        sys.settrace(self)
        return self

    def __exit__(self, *details: object) -> None:
        sys.settrace(None)


def _lines() -> int:
    session = chat(ToyDecoder())
    run(session, BEFORE, max_new_tokens=8)
    generation = Generation(session, PROMPT, TURN)
    with _Trip(-1) as trip:
        exhaust(generation)
    return trip.count


def exhaust(generation: Generation) -> None:
    for _ in generation.deltas():
        pass


def check_consistent(generation: Generation) -> None:
    """Also an answer that was cut off in the middle of a push ends everywhere at the same token."""
    result, session = generation.result, generation.session
    assert list(result.token_ids) == FIRST[len(PROMPT) :][: len(result.token_ids)]
    assert result.text == session.tokenizer.decode(result.token_ids)
    assert result.logprobs is not None
    assert len(result.token_ids) == len(result.drafts) == len(result.logprobs)
    assert (FIRST[: len(session.tokens)] == session.tokens) or (
        not result.token_ids and BEFORE[:4] == session.tokens[:4]
    )
    if result.token_ids:
        assert session.tokens[len(PROMPT) :] == list(result.token_ids)[: len(session.tokens) - len(PROMPT)]


@pytest.mark.skipif(sys.gettrace() is not None, reason="needs the trace hook for itself")
@pytest.mark.parametrize("part", range(7))
def test_ctrl_c_at_any_line_of_a_turn_leaves_the_next_turn_right(part: int) -> None:
    total = _lines()
    assert total > 500
    for at in range(1 + part, total, 7 * 3):
        target = ToyDecoder()
        session = chat(target)
        run(session, BEFORE, max_new_tokens=8)
        generation = Generation(session, PROMPT, TURN)
        with pytest.raises(KeyboardInterrupt), _Trip(at):
            exhaust(generation)
        check_consistent(generation)
        check_next_turn(target, session)


def _fails_at(call: int, error: BaseException, real: Callable[..., Any], *, late: bool) -> Callable[..., Any]:
    count = iter(range(1, 10**6))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        failing = next(count) == call
        if failing and not late:
            raise error
        value = real(*args, **kwargs)
        if failing:
            raise error
        return value

    return wrapped


SITES = {
    "accept": (round_module, "accept"),
    "push": (Answer, "push"),
    "verify": (Session, "verify"),
    "start": (Session, "start"),
    "prefill": (Session, "prefill"),
    "commit": (Generation, "_commit"),
    "plan": (ScheduledPlanner, "plan"),
    "observe": (ScheduledPlanner, "observe"),
    "crop": (ToyCache, "crop"),
}


ONCE = ("start", "prefill")
CHEAP = ("plan", "observe")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("site", "call"), [(s, c) for s in SITES for c in range(1, 2 if s in ONCE else 5)])
def test_an_error_anywhere_is_passed_on_and_the_next_turn_is_right(
    site: str, call: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = SITES[site]
    target = ToyDecoder()
    chat_session = chat(target)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, _fails_at(call, ZeroDivisionError("planted"), getattr(owner, name), late=late))
        if site in CHEAP or (site == "crop" and call > 1):
            # A planner can only cost speed; the twin's cache may be the one that fails, and then nobody notices.
            run_or_raise(chat_session)
        else:
            interrupted(chat_session, ZeroDivisionError)
    check_next_turn(target, chat_session)


def run_or_raise(session: Session) -> None:
    try:
        exhaust(Generation(session, PROMPT, SamplingParams(max_new_tokens=12)))
    except ZeroDivisionError:
        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("call", range(1, 8))
def test_a_forward_that_fails_or_is_interrupted(error: type[BaseException], where: str, call: int) -> None:
    target = ToyDecoder()
    chat_session = chat(target)
    setattr(target, where, _fails_at(call, error(), lambda: None, late=False))
    generation = interrupted(chat_session, error)
    assert generation.result.finish_reason == "cancelled"
    check_next_turn(target, chat_session)


@pytest.mark.parametrize("call", range(1, 6))
def test_ctrl_c_inside_a_draft_is_no_failure_of_the_draft(call: int) -> None:
    target = ToyDecoder()
    chat_session = chat(target)
    twin = chat_session.statuses["self"].draft.decoder  # type: ignore[attr-defined]
    twin.after = _fails_at(call, KeyboardInterrupt(), lambda: None, late=False)
    interrupted(chat_session, KeyboardInterrupt)
    assert str(chat_session.statuses["self"]) == "active"
    twin.after = lambda: None
    check_next_turn(target, chat_session)


@pytest.mark.parametrize("stop_after", range(8))
def test_a_consumer_that_fails_or_leaves_between_pieces(stop_after: int) -> None:
    target = ToyDecoder()
    chat_session = chat(target)
    generation = Generation(chat_session, PROMPT, SamplingParams(max_new_tokens=12))
    with pytest.raises(ZeroDivisionError):
        _consume(generation.deltas(), stop_after)
    generation.close()
    assert chat_session.tokens[len(PROMPT) :] == list(generation.result.token_ids)
    check_next_turn(target, chat_session)


def _consume(deltas: Iterator[Any], stop_after: int) -> None:
    for number, _ in enumerate(deltas):
        if number == stop_after:
            break
    raise ZeroDivisionError


def test_ctrl_c_right_after_the_history_was_cut() -> None:
    class Tripping(list):  # type: ignore[type-arg]
        def __delitem__(self, place: Any) -> None:
            super().__delitem__(place)
            raise KeyboardInterrupt

    target = ToyDecoder()
    chat_session = chat(target)
    run(chat_session, BEFORE, max_new_tokens=8)
    chat_session.tokens = Tripping(chat_session.tokens)
    with pytest.raises(KeyboardInterrupt):
        chat_session.truncate(2)
    check_invariant(target, chat_session)
    chat_session.tokens = list(chat_session.tokens)
    check_next_turn(target, chat_session)


def test_three_troubles_in_a_row() -> None:
    target = ToyDecoder()
    chat_session = chat(target)
    for call in (2, 4, 3):
        target.after = _fails_at(call, KeyboardInterrupt(), lambda: None, late=False)
        interrupted(chat_session, KeyboardInterrupt)
        check_invariant(target, chat_session)
    check_next_turn(target, chat_session)


# The checks above must be able to fail


def _plant(fault: str, patch: pytest.MonkeyPatch) -> None:
    commit, forward = Generation._commit, ToyDecoder.forward

    def commits(shift: Callable[[Session, list[int], int], int]) -> Any:
        def planted(self: Generation, logits: Any, guesses: list[int], outcome: Any, draft: Any) -> list[int]:
            emitted = commit(self, logits, guesses, outcome, draft)
            self.session.valid = shift(self.session, guesses, len(emitted))
            return emitted

        return planted

    if fault == "one position too many":
        patch.setattr(Generation, "_commit", commits(lambda s, guesses, n: len(s.tokens)))
    elif fault == "as many as were proposed":
        patch.setattr(Generation, "_commit", commits(lambda s, guesses, n: len(s.tokens) - n + len(guesses)))
    elif fault == "the cache's own length is believed":
        patch.setattr(Session, "_cropped_cache", _believing)
    elif fault == "no crop between turns":
        patch.setattr(Session, "start", _keeping)
    elif fault == "raised before the work":
        patch.setattr(ToyDecoder, "forward", forward)
        patch.setattr(Session, "prefill", _early)


def _believing(self: Session) -> Any:
    if self._cache is None:
        self._cache = self.target.new_cache(self.context)
    self.valid = min(self._cache.length, len(self.tokens) - 1)
    self._cache.crop(self.valid)
    return self._cache


def _keeping(self: Session, prompt: list[int]) -> int:
    same = min(self.valid, len(prompt) - 1)
    self.truncate(same)
    self.tokens[:] = prompt
    return same


def _early(self: Session, cancelled: Any) -> Any:
    cache, begin = self._cropped_cache(), self.valid
    self.valid = len(self.tokens)
    return self.target.forward(self.tokens[begin:], cache, logits=1).logits


@pytest.mark.parametrize(
    "fault",
    [
        "one position too many",
        "as many as were proposed",
        "the cache's own length is believed",
        "no crop between turns",
        "raised before the work",
    ],
)
def test_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(fault, monkeypatch)
    with pytest.raises((AssertionError, ValueError)):
        _all_checks()


def _all_checks() -> None:
    target = ToyDecoder()
    wrong = oracle([(token + 1) % 60 for token in WHOLE], "wrong")
    chat_session = session(target, [self_draft(target), wrong], planner=ScheduledPlanner([("wrong", 3), ("self", 2)]))
    exhaust(Generation(chat_session, PROMPT, SamplingParams(max_new_tokens=12)))
    check_next_turn(target, chat_session)
    for where in ("before", "after"):
        for call in range(1, 6):
            target = ToyDecoder()
            chat_session = chat(target)
            setattr(target, where, _fails_at(call, KeyboardInterrupt(), lambda: None, late=False))
            interrupted(chat_session, KeyboardInterrupt)
            check_next_turn(target, chat_session)


def test_without_a_fault_the_same_checks_pass() -> None:
    _all_checks()
