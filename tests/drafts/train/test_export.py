"""Exports: a standalone draft as it is, a head in EAGLE's names with what that layout loses said out loud."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from drafts.head import FILE_NAME, HeadWeights, write_head_file
from drafts.manifest import FileInfo, Manifest, TargetBuild
from drafts.train.config import TrainTarget
from drafts.train.errors import TrainingError
from drafts.train.export import _Head, eagle_tensors, export_eagle, export_hf, fold
from drafts.train.module import HeadModule, HeadShape, Rows
from edgespec.errors import DraftError
from tests.drafts.train.support import text, tiny_target
from tests.support.tiny_head import random_head, random_tensors, tiny_spec


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TrainTarget:
    return tiny_target(tmp_path_factory.mktemp("target"))


def entry(folder: Path, weights: HeadWeights | None = None, kind: str = "head") -> Path:
    folder.mkdir()
    weights = weights or random_head()
    name = FILE_NAME if kind == "head" else "config.json"
    if kind == "head":
        write_head_file(folder / name, weights)
    else:
        (folder / name).write_text("{}")
    build = TargetBuild("tiny", "0" * 64, "0" * 64, 32, 288)
    files = {name: FileInfo.of(folder / name)}
    numbers = weights.spec.to_mapping() if kind == "head" else {}
    Manifest("code", kind, "code", build, files, "MIT", "int8", architecture=numbers).write(folder)
    return folder


def inputs(count: int = 40, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, 32)).astype(np.float32), rng.standard_normal((count, 32)).astype(np.float32)


def test_the_layer_in_numpy_is_the_one_that_is_trained() -> None:
    import torch

    weights = random_head()
    head, spec = _Head.of(weights), weights.spec
    module = HeadModule(HeadShape(**{name: getattr(spec, name) for name in HeadShape.__dataclass_fields__}))
    module.load_state_dict({n: torch.from_numpy(np.array(v)) for n, v in {**head.matrices, **head.vectors}.items()})
    embeds, hidden = inputs()
    rows = Rows(torch.from_numpy(embeds)[None], torch.from_numpy(hidden)[None], torch.ones(1, 40, dtype=torch.bool), 0)
    with torch.no_grad():
        expected = module.unroll(rows, 1)[0][0].numpy()
    np.testing.assert_allclose(head.run(embeds, hidden)["feature"], expected, atol=2e-4, rtol=1e-3)


def test_where_rows_are_of_equal_size_the_folded_layer_is_exact() -> None:
    """Rows whose root mean squares do not differ, and a layer that only mixes its inputs: nothing is lost."""
    spec = tiny_spec()
    tensors = random_tensors(spec)
    for name in ("o", "down"):
        tensors[name][:] = 0
    orthogonal = np.linalg.qr(np.random.default_rng(1).standard_normal((64, 64)))[0].astype(np.float32)
    tensors["fc"] = orthogonal[:32]
    tensors["out_norm"][:] = np.linspace(0.5, 2, 32)
    head = _Head(spec, {n: tensors[n] for n in spec.matrices}, {n: v for n, v in tensors.items() if v.ndim == 1}, [1])
    embeds, hidden = inputs()
    embeds /= np.sqrt((embeds**2).mean(-1, keepdims=True)) / 3
    hidden /= np.sqrt((hidden**2).mean(-1, keepdims=True)) / 5
    plain = head.run(embeds, hidden)
    folded = fold(head, [(embeds, hidden)]).run(embeds, hidden)
    size = np.sqrt((plain["mixed"] ** 2).mean(-1, keepdims=True))
    wanted = plain["feature"] * size / np.median(size)  # the final norm's divisor is all that differs
    np.testing.assert_allclose(folded["feature"], wanted, atol=1e-3, rtol=1e-3)


def test_a_head_is_written_with_eagles_names(target: TrainTarget, tmp_path: Path) -> None:
    folder = entry(tmp_path / "code")
    decoder = target.decoder(128)
    texts = [target.encode(text(n)) for n in range(4)]
    done = export_eagle(folder, tmp_path / "eagle", decoder, texts)
    out = tmp_path / "eagle"
    assert sorted(path.name for path in out.iterdir()) == [
        "README.txt", "config.json", "draft_vocabulary.json", "model.safetensors"
    ]  # fmt: skip
    shapes = {name: value.shape for name, value in load_file(out / "model.safetensors").items()}
    layer = "layers.0."
    assert shapes == {
        "fc.weight": (32, 64),
        f"{layer}self_attn.q_proj.weight": (64, 32),
        f"{layer}self_attn.k_proj.weight": (32, 32),
        f"{layer}self_attn.v_proj.weight": (32, 32),
        f"{layer}self_attn.o_proj.weight": (32, 64),
        f"{layer}post_attention_layernorm.weight": (32,),
        f"{layer}mlp.gate_proj.weight": (64, 32),
        f"{layer}mlp.up_proj.weight": (64, 32),
        f"{layer}mlp.down_proj.weight": (32, 64),
    }
    assert {value.dtype for value in load_file(out / "model.safetensors").values()} == {np.dtype(np.float16)}
    config = json.loads((out / "config.json").read_text())
    assert (config["num_hidden_layers"], config["num_attention_heads"], config["vocab_size"]) == (1, 4, 288)
    vocabulary = json.loads((out / "draft_vocabulary.json").read_text())
    ids = [place + offset for place, offset in enumerate(vocabulary["d2t"])]
    assert ids == random_head().vocab.tolist()
    readme = (out / "README.txt").read_text()
    assert all(note in readme for note in done.notes)
    assert "no norm on the embedding" in readme
    assert done.agreement is not None
    assert 0 <= done.agreement <= 1
    assert f"{done.agreement:.0%}" in done.notes[0]


def test_a_standalone_draft_is_copied_without_its_manifest(tmp_path: Path) -> None:
    folder = entry(tmp_path / "small", kind="standalone")
    export_hf(folder, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]
    (folder / "config.json").write_text("{ }")
    with pytest.raises(DraftError, match=r"config\.json"):
        export_hf(folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_the_wrong_format_says_which_is_right(target: TrainTarget, tmp_path: Path) -> None:
    head, small = entry(tmp_path / "code"), entry(tmp_path / "small", kind="standalone")
    with pytest.raises(TrainingError, match="use --format eagle"):
        export_hf(head, tmp_path / "out")
    with pytest.raises(TrainingError, match="use --format hf"):
        export_eagle(small, tmp_path / "out", target.decoder(64), [[1, 2, 3]])


def test_nothing_is_overwritten_or_left_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = entry(tmp_path / "small", kind="standalone")
    with pytest.raises(TrainingError, match="exists already"):
        export_hf(folder, folder)

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(TrainingError, match="No space left on device"):
        export_hf(folder, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small"]


def test_numbers_beyond_float16_are_refused() -> None:
    head = _Head.of(random_head())
    huge = dataclasses.replace(head, matrices={**head.matrices, "fc": head.matrices["fc"] * 1e6})
    with pytest.raises(TrainingError, match=r"fc\.weight of the export does not fit float16"):
        eagle_tensors(huge)
