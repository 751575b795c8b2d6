"""One connection: uvicorn's HTTP/1.1 protocol, with limits for clients that are silent, do not read, or are many."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgespec.server.errors import unavailable
from edgespec.server.settings import SPARE_CONNECTIONS, Limits
from edgespec.server.sse import dumps

_MOST_AHEAD = 64 << 10  # bytes of further requests that may come while one is answered


class Connection(H11Protocol):
    """Silent: no whole request head for `header_seconds`. Stalled: nothing more can be written for `stall_seconds`.
    Trailing: the answer is out (a key that is wrong, say), but for `body_seconds` the body has not come to its end.

    All are cut off at once: closing in order would wait for the client once more. Connections too many are for probes
    (the guard refuses everything else), and when those are taken too, a 503.
    """

    limits = Limits()  # of a subclass, see `limited`

    def __init__(self, config: Config, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._silence: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._trail: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        more = len(self.connections) - self.limits.connections
        if more > SPARE_CONNECTIONS:
            self._refuse()
            return
        if more > 0:
            self.app_state = {**self.app_state, "spare": True}
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        _stop(self._silence)
        _stop(self._stall)
        _stop(self._trail)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        their_state = self.conn.their_state
        if their_state is not h11.SEND_BODY or not self.cycle.response_complete:
            _stop(self._trail)
            self._trail = None
        if their_state is h11.DONE:
            self._read_ahead()
        if their_state is not h11.IDLE:
            _stop(self._silence)
            self._silence = None
        elif self._silence is None and (self.cycle is None or self.cycle.response_complete):
            self._await_head()  # the beginning of the next request

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall is None:
            self._stall = self.loop.call_later(self.limits.stall_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        _stop(self._stall)
        self._stall = None
        super().resume_writing()
        self._watch_end()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # uvicorn's own timer ends with the next byte, whatever it is of.
        if self.cycle.response_complete and self.conn.their_state is h11.SEND_BODY and self._trail is None:
            self._trail = self.loop.call_later(self.limits.body_seconds, self.transport.abort)
        self._watch_end()

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP after an answer that is out already can have no other one."""
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:
            self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_end()

    def end_after_answer(self) -> None:
        """No further request comes this way."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    def break_off(self) -> None:
        """An answer that has begun has no end."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.abort()

    def _read_ahead(self) -> None:
        """A further request waits until this one is answered. uvicorn then stops reading, and would not see the client
        leave; so it goes on here, up to a bound."""
        if len(self.conn.trailing_data[0]) > _MOST_AHEAD:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.flow.resume_reading()

    def _watch_end(self) -> None:
        """A connection that is closing still has what it wrote last; a client that does not take it holds it open."""
        if self._stall is None and self.transport.is_closing():
            self._stall = self.loop.call_later(self.limits.stall_seconds, self.transport.abort)

    def _await_head(self) -> None:
        self._silence = self.loop.call_later(self.limits.header_seconds, self.transport.abort)

    def _refuse(self) -> None:
        error = unavailable(f"there are {self.limits.connections} connections already, which is the most")
        body = dumps(error.body())
        head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in error.headers.items())
        self.transport.write(head.encode() + b"\r\n" + body)
        self.transport.close()
        self._watch_end()


def limited(limits: Limits) -> type[Connection]:
    """The protocol class with these limits: uvicorn makes the objects itself."""
    return type("LimitedConnection", (Connection,), {"limits": limits})


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
