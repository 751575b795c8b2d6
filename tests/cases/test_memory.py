"""Fault cases "Memory, loading" that touch one target: measured in child processes, on a model of some megabytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edgespec.models.build import planned_bytes
from edgespec.models.onnx import cache as onnx_cache
from edgespec.models.weights.opening import open_weights
from tests.support.tiny import write_tiny

MIB = 1 << 20
SIZES = {
    "vocab_size": 16384,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}
MEASURE = """
import sys
from edgespec import Engine, SamplingParams
from edgespec.memory.topology import peak_memory_bytes, process_memory
import edgespec.engine, onnxruntime, tokenizers, onnx
before = peak_memory_bytes()
options = {"drafts": sys.argv[3:] or None, "weight_format": sys.argv[2], "gamma": 2, "threads": 1}
with Engine.from_pretrained(sys.argv[1], **options) as e:
    e.generate([5, 6, 7], SamplingParams(max_new_tokens=8, ignore_eos=True))
    print(peak_memory_bytes() - before)
"""
REPEAT = """
import sys
from edgespec import Engine, SamplingParams
from edgespec.memory.topology import process_memory
sizes = []
for _ in range(9):
    with Engine.from_pretrained(sys.argv[1], drafts=[sys.argv[1]], gamma=2, threads=1, weight_format="float32") as e:
        e.generate([5, 6, 7], SamplingParams(max_new_tokens=8, ignore_eos=True))
    sizes.append(process_memory())
print(max(sizes[5:]) - sizes[2])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "model", **SIZES)


def measured(code: str, home: Path, *arguments: str) -> int:
    env = {**os.environ, "EDGESPEC_HOME": str(home)}
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return int(run.stdout)


def test_weights_are_never_held_twice(model, tmp_path):
    """B121, B122: peaks over what the process had before, while converting, on a later start, and with a draft.

    The draft's cache grows with the conversation, not with its 8192 positions (32 MiB here).
    """
    with open_weights(model) as weights:
        planned = planned_bytes(weights, "cpu", "float32")
    largest = 16384 * 256 * 4  # converting holds one tensor at a time
    converting = measured(MEASURE, tmp_path, str(model), "float32")
    alone = measured(MEASURE, tmp_path, str(model), "float32")
    with_draft = measured(MEASURE, tmp_path, str(model), "float32", str(model))
    assert converting < planned + largest + 20 * MIB
    assert alone < planned + 30 * MIB
    assert with_draft - alone < planned + 15 * MIB


def test_repeated_loading_returns_its_memory(model, tmp_path):
    """B127: nine rounds of load and close of target and draft; nothing piles up."""
    with open_weights(model) as weights:
        planned = planned_bytes(weights, "cpu", "float32")
    assert measured(REPEAT, tmp_path, str(model)) < planned


def test_a_replaced_file_is_another_model(tmp_path):
    """B118: same path, other weights: the prepared graph of the old file is not used."""
    folder = write_tiny(tmp_path / "model")
    with open_weights(folder) as weights:
        before = onnx_cache._key(weights, "exact")
    write_tiny(folder, seed=1)
    with open_weights(folder) as weights:
        assert onnx_cache._key(weights, "exact") != before


def test_no_room_is_said_before_loading(model, tmp_path):
    """B128: a budget below the plan is an error with the numbers and exit code 2, before any weight is read."""
    env = {**os.environ, "EDGESPEC_HOME": str(tmp_path)}
    code = "import sys; from edgespec.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "generate", "-m", str(model), "--raw", "hi", "--memory-budget", "100MiB"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert "are needed" in run.stderr
    assert "100.0 MiB" in run.stderr
