"""Draft sets: found by the target's fingerprint, read without ever raising, and refused with the reason."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from drafts import zoo
from drafts.head import FILE_NAME
from drafts.load_now import load_now
from drafts.manifest import MANIFEST
from drafts.zoo import TargetFacts
from edgespec.errors import DraftError
from edgespec.models.build import build_decoder
from edgespec.models.tokenizer import load_tokenizer
from edgespec.models.weights.opening import open_weights
from tests.support.draft_sets import edit, facts_of, write_draft, write_standalone
from tests.support.packed import converted
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import SHAPE


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "target", **SHAPE)


@pytest.fixture(scope="module")
def facts(target: Path) -> TargetFacts:
    return facts_of(target)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(zoo, "BUILT_IN", tmp_path / "shipped")
    return tmp_path / "home"


def test_sets_are_found_by_fingerprint_whatever_their_folder_is_called(
    home: Path, target: Path, facts: TargetFacts
) -> None:
    write_draft(home / "drafts" / "some-name" / "code", target)
    write_draft(zoo.BUILT_IN / "target" / "math", target)
    (zoo.BUILT_IN / "target" / "unfinished").mkdir()
    (zoo.BUILT_IN / "__pycache__").mkdir()
    assert [each.name for each in zoo.sets(home)] == ["some-name", "target"]
    assert [each.name for each in zoo.sets(home, facts.fingerprint)] == ["some-name", "target"]
    assert zoo.sets(home, "0" * 64) == []
    assert [each.name for each in zoo.sets()] == ["target"]
    assert [e.name for e in zoo.for_target(home, facts.fingerprint)] == ["code", "math"]
    assert zoo.for_target(home, "0" * 64) == []


def test_the_users_own_go_before_the_shipped_and_the_general_one_leads(
    home: Path, target: Path, facts: TargetFacts
) -> None:
    for root in (zoo.BUILT_IN, home / "drafts"):
        write_draft(root / "target" / "code", target)
    for name in ("general", "math"):
        write_draft(zoo.BUILT_IN / "target" / name, target)
    found = zoo.for_target(home, facts.fingerprint)
    assert [e.name for e in found] == ["general", "code", "math"]
    assert found[1].folder == home / "drafts" / "target" / "code"
    # A damaged one of one's own does not hide the shipped one.
    (found[1].folder / MANIFEST).write_text("broken")
    assert zoo.for_target(home, facts.fingerprint)[1].folder == zoo.BUILT_IN / "target" / "code"


def test_damaged_drafts_of_a_set_are_shown_with_their_reason(home: Path, target: Path, facts: TargetFacts) -> None:
    folder = home / "drafts" / "target"
    for name in ("code", "math", "chat"):
        write_draft(folder / name, target)
    (folder / "math" / MANIFEST).write_text("format = 1")
    (folder / "copy").mkdir()
    for file in (MANIFEST, FILE_NAME):
        shutil.copy(folder / "code" / file, folder / "copy" / file)
    loop = folder / "loop"
    loop.mkdir()
    (loop / MANIFEST).symlink_to(loop / "other")
    (loop / "other").symlink_to(loop / MANIFEST)
    (folder / "link").symlink_to(folder / "link")
    entries = {entry.folder.name: entry for entry in zoo.read_set(folder).entries}
    assert set(entries) == {"code", "math", "chat", "copy", "loop"}
    assert entries["chat"].problem == ""
    assert "is missing" in entries["math"].problem
    assert (
        "its name code is that of" in entries["copy"].problem or "its name code is that of" in entries["code"].problem
    )
    assert str(loop / MANIFEST) in entries["loop"].problem
    shown = zoo.for_target(home, facts.fingerprint)
    assert [e.name for e in shown if not e.problem] == ["chat", "code"]
    assert {e.name for e in shown if e.problem} == {"math", "loop"}
    with pytest.raises(DraftError, match="is missing"):
        zoo.usable(entries["math"], facts)
    with pytest.raises(DraftError, match="its name code"):
        zoo.usable(entries["copy"], facts)


def test_a_set_of_nothing_but_damage_is_known_by_the_targets_name(home: Path, target: Path, facts: TargetFacts) -> None:
    (write_draft(home / "drafts" / "target" / "code", target) / MANIFEST).write_text("?")
    assert zoo.for_target(home, facts.fingerprint) == []
    assert [e.name for e in zoo.for_target(home, facts.fingerprint, "target")] == ["code"]


def test_folders_that_cannot_be_read_are_noted(home: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_draft(home / "drafts" / "one" / "code", target)
    write_draft(home / "drafts" / "two" / "code", target)
    scandir, lstat = os.scandir, os.lstat

    def refusing(path: Path):
        if Path(path).name == "one":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    def refused(path: Path):
        if Path(path).parent.parent.name == "two":
            raise PermissionError(13, "Permission denied", str(path))
        return lstat(path)

    monkeypatch.setattr(zoo.os, "scandir", refusing)
    monkeypatch.setattr(zoo.os, "lstat", refused)
    one, two = zoo.sets(home)
    assert one.problem == f"{one.folder}: cannot be read (Permission denied)"
    assert two.entries[0].problem == f"{two.entries[0].folder}: cannot be read (Permission denied)"
    monkeypatch.setattr(zoo, "_MOST_FOLDERS", 1)
    assert zoo.sets(home) == []  # a root with thousands of folders is no root of sets


CHANGES = [
    ("other weights", {"fingerprint": "0" * 64, "model": "0" * 64}, "made for another target, target "),
    ("other tokenizer", {"tokenizer": "0" * 64}, "another tokenizer"),
    ("other size", {"hidden_size": 64}, "hidden states of size 32, but the target's have 64"),
    ("other rows", {"vocab_size": 300}, "made for 288 rows of logits, but the target has 300"),
]


@pytest.mark.parametrize(("what", "changes", "words"), CHANGES, ids=[c[0] for c in CHANGES])
def test_a_draft_for_another_target_is_refused_with_the_reason(
    home: Path, target: Path, facts: TargetFacts, what: str, changes: dict, words: str
) -> None:
    entry = zoo.read_entry(write_draft(home / "code", target))
    assert zoo.usable(entry, facts).name == "code"
    other = TargetFacts(**{**vars(facts), **changes})
    with pytest.raises(DraftError, match=words):
        zoo.usable(entry, other)
    findings = list(zoo.verify(entry, other))
    assert [(f.check, f.ok) for f in findings] == [("manifest", True), ("files", True), ("target", False)]
    assert words in findings[-1].detail


def test_verify_looks_at_everything(home: Path, target: Path, facts: TargetFacts) -> None:
    head = zoo.read_entry(write_draft(home / "code", target))
    checkpoint = zoo.read_entry(write_standalone(home / "small", target, **SHAPE))
    tokenizer = load_tokenizer(target)
    for entry in (head, checkpoint):
        findings = list(zoo.verify(entry, facts, tokenizer))
        assert [f.check for f in findings] == ["manifest", "files", "target", "weights"]
        assert all(f.ok for f in findings)
    assert [f.ok for f in zoo.verify(head, None)] == [True] * 4
    assert "llama, 2 layers, the target's vocabulary" in list(zoo.verify(checkpoint, facts, tokenizer))[-1].detail


@pytest.mark.parametrize(
    ("damage", "check", "words"),
    [
        ("cut", "files", "and must have"),
        ("bits", "files", "sha256"),
        ("gone", "files", "is missing"),
        ("heads", "weights", "the files do not belong together"),
        ("number", "weights", "has no number 'depth'"),
        ("vocabulary", "weights", "the target has 100"),
        ("vocabulary of a checkpoint", "weights", "'w270'"),
    ],
)
def test_verify_finds(home: Path, target: Path, facts: TargetFacts, damage: str, check: str, words: str) -> None:
    folder = write_draft(home / "code", target)
    path = folder / FILE_NAME
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[:-10])
    elif damage == "bits":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "gone":
        path.unlink()
    elif damage == "heads":
        edit(folder, "num_heads = 4", "num_heads = 2")
    elif damage == "number":
        edit(folder, "num_heads = 4", "num_heads = 4\ndepth = 2")
    elif damage == "vocabulary":
        edit(folder, "vocab_size = 288", "vocab_size = 100")
        facts = TargetFacts(**{**vars(facts), "vocab_size": 100})
    else:
        folder = write_standalone(home / "small", write_tiny(home / "other", **SHAPE), **SHAPE)
        text = (folder / "tokenizer.json").read_text()
        size, digest = os.path.getsize(folder / "tokenizer.json"), zoo.read_entry(folder).manifest
        assert digest is not None
        (folder / "tokenizer.json").write_text(text.replace('"w270"', '"wXYZ"'))
        assert os.path.getsize(folder / "tokenizer.json") == size
        from drafts.manifest import FileInfo

        edit(folder, digest.files["tokenizer.json"].sha256, FileInfo.of(folder / "tokenizer.json").sha256)
    findings = list(zoo.verify(zoo.read_entry(folder), facts, load_tokenizer(target)))
    assert [f.ok for f in findings] == [True] * (len(findings) - 1) + [False]
    assert findings[-1].check == check
    assert words in findings[-1].detail


def test_load_gives_the_head_and_refuses_what_is_none(home: Path, target: Path, facts: TargetFacts) -> None:
    entry = zoo.read_entry(write_draft(home / "code", target))
    with open_weights(target) as weights:
        decoder = build_decoder(weights, weight_format="float32", threads=1)
    draft = zoo.load(entry, decoder, facts, name="code-2", threads=1)
    assert (draft.name, draft.kind, draft.domain) == ("code-2", "head", "code")
    assert draft.nbytes > 0
    draft.close()
    with pytest.raises(DraftError, match="standalone checkpoint"):
        zoo.load(zoo.read_entry(write_standalone(home / "small", target, **SHAPE)), decoder, facts)
    (entry.folder / FILE_NAME).write_bytes(b"")
    with pytest.raises(DraftError, match=FILE_NAME):
        zoo.load(entry, decoder, facts)
    decoder.close()

    class WithoutStates:
        spec = decoder.spec

    with pytest.raises(DraftError, match="hidden states"):
        zoo.load(zoo.read_entry(write_draft(home / "math", target)), WithoutStates(), facts)  # type: ignore[arg-type]


# Other forms of the model


@pytest.fixture(scope="module")
def repacked(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target, converted to 8 bits: another file, the same model."""
    out = tmp_path_factory.mktemp("models") / "repacked"
    converted(target, out, 8)
    return out


