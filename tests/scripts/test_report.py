"""report.sh: everything that a bug report needs, and no secret of the machine or its user."""

from __future__ import annotations

import importlib.util
import json
import re
import socket
import tarfile
from pathlib import Path

import pytest

from tests.scripts.boards import SCRIPTS, Stubs, make_board, run

# Planted in the environment, in files and in what commands print; none may be in the archive.
SECRETS = {
    "HF_TOKEN": "hf_AbCdEfGhIjKlMnOp",
    "MY_API_KEY": "correct-horse-battery",
    "DB_PASSWORD": "xyzzy1234",
    "AWS_SECRET_ACCESS_KEY": "/wJalrXUtnFEMI/K7MDENG",
    "USER": "mallory",
}
PLANTED = (
    "board-host-77",
    "1423524012345",
    "48:b0:2d:aa:bb:cc",
    "192.168.17.23",
    "fe80:0:0:0:4ab0:2dff:feaa:bbcc",
    "mallory@example.org",
    "ghp_0123456789abcdef",
    "AAAAB3NzaC1yc2EAAAADAQABAAABgQ",
    "MIIEowIBAAKCAQEA",
    "eyJhbGciOi.eyJzdWIi.SflKxwRJ",
    "letmein99",
    "0c9e4bd1-2f0a-4c07-9a44-2f0b6a1c7d11",
    "opensesame",
)
LEAKY = """
nvmap: out of memory for mallory on board-host-77, serial number: 1423524012345
nvgpu: link 48:b0:2d:aa:bb:cc at 192.168.17.23 and fe80:0:0:0:4ab0:2dff:feaa:bbcc
nvgpu: 0c9e4bd1-2f0a-4c07-9a44-2f0b6a1c7d11
oom: wget https://mallory:letmein99@example.org/x as mallory@example.org with ghp_0123456789abcdef
oom: Authorization: Bearer eyJhbGciOi.eyJzdWIi.SflKxwRJ and hf_AbCdEfGhIjKlMnOp correct-horse-battery xyzzy1234
oom: wifi psk=opensesame /wJalrXUtnFEMI/K7MDENG
oom: ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABgQ mallory@board-host-77 in /home/mallory/models
nvgpu: -----BEGIN RSA PRIVATE KEY----- MIIEowIBAAKCAQEA
"""


@pytest.fixture(autouse=True)
def _python(stubs: Stubs) -> None:
    stubs.real_python()


@pytest.fixture
def board(root: Path, stubs: Stubs) -> Path:
    make_board(root, "nano-8")
    (root / "etc/hostname").write_text("board-host-77\n")
    (root / "leaky").write_text(LEAKY)
    stubs.add("dmesg", f'echo "usb: a private matter"; cat "{root}/leaky"')
    doctor = json.dumps({"checks": [{"name": "cache", "detail": "/home/mallory/.cache", "tokens_per_second": 12.5}]})
    stubs.add("edgespec", f"""case "$1" in doctor) echo '{doctor}' ;; *) cat "{root}/leaky" ;; esac""")
    for name in ("nvpmodel", "tegrastats"):
        stubs.add(name, f'cat "{root}/leaky"')
    return root


def collect(board: Path, stubs: Stubs, tmp_path: Path, **env: str) -> dict[str, str]:
    out = tmp_path / "report.tar.gz"
    done = run("report.sh", "--root", str(board), "--out", str(out), stubs=stubs, env={**SECRETS, **env})
    assert done.returncode == 0, done.stderr
    with tarfile.open(out) as archive:
        members = archive.getmembers()
        assert all(member.uid == member.gid == 0 and member.uname in ("", "root") for member in members)
        files = {m.name.rpartition("/")[2]: archive.extractfile(m) for m in members if m.isfile()}
        return {name: stream.read().decode() for name, stream in files.items() if stream is not None}


def test_no_secret_is_in_the_archive(board: Path, stubs: Stubs, tmp_path: Path) -> None:
    files = collect(board, stubs, tmp_path)
    for name, text in files.items():
        for secret in (*SECRETS.values(), *PLANTED):
            assert secret not in text, f"{secret} in {name}"
        assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text), name
        assert str(tmp_path / "user-home") not in text
    assert "private matter" not in files["kernel.txt"]


def test_what_is_needed_is_still_there(board: Path, stubs: Stubs, tmp_path: Path) -> None:
    files = collect(board, stubs, tmp_path)
    assert json.loads(files["board.json"])["l4t"] == "36.4.7"
    assert json.loads(files["doctor.json"])["checks"][0]["tokens_per_second"] == 12.5
    assert "nvmap: out of memory" in files["kernel.txt"]
    assert "MemAvailable" in files["meminfo.txt"]
    assert {"swaps.txt", "buddyinfo.txt", "packages.txt", "power_modes.txt", "disks.txt"} <= set(files)


def test_missing_commands_are_noted(root: Path, stubs: Stubs, tmp_path: Path) -> None:
    for name in ("dmesg", "edgespec"):
        stubs.add(name, "echo not permitted >&2; exit 1")
    files = collect(make_board(root, "x86"), stubs, tmp_path)
    assert files["nvpmodel.txt"] == "nvpmodel is not here\n"
    assert "ended with 1" in files["doctor.json"]
    assert "cannot be read" in files["nv_tegra_release.txt"]
    assert "not permitted" in files["kernel.txt"]


def test_ordinary_words_survive() -> None:
    spec = importlib.util.spec_from_file_location("redact", SCRIPTS / "redact.py")
    assert spec is not None
    assert spec.loader is not None
    redact = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(redact)
    text = '{"tokens_per_second": 12.5, "tokenizer": "abc", "torch": "2.9.1"} keyboard 127.0.0.1 12:30:55 nano'
    assert redact.redact(text, [("na", "<host>"), ("root", "<user>"), ("", "<x>")]) == text
    assert redact.redact("na-1 na", [("na", "<host>")]) == "<host>-1 <host>"
    assert redact.redact(r"a\1b", [("a\\1b", r"<\g<0>>")]) == r"<\g<0>>"
