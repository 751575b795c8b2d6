"""draft.toml: strict in every key, equal after a round trip, and nothing that leaves the folder."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from drafts.manifest import (
    MANIFEST,
    MAX_BYTES,
    Acceptance,
    Confidence,
    DataSource,
    FileInfo,
    Manifest,
    TargetBuild,
    Training,
)
from edgespec.errors import DraftError

A, B = "a" * 64, "b" * 64
ARCHITECTURE = {"hidden_size": 32, "num_heads": 4, "rope_theta": 10000.0, "rms_norm_eps": 1e-05}


def example(**changes: object) -> Manifest:
    values: dict = {
        "name": "code",
        "kind": "head",
        "domain": "code",
        "description": 'Python and C,\nalso "quoted" text, a \\ and ü',
        "licence": "Apache-2.0",
        "dtype": "int8",
        "target": TargetBuild("tiny", A, B, 32, 288, 1, ("exact", "float32")),
        "files": {"head.safetensors": FileInfo(7, A)},
        "architecture": ARCHITECTURE,
        "confidence": Confidence(1.25, 0.02),
        "acceptance": {"code": Acceptance(0.63, 1.35, 1.3, 1.4, 800), "math": Acceptance(0.2, 0.3, 0.2, 0.4, 700)},
        "training": Training("edgespec drafts train", 7, 170_000, 900, 1234.5, "general", {"torch": "2.13.0"}),
        "data": (DataSource("own prompts", "CC0-1.0", 400), DataSource("other", "MIT", 3)),
    }
    return Manifest(**{**values, **changes})


def written(folder: Path, **changes: object) -> Manifest:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "head.safetensors").write_bytes(b"weights")
    manifest = example(files={"head.safetensors": FileInfo.of(folder / "head.safetensors")}, **changes)
    manifest.write(folder)
    return manifest


def test_what_is_written_is_read_back_and_written_again(tmp_path: Path) -> None:
    manifest = written(tmp_path)
    text = (tmp_path / MANIFEST).read_text()
    again = Manifest.read(tmp_path)
    assert again == manifest
    again.write(tmp_path)
    assert (tmp_path / MANIFEST).read_text() == text
    assert "[acceptance.code]" in text
    assert '[files."head.safetensors"]' in text
    assert text.count("[[data]]") == 2
    assert 'from = "general"' in text
    assert again.nbytes == 7
    assert again.expected == pytest.approx(0.415)
    assert [name for name in os.listdir(tmp_path) if name not in (MANIFEST, "head.safetensors")] == []


def test_only_what_a_draft_needs(tmp_path: Path) -> None:
    bare = example(
        kind="standalone", architecture={}, confidence=None, acceptance={}, training=None, data=(), description=""
    )
    assert Manifest.parse(bare.text(), "x") == bare
    assert bare.expected is None


def test_numbers_of_numpy_are_numbers() -> None:
    measured = Acceptance(np.float64(0.5), np.float32(1.5), 0, 2, np.int64(9))  # type: ignore[arg-type]
    text = example(acceptance={"code": measured}).text()
    again = Manifest.parse(text, "x")
    assert again.acceptance["code"] == Acceptance(0.5, 1.5, 0.0, 2.0, 9)
    assert again.text() == text


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "two words"},
        {"name": "ngram"},
        {"kind": "tree"},
        {"dtype": "int3"},
        {"licence": ""},
        {"description": "\x07"},
        {"description": "\ud800"},
        {"description": "x" * 5000},
        {"files": {}},
        {"files": {"../head.safetensors": FileInfo(1, A)}},
        {"files": {MANIFEST: FileInfo(1, A)}},
        {"architecture": {}, "kind": "head", "confidence": Confidence(0.0)},
        {"confidence": Confidence(float("nan"))},
        {"acceptance": {"code": Acceptance(0.5, 1.0, 2.0, 1.0, 3)}},
        {"acceptance": {"code": Acceptance(0.5, 1.0, 1.0, float("inf"), 3)}},
        {"target": TargetBuild("tiny", "abc", B, 32, 288)},
    ],
)
def test_what_would_be_refused_is_not_written(tmp_path: Path, changes: dict) -> None:
    (tmp_path / MANIFEST).write_text("the old one")
    with pytest.raises(DraftError):
        example(**changes).write(tmp_path)
    assert (tmp_path / MANIFEST).read_text() == "the old one"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("format = 1", "format = 2", "format must be 1"),
        ("format = 1", "", "format is missing"),
        ('name = "code"', "name = 3", "name must be a name"),
        ('name = "code"', 'name = "auto"', "word with a meaning of its own"),
        ('kind = "head"', 'kind = "heads"', "kind must be one of head, standalone"),
        ('domain = "code"', 'domain = "code"\ndomian = "x"', "domian is not known; did you mean domain?"),
        ('licence = "Apache-2.0"', "licence = true", "licence must be text"),
        ("hidden_size = 32\nvocab", "hidden_size = true\nvocab", "target.hidden_size must be a whole number"),
        ("hidden_size = 32\nvocab", "hidden_size = 32.0\nvocab", "target.hidden_size must be a whole number"),
        ("vocab_size = 288", "vocab_size = 99999999999", "target.vocab_size"),
        ("vocab_size = 288", "vocab_size = 288\nvocabulary = 3", "target.vocabulary is not known"),
        (f'fingerprint = "{A}"', 'fingerprint = "../../etc"', "target.fingerprint must be a sha256"),
        ('"exact", "float32"', '"exact", "int2"', "target.measured_with"),
        ("bytes = 7", "bytes = -7", "files.head.safetensors.bytes"),
        ("bytes = 7", "bytes = 7\nmode = 0", "files.head.safetensors.mode is not known"),
        ('[files."head.safetensors"]', '[files."/dev/zero"]', "must be the name of a file in this folder"),
        ('[files."head.safetensors"]', '[files.".."]', "must be the name of a file in this folder"),
        ('[files."head.safetensors"]', '[files."a/../../b"]', "must be the name of a file in this folder"),
        ('[files."head.safetensors"]', '[files."a\\u0000b"]', "must be the name of a file in this folder"),
        ("rope_theta = 10000.0", "rope_theta = inf", "architecture.rope_theta must be a number"),
        ("rope_theta = 10000.0", "rope_theta = [1]", "architecture.rope_theta must be a number"),
        ("num_heads = 4", "num_heads = -4", "architecture.num_heads"),
        ("temperature = 1.25", "temperature = nan", "confidence.temperature"),
        ("temperature = 1.25", "temperature = 0", "confidence.temperature"),
        ("first = 0.63", "first = 1.5", "acceptance.code.first must be a number from 0 to 1"),
        ("low = 1.3", "low = 1.5", "acceptance.code.low is 1.5, above high"),
        ("seed = 7", "seed = 1e3", "training.seed"),
        ('torch = "2.13.0"', "torch = 2", "training.versions.torch"),
        ("prompts = 400", 'prompts = "many"', "data.prompts"),
        ("[confidence]", "[[confidence]]", "[confidence] must be a table"),
        ("[confidence]", "[confidence]\n[confidence]", "is not valid TOML"),
        ("format = 1", "format = 1\nx = " + "[" * 5000, "is not valid TOML"),
    ],
)
def test_each_wrong_value_is_named_with_its_file(tmp_path: Path, old: str, new: str, words: str) -> None:
    written(tmp_path)
    text = (tmp_path / MANIFEST).read_text()
    assert old in text
    (tmp_path / MANIFEST).write_text(text.replace(old, new, 1))
    with pytest.raises(DraftError) as caught:
        Manifest.read(tmp_path)
    assert str(tmp_path / MANIFEST) in str(caught.value)
    assert words in str(caught.value)


def test_a_huge_or_binary_file_is_no_manifest(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST).open("wb") as stream:
        stream.truncate(20 << 30)  # sparse: reading all of it would take the memory
    with pytest.raises(DraftError, match=f"longer than {MAX_BYTES}"):
        Manifest.read(tmp_path)
    (tmp_path / MANIFEST).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DraftError, match="UTF-8"):
        Manifest.read(tmp_path)


def test_too_many_entries_are_refused() -> None:
    with pytest.raises(DraftError, match="257 entries"):
        Manifest.parse(example(architecture={f"n{i}": i for i in range(257)}).text(), "x")


@pytest.mark.parametrize("what", ["missing", "folder", "fifo", "device", "loop", "outside", "dangling"])
def test_the_manifest_itself_must_be_a_file_of_the_folder(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    damage(folder, MANIFEST, what, tmp_path)
    with pytest.raises(DraftError, match=MANIFEST):
        Manifest.read(folder)


@pytest.mark.parametrize("what", ["missing", "folder", "fifo", "device", "loop", "outside", "dangling", "cut", "other"])
def test_every_file_must_be_a_file_of_the_folder_and_be_what_was_written(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "draft"
    manifest = written(folder)
    manifest.verify(folder)
    (folder / "head.safetensors").unlink()
    damage(folder, "head.safetensors", what, tmp_path)
    with pytest.raises(DraftError, match=r"head\.safetensors"):
        manifest.verify(folder)
    if what == "other":
        manifest.verify(folder, hashes=False)
    else:
        with pytest.raises(DraftError):
            manifest.verify(folder, hashes=False)
    before = (folder / MANIFEST).read_bytes()
    with pytest.raises(DraftError):  # nothing is declared that is not so
        manifest.write(folder)
    assert (folder / MANIFEST).read_bytes() == before


def damage(folder: Path, name: str, what: str, outside: Path) -> None:
    path = folder / name
    if what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "loop":
        path.symlink_to(folder / "other")
        (folder / "other").symlink_to(path)
    elif what == "outside":
        (outside / "secret").write_bytes(b"weights")
        path.symlink_to(outside / "secret")
    elif what == "dangling":
        path.symlink_to(outside / "nowhere")
    elif what == "cut":
        path.write_bytes(b"weigh")
    elif what == "other":
        path.write_bytes(b"WEIGHTS")


def test_a_link_within_the_folder_and_a_folder_that_is_a_link_are_fine(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    manifest = written(folder)
    (folder / "head.safetensors").rename(folder / "blob")
    (folder / "head.safetensors").symlink_to("blob")
    (tmp_path / "link").symlink_to(folder)
    manifest.verify(tmp_path / "link")
    assert Manifest.read(tmp_path / "link") == manifest


def test_a_manifest_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        example().name = "other"  # type: ignore[misc]
