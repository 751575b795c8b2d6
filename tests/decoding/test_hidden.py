"""Hidden states for drafts: exact at every proposal, whatever happened before; nobody else pays for them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from drafts.base import Choose, Proposal
from drafts.states import HiddenStates
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.session import Session
from edgespec.errors import ModelError
from edgespec.models.base import ForwardOutput
from predictor.planner import Candidate, Plan
from tests.decoding.test_rollback import _Trip
from tests.support.scripted import (
    PROMPT,
    ScheduledPlanner,
    ScriptedDraft,
    ToyDecoder,
    anti,
    failing,
    mixed,
    oracle,
    plain_greedy,
    run,
    session,
)

TEXT = PROMPT + plain_greedy(ToyDecoder(), PROMPT, 60)
NEXT = [*TEXT[:12], 20, 21, 22]
NEXT_TEXT = NEXT + plain_greedy(ToyDecoder(), NEXT, 40)


class Reader(ScriptedDraft):
    """Checks every hidden state it could read, then proposes what its script says."""

    reads_hidden = True

    def __init__(self, script: Any, name: str = "reader", window: int = 8) -> None:
        super().__init__(script, name)
        self.window = window
        self.states: HiddenStates | None = None
        self.held: list[tuple[int, int]] = []

    def open(self, states: HiddenStates | None = None) -> ScriptedDraft:
        assert states is not None
        self.states = states
        return super().open()

    def propose(self, tokens: Sequence[int], gamma: int, choose: Choose, *, floor: float = 0.0) -> Proposal:
        states, end = self.states, len(tokens) - 1
        assert states is not None
        right = ToyDecoder().hidden_states(tokens)[states.begin : end]
        assert np.array_equal(states.rows(states.begin, end), right)
        self.held.append((states.begin, end))
        return super().propose(tokens, gamma, choose)


def reader(text: Sequence[int] = TEXT, **kwargs: Any) -> Reader:
    return Reader(mixed(text, lambda at: at % 5 in (1, 2)).script, **kwargs)


def never_failed(chat: Session, name: str = "reader") -> bool:
    return not chat.statuses[name]._told


def watched(target: ToyDecoder) -> list[bool]:
    """Whether hidden states were asked for, forward by forward."""
    asked: list[bool] = []
    forward = target.forward

    def watching(*args: Any, hidden: bool = False, **kwargs: Any) -> ForwardOutput:
        asked.append(hidden)
        return forward(*args, hidden=hidden, **kwargs)

    target.forward = watching  # type: ignore[method-assign]
    return asked


def test_every_state_is_right_at_every_proposal_over_several_turns() -> None:
    draft = reader()
    chat = session(None, [draft], 3, chunk=4)
    assert list(run(chat, PROMPT, max_new_tokens=30).token_ids) == TEXT[4:34]
    first = len(draft.calls)
    assert first > 8
    draft.script = oracle(NEXT_TEXT).script
    assert list(run(chat, NEXT, max_new_tokens=40).token_ids) == NEXT_TEXT[len(NEXT) :]
    assert list(run(chat, NEXT[:5], max_new_tokens=9).token_ids) == plain_greedy(ToyDecoder(), NEXT[:5], 9)
    assert len(draft.calls) > first + 8
    assert never_failed(chat)
    # At the start of a turn the reused part still counts.
    assert draft.held[first] == (draft.held[first][0], len(NEXT))
    assert draft.held[first][0] <= len(NEXT) - draft.window


def test_other_drafts_and_plain_rounds_between_leave_no_gap() -> None:
    draft = reader()
    planner = ScheduledPlanner([("reader", 3), ("oracle", 4), (None, 0), ("anti", 5), (None, 0), (None, 0)])
    chat = session(None, [draft, oracle(TEXT), anti(TEXT)], planner=planner)
    assert list(run(chat, PROMPT, max_new_tokens=50).token_ids) == TEXT[4:54]
    assert never_failed(chat)
    assert all(end - begin >= min(end, draft.window) for begin, end in draft.held)


def test_a_prompt_longer_than_the_window_keeps_its_end() -> None:
    prompt = [2 + (7 * i) % 50 for i in range(90)]
    draft = reader([])
    chat = session(None, [draft], 2, chunk=16)
    run(chat, prompt, max_new_tokens=4)
    assert never_failed(chat)
    begin, end = draft.held[0]
    assert end == 90
    assert end - begin >= draft.window


def test_the_widest_window_of_all_drafts_is_kept() -> None:
    narrow, wide = reader(name="narrow", window=3), reader(name="wide", window=400)
    chat = session(None, [narrow, wide], 1)
    run(chat, PROMPT, max_new_tokens=2)
    assert chat._states is not None
    assert chat._states.window == 400


def test_nobody_pays_where_no_draft_reads() -> None:
    target = ToyDecoder()
    asked = watched(target)
    chat = session(target, [oracle(TEXT)], 3)
    run(chat, PROMPT, max_new_tokens=20)
    assert asked
    assert not any(asked)
    assert chat._states is None


def test_a_draft_that_was_given_up_reads_no_more() -> None:
    target = ToyDecoder()
    asked = watched(target)
    draft = failing(OSError("gone"), "broken")
    draft.reads_hidden = True  # type: ignore[attr-defined]
    draft.open = lambda states=None: draft  # type: ignore[method-assign]
    chat = session(target, [draft], 3)
    assert list(run(chat, PROMPT, max_new_tokens=10).token_ids) == TEXT[4:14]
    assert asked[0]
    assert not any(asked[2:])


def test_a_target_without_hidden_states_is_named() -> None:
    target = ToyDecoder()
    forward = target.forward
    target.forward = lambda *args, **kwargs: replace(forward(*args, **kwargs), hidden=None)  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="no hidden states"):
        run(session(target, [reader()], 3), PROMPT, max_new_tokens=10)


def test_a_cancelled_prefill_and_a_closed_session() -> None:
    draft = reader()
    chat = session(None, [draft], 3, chunk=4)
    generation = Generation(chat, TEXT[:30], SamplingParams(max_new_tokens=5))
    chat.target.after = generation.cancel  # type: ignore[attr-defined]
    assert not generation.step()
    assert chat._states is not None
    assert chat._states.end == chat.valid == 4
    assert list(run(chat, TEXT[:32], max_new_tokens=5).token_ids) == TEXT[32:37]
    chat.close()
    assert chat._states is None
    assert list(run(chat, PROMPT, max_new_tokens=20).token_ids) == TEXT[4:24]
    assert len(draft.calls) > 5
    assert never_failed(chat)


@pytest.mark.skipif(sys.gettrace() is not None, reason="needs the trace hook for itself")
@pytest.mark.parametrize("part", range(4))
def test_ctrl_c_at_any_line_leaves_the_states_right(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _Trip, "FILES", ("decoding/session.py", "decoding/round.py", "decoding/drafting.py", "drafts/states.py")
    )

    def turn(at: int) -> int:
        draft = reader(window=2)
        chat = session(None, [draft], 3, chunk=4)
        run(chat, TEXT[:9], max_new_tokens=6)
        with _Trip(at) as trip:
            try:
                for _ in Generation(chat, TEXT[:7], SamplingParams(max_new_tokens=12)).deltas():
                    pass
            except KeyboardInterrupt:
                pass
        draft.script = oracle(NEXT_TEXT).script
        before = len(draft.calls)
        assert list(run(chat, NEXT, max_new_tokens=12).token_ids) == NEXT_TEXT[len(NEXT) : len(NEXT) + 12]
        assert len(draft.calls) > before
        assert never_failed(chat)
        return trip.count

    total = turn(-1)
    assert total > 400
    for at in range(1 + part, total, 4 * 2):
        turn(at)


@pytest.mark.parametrize("fault", ["not cropped", "one position off"])
def test_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write = HiddenStates.write
    if fault == "not cropped":
        monkeypatch.setattr(HiddenStates, "crop", lambda self, length: None)
        monkeypatch.setattr(HiddenStates, "write", lambda self, start, rows: write(self, self.end, rows))
    else:
        monkeypatch.setattr(HiddenStates, "write", lambda self, start, rows: write(self, start + 1, rows))
    draft = reader()
    chat = session(None, [draft], 3)
    run(chat, PROMPT, max_new_tokens=30)
    assert not never_failed(chat)


def test_the_floor_of_a_plan_reaches_the_draft_and_a_stop_is_no_failure() -> None:
    floors: list[float] = []

    class Doubtful(ScriptedDraft):
        def propose(self, tokens: Sequence[int], gamma: int, choose: Choose, *, floor: float = 0.0) -> Proposal:
            floors.append(floor)
            return Proposal() if floor > 0.5 else super().propose(tokens, gamma, choose)

    planner = ScheduledPlanner([])
    plans = iter([Plan("doubtful", 3, 0.25), Plan("doubtful", 3, 0.75), Plan("doubtful", 2)] * 9)
    planner.plan = lambda candidates, limit: next(plans)  # type: ignore[method-assign]
    chat = session(None, [Doubtful(oracle(TEXT).script, "doubtful")], planner=planner)
    assert list(run(chat, PROMPT, max_new_tokens=20).token_ids) == TEXT[4:24]
    assert floors[:6] == [0.25, 0.75, 0.0] * 2
    assert [(o.asked, o.drafted) for o in planner.seen[:3]] == [(3, 3), (3, 0), (2, 2)]
    assert chat.statuses["doubtful"].active


def test_a_shadow_says_what_it_took_and_how_much_it_had_to_read() -> None:
    credits: list[tuple[str, int, int, dict[str, Any]]] = []

    class Watching(ScheduledPlanner):
        def credit(self, candidate: Candidate, proposed: int, accepted: int, **measured: Any) -> None:
            credits.append((candidate.name, proposed, accepted, measured))

    planner = Watching([(None, 0)])
    planner.shadowed = ("reader",)
    draft = Reader(oracle(TEXT).script)
    chat = session(None, [draft], planner=planner)
    run(chat, PROMPT, max_new_tokens=10)
    assert {name for name, *_ in credits} == {"reader"}
    assert all(proposed == accepted == 1 for _, proposed, accepted, _ in credits)
    assert [measured["caught_up"] for *_, measured in credits[:3]] == [5, 1, 1]
    assert all(measured["seconds"] > 0 and measured["drafted"] == 4 for *_, measured in credits[:3])
