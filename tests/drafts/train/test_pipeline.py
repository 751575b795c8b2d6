"""The whole training: a draft appears whole or not at all, and an interrupted run ends like one that was not."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from drafts import zoo
from drafts.head import HeadFile
from drafts.manifest import Manifest
from drafts.train import fitting, pipeline
from drafts.train.config import TrainConfig, TrainTarget
from drafts.train.errors import TrainingError
from drafts.train.fit import HeadFit
from drafts.train.pipeline import Result, train_draft
from edgespec.errors import ModelError
from edgespec.models.base import ForwardOutput
from tests.drafts.train.support import open_target, quick, records, text, tiny_target, write_prompts


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TrainTarget:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "code.jsonl", records(24))


@pytest.fixture(scope="module")
def whole(target: TrainTarget, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """What an uninterrupted run makes."""
    return train(target, prompts, tmp_path_factory.mktemp("whole") / "code")


def train(
    target: TrainTarget, prompts: Path | list[Path], out: Path, config: TrainConfig | None = None, **options
) -> Result:
    files = prompts if isinstance(prompts, list) else [prompts]
    result = train_draft(target, files, out, config or quick(), command="edgespec drafts train", **options)
    assert result is not None
    return result


def folder_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def timeless(manifest: Manifest) -> Manifest:
    assert manifest.training is not None
    return dataclasses.replace(manifest, training=dataclasses.replace(manifest.training, seconds=0.0))


def test_a_run_gives_an_entry_that_the_zoo_takes(whole: Result, target: TrainTarget) -> None:
    manifest = Manifest.read(whole.folder)
    assert manifest == whole.manifest
    assert folder_names(whole.folder) == ["draft.toml", "head.safetensors"]
    assert folder_names(whole.folder.parent) == [".code.work", "code"]
    weights = target.weights
    facts = zoo.TargetFacts("tiny", weights.fingerprint(), 32, 288, target.tokenizer.fingerprint())
    entry = zoo.read_entry(whole.folder)
    assert zoo.usable(entry, facts) == manifest
    decoder = target.decoder(64)
    draft = zoo.load(entry, decoder, facts)
    assert draft.vocab == sorted(draft.vocab)
    assert (manifest.name, manifest.kind, manifest.domain, manifest.dtype) == ("code", "head", "code", "int8")
    assert manifest.target.measured_with == ("float32",)
    assert set(manifest.acceptance) == {"code"}
    measured = manifest.acceptance["code"]
    assert measured.low <= measured.tokens <= measured.high
    assert measured.rounds > 0
    assert manifest.confidence is not None
    assert manifest.training is not None
    assert manifest.training.updates == 4
    assert manifest.training.versions["torch"] == torch.__version__
    assert [(d.source, d.licence, d.prompts) for d in manifest.data] == [("owner/repo:p", "MIT", 24)]


class Stop(Exception):
    pass


def stopping(stage: str, at: int) -> Any:
    """A progress that raises at the `at`-th call of `stage`."""
    seen = [0]

    def progress(name: str, done: float, total: float, note: str) -> None:
        seen[0] += name == stage
        if name == stage and seen[0] == at:
            raise Stop

    return progress


@pytest.mark.parametrize(
    ("stage", "at", "every"),
    [("answers", 3, 0.0), ("read", 1, 0.0), ("fit", 1, 0.0), ("fit", 3, 0.0), ("fit", 3, 1e9), ("fit", 4, 0.0),
     ("calibrate", 1, 0.0), ("measure", 2, 0.0)],
)  # fmt: skip
def test_interrupted_in_any_stage_it_ends_with_the_same_bits(
    whole: Result,
    target: TrainTarget,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    at: int,
    every: float,
) -> None:
    monkeypatch.setattr(fitting, "CHECKPOINT_SECONDS", every)
    out = tmp_path / "code"
    with pytest.raises(Stop):
        train(target, prompts, out, progress=stopping(stage, at))
    assert folder_names(tmp_path) == [".code.work"]
    result = train(target, prompts, out)
    assert (out / "head.safetensors").read_bytes() == (whole.folder / "head.safetensors").read_bytes()
    assert timeless(result.manifest) == timeless(whole.manifest)
    assert folder_names(tmp_path) == [".code.work", "code"]


def test_another_seed_gives_another_draft(whole: Result, target: TrainTarget, prompts: Path, tmp_path: Path) -> None:
    result = train(target, prompts, tmp_path / "code", quick(seed=1))
    assert (result.folder / "head.safetensors").read_bytes() != (whole.folder / "head.safetensors").read_bytes()


def test_a_damaged_checkpoint_is_noticed_and_the_fit_starts_again(
    whole: Result, target: TrainTarget, prompts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Stop):
        train(target, prompts, tmp_path / "code", progress=stopping("calibrate", 1))
    file = tmp_path / ".code.work" / "fit.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    result = train(target, prompts, tmp_path / "code")
    assert "fit.safetensors is damaged (its content has changed); the fit starts again" in caplog.text
    assert timeless(result.manifest) == timeless(whole.manifest)


def test_a_changed_configuration_is_refused_unless_restarted(
    target: TrainTarget, prompts: Path, tmp_path: Path
) -> None:
    out = tmp_path / "code"
    with pytest.raises(Stop):
        train(target, prompts, out, progress=stopping("fit", 2))
    with pytest.raises(TrainingError, match=r"another configuration: vocab \(64 then, 80 now\)"):
        train(target, prompts, out, quick(vocab=80))
    stages = []
    train(target, prompts, out, quick(vocab=80), restart=True, progress=lambda stage, *rest: stages.append(stage))
    assert "answers" not in stages
    assert len(json.loads((tmp_path / ".code.work" / "state.json").read_text())["configuration"]) > 10


def test_a_tokenizer_that_changed_is_refused(tmp_path: Path, prompts: Path) -> None:
    target = tiny_target(tmp_path / "target")
    with pytest.raises(Stop):
        train(target, prompts, tmp_path / "code", progress=stopping("fit", 2))
    tiny_target(tmp_path / "target", tokenizer_size=276)
    with pytest.raises(TrainingError, match=r"another configuration: tokenizer \("):
        train(open_target(tmp_path / "target"), prompts, tmp_path / "code")


def test_a_draft_that_is_there_is_replaced_only_when_asked(
    target: TrainTarget, prompts: Path, tmp_path: Path, whole: Result
) -> None:
    out = tmp_path / "code"
    train(target, prompts, out, quick(updates=1))
    before = (out / "head.safetensors").read_bytes()
    with pytest.raises(TrainingError, match="there is a draft already"):
        train(target, prompts, out, quick())
    with pytest.raises(Stop):
        train(target, prompts, out, quick(), restart=True, progress=stopping("measure", 1))
    assert (out / "head.safetensors").read_bytes() == before
    train(target, prompts, out, quick(), restart=True)
    assert (out / "head.safetensors").read_bytes() == (whole.folder / "head.safetensors").read_bytes()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(TrainingError, match="exists and is no draft"):
        train(target, prompts, tmp_path / "other", restart=True)


def test_several_files_are_measured_apart(target: TrainTarget, prompts: Path, tmp_path: Path) -> None:
    math = write_prompts(tmp_path / "math.jsonl", [{"id": n, "prompt": text(n + 50)} for n in range(12)])
    result = train(target, [prompts, math], tmp_path / "general", quick(domain="general", name="general"))
    assert set(result.manifest.acceptance) == {"code", "math"}
    assert result.manifest.domain == "general"
    assert len(result.manifest.data) == 2


def test_from_a_draft_goes_on_from_its_weights(
    target: TrainTarget, prompts: Path, whole: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafts.train.kinds._GOING_ON", 1e-9)
    result = train(target, prompts, tmp_path / "code", quick(updates=1), start=whole.folder)
    assert result.manifest.training is not None
    assert result.manifest.training.start == "code"
    spec = zoo.head_spec(whole.manifest)
    old, new = (HeadFile.read(r.folder / "head.safetensors", spec) for r in (whole, result))
    for name, matrix in old.matrices.items():
        np.testing.assert_allclose(new.matrices[name].dequantised(), matrix.dequantised(), atol=2e-3)


def test_a_start_that_does_not_fit_is_refused(
    target: TrainTarget, prompts: Path, whole: Result, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError, match=r"--from .*nothing: .*missing"):
        train(target, prompts, tmp_path / "code", start=tmp_path / "nothing")
    other = tiny_target(tmp_path / "other", seed=1)
    with pytest.raises(TrainingError, match="made for another target"):
        train(other, prompts, tmp_path / "code", start=whole.folder)
    with pytest.raises(TrainingError, match="for head drafts"):
        train(target, prompts, tmp_path / "code", quick(kind="standalone"), start=whole.folder)


# What goes wrong inside


def test_a_loss_that_is_no_number_stops_with_the_last_good_checkpoint(
    target: TrainTarget, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = HeadFit._loss, []

    def broken(self: HeadFit, micro: Any, steps: int, generator: torch.Generator) -> Any:
        calls.append(1)
        loss, *rest = real(self, micro, steps, generator)
        return (loss * float("nan") if len(calls) > 2 else loss, *rest)

    monkeypatch.setattr(fitting, "CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(HeadFit, "_loss", broken)
    with pytest.raises(TrainingError, match=r"diverged: the loss is nan at update 2\. The last good state is in"):
        train(target, prompts, tmp_path / "code")
    state = load_file(tmp_path / ".code.work" / "fit.safetensors")
    assert int(state["update"]) == 2
    assert all(np.isfinite(value).all() for value in state.values())
    assert not (tmp_path / "code").exists()


def test_a_loss_that_runs_away_stops(target: TrainTarget, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"diverged: the loss went from .* lower --learning-rate"):
        train(target, prompts, tmp_path / "code", quick(learning_rate=100.0, updates=30))


@pytest.mark.parametrize("part", ["fit.safetensors", "state.json"])
def test_a_full_disk_while_working_is_told_and_resumed(
    target: TrainTarget, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Result, part: str
) -> None:
    for module, name in ((fitting, "write_bytes"), (pipeline, "write_text")):
        _fill_disk_at(monkeypatch, module, name, part)
    with pytest.raises(TrainingError, match="No space left on device"):
        train(target, prompts, tmp_path / "code")
    monkeypatch.undo()
    assert timeless(train(target, prompts, tmp_path / "code").manifest) == timeless(whole.manifest)


def _fill_disk_at(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, part: str) -> None:
    real = getattr(module, name)

    def full(path: Path, content: Any) -> None:
        if path.name == part:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, content)

    monkeypatch.setattr(module, name, full)


@pytest.mark.parametrize("where", ["drafts.head_file.write_bytes", "drafts.manifest.write_text"])
def test_a_full_disk_at_the_end_leaves_no_half_draft(
    target: TrainTarget, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Result, where: str
) -> None:
    def full(path: Path, content: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(where, full)
    with pytest.raises(TrainingError, match=r"No space left on device.*The fitted weights stay in"):
        train(target, prompts, tmp_path / "code")
    assert folder_names(tmp_path) == [".code.work"]
    monkeypatch.undo()
    assert timeless(train(target, prompts, tmp_path / "code").manifest) == timeless(whole.manifest)


class Blind:
    """An engine without hidden states."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def forward(self, *args: Any, **kwargs: Any) -> ForwardOutput:
        return dataclasses.replace(self._decoder.forward(*args, **kwargs), hidden=None)


