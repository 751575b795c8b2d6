"""Draft sets: folders of drafts that were made for one target. Found, read and checked here, and loaded.

A set is a folder `<root>/<target>/` whose subfolders are drafts, each with a draft.toml. The shipped sets lie beside
this file in `zoo/`, the ones a user trains under `drafts/` of the home folder. Whom a draft serves is told by the
fingerprints in its manifest, of the target's weights and of the model that they are; the set's folder name is only a
name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drafts.load_now import load_now
from drafts.manifest import MANIFEST, Manifest, own_file
from drafts.reading import PIECE_BYTES, sha256_at_pace
from edgespec.errors import DraftError, EdgespecError

if TYPE_CHECKING:
    from drafts.base import Draft, LoadControl
    from drafts.head import HeadDraft, HeadSpec, HeadWeights
    from drafts.phrases import PhraseTable
    from edgespec.models.base import Decoder
    from edgespec.models.tokenizer import Tokenizer

BUILT_IN = Path(__file__).with_name("zoo")
HEAD_FILE, PHRASES_FILE = "head.safetensors", "phrases.safetensors"
_MOST_FOLDERS = 1000  # of a set or a root; more than that is some other folder


@dataclass(frozen=True)
class TargetFacts:
    """What a draft must fit. vocab_size: rows of logits. tokenizer: its fingerprint, None leaves that check out.

    fingerprint, model: of the weights and of the model that they are, as `drafts.manifest.TargetBuild` has them.
    """

    name: str
    fingerprint: str
    hidden_size: int
    vocab_size: int
    tokenizer: str | None = None
    model: str = ""


@dataclass(frozen=True)
class Entry:
    """One draft folder. manifest is None where it cannot be read; `problem` says why, or why it cannot be used."""

    folder: Path
    manifest: Manifest | None = None
    problem: str = ""

    @property
    def name(self) -> str:
        return self.folder.name if self.manifest is None else self.manifest.name

    @property
    def set_name(self) -> str:
        return self.folder.parent.name


@dataclass(frozen=True)
class DraftSet:
    """One set with its drafts by name. problem: why the folder cannot be read, or ""."""

    folder: Path
    entries: tuple[Entry, ...]
    problem: str = ""

    @property
    def name(self) -> str:
        return self.folder.name

    def serves(self, fingerprint: str, model: str = "") -> bool:
        """Whether one of its drafts was made for that target."""
        return any(e.manifest is not None and e.manifest.target.is_for(fingerprint, model) for e in self.entries)


def roots(home: Path | None) -> list[Path]:
    """Where sets are looked for, in order: the user's own before the shipped ones."""
    return [*([] if home is None else [home / "drafts"]), BUILT_IN]


def sets(home: Path | None = None, fingerprint: str | None = None, model: str = "") -> list[DraftSet]:
    """All draft sets, or those with a draft for the target of those fingerprints. Never raises."""
    found = []
    for root in roots(home):
        folders, _ = _subfolders(root)
        found += [read_set(folder) for folder in folders]
    found = [each for each in found if each.entries or each.problem]
    return found if fingerprint is None else [each for each in found if each.serves(fingerprint, model)]


def read_set(folder: Path) -> DraftSet:
    """The drafts in the subfolders that have a draft.toml. Never raises: what cannot be read is noted."""
    folders, problem = _subfolders(folder)
    return DraftSet(folder, tuple(_without_doubles(filter(None, map(_entry_if_any, folders)))), problem)


def read_entry(folder: Path) -> Entry:
    """The draft in a folder; a manifest that cannot be used is noted as its `problem`."""
    try:
        return Entry(folder, Manifest.read(folder))
    except DraftError as error:
        return Entry(folder, None, str(error))


def for_target(home: Path | None, fingerprint: str, name: str = "", *, model: str = "") -> list[Entry]:
    """The drafts of the sets made for this target, each name once (the user's own first), the general ones leading.

    One made for these very weights goes before one made for another form of the model.

    Damaged ones of such a set, or of a set called `name` (the target's), are among them, with their problem; intact
    ones for other targets are not.
    """
    chosen: dict[str, Entry] = {}
    for each in sets(home):
        if each.serves(fingerprint, model) or (name and each.name == name):
            for entry in each.entries:
                if entry.manifest is None or entry.manifest.target.is_for(fingerprint, model):
                    known = chosen.get(entry.name)
                    if known is None or _fitness(entry, fingerprint) > _fitness(known, fingerprint):
                        chosen[entry.name] = entry
    return sorted(chosen.values(), key=_general_first)


def _fitness(entry: Entry, fingerprint: str) -> tuple[bool, bool]:
    manifest = entry.manifest
    return not entry.problem, manifest is not None and manifest.target.fingerprint == fingerprint


