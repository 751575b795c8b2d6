"""Drafts of a configuration that are not loaded yet: what is read at the start, what at a load, and what they take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from drafts import zoo
from drafts.base import Loadable, LoadCancelled
from drafts.head import FILE_NAME, conversation_bytes, loaded_bytes
from drafts.load_now import OwnSlot, Unhindered, load_now
from edgespec import Engine, draft_loading
from edgespec.config import RuntimeConfig
from edgespec.draft_loading import IMAGES, LoadedDraft, check_names, load_draft, load_drafts
from edgespec.errors import ConfigError, DraftError
from edgespec.loading import Target, load_target
from edgespec.memory.loader import Control, RateLimit
from tests.support.draft_sets import write_draft, write_standalone
from tests.support.tiny import write_tiny
from tests.support.tiny_head import Hindered, tiny_spec

SHAPE = {"head_dim": 16}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A set of two heads and a standalone draft, of a target beside it."""
    monkeypatch.setattr(zoo, "BUILT_IN", tmp_path / "shipped")
    model = write_tiny(tmp_path / "model", **SHAPE)
    drafts = tmp_path / "home" / "drafts" / "set"
    for seed, name in enumerate(("code", "math")):
        write_draft(drafts / name, model, seed=seed)
    write_standalone(drafts / "small", model, **SHAPE)
    return drafts


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> RuntimeConfig:
    return RuntimeConfig(
        model=str(tmp_path / "model"), home=tmp_path / "home", threads=1, weight_format="float32", context=128
    )


@pytest.fixture
def target(config: RuntimeConfig) -> Iterator[Target]:
    loaded = load_target(config, None)
    yield loaded
    loaded.decoder.close()


def lazily(config: RuntimeConfig, target: Target) -> dict[str, LoadedDraft]:
    return {each.status.name: each for each in load_drafts(config, target, None)}


def loadable(loaded: LoadedDraft) -> Loadable:
    assert loaded.status.active, loaded.status
    assert isinstance(loaded.status.draft, Loadable)
    return loaded.status.draft


def test_nothing_with_weights_is_read_before_it_is_loaded(config, target, folder, monkeypatch):
    read, built = zoo.read_head, draft_loading.decoder_for
    monkeypatch.setattr(zoo, "read_head", lambda *_: pytest.fail("it was read"))
    monkeypatch.setattr(draft_loading, "decoder_for", lambda *_: pytest.fail("it was built"))
    planned = dict(target.planned)
    drafts = lazily(config, target)
    assert set(drafts) == {"ngram", "code", "math", "small"}
    assert not isinstance(drafts["ngram"].status.draft, Loadable)
    assert not any(loadable(drafts[name]).loaded for name in ("code", "math", "small"))
    assert target.planned == planned
    monkeypatch.setattr(zoo, "read_head", read)
    monkeypatch.setattr(draft_loading, "decoder_for", built)
    for name in ("code", "small"):
        assert load_now(loadable(drafts[name])).loaded
    assert len(list((config.home / IMAGES).iterdir())) == 1
    assert set(loadable(drafts["code"]).files) == {folder / "code" / FILE_NAME, *(config.home / IMAGES).iterdir()}
    assert folder / "small" / "model.safetensors" in loadable(drafts["small"]).files


def test_lengths_are_checked_at_the_start_and_content_at_a_load(config, target, folder):
    code, math, small = folder / "code" / FILE_NAME, folder / "math" / FILE_NAME, folder / "small" / "config.json"
    code.write_bytes(code.read_bytes()[:-1])
    data = math.read_bytes()
    math.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    text = small.read_text()
    drafts = lazily(config, target)
    assert "must have" in str(drafts["code"].status)
    with pytest.raises(DraftError, match="another sha256"):
        load_now(loadable(drafts["math"]))
    small.write_text(text.replace("1e-05", "2e-05"))
    assert small.read_text() != text
    with pytest.raises(DraftError, match=r"config.json: has another sha256"):
        load_now(loadable(drafts["small"]))
    math.write_bytes(data)
    small.write_text(text)
    for name in ("math", "small"):
        assert load_now(loadable(drafts[name])).loaded


def test_a_checkpoint_that_was_replaced_is_not_taken_for_the_one_that_was_added(config, target, tmp_path):
    path = write_tiny(tmp_path / "other", seed=1, **SHAPE)
    draft = loadable(load_draft(str(path), config, target, None))
    assert draft.files == (path / "model.safetensors",)
    load_now(draft)
    draft.unload()
    write_tiny(path, seed=2, **SHAPE)
    with pytest.raises(DraftError, match="is another checkpoint than when draft other was added"):
        load_now(draft)


