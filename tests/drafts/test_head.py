"""The head draft: its guesses are the architecture's, whatever the conversation went through."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafts import head as head_module
from drafts import head_session
from drafts.base import FloatArray, InvalidLogits, Proposal
from drafts.head import HeadDraft, HeadSpec, HeadWeights
from drafts.head_session import HeadSession
from drafts.states import HiddenStates
from edgespec.errors import DraftError, ModelError
from edgespec.models.base import Decoder
from edgespec.models.onnx import linear as onnx_linear
from tests.decoding.test_rollback import _Trip
from tests.support.engines import ENGINES, load
from tests.support.head_reference import HeadReference, Step
from tests.support.scripted import ToyDecoder
from tests.support.tiny import write_tiny
from tests.support.tiny_head import random_head, tiny_spec

TOKENS = 120
SPEC = tiny_spec(window=8, vocab_rows=64)


class Best:
    """The choice of a greedy request without any processor."""

    argmax = True

    def __call__(self, row: FloatArray, proposed: Sequence[int]) -> tuple[int, FloatArray | None]:
        raise AssertionError("a draft takes its own argmax")


BEST = Best()


class Talk:
    """A conversation with random hidden states: what a session knows, and what the reference says to it."""

    def __init__(self, draft: HeadDraft, target: Decoder, weights: HeadWeights, temperature: float = 1.0) -> None:
        self._parts = target, weights, temperature
        self.vocab = weights.vocab
        self.states = HiddenStates(draft.spec.hidden_size, draft.window)
        self.session = draft.open(self.states)
        self.rng = np.random.default_rng(7)
        self.rows = target.spec.vocab_size
        self.tokens: list[int] = []
        self.hidden: dict[int, FloatArray] = {}

    @cached_property
    def reference(self) -> HeadReference:
        target, weights, temperature = self._parts
        every = range(self.rows)
        return HeadReference(weights, target.embed(every), target.head_rows(every), temperature)

    def say(self, count: int, *, seen: bool = True) -> None:
        """`count` more tokens; the target has seen all but the last of the text, or (not `seen`) nobody read along."""
        begin = max(len(self.tokens) - 1, 0)
        self.tokens += self.rng.integers(0, self.rows, count).tolist()
        new = self.rng.standard_normal((len(self.tokens) - 1 - begin, self.states.hidden_size)).astype(np.float32)
        self.hidden.update(zip(range(begin, len(self.tokens) - 1), new))
        if seen:
            self.states.write(begin, new)

    def cut(self, length: int) -> None:
        del self.tokens[length:]
        self.session.crop(length)
        self.states.crop(length - 1)

    def expected(self, gamma: int, follow: Sequence[int] | None = None) -> list[Step]:
        """The guesses after the text as it is; call it after `propose`."""
        window, end = self.reference.spec.window, len(self.tokens) - 1
        # Rows that the session read in time count even if their states are gone by now.
        assert self.session.begin <= max(self.states.begin, end - window)
        first = max(self.session.begin, end - window)
        hidden = np.array([self.hidden[position] for position in range(first, end)])
        return self.reference.propose(self.tokens, hidden, first, gamma, follow)

    def error(self, proposal: Proposal, steps: Sequence[Step]) -> float:
        """The largest difference of a confidence; 1 for another token."""
        assert len(proposal.tokens) == len(proposal.confidences) == len(proposal.rows) == len(steps)
        same = [token == self.vocab[step.place] for token, step in zip(proposal.tokens, steps)]
        differences = [abs(c - step.confidence) for c, step in zip(proposal.confidences, steps)]
        return max(differences) if all(same) else 1.0


@pytest.fixture
def float_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are not rounded to 8 bits: slow, and comparable digit by digit."""
    monkeypatch.setattr(onnx_linear, "_INT8_ACTIVATIONS", 0)


def toy() -> ToyDecoder:
    return ToyDecoder(TOKENS, hidden=32, seed=2)


def vocab_of(spec: HeadSpec, rows: int = TOKENS) -> list[int]:
    return sorted(random.Random(1).sample(range(rows), spec.vocab_rows))