def check(manifest: Manifest, target: TargetFacts) -> None:
    """Raise DraftError, with the reason, for a draft that was made for another target."""
    made, draft = manifest.target, f"draft {manifest.name}"
    if target.tokenizer is not None and made.tokenizer != target.tokenizer:
        raise DraftError(
            f"{draft} was made with another tokenizer ({made.tokenizer[:12]}..., the target's is "
            f"{target.tokenizer[:12]}...); use a draft made for this target"
        )
    if manifest.kind == "head" and made.hidden_size != target.hidden_size:
        raise DraftError(
            f"{draft} reads hidden states of size {made.hidden_size}, but the target's have {target.hidden_size}; "
            "use a draft made for this target"
        )
    if not made.is_for(target.fingerprint, target.model):
        raise DraftError(
            f"{draft} was made for another target, {made.name} (weights {made.fingerprint[:12]}..., these are "
            f"{target.fingerprint[:12]}...); make one for this target with 'edgespec drafts train'"
        )
    if made.vocab_size != target.vocab_size:
        raise DraftError(
            f"{draft} was made for {made.vocab_size} rows of logits, but the target has {target.vocab_size}; "
            "make the draft again"
        )


def usable(entry: Entry, target: TargetFacts, *, hashes: bool = True) -> Manifest:
    """The manifest of a draft that is whole and fits the target; DraftError says what is wrong with any other."""
    if entry.manifest is None or entry.problem:
        raise DraftError(entry.problem)
    check(entry.manifest, target)
    entry.manifest.verify(entry.folder, hashes=hashes)
    return entry.manifest


_verified: dict[tuple[Path, str], tuple[int, ...]] = {}  # files by their sha256, as they were when they had it


def verify_file(folder: Path, name: str, manifest: Manifest, control: LoadControl) -> None:
    """Compare one of a draft's files with its manifest, at the pace of a load.

    Once in a process: one that nobody has written since is not read again. Raises DraftError, OSError, LoadCancelled.
    """
    path, info = own_file(folder, name), manifest.files[name]
    status = path.stat()
    now = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    if _verified.get((path, info.sha256)) == now:
        return
    if sha256_at_pace(path, info.bytes, memoryview(bytearray(PIECE_BYTES)), control) != info.sha256:
        raise DraftError(f"{path}: has another sha256 than its manifest says; copy or make the draft again")
    _verified[path, info.sha256] = now


def head_spec(manifest: Manifest) -> HeadSpec:
    """The architecture of a head. Raises DraftError if its numbers are no head's, or not this target's."""
    from drafts.head import HeadSpec

    spec = HeadSpec.from_mapping(manifest.architecture)
    if spec.hidden_size != manifest.target.hidden_size:
        raise DraftError(
            f"draft {manifest.name}: its architecture has hidden_size {spec.hidden_size}, its target "
            f"{manifest.target.hidden_size}; make the draft again"
        )
    if HEAD_FILE not in manifest.files:
        raise DraftError(f"draft {manifest.name}: its manifest lists no {HEAD_FILE}; make the draft again")
    return spec


def read_head(entry: Entry, manifest: Manifest) -> HeadWeights:
    """A head's weights, checked against its manifest. Raises DraftError."""
    from drafts.head import HeadFile

    path = own_file(entry.folder, HEAD_FILE)
    weights = HeadFile.read(path, head_spec(manifest))
    last, rows = int(weights.vocab[-1]), manifest.target.vocab_size
    if last >= rows:
        raise DraftError(f"{path}: proposes token {last}, but the target has {rows} rows; make the draft again")
    return weights


def read_phrases(entry: Entry, manifest: Manifest) -> PhraseTable:
    """The table of a draft of phrases, checked against its manifest. Raises DraftError."""
    from drafts.phrases import PhraseTable

    if PHRASES_FILE not in manifest.files:
        raise DraftError(f"draft {manifest.name}: its manifest lists no {PHRASES_FILE}; make the draft again")
    return PhraseTable.read(own_file(entry.folder, PHRASES_FILE), manifest.target.vocab_size)


def load(
    entry: Entry, target: Decoder, facts: TargetFacts, *, name: str | None = None, threads: int | None = None
) -> Draft:
    """The head or table of phrases in a folder, ready for `target`.

    Raises DraftError for whatever is not as it must be.
    """
    from drafts.head import HeadDraft

    draft = unloaded(entry, target, facts, name=name, threads=threads)
    return load_now(draft) if isinstance(draft, HeadDraft) else draft


def unloaded(
    entry: Entry,
    target: Decoder,
    facts: TargetFacts,
    *,
    name: str | None = None,
    threads: int | None = None,
    images: Path | None = None,
) -> Draft:
    """As `load`, but of a head only the manifest is read and the lengths of its files are checked; `load` is its own.

    images: where what is made of a head for this target is kept, see `drafts.head_image`; None = nowhere.
    """
    head = entry.manifest is not None and entry.manifest.kind == "head"
    manifest = usable(entry, facts, hashes=not head)
    if manifest.kind == "standalone":
        raise DraftError(f"draft {manifest.name} is a standalone checkpoint, not a head")
    if manifest.kind == "phrases":
        from drafts.phrases import PhraseDraft

        return PhraseDraft(name or manifest.name, read_phrases(entry, manifest), domain=manifest.domain)
    return _head(entry, manifest, target, facts, name or manifest.name, threads, images)


