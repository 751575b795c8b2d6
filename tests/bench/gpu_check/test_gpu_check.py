"""scripts/gpu_check.sh: every part runs to its end on the CPU in tiny shapes, and goals that are missed are seen."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from edgespec.bench.gpu_check import __main__ as gpu_check
from edgespec.bench.gpu_check import bandwidth, rounds, steps, suite
from edgespec.bench.gpu_check.random_models import QWEN_3B, QWEN_7B, QWEN_HALF_B, TINY, TINY_DRAFT, RandomWeights
from edgespec.bench.gpu_check.report import Check, table
from edgespec.bench.gpu_check.steps import Rounds
from edgespec.kernels import reference
from edgespec.models.cuda import draft
from edgespec.models.cuda.decoder import CudaDecoder

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    path = tmp_path / "out.json"
    code = gpu_check.main(["--json", str(path), "--device", "cpu", "--tiny", *arguments])
    return code, json.loads(path.read_text())


def test_without_a_device_nothing_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--json", str(tmp_path / "none.json")]) == 3
    assert capsys.readouterr().out == "no CUDA device: nothing was measured\n"
    assert not (tmp_path / "none.json").exists()


def test_the_script_says_so_too(tmp_path: Path) -> None:
    script = str(ROOT / "scripts" / "gpu_check.sh")
    environment = {**os.environ, "EDGESPEC_PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (3, "no CUDA device: nothing was measured\n")
    assert list(tmp_path.iterdir()) == []
    told = subprocess.run([script, "--help"], capture_output=True, text=True, check=True).stdout
    assert told.startswith("Usage: gpu_check.sh")


def test_shellcheck_finds_nothing() -> None:
    command = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    if command is None:
        pytest.skip("shellcheck is not installed (it comes with the dev extra)")
    done = subprocess.run(
        [command, str(ROOT / "scripts" / "gpu_check.sh")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_every_part_runs_in_tiny(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run(tmp_path, "--parts", "parity,rounds,bandwidth,steps,loading,memory")
    assert code == 0
    findings = {(each["part"], each["what"]): each for each in found["findings"]}
    assert found["tiny"]
    assert found["machine"]["torch"] == torch.__version__
    known = {"parity", "rounds", "bandwidth", "steps", "speculation", "loading", "drafts", "memory"}
    assert {part for part, _ in findings} == known
    for (part, what), each in findings.items():
        assert np.isfinite(each["value"]), (part, what)
    assert findings["drafts", "decoders built"]["value"] == 2
    assert findings["drafts", "turns of 2 of 5 drafts"]["ok"]
    for what in ("a draft loads", "drafts of other forms load"):
        assert findings["loading", f"loads completed while {what}"]["value"] >= 1
    judged = [each for (part, _), each in findings.items() if part == "rounds"]
    assert len(judged) == 6
    assert all(each["ok"] for each in judged)
    assert findings["rounds", "texts with drafts that are the plain text"]["value"] == 16
    printed = capsys.readouterr().out
    assert all(what in printed for _, what in findings)


def test_a_part_that_fails_costs_its_own_numbers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_check: Check) -> None:
        raise RuntimeError("no kernel image is available")

    monkeypatch.setitem(gpu_check.PARTS, "parity", broken)
    code, found = run(tmp_path, "--parts", "parity,bandwidth")
    assert code == 1
    first, *others = found["findings"]
    assert not first["ok"]
    assert "no kernel image" in first["note"]
    assert {each["part"] for each in others} == {"bandwidth"}
    code, found = run(tmp_path, "--parts", "bandwidth", "--seconds", "0")
    assert code == 1
    assert found["findings"][0]["note"] == "the time is up"


def judged(*names: str) -> dict[str, bool | None]:
    """What is found by these of the part "rounds"."""
    check = Check(torch.device("cpu"), tiny=True)
    with rounds.staged(check) as stage:
        for name in names:
            getattr(stage, name)()
    return {each.what: each.ok for each in check.findings}


def test_a_rule_that_takes_every_guess_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """In texts with drafts, alone and in batches; the draft that is the target itself shows nothing of it."""
    right = reference.accept_greedy

    def blind(best: torch.Tensor, tokens: torch.Tensor, begins: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        found = right(best, tokens, begins, ends)
        found[:, 0] = ends - begins
        return found

    monkeypatch.setattr(reference, "accept_greedy", blind)
    assert list(judged("texts", "batch").values()) == [False, False]


def test_a_second_look_in_a_round_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDecoder, "takes", lambda self, guesses: False)
    assert list(judged("looks").values()) == [False]


def test_guesses_by_another_law_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn without chance, they fit neither the law that they name nor, judged by it, the target's."""
    monkeypatch.setattr(draft, "_drawn", lambda law, uniform: law.argmax(-1))
    found = judged("blocks", "law")
    assert found["a draft's guesses: chi-square, of its bound"] is False
    assert found["sampled text, draft equal: chi-square, of its bound"] is False


