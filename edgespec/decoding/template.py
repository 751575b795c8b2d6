"""Chat messages to token ids, through the model's own (untrusted) chat template."""

from __future__ import annotations

import functools
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgespec.errors import PromptError

if TYPE_CHECKING:
    from jinja2 import Template

    from edgespec.decoding.sandbox import TemplateEnvironment
    from edgespec.models.tokenizer import Tokenizer

_MAX_SOURCE = 1 << 18  # characters; the largest templates in use have some 30,000
_MAX_MESSAGES = 1 << 21  # characters of one conversation; what a template makes may be twice as much
_PRIVATE = range(0xE000, 0xF900)  # characters without a meaning, from which the marks of a call are taken


class ChatTemplate:
    """Renders a conversation as transformers' `apply_chat_template` does and encodes it, with three differences:

    - the text of a control token inside a message is encoded as ordinary text: a user cannot end a turn by typing;
    - a render may take 2 seconds of processor time and make texts of 4 M characters (see `sandbox`);
    - content given as a list of text parts is joined.

    Nothing is imported or compiled before the first use, so that a broken template fails only those who use it.
    Safe to share between threads.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # a render's limits are the environment's
        self._compiled: tuple[TemplateEnvironment, Template] | None = None
        texts = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = "|".join(map(re.escape, texts)) or r"(?!)"

    def encode(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> list[int]:
        """Token ids of `messages` (each {"role": str, "content": str or text parts, ...}).

        The beginning-of-text token comes from the template alone, as in transformers: the tokenizer's own is not added.
        Raises PromptError for messages of another form, and for whatever the template refuses or fails at.
        """
        plain = [_checked_message(i, m) for i, m in enumerate(_checked_list(messages))]
        texts = list(_texts(plain))
        if (length := sum(map(len, texts))) > _MAX_MESSAGES:
            raise PromptError(f"The messages have {length} characters; {_MAX_MESSAGES} is the most. Shorten them.")
        opening, closing = _unused_characters([self._source, *texts])
        marked = _mapped(plain, lambda text: re.sub(self._special, rf"{opening}\g<0>{closing}", text))
        rendered = self._render(marked, add_generation_prompt)
        if any(f"\\u{ord(mark):04x}" in rendered.lower() for mark in (opening, closing)):
            raise PromptError("The model's chat template escapes texts, which hides control tokens typed by a user.")
        # Alternately text of template and messages, and a control token's text that stood in a message (None: a mark
        # whose partner the template cut off).
        parts = re.split(f"{opening}({self._special}){closing}|[{opening}{closing}]", rendered)
        ids: list[int] = []
        for part, typed in zip(parts[::2], [*parts[1::2], None], strict=True):
            ids += self._tokenizer.encode(part) if part else []
            ids += self._encode_typed(typed) if typed else []
        if not ids:
            raise PromptError("The model's chat template turns these messages into nothing; add a user message.")
        return ids

    @functools.cached_property
    def turn_end_id(self) -> int | None:
        """The control token that the template puts right after an assistant's words, None if it puts none.

        It ends an answer even where no configuration lists it.
        """
        words = "0123456789"
        conversation = [{"role": "user", "content": "."}, {"role": "assistant", "content": words}]
        try:
            after = self._render(conversation, False).rpartition(words)[2]
        except PromptError:
            return None
        found = re.match(rf"\s*({self._special})", after)
        return self._tokenizer.special_tokens[found[1]] if found else None

    def _encode_typed(self, text: str) -> list[int]:
        """Ordinary tokens for the text of a control token."""
        ids = self._tokenizer.encode(text, allow_special=False)
        if not any(map(self._tokenizer.is_special, ids)):
            return ids
        return [i for character in text for i in self._tokenizer.encode(character, allow_special=False)]

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError

        from edgespec.decoding.sandbox import LimitError

        with self._lock:
            try:
                environment, template = self._compile()
                environment.start(messages)
                return template.render(
                    **self._tokenizer.named_tokens,
                    messages=messages,
                    add_generation_prompt=add_generation_prompt,
                    tools=None,
                    documents=None,
                )
            except LimitError as error:
                raise PromptError(f"The model's chat template is refused: {error}.") from error
            except (TemplateSyntaxError, UndefinedError) as error:
                raise PromptError(f"The model's chat template is broken: {_short(error)}.") from error
            except TemplateError as error:  # mostly its own raise_exception(...)
                raise PromptError(f"The model's chat template does not accept this: {_short(error)}.") from error
            except Exception as error:
                reason = f"{type(error).__name__}: {_short(error)}"
                raise PromptError(f"The model's chat template fails with {reason}.") from error

    def _compile(self) -> tuple[TemplateEnvironment, Template]:
        if self._compiled is None:
            from edgespec.decoding.sandbox import LimitError, TemplateEnvironment

            if len(self._source) > _MAX_SOURCE:
                raise LimitError(f"it has more than {_MAX_SOURCE} characters")
            environment = TemplateEnvironment()
            self._compiled = environment, environment.from_string(self._source)
        return self._compiled


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return text if len(text) <= 300 else text[:300] + "..."


def _checked_list(messages: Any) -> Sequence[Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        kind = type(messages).__name__
        raise PromptError(f'Messages must be a list like [{{"role": "user", "content": "..."}}], not {kind}.')
    if not messages:
        raise PromptError("The list of messages is empty; give at least one message.")
    return messages


def _checked_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        raise PromptError(f'Message {index} must be like {{"role": "user", "content": "..."}}, not {kind}.')
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise PromptError(f'Message {index} needs a "role" (system, user or assistant), not {role!r}.')
    if "content" not in message:
        raise PromptError(f'Message {index} ({role}) has no "content"; give it a text.')
    return {**message, "content": _checked_content(f"message {index} ({role})", message["content"])}


def _checked_content(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)) or not content:
        kind = f"an empty {type(content).__name__}" if content in ([], ()) else type(content).__name__
        raise PromptError(f"The content of {where} must be a text or a list of text parts, not {kind}.")
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise PromptError(f'Content part {index} of {where} must be {{"type": "text", "text": "..."}}.')
        texts.append(text)
    return "".join(texts)


def _mapped(value: Any, change: Any) -> Any:
    """`value` with every text in it changed (keys of mappings stay)."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _mapped(item, change) for key, item in value.items()}
    return [_mapped(item, change) for item in value] if isinstance(value, (list, tuple)) else value


def _texts(value: Any) -> Iterator[str]:
    """Every text in `value`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _unused_characters(texts: list[str]) -> tuple[str, str]:
    """Two characters that occur in none of `texts`, chosen by chance so that nobody can write them on purpose."""
    used = set[str]().union(*texts)
    free = [character for character in map(chr, _PRIVATE) if character not in used]
    if len(free) < 2:
        raise PromptError("The messages use every private-use character of Unicode; remove some.")
    opening = free.pop(secrets.randbelow(len(free)))
    return opening, free[secrets.randbelow(len(free))]
