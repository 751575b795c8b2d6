"""The bench on a real engine with a tiny model: that both understand each other. Nothing here depends on speed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgespec.bench.load import command
from edgespec.bench.load.prompts import Pool, Prompt
from edgespec.bench.load.soak import Soak, verdict
from edgespec.bench.load.system import Arm, EngineSystem
from edgespec.config import RuntimeConfig
from edgespec.errors import ConfigError, EdgespecError
from tests.bench.load.test_simulated import progress
from tests.support.tiny import write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("serve") / "model", max_position_embeddings=512, head_dim=16)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))


@pytest.fixture
def system(model: Path, tmp_path: Path) -> Iterator[EngineSystem]:
    config = RuntimeConfig(
        model=str(model), drafts=("ngram",), weight_format="float32", threads=1, max_sessions=2, home=tmp_path / "home"
    )
    made = EngineSystem(config, Arm("none"))
    yield made
    made.close()


def test_arms_change_on_the_engine_that_is_there_unless_its_memory_does(system: EngineSystem) -> None:
    first = system.engine
    system.use(Arm("fixed:2"))
    assert system.engine is first
    assert first.load_policy == "fixed:2"
    system.use(Arm("fixed:2", elastic=False))
    assert system.engine is not first
    assert not system.engine.config.elastic
    costs = system.costs()
    assert costs is not None
    assert costs["batch"]["points"]


@pytest.mark.parametrize("prompt", ["", [-1, 2], [1] * 513, [1 << 30], [{"role": 7}], 5])
def test_wrong_prompts_are_refused_at_once(system: EngineSystem, prompt: object) -> None:
    from edgespec.decoding.params import SamplingParams

    with pytest.raises(EdgespecError):
        system.submit(prompt, SamplingParams(max_new_tokens=8))


def test_a_short_soak(system: EngineSystem) -> None:
    system.use(Arm("edgespec"))
    texts = ["the hen and the hen and the", "a dog and a cat", "one two three"]
    pool = Pool(
        [Prompt(t, t, tuple(system.engine.encode(t))) for t in texts], system.engine.encode, new=12, context=512
    )
    soaked = Soak(system, pool.each(), seconds=1.5, rate=20.0, seed=5).run()
    findings = verdict(soaked, len(soaked.differences))
    assert all(finding.ok for finding in findings), findings
    assert soaked.submitted > 5


def test_the_commands(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    from edgespec.bench.load import measuring

    monkeypatch.setattr(measuring, "_CALIBRATION_S", 0.5)
    monkeypatch.setattr(measuring, "_WARM_UP_S", 0.2)
    parser = argparse.ArgumentParser()
    command.add_arguments(parser, int)
    words = ["-m", str(model), "--drafts", "ngram", "--weight-format", "float32", "--threads", "1", "--seconds", "1"]
    words += ["--repeats", "1", "-n", "8", "--planners", "fixed:2", "--max-sessions", "2"]
    load = [*words, "--rates", "4", "--limit", "60", "--out", str(tmp_path / "load"), "--elastic", "both"]
    with pytest.raises(ConfigError, match="Give a rate below"):
        command.run(parser.parse_args([*load, "--rates", "10000", "--limit", "1"]), progress)
    assert not (tmp_path / "load").exists(), "the same folder serves the corrected command"
    assert command.run(parser.parse_args(load), progress) == 0
    made = json.loads((tmp_path / "load" / "load.json").read_text())
    assert made["arms"] == ["fixed:2", "fixed:2 pinned"]
    assert made["texts"]["faults"] == 0
    assert made["texts"]["compared"] > 0
    assert (tmp_path / "load" / "costs.json").is_file()
    closed = [*words, "--sessions", "1,3", "--limit", "60", "--out", str(tmp_path / "sessions")]
    assert command.run(parser.parse_args(closed), progress) == 0
    rows = json.loads((tmp_path / "sessions" / "load.json").read_text())["table"]
    assert all(row["lost"] == row["failed"] == 0 < row["finished"] for row in rows)
    checked = [
        "-m",
        str(model),
        "--out",
        str(tmp_path / "validated"),
        "--validate",
        str(tmp_path / "load"),
        "--simulate",
    ]
    assert command.run(parser.parse_args(checked), progress) == 0
    assert "Simulated against measured" in capsys.readouterr().out
