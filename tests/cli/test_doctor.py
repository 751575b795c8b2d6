"""`edgespec doctor`: a line a check, advice where something is wrong, and exit code 1 when something fails."""

from __future__ import annotations

import argparse
import json
from importlib import metadata
from pathlib import Path

import pytest

from edgespec import selftest
from edgespec.cli import doctor, runtime
from edgespec.cli.main import main
from edgespec.errors import ModelError
from edgespec.results import GenerationResult, GenerationStats
from tests.support.tiny import write_tiny


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A self-test that passes at once, so that the other checks are looked at alone."""
    monkeypatch.setattr(selftest, "run", lambda load: selftest.SelfTest(48, 40, None))


def report(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, dict[str, str]]]:
    code = main(["doctor", "--json", *flags])
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is (code == 0)
    return code, {check["name"]: check for check in data["checks"]}


def test_a_healthy_device(healthy: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny(tmp_path / "tiny")
    code, checks = report(capsys, "--model", str(folder))
    assert code == 0
    assert set(checks) >= {"edgespec", "packages", "providers", "cpu", "memory", "cache", "config", "model", "lossless"}
    assert metadata.version("numpy") in checks["packages"]["detail"]
    assert "CPU" in checks["providers"]["detail"]
    assert "cores usable" in checks["cpu"]["detail"]
    assert "llama, 2 layers, context 256" in checks["model"]["detail"]
    assert "48 tokens equal" in checks["lossless"]["detail"]


def test_the_text_form_has_a_status_a_line(healthy: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("ok    ", "warn  ", "      ")) for line in lines)
    place = next(number for number, line in enumerate(lines) if line.startswith("warn  model: smollm2-135m is not on"))
    assert lines[place + 1].strip().endswith("edgespec pull smollm2-135m")


def test_what_fails_sets_the_exit_code_and_says_what_to_do(
    healthy: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "file"))
    code, checks = report(capsys)
    assert code == 1
    assert checks["cache"]["status"] == "fail"
    assert "EDGESPEC_HOME" in checks["cache"]["advice"]


@pytest.mark.parametrize(
    ("missing", "words"), [("tokenizers", "missing: tokenizers"), ("onnxruntime", "no ONNX Runtime")]
)
def test_missing_packages(
    healthy: None, monkeypatch: pytest.MonkeyPatch, missing: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = metadata.version

    def version(name: str) -> str:
        if name == missing:
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "version", version)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert f"fail  packages: {words}" in out
    assert "pip install 'edgespec[cpu]'" in out


@pytest.mark.parametrize(
    ("flags", "check", "words"),
    [
        (["--model", "/no/such/model"], "model", "/no/such/model"),
        (["--model", "smolm2-135m"], "model", "did you mean smollm2-135m"),
        (["--threads", "0"], "configuration", "threads = 0"),
    ],
)
def test_wrong_settings_are_a_failed_check(
    healthy: None, flags: list[str], check: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, checks = report(capsys, *flags)
    assert code == 1
    assert checks[check]["status"] == "fail"
    assert words in checks[check]["detail"]


def test_a_model_that_does_not_fit_is_a_failed_check(
    healthy: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from edgespec.memory import topology

    monkeypatch.setattr(topology, "host_available_bytes", lambda *root: 1000)
    code, checks = report(capsys, "--model", str(write_tiny(tmp_path / "tiny")))
    assert code == 1
    assert "more than is free" in checks["model"]["advice"]
    assert checks["memory"]["status"] == "warn"


def test_a_damaged_model_is_a_failed_check(healthy: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_tiny(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:200])
    code, checks = report(capsys, "--model", str(folder))
    assert code == 1
    assert "model.safetensors" in checks["model"]["detail"]


def test_a_broken_check_is_a_failed_check(
    healthy: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(args: argparse.Namespace) -> list[doctor.Check]:
        raise RuntimeError("surprise")

    monkeypatch.setattr(doctor, "CHECKS", (broken, doctor._versions))
    code, checks = report(capsys)
    assert code == 1
    assert checks["broken"]["detail"] == "RuntimeError: surprise"
    assert "edgespec" in checks  # the others still run


class OneAnswerEngine:
    """Answers with given tokens: the plain ones, then a list for each gamma."""

    def __init__(self, plain: list[int], drafted: list[int], accepted: int) -> None:
        self.plain, self.drafted, self.accepted = plain, drafted, accepted
        self.gamma, self.draft = 4, "auto"

    def __enter__(self) -> OneAnswerEngine:
        return self

    def __exit__(self, *error: object) -> None: ...

    def use_draft(self, name: str) -> None:
        self.draft = name

    def generate(self, prompt: str, params: object, *, raw: bool) -> GenerationResult:
        ids = self.plain if self.draft == "off" else self.drafted
        accepted = 0 if self.draft == "off" else self.accepted
        return GenerationResult("", tuple(ids), "length", 5, GenerationStats(accepted_tokens=accepted))


@pytest.mark.parametrize(
    ("plain", "drafted", "accepted", "words"),
    [
        ([1, 2, 3], [1, 2, 3], 2, None),
        ([1, 2, 3], [1, 2, 4], 2, "with gamma 1 the output leaves plain decoding at token 3"),
        ([1, 2, 3], [1, 2], 2, "leaves plain decoding at token 3"),
        ([1, 2], [1, 2], 2, "gave 2 tokens instead of 3"),
        ([1, 2, 3], [1, 2, 3], 0, "nothing was compared"),
    ],
)
def test_the_self_test_notices(plain: list[int], drafted: list[int], accepted: int, words: str | None) -> None:
    result = selftest.run(lambda config: OneAnswerEngine(plain, drafted, accepted), new_tokens=3)
    assert result.problem is None if words is None else words in (result.problem or "")


def test_the_self_test_on_the_real_engine() -> None:
    result = selftest.run(runtime.engine_class().from_pretrained)
    assert result.problem is None
    assert result.tokens == 48
    assert result.accepted > 10


def test_an_engine_that_cannot_start_is_a_failed_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        @staticmethod
        def from_pretrained(**settings: object) -> None:
            raise ModelError("ONNX Runtime cannot run this graph.")

    monkeypatch.setattr(runtime, "engine_class", lambda: Broken)
    code, checks = report(capsys)
    assert code == 1
    assert "ONNX Runtime cannot run this graph." in checks["lossless"]["detail"]
