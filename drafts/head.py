"""A head draft: one small decoder layer over the target's hidden states, sharing its embedding and LM head.

Row i of its input is the pair (h_i, t_{i+1}): the target's hidden state at position i after the final norm, and the
token that follows it. The row predicts the token after that one:

    x = fc [rms(embedding of t_{i+1}) * embed_norm ; rms(h_i) * hidden_norm]
    x = x + attention over the last `window` rows, of rms(x) * input_norm (rotary by position i)
    x = x + gated MLP of rms(x) * mlp_norm
    f = rms(x) * out_norm;  logits = f times the LM head's rows of the tokens in `vocab`

In further steps of a block f stands for the hidden state that the target has not computed yet.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import numpy.typing as npt

from drafts.base import LoadControl, Slot
from drafts.head_file import FILE_NAME, FloatArray, HeadFile, HeadWeights, Int8Matrix, write_head_file
from drafts.head_image import GivenHead, HeadImage, HeadSource, constant_bytes, image_bytes
from drafts.head_session import KEPT_ROWS, SLACK, HeadSession
from drafts.head_spec import HeadSpec
from drafts.load_now import load_now
from drafts.states import HiddenStates
from edgespec.errors import DraftError
from edgespec.models.cpu import usable_threads
from edgespec.models.rope import inverse_frequencies
from edgespec.models.spec import RopeSpec

if TYPE_CHECKING:
    import onnxruntime as ort

    from edgespec.models.base import Decoder

__all__ = ["FILE_NAME", "HeadDraft", "HeadFile", "HeadSpec", "HeadWeights", "Int8Matrix", "write_head_file"]

_THREAD_BYTES = 16 << 20  # of weights for each thread, see `_threads_for`
_SESSION_BYTES = 1 << 20  # of ONNX Runtime for a session, whatever its weights
_KEPT_EMBEDDINGS = 1024  # most tokens of a text come again, and a row takes a while to read


def loaded_bytes(spec: HeadSpec, tied: bool) -> int:
    """What a loaded head takes at most, while it is loaded: its image, and ONNX Runtime's copies.

    ONNX Runtime copies the constants, arranges them anew for its products, and holds some twice in between: with
    1.32 a head of 7.4 MB makes it grow by 15.2 MB, of which 12.0 stay, with 1.22 by 21.5 MB, of which 17.1 stay.
    """
    return image_bytes(spec, tied) + 3 * constant_bytes(spec, tied) + _SESSION_BYTES


def conversation_bytes(spec: HeadSpec, target_rows: int = 1 << 18) -> int:
    """What a head keeps of one conversation, loaded or not: its window's keys and values, and the rows of a call.

    Each head also counts for its own the hidden states that all heads share. target_rows: of logits.
    """
    numbers = 2 * spec.num_kv_heads * spec.head_dim * (spec.window + SLACK) + target_rows + spec.vocab_rows
    return 4 * (numbers + spec.hidden_size * (2 * KEPT_ROWS + 3 * spec.window + 64))


class HeadDraft:
    """A head beside `target`, run on ONNX Runtime's CPU provider whatever the target runs on.

    weights: themselves (the draft is then loaded from the start), or where `load` gets them. temperature: divides the
    logits before a token's share of them is taken as its chance to be accepted. threads: at most so many, None = as an
    engine. domain: what it was trained for, "" = no domain. Raises DraftError for numbers, or weights, that do not fit
    the target.
    """

    kind = "head"
    reads_hidden = True

    def __init__(
        self,
        name: str,
        spec: HeadSpec,
        weights: HeadWeights | HeadSource,
        target: Decoder,
        *,
        temperature: float = 1.0,
        threads: int | None = None,
        domain: str = "",
    ) -> None:
        self.name = name
        self.spec = spec
        self.domain = domain
        self.window = spec.window
        self.target_rows = target.spec.vocab_size
        self.vocab_ids: npt.NDArray[np.int64] | None = None  # the target's ids of its logits' places, once loaded
        self.session: ort.InferenceSession | None = None
        self._temperature = temperature
        self._target = target
        self._tied = bool(target.spec.tie_embeddings)
        self._threads = _threads_for(constant_bytes(spec, self._tied), threads or usable_threads())
        self._lock = threading.Lock()
        self._sessions: WeakSet[HeadSession] = WeakSet()
        self._embeddings = _embeddings_of(target)
        self._check(target, temperature)
        if isinstance(weights, HeadWeights):
            if weights.spec != spec:
                raise DraftError(f"draft {name}: its weights are of another architecture, {weights.spec.key}.")
            weights.check(f"draft {name}")
            self._check_vocab(weights.vocab)
            self._source: HeadSource = GivenHead(weights)
            load_now(self)
        else:
            self._source = weights

    def _check(self, target: Decoder, temperature: float) -> None:
        if self.spec.hidden_size != target.spec.hidden_size:
            raise DraftError(
                f"draft {self.name} reads hidden states of size {self.spec.hidden_size}, but the target's have "
                f"{target.spec.hidden_size}; it was made for another model."
            )
        if not (math.isfinite(temperature) and temperature > 0):
            raise DraftError(f"draft {self.name}: confidence temperature {temperature} must be a positive number.")

    def _check_vocab(self, vocab: npt.NDArray[np.int32]) -> None:
        if vocab[-1] >= self.target_rows:
            raise DraftError(
                f"draft {self.name} proposes token {vocab[-1]}, but the target has only {self.target_rows}; it was "
                "made for another model."
            )

    # Its weights, which come and go

    @property
    def slot_bytes(self) -> int:
        return loaded_bytes(self.spec, self._tied)

    @property
    def buffer_bytes(self) -> int:
        return image_bytes(self.spec, self._tied)

    @property
    def conversation_bytes(self) -> int:
        return conversation_bytes(self.spec, self.target_rows)

    @property
    def files(self) -> tuple[Path, ...]:
        return self._source.files(self.spec, self._target, self._temperature)

    @property
    def loaded(self) -> bool:
        return self.session is not None

    def load(self, slot: Slot, control: LoadControl) -> None:
        if self.loaded:
            return
        buffer = slot.buffer[: self.buffer_bytes]
        if len(buffer) < self.buffer_bytes:
            raise DraftError(f"draft {self.name} needs {self.buffer_bytes} bytes of a slot that has {len(buffer)}.")
        control.checkpoint()
        image = self._source.fill(buffer, self.spec, self._target, self._temperature, control)
        self._check_vocab(image.vocab)
        control.checkpoint()
        session = _session(self.name, image, self._threads)
        _try(self.name, session, self.spec)
        control.checkpoint()
        self.vocab_ids = image.vocab.astype(np.int64)
        self.session = session

    def unload(self) -> None:
        """The sessions of conversations keep their keys and values: they are right as long as the weights are these."""
        self.session = None
        with self._lock:
            opened = list(self._sessions)
        for each in opened:
            each.release()

    @property
    def vocab(self) -> list[int]:
        """The target's ids of the tokens that it can propose, ascending; none until it was loaded once."""
        return [] if self.vocab_ids is None else self.vocab_ids.tolist()

    @property
    def nbytes(self) -> int:
        """Bytes of its weights in memory, its rows of the target's tables included."""
        return constant_bytes(self.spec, self._tied) if self.loaded else 0

    def open(self, states: HiddenStates | None = None) -> HeadSession:
        if states is None or states.hidden_size != self.spec.hidden_size:
            raise DraftError(f"draft {self.name} needs the target's hidden states of size {self.spec.hidden_size}.")
        states.widen(self.window)
        opened = HeadSession(self, states)
        with self._lock:
            self._sessions.add(opened)
        return opened

    def close(self) -> None:
        self.unload()

    # What its sessions share

    def check_loaded(self) -> ort.InferenceSession:
        """The session that runs its steps; DraftError if its weights are not there."""
        if self.session is None:
            raise DraftError(f"draft {self.name} is not loaded.")
        return self.session

    def embed(self, tokens: Sequence[int], out: FloatArray) -> None:
        """Fill `out` [n, hidden_size] with the target's input embeddings of `tokens`."""
        self._embeddings.embed(self._target, tokens, out)

    def rotary(self, positions: int) -> tuple[FloatArray, FloatArray]:
        """cos and sin of at least the first `positions` positions: float32 [n, head_dim / 2] each."""
        count = max(1024, 1 << max(positions - 1, 0).bit_length())
        return _rotary(float(self.spec.rope_theta), self.spec.head_dim, count)