def test_a_target_without_hidden_states_is_refused_at_once(target: TrainTarget, prompts: Path, tmp_path: Path) -> None:
    blind = dataclasses.replace(target, decoder=lambda positions: Blind(target.decoder(positions)))
    with pytest.raises(TrainingError, match="gives no hidden states"):
        train(blind, prompts, tmp_path / "code")
    assert folder_names(tmp_path) == []


def test_weights_with_nan_are_refused(tmp_path: Path, prompts: Path) -> None:
    target = tiny_target(tmp_path / "target")
    file = tmp_path / "target" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    save_file(tensors, file)
    with pytest.raises(ModelError, match="up_proj"):
        train(open_target(tmp_path / "target"), prompts, tmp_path / "code")
    assert not (tmp_path / "code").exists()
    del target


def test_a_target_that_says_nothing_is_refused(target: TrainTarget, prompts: Path, tmp_path: Path) -> None:
    silent = dataclasses.replace(target, eos_ids=tuple(range(288)))
    with pytest.raises(TrainingError, match="ends every answer at once"):
        train(silent, prompts, tmp_path / "code")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "medusa"}, "--kind 'medusa' is unknown"),
        ({"sampled": 1.5}, "share between 0 and 1"),
        ({"max_new_tokens": 96}, "from 4 to 95"),
        ({"vocab": 0}, "vocab is 0"),
        ({"domain": "a b"}, "--domain 'a b'"),
        ({"name": "ngram"}, "--name 'ngram'"),
        ({"licence": " "}, "--licence"),
        ({"epochs": 0.0}, "--epochs"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TrainingError, match=message):
        quick(**changes)


def test_a_head_that_cannot_be_is_refused_at_once(tmp_path: Path, prompts: Path) -> None:
    target = tiny_target(tmp_path / "target", hidden_size=40)
    with pytest.raises(TrainingError, match=r"no head fits this target: hidden_size of a head is 40.*standalone"):
        train(target, prompts, tmp_path / "code")
