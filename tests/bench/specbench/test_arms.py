"""Who takes part: names of policies and peers, refused before anything is loaded where they mean nothing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from edgespec.bench.peers.registry import peers
from edgespec.bench.specbench.arms import check, expanded, packages, peer_arm, policy_arm, split_specs
from edgespec.config import RuntimeConfig
from edgespec.errors import ConfigError

DRAFTS = ["general", "code"]


def test_specs_are_split_at_commas_but_not_inside_options() -> None:
    assert split_specs("plain, static:code@4,memspec,n=8,lookup=off;edgespec") == [
        "plain",
        "static:code@4",
        "memspec,n=8,lookup=off",
        "edgespec",
    ]
    for wrong in ("", ",", "plain,plain"):
        with pytest.raises(ConfigError, match="policies"):
            split_specs(wrong)


def test_plain_is_always_there_and_all_statics_are_one_for_each_draft() -> None:
    assert expanded(["edgespec"], DRAFTS) == ["plain", "edgespec"]
    assert expanded(["edgespec", "plain"], DRAFTS) == ["edgespec", "plain"]
    assert expanded(["plain", "all-statics", "static:code@3"], DRAFTS) == ["plain", "static:general@3", "static:code@3"]
    assert expanded(["static", "edgespec"], DRAFTS) == ["plain", "static:general@3", "edgespec"]
    assert expanded(["static", "all-statics", "ngram"], []) == ["plain", "ngram"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("edgspec", "did you mean edgespec"),
        ("static:cod@4", "did you mean code"),
        ("static:code@0", "gamma"),
        ("memspec,x=1", "option 'x' is not known"),
        ("oracle-static@4", "edgespec bench simulate"),
        ("oracle-dynamic,n=8", "edgespec bench simulate"),
        ("peer:lama.cpp", "did you mean peer:llama.cpp"),
        ("ngram@4", "not known"),
    ],
)
def test_what_means_nothing_is_refused_with_what_to_write(spec: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        check(["plain", spec], DRAFTS, 2)
    assert "--policies" in str(caught.value)


def test_packages_of_peers_count_where_they_take_part() -> None:
    engine = {"edgespec", "numpy", "onnxruntime", "tokenizers"}
    assert packages(["plain", "edgespec"], "cpu") == engine
    assert packages(["plain", "edgespec"], "cuda") == engine | {"torch"}
    assert packages(["plain", "peer:llama.cpp"], "cpu") == engine | {"llama-cpp-python"}
    assert packages(["peer:transformers-lookup"], "cpu") == engine | {"torch", "transformers"}
    assert "onnxruntime-genai" in packages(["peer:onnxruntime-genai"], "cpu")


def test_what_means_something_is_not() -> None:
    check(["plain", "ngram", "static", "all-statics", "static:ngram@4"], DRAFTS, None)
    check(["nightjar:code@3", "peer:transformers"], DRAFTS, None)


def test_an_arm_is_an_engine_with_its_policy_alone() -> None:
    config = RuntimeConfig(gamma=3, policy="nightjar", home=Path("/home"), policy_memory=Path("/out/state"))
    made = {spec: policy_arm(spec, config, nbytes={True: 5, False: 3}) for spec in ("plain", "ngram", "memspec@4")}
    drafts, policies, gammas = (
        {spec: arm.options["config"][key] for spec, arm in made.items()} for key in ("drafts", "policy", "gamma")
    )
    assert drafts == {"plain": (), "ngram": ("ngram",), "memspec@4": "auto"}
    assert (policies["ngram"], policies["memspec@4"]) == ("edgespec", "memspec@4")
    assert set(gammas.values()) == {"auto"}
    assert [arm.nbytes for arm in made.values()] == [3, 3, 5]
    options = made["memspec@4"].options["config"]
    assert RuntimeConfig(**options) == config.replace(gamma="auto", policy="memspec@4")  # what a worker makes of it


def test_peers_say_why_they_take_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # as if all of them were installed
    known = peers()

    def of(name: str, *, greedy: bool = True) -> str | None:
        return peer_arm(name, known, tmp_path / "model.safetensors", 2, nbytes=1, greedy=greedy).missing

    assert "gguf" in (of("peer:llama.cpp") or "")
    assert "greedily" in (of("peer:transformers", greedy=False) or "")
    assert "assistant" in (of("peer:transformers-assisted") or "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in (of("peer:llama.cpp") or "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    found = peer_arm("peer:transformers-lookup", known, tmp_path / "m.gguf", 2, nbytes=1, greedy=True)
    assert (found.kind, found.options["threads"], found.options["lookup"]) == ("peer", 2, 10)
