"""Several sequences in one forward of the ONNX engine: the bits of each alone, and failures that change nothing."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

from edgespec.catalog import located
from edgespec.errors import ModelError
from edgespec.models.base import Part
from edgespec.models.onnx.batch import BatchRunner
from edgespec.models.onnx.decoder import OnnxCache, OnnxDecoder
from edgespec.models.weights.opening import open_weights
from tests.support.tiny import write_tiny
from tests.support.tiny_gguf import write_tiny_gguf

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
MIXED = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
FOLDERS = {
    "llama": ("llama", SHAPE),
    "mistral-window": ("mistral", {**SHAPE, "sliding_window": 8}),
    "qwen2-biases": ("qwen2", SHAPE),
    "qwen3-mixed-windows": ("qwen3", {**SHAPE, **MIXED}),  # normed heads, and layers with and without a window
    "tied": ("llama", {**SHAPE, "tie_word_embeddings": True}),
    "no-blocks": ("llama", {**SHAPE, "intermediate_size": 80}),  # some matrices stay float32 in every format
}
CASES = [
    ("llama", "float32"),
    ("llama", "int8"),
    ("mistral-window", "int8"),
    ("qwen2-biases", "int8"),
    ("qwen3-mixed-windows", "float32"),
    ("qwen3-mixed-windows", "int8"),
    ("tied", "float32"),
    ("no-blocks", "int8"),
    ("Q4_0", "exact"),
    ("Q4_1", "exact"),
    ("Q8_0", "exact"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {name: write_tiny(folder / name, kind, **changes) for name, (kind, changes) in FOLDERS.items()}
    for quant in ("Q4_0", "Q4_1", "Q8_0"):
        made[quant] = write_tiny_gguf(folder / f"{quant}.gguf", "llama", quant=quant, **SHAPE)
    return made


def load(path: Path, weight_format: str = "exact", *, slots: int | None = 8, cache_dir: Path | None = None):
    with open_weights(path) as weights:
        decoder = OnnxDecoder(weights, weight_format=weight_format, threads=2, cache_dir=cache_dir)
    if slots:
        decoder.prepare_batch(slots)
    return decoder


@pytest.fixture
def decoder(files) -> OnnxDecoder:
    return load(files["Q4_1"])


def assert_same(got: np.ndarray, expected: np.ndarray, weight_format: str) -> None:
    """The same bits where the kernels of the processor were looked at, else close where activations are not rounded."""
    info = Path("/proc/cpuinfo")
    if "avx512_vnni" in (info.read_text() if info.exists() else ""):
        np.testing.assert_array_equal(got, expected)
    elif weight_format == "float32":
        np.testing.assert_allclose(got, expected, atol=1e-4)


class Twins:
    """A sequence in two caches: one for batches, one that runs alone."""

    def __init__(self, decoder: OnnxDecoder, rng: np.random.Generator, capacity: int | None = None) -> None:
        self.decoder, self.rng = decoder, rng
        self.batched, self.alone = decoder.new_cache(capacity), decoder.new_cache(capacity)

    def part(self, width: int) -> Part:
        tokens = self.rng.integers(3, 270, width).tolist()
        wanted = None if self.rng.random() < 0.5 else int(self.rng.integers(0, width + 1))
        return Part(tokens, self.batched, wanted, bool(self.rng.random() < 0.5))

    def check(self, part: Part, output, weight_format: str) -> None:
        alone = self.decoder.forward(part.tokens, self.alone, logits=part.logits, hidden=part.hidden)
        assert output.logits.shape == alone.logits.shape
        assert_same(output.logits, alone.logits, weight_format)
        assert (output.hidden is None) == (not part.hidden)
        if part.hidden:
            assert output.hidden.shape == alone.hidden.shape
            assert_same(output.hidden, alone.hidden, weight_format)
        assert self.batched.length == self.alone.length

    def crop(self) -> None:
        length = int(self.rng.integers(max(0, self.alone.length - 6), self.alone.length + 1))
        assert self.batched.crop(length) == self.alone.crop(length)


@pytest.mark.parametrize("name,weight_format", CASES)
def test_each_sequence_gets_the_bits_of_a_forward_alone(files, name, weight_format):
    """Sequences come and go, pieces of prompts run beside single tokens, rounds are rolled back."""
    decoder, rng = load(files[name], weight_format), np.random.default_rng(0)
    running = [Twins(decoder, rng, capacity) for capacity in (None, 100, 200, None)]
    for number in range(14):
        if number % 3 == 0:
            running.append(Twins(decoder, rng))
        if number % 4 == 3:
            running.pop(int(rng.integers(len(running))))
        chosen = [twins for twins in running if rng.random() < 0.8][:8]
        parts = [twins.part(int(rng.choice([1, 1, 1, 2, 3, 5, 17]))) for twins in chosen]
        outputs = decoder.forward_batch(parts)
        for twins, part, output in zip(chosen, parts, outputs, strict=True):
            twins.check(part, output, weight_format)
            twins.crop()


@pytest.mark.parametrize("width", [33, 65, 97, 129])
@pytest.mark.parametrize(
    ("name", "weight_format"), [("llama", "float32"), ("qwen3-mixed-windows", "int8"), ("Q4_1", "exact")]
)
def test_the_last_row_of_a_piece_is_not_computed_alone(files, name, weight_format, width):
    """Attention takes 32 rows at a time here, which would leave one: the bits of the same text cut elsewhere."""
    decoder, rng = load(files[name], weight_format), np.random.default_rng(width)
    texts = [rng.integers(3, 270, size).tolist() for size in (width, 1, width, 33)]
    parts = [Part(tokens, decoder.new_cache(len(tokens)), None, True) for tokens in texts]
    outputs = [(output.logits.copy(), output.hidden.copy()) for output in decoder.forward_batch(parts)]
    for tokens, (logits, hidden) in zip(texts, outputs, strict=True):
        cache, pieces = decoder.new_cache(), [tokens[:-2], tokens[-2:]] if len(tokens) > 2 else [tokens]
        alone = [(o.logits.copy(), o.hidden.copy()) for o in (decoder.forward(p, cache, hidden=True) for p in pieces)]
        assert_same(logits, np.concatenate([rows for rows, _hidden in alone]), weight_format)
        assert_same(hidden, np.concatenate([rows for _logits, rows in alone]), weight_format)


@pytest.mark.parametrize("slots", [2, 4, 16])
def test_every_number_of_slots(files, slots):
    decoder, rng = load(files["qwen3-mixed-windows"], "int8", slots=slots), np.random.default_rng(1)
    assert decoder.batch_slots == slots
    full = [Twins(decoder, rng) for _ in range(slots)]
    for width in (9, 1, 1, 2):
        parts = [twins.part(width) for twins in full]
        for twins, part, output in zip(full, parts, decoder.forward_batch(parts), strict=True):
            twins.check(part, output, "int8")


def test_a_batch_may_fill_the_caches_to_the_last_position(decoder):
    caches = [decoder.new_cache(5), decoder.new_cache(9)]
    decoder.forward_batch([Part([5] * 4, caches[0]), Part([5] * 8, caches[1])])
    outputs = decoder.forward_batch([Part([7], caches[0]), Part([7], caches[1])])
    assert [cache.length for cache in caches] == [5, 9]
    alone = decoder.forward([5] * 4 + [7], decoder.new_cache()).logits
    assert_same(outputs[0].logits, alone[-1:], "exact")


def test_no_logits_at_all(decoder):
    caches = [decoder.new_cache(), decoder.new_cache()]
    outputs = decoder.forward_batch([Part([5, 9], cache, 0) for cache in caches])
    assert [output.logits.shape for output in outputs] == [(0, 288)] * 2
    assert decoder.forward_batch([]) == []


def test_without_preparation_sequences_run_one_after_the_other(files):
    decoder = load(files["Q4_1"], slots=None)
    assert decoder.batch_slots == 1
    rng = np.random.default_rng(2)
    many = [Twins(decoder, rng) for _ in range(20)]  # any number of them
    parts = [twins.part(3) for twins in many]
    for twins, part, output in zip(many, parts, decoder.forward_batch(parts), strict=True):
        twins.check(part, output, "exact")


def test_a_single_sequence_runs_in_the_graph_for_one(decoder, monkeypatch):
    monkeypatch.setattr(BatchRunner, "run", lambda *_: pytest.fail("the batch graph ran"))
    cache = decoder.new_cache()
    (output,) = decoder.forward_batch([Part([5, 9, 13], cache, 1, True)])
    assert (output.logits.shape, output.hidden.shape, cache.length) == ((1, 288), (3, 64), 3)


def test_a_sequence_keeps_its_slot_while_it_stays(decoder, monkeypatch):
    bound: list[int] = []
    original = BatchRunner._bind_buffers
    monkeypatch.setattr(
        BatchRunner, "_bind_buffers", lambda self, slot, buffers: (bound.append(slot), original(self, slot, buffers))
    )
    first, second, third = (decoder.new_cache() for _ in range(3))

    def run(*caches: OnnxCache) -> list[int]:
        bound.clear()
        decoder.forward_batch([Part([5], cache) for cache in caches])
        return list(bound)

    assert run(first, second) == [0, 1]
    assert run(second, first) == []
    assert run(third, second) == [0]  # takes the place of the one that left
    assert run(second, third, first) == [2]
    assert run(second, first) == [0]  # the third one's slot is bound to nobody's memory


def test_a_sequence_that_ended_is_forgotten(decoder):
    """Neither is its memory kept, nor is it written once it may be somebody else's."""
    stays, also, ends = (decoder.new_cache() for _ in range(3))
    decoder.forward_batch([Part([5] * 3, cache) for cache in (ends, stays, also)])
    memory, gone = ends.buffers[0], weakref.ref(ends)
    del ends
    gc.collect()
    assert gone() is None
    memory.flags.writeable = True
    memory[:] = 7
    decoder.forward_batch([Part([5] * 3, cache) for cache in (stays, also)])
    assert (memory == 7).all()


