"""Images of heads: the same numbers as without them, and whatever happens to files is noticed and named."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from drafts import head_image
from drafts.base import LoadCancelled
from drafts.head import FILE_NAME, HeadDraft
from drafts.head_file import HeadFile
from drafts.head_image import HEADER_BYTES, image_bytes
from drafts.load_now import OwnSlot, Unhindered
from drafts.states import HiddenStates
from edgespec.errors import DraftError
from tests.support.scripted import ToyDecoder
from tests.support.tiny_head import Hindered, draft_of, load_into, random_head, stored_head, tiny_spec

SPEC = tiny_spec(window=8, vocab_rows=64)
VOCAB = list(range(3, 67))
TOKENS = [int(token) for token in np.random.default_rng(1).integers(0, 120, 30)]
HIDDEN = np.random.default_rng(2).standard_normal((29, 32)).astype(np.float32)


@pytest.fixture
def target() -> ToyDecoder:
    return ToyDecoder(120, hidden=32, seed=2)


@pytest.fixture
def draft(tmp_path: Path, target: ToyDecoder) -> HeadDraft:
    return stored_head(tmp_path / "code", target, spec=SPEC, vocab=VOCAB)


def two(folder: Path, target: ToyDecoder) -> list[HeadDraft]:
    return [stored_head(folder / name, target, spec=SPEC, vocab=VOCAB, seed=seed) for seed, name in enumerate("ab")]


def guesses(draft: HeadDraft) -> tuple[list[int], list[float], np.ndarray]:
    """Tokens, confidences and logits, to the last bit."""
    states = HiddenStates(32, 8)
    states.write(0, HIDDEN)
    rows: list[np.ndarray] = []

    def choose(row: np.ndarray, proposed: object) -> tuple[int, None]:
        rows.append(row.copy())
        return int(row.argmax()), None

    proposal = draft.open(states).propose(TOKENS, 4, choose)  # type: ignore[arg-type]
    return proposal.tokens, proposal.confidences, np.array(rows)


def same(one: tuple[list[int], list[float], np.ndarray], other: tuple[list[int], list[float], np.ndarray]) -> bool:
    return one[:2] == other[:2] and np.array_equal(one[2], other[2])


def image_of(draft: HeadDraft) -> Path:
    (image,) = (file for file in draft.files if file.name != FILE_NAME)
    return image


@pytest.mark.parametrize("tied", [True, False])
def test_from_memory_from_the_file_and_from_the_image_it_is_the_same_head(tmp_path: Path, tied: bool) -> None:
    target = ToyDecoder(120, hidden=32, seed=2)
    object.__setattr__(target.spec, "tie_embeddings", tied)
    if tied:
        target._head = target._embedding
    given = HeadDraft("x", SPEC, random_head(SPEC, VOCAB), target, threads=1)
    draft = stored_head(tmp_path / "code", target, spec=SPEC, vocab=VOCAB)
    assert not draft.loaded
    assert draft.files == (tmp_path / "code" / FILE_NAME,)
    load_into(draft)
    assert same(guesses(draft), guesses(given))
    assert image_of(draft).stat().st_size == image_bytes(SPEC, tied) == draft.buffer_bytes
    draft.unload()
    target.embed = target.head_rows = lambda ids: pytest.fail("the image has the target's rows")  # type: ignore[method-assign,assignment]
    reading = Hindered()
    load_into(draft, reading)
    assert reading.nbytes == draft.buffer_bytes  # and nothing of head.safetensors
    target.embed = ToyDecoder(120, hidden=32, seed=2).embed  # type: ignore[method-assign]
    assert same(guesses(draft), guesses(given))


def test_a_slot_that_another_draft_was_in_makes_no_difference(tmp_path: Path, target: ToyDecoder) -> None:
    first, second = (
        stored_head(tmp_path / name, target, spec=SPEC, vocab=VOCAB, seed=s) for s, name in enumerate("ab")
    )
    slot, expected = OwnSlot(first.buffer_bytes + 100), []
    for draft in (first, second):
        load_into(draft)
        expected.append(guesses(draft))
        draft.unload()
    for _ in range(2):
        for draft, was in zip((first, second), expected):
            draft.load(slot, Unhindered())
            assert same(guesses(draft), was)
            draft.unload()


def test_a_slot_that_is_too_small_is_refused(draft: HeadDraft) -> None:
    with pytest.raises(DraftError, match="needs"):
        draft.load(OwnSlot(draft.buffer_bytes - 1), Unhindered())


def flip(at: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return damage


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size - 1),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeroed": lambda path: path.write_bytes(b"\0" * path.stat().st_size),
    "zeroed tail": lambda path: path.write_bytes(path.read_bytes()[:-9000].ljust(path.stat().st_size, b"\0")),
    "magic": flip(0),
    "lengths": flip(11),
    "description": flip(40),
    "a weight": flip(HEADER_BYTES + 5000),
    "the last": flip(-200),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_image_is_made_anew_once(draft: HeadDraft, damage: str) -> None:
    load_into(draft)
    expected = guesses(draft)
    draft.unload()
    image = image_of(draft)
    whole = image.read_bytes()
    DAMAGE[damage](image)
    load_into(draft)
    assert same(guesses(draft), expected)
    assert image.read_bytes() == whole
    draft.unload()
    DAMAGE[damage](image)
    with pytest.raises(DraftError, match=f"{image.name}: is damaged again") as caught:
        load_into(draft)
    assert "delete it" in str(caught.value)
    assert not draft.loaded
    image.unlink()
    load_into(draft)
    assert same(guesses(draft), expected)


def test_an_image_of_something_else_is_not_taken(tmp_path: Path, target: ToyDecoder) -> None:
    one, other = two(tmp_path, target)
    for draft in (one, other):
        load_into(draft)
    expected = guesses(one)
    one.unload()
    image_of(one).write_bytes(image_of(other).read_bytes())
    load_into(one)
    assert same(guesses(one), expected)
    images = {image_of(one)}
    target.weight_format = "int8"
    load_into(draft_of(tmp_path / "a" / FILE_NAME, target, SPEC))
    images.add(image_of(draft_of(tmp_path / "a" / FILE_NAME, target, SPEC)))
    target.weight_format = "float32"
    warm = draft_of(tmp_path / "a" / FILE_NAME, target, SPEC, temperature=1.5)
    load_into(warm)
    images.add(image_of(warm))
    assert len(images) == 3
    assert guesses(warm)[1] != expected[1]


@pytest.mark.parametrize("imaged", [True, False])
@pytest.mark.parametrize("fault", ["gone", "cut", "longer", "a folder", "a link"])
def test_what_happens_to_the_weights_is_noticed_and_named(draft: HeadDraft, fault: str, imaged: bool) -> None:
    path = draft.files[0]
    if imaged:
        load_into(draft)
        draft.unload()
    data = path.read_bytes()
    path.unlink()
    if fault in ("cut", "longer"):
        path.write_bytes(data[:-1] if fault == "cut" else data + b"\0")
    elif fault == "a folder":
        path.mkdir()
    elif fault == "a link":
        (path.parent.parent / "elsewhere").write_bytes(data)
        path.symlink_to(path.parent.parent / "elsewhere")
    with pytest.raises(DraftError, match=FILE_NAME):
        load_into(draft)
    assert not draft.loaded


def test_an_unreadable_file_is_named(draft: HeadDraft, monkeypatch: pytest.MonkeyPatch) -> None:
    load_into(draft)
    draft.unload()
    opened = head_image.open_to_read

    def refuse(path: Path) -> int:
        if path.name == FILE_NAME:
            raise PermissionError(13, "Permission denied")
        return opened(path)

    monkeypatch.setattr(head_image, "open_to_read", refuse)
    with pytest.raises(DraftError, match=r"head.safetensors: cannot be read \(Permission denied\)"):
        load_into(draft)


def test_turned_bits_are_found_where_they_would_be_used(draft: HeadDraft) -> None:
    flip(-1)(draft.files[0])
    with pytest.raises(DraftError, match=f"{FILE_NAME}: has another sha256"):
        load_into(draft)
    flip(-1)(draft.files[0])
    load_into(draft)
    expected = guesses(draft)
    draft.unload()
    flip(-1)(draft.files[0])  # the image was made of the right ones
    load_into(draft)
    assert same(guesses(draft), expected)


def test_a_file_that_is_replaced_while_it_is_read_is_refused(draft: HeadDraft, target: ToyDecoder) -> None:
    path = draft.files[0]
    source = draft._source
    read = source._read  # type: ignore[attr-defined]

    def replace() -> object:
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
        return read()

    source._read = replace  # type: ignore[attr-defined]
    with pytest.raises(DraftError, match="was replaced while it was read"):
        load_into(draft)


def test_numbers_that_are_none_are_refused(tmp_path: Path, target: ToyDecoder) -> None:
    draft = stored_head(tmp_path / "code", target, spec=SPEC, vocab=VOCAB)
    path, weights = draft.files[0], HeadFile.read(draft.files[0], SPEC)
    data, scale = path.read_bytes(), weights.matrices["down"].scale.tobytes()
    at = data.index(scale)
    path.write_bytes(data[:at] + b"\x00\x7e" + data[at + 2 :])
    with pytest.raises(DraftError, match=r"down.scale holds NaN"):
        load_into(draft_of(path, target, SPEC))
    path.write_bytes(data)
    with pytest.raises(DraftError, match=r"head.safetensors: .*architecture asks for"):
        load_into(draft_of(path, target, tiny_spec(window=8, vocab_rows=64, intermediate_size=96)))
    target._embedding[VOCAB[5]] = np.nan
    with pytest.raises(DraftError, match="the target's embedding holds NaN"):
        load_into(draft_of(path, target, SPEC))


def test_a_step_that_gives_no_numbers_is_found_before_it_is_used(draft: HeadDraft, target: ToyDecoder) -> None:
    for row in target._head:
        row[:] = 1e38  # finite, and too large for a product
    with pytest.raises(DraftError, match="a step gives no numbers"):
        load_into(draft)
    assert not draft.loaded


def test_where_images_cannot_be_kept_one_warning_tells(
    draft: HeadDraft, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "images").write_text("a file is in the way")
    for _ in range(2):
        load_into(draft)
        assert guesses(draft)[0]
        draft.unload()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "drafts are prepared anew at every load" in caplog.text


@pytest.mark.parametrize("imaged", [True, False])
def test_a_load_that_is_called_off_holds_nothing(draft: HeadDraft, tmp_path: Path, imaged: bool) -> None:
    whole = Hindered()
    load_into(draft, whole)
    expected = guesses(draft)
    draft.unload()
    for end in range(1, whole.places + 1):
        if not imaged:
            for file in (tmp_path / "images").iterdir():
                file.unlink()
        slot, control = OwnSlot(draft.buffer_bytes), Hindered(end)
        try:
            draft.load(slot, control)
        except LoadCancelled:
            assert not draft.loaded
            assert draft.nbytes == 0
        else:
            assert imaged  # an image has fewer places
            draft.unload()
        gc.collect()
        slot.buffer.release()  # BufferError if something still looks into it
        left = {file.suffix for file in (tmp_path / "images").iterdir()}
        assert left <= {".image"}
    assert whole.places > (5 if imaged else 8)
    load_into(draft)
    assert same(guesses(draft), expected)
