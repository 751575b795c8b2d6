"""A head whose weights come and go: it proposes what one that was never away proposes, and leaves nothing behind."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from pathlib import Path

import numpy as np
import psutil
import pytest

from drafts.base import Lagging, Loadable, Proposal
from drafts.head import HeadDraft, constant_bytes
from drafts.head_session import HeadSession
from drafts.load_now import OwnSlot, Unhindered
from drafts.states import HiddenStates
from edgespec.errors import DraftError
from tests.support.head_talk import BEST, TOKENS, toy, vocab_of
from tests.support.scripted import ToyDecoder
from tests.support.tiny_head import load_into, random_head, stored_head, tiny_spec


class Text:
    """A conversation that several drafts follow."""

    def __init__(self, *drafts: HeadDraft, window: int) -> None:
        self.states = HiddenStates(32, window)
        self.sessions = [draft.open(self.states) for draft in drafts]
        self.rng = np.random.default_rng(7)
        self.tokens: list[int] = []

    def say(self, count: int) -> None:
        begin = max(len(self.tokens) - 1, 0)
        self.tokens += self.rng.integers(0, TOKENS, count).tolist()
        new = self.rng.standard_normal((len(self.tokens) - 1 - begin, 32)).astype(np.float32)
        self.states.write(begin, new)

    def cut(self, length: int) -> None:
        del self.tokens[length:]
        for session in self.sessions:
            session.crop(length)
        self.states.crop(length - 1)


def pair(window: int, folder: Path) -> tuple[HeadDraft, HeadDraft, Text]:
    """One that stays, one that comes and goes, and what they talk about."""
    target, spec = toy(), tiny_spec(window=window, vocab_rows=64)
    stays = HeadDraft("stays", spec, random_head(spec, vocab_of(spec), 3), target, threads=1)
    goes = stored_head(folder / "goes", target, spec=spec, vocab=vocab_of(spec), seed=3)
    return stays, goes, Text(stays, goes, window=window)


def same(one: Proposal, other: Proposal) -> bool:
    return one.tokens == other.tokens and np.allclose(one.confidences, other.confidences, atol=1e-4)


@pytest.mark.parametrize("piece", [1, 7, 32, 1000])
@pytest.mark.parametrize("window", [5, 24, 300])
@pytest.mark.usefixtures("float_products")
def test_after_any_absence_it_proposes_what_one_that_stayed_proposes(window: int, piece: int, tmp_path: Path) -> None:
    stays, goes, text = pair(window, tmp_path)
    present, away = text.sessions
    rng, slot = random.Random(piece), OwnSlot(goes.buffer_bytes)
    text.say(40)
    for missed, cut in ((5, 0), (50, 0), (500, 0), (5, 3), (50, 20), (500, 1), (0, 30), (0, 0), (2, 0)):
        goes.load(slot, Unhindered())
        missing = away.behind(text.tokens)
        pieces = 0
        while away.behind(text.tokens):
            left = away.catch_up(text.tokens, piece)
            assert left == max(missing - piece, 0) == away.behind(text.tokens)
            missing, pieces = left, pieces + 1
        assert pieces <= -(-window // piece)
        for _ in range(3):
            gamma = rng.randrange(1, 5)
            proposal = away.propose(text.tokens, gamma, BEST)
            assert len(proposal) == gamma
            assert same(proposal, present.propose(text.tokens, gamma, BEST))
            text.say(rng.randrange(1, 5))
        goes.unload()
        for _ in range(missed):  # the other one reads along
            text.say(1)
            if rng.random() < 0.3:
                present.propose(text.tokens, 2, BEST)
        if cut:  # by less than a window, so that the states of a whole one are left
            text.cut(len(text.tokens) - min(cut, window))
            text.say(2)
    assert stays.loaded


@pytest.mark.usefixtures("float_products")
def test_without_reading_ahead_it_reads_everything_at_once(tmp_path: Path) -> None:
    _, goes, text = pair(24, tmp_path)
    present, away = text.sessions
    text.say(60)
    load_into(goes)
    assert same(away.propose(text.tokens, 3, BEST), present.propose(text.tokens, 3, BEST))
    goes.unload()
    text.say(10)
    load_into(goes)
    assert same(away.propose(text.tokens, 3, BEST), present.propose(text.tokens, 3, BEST))


@pytest.mark.usefixtures("float_products")
def test_text_that_grows_between_two_pieces_is_read_too(tmp_path: Path) -> None:
    _, goes, text = pair(200, tmp_path)
    present, away = text.sessions
    text.say(180)
    load_into(goes)
    for _ in range(400):
        if not away.catch_up(text.tokens, 6):
            break
        present.propose(text.tokens, 2, BEST)
        text.say(3)
    assert away.behind(text.tokens) == 0
    assert len(text.tokens) > 300
    assert same(away.propose(text.tokens, 4, BEST), present.propose(text.tokens, 4, BEST))


def test_how_far_it_lags(tmp_path: Path) -> None:
    _, goes, text = pair(24, tmp_path)
    session = text.sessions[1]
    assert isinstance(session, Lagging)
    assert session.behind(text.tokens) == 0
    text.say(1)
    assert session.behind(text.tokens) == 0  # it cannot propose
    text.say(9)
    assert session.behind(text.tokens) == 8  # nine rows, of which a proposal reads the last
    text.say(90)
    assert session.behind(text.tokens) == 23  # a window
    load_into(goes)
    assert session.catch_up(text.tokens, 20) == 3
    assert session.catch_up(text.tokens, 20) == 0
    assert session.catch_up(text.tokens, 20) == 0
    session.propose(text.tokens, 3, BEST)
    text.say(4)
    assert session.behind(text.tokens) == 3
    goes.unload()
    text.say(2)
    assert session.behind(text.tokens) == 5  # what it had read is kept
    text.cut(60)
    text.states.crop(0)
    assert session.behind(text.tokens) == 0


def test_a_head_that_is_not_loaded_has_nothing_to_go_on(tmp_path: Path) -> None:
    _, goes, text = pair(24, tmp_path)
    session = text.sessions[1]
    text.say(9)
    assert isinstance(goes, Loadable)
    for _ in range(2):
        assert (goes.loaded, goes.nbytes, session.level(text.tokens)) == (False, 0, 0)
        for call in (lambda: session.propose(text.tokens, 3, BEST), lambda: session.catch_up(text.tokens, 3)):
            with pytest.raises(DraftError, match="goes is not loaded"):
                call()
        load_into(goes)
        assert (goes.loaded, session.level(text.tokens)) == (True, 1)
        assert goes.nbytes == constant_bytes(goes.spec, False)
        goes.load(OwnSlot(0), Unhindered())  # it is there already
        goes.unload()
        goes.unload()


def test_an_unload_leaves_nothing_of_the_weights_whatever_conversations_are_open(tmp_path: Path) -> None:
    _, goes, text = pair(24, tmp_path)
    other = goes.open(text.states)
    text.say(30)
    slot = load_into(goes)
    for session in (text.sessions[1], other):
        session.propose(text.tokens, 4, BEST)
        text.say(2)
        session.propose(text.tokens, 4, lambda row, proposed: (int(row.argmax()), None))  # type: ignore[arg-type]
    weights = weakref.ref(goes.session)
    goes.unload()
    gc.collect()
    assert weights() is None
    slot.buffer.release()  # BufferError if something still looks into it


def test_sessions_may_be_opened_while_the_draft_comes_and_goes(tmp_path: Path) -> None:
    _, goes, text = pair(24, tmp_path)
    text.say(30)
    errors: list[BaseException] = []
    done = threading.Event()

    def converse() -> None:
        try:
            while not done.is_set():
                opened: HeadSession = goes.open(text.states)
                opened.level(text.tokens)
                opened.behind(text.tokens)
                opened.close()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=converse)
    thread.start()
    try:
        for _ in range(30):
            load_into(goes)
            goes.unload()
    finally:
        done.set()
        thread.join()
    assert errors == []
    assert not [session for session in goes._sessions if session._buffers is not None]


def test_a_hundred_and_fifty_loads_take_the_memory_of_one(tmp_path: Path) -> None:
    spec = tiny_spec(window=8, vocab_rows=64, intermediate_size=4096)  # 0.5 MB each: a leak would be seen
    target = toy()
    drafts = [stored_head(tmp_path / n, target, spec=spec, vocab=vocab_of(spec), seed=s) for s, n in enumerate("abc")]
    slot, process = OwnSlot(drafts[0].buffer_bytes), psutil.Process()
    text = Text(*drafts, window=8)
    text.say(30)

    def round_trip() -> None:
        for draft, session in zip(drafts, text.sessions):
            draft.load(slot, Unhindered())
            session.propose(text.tokens, 2, BEST)
            draft.unload()

    for _ in range(5):
        round_trip()
    before = process.memory_info().rss
    for _ in range(50):
        round_trip()
    grown = process.memory_info().rss - before
    assert grown < drafts[0].slot_bytes < 150 * constant_bytes(spec, False) / 10


def test_a_loaded_head_takes_no_more_than_it_says(tmp_path: Path) -> None:
    hidden, rows = 32, 6000
    spec = tiny_spec(window=8, vocab_rows=rows, intermediate_size=32768)
    target = ToyDecoder(512, hidden=hidden)
    table = np.random.default_rng(0).standard_normal((rows, hidden)).astype(np.float32)
    target.embed = target.head_rows = lambda ids: table[np.asarray(ids)]  # type: ignore[method-assign,assignment]
    object.__setattr__(target.spec, "vocab_size", rows)
    drafts = [stored_head(tmp_path / n, target, spec=spec, vocab=range(rows), seed=s) for s, n in enumerate("abcd")]
    load_into(drafts[0])  # what comes with the first one comes once
    drafts[0].unload()
    process = psutil.Process()
    before = process.memory_info().rss
    slots = [load_into(draft) for draft in drafts]
    grown = process.memory_info().rss - before
    assert len(slots) == 4
    assert constant_bytes(spec, False) * len(drafts) < grown < sum(draft.slot_bytes for draft in drafts)
