"""The folder that a conversion writes, complete under its name or not there, and the files beside the weights."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgespec.errors import ConfigError, EdgespecError, ModelError
from edgespec.files import write_text
from edgespec.models.convert import journal as convert_journal
from edgespec.models.spec_writer import config_of
from edgespec.models.tokenizer import Tokenizer, load_tokenizer
from edgespec.models.weights.files import read_json
from edgespec.models.weights.quantisation import OWN_KEY
from edgespec.models.weights.weight_file import WeightFile

_KEPT = (
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_LEGAL = re.compile(r"(LICEN[CS]E|NOTICE|COPYING|USE_POLICY)([._-].*)?", re.IGNORECASE)
_SPARE_BYTES = 64 << 20  # of the disk, that a conversion leaves


def check_target(out: Path, source: Path, *, force: bool) -> None:
    """Refuse a folder that is there, unless `force` and `edgespec convert` made it; raises ConfigError."""
    real, origin = Path(os.path.realpath(out)), Path(os.path.realpath(source))
    if real == origin or real in origin.parents:
        raise ConfigError(f"{out}: holds the model that is to be converted; give --out another folder.")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent}: is not a folder; make it, or give --out another one.")
    if not os.path.lexists(out):
        return
    if not force:
        raise ConfigError(f"{out}: is there already; give --out another folder, or --force to replace it.")
    if not _made_by_convert(out):
        raise ConfigError(
            f"{out}: was not written by edgespec convert, so --force does not replace it; remove it first."
        )


def _made_by_convert(folder: Path) -> bool:
    if not folder.is_dir():
        return False
    with suppress(EdgespecError, OSError):
        return not any(folder.iterdir()) or OWN_KEY in read_json(folder / "config.json")
    return False


def check_disk(out: Path, need: int) -> None:
    """ConfigError unless `need` bytes fit the disk of `out` (what --force replaces goes only at the end)."""
    free = shutil.disk_usage(out.parent).free + _left(work_folder(out))
    if need + _SPARE_BYTES > free:
        raise ConfigError(
            f"{out}: needs {need / 1e9:.2f} GB, and its disk has {free / 1e9:.2f} GB free; free some space, or give "
            "--out a folder on another disk."
        )


def work_folder(out: Path) -> Path:
    """Where a conversion to `out` is written until it is complete."""
    return out.parent / f".{out.name}.converting"


def _left(folder: Path) -> int:
    """Bytes on the disk that an interrupted conversion holds: they are gone on with, or removed."""
    with suppress(OSError):
        return sum(path.lstat().st_blocks * 512 for path in folder.iterdir())
    return 0


@contextmanager
def folder_in_progress(out: Path, note: Callable[[str], None] | None = None) -> Iterator[Path]:
    """A folder beside `out` that takes its name, and the place of what is there, when the block ends well.

    What an interrupted or killed conversion left is in it. If the block ends with an error, it stays only where its
    journal says that some tensors are whole, and not for a ModelError: who mends the source begins anew. note: is told.
    """
    work = work_folder(out)
    try:
        if work.is_symlink():
            work.unlink()
        work.mkdir(exist_ok=True)
        handle = os.open(work, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{work}: cannot be made ({error.strerror}); give --out another folder.") from error
    try:
        _claim(handle, out)
        try:
            yield work
            os.fsync(handle)
            _put_in_place(work, out)
        except BaseException as error:
            if isinstance(error, ModelError) or not convert_journal.has_entries(work):
                shutil.rmtree(work, ignore_errors=True)
            elif note is not None:
                note(f"what was converted is kept in {work}; the same command goes on with it.")
            raise
        with suppress(OSError):
            (out / convert_journal.NAME).unlink()  # only now: what fails before is gone on with
    finally:
        os.close(handle)


def _claim(handle: int, out: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(f"{out}: another edgespec convert is writing it; wait for it or end it.") from error


def clear(folder: Path) -> None:
    """Remove what is in a folder. Raises ConfigError."""
    try:
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be emptied ({error.strerror}); remove it.") from error


def _put_in_place(work: Path, out: Path) -> None:
    aside = out.parent / f".{out.name}.replaced"
    try:
        if os.path.lexists(out):
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(out, aside)
        os.rename(work, out)
    except OSError as error:
        if os.path.lexists(aside) and not os.path.lexists(out):
            os.rename(aside, out)
        raise ConfigError(f"{out}: cannot be put in place ({error.strerror}).") from error
    if aside.is_symlink():
        aside.unlink()
    else:
        shutil.rmtree(aside, ignore_errors=True)


def write_beside(weights: WeightFile, tokenizer: Tokenizer, folder: Path, record: Mapping[str, Any]) -> None:
    """config.json with `record`, tokenizer, template, generation settings and licence files, into `folder`."""
    source = source_folder(weights.path)
    if source is None:
        config = config_of(weights.spec)
        _write_tokenizer(tokenizer, folder)
        generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.eos_ids)}
        write_text(folder / "generation_config.json", json.dumps(generation, indent=1))
    else:
        config = {k: v for k, v in read_json(source / "config.json").items() if k != "quantization_config"}
        config["tie_word_embeddings"] = weights.spec.tie_embeddings
        _copy_files(source, folder)
    write_text(folder / "config.json", json.dumps({**config, OWN_KEY: dict(record)}, indent=1))


def source_folder(path: Path) -> Path | None:
    """The folder with a safetensors model's config.json and tokenizer; None for GGUF, which has all in one file."""
    if path.suffix.lower() == ".gguf":
        return None
    return path if path.is_dir() else path.parent


