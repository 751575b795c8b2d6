"""Times, where a device is still at work when the host goes on: each is that of the work it names."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drafts.base import Proposal
from drafts.device_proposal import DeviceProposal
from drafts.ngram import NgramDraft, NgramSession
from drafts.standalone import StandaloneDraft, StandaloneSession
from edgespec.decoding import halves
from edgespec.decoding.counts import Counts
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.session import Session
from edgespec.models.base import ForwardOutput, Part
from edgespec.models.cuda import decoder as cuda_decoder
from edgespec.models.reference.decoder import TorchDecoder
from edgespec.models.tokenizer import load_tokenizer
from edgespec.models.weights.opening import open_weights
from edgespec.serving import batch
from edgespec.serving.batch import BatchRunner
from predictor.planner import Candidate, FixedPlanner, Plan
from tests.models.cuda.common import TOKENS, load


def session_of(folders: list[Path], drafts: list[Any], planner: FixedPlanner, **options: Any) -> Session:
    return Session(load(folders[0]), load_tokenizer(folders[0]), drafts, planner=planner, eos_ids=(), **options)


def test_a_prefill_is_counted_when_it_is_over(
    folders: list[Path], looked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each of its pieces is waited for: so that it ends after one if it is cancelled."""
    seen: list[int] = []
    counted = Counts.prefilled

    def watched(self: Counts, *stamps: Any, **more: Any) -> None:
        seen.append(len(looked))
        counted(self, *stamps, **more)

    monkeypatch.setattr(Counts, "prefilled", watched)
    session = session_of(folders, [], FixedPlanner(None, 0), chunk=4)
    Generation(session, TOKENS[:10], SamplingParams(max_new_tokens=3)).step()
    assert seen == [3]


def test_reading_up_is_over_when_it_is_timed(folders: list[Path], looked: list[int]) -> None:
    opened = StandaloneDraft("d", load(folders[1]), 280).open()
    assert opened.catch_up(TOKENS[:30], 20) == 9
    assert len(looked) == 1
    assert opened.catch_up(TOKENS[:30], 20) == 0
    assert len(looked) == 2


class Watch:
    """Two events, as on a device."""

    seconds = 1000.0

    def __init__(self, log: list[str], _device: object) -> None:
        self._log = log
        log.append("begin")

    def stop(self) -> None:
        self._log.append("stop")


def test_what_a_draft_reads_on_the_way_is_its_own_time(
    folders: list[Path], looked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the target's, which is launched behind it. Nobody waits for it."""
    draft = StandaloneDraft("d", load(folders[1]), 280)
    session = session_of(folders, [draft], FixedPlanner("d", 2))
    generation = Generation(session, TOKENS[:10], SamplingParams(max_new_tokens=8))
    generation.step()
    log: list[str] = []
    decoder: Any = draft.decoder
    forward = decoder.forward

    def read(*arguments: Any, **more: Any) -> Any:
        log.append("read")
        return forward(*arguments, **more)

    monkeypatch.setattr(decoder, "forward", read)
    monkeypatch.setattr(cuda_decoder, "Stopwatch", partial(Watch, log))
    looked.clear()
    with session.leased() as resident:
        found = generation.look()
        prepared = generation.prepare(found, generation.plan(found))
        assert log == ["begin", "read", "stop"]
        assert not looked
        seen = generation.finish(prepared, session.verify(prepared.proposal.guesses), resident)
    assert seen.observation.draft_seconds == pytest.approx(Watch.seconds)
    assert len(looked) == 1


class Comparing(FixedPlanner):
    """Lookup is compared in every round."""

    def __init__(self) -> None:
        super().__init__("d", 2)
        self.compared: list[str] = []

    def shadows(self, plan: Plan, candidates: Any) -> list[Candidate]:
        return [candidate for candidate in candidates if candidate.free]

    def credit(self, candidate: Candidate, proposed: int, accepted: int, **measured: Any) -> None:
        self.compared.append(candidate.name)


@pytest.mark.parametrize("on_device", [True, False])
def test_lookup_is_done_while_a_device_drafts(
    on_device: bool, folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where drafts run on the host it comes first, as ever."""
    order: list[str] = []
    for kind, name in ((NgramSession, "lookup"), (StandaloneSession, "draft")):

        def propose(self: Any, *arguments: Any, made: Any = kind.propose, name: str = name, **more: Any) -> Any:
            order.append(name)
            return made(self, *arguments, **more)

        monkeypatch.setattr(kind, "propose", propose)
    decoder: Any = load(folders[1])
    if not on_device:
        with open_weights(folders[1]) as weights:
            decoder = TorchDecoder(weights)
    planner = Comparing()
    session = session_of(folders, [StandaloneDraft("d", decoder, 280), NgramDraft(name="lookup")], planner)
    generation = Generation(session, TOKENS[:10], SamplingParams(max_new_tokens=20))
    generation.step()
    generation.step()
    assert order == (["draft", "lookup"] if on_device else ["lookup", "draft"])
    assert planner.compared == ["lookup"]


class Late:
    """Logits of a step that is over at half a second, of which it took a part."""

    def __init__(self, clock: list[int]) -> None:
        self._clock = clock
        self.seconds = 0.2

    def wait(self) -> Late:
        self._clock[0] = 500_000_000
        return self


def test_a_batch_counts_the_blocks_that_its_forward_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    for module in (batch, halves):
        monkeypatch.setattr(module, "perf_counter_ns", lambda: clock[0])
    monkeypatch.setattr(BatchRunner, "_take", lambda *_: None)
    decoder: Any = SimpleNamespace(
        batch_slots=4,
        forward_batch=lambda parts: [ForwardOutput(Late(clock)) for _ in parts],  # type: ignore[arg-type]
    )
    runner, cache = BatchRunner(decoder, *[None] * 2), None  # type: ignore[arg-type]
    guesses: Any = SimpleNamespace(on_device=[1, 2])
    for proposal, waited in ((DeviceProposal(guesses, 9), 0.3), (Proposal([1], [None]), 0.0)):
        clock[0] = 0
        active: Any = SimpleNamespace(over=False)
        prepared: Any = SimpleNamespace(proposal=proposal)
        turn = batch._Turn(active, prepared=prepared, part=Part([1], cache))  # type: ignore[arg-type]
        assert runner._judge([turn], ExitStack()) == pytest.approx((0.2, waited))
