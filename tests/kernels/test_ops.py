"""Which side computes, and what happens where Triton cannot."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from edgespec.errors import ConfigError
from edgespec.kernels import ops, paged, reference, tuning
from edgespec.kernels.weights import QuantisedTorch
from tests.kernels.conftest import COMPILED, INSTALLED

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _as_at_the_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    before = ops.use("auto")
    ops._works.cache_clear()
    yield
    ops.use(before)
    ops._works.cache_clear()


def test_a_cpu_has_torch_unless_asked_otherwise() -> None:
    assert ops.backend(CPU) == "torch"
    assert ops.use("triton") == "auto"
    assert ops.backend(CPU) == "triton"
    assert ops.use("torch") == "triton"
    assert ops.backend(torch.device("cuda")) == "torch"
    with pytest.raises(ValueError, match="'cuda'"):
        ops.use("cuda")  # type: ignore[arg-type]


@pytest.mark.skipif(not INSTALLED or COMPILED, reason="needs Triton's interpreter")
def test_the_interpreter_is_taken_when_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert ops.backend(CPU) == "triton"


@pytest.mark.parametrize("fault", ["missing", "broken", "wrong"])
def test_without_a_working_triton_torch_computes_after_one_warning(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_device: torch.device) -> bool:
        if fault == "broken":
            raise RuntimeError("Failed to find C compiler\nmore")
        return False

    monkeypatch.setattr(ops, "_probe", broken)
    if fault == "missing":
        monkeypatch.setattr(ops, "find_spec", lambda _name: None)
    else:
        monkeypatch.setattr(ops, "find_spec", lambda _name: object())
    with caplog.at_level(logging.WARNING, "edgespec.kernels.ops"):
        for _ in range(3):
            assert ops.backend(torch.device("cuda")) == "torch"
    cause = {"missing": "not installed", "broken": "Failed to find C compiler", "wrong": "product is wrong"}[fault]
    assert [cause in record.getMessage() for record in caplog.records] == [True]


def test_the_package_imports_neither_torch_nor_triton_and_the_face_no_triton() -> None:
    code = (
        "import sys, edgespec.kernels; assert not {'torch', 'triton'} & set(sys.modules)\n"
        "import torch; before = 'triton' in sys.modules\n"
        "from edgespec.kernels import ops, paged, reference, tuning, weights\n"
        "ops.rms_norm(torch.ones(1, 4), torch.ones(4), 1e-6)\n"
        "assert before or 'triton' not in sys.modules"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=environment)


@pytest.mark.parametrize("one_hot", [False, True])
def test_references_never_read_a_tensor_on_the_host(one_hot: bool) -> None:
    """Tensors without contents refuse to be read."""

    def blank(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    weight = QuantisedTorch(4, 32, blank(6, 32, dtype=torch.uint8), blank(6, 2))
    tables, blocks, starts = blank(99, 8), blank(1, 4, dtype=torch.int64), blank(1, dtype=torch.int64)
    assert reference.linear(blank(3, 64), weight, residual=blank(3, 6)).shape == (3, 6)
    assert reference.gated_linear(blank(3, 64), weight).shape == (3, 3)
    assert reference.rms_norm(blank(3, 4), blank(4), 1e-6, blank(3, 4))[0].shape == (3, 4)
    for slabs in (1, 2):
        keys = (blank(4, 2, 16, 16),) * slabs
        kv = paged.PagedLayer(keys, keys, blocks, blocks, starts)
        q = paged.rotary_and_write(blank(3, 8 * 16), tables, tables, kv, 3, 4)
        assert paged.attention(q, kv, 3, 5).shape == (3, 64)
        moves = blank(3, 4, dtype=torch.int64)
        paged.move_blocks((blank(2, 3, 4, 2, 16, 16),) * slabs, moves)
        assert paged.remap(blank(2, 2, 9, dtype=torch.int64), moves).shape == (2, 2, 9)
    best, ends = reference.best_tokens(blank(6, 7)).view(2, 3), blank(2, dtype=torch.int64)
    assert reference.accept_greedy(best, best, ends, ends).shape == (2, 2)
    p, guesses = blank(3, 7), blank(2, dtype=torch.int64)
    assert reference.accept_sampled(p, None if one_hot else p, guesses, blank(3)).shape == (2,)


def test_boards_find_their_configuration() -> None:
    default = tuning.for_capability(None)
    assert tuning.for_capability(87).dot.programs == 64
    assert tuning.for_capability(87).wide == default.wide
    assert tuning.for_capability(88) == tuning.for_capability(87)
    assert tuning.for_capability(80) == default
    assert tuning.for_capability(121) == default
    assert tuning.for_capability(110).vector.programs == tuning.for_capability(101).vector.programs == 160
    assert tuning.of(CPU) == default


def test_a_matrix_is_cut_until_the_device_is_busy() -> None:
    assert tuning.splits(blocks=64, steps=32, programs=64) == 1
    assert tuning.splits(blocks=14, steps=38, programs=64) == 4
    assert tuning.splits(blocks=1, steps=1000, programs=1000) == 16
    assert tuning.splits(blocks=1, steps=3, programs=1000) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[sm_87]\n", "no table"),
        ("[default]\n[orin]\n", "neither"),
        ("[default]\nmagic = {}\n", "no kernel reads"),
        ("[default]\ndot = { block_q = 1 }\n", "block_q is not known"),
        ("[default]\ndot = { block_n = 48 }\n", "power of two"),
        ("[default]\ndot = { stages = 0 }\n", "above 0"),
    ],
)
def test_a_damaged_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "tuning.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        tuning._tables(path)
