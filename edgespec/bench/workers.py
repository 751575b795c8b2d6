"""Contenders run in processes of their own; this is the parent's side of the pipes (serve.py is the other one).

One process each keeps peak memory apart and thread pools from meeting; requests are answered one at a time, so only one
contender computes at any moment.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

import psutil

from edgespec.errors import EdgespecError

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class WorkerFailure(EdgespecError):
    """A worker's request failed. `alive` says whether the worker can take another request."""

    def __init__(self, message: str, *, alive: bool) -> None:
        super().__init__(message)
        self.alive = alive


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of a worker: as here, with every library held to `threads` and no network for peers."""
    environment = dict(os.environ)
    environment.update({name: str(threads) for name in THREAD_VARIABLES})
    environment.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", PYTHONUNBUFFERED="1")
    return environment


class Worker:
    """One contender's process. `request` sends one line of JSON and waits for one back."""

    def __init__(
        self, name: str, *, threads: int, environment: Mapping[str, str] | None = None, command: Sequence[str] = ()
    ) -> None:
        self.name = name
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        # A session of its own: Ctrl-C reaches the parent alone, which then ends the workers in order.
        self._process = subprocess.Popen(
            list(command) or [sys.executable, "-m", "edgespec.bench.serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=dict(environment) if environment is not None else worker_environment(threads),
            start_new_session=True,
        )
        self._replies: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, name=f"bench-{name}", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put(None)

    def request(self, op: str, *, timeout: float = 900.0, **fields: Any) -> dict[str, Any]:
        """Send one request and return its reply. Raises WorkerFailure on an error, a crash, or after `timeout` s."""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")
            self._process.stdin.flush()
            line = self._replies.get(timeout=timeout)
        except queue.Empty:
            self.kill()
            raise WorkerFailure(f"no answer to {op!r} within {timeout:.0f} s", alive=False) from None
        except OSError:
            line = None
        if line is None:
            raise WorkerFailure(self._obituary(), alive=False)
        try:
            reply = json.loads(line)
        except ValueError:
            self.kill()
            raise WorkerFailure(
                f"the worker answered with something that is not JSON: {line[:80]!r}", alive=False
            ) from None
        if "error" in reply:
            raise WorkerFailure(str(reply["error"]), alive=True)
        return dict(reply)

    def cpu_seconds(self) -> float:
        """Processor seconds that the process has used so far (0 once it is gone)."""
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            return 0.0
        return float(times.user + times.system)

    def resident_bytes(self) -> int:
        """Resident memory of the process (0 once it is gone)."""
        try:
            return int(psutil.Process(self._process.pid).memory_info().rss)
        except psutil.Error:
            return 0

    def _obituary(self) -> str:
        try:
            code: int | None = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()
            code = None
        last = self._last_error_line()
        how = f"ended with code {code}"
        if code is not None and code < 0:
            how = f"was ended by signal {-code} ({signal.Signals(-code).name})"
        return f"the worker {how}" + (f": {last}" if last else "")

    def _last_error_line(self) -> str:
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4000))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else ""

    def kill(self) -> None:
        """End the process now."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Close the pipe, which tells the worker to end; end it by force if it does not within a few seconds."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._process.wait(timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            self.kill()
        self._errors.close()
