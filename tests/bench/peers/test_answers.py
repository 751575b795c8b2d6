"""What real peers answer: the same tokens drafted or not, counted once, cut at end tokens."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from edgespec.bench.measure import measure
from edgespec.bench.peers.hf import load_assistant
from edgespec.bench.peers.llama_cpp import LlamaCppPeer
from edgespec.bench.peers.registry import peers
from edgespec.bench.serve import Server
from edgespec.errors import ConfigError
from tests.support.tiny import write_tiny
from tests.support.tiny_gguf import write_tiny_gguf

pytest.importorskip("torch")
pytest.importorskip("transformers")
PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]
NEW = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "t")


@pytest.fixture(scope="module")
def answers(tmp_path_factory, folder) -> dict[str, dict[str, Any]]:
    """The reply of every peer that is installed, in full and up to an end token, all to the same weights."""
    file = write_tiny_gguf(folder.parent / "t.gguf", tokenizer_size=288)
    found: dict[str, dict[str, Any]] = {}
    for peer in peers(assistant=folder, context=64):
        model = file if peer.gguf else folder
        if peer.missing(model) or peer.name == "onnxruntime-genai":  # whose own 4-bit weights are another model
            continue
        server = Server()
        options = {"model": str(model), "threads": 1, **peer.options}
        assert server.answer({"op": "load", "factory": peer.factory, "options": options}) == {"ok": True}
        generate = server.contender.generate
        found[peer.name] = {"full": generate(PROMPT, NEW), "contender": server.contender}
    return found


def present(answers: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    if name not in answers:
        pytest.skip(f"{name} is not installed")
    return answers[name]


NAMES = ["llama.cpp", "llama.cpp-lookup", "transformers", "transformers-lookup", "transformers-assisted", "flashspec"]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_tokens_as_plain_transformers_each_counted_once(answers, name):
    reply = present(answers, name)["full"]
    assert reply["token_ids"] == answers["transformers"]["full"]["token_ids"]
    assert sum(count for _, count in reply["emissions"]) == NEW == len(reply["token_ids"])
    moments = [moment for moment, _ in reply["emissions"]]
    assert moments == sorted(moments)
    assert moments[-1] <= reply["seconds"]


@pytest.mark.parametrize("name", NAMES)
def test_an_end_token_ends_the_answer_and_nothing_behind_it_counts(answers, name):
    found = present(answers, name)
    full = found["full"]["token_ids"]
    end = next(i for i, token in enumerate(full) if i > 3 and token not in full[:i])
    reply = found["contender"].generate(PROMPT, NEW, eos_ids=[full[end]])
    assert reply["token_ids"] == full[: end + 1]
    cut = measure(len(PROMPT), reply["token_ids"], reply["emissions"], limit=NEW, eos_ids=[full[end]])
    whole = measure(len(PROMPT), full, found["full"]["emissions"], limit=NEW, eos_ids=[full[end]])
    assert cut.token_ids == whole.token_ids == tuple(full[: end + 1])


@pytest.mark.parametrize("name", NAMES)
def test_a_second_prompt_is_answered_as_in_a_fresh_session(answers, name):
    contender = present(answers, name)["contender"]
    other = contender.generate([9, 10, 11], 8)["token_ids"]
    again = contender.generate(PROMPT, NEW)
    assert again["token_ids"] == answers["transformers"]["full"]["token_ids"]
    assert again["stats"] == answers[name]["full"]["stats"]
    assert contender.generate([9, 10, 11], 8)["token_ids"] == other


@pytest.mark.parametrize("name", ["llama.cpp-lookup", "transformers-lookup", "transformers-assisted", "flashspec"])
def test_rounds_add_up_to_what_came_after_the_one_with_the_prompt(answers, name):
    reply = present(answers, name)["full"]
    rounds = reply["stats"]["round_tokens"]
    assert all(rounds)
    first = NEW - sum(rounds)
    assert 1 <= first <= 1 + 20  # with the prompt, at most what is drafted at once and one more
    if name == "llama.cpp-lookup":
        assert first == 1
    else:
        assert rounds == [count for _, count in reply["emissions"][1:]]
        assert list(itertools.accumulate([first, *rounds]))[-1] == NEW


def test_flashspec_is_timed_step_by_step(answers):
    contender = present(answers, "flashspec")["contender"]
    moments = [moment for moment, _ in contender.generate(PROMPT, NEW)["emissions"]]
    assert moments == contender._clock.moments


def test_the_models_own_weights_as_assistant_draft_many_tokens_at_once(answers):
    rounds = present(answers, "transformers-assisted")["full"]["stats"]["round_tokens"]
    assert len(rounds) < NEW / 2


def test_plain_peers_tell_nothing_about_rounds(answers):
    assert answers["transformers"]["full"]["stats"] == {}
    assert present(answers, "llama.cpp")["full"]["stats"] == {}


def test_llama_cpp_refuses_what_does_not_fit_its_context(answers):
    contender = present(answers, "llama.cpp")["contender"]
    with pytest.raises(ValueError, match=r"60 prompt tokens and 5 new ones exceed the context, 64"):
        contender.generate([5] * 60, 5)


def test_llama_cpp_looks_up_in_prompts_longer_than_a_batch(tmp_path):
    pytest.importorskip("llama_cpp")
    file = write_tiny_gguf(tmp_path / "t.gguf", tokenizer_size=288)
    prompt = [*PROMPT * 50, 5, 6]  # its batches have 512 tokens
    answered = [LlamaCppPeer(str(file), 1, 640, lookup).generate(prompt, 8)["token_ids"] for lookup in (0, 10)]
    assert len(answered[0]) == 8
    assert answered[0] == answered[1]


def test_an_assistant_with_other_token_ids_is_refused(tmp_path, folder):
    other = write_tiny(tmp_path / "other")
    settings = json.loads((other / "tokenizer.json").read_text())
    words = settings["model"]["vocab"]
    words["in"], words["an"] = words["an"], words["in"]
    (other / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"assistant .*other cannot be used: .*vocabulary differs .* '(in|an)'"):
        load_assistant(other, folder)


def test_an_assistant_that_is_no_checkpoint_is_refused(tmp_path, folder):
    with pytest.raises(ConfigError, match=r"no config\.json.*drafts export --format hf"):
        load_assistant(tmp_path, folder)
