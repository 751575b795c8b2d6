"""Takes out of text what a bug report must not say. Reads stdin, writes stdout. Standard library only.

Two ways at once: the secrets of this machine by their value (hostname, user, serial numbers, whatever variables with
telling names hold), and everything that has the form of a secret, wherever it comes from. Too much taken out is a
nuisance, too little is a leak: in doubt a word goes.
"""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

_TELLING = re.compile(r"TOKEN|KEY|SECRET|PASS|PWD$|AUTH|CREDENTIAL|COOKIE|SESSION|WEBHOOK|DSN", re.IGNORECASE)
_SERIALS = (
    "proc/device-tree/serial-number",
    "sys/class/dmi/id/product_serial",
    "sys/class/dmi/id/product_uuid",
    "etc/machine-id",
    "var/lib/dbus/machine-id",
    "etc/hostname",
)
_COMMON = {"root", "user", "localhost", "nvidia", "jetson", "ubuntu", "true", "false", "none"}
_SHORTEST_VALUE = 6  # of a variable; shorter ones are switches such as "tty"
_SHORTEST_NAME = 2
_SECRET_WORD = r"(?:token(?!s|iz|_id)|secret|passw(?:or)?d|passphrase|api_?key|psk)"
_PATTERNS = (
    (re.compile(r"-----BEGIN [A-Z ]*-----.*?(-----END [A-Z ]*-----|\Z)", re.DOTALL), "<key>"),
    (re.compile(r"\b(ssh-(rsa|ed25519|dss)|ecdsa-sha2-\S+) +\S+( +\S+@\S+)?"), "<ssh key>"),
    (re.compile(r"\b(hf|ghp|gho|ghs|ghu|github_pat|glpat|xox[a-z]|sk|pk|nvapi)[_-][A-Za-z0-9_-]{6,}"), "<token>"),
    (re.compile(r"\bAKIA[0-9A-Z]{12,}\b"), "<token>"),
    (re.compile(r"\beyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+"), "<token>"),
    (re.compile(r"(?i)\b(bearer|basic) +[A-Za-z0-9._~+/=-]{6,}"), r"\1 <token>"),
    (re.compile(rf"(?i)([\w.-]*{_SECRET_WORD}[\w.-]*[\"']? *[:=] *[\"']?)[^\s\"',}}]+"), r"\1<secret>"),
    (re.compile(r"(?i)(serial(?:[ _-]?(?:number|no))?[\w.-]*[\"']? *[:=] *[\"']?)[^\s\"',}]+"), r"\1<serial>"),
    (re.compile(r"([a-z][a-z0-9+.-]*://)[^\s/@]+@"), r"\1<user>@"),
    (re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.-]+\b"), "<mail>"),
    (re.compile(r"\b[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){5}\b"), "<mac>"),
    (re.compile(r"\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"), "<uuid>"),
    (re.compile(r"\b(?!127\.0\.0\.1\b)\d{1,3}(\.\d{1,3}){3}\b(?!\.\d)"), "<address>"),
    (re.compile(r"(?<![:\w])(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{1,4}(?![:\w])"), "<address>"),
    (re.compile(r"/(home|Users|media|mnt/home)/[^/\s\"':,]+"), r"/\1/<user>"),
)  # fmt: skip


def known_secrets(root: Path = Path("/")) -> Iterator[tuple[str, str]]:
    """What this machine keeps that identifies it or opens something, each with the word to put in its place."""
    for name, value in os.environ.items():
        if _TELLING.search(name) and len(value) >= _SHORTEST_VALUE and not os.path.exists(value):  # PWD is a path
            yield value, f"<{name}>"
    yield socket.gethostname(), "<host>"
    for variable in ("HOSTNAME", "USER", "LOGNAME", "SUDO_USER"):
        yield os.environ.get(variable, ""), "<host>" if variable == "HOSTNAME" else "<user>"
    try:
        yield getpass.getuser(), "<user>"
    except (KeyError, OSError):  # an id without a name
        pass
    yield os.environ.get("HOME", ""), "<home>"
    for place in _SERIALS:
        try:
            text = (root / place).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        yield text.strip("\0 \n"), "<serial>" if "hostname" not in place else "<host>"


def redact(text: str, secrets: list[tuple[str, str]]) -> str:
    """Long secrets first: a short one may be a part of a long one. Short ones only as whole words."""
    for value, word in sorted(secrets, key=lambda pair: -len(pair[0])):
        if len(value) >= _SHORTEST_NAME and value.lower() not in _COMMON:
            exact = re.escape(value)
            whole = exact if len(value) >= _SHORTEST_VALUE else rf"(?<!\w){exact}(?!\w)"
            text = re.sub(whole, lambda _, word=word: word, text, flags=re.IGNORECASE)
    for pattern, word in _PATTERNS:
        text = pattern.sub(word, text)
    return text


def main() -> None:
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path("/")
    text = sys.stdin.buffer.read().decode("utf-8", "replace")
    sys.stdout.write(redact(text, list(known_secrets(root))))


if __name__ == "__main__":
    main()
