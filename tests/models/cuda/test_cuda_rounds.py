"""Rounds whose guesses stay on the device until the target has judged them: always the plain text."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from drafts.device_proposal import DeviceProposal
from drafts.ngram import NgramDraft
from drafts.standalone import StandaloneDraft
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.session import Session
from edgespec.errors import ModelError
from edgespec.models.reference.decoder import TorchDecoder
from edgespec.models.tokenizer import load_tokenizer
from edgespec.models.weights.opening import open_weights
from predictor.planner import FixedPlanner, Plan
from tests.models.cuda.common import TOKENS, answer, load


@pytest.fixture(scope="module")
def plain(folders: list[Path]) -> list[int]:
    """The float32 reference's own text."""
    with open_weights(folders[0]) as weights:
        decoder: Any = TorchDecoder(weights)
    return list(answer(decoder, folders[0], [], 0).result.token_ids)


def drafts_of(folders: list[Path], *names: str) -> list[Any]:
    """Of each model one, by name: the target's "equal" and a "stranger"."""
    return [StandaloneDraft(name, load(folders[name != "equal"]), 280) for name in names]


class Scripted(FixedPlanner):
    """Plans that go round."""

    def __init__(self, *plans: Plan) -> None:
        super().__init__(plans[0].draft, 8)
        self._plans = itertools.cycle(plans)

    def plan(self, *_: Any, **__: Any) -> Plan:
        return next(self._plans)


def run(session: Session, prompt: list[int], **params: Any) -> list[int]:
    generation = Generation(session, prompt, SamplingParams(**{"max_new_tokens": 40, **params}))
    while generation.step():
        pass
    return list(generation.result.token_ids)


@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 5, 6, 7, 8, 15, 30])
def test_any_gamma(gamma: int, folders: list[Path], plain: list[int], caplog: pytest.LogCaptureFixture) -> None:
    for name in ("equal", "stranger"):
        made = answer(load(folders[0]), folders[0], drafts_of(folders, name), gamma)
        assert list(made.result.token_ids) == plain
        rate = made.stats.acceptance_rate
        assert rate is not None
        assert rate == 1.0 if name == "equal" else rate < 1.0
    assert not caplog.records  # no draft failed


def test_guesses_stay_on_the_device(folders: list[Path], looked: list[int]) -> None:
    """Until the target has answered: then they come with its verdict. A block is one launch, as is its judgement."""
    target, (draft,) = load(folders[0]), drafts_of(folders, "equal")
    session = Session(target, load_tokenizer(folders[0]), [draft], planner=FixedPlanner("equal", 3), eos_ids=())
    generation = Generation(session, TOKENS[:10], SamplingParams(max_new_tokens=40))
    for _ in range(4):
        generation.step()
    looked.clear()
    replayed = [each.graphs._capture.replayed for each in (target, draft.decoder)]  # type: ignore[union-attr]
    with session.leased() as resident:
        found = generation.look()
        prepared = generation.prepare(found, generation.plan(found))
        assert isinstance(prepared.proposal, DeviceProposal)
        assert len(prepared.proposal) == 3
        logits = session.verify(prepared.proposal.guesses)
        assert not looked
        seen = generation.finish(prepared, logits, resident)
    assert len(looked) == 1
    assert seen.observation.accepted == seen.observation.drafted == 3
    assert [each.graphs._capture.replayed for each in (target, draft.decoder)] == [n + 1 for n in replayed]  # type: ignore[union-attr]


def test_cuts_inside_a_block(folders: list[Path], plain: list[int]) -> None:
    """End tokens and limits, at every place; afterwards the session goes on as a cold one would."""
    target, tokenizer = load(folders[0]), load_tokenizer(folders[0])
    drafts = drafts_of(folders, "equal")
    longer = run(Session(target, tokenizer, [], eos_ids=()), TOKENS[:10] + plain[:4] + TOKENS[10:14])
    for place in range(1, 9):
        for limit, eos in ((place, ()), (40, (plain[place],))):
            session = Session(target, tokenizer, drafts, planner=FixedPlanner("equal", 5), eos_ids=eos)
            wanted = plain[:limit] if not eos else plain[: plain.index(plain[place]) + 1]
            assert run(session, TOKENS[:10], max_new_tokens=limit) == wanted
            assert session.tokens == TOKENS[:10] + wanted
            session.eos_ids = frozenset()
            assert run(session, TOKENS[:10] + plain[:4] + TOKENS[10:14]) == longer


def test_drafts_that_take_turns(folders: list[Path], plain: list[int]) -> None:
    """Blocks of two decoders, plain rounds and lookup between them; each reads much of what it missed."""
    drafts = [*drafts_of(folders, "equal", "stranger"), NgramDraft(name="lookup")]
    plans = [("equal", 3), ("stranger", 2), (None, 0), ("lookup", 4), ("equal", 1), ("equal", 8), *[(None, 0)] * 6]
    planner = Scripted(*itertools.starmap(Plan, plans))
    session = Session(load(folders[0]), load_tokenizer(folders[0]), drafts, planner=planner, eos_ids=())
    assert run(session, TOKENS[:10]) == plain
    assert run(session, TOKENS[:10]) == plain  # from the beginning


