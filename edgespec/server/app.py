"""The endpoints, put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from edgespec.server.answering import Answer, Answering
from edgespec.server.body import MOST_PARTS, Bodies, read_json
from edgespec.server.errors import ApiError, from_exception, unavailable, wrong
from edgespec.server.guard import Guard
from edgespec.server.metrics import CONTENT_TYPE, Metrics
from edgespec.server.page import page
from edgespec.server.schemas import Ask, chat_ask, completion_ask
from edgespec.server.settings import ServerSettings
from edgespec.server.sse import EventStream, JsonResponse
from edgespec.server.timeline import Timeline

_READ = ["GET", "HEAD"]
AskOf = Callable[[Mapping[str, Any], Mapping[str, Any]], Ask]


class App:
    """One engine's endpoints. asgi: what a web server runs. connections: set by whoever accepts them.

    engine: as `edgespec.Engine`, of which encode, submit, watch and what tells its state are used.
    """

    def __init__(self, engine: Any, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.draining = False
        self.connections = lambda: 0
        self.model = settings.model_name or model_name(engine.config.model)
        self.metrics = Metrics()
        self.answering = Answering(engine, settings, self.model, self.metrics)
        self.timeline = Timeline(engine, self.metrics.batch)
        self._end_watching = engine.watch(self.timeline.batch)
        self.metrics.watch(
            lambda: engine.serving, engine.memory_bytes, lambda: engine.drafts, lambda: self.connections()
        )
        # Never a path of this machine: what is accepted can be guessed.
        self._names = {self.model, model_name(engine.config.model)}
        limits = settings.limits
        self.bodies = Bodies(max(limits.bodies_bytes, limits.body_bytes))
        self._most_parts = limits.body_parts or max(MOST_PARTS, 2 * engine.context)
        self._guard = Guard(self._routes(), settings, lambda: self.draining, self.metrics.http)
        self.asgi: ASGIApp = self._guard

    @property
    def busy(self) -> int:
        """Requests that have come and have no whole answer yet."""
        return self._guard.busy

    def refuse_coming(self) -> None:
        """The server ends: no body is waited for any more."""
        self._guard.refuse_coming()

    def close(self) -> None:
        """Cancel what runs, and let go of the engine."""
        self._end_watching()
        self.answering.close()

    def _routes(self) -> FastAPI:
        routes = FastAPI(title="edgespec", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
        add = routes.add_api_route
        add("/v1/chat/completions", self._chat, methods=["POST"], response_model=None)
        add("/v1/completions", self._complete, methods=["POST"], response_model=None)
        add("/v1/models", self._models, methods=_READ, response_model=None)
        add("/v1/models/{model:path}", self._model, methods=_READ, response_model=None)
        add("/health", self._health, methods=_READ, response_model=None)
        add("/metrics", self._metrics, methods=_READ, response_model=None)
        add("/edgespec/timeline", self._timeline, methods=_READ, response_model=None)
        add("/", self._page, methods=_READ, response_model=None)
        routes.add_exception_handler(ApiError, _on_error)
        routes.add_exception_handler(HTTPException, _on_http_error)
        routes.add_exception_handler(Exception, _on_error)
        return routes

    async def _chat(self, request: Request) -> Response:
        return await self._answer(chat_ask, request)

    async def _complete(self, request: Request) -> Response:
        return await self._answer(completion_ask, request)

    async def _answer(self, ask_of: AskOf, request: Request) -> Response:
        stream, answer = await self._begin(ask_of, request)
        if not stream:
            return JsonResponse(await answer.whole())
        return EventStream(answer.frames(await answer.first()), answer.close)

    async def _begin(self, ask_of: AskOf, request: Request) -> tuple[bool, Answer]:
        """Whether it is to be streamed, and the answer, queued. The body ends here: an answer may take minutes."""
        limits, defaults = self.settings.limits, self.settings.defaults
        with self.bodies.share() as take:
            ask = ask_of(await read_json(request, limits, take, self._most_parts), defaults)
            if ask.model is not None and ask.model not in self._names:
                raise _no_model(ask.model, self.model)
            return ask.stream, await self.answering.begin(ask, request.receive)

    async def _models(self) -> Response:
        return JsonResponse({"object": "list", "data": [self._card()]})

    async def _model(self, model: str) -> Response:
        if model not in self._names:
            raise _no_model(model, self.model)
        return JsonResponse(self._card())

    def _card(self) -> dict[str, Any]:
        drafts = {"drafts": self.engine.drafts, "context": self.engine.context}
        return {"id": self.model, "object": "model", "created": 0, "owned_by": "edgespec", "edgespec": drafts}

    async def _health(self) -> Response:
        if self.draining:
            raise unavailable("the server is ending", 5)
        return JsonResponse({"status": "ok"})

    async def _metrics(self) -> Response:
        return Response(self.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def _timeline(self, request: Request) -> Response:
        after = request.query_params.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) < 16):
            raise wrong("after must be a whole number", "after")
        return JsonResponse(self.timeline.since(int(after)))

    async def _page(self) -> Response:
        return page()


def model_name(model: str) -> str:
    """What a model is called: a path by its last part, so that no folder of this machine is told to clients."""
    path = Path(model).expanduser()
    return path.name if path.is_absolute() or path.exists() or model.startswith((".", "~")) else model


def _no_model(asked: str, there: str) -> ApiError:
    message = f"there is no model {asked[:100]!r} here; there is {there!r}"
    return ApiError(404, message, param="model", code="model_not_found")


async def _on_error(request: Request, error: Exception) -> Response:
    told = from_exception(error)
    return JsonResponse(told.body(), told.status, told.headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What the router refuses: no such path, or not by this method."""
    assert isinstance(error, HTTPException)
    messages = {
        404: f"there is nothing at {request.url.path[:100]!r}",
        405: f"{request.url.path[:100]!r} does not take {request.method[:20]}",
    }
    kind = "invalid_request_error" if error.status_code < 500 else "server_error"
    code = {404: "not_found", 405: "wrong_method"}.get(error.status_code)
    told = ApiError(error.status_code, messages.get(error.status_code, str(error.detail)), kind=kind, code=code)
    return JsonResponse(told.body(), told.status, error.headers)
