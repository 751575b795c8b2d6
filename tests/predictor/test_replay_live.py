"""The replay makes the decisions of the live loop: one policy through both, the same plans and observations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgespec.decoding import round as decoding
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.memory.states import State
from edgespec.steering import Scheduler
from predictor import CostTable
from predictor.catch_up import FREELY
from predictor.policies import make_policy
from predictor.replay import Replay, TextTrace, World
from tests.support.scripted import TOKENS, ScriptedDraft, ToyDecoder, plain_greedy, session

PROMPT = [2 + at * 7 % (TOKENS - 2) for at in range(150)]
COUNT, GAMMA_MAX = 60, 8
NAMES = ("a", "b", "c")
EVERY = {"a": 3, "b": 2, "c": 7}  # one in so many of its guesses is wrong
# Rounds so short that nobody who is not wanted ever gets to read: live clocks and simulated seconds then agree.
COSTS = CostTable(dict.fromkeys(range(1, 10), 1e-4), dict.fromkeys(NAMES, 4e-6), catch_up=dict.fromkeys(NAMES, 5e-5))


class Reader(ScriptedDraft):
    """Right but at some positions, and has to read the text first, as heads do."""

    def __init__(self, text: Sequence[int], name: str) -> None:
        super().__init__(lambda tokens, gamma: [self.guess(len(tokens) + i) for i in range(gamma)], name)
        self.text = text
        self.read = 0

    def guess(self, at: int) -> int:
        right = self.text[at] if at < len(self.text) else 2
        return (right + 1) % TOKENS if wrong(self.name, at) else right

    def behind(self, tokens: Sequence[int]) -> int:
        lag = len(tokens) - self.read
        return 0 if lag <= FREELY // 2 else lag

    def catch_up(self, tokens: Sequence[int], limit: int) -> int:
        left = max(self.behind(tokens) - limit, 0)
        self.read = len(tokens) - left
        return left

    def propose(self, tokens: Sequence[int], gamma: int, *arguments: Any, **named: Any) -> Any:
        self.read = len(tokens)
        return super().propose(tokens, gamma, *arguments, **named)


def wrong(name: str, at: int) -> bool:
    return at % EVERY[name] == 0


def policy(spec: str, costs: CostTable, told: list[Any]) -> Any:
    """The policy, which writes down what it is asked and what it is told."""
    made: Any = make_policy(spec, costs, NAMES, capacity=3, gamma_max=GAMMA_MAX, seed=3)
    plan, observe, credit = made.plan, made.observe, made.credit

    def planned(candidates: Any, limit: int) -> Any:
        found = plan(candidates, limit)
        able = [(c.name, c.behind) for c in candidates if c.level]
        told.append(("plan", able, limit, found.draft, found.gamma))
        return found

    def observed(o: Any) -> None:
        counts = o.drafted, o.proposed, o.accepted, o.width, o.caught_up, o.asked, o.emitted
        told.append(("observe", o.draft, o.level, *counts))
        observe(o)

    def credited(candidate: Any, proposed: int, accepted: int, **measured: Any) -> None:
        told.append(("credit", candidate.name, proposed, accepted, measured["drafted"], measured["caught_up"]))
        credit(candidate, proposed, accepted, **measured)

    made.plan, made.observe, made.credit = planned, observed, credited
    return made


def live(spec: str, text: Sequence[int]) -> tuple[list[Any], float]:
    told: list[Any] = []
    costs = CostTable.from_json(COSTS.to_json())
    made = policy(spec, costs, told)
    chat = session(ToyDecoder(), [Reader(text, name) for name in NAMES], planner=made)
    here = {name: SimpleNamespace(state=State.RESIDENT) for name in NAMES}
    memory: Any = SimpleNamespace(states=lambda: here, capacity=3, retarget=lambda *_, **__: None)
    steering: Any = Scheduler(made, memory, list(chat.statuses.values()), costs).text(COUNT)
    generation = Generation(chat, PROMPT, SamplingParams(max_new_tokens=COUNT, ignore_eos=True), steering=steering)
    for _ in generation.deltas():
        pass
    assert not steering.given_up
    assert [*PROMPT, *generation.result.token_ids] == list(text)
    return told, generation.stats.fallback_share


def replayed(spec: str) -> tuple[list[Any], float]:
    accepts = np.zeros((len(NAMES), COUNT - 1), np.uint8)
    for row, name in enumerate(NAMES):
        for column in range(COUNT - 1):
            begin, end = len(PROMPT) + column + 1, len(PROMPT) + COUNT
            first = next((at for at in range(begin, end) if wrong(name, at)), end)
            accepts[row, column] = min(first - begin, GAMMA_MAX)
    nothing = np.zeros(COUNT - 1, np.uint8)
    running = Replay(World(NAMES, COSTS, 3, resident=NAMES))
    told: list[Any] = []
    running.policy = policy(spec, COSTS, told)
    running.text(TextTrace("code", len(PROMPT), accepts, nothing, nothing))
    found = running.outcome.texts[0]
    return told, found.fallbacks / found.rounds


@pytest.mark.parametrize("spec", ["static:b@4", "mab-async@3,c=0.5", "ucbspec@2", "exp3spec@4", "hedge@3", "memspec@5"])
def test_the_same_policy_sees_and_does_the_same(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "perf_counter_ns", count(step=10).__next__)
    text = [*PROMPT, *plain_greedy(ToyDecoder(), PROMPT, COUNT)]
    (lived, missed), (simulated, fallbacks) = live(spec, text), replayed(spec)
    assert len(lived) > 20
    assert simulated == lived
    assert fallbacks == pytest.approx(missed)
