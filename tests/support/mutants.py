"""Planted faults: a copy of a module with one piece of its source changed, to see that a test would notice."""

from __future__ import annotations

import inspect
from types import ModuleType


def mutant(module: ModuleType, old: str, new: str) -> ModuleType:
    """`module` built anew with `old`, which must occur exactly once in its source, replaced by `new`."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {module.__name__}"
    copy = ModuleType(module.__name__)
    exec(compile(source.replace(old, new), f"<mutant of {module.__name__}>", "exec"), copy.__dict__)
    return copy
