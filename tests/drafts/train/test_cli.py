"""`edgespec drafts train` and `export` from the command line, with a tiny target on the CPU engine."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drafts.manifest import Manifest
from drafts.train.config import TrainConfig
from drafts.train.errors import TrainingError
from edgespec.cli import drafts_export, drafts_train
from edgespec.cli.drafts_train import Lines, duration, recorded_command, starting_draft, training_config
from edgespec.cli.main import Parser
from edgespec.errors import ConfigError
from tests.drafts.train.support import records, write_prompts
from tests.support.tiny import write_tiny

FLAGS = "--domain code --max-new-tokens 8 --updates 3 --vocab 64 --sampled 0.5 --threads 1".split()  # noqa: SIM905


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny", head_dim=16, max_position_embeddings=512)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("EDGESPEC_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))


def parsed(module, *words: str) -> argparse.Namespace:
    parser = Parser()
    module.add_arguments(parser)
    return parser.parse_args(list(words))


def train_words(model: Path, tmp_path: Path, *more: str) -> list[str]:
    prompts = write_prompts(tmp_path / "code.jsonl", [*records(16), "broken"])
    return ["--target", str(model), "--prompts", str(prompts), "--out", str(tmp_path / "set" / "code"), *FLAGS, *more]


def test_train_then_export(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drafts_train.run(parsed(drafts_train, *train_words(model, tmp_path))) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'set' / 'code'}\n"
    assert "answers of the target: " in err
    assert "tokens/s" in err
    assert "fitting: 3 of 3 (loss" in err
    assert "draft tokens accepted a round at gamma 3" in err
    assert "calibration error" in err
    manifest = Manifest.read(tmp_path / "set" / "code")
    assert manifest.target.measured_with == ("exact",)
    assert manifest.target.name == "tiny"
    assert manifest.training is not None
    assert manifest.training.command.startswith("edgespec ")

    words = [str(tmp_path / "set" / "code"), "--format", "eagle", "--out", str(tmp_path / "eagle")]
    assert drafts_export.run(parsed(drafts_export, *words, "--target", str(model), "--threads", "1")) == 0
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'eagle'}\n"
    assert err.count("note: ") == 4
    assert (tmp_path / "eagle" / "model.safetensors").exists()
    with pytest.raises(ConfigError, match="is unknown; it is hf or eagle"):
        drafts_export.run(parsed(drafts_export, "code", "--format", "gguf", "--out", "x"))


@pytest.mark.slow
def test_two_processes_train_together(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29513"]
    words = train_words(model, tmp_path, "--quiet")
    call = f"import sys; from tests.drafts.train.test_cli import rank; sys.exit(rank({words!r}))"
    script = tmp_path / "rank.py"
    script.write_text(call)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == f"{tmp_path / 'set' / 'code'}\n"
    Manifest.read(tmp_path / "set" / "code").verify(tmp_path / "set" / "code")


def rank(words: list[str]) -> int:
    """What each process of the test above runs."""
    return drafts_train.run(parsed(drafts_train, *words))


def test_flags_become_settings_and_bad_values_sentences(tmp_path: Path) -> None:
    base = ["--prompts", "p.jsonl", "--domain", "math"]
    config = training_config(parsed(drafts_train, *base, "--out", "x/y"), Path("x/y"))
    assert config == TrainConfig(domain="math", name="y")
    words = [*base, "--out", "x", "--name", "n", "--epochs", "2.5", "--kind", "standalone", "--layers", "0,-1"]
    given = training_config(parsed(drafts_train, *words), Path("x"))
    assert (given.name, given.epochs, given.kind, given.layers) == ("n", 2.5, "standalone", "0,-1")
    with pytest.raises(TrainingError, match="--name 'a b'"):
        training_config(parsed(drafts_train, *base, "--out", "a b"), Path("a b"))
    for flag, value in (
        ("--sampled", "2"),
        ("--epochs", "-1"),
        ("--epochs", "nan"),
        ("--seed", "-3"),
        ("--vocab", "x"),
    ):
        with pytest.raises(SystemExit):
            parsed(drafts_train, *base, "--out", "x", flag, value)


def test_the_start_is_the_sets_general_draft(model: Path, tmp_path: Path) -> None:
    words = train_words(model, tmp_path, "--quiet")
    words[words.index("--domain") + 1] = "general"
    words[words.index("--out") + 1] = str(tmp_path / "set" / "base")
    assert drafts_train.run(parsed(drafts_train, *words)) == 0
    base = tmp_path / "set" / "base"
    fingerprint = Manifest.read(base).target.fingerprint
    out, home, config = tmp_path / "set" / "code", tmp_path / "home", TrainConfig(domain="code", name="code")

    def start(word: str, config: TrainConfig = config, fingerprint: str = fingerprint, out: Path = out) -> Path | None:
        return starting_draft(word, out, config, home, fingerprint)

    assert start("auto") == base
    assert start("base") == base
    assert start(str(base)) == base
    assert start("none") is None
    assert start("auto", dataclasses.replace(config, domain="general")) is None
    assert start("auto", dataclasses.replace(config, kind="standalone")) is None
    assert start("auto", fingerprint="0" * 64) is None
    assert start("auto", out=tmp_path / "elsewhere" / "code") is None
    with pytest.raises(ConfigError, match=r"no such draft for this target \(there are: base\)"):
        start("bass")


def test_lines_for_logs_come_rarely_and_say_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    lines = Lines(lambda: now[0])
    for done in range(1, 101):
        now[0] += 1.0
        lines("fit", done, 100, "loss 1.5")
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == "fitting: 1 of 100 (loss 1.5)"
    assert shown[1] == "fitting: 21 of 100 (loss 1.5), about 79 s left"
    assert shown[-1] == "fitting: 100 of 100 (loss 1.5)"
    assert len(shown) == 6


def test_the_recorded_command_names_files_without_their_folders() -> None:
    words = ["drafts", "train", "--prompts", "/home/me/my prompts.jsonl", "data/code.jsonl", "--seed", "1"]
    assert recorded_command(words) == ("edgespec drafts train --prompts 'my prompts.jsonl' data/code.jsonl --seed 1")


def test_durations_are_short() -> None:
    assert [duration(s) for s in (3.4, 89, 600, 9000)] == ["3 s", "89 s", "10 min", "2.5 h"]


def test_errors_of_training_are_sentences_for_the_user(model: Path, tmp_path: Path) -> None:
    words = train_words(model, tmp_path, "--quiet")
    (tmp_path / "code.jsonl").write_text(json.dumps({"prompt": "only one"}) + "\n")
    with pytest.raises(TrainingError, match="one prompt is usable"):
        drafts_train.run(parsed(drafts_train, *words))
    assert not (tmp_path / "set").exists()
