"""From a bound socket to the last answer: start, signals, grace, end.

The first SIGINT or SIGTERM drains: new requests, and those whose body is still coming, get a 503 while running answers
finish, for `grace_seconds` at most; then they are cancelled, and their clients get what there is. A second signal ends
the grace, and gives that a second. A third one ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import uvicorn

from edgespec.errors import ConfigError
from edgespec.server.answering import SHUTDOWN
from edgespec.server.app import App
from edgespec.server.connections import Connection, limited
from edgespec.server.settings import SPARE_CONNECTIONS, ServerSettings, is_loopback

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LAST_SECONDS = 5.0  # that cancelled answers have to reach their clients
_HURRIED_SECONDS = 1.0  # the same after a second signal, and what is cut off has to notice it
_SPARE_FILES = 64  # file descriptors that are not connections
_PORT_TRIES = 8  # to find a port that is free at all addresses of the host
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # such as ::1 where there is no IPv6


def listen(settings: ServerSettings) -> list[socket.socket]:
    """Bound sockets, one for each address that the host has: `localhost` is 127.0.0.1 and ::1 where both are there.

    Raises ConfigError if none can be had, or the port is taken at one of them; done before a model is loaded.
    """
    where = f"{settings.host}:{settings.port}"
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        addresses = list(dict.fromkeys((family, address) for family, _kind, _protocol, _name, address in found))
        if settings.loopback:  # nobody was asked for a key: whatever this machine takes the name for
            addresses = [(family, address) for family, address in addresses if is_loopback(str(address[0]))]
        for tries_left in reversed(range(_PORT_TRIES)):
            try:
                return _bound(addresses)
            except OSError as error:
                if settings.port or error.errno != errno.EADDRINUSE or not tries_left:
                    raise
    except OSError as error:
        port = isinstance(error, PermissionError) or error.errno == errno.EADDRINUSE
        advice = "choose another --port" if port else "give an address or a name of this machine as --host"
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}; {advice}") from error
    raise AssertionError("unreachable")


def _bound(addresses: Sequence[tuple[socket.AddressFamily, tuple[Any, ...]]]) -> list[socket.socket]:
    """A socket for each, all with the port of the first; an address that this machine does not have is left out.

    Raises OSError if there is none at all, or one is taken.
    """
    socks: list[socket.socket] = []
    missing = OSError(errno.EADDRNOTAVAIL, "the name has no address of this machine")
    with contextlib.ExitStack() as undo:
        for family, address in addresses:
            port = socks[0].getsockname()[1] if socks else address[1]
            try:
                sock = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6 and len(addresses) > 1:  # else it would have the IPv4 ones as well
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind((address[0], port, *address[2:]))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error
            else:
                sock.setblocking(False)
                socks.append(sock)
        if not socks:
            raise missing
        undo.pop_all()
    return socks


def url(sock: socket.socket, path: str = "/") -> str:
    """Where the page is, for a person on this machine."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{path}"


def room_for_connections(wanted: int) -> None:
    """Raise the limit on open files if that many connections need it. Raises ConfigError if that cannot be done."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + SPARE_CONNECTIONS + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(f"--max-connections {wanted} needs {needed} open files, but this process may have {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Server(uvicorn.Server):
    """uvicorn's server with our way to end. ready: called when it answers. log: told in a line what happens."""

    def __init__(
        self, app: App, log: Callable[[str], None] = lambda line: None, ready: Callable[[], None] = lambda: None
    ) -> None:
        limits = app.settings.limits
        config = uvicorn.Config(
            app.asgi,
            http=limited(limits),
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,  # request lines could hold what is nobody's business
            proxy_headers=False,  # headers of a client do not change who it is
            server_header=False,
            timeout_keep_alive=limits.idle_seconds,  # type: ignore[arg-type]
            timeout_graceful_shutdown=_LAST_SECONDS,  # type: ignore[arg-type]
        )
        super().__init__(config)
        self._app = app
        self._log = log
        self._ready = ready
        self._deadline, self._last = float("inf"), _LAST_SECONDS
        self._told = self._cancelled = False
        self.signals = 0
        app.connections = lambda: len(self.server_state.connections)

    def drain(self) -> None:
        """Take no more requests; end when the running ones are done, or the grace is over. Any thread."""
        if self._app.draining:
            return
        self._deadline = time.monotonic() + self._app.settings.grace_seconds
        self._app.draining = True
        for connection in self._connections():
            connection.end_after_answer()

    def hurry(self) -> None:
        """End the grace, and soon the server. Any thread."""
        self._deadline, self._last = time.monotonic(), _HURRIED_SECONDS

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self.signals == 1:
            self.drain()
        elif self.signals == 2 and not self.should_exit:
            self.hurry()
        else:
            self.should_exit = self.force_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        if self._app.draining and not self.should_exit:
            self._tick_drain()
        return await super().on_tick(counter)

    def _tick_drain(self) -> None:
        self._app.refuse_coming()
        running = self._app.busy
        over = time.monotonic() - self._deadline
        if not running:
            self.should_exit = True
        elif over > self._last:
            self.should_exit = self.force_exit = True
        elif over >= 0:
            if not self._cancelled:
                self._log(f"the grace is over: cancelling {running} answers")
            self._cancelled = True
            self._app.answering.cancel_all(SHUTDOWN)  # each time: one that was still encoded comes later
        elif not self._told:
            self._told = True
            self._log(
                f"answers that still run: {running}; waiting up to {-over:.0f} s, another signal (Ctrl-C) ends them now"
            )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.force_exit:
            await self._cut_off()
        await super().shutdown(sockets)
        await self._cut_off()

    async def _cut_off(self) -> None:
        """End what is under way still: answers that have begun break off, clients of the others are told why."""
        for connection in self._connections():
            connection.break_off()
        tasks = list(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_HURRIED_SECONDS)

    def _connections(self) -> list[Connection]:
        there = list(self.server_state.connections)  # at once: another thread may ask
        return [each for each in there if isinstance(each, Connection)]

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """As uvicorn's, but no signal is raised again afterwards: the engine is still to be closed in order."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(
    engine: Any,
    settings: ServerSettings,
    socks: list[socket.socket],
    log: Callable[[str], None],
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Answer until a signal says to end. Returns how many signals came: more than one is an end without grace."""
    engine.start_serving()
    app = App(engine, settings)
    server = Server(app, log, ready)
    try:
        server.run(socks)
    finally:
        app.close()
        for sock in socks:
            sock.close()
    return server.signals
