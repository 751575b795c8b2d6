"""Small tables of phrases, written down by hand, and draft folders of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from drafts.manifest import FileInfo, Manifest
from drafts.phrases import FILE_NAME, PhraseDraft, PhraseTable, step
from tests.support.draft_sets import build_of, facts_of

Phrases = Mapping[tuple[int, ...], tuple[int, int]]  # n-gram -> (next token, confidence in 255ths)
SOME: Phrases = {(4,): (5, 80), (5,): (6, 150), (4, 5): (7, 200), (9, 4, 5): (8, 255), (7,): (4, 100)}


def key_of(ngram: Sequence[int]) -> int:
    key = 0
    for token in reversed(ngram):
        key = step(key, token)
    return key


def table_of(known: Phrases, sizes: tuple[int, ...] = (1, 2, 3)) -> PhraseTable:
    rows = sorted((key_of(ngram), *entry) for ngram, entry in known.items())
    keys, following, confidence = zip(*rows)
    return PhraseTable(sizes, np.array(keys, np.uint64), np.array(following, np.int32), np.array(confidence, np.uint8))


def draft_of(known: Phrases, sizes: tuple[int, ...] = (1, 2, 3), name: str = "phrases") -> PhraseDraft:
    return PhraseDraft(name, table_of(known, sizes))


def write_phrases(folder: Path, target: Path, known: Phrases = SOME, **changes: Any) -> Path:
    """A draft folder for the model in `target`; its name is the folder's."""
    facts = facts_of(target)
    folder.mkdir(parents=True)
    table_of(known).write(folder / FILE_NAME, facts.vocab_size)
    manifest = Manifest(
        name=folder.name,
        kind="phrases",
        domain="general",
        licence="Apache-2.0",
        dtype="none",
        target=build_of(facts),
        files={FILE_NAME: FileInfo.of(folder / FILE_NAME)},
    )
    dataclasses.replace(manifest, **changes).write(folder)
    return folder
