"""Keys and values through rollback, gaps, windows and turns (faults.md, KV cache).

B107 (a cache that cannot be cropped): impossible by contract, windows are masks and every position is kept; a cache
that does not obey is an error (tests/decoding/test_session.py, B106). B109: callers cannot pass caches in.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafts import NgramDraft, StandaloneDraft
from drafts.ngram import NgramSession
from drafts.standalone import StandaloneSession
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.session import DraftStatus, Session
from tests.support.engines import ENGINES, load
from tests.support.scripted import (
    TOKENS,
    ScheduledPlanner,
    ScriptedDraft,
    ToyDecoder,
    ToyTokenizer,
    anti,
    oracle,
    plain_greedy,
    run,
    self_draft,
    session,
)
from tests.support.tiny import write_tiny

PROMPT = [5, 6, 7, 8, 9]
G = plain_greedy(ToyDecoder(), PROMPT, 150)
WHOLE = PROMPT + G


# B007
@pytest.mark.parametrize(
    "gammas",
    [
        [4, 0, 0, 0, 4, 0, 4],
        [0, 4],
        [8, 1, 0, 3],
        [*[0] * 50, 4, 4],
        [1],
        [5, *[0] * 50, 1, 0, 8],
        [random.Random(7).randrange(5) for _ in range(60)],
    ],
)
def test_a_twin_is_always_right_after_any_gap(gammas: list[int]) -> None:
    target = ToyDecoder()
    planner = ScheduledPlanner([("self", gamma) for gamma in gammas])
    result = run(session(target, [self_draft(target)], planner=planner), PROMPT, max_new_tokens=150)
    assert list(result.token_ids) == G
    assert result.stats.proposed_tokens > 0
    assert result.stats.acceptance_rate == 1.0


def test_a_twin_is_always_right_after_others_were_at_work() -> None:
    target = ToyDecoder()
    drafts = [self_draft(target), self_draft(ToyDecoder(seed=8), "stranger"), anti(WHOLE), NgramDraft(3, 1)]
    schedule = [
        ("self", 3),
        ("stranger", 4),
        ("anti", 8),
        ("self", 1),
        ("ngram", 2),
        (None, 0),
        ("self", 4),
        ("anti", 1),
    ]
    planner = ScheduledPlanner(schedule)
    result = run(session(target, drafts, planner=planner), PROMPT, max_new_tokens=150)
    assert list(result.token_ids) == G
    mine = [o for o in planner.seen if o.draft == "self"]
    assert len(mine) > 10
    assert all(o.accepted == o.proposed > 0 for o in mine)


# B008
@pytest.mark.parametrize("gamma", range(1, 7))
@pytest.mark.parametrize("windows", [(8, 8), (8, None), (None, 8), (3, 5)])
def test_windows_on_either_side_before_at_and_after_the_wrap(windows: tuple[Any, Any], gamma: int) -> None:
    def target() -> ToyDecoder:
        return ToyDecoder(window=windows[0])

    plain = plain_greedy(target(), PROMPT, 40)
    twin = self_draft(ToyDecoder(window=windows[1]))
    noise = ScriptedDraft(lambda t, g: [len(t) * 7 % TOKENS] * g, "noise")
    for draft in (twin, oracle(PROMPT + plain), anti(PROMPT + plain), noise):
        result = run(session(target(), [draft], gamma), PROMPT, max_new_tokens=40)
        assert list(result.token_ids) == plain
        if draft is twin and windows[0] == windows[1]:
            assert result.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("mistral", {"sliding_window": 8}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ],
    ids=["all layers", "mixed"],
)
def test_windows_on_the_engines(engine: str, architecture: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, architecture, head_dim=16, **changes)
    target, twin = load(folder, engine), load(folder, engine)
    assert any(window == 8 for window in target.spec.windows)
    cache, plain, feed = target.new_cache(), [], list(PROMPT)
    for _ in range(40):
        feed = [int(np.argmax(target.forward(feed, cache, logits=1).logits[0][:280]))]
        plain += feed
    for gamma in (1, 3, 6):
        for draft in (StandaloneDraft("self", twin, 280), oracle(PROMPT + plain), anti(PROMPT + plain, tokens=280)):
            chat = session(target, [draft], gamma, tokenizer=ToyTokenizer(280), eos_ids=())
            result = run(chat, PROMPT, max_new_tokens=40)
            assert list(result.token_ids) == plain
            if draft.name == "self":
                assert result.stats.acceptance_rate == 1.0


# B109
def test_a_draft_of_another_shape_has_its_own_cache() -> None:
    target = ToyDecoder()
    other = StandaloneDraft("other", ToyDecoder(hidden=4, seed=2), TOKENS)
    chat = session(target, [other], 3)
    assert list(run(chat, PROMPT, max_new_tokens=30).token_ids) == G[:30]
    opened = chat.draft("other")
    assert isinstance(opened, StandaloneSession)
    assert opened._cache is not chat._cache


# B110
def test_warm_equals_cold_for_the_same_prompt_and_for_shared_beginnings() -> None:
    base = [3 + i * 5 % 50 for i in range(60)]
    for shared in (60, 59, 4, 31, 1, 0):
        prompt = base[:shared] + [40 + i % 20 for i in range(60 - shared)]
        chat = session(None, [self_draft(ToyDecoder()), NgramDraft()], 3)
        run(chat, base, max_new_tokens=20)
        warm = run(chat, prompt, max_new_tokens=20)
        assert list(warm.token_ids) == plain_greedy(ToyDecoder(), prompt, 20)
        assert warm.stats.reused_tokens == min(shared, 59)
        assert warm.stats.acceptance_rate == 1.0


# B112
def test_five_long_sessions_side_by_side_and_memory_after_closing() -> None:
    target = ToyDecoder()
    draft = DraftStatus(self_draft(target))
    chats = [session(target, [draft], 4) for _ in range(5)]
    prompts = [[3 + (i * (n + 2)) % 50 for i in range(180)] for n in range(5)]
    running = [Generation(c, p, SamplingParams(max_new_tokens=30)) for c, p in zip(chats, prompts, strict=True)]
    while any([generation.step() for generation in running]):  # noqa: C419 - all take turns
        pass
    for generation, prompt in zip(running, prompts, strict=True):
        assert list(generation.result.token_ids) == plain_greedy(ToyDecoder(), prompt, 30)
        assert generation.stats.acceptance_rate == 1.0
    for _ in range(3):
        before = [chat.nbytes for chat in chats]
        for chat, prompt in zip(chats, prompts, strict=True):
            run(chat, prompt, max_new_tokens=30)
        assert [chat.nbytes for chat in chats] == before
    for chat in chats:
        chat.close()
    assert [chat.nbytes for chat in chats] == [0] * 5


# B113
@pytest.mark.parametrize("end", ["length", "eos", "stop", "stop across tokens", "cancelled"])
@pytest.mark.parametrize("gamma", [0, 1, 4, 8])
def test_the_second_turn_equals_a_cold_one_however_the_first_ended(end: str, gamma: int) -> None:
    target, tokenizer = ToyDecoder(), ToyTokenizer()
    drafts = [self_draft(target), oracle(WHOLE)]
    ends = [G[9]] if end == "eos" else []
    chat = session(target, drafts, planner=ScheduledPlanner([("oracle", gamma), ("self", gamma)]), eos_ids=ends)
    params: dict[str, Any] = {"max_new_tokens": 20}
    if end == "stop":
        params["stop"] = [tokenizer.decode(G[7:8])]
    if end == "stop across tokens":
        params["stop"] = [tokenizer.decode(G[4:9])]
    if end == "cancelled":
        generation = Generation(chat, PROMPT, SamplingParams(**params))
        for _ in range(3):
            generation.step()
        generation.close()
        first = generation.result
    else:
        first = run(chat, PROMPT, **params)
    assert chat.tokens == PROMPT + list(first.token_ids)
    follow = [*PROMPT, *first.token_ids, 30, 31, 32]
    chat.planner = ScheduledPlanner([("self", 4)])
    second = run(chat, follow, max_new_tokens=20, ignore_eos=True)
    assert list(second.token_ids) == plain_greedy(ToyDecoder(), follow, 20)
    assert second.stats.acceptance_rate == 1.0
    assert second.stats.reused_tokens >= len(follow) - 3 - 1


# B115
def test_drafts_may_join_and_leave_between_turns() -> None:
    target = ToyDecoder()
    chat = session(target, [], 3)
    first = run(chat, PROMPT, max_new_tokens=10)
    chat.statuses["self"] = DraftStatus(self_draft(target))
    follow = [*PROMPT, *first.token_ids, 30]
    second = run(chat, follow, max_new_tokens=10)
    assert list(second.token_ids) == plain_greedy(ToyDecoder(), follow, 10)
    assert second.stats.acceptance_rate == 1.0
    del chat.statuses["self"]
    follow = [*follow, *second.token_ids, 31]
    third = run(chat, follow, max_new_tokens=10)
    assert list(third.token_ids) == plain_greedy(ToyDecoder(), follow, 10)
    assert third.stats.draft_share == {"plain": 9}


# B116
def test_after_a_reset_everything_is_as_new() -> None:
    target = ToyDecoder()
    chat = session(target, [self_draft(target), NgramDraft()], 3)
    run(chat, [9, 8, 7, 9, 8, 7], max_new_tokens=30)
    chat.close()
    result = run(chat, PROMPT, max_new_tokens=30)
    fresh = run(session(target, [self_draft(target), NgramDraft()], 3), PROMPT, max_new_tokens=30)
    assert result.token_ids == fresh.token_ids
    assert result.drafts == fresh.drafts
    assert result.stats.reused_tokens == fresh.stats.reused_tokens == 0


# B024, at the level of tokens: what a template makes of past turns is any edit of them
@pytest.mark.parametrize(
    "edit", ["none", "last answer loses its first tokens", "last answer trimmed", "system", "past turn"]
)
def test_three_turns_with_edits_equal_cold_sessions_and_keep_the_common_beginning(edit: str) -> None:
    target = ToyDecoder()
    chat = session(target, [self_draft(target), NgramDraft()], 3)
    history = [3, 4, 5]
    for turn in range(3):
        prompt = [*history, 20 + turn, 21]
        held = list(chat.tokens)
        common = next((i for i, (a, b) in enumerate(zip(held, prompt)) if a != b), min(len(held), len(prompt)))
        result = run(chat, prompt, max_new_tokens=12)
        assert list(result.token_ids) == plain_greedy(ToyDecoder(), prompt, 12)
        # The last answer's last token may or may not have its KV; nothing else is ever computed again.
        assert common - 1 <= result.stats.reused_tokens <= common
        assert result.stats.acceptance_rate > 0
        answer = list(result.token_ids)
        if edit == "last answer loses its first tokens":
            answer = answer[3:]
        if edit == "last answer trimmed":
            answer = answer[:-2]
        history = [*prompt, *answer]
        if edit == "system":
            history[0] = 10 + turn
        if edit == "past turn" and turn:
            del history[4:6]


@pytest.mark.parametrize("fault", ["drafts are not told of the cut", "only the number is cut"])
def test_planted_faults_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "drafts are not told of the cut":
        monkeypatch.setattr(StandaloneSession, "crop", lambda self, length: None)
        monkeypatch.setattr(NgramSession, "crop", lambda self, length: None)
    else:

        def truncate(self: Session, length: int) -> None:
            self.valid = len(self.tokens) - 1 if self.tokens else 0
            del self.tokens[length:]
            self.valid = min(self.valid, length + 1)

        monkeypatch.setattr(Session, "truncate", truncate)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        test_warm_equals_cold_for_the_same_prompt_and_for_shared_beginnings()
