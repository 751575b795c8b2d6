"""Working sets over scripted drafts, which leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from edgespec.memory.working_set import WorkingSet
from tests.support.loadables import Events, ScriptedDraft

Make = Callable[..., WorkingSet]


@pytest.fixture
def drafts() -> dict[str, ScriptedDraft]:
    return {name: ScriptedDraft(name) for name in ("a", "b", "c", "d")}


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def make(drafts: dict[str, ScriptedDraft], events: Events) -> Iterator[Make]:
    """Working sets over `drafts`, closed at the end; then nothing that must not happen has happened."""
    made: list[WorkingSet] = []

    def build(slots: int = 2, **options: Any) -> WorkingSet:
        options = {"watch_seconds": None, "on_event": events, **options}
        made.append(WorkingSet(list(drafts.values()), slots=slots, **options))
        return made[-1]

    yield build
    for draft in drafts.values():
        draft.gate.set()
        if draft.hang is not None:
            draft.hang.set()
    for each in made:
        each.close()
    assert [problem for draft in drafts.values() for problem in draft.problems] == []
    assert not any(draft.loaded for draft in drafts.values())
