"""`edgespec bench policies`: what is counted, and one real run of a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drafts import zoo
from edgespec.bench import policies
from edgespec.bench.policies import Arm, figures, interleaved, split_specs
from edgespec.cli.main import main
from edgespec.errors import ConfigError
from edgespec.evaluation.prompts import Item
from edgespec.results import GenerationStats
from tests.support.draft_sets import write_draft
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import SHAPE


def item(domain: str, line: int) -> Item:
    return Item(name=f"{domain}-{line}", turns=("x",), domain=domain, category=domain, file=domain, line=line)


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


def test_domains_take_turns() -> None:
    items = [item("a", 1), item("a", 2), item("a", 3), item("b", 1)]
    assert [(i.domain, i.line) for i in interleaved(items)] == [("a", 1), ("b", 1), ("a", 2), ("a", 3)]


def test_figures_are_of_the_prompts_that_every_policy_ran() -> None:
    plain, fast = Arm(), Arm()
    for line, (slow_s, fast_s) in enumerate(((2.0, 1.0), (2.0, 0.5)), start=1):
        plain.add(f"a:{line}", (1, 2), GenerationStats(new_tokens=11, decode_seconds=slow_s, rounds=10))
        stats = GenerationStats(
            new_tokens=11, decode_seconds=fast_s, rounds=5, fallback_share=0.2, loads=1, load_seconds_hidden=0.3
        )
        fast.add(f"a:{line}", (1, 2 if line == 1 else 3), stats)
    plain.add("a:3", (1,), GenerationStats(new_tokens=2, decode_seconds=100.0, rounds=1))  # the other was interrupted
    found = figures({"plain": plain, "fast": fast}, [item("a", 1), item("a", 2), item("a", 3)])
    one = found["policies"]["fast"]
    assert found["prompts"] == {"a": 2}
    assert one["over_plain"] == pytest.approx(4 / 1.5)
    assert one["domains"] == {"a": pytest.approx(4 / 1.5)}
    assert one["tokens_per_round"] == pytest.approx(2.0)
    assert one["fallback_share"] == pytest.approx(0.2)
    assert one["load_seconds_each"] == pytest.approx(0.3)
    assert one["different_texts"] == 1
    assert one["interval"][0] <= one["over_plain"] <= one["interval"][1]
    assert found["policies"]["plain"]["over_plain"] == pytest.approx(1.0)


def test_a_run_of_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(zoo, "BUILT_IN", tmp_path / "shipped")
    target = write_tiny(tmp_path / "tiny", **SHAPE)
    for seed, name in enumerate(("code", "general", "math")):
        write_draft(tmp_path / "home" / "drafts" / "set" / name, target, seed=seed)
    prompts = tmp_path / "code.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the hen {n}"}) + "\n" for n in range(3)))
    arguments = ["bench", "policies", str(prompts), "-m", str(target), "--weight-format", "float32", "--threads", "1"]
    arguments += ["--resident", "1", "-n", "8", "-q", "--policies", "static:math@2,edgespec", "--out"]
    assert main([*arguments, str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert list(report["policies"]) == ["plain", "static:math@2", "edgespec"]
    assert report["prompts"] == {"code": 3}
    assert report["waits_in_round"] == 0
    assert all(each["different_texts"] == 0 for each in report["policies"].values())
    assert "edgespec" in capsys.readouterr().out
    assert main([*arguments[:3], "--policies", "nonsense", "-m", str(target), "-q"]) != 0
    assert "nonsense" in capsys.readouterr().err


def test_ctrl_c_leaves_the_figures_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(zoo, "BUILT_IN", tmp_path / "shipped")
    target = write_tiny(tmp_path / "tiny", **SHAPE)
    prompts = tmp_path / "code.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the hen {n}"}) + "\n" for n in range(3)))
    real, calls = policies.measure, []

    def once(*given: object) -> None:
        calls.append(given)
        if len(calls) > 1:
            raise KeyboardInterrupt
        real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(policies, "measure", once)
    arguments = ["bench", "policies", str(prompts), "-m", str(target), "--weight-format", "float32", "-n", "4", "-q"]
    assert main([*arguments, "--policies", "edgespec", "--drafts", "ngram"]) == 130
    assert "so far" in capsys.readouterr().err