def test_slots_are_limited(files):
    decoder = load(files["Q4_1"], slots=2)
    caches = [decoder.new_cache() for _ in range(3)]
    with pytest.raises(ValueError, match="a batch of 3 sequences was given, it takes 2"):
        decoder.forward_batch([Part([5], cache) for cache in caches])
    assert [cache.length for cache in caches] == [0, 0, 0]


def test_a_failure_inside_the_engine_is_a_model_error_and_changes_nothing(decoder, monkeypatch):
    caches = [decoder.new_cache(), decoder.new_cache()]
    parts = [Part([5, 9], cache) for cache in caches]

    class Broken:
        def run_with_iobinding(self, _io: object) -> None:
            raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(decoder._batch, "_session", Broken())
        with pytest.raises(ModelError, match="out of memory"):
            decoder.forward_batch(parts)
    assert [cache.length for cache in caches] == [0, 0]
    assert [output.logits.shape for output in decoder.forward_batch(parts)] == [(2, 288)] * 2


@pytest.mark.parametrize("slots", [None, 2])
def test_room_is_reserved_before_anything_is_written(files, monkeypatch, slots):
    decoder = load(files["Q4_1"], slots=slots)
    caches, asked = [decoder.new_cache(), decoder.new_cache()], []
    monkeypatch.setattr(OnnxCache, "reserve", lambda self, length: asked.append((caches.index(self), length)))
    decoder.forward_batch([Part([5, 9], caches[0]), Part([5], caches[1])])
    decoder.forward([5], caches[1])
    batch = [(0, 2), (1, 1)]  # of all before the first one runs, and again by each one's own forward
    assert asked == batch * (1 if slots else 2) + [(1, 2)]

    def refuse(self: OnnxCache, length: int) -> None:
        if self is caches[1]:
            raise MemoryError("no room")

    monkeypatch.setattr(OnnxCache, "reserve", refuse)
    with pytest.raises(MemoryError):
        decoder.forward_batch([Part([5], cache) for cache in caches])
    assert [cache.length for cache in caches] == [2, 2]


