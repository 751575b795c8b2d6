"""What a head draft refuses: weights, targets and states that do not fit it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from drafts.head import HeadDraft
from drafts.states import HiddenStates
from edgespec.errors import DraftError, ModelError
from tests.support.engines import load
from tests.support.head_talk import BEST, SPEC, TOKENS, make, toy, vocab_of
from tests.support.scripted import ToyDecoder
from tests.support.tiny import write_tiny
from tests.support.tiny_head import random_head, tiny_spec


def test_what_does_not_fit_the_target_is_refused() -> None:
    target, weights = toy(), random_head(SPEC, vocab_of(SPEC))
    with pytest.raises(DraftError, match=r"states of size 32, but the target's have 16"):
        HeadDraft("x", SPEC, weights, ToyDecoder(TOKENS))
    with pytest.raises(DraftError, match=r"proposes token \d+, but the target has only 60"):
        HeadDraft("x", SPEC, weights, ToyDecoder(60, hidden=32))
    with pytest.raises(DraftError, match="another architecture"):
        HeadDraft("x", tiny_spec(window=9, vocab_rows=64), weights, target)
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(DraftError, match="temperature"):
            HeadDraft("x", SPEC, weights, target, temperature=temperature)


def test_weights_that_are_no_numbers_are_refused() -> None:
    weights = random_head(SPEC, vocab_of(SPEC))
    weights.matrices["down"].scale[2, 1] = np.nan
    with pytest.raises(DraftError, match=r"draft x: tensor down.scale holds NaN"):
        HeadDraft("x", SPEC, weights, toy())


def test_a_session_needs_the_targets_states() -> None:
    draft, _ = make()
    for states in (None, HiddenStates(16)):
        with pytest.raises(DraftError, match="needs the target's hidden states"):
            draft.open(states)
    wide = HiddenStates(32, 2)
    draft.open(wide)
    assert wide.window == draft.window == 8


def test_a_closed_target_is_named(tmp_path: Path) -> None:
    target = load(write_tiny(tmp_path, head_dim=16), "cpu")
    draft = HeadDraft("tiny", tiny_spec(), random_head(), target, threads=1)
    states = HiddenStates(32)
    states.write(0, np.ones((3, 32), np.float32))
    target.close()
    with pytest.raises(ModelError, match="closed"):
        draft.open(states).propose([5, 6, 7, 8], 2, BEST)
