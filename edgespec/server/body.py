"""A request's body: so many bytes, in so many seconds, as a JSON object."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from edgespec.server.errors import ApiError, busy, left, wrong
from edgespec.server.settings import Limits

MOST_PARTS = 200_000  # commas and brackets of a body, unless somebody says otherwise

_LINGER_BYTES, _LINGER_SECONDS = 64 << 20, 5.0
_SURROGATES = re.compile("[\ud800-\udfff]")

Take = Callable[[int], None]


class Bodies:
    """The bytes of all bodies that are read, checked or encoded just now. most: what they may be together."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.taken = 0

    @contextmanager
    def share(self) -> Iterator[Take]:
        """A function that takes bytes for one body, which are given back at the end; 429 if there is no room."""
        mine = 0

        def take(count: int) -> None:
            nonlocal mine
            if self.taken + count > self.most:
                raise busy(f"the bodies of other requests fill the {self.most} bytes that there are for them")
            mine += count
            self.taken += count

        try:
            yield take
        finally:
            self.taken -= mine


async def read_json(
    request: Request, limits: Limits, take: Take = lambda count: None, most_parts: int = MOST_PARTS
) -> dict[str, Any]:
    """The body as an object. take: asked for its bytes. most_parts: see `parse_object`.

    Raises ApiError: 400, 408, 413, 415, 499, or what take does.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the body is {kind[:80]!r}; send 'Content-Type: application/json'", code="wrong_type")
    try:
        body = await asyncio.wait_for(_read(request, limits.body_bytes, take), limits.body_seconds)
    except ClientDisconnect:
        raise left() from None
    except asyncio.TimeoutError:
        message = f"the body did not come within {limits.body_seconds:g} s"
        close = {"connection": "close"}
        raise ApiError(408, message, kind="timeout_error", code="body_too_slow", headers=close) from None
    return parse_object(body, most_parts)


def parse_object(body: bytes, most_parts: int = MOST_PARTS) -> dict[str, Any]:
    """JSON as an object. NaN and infinities, which JSON has not, are refused; half characters become U+FFFD.

    most_parts: commas and brackets that it may have. Each stands for a value, and nobody is served while millions of
    them are made: neither other clients nor the engine, whose thread needs the interpreter too.
    """
    parts = sum(map(body.count, (b",", b"[", b"{")))
    if parts > most_parts:
        message = f"the body has {parts} commas and brackets, more than the {most_parts} that it may have"
        raise ApiError(413, message, code="body_too_large")
    try:
        # As text: of bytes, json guesses the encoding, and lets halves of characters through.
        text = body.decode("utf-8-sig")
        with _uncollected():
            value = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_float)
        if "\\ud" in text or "\\uD" in text:
            value = _without_surrogates(value)
    except RecursionError:
        raise wrong("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:  # no JSON, no text, or a number of thousands of digits
        raise wrong(f"the body is no JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise wrong(f"the body must be a JSON object, not {type(value).__name__}", code="invalid_json")
    return value


@contextmanager
def _uncollected() -> Iterator[None]:
    """The collector would go through all values again and again while there come to be more of them."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


async def _read(request: Request, most: int, take: Take) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most:
        await _linger(request, int(announced))
        raise _too_large(most)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > most:
            raise _too_large(most)
        take(len(chunk))
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


def _finite_float(word: str) -> float:
    value = float(word)
    if math.isinf(value):
        raise ValueError(f"{word[:40]} is more than a number here can be")
    return value


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATES.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(item) for key, item in value.items()}
    return [_without_surrogates(item) for item in value] if isinstance(value, list) else value
