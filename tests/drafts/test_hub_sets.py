"""Sets whose drafts are models on the hub: the shipped manifests, what fits where, and how they are loaded."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest

from drafts import hub_sets, zoo
from drafts.hub_sets import SET_FILE, HubSet, for_model
from edgespec import catalog, draft_loading, set_fits
from edgespec.config import RuntimeConfig
from edgespec.errors import DraftError
from edgespec.hub import HUB_ID
from edgespec.memory.budget import parse_budget
from edgespec.memory.topology import Topology
from edgespec.models.footprint import footprint
from edgespec.models.spec import required_tensors
from edgespec.models.tokenizer import load_tokenizer
from edgespec.models.weights.opening import open_weights
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import GREEDY, QUESTION, SHAPE, load, plain
from tests.support.tiny_gguf import write_tiny_gguf

SHIPPED = {each.name: each for each in hub_sets.hub_sets()}
TINY = """
format = 1
name = "model"
description = "a tiny target and its draft"
[target]
name = "Model"
licence = "MIT"
parameters = 10
architecture = { kind = "llama", vocab = 288, hidden = 32, inner = 64, layers = 2, heads = 2, kv_heads = 1, head = 16 }
source = "https://example.org"
[target.builds.bf16]
model = "org/model"
bytes = 1000
[[draft]]
name = "small"
domain = "general"
licence = "MIT"
parameters = 5
architecture = { kind = "qwen3", vocab = 300, hidden = 32, inner = 64, layers = 1, heads = 2, kv_heads = 1, head = 16 }
source = "https://example.org"
[draft.builds.q4_0]
model = "org/small-GGUF:small.gguf"
bytes = 300
[draft.builds.bf16]
model = "org/small"
bytes = 500
[[draft]]
name = "extra"
domain = "code"
licence = "MIT"
parameters = 5
architecture = { kind = "llama", vocab = 288, hidden = 32, inner = 64, layers = 2, heads = 2, kv_heads = 1, head = 16 }
optional = true
source = "https://example.org"
[draft.builds.bf16]
model = "org/extra"
bytes = 500
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A zoo with one tiny set in place of the shipped one."""
    folder = tmp_path / "zoo" / "model"
    folder.mkdir(parents=True)
    (folder / SET_FILE).write_text(TINY)
    monkeypatch.setattr(hub_sets, "BUILT_IN", folder.parent)
    return folder.parent


def test_the_shipped_sets_are_plausible():
    assert set(SHIPPED) == {"qwen2.5-3b-instruct", "qwen2.5-7b-instruct", "llama-3.2-3b-instruct", "qwen3-4b"}
    for each in SHIPPED.values():
        assert (zoo.BUILT_IN / each.name / SET_FILE).is_file()
        assert each.chosen()
        for model in (each.target, *each.drafts):
            assert model.source.startswith("https://huggingface.co/")
            assert model.parameters <= each.target.parameters
            for build in model.builds.values():
                assert HUB_ID.fullmatch(build.model.partition(":")[0])
                low, high = (0.5, 0.75) if build.name == "q4_0" else (1.95, 2.1)
                assert low < build.bytes / model.parameters < high, (model.name, build)
                assert build.gated == build.model.startswith("meta-llama/")


def test_no_weights_are_shipped_with_them():
    for name in SHIPPED:
        assert [file.name for file in (zoo.BUILT_IN / name).iterdir()] == [SET_FILE]
    assert not {each.name for each in zoo.sets()} & set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_architectures_and_files_belong_together(name: str):
    """The parameters are those of the shapes; a 4-bit file holds them as `set_fits` takes them to be stored."""
    for model in (SHIPPED[name].target, *SHIPPED[name].drafts):
        shapes = required_tensors(model.spec)
        numbers = {each: math.prod(shape) for each, shape in shapes.items()}
        assert sum(numbers.values()) == pytest.approx(model.parameters, rel=0.015)
        if "q4_0" in model.builds:
            headers = set_fits._Headers(model)
            nbytes = 0.0
            for each, count in numbers.items():
                form = headers.layout(each)
                plain = 4.0 if len(shapes[each]) == 1 else 210 / 256  # of Q6_K
                nbytes += count * plain if form is None else form.nbytes(shapes[each])
            # That of Qwen3-0.6B has some more digits somewhere.
            off = 0.13 if "ggml-org" in model.builds["q4_0"].model else 0.03
            assert nbytes == pytest.approx(model.builds["q4_0"].bytes, rel=off), model.name


def fits(free: float, device: str = "cuda", sets: list[HubSet] | None = None) -> dict[str, hub_sets.SetFit]:
    """By name, on a board with so many GB free."""
    size_of = partial(footprint, device=device, weight_format="exact", unified=True, plain=False)
    there = Topology("discrete", int(free * 1e9), lambda: (int(free * 1e9), int(free * 1e9)))
    found = set_fits.fitting(size_of, lambda _size: parse_budget("auto", there), sets=sets)
    return {fit.name: fit for fit in found}


@pytest.mark.parametrize(
    ("free", "expected"),
    [  # what a board has free in text mode: Orin Nano 4 GB, 8 GB, Orin NX 16 GB; the table in docs/jetson.md
        (3.0, {"qwen2.5-3b-instruct": -1, "qwen2.5-7b-instruct": -1, "llama-3.2-3b-instruct": -1, "qwen3-4b": -1}),
        (6.6, {"qwen2.5-3b-instruct": 2, "qwen2.5-7b-instruct": -1, "llama-3.2-3b-instruct": 1, "qwen3-4b": 1}),
        (14.5, {"qwen2.5-3b-instruct": 2, "qwen2.5-7b-instruct": 2, "llama-3.2-3b-instruct": 1, "qwen3-4b": 1}),
    ],
)
def test_what_fits_which_board(free: float, expected: dict[str, int]):
    found = fits(free)
    assert {name: fit.slots for name, fit in found.items()} == expected
    assert all(fit.fits == (fit.slots > 0) and name in fit.text for name, fit in found.items())
    assert all(("does not fit" in fit.text) == (not fit.fits) for fit in found.values())


def test_sets_are_counted_as_the_engine_counts(root: Path, tmp_path: Path):
    """For a model of the same shapes that is here."""
    model = hub_sets.hub_sets()[0].drafts[0]
    headers: Any = set_fits._Headers(replace(model, builds={"bf16": model.builds["bf16"]}))
    shape = {"vocab_size": 300, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    path = write_tiny(tmp_path / "m", "qwen3", hidden_size=32, intermediate_size=64, head_dim=16, **shape)
    for device in ("cpu", "cuda"):
        told = footprint(headers, device, "exact")
        with open_weights(path) as weights:
            here = footprint(weights, device, "exact")
        assert (told.weights, told.position) == (here.weights, here.position)
        assert told.slot(64) == pytest.approx(here.slot(64), rel=0.001)


def test_between_target_and_first_draft_there_is_a_word_for_it(root: Path):
    sets = hub_sets.hub_sets()
    (fit,) = fits(100.0, sets=sets).values()
    assert (fit.slots, fit.held) == (1, "all")
    (less,) = fits((fit.target + 1000 + (256 << 20)) / 1e9, sets=sets).values()
    assert less.slots == 0
    assert "smallest draft" in less.text


def test_a_device_without_any_free_memory_is_no_error():
    assert all(fit.slots == -1 for fit in fits(0.0).values())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("format = 1", "format = 2", "format"),
        ('model = "org/small"', 'model = "/etc/passwd"', "hub id"),
        ('model = "org/small"', 'model = "org/small:../x.gguf"', "hub id"),
        ("optional = true", 'optional = "yes"', "true or false"),
        ('name = "extra"', 'name = "small"', "each name once"),
        ("vocab = 300", "vocab = 300, rows = 2", "not known"),
        ('"qwen3"', '"gpt2"', "must be one of llama, qwen2, qwen3"),
        ('domain = "code"', "", "domain is missing"),
        ("kv_heads = 1", "kv_heads = -1", "whole number"),
        ("inner = 64, ", "", "inner is missing"),
        ("[[draft]]", "[[draft", "not valid TOML"),
    ],
)
def test_a_set_that_is_not_as_it_must_be_is_refused_by_key(root: Path, old: str, new: str, words: str):
    path = root / "model" / SET_FILE
    assert old in TINY
    path.write_text(TINY.replace(old, new, 1))
    with pytest.raises(DraftError, match=words):
        HubSet.read(path)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("Qwen/Qwen2.5-3B-Instruct", "qwen2.5-3b-instruct"),
        ("bartowski/Qwen2.5-3B-Instruct-GGUF:Qwen2.5-3B-Instruct-Q4_0.gguf", "qwen2.5-3b-instruct"),
        ("/models/qwen2.5-7b-instruct-int4/", "qwen2.5-7b-instruct"),
        ("/models/qwen2.5-7b-instruct/model.safetensors", "qwen2.5-7b-instruct"),
        ("Qwen/Qwen3-4B", "qwen3-4b"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("Qwen/Qwen3-40B", None),
        ("smollm2-135m", None),
    ],
)
def test_the_set_of_a_model_is_found_by_its_name(model: str, found: str | None):
    each = for_model(model)
    assert (None if each is None else each.name) == found


def on_this_machine(monkeypatch: pytest.MonkeyPatch, here: dict[str, Path]) -> None:
    """The hub's cache has the models of `here`; their names begin with org/."""
    located, resolve = catalog.located, catalog.resolve

    def find(name: str, **more: object) -> Path | None:
        return here.get(name) if name.startswith("org/") else located(name, **more)

    monkeypatch.setattr(catalog, "located", find)
    monkeypatch.setattr(catalog, "resolve", lambda name, **more: here.get(name) or resolve(name, **more))