def make(
    spec: HeadSpec = SPEC, target: Decoder | None = None, seed: int = 3, temperature: float = 1.3
) -> tuple[HeadDraft, Talk]:
    target = target or toy()
    weights = random_head(spec, vocab_of(spec), seed)
    draft = HeadDraft("tiny", spec, weights, target, temperature=temperature, threads=1)
    return draft, Talk(draft, target, weights, temperature)


# What it proposes


@pytest.mark.parametrize("window", [1, 5, 8, 24])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.usefixtures("float_products")
def test_any_history_of_rounds_absences_and_cuts_gives_the_architectures_guesses(window: int, seed: int) -> None:
    rng = random.Random(100 * window + seed)
    _draft, talk = make(tiny_spec(window=window, vocab_rows=64))
    talk.say(rng.randrange(2, 40))
    for _ in range(100):
        gamma = rng.randrange(1, 5)
        assert talk.error(talk.session.propose(talk.tokens, gamma, BEST), talk.expected(gamma)) < 1e-4
        kind = rng.random()
        if kind < 0.1:
            talk.cut(rng.randrange(max(2, len(talk.tokens) - 12), len(talk.tokens) + 1))
        elif kind < 0.15:
            talk.say(rng.randrange(60, 120))  # an absence, longer than the window and the slack of the buffers
        elif kind < 0.9:
            talk.say(rng.randrange(1, 6))
        if talk.states.begin >= len(talk.tokens) - 1:  # cut into what had been dropped
            assert talk.session.level(talk.tokens) == 0
            talk.say(3)


@pytest.mark.usefixtures("float_products")
def test_a_cut_far_into_the_past_leaves_a_shorter_context() -> None:
    _, talk = make()
    for _ in range(60):
        talk.say(5)
        talk.session.propose(talk.tokens, 2, BEST)
    talk.cut(talk.states.begin + 4)
    assert len(talk.states) == 3 < SPEC.window
    assert talk.error(talk.session.propose(talk.tokens, 3, BEST), talk.expected(3)) < 1e-4


@pytest.mark.usefixtures("float_products")
def test_rows_that_nobody_read_are_not_missed() -> None:
    _, talk = make()
    talk.say(6)
    talk.session.propose(talk.tokens, 2, BEST)
    talk.say(4, seen=False)
    assert talk.session.level(talk.tokens) == 0
    assert talk.session.propose(talk.tokens, 3, BEST).tokens == []
    talk.say(2)
    assert talk.states.begin > 6
    assert talk.error(talk.session.propose(talk.tokens, 3, BEST), talk.expected(3)) < 1e-4


@pytest.mark.usefixtures("float_products")
def test_far_positions() -> None:
    """Beyond the first rotary table."""
    _, talk = make()
    talk.tokens = [5] * 5000
    talk.hidden[4999] = np.ones(32, np.float32)
    for _ in range(3):
        talk.say(3)
        assert talk.error(talk.session.propose(talk.tokens, 3, BEST), talk.expected(3)) < 1e-3


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.usefixtures("float_products")
def test_the_targets_own_states_and_tables_on_both_engines(tmp_path: Path, engine: str, tied: bool) -> None:
    target = load(write_tiny(tmp_path, head_dim=16, tie_word_embeddings=tied), engine)
    spec = tiny_spec(window=8)
    weights = random_head(spec, seed=4)
    talk = Talk(HeadDraft("tiny", spec, weights, target, threads=1), target, weights)
    tokens = random.Random(5).choices(range(280), k=30)
    hidden = np.array(target.forward(tokens, target.new_cache(), logits=0, hidden=True).hidden)
    talk.tokens, talk.hidden = tokens, dict(enumerate(hidden))
    talk.states.write(0, hidden[:-1])
    assert talk.error(talk.session.propose(tokens, 4, BEST), talk.expected(4)) < 1e-4


