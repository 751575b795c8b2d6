"""Several threads and sequences on one decoder: results that wait on the device, and captures, of which one is made at
a time."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drafts.ngram import NgramDraft
from drafts.standalone import StandaloneDraft
from edgespec.models.base import Part
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.cuda.graphs import Graphs, TorchCapture
from edgespec.models.cuda.logits import DeviceLogits, Judgement
from edgespec.models.cuda.looks import Stopwatch
from edgespec.models.cuda.memory import return_memory
from tests.models.cuda.common import TOKENS, answer, load
from tests.models.cuda.scripted_capture import ScriptedCapture

# Results


def rows_of(decoder: CudaDecoder, token: int) -> np.ndarray:
    return np.array(decoder.forward([token], decoder.new_cache(40)).logits)


def close(logits: Any, wanted: np.ndarray) -> bool:
    return np.allclose(np.array(logits), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("graphs", [True, False])
def test_a_look_after_the_step_of_another_sequence(folders: list[Path], graphs: bool) -> None:
    """Whatever step that was: of the same shape, of another one, of several sequences, or a draft's block."""
    decoder, alone = load(folders[0], graphs), load(folders[0], graphs=False)
    wanted = {token: rows_of(alone, token) for token in (5, 6, 7)}
    decoder.prepare_batch(2)
    others: list[Callable[[], Any]] = [
        lambda: decoder.forward([6], decoder.new_cache(40)),
        lambda: decoder.forward([6, 9, 8], decoder.new_cache(40)),
        lambda: decoder.forward(TOKENS[:30], decoder.new_cache(40)),
        lambda: decoder.forward_batch([Part([token], decoder.new_cache(40)) for token in (8, 9)]),
        lambda: decoder.guess([6], decoder.new_cache(40), 3, real=280),
        lambda: decoder.prepare_guesses(281, range(1, 9)),
        lambda: decoder.prepare_batch(4),
    ]
    for turn, other in enumerate(others):
        logits: Any = decoder.forward([5], decoder.new_cache(40)).logits
        both = decoder.forward_batch([Part([token], decoder.new_cache(40)) for token in (7, 5)])
        if turn % 2:  # what was looked at stays
            assert close(both[1].logits, wanted[5])
        other()
        assert logits.best(0) == wanted[5][0].argmax()
        assert close(logits, wanted[5])
        for output, token in zip(both, (7, 5)):
            assert close(output.logits, wanted[token])
            assert output.logits.best(0) == wanted[token][0].argmax()  # type: ignore[attr-defined]


def test_hidden_states_are_copies(folders: list[Path]) -> None:
    decoder = load(folders[0])
    first = decoder.forward([5], decoder.new_cache(40), hidden=True).hidden
    assert first is not None
    before = first.copy()
    decoder.forward([6], decoder.new_cache(40), hidden=True)
    assert np.array_equal(first, before)