@pytest.fixture
def engine_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path) -> tuple[Path, dict[str, Path]]:
    """A target called "model" whose head has 288 rows, and two drafts with 300 and 280, of one vocabulary."""
    monkeypatch.setattr(zoo, "BUILT_IN", tmp_path / "shipped")
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    target = write_tiny(tmp_path / "model", **SHAPE)
    here = {
        "org/small": write_tiny(tmp_path / "small", seed=1, vocab_size=300, **SHAPE),
        "org/extra": write_tiny(tmp_path / "extra", seed=2, vocab_size=280, **SHAPE),
    }
    on_this_machine(monkeypatch, here)
    return target, here


@pytest.mark.parametrize("drafts", ["auto", ["model"]])
def test_pulled_drafts_run_whatever_their_padding(drafts, engine_parts: tuple[Path, dict[str, Path]]):
    target, _ = engine_parts
    with load(target, drafts=drafts, gamma=3, context=128) as engine:
        states = {name: str(status) for name, status in engine.drafts.items() if name != "ngram"}
        assert states == {"small": "active", "extra": "active"}
        for name in states:
            engine.use_draft(name)
            result = engine.generate(QUESTION, GREEDY)
            assert tuple(result.token_ids) == plain(engine, QUESTION)
            assert result.stats.draft_share[name] > 0