@pytest.mark.parametrize("shape", [(2, 1, 16), (4, 4, 16), (2, 2, 48), (6, 2, 16)])
@pytest.mark.usefixtures("float_products")
def test_other_numbers_of_heads(shape: tuple[int, int, int]) -> None:
    heads, kv_heads, width = shape
    spec = tiny_spec(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=width, intermediate_size=96, rope_theta=500.0, window=6
    )
    _, talk = make(spec)
    for _ in range(4):
        talk.say(5)
        assert talk.error(talk.session.propose(talk.tokens, 3, BEST), talk.expected(3)) < 1e-4


def test_with_rounded_activations_guesses_differ_in_near_ties_only() -> None:
    _, talk = make()
    errors, same = [], []
    for _ in range(50):
        talk.say(3)
        proposal = talk.session.propose(talk.tokens, 3, BEST)
        for token, confidence, step in zip(
            proposal.tokens, proposal.confidences, talk.expected(3, proposal.tokens), strict=True
        ):
            errors.append(abs(confidence - step.confidence))
            same.append(token == talk.vocab[step.place])
            assert same[-1] or step.margin < 0.1 * np.ptp(step.logits)
    assert np.mean(errors) < 0.05
    assert np.mean(same) > 0.9


SABOTAGE: dict[str, Callable[[HeadReference], None]] = {
    "a window that is too long": lambda r: setattr(r, "spec", replace(r.spec, window=9)),
    "a window that is too short": lambda r: setattr(r, "spec", replace(r.spec, window=7)),
    "other rotary frequencies": lambda r: setattr(r, "spec", replace(r.spec, rope_theta=9000.0)),
    "another epsilon": lambda r: setattr(r, "spec", replace(r.spec, rms_norm_eps=0.1)),
    "another temperature": lambda r: setattr(r, "temperature", 1.31),
    "norms the wrong way round": lambda r: setattr(
        r, "vectors", {**r.vectors, "embed_norm": r.vectors["hidden_norm"], "hidden_norm": r.vectors["embed_norm"]}
    ),
}


@pytest.mark.parametrize("fault", SABOTAGE)
@pytest.mark.usefixtures("float_products")
def test_the_comparison_can_fail(fault: str) -> None:
    _, talk = make()
    talk.say(20)
    proposal = talk.session.propose(talk.tokens, 3, BEST)
    assert talk.error(proposal, talk.expected(3)) < 1e-4
    SABOTAGE[fault](talk.reference)
    window = 8 + (fault == "a window that is too long")
    hidden = np.array([talk.hidden[position] for position in range(19 - window, 19)])
    assert talk.error(proposal, talk.reference.propose(talk.tokens, hidden, 19 - window, 3)) > 2e-4


# Confidence


@pytest.mark.usefixtures("float_products")
def test_temperature_changes_confidences_and_no_token() -> None:
    (_, cool), (_, warm) = make(temperature=0.5), make(temperature=3.0)
    for talk in (cool, warm):
        talk.say(10)
    first, second = (talk.session.propose(talk.tokens, 4, BEST) for talk in (cool, warm))
    assert first.tokens == second.tokens
    assert all(a > b for a, b in zip(first.confidences, second.confidences))


@pytest.mark.usefixtures("float_products")
def test_the_block_ends_before_the_product_of_confidences_falls_below_the_floor() -> None:
    _, talk = make(temperature=0.3)
    lengths = set()
    for _ in range(30):
        talk.say(2)
        whole = talk.session.propose(talk.tokens, 5, BEST)
        for floor in (0.0, 0.01, 0.1, 0.3, 0.9):
            reached = np.cumprod(whole.confidences)
            if np.abs(reached - floor).min() < 2e-3:
                continue  # the last bits would decide
            kept = int((reached >= floor).sum())
            cut = talk.session.propose(talk.tokens, 5, BEST, floor=floor)
            assert cut.tokens == whole.tokens[:kept]
            assert cut.confidences == pytest.approx(whole.confidences[:kept], abs=1e-3)
            lengths.add(kept)
    assert len(lengths) > 3


