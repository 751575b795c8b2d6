"""Conversions that are killed at every step that changes a file, each gone on with by another process.

`python -m tests.support.convert_killed SOURCE FOLDER BITS` prints how many steps there are. The process has no threads
of its own: each conversion runs in a fork of it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.packed import converted

KILLED = 77
SHARDS = 60_000


def killed_at(step: int, counter: Path, source: Path, out: Path, bits: int) -> None:
    """Convert, and die within step number `step`: half of what would be written is. `counter` grows by one each."""
    pwrite, write, rename, replace, unlink = os.pwrite, os.write, os.rename, os.replace, os.unlink
    calls = os.open(counter, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def passed(half: Callable[[], Any]) -> None:
        write(calls, b".")
        if os.fstat(calls).st_size == step + 1:
            half()
            os._exit(KILLED)

    def counted_pwrite(fd: int, data: Any, offset: int) -> int:
        passed(lambda: pwrite(fd, data[: len(data) // 2], offset))
        return pwrite(fd, data, offset)

    def counted_write(fd: int, data: Any) -> int:
        passed(lambda: write(fd, data[: len(data) // 2]))
        return write(fd, data)

    def counted(name: str, change: Callable[..., None]) -> None:
        def call(*arguments: Any, **options: Any) -> None:
            passed(lambda: None)
            change(*arguments, **options)

        setattr(os, name, call)

    os.pwrite, os.write = counted_pwrite, counted_write  # type: ignore[assignment]
    for name, change in (("rename", rename), ("replace", replace), ("unlink", unlink)):
        counted(name, change)
    converted(source, out, bits, shard_bytes=SHARDS)


def in_a_fork(work: Callable[[], object]) -> int:
    """The exit status of a child that does `work`."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def main(source: Path, folder: Path, bits: int) -> None:
    def convert(out: Path) -> int:
        return in_a_fork(lambda: converted(source, out, bits, shard_bytes=SHARDS))

    assert convert(folder / "whole") == 0
    expected, step, out, counter = contents(folder / "whole"), 0, folder / "out", folder / "counter"
    while True:
        counter.unlink(missing_ok=True)

        status = in_a_fork(partial(killed_at, step, counter, source, out, bits))
        if status == 0:
            break
        assert status == KILLED, (step, status)
        if not out.exists():
            assert convert(out) == 0, step
        found = contents(out)
        found.pop(".journal", None)  # killed after the folder was complete, before this was gone
        assert found == expected, step
        assert sorted(p.name for p in folder.iterdir()) == ["counter", "out", "whole"], step
        shutil.rmtree(out)
        step += 1
    print(step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
