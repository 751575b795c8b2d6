"""Head drafts and whole engines: what is replayed is what a live conversation does, hidden states included."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafts.evaluate import LookupFirst, first_token, score
from drafts.head import HeadDraft
from drafts.ngram import NgramDraft
from drafts.recording import record
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.session import Session
from edgespec.models.tokenizer import load_tokenizer
from predictor.planner import FixedPlanner
from tests.support.engines import ENGINES, load
from tests.support.tiny import write_tiny
from tests.support.tiny_head import random_head, tiny_spec

GAMMAS = (1, 2, 3, 5)
LONG = 40  # longer than the head's window


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), head_dim=16, scale=0.2)


def head(target, answer, **changes) -> HeadDraft:
    """A random head that can only propose tokens of the answer, so that some of its guesses are right."""
    vocab = sorted(set(answer))
    spec = tiny_spec(vocab_rows=len(vocab), **changes)
    return HeadDraft("head", spec, random_head(spec, vocab), target, threads=1)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_head_does_what_it_does_live(folder: Path, engine: str) -> None:
    target, tokenizer = load(folder, engine), load_tokenizer(folder)
    accepted = 0
    for prompt in ([7, 8, 9, 10, 11], [20 + i % 7 * (i % 3) for i in range(LONG)]):
        recorded = record(target, prompt, 48, token_count=280, window=24)
        draft = head(target, recorded.answer)
        for made in (draft, LookupFirst(draft)):
            for gamma in GAMMAS:
                drafts = [draft] if made is draft else [NgramDraft(), draft]
                session = Session(target, tokenizer, drafts, planner=FixedPlanner(None, gamma), eos_ids=())
                live = Generation(session, prompt, SamplingParams(max_new_tokens=48))
                list(live.deltas())
                found, stats = score(made, recorded, gamma), live.stats
                assert live.result.token_ids == recorded.answer
                assert (found.rounds, found.accepted) == (stats.rounds, stats.accepted_tokens)
                by_place = [hit / tried for hit, tried in zip(found.hits, found.tries) if tried]
                assert by_place == stats.acceptance_by_position
                assert all(status.active for status in session.statuses.values())
                accepted += found.accepted if made is draft else 0
    assert accepted > 0  # else this would say nothing about where rounds begin


def test_a_head_tells_its_confidence_and_stops_by_it(folder: Path) -> None:
    target = load(folder, "cpu")
    recorded = record(target, [7, 8, 9, 10, 11], 32, token_count=280)
    draft = head(target, recorded.answer)
    found = score(draft, recorded, 3)
    assert len(found.pairs) == sum(found.tries)
    assert sum(hit for _, hit in found.pairs) == found.accepted
    assert all(0 < confidence <= 1 for confidence, _ in found.pairs)
    stopped = score(draft, recorded, 3, floor=0.9)
    assert stopped.proposed < found.proposed
    assert stopped.short > 0


def test_the_window_that_is_recorded_is_enough(folder: Path) -> None:
    """States before the head's window change nothing."""
    target = load(folder, "cpu")
    prompt = [20 + i % 7 * (i % 3) for i in range(LONG)]
    whole = record(target, prompt, 32, token_count=280)
    cut = record(target, prompt, 32, token_count=280, window=24)
    assert (whole.start, cut.start) == (0, LONG - 24)
    draft = head(target, whole.answer)
    one, other = score(draft, whole, 3), score(draft, cut, 3)
    one.seconds = other.seconds = 0.0
    assert one == other
    assert first_token(draft, whole) == first_token(draft, cut)
