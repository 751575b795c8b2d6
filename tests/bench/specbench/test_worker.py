"""The worker's side with a tiny model: what the warm-up may leave behind."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgespec.bench.specbench.worker import PolicyArm
from edgespec.decoding.params import SamplingParams
from tests.support.draft_sets import write_draft
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import QUESTION, SHAPE

_MEASURED = ("costs", "_costs", "_lock")  # seconds, which are not learned of texts


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tiny model and two random drafts, of which one fits."""
    home = tmp_path_factory.mktemp("home")
    model = write_tiny(home / "tiny", **SHAPE)
    for seed, name in enumerate(("code", "math")):
        write_draft(home / "drafts" / "set" / name, model, seed=seed)
    return home


@pytest.fixture
def arm(tmp_path: Path, home: Path) -> Iterator[Callable[[str], PolicyArm]]:
    """An arm under a policy; what it learns goes to `state`. Answers are as long as they may be."""
    made: list[PolicyArm] = []

    def make(policy: str) -> PolicyArm:
        config = {"model": str(home / "tiny"), "home": str(home), "policy_memory": str(tmp_path / "state")}
        made.append(PolicyArm({**config, "policy": policy, "resident": 1, "threads": 1, "weight_format": "float32"}))
        made[-1]._params = SamplingParams(ignore_eos=True)
        return made[-1]

    yield make
    for one in made:
        one.close()


def learned(thing: Any) -> Any:
    """All that an object holds, but for measured seconds, as values that can be compared."""
    if isinstance(thing, np.random.Generator):
        return str(thing.bit_generator.state)
    if isinstance(thing, np.ndarray):
        return thing.tolist()
    if isinstance(thing, Mapping):
        return {str(key): learned(value) for key, value in thing.items()}
    if isinstance(thing, (list, tuple, set, frozenset)):
        return [learned(value) for value in (sorted(thing) if isinstance(thing, (set, frozenset)) else thing)]
    if type(thing).__module__.split(".")[0] != "predictor":
        return repr(thing)
    names = [
        *getattr(thing, "__dict__", ()),
        *(n for kind in type(thing).__mro__ for n in getattr(kind, "__slots__", ())),
    ]
    return {name: learned(getattr(thing, name)) for name in names if name not in _MEASURED and hasattr(thing, name)}


def policy_of(made: PolicyArm) -> Any:
    return made._engine._held.policy  # type: ignore[union-attr]


@pytest.mark.parametrize("policy", ["edgespec", "exp3spec", "nightjar", "memspec"])
def test_a_policy_learns_nothing_from_the_warm_up(arm: Callable[[str], PolicyArm], policy: str) -> None:
    made = arm(policy)
    ids = made._engine.encode(QUESTION)
    before, held = learned(policy_of(made)), made._resident()
    ran = made.warm_up(ids, 16)
    assert set(held) < set(ran), "the resident draft and lookup have run"
    assert learned(policy_of(made)) == before
    assert made._resident() == held
    made.answer(ids, 16, {"question": "1"})
    assert learned(policy_of(made)) != before, "what is compared is what a policy learns"


def test_what_is_saved_has_nothing_of_the_warm_up(arm: Callable[[str], PolicyArm], tmp_path: Path) -> None:
    made = arm("edgespec")
    ids = made._engine.encode(QUESTION)
    for _ in range(8):  # more than is needed to be worth keeping
        made.warm_up(ids, 64)
    made.keep()
    (file,) = (tmp_path / "state").glob("*.json")
    assert not json.loads(file.read_text())["arms"]
    for _ in range(8):
        made.answer(ids, 64, {"question": "1"})
    made.keep()
    saved = file.read_text()
    assert json.loads(saved)["arms"]
    again = arm("edgespec")  # as after an interruption
    again.warm_up(ids, 64)
    again.keep()
    assert file.read_text() == saved


def test_under_a_policy_that_holds_nothing_lookup_is_warmed_up(arm: Callable[[str], PolicyArm]) -> None:
    made = arm("plain")
    assert made.warm_up(made._engine.encode(QUESTION), 8) == ["ngram"]
