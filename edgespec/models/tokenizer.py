"""Tokenizers: one class for Hugging Face folders and GGUF files, on top of the `tokenizers` library."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tokenizers

from edgespec.errors import DraftError, ModelError
from edgespec.files import write_text
from edgespec.models.byte_level import BYTES_BY_CHARACTER
from edgespec.models.weights.files import ReadOnlyFile, read_json, refuse_wrong_content

_BACKEND_FILE = "tokenizer.json"
_SETTINGS_FILE = "edgespec_tokenizer.json"
_SETTINGS_VERSION = 1
_MAX_BACKEND_BYTES = 512 << 20
# Tokens that end a turn in the chat formats in use. Where a model's own template writes one, it also ends an answer.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>")


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """What a tokenizer needs besides its vocabulary.

    named_tokens: the texts a chat template may use ("bos_token", "eos_token", "pad_token", "unk_token").
    """

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    adds_bos: bool = False
    chat_template: str | None = None
    named_tokens: dict[str, str] = field(default_factory=dict)


class Tokenizer:
    """Text to ids and back. Safe to share between threads.

    size: the highest id + 1, added tokens included; rows of a model beyond it are padding.
    bos_id: the id put in front by `encode(add_special=True)` if `adds_bos`, else only a name for templates.
    eos_ids: every id that ends an answer according to tokenizer, generation config and chat template.
    special_tokens: text -> id of control tokens.
    is_byte_level: every token is a sequence of bytes (`token_bytes`), so that text can be decoded piece by piece.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: TokenizerSettings,
        *,
        size: int | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self._backend = backend
        self._settings = settings
        self._lock = threading.Lock()
        self._vocabulary: dict[int, str] | None = None
        self._fingerprint = fingerprint
        added = backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self._special = frozenset(i for i, token in added.items() if token.special)
        self.special_tokens: dict[str, int] = {added[i].content: i for i in sorted(self._special)}
        self.size = max(self._tokens(), default=-1) + 1 if size is None else size
        self.bos_id = settings.bos_id
        self.eos_ids = self._stop_ids()
        self.adds_bos = settings.adds_bos
        self.chat_template = settings.chat_template
        self.named_tokens = dict(settings.named_tokens)
        self.is_byte_level = _is_byte_level(backend)

    def encode(self, text: str, *, add_special: bool = False, allow_special: bool = True) -> list[int]:
        """Ids of `text`. add_special: put the BOS id in front if this tokenizer `adds_bos`.

        allow_special=False encodes the text of special tokens as ordinary text, so that what a user types cannot become
        a control token. Unpaired surrogates, which are no text, become U+FFFD.
        """
        text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        with self._lock:  # the switch belongs to the shared backend
            self._backend.encode_special_tokens = not allow_special
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        if add_special and self.adds_bos and self.bos_id is not None:
            ids = [self.bos_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; ids without a token (padding rows) have no text. Invalid UTF-8 becomes U+FFFD."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def token(self, token_id: int) -> str:
        """The token as the vocabulary spells it, "" for an id without one."""
        return (self._backend.id_to_token(token_id) or "") if token_id >= 0 else ""

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes a token stands for (special tokens: of their text), or None if the vocabulary is not byte-level.

        `decode(ids, skip_special=False)` equals the joined bytes, decoded as UTF-8 with replacement characters.
        """
        if not self.is_byte_level:
            return None
        text = self.token(token_id)
        try:
            return bytes([BYTES_BY_CHARACTER[c] for c in text])
        except KeyError:  # an added token, spelled as it is
            return text.encode("utf-8")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def is_added(self, token_id: int) -> bool:
        """Whether the id was added to the vocabulary: control tokens, and words matched before any splitting."""
        return token_id in self._added

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n times as many has n tokens or more (but for what a normaliser
        leaves out)."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    def fingerprint(self) -> str:
        """sha256 (hex) over all (id, token) pairs: equal for equal vocabularies, whatever their files and settings."""
        if self._fingerprint is None:
            lines = "".join([f"{token_id}\t{token}\n" for token_id, token in sorted(self._tokens().items())])
            self._fingerprint = hashlib.sha256(lines.encode("utf-8")).hexdigest()
        return self._fingerprint

    def save(self, folder: Path) -> None:
        """Write the tokenizer into `folder`, for `Tokenizer.load`. Settings come last: a crash leaves no half."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = asdict(self._settings) | {
            "version": _SETTINGS_VERSION,
            "size": self.size,
            "fingerprint": self.fingerprint(),
        }
        self.save_backend(folder)
        write_text(folder / _SETTINGS_FILE, json.dumps(settings))

    def save_backend(self, folder: Path) -> None:
        """Write tokenizer.json alone, which has no settings."""
        write_text(folder / _BACKEND_FILE, self._backend.to_str())

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read what `save` wrote. Raises ModelError if it is missing, damaged or of another version."""
        path = folder / _SETTINGS_FILE
        saved = read_json(path)
        if saved.pop("version", None) != _SETTINGS_VERSION:
            raise ModelError(f"{path}: was written by another version of edgespec; delete the folder.")
        size, fingerprint = saved.pop("size", None), saved.pop("fingerprint", None)
        try:
            settings = TokenizerSettings(**(saved | {"eos_ids": tuple(saved["eos_ids"])}))
        except (TypeError, KeyError):
            settings = None
        if settings is None or type(size) is not int or not isinstance(fingerprint, str) or not _plausible(settings):
            raise ModelError(f"{path}: is damaged; delete the folder.")
        return cls(load_backend(folder / _BACKEND_FILE), settings, size=size, fingerprint=fingerprint)

    def vocabulary(self) -> dict[int, str]:
        """id -> token, added tokens included. A copy."""
        return dict(self._tokens())

    def _tokens(self) -> dict[int, str]:
        if self._vocabulary is None:
            self._vocabulary = {i: token for token, i in self._backend.get_vocab(with_added_tokens=True).items()}
        return self._vocabulary

    def _stop_ids(self) -> tuple[int, ...]:
        template = self._settings.chat_template or ""
        ends = [self.special_tokens[text] for text in _TURN_ENDS if text in self.special_tokens and text in template]
        return tuple(dict.fromkeys([*self._settings.eos_ids, *ends]))


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model: a Hugging Face folder with tokenizer.json, a .gguf file, or a folder with one of those.

    Raises ModelError if it is missing, damaged or of an unsupported kind.
    """
    from edgespec.models.tokenizer_gguf import tokenizer_from_gguf
    from edgespec.models.tokenizer_hf import tokenizer_from_folder
    from edgespec.models.weights.opening import only_gguf

    path = Path(path)
    if path.suffix.lower() == ".safetensors":
        path = path.parent
    try:
        is_folder = path.is_dir()
        if is_folder and (path / _BACKEND_FILE).exists():
            return tokenizer_from_folder(path)
        if is_folder and not any(p.suffix.lower() == ".gguf" for p in path.iterdir()):
            raise ModelError(
                f"{path}: holds no tokenizer.json (other tokenizer files are not read); fetch it with the model."
            )
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}).") from error
    return tokenizer_from_gguf(only_gguf(path) if is_folder else path)