def test_preparing_again_costs_nothing_and_may_widen(files):
    decoder = load(files["Q4_1"], slots=None)
    narrow = decoder.prepare_batch(2)
    runner = decoder._batch
    assert narrow > decoder.nbytes / 2
    assert decoder.prepare_batch(2) == narrow
    assert decoder._batch is runner
    caches = [decoder.new_cache() for _ in range(4)]
    decoder.forward_batch([Part([5], cache) for cache in caches[:2]])
    assert decoder.prepare_batch(4) > narrow
    assert decoder.prepare_batch(2) > narrow  # what takes four takes two
    decoder.forward_batch([Part([5], cache) for cache in caches])
    assert [cache.length for cache in caches] == [2, 2, 1, 1]
    assert decoder.prepare_batch(1) == 0  # gives it back
    assert (decoder.batch_slots, decoder._batch) == (1, None)
    decoder.forward_batch([Part([5], cache) for cache in caches])
    assert [cache.length for cache in caches] == [3, 3, 2, 2]


def test_a_batch_that_cannot_be_made_leaves_the_rest_working(files, tmp_path):
    decoder = load(files["Q4_1"], slots=None, cache_dir=tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    (folder / "graph.onnx").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelError, match="cannot be read"):
        decoder.prepare_batch(2)
    (folder / "graph.onnx").unlink()
    with pytest.raises(ModelError, match="cannot be read"):
        decoder.prepare_batch(2)
    caches = [decoder.new_cache(), decoder.new_cache()]
    decoder.forward_batch([Part([5], cache) for cache in caches])
    assert [cache.length for cache in caches] == [1, 1]