def _head(
    entry: Entry,
    manifest: Manifest,
    target: Decoder,
    facts: TargetFacts,
    name: str,
    threads: int | None,
    images: Path | None,
) -> HeadDraft:
    from drafts.head import HeadDraft
    from drafts.head_image import StoredHead

    if not all(hasattr(target, need) for need in ("embed", "head_rows")):
        raise DraftError(f"draft {manifest.name} reads the target's hidden states, which this engine does not give")
    spec, file = head_spec(manifest), manifest.files[HEAD_FILE]
    source = StoredHead(
        entry.folder,
        file,
        lambda: read_head(entry, manifest),
        name=manifest.name,
        fingerprint=facts.fingerprint,
        images=images,
    )
    temperature = 1.0 if manifest.confidence is None else manifest.confidence.temperature
    return HeadDraft(name, spec, source, target, temperature=temperature, threads=threads, domain=manifest.domain)


@dataclass(frozen=True)
class Finding:
    """One check of a draft: what was looked at, whether it holds, and what was seen."""

    check: str
    ok: bool
    detail: str


def verify(entry: Entry, target: TargetFacts | None, tokenizer: Tokenizer | None = None) -> Iterator[Finding]:
    """The checks that need no running model, one after the other; the first that fails is the last.

    target: None leaves out the comparison with it. tokenizer: the target's, to compare a standalone draft's own with.
    """
    manifest = entry.manifest
    if manifest is None or entry.problem:
        yield Finding("manifest", False, entry.problem)
        return
    yield Finding("manifest", True, f"format 1, {manifest.kind}, {manifest.domain}")
    steps = (
        ("files", lambda: _files(entry, manifest)),
        ("target", lambda: _target(manifest, target)),
        ("weights", lambda: _weights(entry, manifest, target, tokenizer)),
    )
    for name, step in steps:
        try:
            detail = step()
        except (EdgespecError, OSError) as error:
            yield Finding(name, False, str(error))
            return
        yield Finding(name, True, detail)


def _files(entry: Entry, manifest: Manifest) -> str:
    manifest.verify(entry.folder)
    return f"{len(manifest.files)} with {manifest.nbytes} bytes, sha256 as written"


def _target(manifest: Manifest, target: TargetFacts | None) -> str:
    if target is None:
        return f"made for {manifest.target.name}; not compared, the model is not on this machine"
    check(manifest, target)
    return f"made for {manifest.target.name}, which this is"


def _weights(entry: Entry, manifest: Manifest, target: TargetFacts | None, tokenizer: Tokenizer | None) -> str:
    if manifest.kind == "head":
        weights = read_head(entry, manifest)
        parameters, rows = weights.spec.parameters, manifest.target.vocab_size
        return f"{parameters} numbers, {len(weights.vocab)} tokens of the target's {rows}"
    if manifest.kind == "phrases":
        table = read_phrases(entry, manifest)
        return f"{len(table.keys)} phrases of up to {table.sizes[-1]} tokens"
    from edgespec.models.tokenizer import compare_vocabularies, load_tokenizer
    from edgespec.models.weights.opening import open_weights

    with open_weights(entry.folder) as opened:
        detail = f"{opened.spec.architecture}, {opened.spec.num_layers} layers"
    if tokenizer is not None:
        compare_vocabularies(tokenizer, load_tokenizer(entry.folder))
        detail += ", the target's vocabulary"
    return detail


def _entry_if_any(folder: Path) -> Entry | None:
    """None for a folder that has no draft.toml, such as one of a training run that is not done."""
    try:
        os.lstat(folder / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return Entry(folder, None, f"{folder}: cannot be read ({error.strerror})")
    return read_entry(folder)


def _without_doubles(entries: Iterable[Entry]) -> Iterator[Entry]:
    taken: dict[str, Path] = {}
    for entry in entries:
        first = taken.setdefault(entry.name, entry.folder)
        if first != entry.folder:
            problem = f"{entry.folder}: its name {entry.name} is that of {first} too; rename one of them"
            entry = replace(entry, problem=entry.problem or problem)
        yield entry


def _subfolders(folder: Path) -> tuple[list[Path], str]:
    """The visible folders in a folder, by name; none if it is not there. Also why it cannot be read, or ""."""
    try:
        found = sorted(e.name for e in os.scandir(folder) if not e.name.startswith((".", "__")) and _is_folder(e))
    except (FileNotFoundError, NotADirectoryError):
        return [], ""
    except OSError as error:
        return [], f"{folder}: cannot be read ({error.strerror})"
    if len(found) > _MOST_FOLDERS:
        return [], f"{folder}: holds {len(found)} folders, so it is no draft set"
    return [folder / name for name in found], ""


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a loop of links
        return False


def _general_first(entry: Entry) -> tuple[bool, bool, str]:
    """Tables of phrases come last: where the first draft that can run is taken, models go before them."""
    m = entry.manifest
    return (m is not None and m.kind == "phrases", m is None or m.domain != "general", entry.name)