def compare_vocabularies(target: Tokenizer, draft: Tokenizer) -> None:
    """DraftError, naming the first differing id and both texts, unless a draft's ids mean what the target's mean.

    Only token texts count, not settings or kinds. The draft may lack ids at the end, or have more added tokens there.
    """
    if target.fingerprint() == draft.fingerprint():
        return
    ours, theirs = target._tokens(), draft._tokens()
    common = min(target.size, draft.size)
    for token_id in range(common):
        one, other = ours.get(token_id), theirs.get(token_id)
        if one != other:
            raise DraftError(
                f"The draft's vocabulary differs from the target's: id {token_id} is {one!r} for the target "
                f"and {other!r} for the draft."
            )
    for token_id in range(common, draft.size):
        if token_id in theirs and not draft.is_added(token_id):
            raise DraftError(
                f"The draft's vocabulary is larger than the target's: id {token_id} is {theirs[token_id]!r} "
                "for the draft and does not exist for the target."
            )


def load_backend(path: Path) -> tokenizers.Tokenizer:
    """A tokenizer.json as the library's object, without its truncation and padding settings."""
    file = ReadOnlyFile(path)
    try:
        if file.size > _MAX_BACKEND_BYTES:
            raise ModelError(f"{path}: {file.size} bytes are too many for a tokenizer.")
        raw = file.read(0, file.size, "its text")
    finally:
        file.close()
    refuse_wrong_content(path, raw[:512], len(raw))
    return guarded(lambda: tokenizers.Tokenizer.from_buffer(raw), path)


def guarded(build: Callable[[], tokenizers.Tokenizer], path: Path) -> tokenizers.Tokenizer:
    """Run a constructor of the library, which signals damage with bare exceptions or Rust panics."""
    try:
        backend = build()
        backend.no_truncation()
        backend.no_padding()
        backend.decode(backend.encode("a 1", add_special_tokens=True).ids)  # some damage shows only in use
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(
            f"{path}: the tokenizer cannot be built ({str(error)[:200]}); fetch the file again."
        ) from error
    return backend


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    decoder = {} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    return [part.get("type") for part in decoder.get("decoders", [decoder])] == ["ByteLevel"]


def _plausible(settings: TokenizerSettings) -> bool:
    return (
        all(type(i) is int for i in settings.eos_ids)
        and (settings.bos_id is None or type(settings.bos_id) is int)
        and isinstance(settings.adds_bos, bool)
        and (settings.chat_template is None or isinstance(settings.chat_template, str))
        and isinstance(settings.named_tokens, dict)
        and all(isinstance(text, str) for text in settings.named_tokens.values())
    )