def test_a_look_and_the_next_step_take_turns() -> None:
    """A thread that has begun to look reads what it meant to, though a step begins meanwhile."""
    rows, looking, done = torch.ones(1, 4), threading.Event(), threading.Event()

    class Slow:
        """A tensor on a device that is still busy."""

        def to(self, *_: Any, **__: Any) -> torch.Tensor:
            looking.set()
            done.wait(0.2)
            return self.clone()

        def clone(self) -> torch.Tensor:
            return torch.tensor([[0, 0, 9, int(rows[0, 0])]])

    slow = torch.Tensor
    judgement = Judgement(Slow(), Stopwatch(torch.device("cpu")))  # type: ignore[arg-type]
    logits = DeviceLogits(rows, judgement)
    seen: list[int | None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edgespec.models.cuda.logits.Tensor", (slow, Slow))
        thread = threading.Thread(target=lambda: seen.append(logits.best(0)))
        thread.start()
        looking.wait(5)
        logits.keep()  # as the next step does, before it writes
        rows.fill_(3.0)
        done.set()
        thread.join(5)
    assert seen == [1]
    assert np.array_equal(logits[0], np.ones(4))


def test_two_conversations_at_once(folders: list[Path]) -> None:
    """Steps of one fall between step and look of the other one, each time."""
    prompts = (TOKENS[:10], TOKENS[20:30])
    plain = load(folders[0], graphs=False)

    def text(decoder: CudaDecoder, prompt: list[int], between: Callable[[], None]) -> list[int]:
        cache, tokens, new = decoder.new_cache(60), list(prompt), []
        for _ in range(12):
            logits: Any = decoder.forward(tokens, cache, logits=1).logits
            between()
            tokens = [logits.best(0)]
            new += tokens
        return new

    wanted = [text(plain, prompt, lambda: None) for prompt in prompts]
    decoder, turns = load(folders[0]), threading.Barrier(2, timeout=10)

    def both() -> None:
        turns.wait()

    made: dict[int, list[int]] = {}

    def run(which: int) -> None:
        made[which] = text(decoder, prompts[which], both)

    threads = [threading.Thread(target=run, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [made[0], made[1]] == wanted


def test_a_greedy_answer_is_looked_at_once_a_round(
    folders: list[Path], looked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few bytes, with a draft on the device as without; no rows are moved for the next step, as nobody holds them."""
    moved: list[int] = []
    monkeypatch.setattr(DeviceLogits, "keep", lambda self: moved.append(len(self)))
    for gamma in (1, 4, 20):  # the last one is too long for a captured step: two looks
        for drafts in ([], [NgramDraft(name="d")], [StandaloneDraft("d", load(folders[1]), 280)]):
            looked.clear()
            made = answer(load(folders[0]), folders[0], drafts, gamma)
            rounds = made.stats.rounds
            assert rounds > 5
            assert rounds + 1 <= len(looked) <= rounds * (2 if gamma > 15 else 1) + 1  # and the prompt's last row
            assert max(looked) <= 8 * 2 * (1 + 21)
            assert not moved


# Captures


def test_a_capture_waits_for_that_of_another_decoder() -> None:
    inside, most, entered = 0, 0, threading.Barrier(2)

    class Slow(ScriptedCapture):
        def __call__(self, body: Callable[[], Any], warm: bool = True) -> tuple[Any, Callable[[], None]]:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            with contextlib.suppress(threading.BrokenBarrierError):
                entered.wait(0.1)  # both come here, if they may
            inside -= 1
            return super().__call__(body, warm)

    threads = [threading.Thread(target=Graphs(Slow()).run, args=("key", lambda: ())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert most == 1


def test_no_memory_is_given_back_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    given, threads, early = threading.Event(), [], []
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", given.set)

    class Watched(ScriptedCapture):
        def __call__(self, body: Callable[[], Any], warm: bool = True) -> tuple[Any, Callable[[], None]]:
            threads.append(threading.Thread(target=return_memory, args=(torch.device("cuda"),)))
            threads[0].start()
            early.append(given.wait(0.1))
            return super().__call__(body, warm)

    Graphs(Watched()).run("key", lambda: ())
    threads[0].join(5)
    assert early == [False]
    assert given.is_set()


def test_a_capture_that_fails_once_is_made_again() -> None:
    """Another library in the process may have looked at the device meanwhile."""

    class Disturbed(ScriptedCapture):
        def __call__(self, body: Callable[[], Any], warm: bool = True) -> tuple[Any, Callable[[], None]]:
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            return super().__call__(body, warm)

    graphs = Graphs(Disturbed(RuntimeError("operation would make the legacy stream depend on a capturing stream")))
    graphs.run("key", lambda: ())
    assert graphs.enabled
    assert "key" in graphs


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What TorchCapture uses of torch.cuda; `fail`: the capture's end raises, as torch's does, before it goes back."""
    state = SimpleNamespace(current="main", pools=0, used=[], fail=False)

    class Stream:
        def wait_stream(self, _other: object) -> None:
            pass

    main, side = Stream(), Stream()
    state.current, state.main = main, main

    def handle() -> int:
        state.pools += 1
        return int(state.pools)

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, state.current = state.current, stream
        try:
            yield
        finally:
            state.current = before

    @contextlib.contextmanager
    def graph(_graph: object, *, pool: int, stream: Stream | None = None, **_: Any) -> Iterator[None]:
        before, state.current = state.current, stream
        state.used.append(pool)
        yield
        if state.fail:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        state.current = before

    fakes: dict[str, Any] = {
        "graph_pool_handle": handle,
        "Stream": lambda *_: side,
        "current_stream": lambda *_: state.current,
        "set_stream": lambda stream: setattr(state, "current", stream),
        "device": lambda _device: contextlib.nullcontext(),
        "stream": on,
        "graph": graph,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return state


def test_a_capture_that_fails_leaves_the_threads_stream(fake_cuda: SimpleNamespace) -> None:
    graphs = Graphs(TorchCapture(torch.device("cuda")))
    graphs.run("one", lambda: ())
    assert fake_cuda.current is fake_cuda.main
    fake_cuda.fail = True
    graphs.run("two", lambda: ())
    assert not graphs.enabled
    assert fake_cuda.current is fake_cuda.main


def test_forgotten_graphs_leave_their_pool_behind(fake_cuda: SimpleNamespace) -> None:
    """torch refuses to capture into a pool whose graphs are gone while somebody holds a tensor of it."""
    graphs = Graphs(TorchCapture(torch.device("cuda")))
    graphs.run("one", lambda: ())
    graphs.run("two", lambda: ())
    graphs.forget()
    graphs.run("one", lambda: ())
    assert fake_cuda.used[0] == fake_cuda.used[1] != fake_cuda.used[2]