@pytest.mark.parametrize("gamma", [1, 4])
def test_several_texts_of_one_draft_in_one_forward(folders: list[Path], gamma: int, looked: list[int]) -> None:
    """Each has its own guesses, though the draft's blocks were made one after the other; and there is one look."""
    target, tokenizer, (draft,) = load(folders[0]), load_tokenizer(folders[0]), drafts_of(folders, "stranger")
    with torch.inference_mode():
        target.model.head.parts[0][280:] = 0.0  # rows that are no tokens: where one wins, the host has to look at rows
    prompts = [TOKENS[:10], TOKENS[5:25], TOKENS[30:37]]
    wanted = [run(Session(target, tokenizer, [], eos_ids=()), prompt) for prompt in prompts]
    target.prepare_batch(4)
    planner = FixedPlanner("stranger", gamma)
    sessions = [Session(target, tokenizer, [draft], planner=planner, eos_ids=()) for _ in prompts]
    generations = [
        Generation(session, prompt, SamplingParams(max_new_tokens=40)) for session, prompt in zip(sessions, prompts)
    ]
    for generation in generations:
        generation.step()
    rounds = accepted = 0
    while running := [generation for generation in generations if not generation.over]:
        looked.clear()
        prepared = []
        for generation in running:
            found = generation.look()
            prepared.append(generation.prepare(found, generation.plan(found)))
        parts = [g.session.ask_verify(each.proposal.guesses) for g, each in zip(running, prepared)]
        for generation, each, output in zip(running, prepared, target.forward_batch(parts)):
            generation.session.receive(output)
            seen = generation.finish(each, output.logits, frozenset({"stranger"}))
            accepted += seen.observation.accepted
        rounds += 1
        assert len(looked) == 1
    assert [list(generation.result.token_ids) for generation in generations] == wanted
    assert accepted > 0
    assert rounds > 5


# What goes wrong


def test_a_damaged_draft_is_given_up(folders: list[Path], plain: list[int], caplog: pytest.LogCaptureFixture) -> None:
    (draft,) = drafts_of(folders, "equal")
    with torch.inference_mode():
        draft.decoder.model.norm.fill_(float("nan"))
    made = answer(load(folders[0]), folders[0], [draft], 3)
    assert list(made.result.token_ids) == plain
    assert "InvalidLogits" in (made.session.statuses["equal"].reason or "")
    assert len([record for record in caplog.records if "equal failed" in record.getMessage()]) == 1
    assert made.stats.acceptance_rate in (None, 0.0)


def test_a_block_that_is_damaged_further_on(folders: list[Path], plain: list[int]) -> None:
    """The guesses before it are as good as any; those after it were never made."""
    (draft,) = drafts_of(folders, "equal")
    bad = plain[12]
    with torch.inference_mode():
        draft.decoder.model.embedding[bad] = float("nan")
    target = load(folders[0])
    made = answer(target, folders[0], [draft], 4)
    assert list(made.result.token_ids) == plain
    assert made.stats.acceptance_rate is not None


def test_a_damaged_target_is_an_error(folders: list[Path]) -> None:
    target, (draft,) = load(folders[0]), drafts_of(folders, "equal")
    session = Session(target, load_tokenizer(folders[0]), [draft], planner=FixedPlanner("equal", 3), eos_ids=())
    generation = Generation(session, TOKENS[:10], SamplingParams(max_new_tokens=40))
    for _ in range(3):
        generation.step()
    before = generation.result.token_ids
    with torch.inference_mode():
        target.model.norm.fill_(float("nan"))
    with pytest.raises(ModelError, match="NaN"):
        generation.step()
    assert generation.result.token_ids == before


def test_rows_that_are_no_tokens_are_the_hosts_business(folders: list[Path], plain: list[int]) -> None:
    """A padding row that wins at places: the rule on the host masks it, and the text is the plain one."""
    target = load(folders[0])
    with torch.inference_mode():
        rows = target.model.head.parts[0]
        rows[285] = rows[plain[5]] * 3  # type: ignore[index]
    logits: Any = target.forward(TOKENS[:10] + plain[:5], target.new_cache(), logits=1).logits
    assert logits.best(0) == 285
    planner = FixedPlanner("equal", 3)
    session = Session(target, load_tokenizer(folders[0]), drafts_of(folders, "equal"), planner=planner, eos_ids=())
    assert run(session, TOKENS[:10]) == plain


def test_a_round_that_failed_leaves_no_trace(folders: list[Path], plain: list[int]) -> None:
    """The target fails after the draft has guessed: nobody knows those guesses, and the next text is a cold one's."""
    target, (draft,) = load(folders[0]), drafts_of(folders, "equal")
    session = Session(target, load_tokenizer(folders[0]), [draft], planner=FixedPlanner("equal", 3), eos_ids=())
    forward, calls = target.forward_batch, itertools.count()

    def fails(parts: Any) -> Any:
        if next(calls) == 4:
            raise ValueError("for once")
        return forward(parts)

    target.forward_batch = fails  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="for once"):
        run(session, TOKENS[:10])
    assert run(session, TOKENS[:10]) == plain


def test_a_target_elsewhere_gets_tokens(folders: list[Path], plain: list[int]) -> None:
    with open_weights(folders[0]) as weights:
        decoder: Any = TorchDecoder(weights)
    made = answer(decoder, folders[0], drafts_of(folders, "equal"), 3)
    assert list(made.result.token_ids) == plain
    assert made.stats.acceptance_rate == 1.0


@pytest.mark.parametrize("params", [{"repetition_penalty": 1.3}, {"logprobs": 2}, {"min_new_tokens": 9}])
def test_what_needs_rows_gets_them(folders: list[Path], params: dict[str, Any]) -> None:
    target, tokenizer = load(folders[0]), load_tokenizer(folders[0])
    wanted = run(Session(target, tokenizer, [], eos_ids=(5,)), TOKENS[:10], **params)
    drafts = drafts_of(folders, "stranger")
    session = Session(target, tokenizer, drafts, planner=FixedPlanner("stranger", 3), eos_ids=(5,))
    assert run(session, TOKENS[:10], **params) == wanted
