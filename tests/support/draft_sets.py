"""Draft folders for tiny targets: a random head (or a checkpoint) with a manifest that fits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from drafts.head import FILE_NAME
from drafts.manifest import MANIFEST, Acceptance, Confidence, FileInfo, Manifest, TargetBuild
from drafts.zoo import TargetFacts
from edgespec.models.tokenizer import load_tokenizer
from edgespec.models.weights.opening import open_weights
from tests.support.tiny import write_tiny
from tests.support.tiny_head import tiny_spec, write_head


def facts_of(target: Path) -> TargetFacts:
    """What drafts of the model in a folder must fit."""
    with open_weights(target) as weights:
        spec, tokenizer = weights.spec, load_tokenizer(target).fingerprint()
        sizes = spec.hidden_size, spec.vocab_size
        return TargetFacts(target.name, weights.fingerprint(), *sizes, tokenizer, weights.model_fingerprint())


def build_of(facts: TargetFacts) -> TargetBuild:
    assert facts.tokenizer is not None
    sizes = facts.hidden_size, facts.vocab_size
    return TargetBuild(facts.name, facts.fingerprint, facts.tokenizer, *sizes, 1, model=facts.model)


def write_draft(folder: Path, target: Path, *, seed: int = 0, first: float = 0.5, **changes: Any) -> Path:
    """A head draft for the tiny model in `target`; its name and domain are the folder's. Returns `folder`."""
    facts, spec = facts_of(target), tiny_spec()
    write_head(folder, spec, seed=seed)
    manifest = Manifest(
        name=folder.name,
        kind="head",
        domain=folder.name,
        licence="Apache-2.0",
        dtype="int8",
        target=build_of(facts),
        files={FILE_NAME: FileInfo.of(folder / FILE_NAME)},
        architecture=spec.to_mapping(),
        confidence=Confidence(1.1, 0.03),
        acceptance={folder.name: Acceptance(first, 1.25, 1.2, 1.3, 500)},
    )
    dataclasses.replace(manifest, **changes).write(folder)
    return folder


def write_standalone(folder: Path, target: Path, **shape: Any) -> Path:
    """A checkpoint with the target's tokenizer, as a draft folder."""
    write_tiny(folder, seed=1, **shape)
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
    manifest = Manifest(
        name=folder.name,
        kind="standalone",
        domain="general",
        licence="MIT",
        dtype="float32",
        target=build_of(facts_of(target)),
        files={name: FileInfo.of(folder / name) for name in names},
    )
    manifest.write(folder)
    return folder


def edit(folder: Path, old: str, new: str) -> None:
    """Change the text of a draft's manifest."""
    path = folder / MANIFEST
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
