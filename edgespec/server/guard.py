"""The first to see a request: may it come in at all?

Against web pages of other origins (DNS rebinding, forged requests) Host and Origin are checked, also where a key is
asked for. The key is compared in constant time. Every response gets an id and headers that keep browsers from guessing.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response

from edgespec.server.errors import ApiError, unavailable
from edgespec.server.settings import ServerSettings, host_name

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = frozenset({"/", "/health"})  # the page holds nothing, and probes have no key
PROBES = OPEN_PATHS | {"/metrics"}  # what a full server still answers
_SAFE_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


class Guard:
    """ASGI middleware. draining: whether the server takes no more requests. done: told method, path and status.

    busy: requests whose body is there and that have no whole answer yet, those that are still encoded too; probes
    aside. Those whose body is still coming may take for ever: `refuse_coming` ends them.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        draining: Callable[[], bool],
        done: Callable[[str, str, int], None],
    ) -> None:
        self._app = app
        self._settings = settings
        self._draining = draining
        self._done = done
        self._coming: set[asyncio.Task[Any]] = set()
        self._running: set[asyncio.Task[Any]] = set()
        self._key = None if settings.api_key is None else _digest(settings.api_key.encode())

    @property
    def busy(self) -> int:
        return len(self._running)

    def refuse_coming(self) -> None:
        """Answer 503 to the requests whose body is not there yet."""
        for task in list(self._coming):
            task.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, status, task = Headers(scope=scope), 0, asyncio.current_task()
        assert task is not None

        async def noted() -> Message:
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False) and task in self._coming:
                self._coming.discard(task)
                self._running.add(task)
            return message

        async def marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                self._coming.discard(task)
                status = message["status"]
                self._mark(MutableHeaders(scope=message), headers)
            await send(message)

        answering = self._answering(scope, headers)
        if answering is self._app and scope["path"] not in OPEN_PATHS:
            self._coming.add(task)
        try:
            await answering(scope, noted, marked)
        except asyncio.CancelledError:  # the server ends: nothing else cancels a request
            if not status:
                await _refusal(unavailable("the server is ending", 5))(scope, receive, marked)
        finally:
            self._coming.discard(task)
            self._running.discard(task)
            self._done(scope["method"], scope["path"], status)

    def _answering(self, scope: Scope, headers: Headers) -> ASGIApp:
        """The app, or what refuses the request here."""
        try:
            return self._decide(scope, headers) or self._app
        except ApiError as error:
            return _refusal(error)

    def _decide(self, scope: Scope, headers: Headers) -> Response | None:
        """A response that ends the request here, or None. Raises ApiError for what may not come in."""
        self._check_host(headers)
        allowed = self._check_origin(headers, scope["path"])
        if scope["method"] == "OPTIONS" and allowed and "access-control-request-method" in headers:
            return Response(status_code=204, headers=_preflight(headers))
        if scope["path"] not in OPEN_PATHS:
            self._check_key(headers)
            if self._draining():
                raise unavailable("the server is ending and takes no more requests", 5)
        if scope["path"] not in PROBES and scope.get("state", {}).get("spare"):
            raise unavailable("there are as many connections as may be; this one is for probes")
        return None

    def _check_host(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if not hosts:
            return  # HTTP/1.0, which no browser speaks
        if len(hosts) > 1 or not self._settings.knows_host(host_name(hosts[0])):
            raise ApiError(
                403,
                f"this server does not answer to the host {hosts[0][:100]!r}; --allow-host allows a name",
                kind="permission_error",
                code="host_not_allowed",
            )

    def _check_origin(self, headers: Headers, path: str) -> bool:
        """Whether a web page of another origin asks, and may. Raises ApiError if it may not."""
        origin = headers.get("origin")
        if origin is None:
            # Browsers send no Origin with requests whose answer a page cannot read; there is no reason to answer them.
            if path in OPEN_PATHS or headers.get("sec-fetch-site") not in ("cross-site", "same-site"):
                return False
        elif _same_origin(origin, headers.get("host", "")):
            return False
        elif self._allows(origin):
            return True
        raise ApiError(
            403,
            f"pages of {(origin or 'other sites')[:100]} may not use this server; --allow-origin allows one",
            kind="permission_error",
            code="origin_not_allowed",
        )

    def _allows(self, origin: str) -> bool:
        return "*" in self._settings.allow_origins or origin.lower() in self._settings.allow_origins

    def _check_key(self, headers: Headers) -> None:
        if self._key is None:
            return
        scheme, _space, given = headers.get("authorization", "").partition(" ")
        # Digests have one length, so that the time says nothing about the key's.
        right = hmac.compare_digest(_digest(given.strip().encode("latin-1", "replace")), self._key)
        if not right or scheme.lower() != "bearer":
            raise ApiError(
                401,
                "the API key is missing or wrong: send 'Authorization: Bearer KEY'",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _mark(self, headers: MutableHeaders, asked: Headers) -> None:
        """Put what every response has into its headers. asked: those of the request."""
        origin = asked.get("origin")
        # A length beside chunks may be an attempt to let a proxy see other requests than we do (RFC 9112, 6.3).
        if self._draining() or ("transfer-encoding" in asked and "content-length" in asked):
            headers["connection"] = "close"
        headers.setdefault("x-request-id", f"req_{secrets.token_hex(12)}")
        for name, value in _SAFE_HEADERS.items():
            headers.setdefault(name, value)
        if origin is not None and self._allows(origin):
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = "x-request-id, retry-after"
            headers.add_vary_header("Origin")
        else:
            headers["cross-origin-resource-policy"] = "same-origin"


def _refusal(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


def _same_origin(origin: str, host: str) -> bool:
    return bool(host) and origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


def _preflight(headers: Headers) -> dict[str, str]:
    answer = {
        "access-control-allow-methods": "GET, POST, OPTIONS",
        "access-control-allow-headers": headers.get("access-control-request-headers", "authorization, content-type"),
        "access-control-max-age": "600",
    }
    if headers.get("access-control-request-private-network") == "true":
        answer["access-control-allow-private-network"] = "true"
    return answer


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
