"""Who the peers are, and why one that cannot take part does not."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest

from edgespec.bench.peers import base
from edgespec.bench.peers.base import Contender, Recorder
from edgespec.bench.peers.registry import peers

GGUF = Path("model.gguf")


@pytest.fixture
def all_installed(monkeypatch):
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(base.sys, "version_info", (3, 12))


def by_name(**settings) -> dict[str, Contender]:
    return {peer.name: peer for peer in peers(**settings)}


def test_every_factory_exists_and_takes_what_it_is_given():
    for peer in peers(assistant=Path("a"), context=100):
        module, _, name = peer.factory.partition(":")
        factory = getattr(importlib.import_module(module), name)
        assert {"model", "threads", *peer.options} <= set(inspect.signature(factory).parameters)
        assert "eos_ids" in inspect.signature(factory.generate).parameters


def test_every_peer_of_the_field_is_there_and_names_are_unique():
    names = [peer.name for peer in peers()]
    assert names == [
        "llama.cpp",
        "llama.cpp-lookup",
        "onnxruntime-genai",
        "transformers",
        "transformers-lookup",
        "transformers-assisted",
        "flashspec",
    ]


@pytest.mark.usefixtures("all_installed")
def test_only_the_assisted_one_is_absent_without_an_assistant():
    absent = {peer.name: peer.missing(GGUF) for peer in peers()}
    assert "drafts export" in absent.pop("transformers-assisted")
    assert set(absent.values()) == {None}
    assert {peer.missing(GGUF) for peer in peers(assistant=Path("draft"))} == {None}


@pytest.mark.usefixtures("all_installed")
def test_an_assistant_goes_to_those_that_can_use_one():
    found = by_name(assistant=Path("draft"))
    assert {name for name, peer in found.items() if "assistant" in peer.options} == {
        "transformers-assisted",
        "flashspec",
    }
    assert found["flashspec"].options["assistant"] == "draft"
    assert found["flashspec"].weights != by_name()["flashspec"].weights


def test_the_context_goes_to_llama_cpp():
    assert by_name(context=4096)["llama.cpp"].options["context"] == 4096
    assert by_name(context=4096)["llama.cpp-lookup"].options["context"] == 4096


@pytest.mark.usefixtures("all_installed")
def test_llama_cpp_needs_a_gguf_file():
    absent = {peer.name: peer.missing(Path("folder")) for peer in peers(assistant=Path("draft"))}
    assert {name for name, reason in absent.items() if reason} == {"llama.cpp", "llama.cpp-lookup"}


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: None if name == "flashspec" else name)
    monkeypatch.setattr(base.sys, "version_info", (3, 11))
    assert by_name()["flashspec"].missing(GGUF) == (
        "not installed (flashspec); install it with: pip install 'edgespec[bench]'"
    )
    # Nothing could be installed there, so nobody is told to.
    monkeypatch.setattr(base.sys, "version_info", (3, 10, 14))
    assert by_name()["flashspec"].missing(GGUF) == "needs Python 3.11 or newer"
    assert sys.version_info >= (3, 10)


def test_a_moment_of_the_past_and_rounds_without_the_one_of_the_prompt():
    recorder = Recorder()
    moment = recorder.now()
    recorder.emit(2)
    recorder.emit(3, at=moment)
    recorder.emit(0)
    reply = recorder.reply([1, 2, 3, 4, 5])
    assert [count for _, count in reply["emissions"]] == [2, 3]
    assert reply["emissions"][1][0] == moment <= reply["emissions"][0][0] <= reply["seconds"]
    assert recorder.rounds() == {"round_tokens": [3]}
