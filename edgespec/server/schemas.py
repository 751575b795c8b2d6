"""OpenAI's requests, checked: a JSON object becomes an `Ask`.

Fields that nobody knows are ignored, as other compatible servers do, and named in the answer (`edgespec.ignored`).
Fields that would change the answer and that this engine cannot do are refused, naming the field.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, FailFast, Field, StrictInt, ValidationError

from edgespec.decoding.params import SamplingParams
from edgespec.errors import ParameterError
from edgespec.server.errors import ApiError, unsupported, wrong

MAX_STOPS, MAX_STOP_CHARACTERS, MAX_TOP_LOGPROBS = 16, 500, 20
MAX_FIELDS, MAX_MESSAGES, MAX_TOKEN_IDS = 256, 4096, 1024

# pydantic notes every element that is wrong, in kilobytes each, unless a list fails at the first, which lists among
# several forms of a field cannot. So those fields are `Any` here, and checked by hand below.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 57

# Known, and without meaning here: they concern accounts, billing, caching and scheduling of a hosted service.
_NO_MEANING = frozenset(
    ("user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key")
    + ("prompt_cache_retention", "prediction", "reasoning_effort", "verbosity", "function_call", "tool_choice")
)


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)
    include_usage: bool | None = None


class _Message(BaseModel):
    """content None: an assistant's turn that only called tools; it says nothing here."""

    model_config = ConfigDict(extra="ignore", strict=True)
    role: str
    content: Any = None


class _Body(BaseModel):
    """What both endpoints have in common, with the samplers beyond OpenAI's that other servers take too."""

    model_config = ConfigDict(extra="allow", strict=True)
    model: str | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: StrictInt | None = None
    max_tokens: StrictInt | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Any = None
    stop: Any = None
    seed: StrictInt | None = None
    top_k: StrictInt | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Any = None
    ignore_eos: bool | None = None
    min_tokens: StrictInt | None = None


class ChatBody(_Body):
    messages: Annotated[list[_Message], Field(min_length=1, max_length=MAX_MESSAGES), FailFast()]
    max_completion_tokens: StrictInt | None = None
    logprobs: bool | None = None
    top_logprobs: StrictInt | None = None


class CompletionBody(_Body):
    prompt: Any
    logprobs: StrictInt | None = None


@dataclass(frozen=True)
class Ask:
    """A request that is in order. params: of SamplingParams; max_new_tokens is missing where the client left it open.

    prompt_field: what a complaint about the prompt names. ignored: fields that were given and have no effect.
    """

    chat: bool
    prompt: str | list[int] | list[dict[str, str]]
    params: dict[str, Any]
    model: str | None
    stream: bool
    include_usage: bool
    ignored: list[str] = field(default_factory=list)

    @property
    def prompt_field(self) -> str:
        return "messages" if self.chat else "prompt"


