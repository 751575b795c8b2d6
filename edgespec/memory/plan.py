"""The memory plan: target, keys and values, drafts in slots, workspace. What fits, what does not, and what to change.

All numbers come from headers and manifests: a plan is made before any weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from edgespec.memory.budget import format_bytes

_FEWEST_POSITIONS = 512  # a shorter context is not proposed


@dataclass(frozen=True, slots=True)
class DraftNeed:
    """What one draft takes. slot: bytes while it is loaded, 0 if it has no weights to load. always: in any case.

    further: of each conversation after the first.
    """

    name: str
    slot: int = 0
    always: int = 0
    further: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One part of the plan. left: bytes of the budget after it and all parts before it; negative: so much is
    missing.
    """

    part: str
    nbytes: int
    left: int

    @property
    def fits(self) -> bool:
        return self.left >= 0


@dataclass(frozen=True)
class MemoryPlan:
    """target: bytes. beside: further bytes that are taken in any case, by part. budget: bytes that may be used.

    context: tokens. cache: bytes that the engine takes for keys and values of a text of so many tokens.
    asked: K, None = what fits. `slots` is K of the plan; without enough room for even one slot of the largest draft,
    slots are made for the largest draft of which one fits, and the larger ones are left out.
    """

    target: int
    beside: Mapping[str, int]
    context: int
    cache: Callable[[int], int]
    drafts: Sequence[DraftNeed]
    budget: int
    asked: int | None = None

    @property
    def _fixed(self) -> list[tuple[str, int]]:
        parts = self._needed
        always = sum(draft.always for draft in self.drafts)
        return [*parts, ("drafts, whatever is loaded", always)] if always else parts

    @property
    def _needed(self) -> list[tuple[str, int]]:
        """What there is without any draft."""
        cache = (f"KV cache of {self.context} tokens", self.cache(self.context))
        return [("target", self.target), *self.beside.items(), cache]

    @property
    def room(self) -> int:
        """Bytes for slots; negative if not even the rest fits."""
        return self.budget - sum(nbytes for _part, nbytes in self._fixed)

    @property
    def _sizes(self) -> list[int]:
        return sorted(draft.slot for draft in self.drafts if draft.slot)

    @property
    def slot_bytes(self) -> int:
        """Of one slot: the largest draft, or the largest of which one fits; 0 without drafts that have weights."""
        sizes = self._sizes
        return max((size for size in sizes if size <= self.room), default=sizes[0] if sizes else 0)

    @property
    def slots(self) -> int:
        """K: as asked for, else as many as fit, at most one a draft."""
        usable = sum(0 < draft.slot <= self.slot_bytes for draft in self.drafts)
        if not usable:
            return 0
        return min(usable, max(0, self.room // self.slot_bytes) if self.asked is None else self.asked)

    @property
    def total(self) -> int:
        return sum(nbytes for _part, nbytes in self._fixed) + self.slots * self.slot_bytes

    @property
    def left(self) -> int:
        """Bytes of the budget that stay free; negative: that much is missing."""
        return self.budget - self.total

    @property
    def fits(self) -> bool:
        return self.left >= 0

    @property
    def refused(self) -> bool:
        """Whether nothing runs like this: the target does not fit, or not as many slots as were asked for.

        Drafts that do not fit are only left out.
        """
        return self.budget < sum(nbytes for _part, nbytes in self._needed) or bool(self.asked and not self.fits)

    def rows(self) -> list[Row]:
        """The parts in the order in which they are taken; the last is the total."""
        rows, left = [], self.budget
        slots = [(f"{self.slots} draft slots of {format_bytes(self.slot_bytes)}", self.slots * self.slot_bytes)]
        for part, nbytes in self._fixed + (slots if self._sizes else []):
            left -= nbytes
            rows.append(Row(part, nbytes, left))
        return [*rows, Row("total", self.total, left)]

    def draft_rows(self) -> list[Row]:
        """Each draft with weights, smallest first. left: of a slot, after it; negative: it does not fit a slot."""
        chosen = sorted((draft for draft in self.drafts if draft.slot), key=lambda draft: (draft.slot, draft.name))
        size = self.slot_bytes if self.slots else max(0, self.room)
        return [Row(draft.name, draft.slot, size - draft.slot) for draft in chosen]

    def advice(self) -> list[str]:
        """What to change, each with what it would bring; nothing if all that is wanted fits."""
        return [*self._too_many(), *(self._more() if self.fits else self._refused())]

    def _too_many(self) -> Iterator[str]:
        if self.asked is not None and self.asked > len(self._sizes):
            yield f"--resident {self.asked} is more than there is to hold (drafts with weights: {len(self._sizes)})"

    def _refused(self) -> Iterator[str]:
        """It is over the budget: what would make it fit."""
        outcome = "as it is, this is refused" if self.refused else "drafts will be left out"
        yield f"{format_bytes(-self.left)} are missing: {outcome}"
        if self.asked and self.room >= 0:
            yield f"--resident {self.room // self.slot_bytes} fits"
        yield from self._ways(-self.left, "all of it")

    def _more(self) -> Iterator[str]:
        """It fits: what would let more drafts in."""
        large = [draft for draft in self.drafts if draft.slot > self.slot_bytes]
        for draft in large:
            missing = draft.slot - self.room
            yield f"draft {draft.name} is left out: one slot for it needs {format_bytes(missing)} more"
        if large:
            yield from self._ways(self._sizes[-1] - self.room, "one slot for every draft")
        elif self.asked is None and self.slots < len(self._sizes):
            missing = (self.slots + 1) * self.slot_bytes - self.room
            yield f"{self.slots} of {len(self._sizes)} drafts at once; one more needs {format_bytes(missing)}"
            yield from self._ways(missing, f"K = {self.slots + 1}")
            yield from self._without_largest()

    def _without_largest(self) -> Iterator[str]:
        """All slots are as large as the largest draft: perhaps it is not worth that."""
        largest = max(self.drafts, key=lambda draft: draft.slot)
        others = replace(self, drafts=[draft for draft in self.drafts if draft is not largest])
        if others.slots > self.slots:
            yield f"without draft {largest.name} ({format_bytes(largest.slot)}), K = {others.slots} fits"

    def _ways(self, wanted: int, what: str) -> Iterator[str]:
        yield f"--memory-budget {_rounded(self.budget + wanted)} would fit {what}"
        yield from self._shorter(wanted, what)

    def _shorter(self, wanted: int, what: str) -> Iterator[str]:
        """The longest context, as a power of two, that frees that much."""
        shorter = 1 << max(0, (self.context - 1).bit_length() - 1)
        while shorter >= _FEWEST_POSITIONS:
            freed = self.cache(self.context) - self.cache(shorter)
            if freed >= wanted:
                yield f"--context {shorter} would free {format_bytes(freed)}, enough for {what}"
                return
            shorter //= 2


def _rounded(nbytes: int) -> str:
    """An amount for the command line, rounded up: whole MiB, or tenths of a GiB."""
    mebibytes = -(-nbytes // (1 << 20))
    return f"{mebibytes}MiB" if mebibytes < 10 << 10 else f"{-(-mebibytes * 10 // 1024) / 10:.1f}GiB"
