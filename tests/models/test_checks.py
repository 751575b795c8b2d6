"""What decoders refuse: the same on every engine and in the same words, alone and in batches, and nothing changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edgespec.errors import ModelError
from edgespec.models.base import Part
from edgespec.models.batching import PartError
from edgespec.models.build import build_decoder
from edgespec.models.checks import token_ids
from edgespec.models.cuda.decoder import CudaDecoder
from edgespec.models.weights.opening import open_weights
from tests.support.engines import ENGINES
from tests.support.tiny import write_tiny

TEXT = [5, 9, 13, 200, 17, 30, 41, 7, 99, 120, 3, 64]
NO_ID = "does not exist; this model's ids are 0 to 287"
IDS: list[tuple[Any, str]] = [
    ([], "a flat, non-empty sequence of integers, not of shape [0]"),
    ([[1, 2]], "a flat, non-empty sequence of integers, not of shape [1, 2]"),
    (7, "a flat, non-empty sequence of integers, not of shape []"),
    ([5, -1, 300], f"token id -1 {NO_ID}"),
    ([5, 288], f"token id 288 {NO_ID}"),
    ([2**63, -1], f"token id 9223372036854775808 {NO_ID}"),
    ([2**70], f"token id 1180591620717411303424 {NO_ID}"),
    ([5, True], "token id True is a bool"),
    ([5, np.True_], "token id True is a bool"),
    ([5, 1.0], "token id 1.0 is a float; ids are whole numbers"),
    (["5"], "token id 5 is a str; ids are whole numbers"),
    ([None], "token id None is a NoneType; ids are whole numbers"),
    (np.array([5, 288], np.uint16), f"token id 288 {NO_ID}"),
    (np.array([5.0]), "token id 5.0 is a float; ids are whole numbers"),
    (np.array([True]), "token id True is a bool"),
    (torch.tensor([-1]), f"token id -1 {NO_ID}"),
    (torch.tensor([5.0]), "token id 5.0 is a float; ids are whole numbers"),
    (torch.tensor([True]), "token id True is a bool"),
]
ROWS: list[Any] = [3, -1, True, 1.0]
LENGTHS: list[Any] = [13, -1, True, 2.0]
SIZES: list[Any] = [0, -1, True, 1.5]


def load(folder: Path, engine: str, positions: int | None = None) -> Any:
    with open_weights(folder) as weights:
        if engine == "cuda":
            return CudaDecoder(weights, device="cpu", positions=positions)
        return build_decoder(weights, device=engine, weight_format="float32", threads=1, positions=positions)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("checks") / "model", head_dim=16)


@pytest.fixture(scope="module", params=[*ENGINES, "cuda"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def decoder(folder: Path, engine: str) -> Iterator[Any]:
    made = load(folder, engine)
    yield made
    made.close()


@pytest.fixture(scope="module")
def stranger(folder: Path, engine: str) -> Iterator[Any]:
    made = load(folder, engine)
    yield made
    made.close()


@pytest.fixture(params=[1, 2], ids=["alone", "together"])
def slots(request: pytest.FixtureRequest, decoder: Any) -> Iterator[int]:
    """How many sequences of a batch one forward takes."""
    decoder.prepare_batch(request.param)
    yield request.param
    decoder.prepare_batch(1)


def filled(decoder: Any) -> Any:
    """A cache of 16 positions that holds 12."""
    cache = decoder.new_cache(16)
    decoder.forward(TEXT, cache, logits=0)
    return cache


def check_refused(error: type[Exception], words: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=re.escape(words)) as caught:
        call()
    assert not isinstance(caught.value, PartError)


def check_part(decoder: Any, error: type[Exception], words: str, part: Callable[[Any], Part]) -> None:
    """That a part is refused alone, and in a batch as that very part; afterwards all goes on as if nothing had been."""
    wanted = np.array(decoder.forward([7, 8], filled(decoder)).logits)
    mine, good = filled(decoder), filled(decoder)
    bad = part(mine)
    tokens: Any = bad.tokens
    check_refused(error, words, lambda: decoder.forward(tokens, bad.cache, logits=bad.logits))
    check_refused(error, words, lambda: decoder.forward_batch([bad]))
    for place, parts in ((0, [bad, Part([7], good)]), (1, [Part([7], good), bad])):
        with pytest.raises(PartError, match=re.escape(words)) as caught:
            decoder.forward_batch(parts)
        assert caught.value.part == place
        assert words in str(caught.value.error)
    assert mine.length == good.length == 12
    for output in decoder.forward_batch([Part([7, 8], mine), Part([7, 8], good)]):
        assert np.allclose(np.array(output.logits), wanted, atol=1e-5)


@pytest.mark.parametrize(("tokens", "words"), IDS, ids=str)
def test_ids_that_are_none(decoder: Any, slots: int, tokens: Any, words: str) -> None:
    check_part(decoder, ValueError, words, lambda mine: Part(tokens, mine))


@pytest.mark.parametrize(("tokens", "words"), IDS, ids=str)
def test_rows_of_ids_that_are_none(decoder: Any, tokens: Any, words: str) -> None:
    for rows in (decoder.embed, decoder.head_rows):
        check_refused(ValueError, words, lambda rows=rows: rows(tokens))


def test_a_drafts_block_after_ids_that_are_none(folder: Path) -> None:
    """On a GPU an id without a row is an error from which the process does not recover."""
    decoder = load(folder, "cuda")
    cache = filled(decoder)
    for tokens, words in IDS[3:]:
        check_refused(ValueError, words, lambda tokens=tokens: decoder.guess(tokens, cache, 2, real=280))
    assert cache.length == 12


def test_what_else_a_drafts_block_cannot_have(folder: Path) -> None:
    decoder, other = load(folder, "cuda"), load(folder, "cuda")
    cache = filled(decoder)
    check_refused(ValueError, "not of shape [0]", lambda: decoder.guess([], cache, 2, real=280))
    check_refused(ValueError, "1 guess or more, not 0", lambda: decoder.guess([5], cache, 0, real=280))
    check_refused(ModelError, "12 + 5 tokens do not fit", lambda: decoder.guess([5], cache, 5, real=280))
    check_refused(ValueError, "another decoder", lambda: decoder.guess([5], other.new_cache(16), 2, real=280))
    assert cache.length == 12
    assert decoder.guess([5], cache, 4, real=280) is not None
    assert cache.length == 16


@pytest.mark.parametrize("asked", ROWS)
def test_rows_of_logits_that_there_are_not(decoder: Any, slots: int, asked: Any) -> None:
    words = f"logits of the last {asked} of 2 tokens were asked for; ask for 0 to 2, or None"
    check_part(decoder, ValueError, words, lambda mine: Part([7, 8], mine, asked))


def test_more_tokens_than_there_is_room_for(decoder: Any, slots: int) -> None:
    words = "12 + 5 tokens do not fit the context of 16 positions; shorten the text, or ask for a longer context"
    check_part(decoder, ModelError, words, lambda mine: Part([7] * 5, mine))
    cache = filled(decoder)
    assert decoder.forward([7] * 4, cache).logits.shape == (4, 288)  # exactly full


def test_a_cache_of_another_decoder(decoder: Any, slots: int, stranger: Any) -> None:
    words = "the cache belongs to another decoder; use one of this decoder's new_cache or new_pool"
    theirs = stranger.new_cache(16)
    check_part(decoder, ValueError, words, lambda mine: Part([7], theirs))
    assert theirs.length == 0


def test_a_cache_that_occurs_twice(decoder: Any, slots: int) -> None:
    cache = filled(decoder)
    check_refused(
        ValueError, "each cache only once", lambda: decoder.forward_batch([Part([7], cache), Part([8], cache)])
    )
    assert cache.length == 12


@pytest.mark.parametrize("length", LENGTHS)
def test_a_crop_to_what_is_not_held(decoder: Any, length: Any) -> None:
    cache = filled(decoder)
    check_refused(
        ValueError, f"cannot crop a cache of 12 positions to {length}; ask for 0 to 12", lambda: cache.crop(length)
    )
    assert cache.length == 12
    assert (cache.crop(np.int64(5)), cache.length, type(cache.length)) == (7, 5, int)


def test_room_beyond_the_capacity(decoder: Any) -> None:
    """Of a pool's sequence, that would be the memory of another one."""
    pool = decoder.new_pool(8 * 64 * decoder.spec.position_bytes(), sequences=2, context=100)
    for cache in (decoder.new_cache(100), pool.new_cache(20)):
        before = pool.stats
        check_refused(
            ModelError, "0 + 101 tokens do not fit the context of 100", lambda cache=cache: cache.reserve(101)
        )
        assert pool.stats == before
        cache.reserve(20)
    pool.close()


