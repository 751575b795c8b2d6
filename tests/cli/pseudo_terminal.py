"""A process on a pseudo terminal: type, wait for text, look at how it ends."""

from __future__ import annotations

import fcntl
import os
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Mapping

TIMEOUT = 120.0  # generous: a busy machine may stop a process for half a minute
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\x1b\][^\x07]*\x07")


class PseudoTerminal:
    """`argv` with its stdin, stdout and stderr on a new terminal of its own (so that Ctrl-C reaches it as a signal)."""

    def __init__(self, argv: list[str], env: Mapping[str, str]) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, b"\x28\x00\x78\x00\x00\x00\x00\x00")  # 40 lines of 120 columns
        settings = termios.tcgetattr(slave)
        settings[3] |= termios.NOFLSH  # else Ctrl-C throws away output that nobody has read yet
        termios.tcsetattr(slave, termios.TCSANOW, settings)
        self.process = subprocess.Popen(
            argv,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **env},
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.raw = b""
        self._searched = 0

    def __enter__(self) -> PseudoTerminal:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._master)

    @property
    def text(self) -> str:
        """All output so far without escape sequences."""
        return _ESCAPES.sub(b"", self.raw).decode("utf-8", "replace")

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def wait_for(self, text: str) -> None:
        """Wait until `text` appears after what earlier waits have seen."""
        deadline = time.monotonic() + TIMEOUT
        while text not in self.text[self._searched :]:
            assert time.monotonic() < deadline, (
                f"{text!r} never came; the terminal shows {self.text[self._searched :]!r}"
            )
            assert self._read() or text in self.text[self._searched :], (
                f"the process ended without {text!r}: {self.text!r}"
            )
        self._searched += self.text[self._searched :].index(text) + len(text)

    def exit_code(self) -> int:
        """Read to the end and wait for the process."""
        deadline = time.monotonic() + TIMEOUT
        while self._read():
            assert time.monotonic() < deadline, f"the process does not end; the terminal shows {self.text!r}"
        return self.process.wait(TIMEOUT)

    def cpu_seconds(self) -> float:
        with open(f"/proc/{self.process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _read(self) -> bool:
        """Take in what there is, waiting a little; False once the process has closed the terminal."""
        if not select.select([self._master], [], [], 0.2)[0]:
            return self.process.poll() is None
        try:
            data = os.read(self._master, 65536)
        except OSError:
            return False
        self.raw += data
        return bool(data)


def _take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]
