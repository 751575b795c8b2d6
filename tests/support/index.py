"""A package index on this machine that can be told to misbehave, and wheels to put on it."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


def make_wheel(project: str, version: str, members: dict[str, bytes]) -> bytes:
    """A wheel that pip accepts, with `members` stored in it."""
    name = project.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    texts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in [*members, *texts, f"{info}/RECORD"])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        for path, data in {**members, **texts, f"{info}/RECORD": record.encode()}.items():
            bundle.writestr(zipfile.ZipInfo(path), data)
    return buffer.getvalue()


@dataclass
class Index:
    """The files of one project, by name. `with index: ...` serves them on a free port of the loopback address.

    cut_after: bytes of a file's reply after which the connection is closed, one entry a request, then no more cuts.
    login: "user:password" that every request must carry. ranges: whether byte ranges are honoured.
    """

    project: str
    files: dict[str, bytes]
    html: bool = False
    ranges: bool = True
    login: str | None = None
    status: int = 200
    cut_after: list[int] = field(default_factory=list)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    sent: int = 0

    def __enter__(self) -> Index:
        handler = type("Handler", (_Handler,), {"index": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        login = f"{self.login}@" if self.login else ""
        return f"http://{login}127.0.0.1:{self._server.server_address[1]}/simple"

    def file_requests(self) -> list[str | None]:
        """The Range header of each request for a file."""
        return [span for path, span in self.requests if path.startswith("/files/")]


class _Handler(BaseHTTPRequestHandler):
    index: Index

    def do_GET(self) -> None:
        index = self.index
        index.requests.append((self.path, self.headers.get("Range")))
        if index.login is not None and not self._has_login(index.login):
            self._reply(401, b"", {})
        elif self.path == f"/simple/{index.project}/":
            self._page()
        elif self.path.startswith("/files/") and index.status != 200:
            self._reply(index.status, b"", {})
        elif self.path.removeprefix("/files/") in index.files:
            self._file(index.files[self.path.removeprefix("/files/")])
        else:
            self._reply(404, b"", {})

    def _has_login(self, login: str) -> bool:
        import base64

        return self.headers.get("Authorization") == "Basic " + base64.b64encode(login.encode()).decode()

    def _page(self) -> None:
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in self.index.files.items()}
        if self.index.html:
            anchors = "".join(f'<a href="../../files/{name}#sha256={sha}">{name}</a>' for name, sha in hashes.items())
            self._reply(
                200, f"<!DOCTYPE html><html><body>{anchors}</body></html>".encode(), {"Content-Type": "text/html"}
            )
            return
        files = [
            {"filename": name, "url": f"../../files/{name}", "hashes": {"sha256": sha}} for name, sha in hashes.items()
        ]
        page: dict[str, Any] = {"meta": {"api-version": "1.0"}, "name": self.index.project, "files": files}
        self._reply(200, json.dumps(page).encode(), {"Content-Type": "application/vnd.pypi.simple.v1+json"})

    def _file(self, data: bytes) -> None:
        span = self.headers.get("Range")
        headers = {"Content-Type": "application/octet-stream"}
        if span is None or not self.index.ranges:
            self._reply(200, data, headers, cut=True)
            return
        start = int(span.removeprefix("bytes=").rstrip("-"))
        if start >= len(data):
            self._reply(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._reply(206, data[start:], headers, cut=True)

    def _reply(self, status: int, body: bytes, headers: dict[str, str], *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if cut:
            limit = self.index.cut_after.pop(0) if self.index.cut_after else len(body)
            body = body[:limit]
            self.index.sent += len(body)
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass
