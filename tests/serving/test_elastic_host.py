"""Elastic memory as the loop has it: what batches show of the drafts, and what happens if memory cannot be moved."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from edgespec.serving.host import ServingHost, _drafts_nothing
from edgespec.serving.records import BatchRecord
from edgespec.telemetry.trace import NULL_TRACER
from tests.serving.test_elastic import ScriptedDrafts, ScriptedPool, build


def test_steps_that_show_nothing_of_the_drafts_neither_count_nor_break_the_row():
    """As while they are loaded, or where every text has a seed."""
    elastic, pool, drafts, _clock = build()
    pool.fill(19)
    for _ in range(10):
        assert elastic.step(None, 3) is None
    assert drafts.capacity == 2
    for gamma_zero in (True, None, True, None):
        assert elastic.step(gamma_zero, 3) is None
    assert elastic.step(True, 3).kind == "leave"
    assert elastic.step(None, 3) is None  # on their way
    drafts.empty = True
    assert elastic.step(None, 3).kind == "lend"


@pytest.mark.parametrize(
    ("drafted", "passed", "nothing"),
    [(("head", None), ("head",), False), ((None,), ("head", "ngram"), True), (("ngram",), (), None), ((), (), None)],
)
def test_what_a_batch_shows_of_the_drafts(drafted, passed, nothing):
    weighty, free = SimpleNamespace(loadable=True), SimpleNamespace(loadable=False)
    engine = SimpleNamespace(_statuses={"head": weighty, "ngram": free})
    record = BatchRecord(1.0, 2, 2, drafts=drafted, passed=passed)
    assert _drafts_nothing(engine, record) is nothing


@pytest.mark.parametrize("lent", [False, True])
def test_given_up_drafts_that_were_to_go_stay(lent):
    elastic, pool, drafts, _clock = build()
    pool.fill(19)
    for _ in range(3):
        elastic.step(True, 1)
    assert elastic.leaving
    if lent:
        drafts.empty = True
        assert elastic.step(True, 1).kind == "lend"
    elastic.give_up()
    assert drafts.capacity == (0 if lent else 2)
    elastic.close()
    assert drafts.capacity == 2


def test_if_memory_cannot_be_moved_that_is_given_up_and_nothing_else(monkeypatch, caplog):
    """Nothing of it may reach the loop."""
    pool, drafts = ScriptedPool(20), ScriptedDrafts()
    pool.drafts = drafts
    pool.fill(19)
    held = SimpleNamespace(working_set=drafts)
    host = object.__new__(ServingHost)
    host.__dict__.update(
        config=SimpleNamespace(elastic=True), pool=pool, _elastic=None, _lender=None, _elastic_off=False
    )
    engine = SimpleNamespace(_held=held, tracer=NULL_TRACER)
    host._engine = lambda: engine
    for _ in range(3):
        host._step(True, 1, True)
    drafts.empty = True

    def fail(nbytes):
        raise MemoryError("no buffer")

    monkeypatch.setattr(pool, "grow", fail)
    for _ in range(5):
        assert host._step(True, 1, True) is None
    assert drafts.capacity == 2
    assert len([record for record in caplog.records if record.exc_info]) == 1
