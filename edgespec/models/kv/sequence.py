"""What the caches of all engines do alike."""

from __future__ import annotations

from edgespec.models.checks import check_room, is_whole


class SequenceCache:
    """The part of a `KVCache` that only counts; where keys and values lie is the engine's.

    owner: the decoder whose forwards may use it. length: positions held; a forward raises it last of
    all. capacity: positions that fit.
    """

    def __init__(self, owner: object, capacity: int, position_bytes: int) -> None:
        """position_bytes: of the keys and values of one position."""
        self.owner = owner
        self.length = 0
        self.capacity = capacity
        self._position_bytes = position_bytes

    @property
    def nbytes(self) -> int:
        return self.length * self._position_bytes

    def crop(self, length: int) -> int:
        if not is_whole(length) or not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} positions to {length}; ask for 0 to {self.length}")
        dropped = self.length - length
        self.length = int(length)
        return dropped

    def reserve(self, length: int) -> None:
        """Raises ModelError beyond the capacity: what lies behind it is not this sequence's."""
        check_room(self, length - self.length)
