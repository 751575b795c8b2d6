"""draft.toml: what a draft is, whom it was made for, which files it has, and what was measured. Strict both ways."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from drafts import toml_text
from drafts.fields import Table
from edgespec.errors import DraftError
from edgespec.files import sha256_of, write_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MANIFEST = "draft.toml"
FORMAT = 1
KINDS = ("head", "standalone", "phrases")
DTYPES = ("int8", "int4", "float16", "bfloat16", "float32", "none")  # none: it has no weights
WEIGHT_FORMATS = ("exact", "int8", "float32")
MAX_BYTES = 256 << 10  # of draft.toml
RESERVED = ("auto", "off", "plain", "ngram")  # words that mean something else where a draft is named
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class TargetBuild:
    """The target a draft was made for.

    fingerprint: `WeightFile.fingerprint()` of its weights. model: `model_fingerprint()` of them, "" where that is not
    known; a draft serves other files of that model too. tokenizer: `Tokenizer.fingerprint()`. graph_version: of the
    CPU engine whose numbers it learned from. measured_with: the weight formats its acceptance was measured with.
    """

    name: str
    fingerprint: str
    tokenizer: str
    hidden_size: int
    vocab_size: int
    graph_version: int = 0
    measured_with: tuple[str, ...] = ()
    model: str = ""

    def is_for(self, fingerprint: str, model: str) -> bool:
        """Whether these are the very weights that the draft was made for, or the same model in another form."""
        return self.fingerprint == fingerprint or (bool(model) and self.model == model)

    @classmethod
    def read(cls, table: Table) -> TargetBuild:
        return cls(
            name=table.line("name"),
            fingerprint=table.sha256("fingerprint"),
            tokenizer=table.sha256("tokenizer"),
            hidden_size=table.whole("hidden_size", 1, 1 << 20),
            vocab_size=table.whole("vocab_size", 1, 1 << 24),
            graph_version=table.whole("graph_version", 0, 1 << 20, default=0),
            measured_with=table.words("measured_with", WEIGHT_FORMATS),
            model=table.sha256("model", default=""),
        )


@dataclass(frozen=True)
class FileInfo:
    """One file of the folder: its length and sha256 (hex)."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileInfo:
        """What is true of the file now. Raises OSError."""
        return cls(path.stat().st_size, sha256_of(path))

    @classmethod
    def read(cls, table: Table) -> FileInfo:
        return cls(table.whole("bytes", 1, 1 << 40), table.sha256("sha256"))


@dataclass(frozen=True)
class Confidence:
    """temperature: divides the draft's logits so that its probabilities are chances. error: what is left (0 to 1)."""

    temperature: float = 1.0
    error: float = 0.0

    @classmethod
    def read(cls, table: Table) -> Confidence:
        temperature = table.number("temperature", 0.01, 100.0)
        return cls(temperature, table.number("error", 0.0, 1.0, default=0.0))


@dataclass(frozen=True)
class Acceptance:
    """Measured on held-out prompts of one domain.

    first: the share of first guesses accepted. tokens: accepted a round at gamma 3, with its 95% interval low..high.
    """

    first: float
    tokens: float
    low: float
    high: float
    rounds: int

    @classmethod
    def read(cls, table: Table) -> Acceptance:
        low, high = table.number("low", 0.0, 64.0), table.number("high", 0.0, 64.0)
        if low > high:
            raise table.refused("low", f"is {low}, above high = {high}")
        first, tokens = table.number("first", 0.0, 1.0), table.number("tokens", 0.0, 64.0)
        return cls(first, tokens, low, high, table.whole("rounds", 1, 1 << 40))


@dataclass(frozen=True)
class Training:
    """How the draft was made. start: the draft it started from ("from" in the file), or ""."""

    command: str
    seed: int
    tokens: int
    updates: int
    seconds: float
    start: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, table: Table) -> Training:
        return cls(
            command=table.text("command"),
            seed=table.whole("seed", 0, (1 << 63) - 1),
            tokens=table.whole("tokens", 0, 1 << 50),
            updates=table.whole("updates", 0, 1 << 50),
            seconds=table.number("seconds", 0.0, 1e9),
            start=table.line("from", default=""),
            versions=table.texts("versions"),
        )


@dataclass(frozen=True)
class DataSource:
    """Where prompts came from, under which licence, and how many."""

    source: str
    licence: str
    prompts: int

    @classmethod
    def read(cls, table: Table) -> DataSource:
        return cls(table.line("source"), table.line("licence"), table.whole("prompts", 0, 1 << 40))


