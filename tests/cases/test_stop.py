"""Where an answer ends, with blocks of several tokens: stop strings, end tokens, limits (faults.md, Stop)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.session import Session
from edgespec.decoding.stopping import Answer
from edgespec.errors import PromptError
from edgespec.results import GenerationResult
from tests.support.scripted import (
    DRAFTERS,
    PROMPT,
    TOKENS,
    ScheduledPlanner,
    ScriptedDraft,
    ToyDecoder,
    ToyTokenizer,
    anti,
    drafter,
    empty,
    oracle,
    plain_greedy,
    run,
    self_draft,
    session,
)

COUNT = 24
G = plain_greedy(ToyDecoder(), PROMPT, COUNT + 40)
WHOLE = PROMPT + G
TOY = ToyTokenizer()


def same_everywhere(chat: Session, result: GenerationResult, target: ToyDecoder) -> None:
    """B017: text, ids, logprobs, counters, history and KV end at the same boundary."""
    ids = list(result.token_ids)
    assert result.logprobs is not None
    assert [entry.token_id for entry in result.logprobs] == ids
    assert len(result.drafts) == len(ids) == result.stats.new_tokens
    assert result.stats.accepted_tokens == sum(d is not None for d in result.drafts) <= len(ids)
    assert result.stats.accepted_tokens <= result.stats.proposed_tokens
    assert chat.tokens == PROMPT + ids
    assert chat.valid <= len(chat.tokens)
    assert target.holds(chat._cache, chat.tokens[: chat.valid])  # type: ignore[arg-type]
    assert chat._cache is not None


def both(draft: Any, gamma: int, **params: Any) -> GenerationResult:
    """The answer with a draft, after checking that it equals the plain one, also in the turn that follows."""
    target = ToyDecoder()
    plain_chat, chat = session(target, [], 0), session(target, [draft], gamma)
    plain = run(plain_chat, PROMPT, logprobs=1, **params)
    drafted = run(chat, PROMPT, logprobs=1, **params)
    for field in ("text", "token_ids", "logprobs", "finish_reason"):
        assert getattr(drafted, field) == getattr(plain, field), field
    same_everywhere(chat, drafted, target)
    follow = [*PROMPT, *drafted.token_ids, 30, 31]
    assert run(chat, follow, max_new_tokens=8).token_ids == tuple(plain_greedy(ToyDecoder(), follow, 8))
    return drafted


# B002
@pytest.mark.parametrize("gamma", range(1, 9))
def test_every_token_as_the_end_token(gamma: int) -> None:
    for j in range(COUNT):
        target = ToyDecoder()
        end = G.index(G[j])  # the first occurrence is where it ends
        chat = session(target, [oracle(WHOLE)], gamma, eos_ids=[G[j], 59])
        result = run(chat, PROMPT, max_new_tokens=COUNT, logprobs=0)
        assert list(result.token_ids) == G[: end + 1]
        assert result.finish_reason == "stop"
        # Guesses behind the end are neither right nor wrong.
        assert result.stats.proposed_tokens == result.stats.accepted_tokens
        same_everywhere(chat, result, target)
        # The last token was computed as a guess, or is the target's own and has no KV yet.
        assert chat.valid >= len(chat.tokens) - 1


@pytest.mark.parametrize("kind", DRAFTERS)
def test_b088_b089_any_of_several_end_tokens_and_stop_ids(kind: str) -> None:
    draft = drafter(kind, ToyDecoder(), WHOLE)
    target = ToyDecoder()
    for ends in ({G[9], G[14]}, {G[2], 0, 1}):
        first = min(G.index(end) for end in ends if end in G)
        chat = session(target, [draft], 4, eos_ids=ends)
        assert list(run(chat, PROMPT, max_new_tokens=COUNT).token_ids) == G[: first + 1]
        chat = session(target, [draft], 4, eos_ids=())
        result = run(chat, PROMPT, max_new_tokens=COUNT, stop_token_ids=list(ends))
        assert (list(result.token_ids), result.finish_reason) == (G[: first + 1], "stop")


def test_the_text_of_the_end_token_is_not_shown_and_ignore_eos_goes_past_it() -> None:
    chat = session(None, [oracle(WHOLE)], 3, eos_ids=[G[5]])
    result = run(chat, PROMPT, max_new_tokens=COUNT)
    assert result.text == TOY.decode(G[: G.index(G[5])])
    ignored = run(chat, PROMPT, max_new_tokens=COUNT, ignore_eos=True)
    assert list(ignored.token_ids) == G[:COUNT]
    assert ignored.finish_reason == "length"


# B003, B017
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_every_window_of_the_text_as_a_stop_string(size: int, gamma: int) -> None:
    text = TOY.decode(G[:COUNT])
    for at in range(COUNT - size):
        stop = TOY.decode(G[at : at + size])
        if not stop or "�" in stop:
            continue
        result = both(oracle(WHOLE), gamma, max_new_tokens=COUNT, stop=[stop])
        assert result.text == text[: text.find(stop)]
        assert result.finish_reason == "stop"
        assert result.stats.proposed_tokens == result.stats.accepted_tokens


def test_blocks_were_long_in_these_tests() -> None:
    stats = run(session(None, [oracle(WHOLE)], 8), PROMPT, max_new_tokens=COUNT).stats
    assert stats.mean_tokens_per_round > 5


@pytest.mark.parametrize("first", range(1, 8))
def test_a_stop_string_across_two_rounds_and_inside_a_token(first: int) -> None:
    """Blocks are cut everywhere; the stop string begins and ends in the middle of tokens."""
    words = [9, 11, 6, 30, 9, 11, 13, 6, 12, 40]  # "abc", "!", " the", "p", "abc", "!", "er", ...
    text = TOY.decode(words)
    target = _Scripted(PROMPT + words + [33] * 30)
    for begin in range(1, len(text) - 2):
        for end in range(begin + 1, min(begin + 6, len(text))):
            stop = text[begin:end]
            planner = ScheduledPlanner([("oracle", first), ("oracle", 8 - first)])
            chat = session(target, [oracle(PROMPT + words + [33] * 30)], planner=planner)
            result = run(chat, PROMPT, max_new_tokens=COUNT, stop=stop)
            assert result.text == text[: text.find(stop)]
            cover = next(n for n in range(len(words) + 1) if len(TOY.decode(words[:n])) >= len(result.text))
            assert list(result.token_ids) == words[:cover]
            assert chat.tokens == PROMPT + words[:cover]


class _Scripted(ToyDecoder):
    """A target whose plain text is given: position i is followed by text[i + 1]."""

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__()
        self._text = text

    def _row(self, entries: list[Any]) -> Any:
        row = super()._row(entries)
        if len(entries) < len(self._text):
            row[self._text[len(entries)]] += 1000
        return row


def test_a_stop_string_in_the_prompt_alone_does_not_fire() -> None:
    stop = TOY.decode(PROMPT)
    assert stop not in TOY.decode(G[:COUNT])
    result = run(session(None, [oracle(WHOLE)], 4), PROMPT, max_new_tokens=COUNT, stop=[stop])
    assert list(result.token_ids) == G[:COUNT]
    # Nor does one that begins in the prompt and ends in the answer.
    across = TOY.decode(PROMPT[-1:]) + TOY.decode(G[:1])
    if across not in TOY.decode(G[:COUNT]):
        assert run(session(None, [oracle(WHOLE)], 4), PROMPT, max_new_tokens=COUNT, stop=[across]).text.startswith(
            TOY.decode(G[:1])
        )


def test_b080_a_stop_of_two_characters_in_the_first_token_of_a_long_block() -> None:
    words = [7, *[30 + i for i in range(18)]]
    chat = session(_Scripted(PROMPT + [40] + words), [oracle(PROMPT + [40] + words)], 16)
    result = run(chat, PROMPT, max_new_tokens=19, stop=["ab"])
    assert TOY.decode([7]) == "ab"
    assert (list(result.token_ids), result.text) == ([40], TOY.decode([40]))
    assert chat.tokens == [*PROMPT, 40]
    assert result.stats.accepted_tokens == 0


# B004, B083
@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_limit_with_every_gamma(kind: str) -> None:
    target = ToyDecoder()
    draft = drafter(kind, target, WHOLE)
    for gamma in range(1, 9):
        for limit in range(21 if gamma in (1, 5) else 9):
            calls = len(target.calls)
            result = run(session(target, [draft], gamma), PROMPT, max_new_tokens=limit)
            assert list(result.token_ids) == G[:limit]
            assert result.finish_reason == "length"
            assert result.stats.new_tokens == limit
            assert (len(target.calls) > calls) == (limit > 0)


# B010
def test_a_stop_inside_the_block_before_the_limit_and_a_limit_before_the_stop() -> None:
    block = [10, 11, 59, 20, 21, 22, 23]
    for limit, expected, reason in ((5, block[:3], "stop"), (3, block[:3], "stop"), (2, block[:2], "length")):
        chat = session(_Scripted(PROMPT + block), [oracle(PROMPT + block)], 6, eos_ids=[59])
        result = run(chat, PROMPT, max_new_tokens=limit)
        assert (list(result.token_ids), result.finish_reason) == (expected, reason)
    late = [10, 11, 20, 21, 22, 59, 23]
    chat = session(_Scripted(PROMPT + late), [oracle(PROMPT + late)], 8, eos_ids=[59])
    result = run(chat, PROMPT, max_new_tokens=5)
    assert (list(result.token_ids), result.finish_reason) == (late[:5], "length")


# B092
@pytest.mark.parametrize("budget", range(1, 9))
def test_a_budget_ends_oracle_blocks_where_it_ends_plain_steps(budget: int) -> None:
    assert list(both(oracle(WHOLE), 8, max_new_tokens=budget).token_ids) == G[:budget]


# B011
@pytest.mark.parametrize("length", [60, 64, 65, 100, 50])
def test_a_draft_with_a_shorter_context_than_the_conversation(length: int, caplog: pytest.LogCaptureFixture) -> None:
    target = ToyDecoder()
    small = self_draft(ToyDecoder(max_positions=64), "small")
    prompt = [3 + i % 50 for i in range(length)]
    plain = plain_greedy(ToyDecoder(), prompt, 60)
    chat = session(target, [small], 4)
    before = len(small.decoder.calls)  # type: ignore[attr-defined]
    result = run(chat, prompt, max_new_tokens=60)
    assert list(result.token_ids) == plain
    assert str(chat.statuses["small"]) == "active"
    assert len(caplog.records) == 1
    assert "64" in caplog.text
    assert "small" in caplog.text
    used = result.stats.draft_share["small"]
    assert used > 0 if length < 64 else used == 0
    # B086: at most gamma forwards a round, none once the draft's end is reached.
    assert len(small.decoder.calls) - before <= 4 * used  # type: ignore[attr-defined]
    assert result.stats.acceptance_rate == (1.0 if used else 0.0)


# B076, B077
def test_end_tokens_in_the_prompt_and_a_draft_with_other_ends() -> None:
    prompt = [5, 1, 6, 59, 7, 5, 1, 6, 59, 7]
    plain = plain_greedy(ToyDecoder(), prompt, COUNT)
    for kind in ("ngram", "oracle", "self"):
        target = ToyDecoder()
        chat = session(target, [drafter(kind, target, prompt + plain)], 4, eos_ids=[59, 1])
        ends = [i for i, token in enumerate(plain) if token in (59, 1)]
        expected = plain[: ends[0] + 1] if ends else plain
        assert list(run(chat, prompt, max_new_tokens=COUNT).token_ids) == expected
    assert len(run(session(None, [oracle(WHOLE)], 4, eos_ids=()), PROMPT, max_new_tokens=60).token_ids) == 60


# B079
@pytest.mark.parametrize("place", range(4))
def test_a_guessed_end_that_the_target_does_not_want(place: int) -> None:
    def script(tokens: Sequence[int], gamma: int) -> list[int]:
        guess = WHOLE[len(tokens) : len(tokens) + gamma]
        return [59 if i == place else token for i, token in enumerate(guess)]

    assert 59 not in G[:COUNT]
    chat = session(None, [ScriptedDraft(script)], 4, eos_ids=[59])
    result = run(chat, PROMPT, max_new_tokens=COUNT)
    assert (list(result.token_ids), result.finish_reason) == (G[:COUNT], "length")


# B091
@pytest.mark.parametrize("kind", ["first", "guess", "corrected", "bonus", "plain"])
def test_one_convention_wherever_the_end_comes_from(kind: str) -> None:
    at = {"first": 0, "guess": 2, "corrected": 1, "bonus": 4, "plain": 3}[kind]
    text = [30 + i for i in range(10)]
    text[at] = 59
    draft: Any = oracle(PROMPT + text)
    if kind == "corrected":
        draft = anti(PROMPT + text)
    if kind == "plain":
        draft = empty()
    chat = session(_Scripted(PROMPT + text), [draft], 3, eos_ids=[59])
    result = run(chat, PROMPT, max_new_tokens=10, logprobs=0)
    assert list(result.token_ids) == text[: at + 1]
    assert result.text == TOY.decode(text[:at])
    assert result.finish_reason == "stop"
    assert result.drafts[-1] == ("oracle" if kind == "guess" else None)
    assert chat.tokens == PROMPT + text[: at + 1]


def test_min_new_tokens_holds_end_tokens_back_at_every_place_of_a_block() -> None:
    for gamma in (0, 3, 8):
        draft = self_draft(ToyDecoder())
        chat = session(ToyDecoder(), [draft], gamma, eos_ids=[G[0], G[2]])
        result = run(chat, PROMPT, max_new_tokens=COUNT, min_new_tokens=6)
        assert not {G[0], G[2]} & set(result.token_ids[:5])
        if gamma == 0:
            plain = result.token_ids
        assert result.token_ids == plain


# B082
def test_b082_a_seeded_turn_stopped_inside_a_block_repeats_and_the_next_turn_follows_from_it() -> None:
    def turns() -> tuple[GenerationResult, GenerationResult]:
        chat = session(ToyDecoder(), [self_draft(ToyDecoder(seed=3))], 4)
        first = run(chat, PROMPT, max_new_tokens=30, temperature=0.8, seed=5, stop=["a", "e"])
        follow = [*PROMPT, *first.token_ids, 20]
        return first, run(chat, follow, max_new_tokens=10, temperature=0.8, seed=6)

    (first, second), (again, then) = turns(), turns()
    assert (first.token_ids, first.text) == (again.token_ids, again.text)
    assert second.token_ids == then.token_ids
    cold = session(ToyDecoder(), [self_draft(ToyDecoder(seed=3))], 4)
    follow = [*PROMPT, *first.token_ids, 20]
    assert run(cold, follow, max_new_tokens=10, temperature=0.8, seed=6).token_ids == second.token_ids


# B094
def test_nothing_and_special_tokens_only_as_prompts() -> None:
    chat = session(None, [oracle([0, *plain_greedy(ToyDecoder(), [0], 9)])], 3)
    with pytest.raises(PromptError):
        Generation(chat, [], SamplingParams())
    assert list(run(chat, [0], max_new_tokens=9).token_ids) == plain_greedy(ToyDecoder(), [0], 9)
    assert list(run(chat, [0, 1], max_new_tokens=9).token_ids) == plain_greedy(ToyDecoder(), [0, 1], 9)


# The tests above must see the usual fault: a check for one token after a block was added


@pytest.mark.parametrize("fault", ["last token of the block only", "history keeps the block", "limit after the block"])
def test_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TOKENS > 59
    commit = Generation._commit
    if fault == "history keeps the block":
        monkeypatch.setattr(Session, "truncate", lambda self, length: None)
    else:

        def planted(self: Generation, logits: Any, guesses: list[int], outcome: Any, draft: Any) -> list[int]:
            block = [*guesses[: outcome.accepted], outcome.token]
            limit, stops = self.params.max_new_tokens, self._answer._stop_ids
            if fault == "last token of the block only":
                self._answer._stop_ids = frozenset()
            else:
                object.__setattr__(self._answer._params, "max_new_tokens", limit + len(block) - 1)
            emitted = commit(self, logits, guesses, outcome, draft)
            self._answer._stop_ids = stops
            object.__setattr__(self._answer._params, "max_new_tokens", limit)
            if block[-1] in stops:
                self._answer.finish("stop")
            return emitted

        monkeypatch.setattr(Generation, "_commit", planted)
    checks = {
        "limit after the block": lambda: test_every_limit_with_every_gamma("oracle"),
        "history keeps the block": test_b080_a_stop_of_two_characters_in_the_first_token_of_a_long_block,
        "last token of the block only": lambda: test_every_token_as_the_end_token(4),
    }
    with pytest.raises((AssertionError, RuntimeError)):
        checks[fault]()


def test_a_stop_check_of_the_newest_token_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    push = Answer.push

    def planted(self: Answer, token: int, draft: str | None = None, logprob: Any = None) -> Any:
        for stop in self._stops:
            stop.matched = 0  # forgets what the tokens before had matched
        return push(self, token, draft, logprob)

    monkeypatch.setattr(Answer, "push", planted)
    with pytest.raises(AssertionError):
        test_every_window_of_the_text_as_a_stop_string(2, 3)
