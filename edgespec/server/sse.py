"""JSON responses and server-sent events, sent as fast as the client takes them."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
COMMENT = b": still at work\n\n"  # for proxies, and to notice that nobody is there any more


def dumps(value: Any) -> bytes:
    """Compact JSON. What JSON has no word for (NaN, infinities) is null."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def event(value: Any) -> bytes:
    """One server-sent event with `value` as JSON."""
    return b"data: " + dumps(value) + b"\n\n"


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)


class EventStream(Response):
    """Sends `frames` one by one; each waits until the client has taken what was sent before.

    Nothing is held back here: a slow reader costs one frame of memory, and the pieces that its answer has ready.
    closed: called once when it is over, however that comes.
    """

    media_type = "text/event-stream"

    def __init__(self, frames: AsyncGenerator[bytes, None], closed: Callable[[], object]) -> None:
        super().__init__(headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._frames = frames
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for frame in self._frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._closed()
            await self._frames.aclose()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