def test_the_folder_of_the_converted_model_is_only_read(files, tmp_path):
    """So folders made before there were batches serve as they are, and several processes cannot disturb each other."""
    load(files["Q4_1"], slots=None, cache_dir=tmp_path)
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    workers = [threading.Thread(target=load, args=(files["Q4_1"],), kwargs={"cache_dir": tmp_path}) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(30)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_closing_frees_the_batch_too(decoder):
    caches = [decoder.new_cache(), decoder.new_cache()]
    decoder.forward_batch([Part([5], cache) for cache in caches])
    session = weakref.ref(decoder._batch._session)
    decoder.close()
    gc.collect()
    assert session() is None
    for call in (
        lambda: decoder.forward_batch([Part([5], cache) for cache in caches]),
        lambda: decoder.prepare_batch(2),
    ):
        with pytest.raises(ModelError, match="closed"):
            call()


def test_threads_may_forward_beside_a_batch(decoder):
    rng = np.random.default_rng(3)
    many, alone = [Twins(decoder, rng) for _ in range(3)], decoder.new_cache()
    expected = np.concatenate([decoder.forward([5], alone).logits.copy() for _ in range(20)])
    alone.crop(0)
    got: list[np.ndarray] = []
    other = threading.Thread(target=lambda: got.extend(decoder.forward([5], alone).logits.copy() for _ in range(20)))
    other.start()
    for _ in range(20):
        parts = [twins.part(2) for twins in many]
        outputs = decoder.forward_batch(parts)
        for twins, part, output in zip(many, parts, outputs, strict=True):
            twins.check(part, output, "exact")
    other.join(30)
    assert_same(np.concatenate(got), expected, "exact")


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", ["exact", "float32"])
def test_the_bits_of_a_real_model(weight_format, tmp_path):
    path = located("smollm2-135m")
    if path is None:
        pytest.skip("smollm2-135m is not on this machine")
    with open_weights(path) as weights:
        decoder = OnnxDecoder(weights, weight_format=weight_format, threads=2, positions=256, cache_dir=tmp_path)
    decoder.prepare_batch(8)
    rng = np.random.default_rng(4)
    many = [Twins(decoder, rng) for _ in range(8)]
    for widths in ([64, 1, 1, 1, 5, 2, 9, 1], [1] * 8, [5] * 8, [1, 3]):
        parts = [twins.part(width) for twins, width in zip(many, widths)]
        for twins, part, output in zip(many, parts, decoder.forward_batch(parts)):
            twins.check(part, output, weight_format)
            twins.crop()
    decoder.close()
