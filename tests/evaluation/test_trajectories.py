"""Recorded answers on disk: reused only if they are whole and belong to this target and prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from drafts.evaluate import Trajectory, score
from drafts.recording import record
from drafts.standalone import StandaloneDraft
from edgespec.decoding.session import CHUNK
from edgespec.evaluation.trajectories import TrajectoryStore
from tests.support.engines import ENGINES, load
from tests.support.tiny import write_tiny

BINDING = {"fingerprint": "abc", "window": 4}


def made(states: bool = True) -> Trajectory:
    hidden = np.arange(24, dtype=np.float32).reshape(6, 4) if states else None
    return Trajectory((5, 6, 7, 8), (1, 2, 3), 9, 60, hidden)


def same(one: Trajectory, other: Trajectory) -> bool:
    states = (one.hidden is None and other.hidden is None) or np.array_equal(one.hidden, other.hidden)
    return states and replace(one, hidden=None) == replace(other, hidden=None)


def get(store: TrajectoryStore, trajectory: Trajectory) -> Trajectory:
    return store.get(trajectory.prompt, lambda: trajectory)


def never() -> Trajectory:
    raise AssertionError("recorded again")


@pytest.mark.parametrize("states", [True, False])
def test_what_was_kept_comes_back(tmp_path: Path, states: bool) -> None:
    folder = tmp_path / "new" / "answers"
    assert get(TrajectoryStore(folder, BINDING), made(states)) is not None
    store = TrajectoryStore(folder, BINDING)
    assert same(store.get(made().prompt, never), made(states))
    assert (store.reused, store.recorded) == (1, 0)


def test_another_target_prompt_or_limit_is_another_answer(tmp_path: Path) -> None:
    get(TrajectoryStore(tmp_path, BINDING), made())
    for binding in ({**BINDING, "fingerprint": "abd"}, {**BINDING, "window": 5}, {"window": 4}):
        assert get(other := TrajectoryStore(tmp_path, binding), made()) is not None
        assert other.recorded == 1
    store = TrajectoryStore(tmp_path, BINDING)
    store.get((5, 6, 7), lambda: replace(made(), prompt=(5, 6, 7), hidden=None))
    assert store.recorded == 1


def test_without_a_folder_nothing_is_kept() -> None:
    store = TrajectoryStore(None, BINDING)
    get(store, made())
    get(store, made())
    assert store.recorded == 2


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "zeros", "longer", "other"])
def test_damage_is_noticed(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    get(TrajectoryStore(tmp_path, BINDING), made())
    (file,) = tmp_path.iterdir()
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    elif damage == "other":  # whole, but of another prompt
        other = tmp_path / "other"
        TrajectoryStore(other, BINDING).get((9,), lambda: replace(made(), prompt=(9,), hidden=None))
        content = bytearray(next(other.iterdir()).read_bytes())
    else:
        cuts = {"cut": content[:-1], "empty": b"", "zeros": bytes(len(content)), "longer": content + b"\0"}
        content = bytearray(cuts[damage])
    file.write_bytes(content)
    store = TrajectoryStore(tmp_path, BINDING)
    assert same(get(store, made()), made())
    assert (store.damaged, store.recorded) == (1, 1)
    assert "damaged" in caplog.text
    assert same(TrajectoryStore(tmp_path, BINDING).get(made().prompt, never), made())


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = TrajectoryStore(blocked / "inside", BINDING)
    for _ in range(2):
        assert same(get(store, made()), made())
    assert len(caplog.records) == 1
    assert "cannot be kept" in caplog.text


def test_an_interruption_leaves_nothing_half_written(tmp_path: Path) -> None:
    def interrupted() -> Trajectory:
        raise KeyboardInterrupt

    store = TrajectoryStore(tmp_path, BINDING)
    with pytest.raises(KeyboardInterrupt):
        store.get((1, 2), interrupted)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512, head_dim=16)


@pytest.mark.parametrize("engine", ENGINES)
def test_states_are_those_of_one_forward_over_the_text(folder: Path, engine: str) -> None:
    """Also for prompts longer than a chunk, and with only the window's end kept."""
    target = load(folder, engine)
    rng = np.random.default_rng(0)
    for length, window in ((9, 256), (40, 16), (CHUNK + 7, 16), (CHUNK + 7, 64)):
        prompt = [int(i) for i in rng.integers(3, 280, length)]
        recorded = record(target, prompt, 6, token_count=280, window=window)
        text = [*prompt, *recorded.answer]
        output = target.forward(text[:-1], target.new_cache(), hidden=True)
        start = max(length - window, 0)
        assert recorded.start == start
        np.testing.assert_allclose(recorded.hidden, output.hidden[start:], atol=1e-4)
        assert list(recorded.answer) == [int(row[:280].argmax()) for row in output.logits[length - 1 :]]


@pytest.mark.parametrize("engine", ENGINES)
def test_the_target_as_its_own_draft_is_always_right(folder: Path, engine: str) -> None:
    target = load(folder, engine)
    recorded = record(target, [7, 8, 9, 10, 11], 24, token_count=280)
    draft = StandaloneDraft("self", load(folder, engine), 280)
    for gamma in (1, 3, 5):
        found = score(draft, recorded, gamma)
        assert found.hits == found.tries
        assert found.accepted == found.emitted - found.rounds > 0