def test_asking_again_changes_nothing() -> None:
    _, talk = make()
    talk.say(12)
    first = talk.session.propose(talk.tokens, 4, BEST)
    again = talk.session.propose(talk.tokens, 4, BEST)
    assert again.tokens == first.tokens
    assert again.confidences == pytest.approx(first.confidences, abs=1e-3)  # one row is computed by another kernel
    assert talk.session.propose(talk.tokens, 2, BEST).tokens == first.tokens[:2]


# Where a request picks the token


@pytest.mark.usefixtures("float_products")
def test_rows_are_handed_over_and_what_was_picked_is_followed() -> None:
    _, talk = make()
    rng = random.Random(0)
    for _ in range(20):
        talk.say(3)
        seen: list[FloatArray] = []

        def choose(row: FloatArray, proposed: Sequence[int], seen: list[FloatArray] = seen) -> tuple[int, Any]:
            assert len(proposed) == len(seen)
            seen.append(row.copy())
            return rng.randrange(TOKENS), row.copy()  # also tokens that it cannot propose itself

        proposal = talk.session.propose(talk.tokens, 4, choose)  # type: ignore[arg-type]
        steps = talk.expected(4, proposal.tokens)
        for row, step, confidence in zip(seen, steps, proposal.confidences, strict=True):
            assert row.shape == (TOKENS,)
            assert np.abs(row[talk.vocab] - step.logits).max() < 1e-3
            assert np.isneginf(np.delete(row, talk.vocab)).all()
            assert confidence == pytest.approx(step.confidence, abs=1e-4)


def test_a_floor_looks_at_the_law_and_not_at_the_token_that_was_picked() -> None:
    _, talk = make(temperature=0.3)
    talk.say(12)
    whole = talk.session.propose(talk.tokens, 1, BEST)
    for token in range(0, TOKENS, 7):
        proposal = talk.session.propose(
            talk.tokens, 1, lambda row, proposed, token=token: (token, None), floor=whole.confidences[0] * 0.999
        )
        assert proposal.tokens == [token]
        assert proposal.confidences == pytest.approx(whole.confidences, abs=1e-3)


# What it has to go on


def test_it_can_run_when_there_is_a_row_and_the_last_token_is_the_only_one_unseen() -> None:
    _draft, talk = make()
    assert talk.session.level([]) == talk.session.level([5]) == 0
    talk.say(1)
    assert talk.session.level(talk.tokens) == 0
    assert talk.session.propose(talk.tokens, 3, BEST) == Proposal()
    talk.say(1)
    assert talk.session.level(talk.tokens) == 1
    assert len(talk.session.propose(talk.tokens, 3, BEST)) == 3
    assert talk.session.level([*talk.tokens, 5]) == 0
    talk.states.crop(0)
    assert talk.session.level(talk.tokens) == 0


def test_catching_up_reads_at_most_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    _draft, talk = make()
    read: list[int] = []
    fill = head_session._Buffers.fill

    def counted(self: Any, start: int, tokens: Sequence[int], hidden: FloatArray) -> None:
        read.append(len(tokens))
        fill(self, start, tokens, hidden)

    monkeypatch.setattr(head_session._Buffers, "fill", counted)
    for count in (200, 2, 1, 150, 5):
        talk.say(count)
        talk.session.propose(talk.tokens, 3, BEST)
    assert read == [8, 2, 1, 8, 5]


def test_long_blocks_end_where_the_buffers_do() -> None:
    _, talk = make()
    talk.say(300)
    assert len(talk.session.propose(talk.tokens, 1000, BEST)) == head_session.SLACK


@pytest.mark.usefixtures("float_products")
def test_embeddings_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "_KEPT_EMBEDDINGS", 6)
    draft, talk = make()
    for count in (12, 3, 1, 5, 2):
        talk.say(count)
        assert talk.error(talk.session.propose(talk.tokens, 3, BEST), talk.expected(3)) < 1e-4
        assert len(draft._embeddings._kept) <= 8  # the limit, or what one call asks for


# Trouble


