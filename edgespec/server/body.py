"""A request's body: so many bytes, in so many seconds, as a JSON object."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, NoReturn

from starlette.requests import Request

from edgespec.server.errors import ApiError, wrong
from edgespec.server.settings import Limits

_LINGER_BYTES, _LINGER_SECONDS = 64 << 20, 5.0
_SURROGATES = re.compile("[\ud800-\udfff]")


async def read_json(request: Request, limits: Limits) -> dict[str, Any]:
    """The body as an object. Raises ApiError: 400, 408, 413 or 415."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the body is {kind[:80]!r}; send 'Content-Type: application/json'", code="wrong_type")
    try:
        body = await asyncio.wait_for(_read(request, limits.body_bytes), limits.body_seconds)
    except asyncio.TimeoutError:
        message = f"the body did not come within {limits.body_seconds:g} s"
        raise ApiError(408, message, kind="timeout_error", headers={"connection": "close"}) from None
    return parse_object(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """JSON as an object. NaN and infinities, which JSON has not, are refused; half characters become U+FFFD."""
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
        if b"\\ud" in body or b"\\uD" in body:
            value = _without_surrogates(value)
    except RecursionError:
        raise wrong("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:  # no JSON, no text, or a number of thousands of digits
        raise wrong(f"the body is no JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise wrong(f"the body must be a JSON object, not {type(value).__name__}", code="invalid_json")
    return value


async def _read(request: Request, most: int) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most:
        await _linger(request, int(announced))
        raise _too_large(most)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise _too_large(most)
        chunks.append(chunk)
    return b"".join(chunks)


async def _linger(request: Request, announced: int) -> None:
    """Let a client that is not absurd finish: one whose connection is closed while it writes never reads the answer."""
    if announced > _LINGER_BYTES or "100-continue" in request.headers.get("expect", ""):
        return

    async def drop() -> None:
        async for _chunk in request.stream():
            pass

    try:
        await asyncio.wait_for(drop(), _LINGER_SECONDS)
    except asyncio.TimeoutError:
        pass


def _too_large(most: int) -> ApiError:
    message = f"the body has more than {most} bytes, which is the most"
    return ApiError(413, message, code="body_too_large", headers={"connection": "close"})


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATES.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return [_without_surrogates(item) for item in value] if isinstance(value, list) else value