def _copy_files(source: Path, folder: Path) -> None:
    for path in sorted(source.iterdir()):
        if (path.name in _KEPT or _LEGAL.fullmatch(path.name)) and path.is_file():
            shutil.copyfile(path, folder / path.name)


def _write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """As files that `load_tokenizer` reads as the same tokenizer."""
    tokenizer.save_backend(folder)
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": tokenizer.adds_bos}
    settings |= tokenizer.named_tokens
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    write_text(folder / "tokenizer_config.json", json.dumps(settings, indent=1))


def check_result(weights: WeightFile, tokenizer: Tokenizer, folder: Path) -> None:
    """ModelError unless the folder reads as the model and the tokenizer that it was made from."""
    from edgespec.models.weights.opening import open_weights

    with open_weights(folder) as made:
        if made.spec != weights.spec:
            ours, theirs = asdict(made.spec), asdict(weights.spec)
            different = next(key for key in ours if ours[key] != theirs[key])
            raise ModelError(
                f"{weights.path}: its {different} ({theirs[different]}) cannot be written; this model is not supported."
            )
    other = load_tokenizer(folder)
    same = other.fingerprint() == tokenizer.fingerprint() and other.chat_template == tokenizer.chat_template
    if not same or other.adds_bos != tokenizer.adds_bos or set(other.eos_ids) != set(tokenizer.eos_ids):
        raise ModelError(f"{weights.path}: its tokenizer cannot be written; convert the original checkpoint instead.")


def licence_of(weights: WeightFile) -> str | None:
    """What the model's files say about its licence: GGUF metadata, or the front matter of a model card."""
    said = weights.metadata.get("general.license")
    if isinstance(said, str) and said:
        return said
    folder = source_folder(weights.path)
    if folder is None:
        return None
    with suppress(EdgespecError, OSError, ValueError):
        record = read_json(folder / "config.json").get(OWN_KEY)
        if isinstance(record, dict):
            kept = record.get("source", {}).get("licence")
            return kept if isinstance(kept, str) else None
        head = (folder / "README.md").read_text("utf-8")[:20000].split("\n---")[0]
        found = re.search(r"^license:\s*[\"']?([\w.+-]+)", head, re.MULTILINE)
        return found.group(1) if found and head.startswith("---") else None
    return None
