"""Seeds: what repeats, what differs, and what must not be touched."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from drafts import NgramDraft
from drafts.base import Choose, Proposal
from predictor import AutoPlanner
from tests.support.scripted import (
    PROMPT,
    TOKENS,
    ScriptedDraft,
    ToyDecoder,
    empty,
    run,
    self_draft,
    session,
)


def sampled(chat: Any, seed: int | None, **params: Any) -> tuple[int, ...]:
    return run(chat, PROMPT, max_new_tokens=25, temperature=1.0, seed=seed, **params).token_ids


def test_b044_b047_a_seed_gives_one_text_and_no_seed_many() -> None:
    target = ToyDecoder()

    def chat() -> Any:
        return session(target, [NgramDraft(), self_draft(ToyDecoder(seed=9))], 3)

    assert len({sampled(chat(), seed) for seed in range(50)}) > 45
    assert len({sampled(chat(), 7) for _ in range(3)}) == 1
    assert len({sampled(chat(), None) for _ in range(10)}) == 10


def test_a_seed_gives_one_text_whatever_the_planner_learned_before() -> None:
    target = ToyDecoder()
    planner = AutoPlanner()
    chat = session(target, [NgramDraft(), self_draft(ToyDecoder(seed=9))], planner=planner)
    first = sampled(chat, 7)
    for warm in range(10):
        run(chat, [3, 3, 3, warm + 4], max_new_tokens=40)
    assert sampled(chat, 7) == first


def test_global_random_state_is_left_alone() -> None:
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr] # noqa: NPY002
    sampled(session(None, [self_draft(ToyDecoder(seed=9))], 3), 7)
    sampled(session(None, [self_draft(ToyDecoder(seed=9))], 3), None)
    assert before == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[union-attr] # noqa: NPY002


def test_b046_sessions_in_parallel_do_not_touch_each_other(text: list[int]) -> None:
    target = ToyDecoder()
    twin = self_draft(target)
    alone = {seed: sampled(session(target, [twin], 3), seed) for seed in range(4)}
    results: dict[Any, list[tuple[int, ...]]] = {}

    def work(key: Any, request: Callable[[], tuple[int, ...]]) -> None:
        results[key] = [request() for _ in range(5)]

    def greedy() -> tuple[int, ...]:
        return run(session(target, [twin], 3), PROMPT, max_new_tokens=40).token_ids

    threads = [threading.Thread(target=work, args=("greedy", greedy))]
    for seed in alone:
        request = lambda seed=seed: sampled(session(target, [twin], 3), seed)  # noqa: E731
        threads.append(threading.Thread(target=work, args=(seed, request)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"greedy": [tuple(text[4:44])] * 5, **{seed: [ids] * 5 for seed, ids in alone.items()}}


def test_the_draft_draws_from_its_own_stream(text: list[int]) -> None:
    """What is drawn for judging must not depend on how much the draft drew."""
    drawn: list[int] = []

    class Drawing(ScriptedDraft):
        def propose(self, tokens: Sequence[int], gamma: int, choose: Choose, *, floor: float = 0.0) -> Proposal:
            drawn.extend(choose(np.zeros(TOKENS, np.float32), [])[0] for _ in range(5))
            return Proposal()

    quiet = sampled(session(None, [empty()], 3), 3)
    assert sampled(session(None, [Drawing(lambda t, g: [])], 3), 3) == quiet
    assert len(set(drawn)) > 10
