"""Models on the Hugging Face hub, through huggingface_hub: its cache, token and offline variables hold.

Only configuration, tokenizer and safetensors files (or one GGUF file) are ever fetched; pickles and code are not.
A model that is whole in the hub's cache is used as it is, without asking the network; `refresh` asks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from edgespec.errors import CatalogError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]*[A-Za-z0-9]")

_TEXT_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "model.safetensors.index.json",
)  # fmt: skip
_WEIGHTS = "model*.safetensors"
_NEVER = ("*/*", "*.bin", "*.pt", "*.pth", "*.py", "*.pkl")


def fetch_model(repo: str, filename: str | None = None, *, refresh: bool = False) -> Path:
    """The folder of `repo`'s snapshot, or its GGUF file: `filename`, or the only one where there are no safetensors.

    Raises CatalogError if the hub cannot be reached and the cache lacks the model, if the model is gated, private or
    unknown, or if it has no weights of a kind that can be read.
    """
    if not refresh:
        path = cached(repo, filename)
        if path is not None:
            return path
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # its notes on every retry; what matters is in the error
    try:
        if filename is None:
            files = HfApi().list_repo_files(repo)
            if not any("/" not in file and file.endswith(".safetensors") for file in files):
                filename = _only_gguf(repo, files)
        if filename is not None:
            return Path(hf_hub_download(repo, filename))
        folder = Path(snapshot_download(repo, allow_patterns=[*_TEXT_FILES, _WEIGHTS], ignore_patterns=list(_NEVER)))
    except CatalogError:
        raise
    except Exception as error:  # the hub's client raises its own, its HTTP library's and plain OSErrors
        path = cached(repo, filename) if refresh and _unreachable(error) else None
        if path is not None:
            return path
        raise _explain(repo, filename, error) from error
    lacking = missing_part(folder)
    if lacking:
        raise CatalogError(f"{repo} on the hub is not a model that can be read: {lacking}")
    return folder


def missing_part(folder: Path) -> str | None:
    """What keeps a model folder from being whole, or None. Only looks at which files there are."""
    if not (folder / "config.json").is_file():
        return "it has no config.json"
    if not (folder / "tokenizer.json").is_file():
        return "it has no tokenizer.json"
    if (folder / "model.safetensors").is_file():
        return None
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return "it has neither model.safetensors nor model.safetensors.index.json"
    try:
        shards = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return "its model.safetensors.index.json cannot be read"
    lacking = [name for name in shards if not (folder / name).is_file()]
    return f"{lacking[0]} of its {len(shards)} weight files is not there" if lacking else None


def cached(repo: str, filename: str | None) -> Path | None:
    """The whole model from the hub's cache, or None. Never uses the network."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo, local_files_only=True))
    except Exception:  # not there, or not readable: the same to us
        return None
    if filename is not None:
        path = folder / filename
        return path if path.is_file() else None
    if missing_part(folder) is None:
        return folder
    files = sorted(folder.glob("*.gguf"))
    return files[0] if len(files) == 1 and not (folder / "config.json").exists() else None


def _only_gguf(repo: str, files: list[str]) -> str:
    found = [file for file in files if file.endswith(".gguf")]
    if len(found) == 1:
        return found[0]
    if not found:
        raise CatalogError(f"{repo} on the hub has neither safetensors nor GGUF weights, and no other kind is read")
    some = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
    raise CatalogError(f"{repo} on the hub has {len(found)} GGUF files ({some}): name one, as {repo}:{found[0]}")


def _unreachable(error: Exception) -> bool:
    from huggingface_hub import errors

    chain = {type(cause).__name__ for cause in (error, error.__cause__, error.__context__) if cause is not None}
    return isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError)) or bool(
        chain & {"ConnectError", "ConnectTimeout", "ConnectionError", "ReadTimeout", "ProxyError"}
    )


def _explain(repo: str, filename: str | None, error: Exception) -> CatalogError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return CatalogError(
            f"{repo} is gated on the hub: accept its terms on its page there, then set HF_TOKEN to a token of yours"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return CatalogError(
            f"{repo} is not on the hub, or is private: check its name, or set HF_TOKEN to a token that may read it"
        )
    if _unreachable(error):
        return CatalogError(
            f"{repo} is not whole in the hub's cache on this machine, and the hub cannot be reached (or HF_HUB_OFFLINE "
            "is set): connect once, or give the path of a model folder or .gguf file"
        )
    if isinstance(error, errors.EntryNotFoundError):
        return CatalogError(f"{repo} on the hub has no file {filename}: check its name")
    reason = (str(error).strip().splitlines() or [""])[0][:200]
    return CatalogError(f"{repo} cannot be fetched from the hub: {type(error).__name__}: {reason}")
