"""Blocks of a file in memory, mapped one after the other into the address space of a sequence (Linux).

Attention wants a head's positions to lie side by side; a pool wants to hand out blocks. Both hold where the addresses
are contiguous and the memory is not: a `Region` reserves addresses, over which blocks of a `BlockFile` are mapped.

File and region are cut into *planes*: for each layer, keys or values, and head. In the file a plane holds its piece of
every block, one after the other, so that blocks with consecutive numbers are one mapping a plane.

All calls keep the interpreter lock: they are short, and giving it up hundreds of times beside a busy thread is not.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from edgespec.models.base import FloatArray

PAGE = mmap.PAGESIZE
_DEFAULT_MAPPINGS = 65530  # the kernel's limit for a process where it does not tell another
_OTHERS = 5000  # mappings that the rest of the process may have
_FIXED, _POPULATE, _NORESERVE = 0x10, 0x8000, 0x4000  # of mmap
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # of fallocate
_NOEXEC_SEAL = 8  # of memfd_create
_FAILED = ctypes.c_void_p(-1).value


def available() -> bool:
    """Whether this system has what is needed here."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and ctypes.sizeof(ctypes.c_void_p) == 8


def most_mappings() -> int:
    """How many mappings of this process may be blocks."""
    try:
        with open("/proc/sys/vm/max_map_count") as file:
            limit = int(file.read())
    except (OSError, ValueError):
        limit = _DEFAULT_MAPPINGS
    return max(limit - _OTHERS, 1000)


class BlockFile:
    """Memory for up to `most` blocks of `planes` pieces of `piece` bytes (whole pages) each.

    A block has memory from `ensure` to `punch`. Raises OSError if the system gives no such file.
    """

    def __init__(self, planes: int, piece: int, most: int) -> None:
        if piece % PAGE:
            raise ValueError(f"a piece of {piece} bytes is not a whole number of pages of {PAGE}")
        self.planes, self.piece, self.most = planes, piece, most
        self._held: set[int] = set()
        self.fd = _memory_file()
        try:
            os.ftruncate(self.fd, planes * most * piece)  # takes no memory yet
        except BaseException:
            os.close(self.fd)
            raise

    @property
    def nbytes(self) -> int:
        """Bytes of memory that are taken now."""
        return len(self._held) * self.planes * self.piece

    def offset(self, plane: int, block: int) -> int:
        return (plane * self.most + block) * self.piece

    def ensure(self, blocks: Sequence[int]) -> None:
        """Give these blocks memory, zeros where they had none. Raises OSError and gives none if there is not enough.

        Without this, memory that is missing would be noticed when it is written: as SIGBUS.
        """
        for first, count in runs([block for block in blocks if block not in self._held]):
            try:
                for plane in range(self.planes):
                    _fallocate(self.fd, 0, self.offset(plane, first), count * self.piece)
            except OSError:
                self._punch(first, count)
                raise
            self._held.update(range(first, first + count))

    def punch(self, blocks: Sequence[int]) -> None:
        """Give the memory of these blocks back. Nobody may have them mapped. Raises OSError."""
        for first, count in runs([block for block in blocks if block in self._held]):
            self._punch(first, count)
            self._held.difference_update(range(first, first + count))

    def _punch(self, first: int, count: int) -> None:
        for plane in range(self.planes):
            _fallocate(self.fd, _PUNCH_HOLE | _KEEP_SIZE, self.offset(plane, first), count * self.piece)

    def copy(self, old: int, new: int, nbytes: int | None = None) -> None:
        """Block `new`, which has memory, becomes what `old` is: the first `nbytes` of each piece, None = all."""
        size = self.piece if nbytes is None else nbytes
        buffer = ctypes.create_string_buffer(size)
        for plane in range(self.planes):
            _whole(_libc.pread(self.fd, buffer, size, self.offset(plane, old)), size)
            _whole(_libc.pwrite(self.fd, buffer, size, self.offset(plane, new)), size)

    def close(self) -> None:
        """The memory goes when the last mapping does. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._held.clear()


class Region:
    """Addresses for `planes` planes of `stride` bytes (whole pages); at first pages of their own, taken when written.

    The addresses live as long as anything that points into them: an array from `floats`, or this object. Raises OSError
    if there is no room for them.
    """

    def __init__(self, planes: int, stride: int) -> None:
        self.planes, self.stride = planes, stride
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._memory = mmap.mmap(-1, planes * stride, flags=flags)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def floats(self) -> FloatArray:
        """float32 [planes, stride / 4]: everything."""
        return np.frombuffer(self._memory, np.float32).reshape(self.planes, -1)

    def map(self, file: BlockFile, at: int, blocks: Sequence[int]) -> None:
        """Map `blocks` from the place of the table's block number `at` on, in every plane. They have memory.

        Raises OSError; then these places may not be touched before `blank` has worked on them.
        """
        for first, count in runs(blocks):
            size = count * file.piece
            for plane in range(self.planes):
                address = self._address + plane * self.stride + at * file.piece
                _map(address, size, mmap.MAP_SHARED | _FIXED | _POPULATE, file.fd, file.offset(plane, first))
            at += count

    def blank(self, at: int, nbytes: int) -> None:
        """From byte `at` of every plane on, `nbytes` are pages of this region's own again. Raises OSError."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED | _NORESERVE
        if at == 0 and nbytes == self.stride:
            _map(self._address, self.planes * self.stride, flags, -1, 0)
            return
        for plane in range(self.planes):
            _map(self._address + plane * self.stride + at, nbytes, flags, -1, 0)


def _memory_file() -> int:
    try:
        return os.memfd_create("edgespec-kv", os.MFD_CLOEXEC | _NOEXEC_SEAL)  # without it hardened systems refuse
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.memfd_create("edgespec-kv", os.MFD_CLOEXEC)  # a kernel before 6.3


def runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of the runs of consecutive numbers, in the order given."""
    found: list[tuple[int, int]] = []
    for block in blocks:
        if found and block == found[-1][0] + found[-1][1]:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((block, 1))
    return found


def _map(address: int, nbytes: int, flags: int, fd: int, offset: int) -> None:
    got = _libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if got == _FAILED:
        raise _error("mmap")


def _fallocate(fd: int, mode: int, offset: int, nbytes: int) -> None:
    while _libc.fallocate(fd, mode, offset, nbytes):
        if ctypes.get_errno() != errno.EINTR:
            raise _error("fallocate")


def _whole(done: int, size: int) -> None:
    if done < 0:
        raise _error("copying a block")
    if done != size:
        raise OSError(errno.EIO, f"copying a block: {done} of {size} bytes")


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


class _Libc:
    """The C library's own functions, looked up when first used."""

    def __init__(self) -> None:
        self._library: ctypes.PyDLL | None = None

    def __getattr__(self, name: str) -> Any:
        word, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
        forms: dict[str, tuple[type, list[type]]] = {
            "mmap": (word, [word, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, number]),
            "fallocate": (ctypes.c_int, [ctypes.c_int, ctypes.c_int, number, number]),
            "pread": (ctypes.c_ssize_t, [ctypes.c_int, word, size, number]),
            "pwrite": (ctypes.c_ssize_t, [ctypes.c_int, word, size, number]),
        }
        if self._library is None:
            self._library = ctypes.PyDLL(None, use_errno=True)  # PyDLL: keeps the interpreter lock
        function = self._library[name]
        function.restype, function.argtypes = forms[name]
        setattr(self, name, function)
        return function


_libc = _Libc()