def chat_ask(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Ask:
    """The body of /v1/chat/completions. Raises ApiError."""
    body = _checked(ChatBody, values)
    _refuse(
        values,
        tools="the engine calls no tools",
        functions="the engine calls no functions",
        audio="the engine has text only",
        web_search_options="the engine searches nothing",
    )
    _refuse_other(
        values, "response_format", {"type": "text"}, "answers are text; the engine cannot hold them to a format"
    )
    _refuse_other(values, "modalities", ["text"], "the engine has text only")
    messages = [_message(index, message) for index, message in enumerate(body.messages)]
    params = _sampling(body, defaults)
    if body.max_completion_tokens is not None:
        params["max_new_tokens"] = body.max_completion_tokens
    if body.top_logprobs and not body.logprobs:
        raise wrong("top_logprobs needs logprobs: true", "top_logprobs")
    if body.logprobs:
        params["logprobs"] = _count("top_logprobs", body.top_logprobs or 0, MAX_TOP_LOGPROBS)
    return _ask(True, messages, params, body)


def completion_ask(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Ask:
    """The body of /v1/completions. Raises ApiError."""
    body = _checked(CompletionBody, values)
    _refuse(values, suffix="the engine only continues a prompt", echo="send the prompt's text yourself")
    _refuse_other(values, "best_of", 1, "the engine writes one answer to a request")
    params = _sampling(body, {"max_new_tokens": 16, **defaults})
    if body.logprobs is not None:
        params["logprobs"] = _count("logprobs", body.logprobs, MAX_TOP_LOGPROBS)
    return _ask(False, _one_prompt(body.prompt), params, body)


def sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams with complaints that name OpenAI's field."""
    try:
        return SamplingParams(**values)
    except ParameterError as error:
        name = str(error).partition(" ")[0].partition("[")[0]
        shown = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}.get(name, name)
        raise wrong(str(error).replace(name, shown, 1), shown) from error


def _ask(chat: bool, prompt: Any, params: dict[str, Any], body: _Body) -> Ask:
    options = body.stream_options
    if options is not None and not body.stream:
        raise wrong("stream_options needs stream: true", "stream_options")
    ignored = [
        name for name, value in (body.model_extra or {}).items() if name not in _NO_MEANING and value is not None
    ]
    usage = bool(options and options.include_usage)
    return Ask(chat, prompt, params, body.model, bool(body.stream), usage, sorted(ignored)[:32])


def _checked(kind: type[Any], values: Mapping[str, Any]) -> Any:
    if len(values) > MAX_FIELDS:
        raise wrong(f"the body has {len(values)} fields; up to {MAX_FIELDS} are taken")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _complaint(error) from None


def _complaint(error: ValidationError) -> ApiError:
    """The first of pydantic's complaints, in one sentence, also where a field has several forms."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = ""
    for step in first["loc"]:
        if isinstance(step, int):
            path += f"[{step}]"
        elif "[" in step or step in ("str", "constrained-str"):
            break  # pydantic's name of one form
        else:
            path += f".{step}" if path else step
    given = "" if first["type"] == "missing" else f" (it is {_shown(first['input'])})"
    return wrong(f"{path}: {first['msg'][0].lower()}{first['msg'][1:]}{given}", path)


def _shown(value: Any) -> str:
    """The beginning of it."""
    shown = _SHORT.repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _refuse(values: Mapping[str, Any], **reasons: str) -> None:
    """Fields that ask for something when they are there and not empty."""
    for name, reason in reasons.items():
        if values.get(name):
            raise unsupported(name, f"{name} cannot be used: {reason}")


def _refuse_other(values: Mapping[str, Any], name: str, only: Any, reason: str) -> None:
    if values.get(name) not in (None, only):
        raise unsupported(name, f"{name} can only be {only!r}: {reason}")


def _message(index: int, message: _Message) -> dict[str, str]:
    """A message as the chat template takes it: "developer" is the newer name of "system"."""
    where = f"messages[{index}]"
    role = {"developer": "system"}.get(message.role, message.role)
    if role in ("tool", "function"):
        raise unsupported(f"{where}.role", f"{where} has the role {role!r}, but the engine calls no tools")
    if role not in ("system", "user", "assistant"):
        raise wrong(
            f"{where} has the role {role[:40]!r}; there are system, developer, user and assistant", f"{where}.role"
        )
    if message.content is None:
        if role != "assistant":
            raise wrong(f"{where} has no content", f"{where}.content")
        return {"role": role, "content": ""}
    if isinstance(message.content, str):
        return {"role": role, "content": message.content}
    if not isinstance(message.content, list) or len(message.content) > MAX_MESSAGES:
        told = f"{where}.content must be a text, or a list of up to {MAX_MESSAGES} text parts"
        raise wrong(told, f"{where}.content")
    texts = [_part(f"{where}.content[{number}]", part) for number, part in enumerate(message.content)]
    return {"role": role, "content": "".join(texts)}


def _part(where: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise wrong(f"{where} must be an object (it is {_shown(part)})", where)
    kind = part.get("type")
    text = part.get("text" if kind != "refusal" else "refusal")
    if kind not in ("text", "refusal"):
        raise unsupported(where, f"{where} has the type {str(kind)[:40]!r}; the engine reads text parts only")
    if not isinstance(text, str):
        raise wrong(f"{where} needs a text", where)
    return text


def _one_prompt(prompt: Any) -> str | list[int]:
    """A text, token ids, or a list of one of those."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        if len(prompt) > 1:
            raise unsupported("prompt", f"prompt has {len(prompt)} prompts; send one in each request")
        prompt = prompt[0]
    if prompt is None or prompt == "" or prompt == []:
        raise wrong("prompt is empty", "prompt")
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise wrong(f"prompt must be a text or a list of token ids (it is {_shown(prompt)})", "prompt")
    for place, token in enumerate(prompt):
        if type(token) is not int:
            message = f"prompt[{place}]: token ids are whole numbers (it is {_shown(token)})"
            raise wrong(message, "prompt")
    return prompt


def _sampling(body: _Body, defaults: Mapping[str, Any]) -> dict[str, Any]:
    if body.n not in (None, 1):
        raise unsupported("n", "n can only be 1: send a request for each answer")
    params = dict(defaults)
    for name, field_name, convert in _FIELDS:
        value = getattr(body, field_name)
        if value is not None:
            params[name] = convert(value)
    return params


def _count(name: str, value: int, most: int) -> int:
    if not 0 <= value <= most:
        raise wrong(f"{name} is {_shown(value)}; 0 to {most} is allowed", name)
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if (
        not isinstance(stops, list)
        or len(stops) > MAX_STOPS
        or not all(isinstance(stop, str) and len(stop) <= MAX_STOP_CHARACTERS for stop in stops)
    ):
        raise wrong(f"stop may be up to {MAX_STOPS} texts of {MAX_STOP_CHARACTERS} characters", "stop")
    return tuple(stop for stop in stops if stop)


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_TOKEN_IDS or any(type(token) is not int for token in value):
        message = f"stop_token_ids must be a list of up to {MAX_TOKEN_IDS} token ids"
        raise wrong(message, "stop_token_ids")
    return tuple(value)


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, dict) or len(value) > MAX_TOKEN_IDS:
        message = f"logit_bias must be an object of up to {MAX_TOKEN_IDS} token ids"
        raise wrong(message, "logit_bias")
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise wrong(f"logit_bias has the key {key[:40]!r}, which is no token id", "logit_bias")
        if type(bias) not in (int, float):
            message = f"logit_bias.{key}: a number is wanted (it is {_shown(bias)})"
            raise wrong(message, f"logit_bias.{key}")
    return {int(key): bias for key, bias in value.items()}


def _same(value: Any) -> Any:
    return value


# name in SamplingParams, name in the body, and what the value becomes
_FIELDS: tuple[tuple[str, str, Callable[[Any], Any]], ...] = (
    ("max_new_tokens", "max_tokens", _same),
    ("min_new_tokens", "min_tokens", _same),
    ("temperature", "temperature", _same),
    ("top_p", "top_p", lambda p: 1e-9 if p == 0 else p),  # OpenAI's 0 is: the likeliest token alone
    ("top_k", "top_k", _same),
    ("min_p", "min_p", _same),
    ("presence_penalty", "presence_penalty", _same),
    ("frequency_penalty", "frequency_penalty", _same),
    ("repetition_penalty", "repetition_penalty", _same),
    ("logit_bias", "logit_bias", _biases),
    ("stop", "stop", _stops),
    ("stop_token_ids", "stop_token_ids", _ids),
    ("ignore_eos", "ignore_eos", _same),
    ("seed", "seed", lambda seed: seed % (1 << 64)),  # any whole number; OpenAI's are of 64 bits, with a sign
)
