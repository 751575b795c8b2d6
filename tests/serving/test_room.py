"""Memory that runs out in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.errors import EdgespecError, ModelError
from edgespec.models.batching import PartError
from edgespec.serving.request import Request
from tests.serving.stage import WAIT, Stage
from tests.support.scripted import PROMPT, ScriptedDraft, ToyDecoder, mixed, plain_greedy, run, self_draft, session

ERROR = "NvMapMemAllocInternalTagged: 1075072515 error 12"


def short_of_memory(target: ToyDecoder, monkeypatch: pytest.MonkeyPatch, calls: set[int]) -> list[list[int]]:
    """Forwards of these numbers fail; the widths of all parts are noted."""
    widths: list[list[int]] = []
    forward = target.forward_batch

    def forward_batch(parts: Any) -> Any:
        widths.append([len(part.tokens) for part in parts])
        if len(widths) - 1 in calls:
            raise RuntimeError(ERROR)
        return forward(parts)

    monkeypatch.setattr(target, "forward_batch", forward_batch)
    return widths


def test_the_batch_is_made_again_plainly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = ToyDecoder()
    target.batch_slots = 4
    widths = short_of_memory(target, monkeypatch, {3})
    stage = Stage(target, [self_draft(ToyDecoder())], load="fixed:2")
    requests = [stage.submit(PROMPT, max_new_tokens=20) for _ in range(3)]
    for result in stage.ran(*requests):
        assert list(result.token_ids) == plain_greedy(ToyDecoder(), PROMPT, 20)
        assert result.stats.accepted_tokens > 0
    assert widths[3] == widths[5] == [4, 4, 4]
    assert widths[4] == [1, 1, 1]


def test_if_it_fails_again_those_it_was_for_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    target = ToyDecoder()
    target.batch_slots = 4
    short_of_memory(target, monkeypatch, {3, 4})
    stage = Stage(target, [self_draft(ToyDecoder())], load="fixed:2")
    requests = [stage.submit(PROMPT, max_new_tokens=20) for _ in range(2)]
    with stage.serving():
        for request in requests:
            with pytest.raises(Exception, match="error 12"):
                request.result(WAIT)
        later = stage.submit(PROMPT, max_new_tokens=5)
        assert list(later.result(WAIT).token_ids) == plain_greedy(ToyDecoder(), PROMPT, 5)


class Resident:
    """A working set; notes how many leases were held when a draft had to leave."""

    def __init__(self, *names: str) -> None:
        self.names = frozenset(names)
        self.held = 0
        self.left: list[int] = []

    @contextmanager
    def acquire(self) -> Iterator[Any]:
        self.held += 1
        try:
            yield SimpleNamespace(names=self.names)
        finally:
            self.held -= 1

    def shrink(self, reason: str) -> None:
        self.left.append(self.held)


def test_a_draft_leaves_outside_of_the_leases_that_would_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    target, resident = ToyDecoder(), Resident("self")
    target.batch_slots = 4
    short_of_memory(target, monkeypatch, {3})
    stage = Stage(target, [self_draft(ToyDecoder())], load="fixed:2", residency=resident)
    requests = [stage.submit(PROMPT, max_new_tokens=20) for _ in range(3)]
    for result in stage.ran(*requests):
        assert list(result.token_ids) == plain_greedy(ToyDecoder(), PROMPT, 20)
    assert resident.left == [0]
    assert resident.held == 0


@pytest.mark.parametrize("beside", [0, 2])
def test_a_seeded_text_is_the_same_if_memory_runs_out(monkeypatch: pytest.MonkeyPatch, beside: int) -> None:
    """Without its guesses it would be another one, of the same law."""
    whole = [*PROMPT, *plain_greedy(ToyDecoder(), PROMPT, 60)]
    params = {"max_new_tokens": 40, "temperature": 1.0, "seed": 3}

    def draft() -> ScriptedDraft:
        return mixed(whole, lambda at: at % 2 == 0)

    expected = run(session(None, [draft()]), PROMPT, **params).token_ids
    target = ToyDecoder()
    target.batch_slots = 4
    short = set(range(3, 18, 2))
    widths = short_of_memory(target, monkeypatch, short)
    if not beside:  # by `forward`, as in `Engine.stream`
        forward, calls = target.forward, list[int]()

        def failing(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            if len(calls) in short:
                raise RuntimeError(ERROR)
            return forward(*args, **kwargs)

        monkeypatch.setattr(target, "forward", failing)
    stage = Stage(target, [draft()], load="edgespec")
    first = stage.submit(PROMPT, **params)
    others = [stage.submit(PROMPT, max_new_tokens=60) for _ in range(beside)]
    assert stage.ran(first, *others)[0].token_ids == expected
    if beside:
        assert any(width > 1 for width in widths[4])  # its guesses


def test_one_that_cannot_give_its_guesses_up_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = ToyDecoder()
    target.batch_slots = 4
    widths = short_of_memory(target, monkeypatch, {3})
    stage, admit = Stage(target, [self_draft(ToyDecoder())], load="fixed:2"), Stage.admit

    def breaking(request: Request) -> Any:
        active = admit(stage, request)
        ask = active.session.ask_verify

        def fail(guesses: list[int]) -> Any:
            if len(widths) == 4 and request is bad:
                raise ModelError("the cache is broken")
            return ask(guesses)

        monkeypatch.setattr(active.session, "ask_verify", fail)
        return active

    monkeypatch.setattr(stage, "admit", breaking)
    good, bad, fine = (stage.submit(PROMPT, max_new_tokens=20) for _ in range(3))
    with stage.serving():
        with pytest.raises(ModelError, match="the cache is broken"):
            bad.result(WAIT)
        for request in (good, fine):
            assert list(request.result(WAIT).token_ids) == plain_greedy(ToyDecoder(), PROMPT, 20)


def test_a_text_whose_keys_and_values_cannot_be_had_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = ToyDecoder()
    target.batch_slots = 4
    forward, calls = target.forward_batch, list[int]()

    def forward_batch(parts: Any) -> Any:
        calls.append(len(parts))
        if len(calls) == 4:
            raise PartError(1, EdgespecError("no memory for 1 more block"))
        return forward(parts)

    monkeypatch.setattr(target, "forward_batch", forward_batch)
    stage = Stage(target)
    requests = [stage.submit([5 + i, 6], max_new_tokens=20) for i in range(3)]
    with stage.serving():
        with pytest.raises(EdgespecError, match="no memory for 1 more block"):
            requests[1].result(WAIT)
        for i in (0, 2):
            assert list(requests[i].result(WAIT).token_ids) == plain_greedy(ToyDecoder(), [5 + i, 6], 20)
    assert calls[3:5] == [3, 2]


def test_a_target_that_runs_out_again_and_again_is_told_of_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = ToyDecoder()
    target.batch_slots = 4
    widths = short_of_memory(target, monkeypatch, set(range(2, 30, 3)))
    stage = Stage(target)
    for result in stage.ran(*(stage.submit(PROMPT, max_new_tokens=40) for _ in range(2))):
        assert list(result.token_ids) == plain_greedy(ToyDecoder(), PROMPT, 40)
    assert len(widths) > 30
    told = [record.getMessage() for record in caplog.records if "ran out of memory" in record.getMessage()]
    assert [words.split("by now ")[1].split(" times")[0] for words in told] == ["1", "2", "4", "8"]
