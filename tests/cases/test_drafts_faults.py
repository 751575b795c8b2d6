"""A draft can only cost speed (invariant 4; faults.md, Memory B018, Sampling B050 and B052)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from drafts import NgramDraft
from drafts.base import InvalidLogits, Proposal
from edgespec.decoding.session import DraftStatus
from edgespec.errors import DraftError, EdgespecError, ModelError
from tests.support.scripted import (
    PROMPT,
    ScheduledPlanner,
    ScriptedDraft,
    ToyDecoder,
    failing,
    oracle,
    plain_greedy,
    run,
    self_draft,
    session,
)

G = plain_greedy(ToyDecoder(), PROMPT, 60)
WHOLE = PROMPT + G
CUDA_OOM = type("OutOfMemoryError", (RuntimeError,), {})


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# B018
@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (RuntimeError("shape mismatch"), 3),
        (ValueError("bad ids"), 3),
        (InvalidLogits("NaN logits"), 3),
        (AssertionError(), 3),
        (OSError("disk gone"), 1),
        (MemoryError("no room"), 1),
        (CUDA_OOM("CUDA out of memory"), 1),
        (DraftError("truncated"), 1),
        (ModelError("the cache is full"), 1),
    ],
)
def test_a_failing_draft_is_named_once_given_up_and_counted_as_nothing(
    error: Exception, asked: int, caplog: pytest.LogCaptureFixture
) -> None:
    draft = failing(error, "broken")
    chat = session(None, [draft], 4)
    result = run(chat, PROMPT, max_new_tokens=40)
    assert list(result.token_ids) == G[:40]
    assert len(draft.calls) == asked
    (message,) = warnings(caplog)
    assert "broken" in message
    said = str(error) if isinstance(error, EdgespecError) else type(error).__name__
    assert said in message
    assert str(error) in message
    assert str(chat.statuses["broken"]).startswith(f"failed: {said}")
    assert result.stats.draft_share == {"broken": 0, "plain": 39}
    assert (result.stats.proposed_tokens, result.stats.accepted_tokens, result.stats.acceptance_rate) == (0, 0, 0.0)
    assert result.stats.fallback_share == 0
    again = run(chat, PROMPT, max_new_tokens=40)
    assert list(again.token_ids) == G[:40]
    assert len(draft.calls) == asked
    assert again.stats.draft_share["broken"] == 0
    assert len(warnings(caplog)) == 1


class Fragile(ScriptedDraft):
    """Right, until the named method breaks at its n-th call."""

    def __init__(self, method: str, at: int) -> None:
        super().__init__(lambda t, gamma: WHOLE[len(t) : len(t) + gamma], "fragile")
        self._count = 0
        real: Callable[..., Any] = getattr(self, method)

        def wrapped(*args: Any) -> Any:
            self._count += 1
            if self._count >= at:
                raise RuntimeError(f"{method} broke")
            return real(*args)

        setattr(self, method, wrapped)


@pytest.mark.parametrize("method", ["open", "level", "propose", "crop", "close"])
@pytest.mark.parametrize("at", [1, 2, 5])
def test_any_method_may_break_at_any_time(method: str, at: int) -> None:
    chat = session(None, [Fragile(method, at), NgramDraft()], 3)
    prompt = list(PROMPT)
    for _ in range(4):
        result = run(chat, prompt, max_new_tokens=12)
        assert list(result.token_ids) == plain_greedy(ToyDecoder(), prompt, 12)
        prompt = [*prompt, *result.token_ids[:5], 30]
    chat.close()


def test_after_a_failure_the_drafts_memory_is_made_anew() -> None:
    def script(tokens: Any, gamma: int) -> list[int]:
        if len(tokens) == 9:
            raise RuntimeError("once")
        return WHOLE[len(tokens) : len(tokens) + gamma]

    draft = ScriptedDraft(script)
    chat = session(None, [draft], 1)
    result = run(chat, PROMPT, max_new_tokens=40)
    assert list(result.token_ids) == G[:40]
    assert draft.opened == 2
    assert str(chat.statuses["scripted"]) == "active"
    assert result.stats.acceptance_rate == 1.0


def test_one_failure_in_four_is_lived_with_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    count = [0]

    def script(tokens: Any, gamma: int) -> list[int]:
        count[0] += 1
        if count[0] % 4 == 0:
            raise RuntimeError("hiccup")
        return WHOLE[len(tokens) : len(tokens) + gamma]

    chat = session(None, [ScriptedDraft(script, "hiccups")], 1)
    result = run(chat, PROMPT, max_new_tokens=60)
    assert list(result.token_ids) == G
    assert chat.statuses["hiccups"].active
    assert count[0] > 25
    assert len(warnings(caplog)) == 1


def test_the_others_go_on_and_every_session_knows(caplog: pytest.LogCaptureFixture) -> None:
    broken, good = DraftStatus(failing(DraftError("gone"), "broken")), DraftStatus(oracle(WHOLE))
    first = session(None, [broken, good], 3)
    second = session(None, [broken, good], 3)
    result = run(first, PROMPT, max_new_tokens=41)
    assert list(result.token_ids) == G[:41]
    assert result.stats.draft_share == {"broken": 0, "oracle": 10, "plain": 1}
    assert run(second, PROMPT, max_new_tokens=41).stats.draft_share == {"broken": 0, "oracle": 10}
    assert len(broken.draft.calls) == 1  # type: ignore[attr-defined]
    assert len(warnings(caplog)) == 1


# B052
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 2}])
@pytest.mark.parametrize("from_call", [0, 3])
def test_rows_that_cannot_be_sampled_from(
    value: float, params: dict[str, Any], from_call: int, caplog: pytest.LogCaptureFixture
) -> None:
    sick = ToyDecoder()
    row = sick._row

    def spoiled(entries: list[np.ndarray]) -> np.ndarray:
        out = row(entries)
        if len(sick.calls) > from_call:
            if value == -np.inf:
                out[:] = value
            else:
                out[17] = value
        return out

    sick._row = spoiled  # type: ignore[method-assign]
    draft = self_draft(ToyDecoder())
    draft.decoder = sick
    chat = session(None, [draft], 2)
    result = run(chat, PROMPT, max_new_tokens=30, **params)
    if not params:
        assert list(result.token_ids) == G[:30]
    assert "InvalidLogits" in str(chat.statuses["self"])
    assert len(warnings(caplog)) == 1
    assert len(sick.calls) <= from_call + 2 * 3


def test_a_row_that_is_no_distribution_never_judges(caplog: pytest.LogCaptureFixture) -> None:
    class Liar(ScriptedDraft):
        def propose(self, tokens: Any, gamma: int, choose: Any, *, floor: float = 0.0) -> Proposal:
            row = np.full(60, 0.5, np.float32)
            return Proposal([9] * gamma, [row] * gamma)

    chat = session(None, [Liar(lambda t, gamma: [], "liar")], 2)
    result = run(chat, PROMPT, max_new_tokens=20, temperature=1.0, seed=3)
    plain = run(session(None, [], 0), PROMPT, max_new_tokens=20, temperature=1.0, seed=3)
    assert result.token_ids == plain.token_ids
    assert not chat.statuses["liar"].active
    assert len(warnings(caplog)) == 1


def test_only_the_targets_own_failure_is_fatal_and_no_draft_is_blamed() -> None:
    target = ToyDecoder()
    chat = session(target, [oracle(WHOLE)], 3)

    def trip() -> None:
        if len(target.calls) == 3:
            raise ModelError("device lost")

    target.before = trip
    with pytest.raises(ModelError, match="device lost"):
        run(chat, PROMPT, max_new_tokens=40)
    assert chat.statuses["oracle"].active
    target.before = lambda: None
    assert list(run(chat, PROMPT, max_new_tokens=40).token_ids) == G[:40]


def test_a_given_up_draft_is_not_even_a_candidate() -> None:
    planner = ScheduledPlanner([("broken", 2)])
    chat = session(None, [failing(OSError("gone"), "broken"), oracle(WHOLE)], planner=planner)
    run(chat, PROMPT, max_new_tokens=20)
    named = [[c.name for c in candidates] for candidates, _ in planner.asked]
    assert named[0] == ["broken", "oracle"]
    assert all(names == ["oracle"] for names in named[1:])
