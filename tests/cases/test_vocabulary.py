"""Padding rows, added tokens, ids that are no tokens, between target and draft (faults.md, Tokenizer and vocabulary).

The comparison of two vocabularies itself (B012, B064, B065, B071) is tested in tests/models/test_tokenizer.py.
B070: drafts with another tokenizer are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafts import NgramDraft, StandaloneDraft
from edgespec.errors import DraftError
from edgespec.models.tokenizer import load_tokenizer
from tests.support.scripted import (
    ScheduledPlanner,
    ScriptedDraft,
    ToyDecoder,
    ToyTokenizer,
    anti,
    plain_greedy,
    run,
    self_draft,
    session,
)
from tests.support.tiny import write_tiny

REAL = 50
PROMPT = [5, 6, 7, 8]


def padded(rows: int, seed: int = 0) -> ToyDecoder:
    """A decoder whose rows beyond the tokens win every argmax and hold nearly all mass."""
    decoder = ToyDecoder(rows, seed=seed)
    row = decoder._row

    def loud(entries: list[np.ndarray]) -> np.ndarray:
        out = row(entries)
        out[REAL:] += 50.0
        return out

    decoder._row = loud  # type: ignore[method-assign]
    return decoder


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(64, 56), (56, 64), (64, 50), (50, 64), (51, 51)])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0, "top_k": 5, "seed": 4}])
def test_b013_b062_padding_rows_are_masked_everywhere(
    target_rows: int, draft_rows: int, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = padded(target_rows), padded(draft_rows)
    chosen: list[int] = []
    propose = type(StandaloneDraft("x", draft, REAL).open()).propose

    def watched(self: Any, tokens: Any, gamma: int, choose: Any, *, floor: float = 0.0) -> Any:
        proposal = propose(self, tokens, gamma, choose)
        chosen.extend(proposal.tokens)
        assert all(row is None or (len(row) == target_rows and not row[REAL:].any()) for row in proposal.rows)
        return proposal

    monkeypatch.setattr("drafts.standalone.StandaloneSession.propose", watched)
    chat = session(target, [StandaloneDraft("draft", draft, REAL)], 4, tokenizer=ToyTokenizer(REAL))
    result = run(chat, PROMPT, max_new_tokens=60, logprobs=0, **params)
    assert max(result.token_ids) < REAL
    assert chosen
    assert max(chosen) < REAL
    assert all(token < REAL for call in target.calls + draft.calls for token in call)
    if not params:
        assert list(result.token_ids) == plain_greedy(padded(target_rows), PROMPT, 60, tokens=REAL)
        assert result.stats.acceptance_rate > 0.9
    assert str(chat.statuses["draft"]) == "active"


# B014
@pytest.mark.parametrize(
    "guess", [[], [-1], [3, -1, -1, -1], [-1, 3], [10**6], [3, 4, REAL], [REAL - 1, REAL + 1], [3] * 30]
)
def test_no_id_that_is_no_token_reaches_a_model_or_the_output(guess: list[int]) -> None:
    target = ToyDecoder(64)
    chat = session(target, [ScriptedDraft(lambda t, gamma: guess)], 4, tokenizer=ToyTokenizer(REAL))
    result = run(chat, PROMPT, max_new_tokens=40)
    assert list(result.token_ids) == plain_greedy(ToyDecoder(64), PROMPT, 40, tokens=REAL)
    assert all(0 <= token < REAL for call in target.calls for token in call)
    assert all(len(call) <= 5 for call in target.calls)


def test_twenty_rounds_of_nothing_right() -> None:
    plain = plain_greedy(ToyDecoder(), PROMPT, 40)
    result = run(session(None, [anti(PROMPT + plain)], 5), PROMPT, max_new_tokens=40)
    assert list(result.token_ids) == plain
    assert result.stats.accepted_tokens == 0
    assert result.stats.rounds == 39


# B068
def test_a_prompt_with_a_token_the_draft_has_no_row_for_is_answered_without_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = ToyDecoder()
    small = StandaloneDraft("small", ToyDecoder(40), 60)
    chat = session(target, [small, NgramDraft()], 3)
    prompt = [5, 45, 6, 7]
    result = run(chat, prompt, max_new_tokens=30)
    assert list(result.token_ids) == plain_greedy(ToyDecoder(), prompt, 30)
    assert result.stats.draft_share["small"] == 0
    assert small.decoder.calls == []  # type: ignore[attr-defined]
    assert str(chat.statuses["small"]) == "active"
    assert caplog.records == []
    # The next conversation has no such token: the draft is back.
    assert run(chat, [5, 6, 7], max_new_tokens=5).stats.draft_share["small"] > 0


# B074, B062
def test_added_tokens_of_the_draft_are_never_proposed() -> None:
    target = ToyDecoder(REAL)
    chatty = padded(REAL + 3)
    chat = session(target, [StandaloneDraft("chatty", chatty, REAL)], 4, tokenizer=ToyTokenizer(REAL))
    result = run(chat, PROMPT, max_new_tokens=40)
    assert list(result.token_ids) == plain_greedy(ToyDecoder(REAL), PROMPT, 40)
    assert result.stats.acceptance_rate > 0.9


# B049
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 1}])
def test_a_banned_token_that_the_draft_always_proposes_and_a_forced_one(params: dict[str, Any]) -> None:
    always = ScriptedDraft(lambda t, gamma: [9] * gamma)
    banned = run(session(None, [always], 4), PROMPT, max_new_tokens=40, logit_bias={9: -100}, **params)
    assert 9 not in banned.token_ids
    assert banned.stats.accepted_tokens == 0
    forced = run(session(None, [always], 4), PROMPT, max_new_tokens=40, logit_bias={9: 100}, **params)
    assert set(forced.token_ids) == {9}
    twin = run(session(None, [self_draft(ToyDecoder())], 4), PROMPT, max_new_tokens=40, logit_bias={9: 100}, **params)
    assert twin.stats.acceptance_rate == 1.0


# B012
def test_a_draft_with_another_vocabulary_is_refused_by_name_and_the_rest_goes_on(tmp_path: Path) -> None:
    target_tokenizer = load_tokenizer(write_tiny(tmp_path / "target"))
    swapped = write_tiny(tmp_path / "draft")
    file = swapped / "tokenizer.json"
    text = file.read_text()
    file.write_text(text.replace('"w270":', '"zz":'))
    assert file.read_text() != text
    decoder = ToyDecoder(288)
    with pytest.raises(DraftError, match="270"):
        StandaloneDraft.for_target("swapped", decoder, load_tokenizer(swapped), target_tokenizer)
    good = StandaloneDraft.for_target("good", ToyDecoder(288), target_tokenizer, target_tokenizer)
    assert good.rows == target_tokenizer.size == 280
    chat = session(decoder, [good], 3, tokenizer=target_tokenizer, eos_ids=())
    result = run(chat, PROMPT, max_new_tokens=20)
    assert list(result.token_ids) == plain_greedy(ToyDecoder(288), PROMPT, 20, tokens=280)
    assert result.stats.acceptance_rate == 1.0


# B073
def test_the_target_sees_the_same_prompt_in_both_paths() -> None:
    for prompt in ([0, 5, 1, 6], [0, 0, 5], [1]):
        fed = []
        for gamma in (0, 4):
            target = ToyDecoder()
            planner = ScheduledPlanner([("self", gamma)])
            run(session(target, [self_draft(target)], planner=planner), prompt, max_new_tokens=5)
            fed.append(target.calls[0])
        assert fed == [prompt, prompt]


def test_masking_is_what_these_tests_see(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the mask the padding rows win at once."""
    chat = session(padded(64), [], 0, tokenizer=ToyTokenizer(REAL + 14))
    assert min(run(chat, PROMPT, max_new_tokens=5).token_ids) >= REAL