def test_the_bound_of_chi_square() -> None:
    """Of eight equal cells about 30 (SciPy: 29.88 for one in 10,000)."""
    law, rng = np.full(8, 1 / 8), np.random.default_rng(0)
    assert all(rounds.misfit(rng.multinomial(400, law), law) < 1 for _ in range(200))
    off = np.array([1.0, -1, 1, -1, 1, -1, 1, -1])
    exact = 400 * law + off * (29.88 / 8 * 50) ** 0.5
    assert rounds.misfit(exact, law) == pytest.approx(1, rel=0.02)
    with_rare = np.array([0.9, 0.0999, 0.0001])
    assert rounds.misfit(np.array([360, 40, 0]), with_rare) < 1
    assert rounds.misfit(np.array([320, 40, 40]), with_rare) > 1


@pytest.mark.parametrize(("rate", "met"), [(81.0, True), (79.0, False)])
def test_the_goal_of_the_kernels(rate: float, met: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "copy_rate", lambda *_: 100.0)
    monkeypatch.setattr(bandwidth, "moving_rate", lambda *_, **__: rate)
    monkeypatch.setattr(bandwidth, "matrix_rate", lambda *_, **__: rate)
    check = Check(torch.device("cpu"))
    bandwidth.run(check)
    judged = [each for each in check.findings if each.ok is not None]
    assert len(judged) == 4 * 2 * 2  # shapes, groups, with and without the same bits
    assert {each.ok for each in judged} == {met}
    assert check.failed is not met
    assert ("MISSED" in table(check.findings)) is not met


@pytest.mark.parametrize(("rate", "tokens"), [(0.0, 1.0), (1.0, 4.0), (0.6, 1 + 0.6 + 0.36 + 0.216)])
def test_rounds_emit_what_the_rate_says(rate: float, tokens: float) -> None:
    """Both caches hold the text after each round, whatever stood."""
    target, draft = (
        CudaDecoder(RandomWeights(model).file, device="cpu", positions=2048) for model in (TINY, TINY_DRAFT)
    )
    rounds = Rounds(target, draft, 3, rate)
    count, made = 60, 0
    for _ in range(count):
        before = rounds._cache.length
        more = rounds.one()[0]
        made += more
        assert rounds._cache.length == before + more
        assert rounds._own.length + len(rounds._pending) == rounds._cache.length + 1
        if before > 350:
            break
    else:
        assert made / count == pytest.approx(tokens, abs=0.35)


def test_tests_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    check = Check(torch.device("cuda"), tiny=True)
    for last, code, ok in (("5 passed, 2 skipped in 3s", 0, True), ("1 failed, 5 passed in 3s", 1, False)):
        done = SimpleNamespace(stdout=f"..\n{last}\n", stderr="", returncode=code)
        monkeypatch.setattr(subprocess, "run", lambda *_, done=done, **__: done)
        suite.run(check)
        assert (check.findings[-1].value, check.findings[-1].ok) == (5, ok)

    def late(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("pytest", 1.0)

    monkeypatch.setattr(subprocess, "run", late)
    suite.run(check)
    assert check.findings[-1].value is None
    assert "in time" in check.findings[-1].note


def test_shapes_are_those_of_the_models() -> None:
    """Parameters as the hub counts them, in millions."""
    for model, millions in ((QWEN_7B, 7616), (QWEN_3B, 3086), (QWEN_HALF_B, 494)):
        weights = RandomWeights(model)
        assert sum(int(np.prod(weights.shape(name))) for name in weights.names()) / 1e6 == pytest.approx(
            millions, abs=1
        )


def test_random_weights_are_the_same_again_and_have_both_forms() -> None:
    one, two, other = RandomWeights(TINY), RandomWeights(TINY), RandomWeights(TINY, seed=1)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert np.array_equal(one.read(name), two.read(name))
    assert not np.array_equal(one.read(name), other.read(name))
    kept = one.quantised(name)
    assert kept is not None
    assert kept.bits == 4
    assert kept.shape == one.shape(name)
    assert 0.5 < one.read(name).std() * 64**0.5 < 1.5
    embedding = one.quantised("model.embed_tokens.weight")
    assert embedding is not None
    assert embedding.bits == 8
    assert one.quantised("model.norm.weight") is None


def test_a_model_that_does_not_fit_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    real = CudaDecoder.__init__

    def small(self: CudaDecoder, weights: Any, **options: Any) -> None:
        if weights.spec is TINY:
            raise RuntimeError("NvMapMemAllocInternalTagged: 1075072515 error 12")
        real(self, weights, **options)

    monkeypatch.setattr(CudaDecoder, "__init__", small)
    check = Check(torch.device("cpu"), tiny=True)
    steps.run(check)
    assert check.findings[-1].note == "does not fit into the memory of this device"
    assert not check.failed
