"""The tokenizer of a Hugging Face folder: tokenizer.json, and the settings in the files around it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from edgespec.errors import ModelError
from edgespec.models.tokenizer import Tokenizer, TokenizerSettings, load_backend
from edgespec.models.weights.files import MOST_LISTS, ReadOnlyFile, read_json

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_MAX_TEMPLATE = 16 << 20


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """See `load_tokenizer`."""
    backend = load_backend(folder / "tokenizer.json")
    config = _optional(folder / "tokenizer_config.json")
    config = _optional(folder / "special_tokens_map.json") | config
    _add_listed_tokens(backend, config, folder)
    named = {name: text for name in _NAMES if (text := _token_text(config.get(name))) is not None}
    listed = config.get("additional_special_tokens")
    extra = [_token_text(value) for value in listed] if isinstance(listed, list) else []
    _mark_special(backend, [*named.values(), *(text for text in extra if text)])
    ids = {name: backend.token_to_id(text) for name, text in named.items()}
    generation = _optional(folder / "generation_config.json")
    first = _first_added_id(backend)
    explicit = config.get("add_bos_token")
    adds_bos = explicit if isinstance(explicit, bool) else first is not None
    bos_id = ids.get("bos_token", first)
    return Tokenizer(
        backend,
        TokenizerSettings(
            bos_id=bos_id,
            eos_ids=_eos_ids([ids.get("eos_token"), generation.get("eos_token_id")]),
            adds_bos=adds_bos and bos_id is not None,
            chat_template=_chat_template(folder, config),
            named_tokens=named,
        ),
    )


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path, MOST_LISTS) if path.exists() else {}


def _token_text(value: Any) -> str | None:
    """A token is given as its text or as an object with its text under `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_listed_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], folder: Path) -> None:
    """Tokens of `added_tokens_decoder` that tokenizer.json does not know yet; their ids must come out as listed."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    where = folder / "tokenizer_config.json"
    for key, entry in sorted(listed.items(), key=lambda item: (len(item[0]), item[0])):
        text = _token_text(entry)
        if not key.isdecimal() or text is None:
            raise ModelError(f"{where}: added_tokens_decoder has the damaged entry {key[:40]!r}; fetch the file again.")
        if backend.token_to_id(text) is None:
            special = entry.get("special") is True
            token = tokenizers.AddedToken(text, special=special, normalized=False)
            backend.add_special_tokens([token]) if special else backend.add_tokens([token])
        if backend.token_to_id(text) != int(key):
            raise ModelError(
                f"{where}: gives token {text[:80]!r} the id {key}, but tokenizer.json makes it "
                f"{backend.token_to_id(text)}; the files do not belong together."
            )


def _mark_special(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    """Named tokens are control tokens even where tokenizer.json lists them as ordinary words."""
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    for text in texts:
        if text not in special and backend.token_to_id(text) is not None:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])


def _first_added_id(backend: tokenizers.Tokenizer) -> int | None:
    """The id that tokenizer.json's post-processor puts in front of a text, if any."""
    plain = backend.encode("a", add_special_tokens=False).ids
    full: list[int] = backend.encode("a", add_special_tokens=True).ids
    return full[0] if len(full) > len(plain) and full[1 : 1 + len(plain)] == plain else None


def _eos_ids(values: list[Any]) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for value in values:
        for item in value if isinstance(value, list) else [value]:
            if type(item) is int and item >= 0:
                ids[item] = None
    return tuple(ids)


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        file = ReadOnlyFile(path)
        try:
            if file.size > _MAX_TEMPLATE:
                raise ModelError(f"{path}: {file.size} bytes are too many for a chat template.")
            return file.read(0, file.size, "its text").decode("utf-8")
        except UnicodeDecodeError:
            raise ModelError(f"{path}: is not UTF-8 text; fetch it again.") from None
        finally:
            file.close()
    template = config.get("chat_template") or _optional(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