def test_only_what_was_pulled_is_used_and_nothing_is_fetched(
    engine_parts: tuple[Path, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    target, here = engine_parts
    config = RuntimeConfig(model=str(target), home=tmp_path / "home")
    facts = zoo.TargetFacts("model", "0" * 64, 32, 288)
    assert draft_loading.automatic(config, facts) == ["org/small", "org/extra"]
    del here["org/extra"]
    here["org/small-GGUF:small.gguf"] = Path("small.gguf")
    assert draft_loading.automatic(config, facts) == ["org/small-GGUF:small.gguf"]
    here.clear()
    assert draft_loading.automatic(config, facts) == []


def test_fillers_of_a_gguf_file_are_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Converters fill the list of tokens up to the embedding's rows; the vocabulary is still the folder's."""
    folder = load_tokenizer(write_tiny(tmp_path / "folder", vocab_size=300, **SHAPE))
    add_types, add_list = gguf.GGUFWriter.add_token_types, gguf.GGUFWriter.add_token_list
    fillers = [f"[PAD{number}]" for number in range(280, 320)]
    unused = int(gguf.TokenType.UNUSED)
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_list", lambda w, tokens: add_list(w, [*tokens, *fillers]))
    monkeypatch.setattr(
        gguf.GGUFWriter, "add_token_types", lambda w, types: add_types(w, [*types, *[unused] * len(fillers)])
    )
    file = write_tiny_gguf(tmp_path / "file.gguf", vocab_size=320, **SHAPE)
    assert load_tokenizer(file).fingerprint() == folder.fingerprint()
