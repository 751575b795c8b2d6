"""Which blocks hold which tokens: a tree whose paths are texts, so that a prompt finds what was computed before.

A node stands for the tokens of one block *after* those of its parents. Nodes are found by the ids themselves, so two
texts can never be taken for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Found(NamedTuple):
    """blocks: full ones, from the first position on. tail: a further block whose first `extra` positions fit too."""

    blocks: tuple[int, ...]
    tail: int | None = None
    extra: int = 0


NOTHING = Found(())


class _Node:
    __slots__ = ("block", "children", "ids", "parent")

    def __init__(self, parent: _Node | None, ids: tuple[int, ...], block: int) -> None:
        self.parent = parent
        self.ids = ids
        self.block = block
        self.children: dict[tuple[int, ...], _Node] = {}


class PrefixIndex:
    """block_size: tokens of a full block. A last block with fewer has no children."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._root = _Node(None, (), -1)
        self._nodes: dict[int, _Node] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, ids: Sequence[int]) -> Found:
        """What is known of the beginning of `ids`."""
        node, blocks, at = self._root, [], 0
        while at + self._size <= len(ids):
            child = node.children.get(tuple(ids[at : at + self._size]))
            if child is None:
                break
            blocks.append(child.block)
            node, at = child, at + self._size
        best, extra = None, 0
        rest = ids[at : at + self._size]
        for child in node.children.values():
            fits = _common(child.ids, rest)
            if fits > extra:
                best, extra = child.block, fits
        return Found(tuple(blocks), best, extra)

    def add(self, ids: Sequence[int], blocks: Sequence[int]) -> None:
        """`blocks` hold `ids` from the first position on; the last block may be partly filled.

        Where other blocks hold the same tokens already, those stay known and these do not become so.
        """
        node = self._root
        for index, block in enumerate(blocks):
            piece = tuple(ids[index * self._size : (index + 1) * self._size])
            child = node.children.get(piece)
            if child is None:
                if len(piece) < self._size and any(_common(c.ids, piece) == len(piece) for c in node.children.values()):
                    return  # a longer one is known, perhaps of this very block
                if block in self._nodes:
                    raise ValueError(f"block {block} holds other tokens already")
                child = node.children[piece] = self._nodes[block] = _Node(node, piece, block)
            node = child

    def remove(self, block: int) -> list[int]:
        """Forget `block` and all that follow it, which nobody could find any more; returns their numbers."""
        top = self._nodes[block]
        if top.parent is not None:
            del top.parent.children[top.ids]
        gone = [node.block for node in _below(top)]
        for each in gone:
            del self._nodes[each]
        return gone

    def rename(self, old: int, new: int) -> None:
        """What was in block `old` is in `new` from now on."""
        node = self._nodes[new] = self._nodes.pop(old)
        node.block = new


def _below(node: _Node) -> Iterator[_Node]:
    waiting = [node]  # not recursive: a text may have more blocks than Python has frames
    while waiting:
        each = waiting.pop()
        waiting.extend(each.children.values())
        yield each


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading ids are the same."""
    count = 0
    for a, b in zip(one, other):
        if a != b:
            break
        count += 1
    return count
