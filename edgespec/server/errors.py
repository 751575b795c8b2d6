"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}} and the status that goes with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edgespec.errors import EdgespecError, ParameterError, PromptError, QueueFullError, RequestTooLong


class ApiError(Exception):
    """What a client is told.

    kind: OpenAI's `type`. param: the field that is wrong. code: a word for programs. headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def wrong(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A request that cannot be answered as it is."""
    return ApiError(400, message, param=param, code=code)


def unsupported(param: str, message: str) -> ApiError:
    """Something that OpenAI's interface has and this engine has not."""
    return ApiError(400, message, param=param, code="unsupported_value")


def too_long(message: str) -> ApiError:
    return ApiError(400, message, param="messages", code="context_length_exceeded")


def unavailable(message: str, retry_after: float = 1.0) -> ApiError:
    """Not now: the server ends, or has too many connections."""
    headers = {"retry-after": _seconds(retry_after), "connection": "close"}
    return ApiError(503, message, kind="server_error", code="unavailable", headers=headers)


def busy(message: str) -> ApiError:
    """Too much at once; the body was not read to its end."""
    headers = {"retry-after": "1", "connection": "close"}
    return ApiError(429, message, kind="rate_limit_error", code="busy", headers=headers)


def left() -> ApiError:
    """Nobody is there to read this; it is for what is counted (the status is nginx's)."""
    return ApiError(499, "the client left")


def timed_out(message: str) -> ApiError:
    return ApiError(504, message, kind="timeout_error", code="timeout")


def from_exception(error: BaseException) -> ApiError:
    """Any exception as what the client is told. Only errors whose message is meant for users keep theirs."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        headers = {"retry-after": _seconds(error.retry_after_s)}
        return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers=headers)
    if isinstance(error, RequestTooLong):
        return too_long(str(error))
    if isinstance(error, PromptError):
        return wrong(str(error), "messages", "invalid_prompt")
    if isinstance(error, ParameterError):
        return wrong(str(error), str(error).split(" ", 1)[0].partition("[")[0])
    if isinstance(error, EdgespecError):
        return ApiError(500, str(error), kind="server_error", code="engine_error")
    return ApiError(500, "the engine failed; its log says why", kind="server_error", code="internal_error")


def _seconds(value: float) -> str:
    """Whole seconds, at least one, as the header wants them."""
    return str(max(1, math.ceil(value)) if math.isfinite(value) else 60)
