"""Conversion: nothing half-made stays, what is there is left alone, damage is named, memory stays small."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from edgespec.errors import ConfigError, EdgespecError, ModelError
from edgespec.models.convert.conversion import Wanted, convert
from edgespec.models.tokenizer import load_tokenizer
from edgespec.models.weights.opening import open_weights
from tests.support.packed import SHAPE, converted
from tests.support.tiny import tiny_config, tiny_tensors, write_tiny

EMBEDDING, HEAD, UP = "model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.up_proj.weight"


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    source, out = write_tiny(tmp_path / "source", **SHAPE), tmp_path / "out"
    out.mkdir()
    with pytest.raises(ConfigError, match="out: is there already; give --out another folder, or --force"):
        converted(source, out)
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="was not written by edgespec convert"):
        converted(source, out, force=True)
    assert [p.name for p in out.iterdir()] == ["thesis.txt"]
    for inside in (source, tmp_path):
        with pytest.raises(ConfigError, match="holds the model that is to be converted"):
            converted(source, inside, force=True)
    with pytest.raises(ConfigError, match="missing: is not a folder"):
        converted(source, tmp_path / "missing" / "out")


def test_force_replaces_only_when_the_new_one_is_complete(tmp_path: Path) -> None:
    source, out = write_tiny(tmp_path / "source", **SHAPE), tmp_path / "out"
    converted(source, out)
    old = (out / "model.safetensors").read_bytes()
    tensors = tiny_tensors(tiny_config(**SHAPE))
    tensors[UP][0, 0] = np.nan
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ModelError, match=r"up_proj.weight holds NaN"):
        converted(source, out, 8, force=True)
    assert (out / "model.safetensors").read_bytes() == old
    write_tiny(source, **SHAPE)
    converted(source, out, 8, force=True)
    assert (out / "model.safetensors").read_bytes() != old
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]


def test_damage_in_the_source_leaves_nothing(tmp_path: Path) -> None:
    for cut in (4000, 200_000):
        source = write_tiny(tmp_path / "source", **SHAPE)
        with open_weights(source) as weights:
            os.truncate(source / "model.safetensors", cut)
            with pytest.raises(ModelError, match="incomplete"):
                convert(weights, load_tokenizer(source), tmp_path / "out", Wanted(4))
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_tiny(tmp_path / "source", **SHAPE)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 9 * 10**8, 65_000_000))
    with pytest.raises(ConfigError, match=r"needs 0.00 GB, and its disk has 0.07 GB free"):
        converted(source, tmp_path / "out")
    monkeypatch.undo()
    monkeypatch.setattr(os, "pwrite", lambda *arguments: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(ConfigError, match="cannot be written \\(No space left on device\\)"):
        converted(source, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_two_do_not_meet(tmp_path: Path) -> None:
    """A child stands still in the middle: nobody else may write; once it is killed, the next one goes on."""
    source, out = write_tiny(tmp_path / "source", **SHAPE), tmp_path / "out"
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom edgespec.models.convert.conversion import Wanted, convert\n"
        "from edgespec.models.tokenizer import load_tokenizer\n"
        "from edgespec.models.weights.opening import open_weights\n"
        "def wait(name, done, total):\n    if 2 * done > total: print('here', flush=True); time.sleep(600)\n"
        f"p = Path({str(source)!r})\n"
        f"convert(open_weights(p), load_tokenizer(p), Path({str(out)!r}), Wanted(4), report=wait)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "here\n"
        with pytest.raises(ConfigError, match="another edgespec convert is writing it"):
            converted(source, out)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert not out.exists()
    assert (tmp_path / ".out.converting").is_dir()
    converted(source, out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "source"]
    open_weights(out).close()


def test_damaged_folders_of_ours_say_so(tmp_path: Path) -> None:
    source, out = write_tiny(tmp_path / "source", **SHAPE), tmp_path / "out"
    converted(source, out)
    with safe_open(out / "model.safetensors", "np") as opened:
        tensors = {name: opened.get_tensor(name) for name in list(opened.keys())}

    def refused(changes: dict[str, np.ndarray | None], words: str) -> None:
        kept = {k: v for k, v in {**tensors, **changes}.items() if v is not None}
        save_file(kept, out / "model.safetensors")
        with pytest.raises(ModelError, match=words), open_weights(out) as weights:
            weights.read(UP)

    refused({f"{UP}.scale": None}, "up_proj.weight.scale is missing")
    refused({f"{UP}.q": None}, "up_proj.weight.q is missing")
    refused({f"{UP}.shift": tensors[f"{UP}.scale"]}, "zero or shift alone")
    refused({f"{UP}.scale": tensors[f"{UP}.scale"][:, :3].copy()}, "does not fit its scales")
    refused({f"{UP}.q": tensors[f"{UP}.q"][:, :16].copy()}, "does not fit its scales")
    refused({f"{UP}.q": tensors[f"{UP}.q"].astype(np.float16)}, "does not fit its scales")
    refused({f"{UP}.q": np.ones((), np.uint8)}, "does not fit its scales")
    refused({f"{UP}.scale": np.ones((), np.float16)}, "does not fit its scales")
    refused({f"{UP}.scale": np.full_like(tensors[f"{UP}.scale"], np.nan)}, "scale holds NaN")
    config = json.loads((out / "config.json").read_text())
    config["edgespec_quantisation"]["version"] = 9
    (out / "config.json").write_text(json.dumps(config))
    refused({}, "has version 9, this edgespec reads 1")


def test_errors_are_for_the_user(tmp_path: Path) -> None:
    for name, spoil in (("a", "num_hidden_layers"), ("b", "hidden_size")):
        source = write_tiny(tmp_path / name, **SHAPE)
        config = json.loads((source / "config.json").read_text())
        del config[spoil]
        (source / "config.json").write_text(json.dumps(config))
        with pytest.raises(EdgespecError, match=f"{spoil} is missing"):
            converted(source, tmp_path / "out")


# Memory


def _peak_of(source: Path, out: Path, results: Any) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    converted(source, out)
    results.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """A table of 128 MB (float32) is converted in much less than its own size."""
    shape = {**SHAPE, "vocab_size": 256_000, "tie_word_embeddings": True}
    source = write_tiny(tmp_path / "source", **shape)
    assert (source / "model.safetensors").stat().st_size > 128_000_000
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    child = context.Process(target=_peak_of, args=(source, tmp_path / "out", results))
    start = time.monotonic()
    child.start()
    child.join(120)
    assert child.exitcode == 0, time.monotonic() - start
    assert results.get() < 100_000_000