@pytest.mark.parametrize("size", SIZES)
def test_a_sequence_of_no_positions(folder: Path, engine: str, decoder: Any, size: Any) -> None:
    words = f"a sequence needs room for 1 position or more, not {size}; None is all that the model has"
    check_refused(ValueError, words, lambda: decoder.new_cache(size))
    check_refused(ValueError, words, lambda: decoder.new_pool(1 << 20, context=size))
    check_refused(ValueError, words, lambda: load(folder, engine, size))


@pytest.mark.parametrize("count", [0, 3, 32])
def test_a_batch_of_other_sizes(decoder: Any, count: int) -> None:
    check_refused(ValueError, f"a batch has 1, 2, 4, 8 or 16 slots, not {count}", lambda: decoder.prepare_batch(count))


def test_every_call_after_the_end(folder: Path, engine: str) -> None:
    decoder = load(folder, engine)
    one, two = filled(decoder), filled(decoder)
    decoder.embed([1])
    decoder.close()
    decoder.close()
    for call in (
        lambda: decoder.forward([7], one),
        lambda: decoder.forward_batch([Part([7], one), Part([7], two)]),
        decoder.new_cache,
        lambda: decoder.new_pool(1 << 20),
        lambda: decoder.embed([1]),
        lambda: decoder.head_rows([1]),
    ):
        check_refused(ModelError, "the model has been closed; load it again", call)


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(TEXT),
        np.array(TEXT, np.uint8),
        np.array(TEXT[::-1])[::-1],
        np.frombuffer(np.array(TEXT).tobytes(), np.int64),  # read-only
        torch.tensor(TEXT, dtype=torch.int32),
        [np.uint64(TEXT[0]), *TEXT[1:]],  # of which numpy makes floats
    ],
    ids=["tuple", "uint8", "reversed", "read-only", "tensor", "mixed"],
)
def test_ids_in_other_forms(decoder: Any, tokens: Any) -> None:
    wanted = np.array(decoder.forward(TEXT, decoder.new_cache()).logits)
    assert np.array_equal(np.array(decoder.forward(tokens, decoder.new_cache()).logits), wanted)
    assert np.array_equal(decoder.embed(tokens), decoder.embed(TEXT))


def test_what_was_checked_is_what_runs() -> None:
    """Whoever writes to the array meanwhile."""
    given = np.array(TEXT)
    assert not np.shares_memory(token_ids(given, 288), given)  # type: ignore[arg-type]
