"""What `edgespec serve` is told. Checked here, before a model is loaded."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from edgespec.errors import ConfigError

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
DEFAULT_PORT = 8000
MIB = 1 << 20
SPARE_CONNECTIONS = 16  # beyond the limit, for probes alone: a server that is full is not one that is dead


@dataclass(frozen=True)
class Limits:
    """How much one client may ask for. ConfigError names the limit that cannot work.

    body_bytes: of one request. prompt_tokens: None = what the context takes. request_seconds: from the moment a request
    has come to its last token. connections: open at once; more than requests may run and wait, else a full queue could
    never say so. header_seconds: until a request's head has come. body_seconds: until its body has. idle_seconds: that
    a connection is kept after an answer. stall_seconds: a client that takes nothing of what waits for it for so long is
    cut off. bodies_bytes: of all bodies that are read, checked or encoded at once (one always fits). body_parts: commas
    and brackets of one, None = 200,000 or, if that is more, two for each token of the context.
    """

    body_bytes: int = 8 * MIB
    prompt_tokens: int | None = None
    request_seconds: float = 600.0
    connections: int = 512
    header_seconds: float = 15.0
    body_seconds: float = 60.0
    idle_seconds: float = 75.0
    stall_seconds: float = 30.0
    bodies_bytes: int = 64 * MIB
    body_parts: int | None = None

    def __post_init__(self) -> None:
        for name in ("body_bytes", "prompt_tokens", "connections", "bodies_bytes", "body_parts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"the limit {name} is {value}: give 1 or more")
        for name in ("request_seconds", "header_seconds", "body_seconds", "idle_seconds", "stall_seconds"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigError(f"the limit {name} is {value}: give seconds above 0")


@dataclass(frozen=True)
class ServerSettings:
    """Where the server listens, for whom, and how much each may ask for.

    host: an address or a name of this machine. api_key: None = none is asked for. allow_origins: of web pages that may
    ask, such as "https://example.org"; "*" = all (with a key only). allow_hosts: names by which the server may be
    called besides its own, against DNS rebinding. insecure: listen on other than loopback addresses without a key.
    grace_seconds: that running answers have when the server is told to end. defaults: sampling parameters of requests
    that do not say otherwise, by the names of SamplingParams. model_name: of the model for clients, None = its own.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_key: str | None = field(default=None, repr=False)
    allow_origins: tuple[str, ...] = ()
    allow_hosts: tuple[str, ...] = ()
    insecure: bool = False
    grace_seconds: float = 30.0
    limits: Limits = field(default_factory=Limits)
    defaults: dict[str, Any] = field(default_factory=dict)
    model_name: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port {self.port} is none: give 0 (any free one) to 65535")
        if not 0 <= self.grace_seconds < float("inf"):
            raise ConfigError(f"the grace of {self.grace_seconds} seconds cannot work: give 0 or more")
        if self.api_key is not None and (
            not self.api_key.isascii() or not self.api_key.isprintable() or not self.api_key or " " in self.api_key
        ):
            raise ConfigError("the API key must be printable ASCII without spaces, and not empty")
        if self.api_key is None and not self.loopback and not self.insecure:
            raise ConfigError(
                f"listening on {self.host} lets other machines use this engine: give --api-key (or EDGESPEC_API_KEY), "
                "or --insecure if that is what you want"
            )
        object.__setattr__(self, "allow_origins", tuple(map(_origin, self.allow_origins)))
        object.__setattr__(self, "allow_hosts", tuple(map(host_name, self.allow_hosts)))
        if "*" in self.allow_origins and self.api_key is None:
            raise ConfigError("--allow-origin '*' lets every web page use this engine: give --api-key with it")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)

    def knows_host(self, name: str) -> bool:
        """Whether a request may call the server `name` (no port, lower case).

        A page of another origin reaches us by rebinding its own *name* to our address; so names must be known, while an
        address that is no name cannot be rebound.
        """
        name = name.strip("[]")
        if name in LOOPBACK_NAMES or name in self.allow_hosts or is_loopback(name):
            return True
        if self.loopback:
            return False
        own = socket.gethostname().lower()
        return name in {self.host.lower(), own, f"{own}.local"} or _is_address(name)


def host_name(host: str) -> str:
    """The name in a Host header, lower case: without the port, and without the dot that may end it."""
    if host.startswith("["):
        return host.partition("]")[0].lower() + "]"
    return host.partition(":")[0].lower().rstrip(".")


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine by an address that no other machine reaches."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _origin(text: str) -> str:
    """As browsers write it: scheme://host[:port], lower case."""
    if text in ("*", "null"):
        return text
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.path not in ("", "/") or parts.query:
        raise ConfigError(f"--allow-origin {text!r} is no origin: give one such as https://example.org:8443")
    return f"{parts.scheme}://{parts.netloc}".lower()