def test_hidden_states_that_are_no_numbers() -> None:
    _draft, talk = make()
    talk.say(10)
    fine = talk.session.propose(talk.tokens, 3, BEST)
    talk.states.rows(8, 9)[0, 3] = np.nan
    talk.session.crop(5)
    with pytest.raises(InvalidLogits):
        talk.session.propose(talk.tokens, 3, BEST)
    talk.states.write(8, talk.hidden[8][None])
    assert talk.session.propose(talk.tokens, 3, BEST) == fine


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("late", [False, True])
def test_a_call_that_fails_or_is_interrupted_leaves_no_trace(
    error: type[BaseException], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, talk = make()
    plain = draft.session
    calls = 0

    class Failing:
        def io_binding(self) -> Any:
            return plain.io_binding()

        def run_with_iobinding(self, bound: Any) -> None:
            nonlocal calls
            calls += 1
            if late:
                plain.run_with_iobinding(bound)
            if calls % 3 == 0:
                raise error
            if not late:
                plain.run_with_iobinding(bound)

    failed = 0
    for round_ in range(60):
        talk.say(1 + round_ % 5)
        draft.session = Failing()  # type: ignore[assignment]
        try:
            talk.session.propose(talk.tokens, 3, BEST)
        except error:
            failed += 1
        draft.session = plain
        if round_ % 7 == 0:
            talk.cut(len(talk.tokens) - 3)
        fresh = draft.open(talk.states)
        assert talk.session.propose(talk.tokens, 3, BEST).tokens == fresh.propose(talk.tokens, 3, BEST).tokens
    assert failed > 20


@pytest.mark.skipif(sys.gettrace() is not None, reason="needs the trace hook for itself")
def test_ctrl_c_at_any_line_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Trip, "FILES", ("drafts/head_session.py",))
    monkeypatch.setattr(head_session, "SLACK", 6)  # rows are moved often
    draft, _ = make()

    target, weights = toy(), random_head(SPEC, vocab_of(SPEC), 3)

    def talk_until(at: int) -> int:
        talk = Talk(draft, target, weights)
        with _Trip(at) as trip:
            try:
                for count in (12, 3, 5, 4):
                    talk.say(count)
                    talk.session.propose(talk.tokens, 3, BEST)
                    talk.cut(len(talk.tokens) - 1)
            except KeyboardInterrupt:
                pass
        for count in (1, 4):
            talk.say(count)
            fresh = draft.open(talk.states)
            assert talk.session.propose(talk.tokens, 3, BEST).tokens == fresh.propose(talk.tokens, 3, BEST).tokens
        return trip.count

    for at in range(1, talk_until(-1), 2):
        talk_until(at)


def test_a_closed_session_and_a_closed_draft() -> None:
    draft, talk = make()
    talk.say(9)
    before = talk.session.propose(talk.tokens, 3, BEST)
    talk.session.close()
    assert talk.session.propose(talk.tokens, 3, BEST).tokens == before.tokens
    assert draft.nbytes > 0
    draft.close()
    assert draft.nbytes == 0
    with pytest.raises(DraftError, match="tiny is not loaded"):
        talk.session.propose(talk.tokens, 3, BEST)


def test_sessions_on_several_threads_do_not_meet() -> None:
    draft, _ = make()
    target, weights = toy(), random_head(SPEC, vocab_of(SPEC), 3)
    talks = [Talk(draft, target, weights) for _ in range(4)]
    for number, talk in enumerate(talks):
        talk.rng = np.random.default_rng(number)
    together: dict[int, list[list[int]]] = {}

    def follow(number: int, session: HeadSession, talk: Talk) -> list[list[int]]:
        guesses = []
        for _ in range(40):
            talk.say(3)
            guesses.append(session.propose(talk.tokens, 3, BEST).tokens)
        return guesses

    def work(number: int) -> None:
        together[number] = follow(number, talks[number].session, talks[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        alone = Talk(draft, target, weights)
        alone.rng = np.random.default_rng(number)
        assert together[number] == follow(number, alone.session, alone)


# Loading


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