def test_drafts_serve_other_forms_of_their_model(home: Path, target: Path, facts: TargetFacts, repacked: Path) -> None:
    write_draft(home / "drafts" / "some-name" / "code", target)
    other = facts_of(repacked)
    assert other.fingerprint != facts.fingerprint
    assert other.model == facts.model
    assert zoo.for_target(home, other.fingerprint) == []
    (entry,) = zoo.for_target(home, other.fingerprint, model=other.model)
    assert zoo.usable(entry, other).name == "code"
    assert [each.name for each in zoo.sets(home, other.fingerprint, other.model)] == ["some-name"]


def test_a_draft_for_the_very_weights_goes_before_one_for_another_form(
    home: Path, target: Path, facts: TargetFacts, repacked: Path
) -> None:
    write_draft(home / "drafts" / "a" / "code", target)
    write_draft(home / "drafts" / "b" / "code", repacked)
    write_draft(home / "drafts" / "c" / "code", target)
    other = facts_of(repacked)
    (entry,) = zoo.for_target(home, other.fingerprint, model=other.model)
    assert entry.set_name == "b"
    (entry,) = zoo.for_target(home, facts.fingerprint, model=facts.model)
    assert entry.set_name == "a"
    (home / "drafts" / "b" / "code" / MANIFEST).write_text("broken")
    (entry,) = zoo.for_target(home, other.fingerprint, model=other.model)
    assert entry.set_name == "a"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer": "0" * 64}, "another tokenizer"),
        ({"vocab_size": 300}, "made for 288 rows of logits"),
        ({"model": "0" * 64}, "made for another target"),
        ({"model": ""}, "made for another target"),
    ],
)
def test_the_same_model_with_another_vocabulary_is_refused(
    home: Path, target: Path, repacked: Path, changes: dict, words: str
) -> None:
    entry = zoo.read_entry(write_draft(home / "code", target))
    with pytest.raises(DraftError, match=words):
        zoo.usable(entry, TargetFacts(**{**vars(facts_of(repacked)), **changes}))


def test_a_manifest_that_does_not_know_its_model_serves_its_own_weights(
    home: Path, target: Path, facts: TargetFacts, repacked: Path
) -> None:
    folder = write_draft(home / "code", target)
    edit(folder, f'model = "{facts.model}"', 'model = ""')
    entry = zoo.read_entry(folder)
    assert zoo.usable(entry, facts).name == "code"
    for other in (facts_of(repacked), TargetFacts(**{**vars(facts_of(repacked)), "model": ""})):
        with pytest.raises(DraftError, match="made for another target"):
            zoo.usable(entry, other)


def test_an_image_is_of_the_target_that_is_there(home: Path, target: Path, repacked: Path, tmp_path: Path) -> None:
    """A head's image holds rows of the target: one made for another form of the model is not taken."""
    entry = zoo.read_entry(write_draft(home / "code", target))
    for number, model in enumerate((target, repacked, target), 1):
        with open_weights(model) as weights:
            decoder = build_decoder(weights, device="torch-cpu", weight_format="float32", threads=1)
        draft = zoo.unloaded(entry, decoder, facts_of(model), images=tmp_path / "images")
        load_now(draft)
        draft.close()
        decoder.close()
        assert len(list((tmp_path / "images").iterdir())) == min(number, 2)