def test_a_standalone_draft_can_be_called_off_at_every_place(config, target):
    draft = loadable(lazily(config, target)["small"])
    for _ in range(2):  # what was verified once, and built, is not again
        whole = Hindered()
        draft.load(OwnSlot(0), whole)
        draft.unload()
    assert whole.places > 8
    for end in range(1, whole.places + 1):
        with pytest.raises(LoadCancelled):
            draft.load(OwnSlot(0), Hindered(end))
        assert not draft.loaded


def test_a_standalone_draft_is_read_as_loads_read(config, target, folder):
    """All of it by the loader's reader, and once: what was verified is not read again until somebody writes it."""
    draft = loadable(lazily(config.replace(device="torch-cpu"), target)["small"])
    file = folder / "small" / "model.safetensors"
    size = file.stat().st_size
    read = []
    for control in (Hindered(), Hindered()):
        draft.load(OwnSlot(0), control)
        draft.unload()
        read.append(control.nbytes)
    assert read[0] > 1.9 * size
    assert 0.9 * size < read[1] < 1.1 * size
    loader = Control((), RateLimit(None))
    draft.load(OwnSlot(0), loader)
    draft.unload()
    assert loader.bytes_read == read[1]
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DraftError, match="another sha256"):
        draft.load(OwnSlot(0), Hindered())


def test_a_checkpoint_without_a_manifest_is_read_so_too(config, target, tmp_path):
    """Of one that nobody has written since, not even the fingerprint is taken again."""
    path = write_tiny(tmp_path / "other", seed=1, **SHAPE)
    draft = loadable(load_draft(str(path), config.replace(device="torch-cpu"), target, None))
    control = Hindered()
    draft.load(OwnSlot(0), control)
    size = (path / "model.safetensors").stat().st_size
    assert 0.9 * size < control.nbytes < 1.1 * size


def test_what_they_take(config, target):
    drafts = [each.status.draft for each in load_drafts(config, target, None)]
    heads = [draft for draft in drafts if draft.kind == "head"]
    # Known from the numbers alone; of a head whose LM head is its own, at least as much.
    assert loaded_bytes(tiny_spec(), tied=False) >= heads[0].slot_bytes
    assert conversation_bytes(tiny_spec()) >= heads[0].conversation_bytes
    small = next(draft for draft in drafts if draft.kind == "standalone")
    load_now(small)
    assert small.slot_bytes >= small.nbytes
    heads[0].load(OwnSlot(heads[0].buffer_bytes), Unhindered())
    assert 0 < heads[0].nbytes < heads[0].buffer_bytes


def test_at_once_they_are_loaded(config, target):
    drafts = {each.status.name: each for each in load_drafts(config, target, None)}
    before = dict(target.planned)
    for name in ("code", "math", "small"):
        assert not loadable(drafts[name]).loaded
        load_now(loadable(drafts[name]))
    assert all(loadable(drafts[name]).loaded for name in ("code", "math", "small"))
    assert target.planned == before  # slots are planned by who has them


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cod", "did you mean code?"),
        ("Math", "did you mean math?"),
        ("xyzzy", "known are auto, ngram, "),
    ],
)
def test_a_word_that_no_draft_is_called_by_is_refused_before_anything_is_loaded(config, monkeypatch, name, words):
    monkeypatch.setattr("edgespec.engine.load_target", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(ConfigError, match=f"there is no draft '{name}'") as caught:
        Engine.from_pretrained(drafts=["ngram", name], config=config)
    assert words in str(caught.value)


NAMES = ("auto", "ngram", "code", "set", "smollm2-135m", "./gone", "gone.gguf", "org/gone", "here")


@pytest.mark.parametrize("name", NAMES)
def test_names_of_drafts_sets_and_models_and_paths_are_not(config, tmp_path, monkeypatch, name):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    check_names(config.replace(drafts=[name]))


def test_lookup_is_there_where_no_draft_that_was_named_can_be_used(config, target, tmp_path):
    gone = str(tmp_path / "gone")
    drafts = lazily(config.replace(drafts=[gone]), target)
    assert {name: each.status.active for name, each in drafts.items()} == {"gone": False, "ngram": True}
    assert str(drafts["gone"].status).startswith("failed: there is no file or folder"), "no class in front"
    assert set(lazily(config.replace(drafts=[gone, "code"]), target)) == {"gone", "code"}
    assert lazily(config.replace(drafts=()), target) == {}
