"""What decoders refuse before they run anything, in one set of words: ids, rows of logits, room, caches of others.

Each message names the value and what to do about it. All of it is about a few numbers on the host: nothing here looks
at what lies on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from edgespec.errors import ModelError
from edgespec.models.base import Decoder, KVCache, Part

if TYPE_CHECKING:
    from edgespec.models.kv.sequence import SequenceCache

Ids = npt.NDArray[np.int64]
_Cache = TypeVar("_Cache", bound="SequenceCache")
_BOOLS = frozenset((bool, np.bool_))


def checked(part: Part, kind: type[_Cache], decoder: Decoder) -> tuple[Ids, _Cache, int]:
    """The ids int64 [n] of a part that `decoder` may run, its cache, and how many rows of logits it gets.

    kind: the class of the decoder's caches. What it says of room lasts only under the lock that guards their lengths
    (`batching.one_after_another` asks before, and each forward again). Raises ValueError for ids, rows or a cache that
    it cannot take, ModelError if the tokens do not fit the cache.
    """
    cache = own_cache(part.cache, kind, decoder)
    ids = token_ids(part.tokens, decoder.spec.vocab_size)
    check_room(cache, len(ids))
    return ids, cache, rows_asked(part.logits, len(ids))


def own_cache(cache: KVCache, kind: type[_Cache], decoder: Decoder) -> _Cache:
    """`cache`, which `decoder` has made, itself or in a pool. Raises ValueError for any other."""
    if not isinstance(cache, kind) or cache.owner is not decoder:
        raise ValueError("the cache belongs to another decoder; use one of this decoder's new_cache or new_pool")
    return cache


def token_ids(tokens: Sequence[int], vocab_size: int) -> Ids:
    """`tokens` as a new array int64 [n], n >= 1, each of them 0 to `vocab_size` - 1. Raises ValueError for others.

    A list, an array, or a tensor on the CPU. Whole numbers only: neither True nor 1.0 is a token.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not ids.size:
        raise ValueError(f"token ids must be a flat, non-empty sequence of integers, not of shape {list(ids.shape)}")
    typed = hasattr(tokens, "dtype")
    # Of a list in which only some are bools numpy makes integers.
    whole = ids.dtype.kind in "iu" and (typed or _BOOLS.isdisjoint(map(type, tokens)))
    if not whole or ids.min() < 0 or ids.max() >= vocab_size:
        for token in ids.tolist() if typed else tokens:
            if not is_whole(token):
                raise ValueError(f"token id {token} is a {type(token).__name__}; ids are whole numbers")
            if not 0 <= token < vocab_size:
                raise ValueError(f"token id {token} does not exist; this model's ids are 0 to {vocab_size - 1}")
    return ids.astype(np.int64)


def check_room(cache: KVCache, count: int) -> None:
    """Raises ModelError if `cache` may never hold `count` positions more."""
    if cache.length + count > cache.capacity:
        raise ModelError(
            f"{cache.length} + {count} tokens do not fit the context of {cache.capacity} positions; "
            "shorten the text, or ask for a longer context"
        )


def rows_asked(logits: int | None, count: int) -> int:
    """How many rows of logits a forward over `count` tokens returns; None = all. Raises ValueError for others."""
    if logits is None:
        return count
    if not is_whole(logits) or not 0 <= logits <= count:
        raise ValueError(f"logits of the last {logits} of {count} tokens were asked for; ask for 0 to {count}, or None")
    return int(logits)


def positions_within(asked: int | None, most: int) -> int:
    """`asked` positions of a sequence, `most` if that is less or nothing is asked. Raises ValueError below 1."""
    if asked is None:
        return most
    if not is_whole(asked) or asked < 1:
        raise ValueError(f"a sequence needs room for 1 position or more, not {asked}; None is all that the model has")
    return min(int(asked), most)


def is_whole(value: object) -> bool:
    """Whether `value` is an integer, Python's or numpy's, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def closed() -> ModelError:
    """For every call of a decoder after its `close`."""
    return ModelError("the model has been closed; load it again")