def _threads_for(nbytes: int, most: int) -> int:
    """Threads of a session: one for a small head, whatever the engine takes.

    A step of 7.4 MB takes 0.9 ms with one thread and 0.6 ms with two while two cores are free; beside other work (such
    as the load of another draft) it takes 0.9 ms with one, and 1.9 ms with two that wait for each other.
    """
    return max(1, min(most, nbytes // _THREAD_BYTES))


class _Embeddings:
    """Input embeddings of a target that were read lately, for all heads beside it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, FloatArray] = {}

    def embed(self, target: Decoder, tokens: Sequence[int], out: FloatArray) -> None:
        with self._lock:
            kept = self._kept
            missing = [token for token in dict.fromkeys(tokens) if token not in kept]
            if missing:
                if len(kept) + len(missing) > _KEPT_EMBEDDINGS:
                    kept.clear()
                    missing = list(dict.fromkeys(tokens))
                kept.update(zip(missing, target.embed(missing)))
            for row, token in enumerate(tokens):
                out[row] = kept[token]


_embeddings: WeakKeyDictionary[Any, _Embeddings] = WeakKeyDictionary()
_embeddings_lock = threading.Lock()


def _embeddings_of(target: Decoder) -> _Embeddings:
    with _embeddings_lock:
        return _embeddings.setdefault(target, _Embeddings())


@lru_cache(maxsize=8)
def _rotary(theta: float, head_dim: int, count: int) -> tuple[FloatArray, FloatArray]:
    frequencies, _ = inverse_frequencies(RopeSpec(theta), head_dim)
    angles = np.arange(count)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _session(name: str, image: HeadImage, threads: int) -> ort.InferenceSession:
    """The session that runs one step. ONNX Runtime takes the constants from where they lie, and lets others run."""
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise DraftError(f"draft {name} needs ONNX Runtime: pip install 'edgespec[cpu]'.") from error
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # The graph has nothing to fuse: the same bits as with all optimisations, a step as quick, and built in 10 ms of
    # processor time instead of 17.
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    # As in the target's session: workers that go on spinning after a call would take the cores from the target.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        given = [ort.OrtValue.ortvalue_from_numpy(array) for array in image.constants.values()]
        options.add_external_initializers(list(image.constants), given)
        return ort.InferenceSession(image.model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises classes of its own, all derived from Exception
        raise DraftError(f"draft {name}: ONNX Runtime cannot load it ({str(error)[:200]}).") from error


def _try(name: str, session: ort.InferenceSession, spec: HeadSpec) -> None:
    """One step, so that the first real one is not slower, and what gives no numbers is noticed now. Else DraftError."""
    row = np.ones((1, 1, spec.hidden_size), np.float32)
    past = np.zeros((1, spec.num_kv_heads, 2, spec.head_dim), np.float32)
    turn = np.ones((2, spec.head_dim // 2), np.float32)
    feeds = {"embedding": row, "hidden": row, "past_key": past, "past_value": past, "cos": turn, "sin": 0 * turn}
    feeds |= {"seqlens_k": np.zeros(1, np.int32), "total_length": np.ones(1, np.int32)}
    try:
        confidence, feature = session.run(["confidence", "feature"], feeds)
    except Exception as error:
        raise DraftError(f"draft {name}: ONNX Runtime cannot run it ({str(error)[:200]}).") from error
    if not (0 < float(confidence[0]) < 1.001 and np.isfinite(feature).all()):
        raise DraftError(f"draft {name}: a step gives no numbers; its weights are damaged.")