@dataclass(frozen=True)
class Manifest:
    """All that draft.toml says.

    `architecture` holds the numbers of a head (`HeadSpec.from_mapping` checks them); those of other kinds only inform.
    """

    name: str
    kind: str
    domain: str
    target: TargetBuild
    files: Mapping[str, FileInfo]
    licence: str
    dtype: str
    description: str = ""
    architecture: Mapping[str, int | float] = field(default_factory=dict)
    confidence: Confidence | None = None
    acceptance: Mapping[str, Acceptance] = field(default_factory=dict)
    training: Training | None = None
    data: tuple[DataSource, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a draft folder. Raises DraftError with file and key for whatever is not as it must be."""
        path = folder / MANIFEST
        return cls.parse(_read_text(folder), str(path))

    @classmethod
    def parse(cls, text: str, source: str) -> Manifest:
        """The manifest in `text`; `source` names it in errors."""
        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            raise DraftError(f"{source}: is not valid TOML ({error}); copy or make the draft again") from None
        return _manifest(Table(source, "", data))

    def text(self) -> str:
        """The file's text; `parse` gives an equal manifest. Raises DraftError for values that `parse` would refuse."""
        try:
            text = toml_text.dumps(as_data(self))
        except (ValueError, TypeError) as error:
            raise DraftError(f"the manifest of draft {self.name} cannot be written: {error}") from None
        again = Manifest.parse(text, f"{MANIFEST} of {self.name}")
        if again != self:
            raise DraftError(f"the manifest of draft {self.name} would not be read back as it is: use plain values")
        return toml_text.dumps(as_data(again))  # 0 where a fraction belongs is 0.0 from here on

    def write(self, folder: Path) -> None:
        """Replace draft.toml in one durable step. Its files must be there and match. Raises DraftError, OSError."""
        text = self.text()
        self.verify(folder)
        write_text(folder / MANIFEST, text)

    def verify(self, folder: Path, *, hashes: bool = True) -> None:
        """Check that every file is here, is one of the folder's own, and has its length (and sha256).

        Raises DraftError for the first that does not.
        """
        for name, info in self.files.items():
            path = own_file(folder, name)
            size = path.stat().st_size
            if size != info.bytes:
                raise DraftError(f"{path}: has {size} bytes and must have {info.bytes}; copy or make the draft again")
            if hashes and _digest(path) != info.sha256:
                raise DraftError(f"{path}: has another sha256 than {MANIFEST} says; copy or make the draft again")

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(info.bytes for info in self.files.values())

    @property
    def weights_fingerprint(self) -> str:
        """sha256 (hex) over the names and sha256 of the files: what a draft's weights are known by."""
        listed = "\n".join(f"{name} {info.sha256}" for name, info in sorted(self.files.items()))
        return hashlib.sha256(listed.encode()).hexdigest()

    @property
    def expected(self) -> float | None:
        """The mean over the measured domains of the first guess's acceptance, or None."""
        rates = [measured.first for measured in self.acceptance.values()]
        return sum(rates) / len(rates) if rates else None


def own_file(folder: Path, name: str) -> Path:
    """The path of a regular file inside `folder`; DraftError if it is missing, no file, or leads out of the folder."""
    path = folder / name
    try:
        inside = path.resolve(strict=True).parent == folder.resolve(strict=True)
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise DraftError(f"{path}: is missing; copy or make the draft again") from None
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, in older Pythons
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise DraftError(f"{path}: cannot be read ({reason})") from None
    if not inside:
        raise DraftError(f"{path}: is a link that leaves its folder; copy the file itself into the folder")
    if not stat.S_ISREG(mode):
        raise DraftError(f"{path}: is no regular file; copy or make the draft again")
    return path


def _digest(path: Path) -> str:
    try:
        return sha256_of(path)
    except OSError as error:
        raise DraftError(f"{path}: cannot be read ({error.strerror})") from None


def _read_text(folder: Path) -> str:
    path = own_file(folder, MANIFEST)
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise DraftError(f"{path}: cannot be read ({error.strerror})") from None
    if len(raw) > MAX_BYTES:
        raise DraftError(
            f"{path}: is longer than {MAX_BYTES} bytes, so it is no manifest; copy or make the draft again"
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise DraftError(f"{path}: is not UTF-8 text; copy or make the draft again") from None


def _manifest(table: Table) -> Manifest:
    if table.whole("format", 0, 1 << 20) != FORMAT:
        raise table.refused(
            "format", f"must be {FORMAT}; another version of edgespec made this draft, update one of both"
        )
    kind = table.choice("kind", KINDS)
    name = table.name("name")
    if name in RESERVED:
        raise table.refused("name", f"is {name!r}, a word with a meaning of its own; rename the draft")
    files = {key: FileInfo.read(inner) for key, inner in table.tables("files", names="file").items()}
    if not files or MANIFEST in files:
        raise table.refused("files", f"must list the draft's files, without {MANIFEST}")
    architecture = table.numbers("architecture", required=kind == "head")
    manifest = Manifest(
        name=name,
        kind=kind,
        domain=table.name("domain"),
        description=table.text("description", default=""),
        licence=table.line("licence"),
        dtype=table.choice("dtype", DTYPES),
        target=TargetBuild.read(table.table("target")),
        files=files,
        architecture=architecture,
        confidence=table.optional("confidence", Confidence.read),
        acceptance={key: Acceptance.read(inner) for key, inner in table.tables("acceptance", names="domain").items()},
        training=table.optional("training", Training.read),
        data=tuple(DataSource.read(inner) for inner in table.list("data")),
    )
    table.finish()
    return manifest


def as_data(m: Manifest) -> dict[str, Any]:
    """The manifest as the plain tables that draft.toml holds."""
    data: dict[str, Any] = {"format": FORMAT, "name": m.name, "kind": m.kind, "domain": m.domain}
    data |= {"description": m.description, "licence": m.licence, "dtype": m.dtype}
    data["target"] = _values(m.target)
    data["files"] = {name: _values(info) for name, info in m.files.items()}
    if m.architecture:
        data["architecture"] = dict(m.architecture)
    if m.confidence is not None:
        data["confidence"] = _values(m.confidence)
    if m.acceptance:
        data["acceptance"] = {domain: _values(measured) for domain, measured in m.acceptance.items()}
    if m.training is not None:
        training = _values(m.training)
        versions, start = training.pop("versions"), training.pop("start")
        data["training"] = {**training, "from": start, "versions": dict(versions)}
    if m.data:
        data["data"] = [_values(source) for source in m.data]
    return data


def _values(part: Any) -> dict[str, Any]:
    return {name: getattr(part, name) for name in part.__dataclass_fields__}
