"""A headless Chromium, driven over its debugging pipe: JSON messages that end with a zero byte, on descriptors 3 and 4.

Needs nothing but the browser itself.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAIT = 30.0  # seconds; only there to end a test that is broken
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip


def found() -> str | None:
    """Where a Chromium is; None if this machine has none."""
    return next((path for path in map(shutil.which, _NAMES) if path is not None), None)


class Browser:
    """One page of width `width` in CSS pixels. complaints: what the page's console said of errors and warnings, and
    exceptions that nobody caught. profile: an empty folder for what the browser keeps."""

    def __init__(self, profile: Path, width: int = 1200, height: int = 800) -> None:
        path = found()
        assert path is not None
        ours, theirs = os.pipe(), os.pipe()  # (read, write) for what it says, and for what it is told
        self._from, self._to = ours[0], theirs[1]

        said, told = ours[1], theirs[0]
        place = 'told=$1 said=$2; shift 2; exec "$@" 3<"/dev/fd/$told" 4>"/dev/fd/$said"'
        flags = [*_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["sh", "-c", place, "sh", str(told), str(said), path, *flags],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(told, said),
        )  # fmt: skip
        os.close(ours[1])
        os.close(theirs[0])
        self._held = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(WAIT)
        os.close(self._from)
        os.close(self._to)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol, and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == self._number:
                assert "error" not in said, said
                result: dict[str, Any] = said["result"]
                return result
            self._note(said)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + WAIT
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._from], [], [], max(end - time.monotonic(), 0))
            assert ready, "the browser says nothing"
            data = os.read(self._from, 1 << 16)
            assert data, "the browser has ended"
            self._held += data
        message, _, self._held = self._held.partition(b"\0")
        said: dict[str, Any] = json.loads(message)
        return said

    def _note(self, said: dict[str, Any]) -> None:
        method, params = said.get("method"), said.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([each.get("value") or each.get("description") for each in params["args"]]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])

    def open(self, url: str) -> None:
        """Load a page, its script included."""
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is waited for."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def until(self, script: str, done: Callable[[Any], bool] = bool) -> Any:
        """Evaluate it until it is so; the value."""
        end = time.monotonic() + WAIT
        while not done(value := self.run(script)):
            assert time.monotonic() < end, f"{script} stays {value!r}"
            time.sleep(0.05)
        return value
