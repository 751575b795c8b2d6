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
from typing import TYPE_CHECKING

import numpy as np

from drafts.head_file import FILE_NAME, FloatArray, HeadFile, HeadWeights, Int8Matrix, write_head_file
from drafts.head_session import HeadSession
from drafts.head_spec import HeadSpec
from drafts.states import HiddenStates
from edgespec.errors import DraftError
from edgespec.models.cpu import usable_threads
from edgespec.models.rope import inverse_frequencies
from edgespec.models.spec import RopeSpec

if TYPE_CHECKING:
    import onnxruntime as ort

    from edgespec.models.base import Decoder

__all__ = ["FILE_NAME", "HeadDraft", "HeadFile", "HeadSpec", "HeadWeights", "Int8Matrix", "write_head_file"]

_KEPT_EMBEDDINGS = 1024  # most tokens of a text come again, and a row takes a while to read


class HeadDraft:
    """A head that is ready to run beside `target`, on ONNX Runtime's CPU provider whatever the target runs on.

    temperature: divides the logits before a token's share of them is taken as its chance to be accepted. threads: None
    = as many as an engine takes. domain: what it was trained for, "" = no domain. Raises DraftError for weights that do
    not fit the target or the numbers.
    """

    kind = "head"
    reads_hidden = True

    def __init__(
        self,
        name: str,
        spec: HeadSpec,
        weights: HeadWeights,
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
        self.vocab: list[int] = weights.vocab.tolist()
        self.vocab_ids = weights.vocab.astype(np.int64)
        self.target_rows = target.spec.vocab_size
        self._check(weights, target, temperature)
        self._target = target
        self._lock = threading.Lock()
        self._embeddings: dict[int, FloatArray] = {}
        self._rotary = self._tables(0)
        self.session: ort.InferenceSession | None
        self.session, self._nbytes = _load(name, weights, target, temperature, threads or usable_threads())

    def _check(self, weights: HeadWeights, target: Decoder, temperature: float) -> None:
        if weights.spec != self.spec:
            raise DraftError(f"draft {self.name}: its weights are of another architecture, {weights.spec.key}.")
        weights.check(f"draft {self.name}")
        if self.spec.hidden_size != target.spec.hidden_size:
            raise DraftError(
                f"draft {self.name} reads hidden states of size {self.spec.hidden_size}, but the target's have "
                f"{target.spec.hidden_size}; it was made for another model."
            )
        if self.vocab[-1] >= target.spec.vocab_size:
            raise DraftError(
                f"draft {self.name} proposes token {self.vocab[-1]}, but the target has only "
                f"{target.spec.vocab_size}; it was made for another model."
            )
        if not (math.isfinite(temperature) and temperature > 0):
            raise DraftError(f"draft {self.name}: confidence temperature {temperature} must be a positive number.")

    @property
    def nbytes(self) -> int:
        """Bytes of its weights in memory, its rows of the target's tables included."""
        return self._nbytes if self.session is not None else 0

    def open(self, states: HiddenStates | None = None) -> HeadSession:
        if states is None or states.hidden_size != self.spec.hidden_size:
            raise DraftError(f"draft {self.name} needs the target's hidden states of size {self.spec.hidden_size}.")
        states.widen(self.window)
        return HeadSession(self, states)

    def close(self) -> None:
        self.session = None
        with self._lock:
            self._embeddings.clear()

    # What its sessions share

    def embed(self, tokens: Sequence[int], out: FloatArray) -> None:
        """Fill `out` [n, hidden_size] with the target's input embeddings of `tokens`."""
        with self._lock:
            kept = self._embeddings
            missing = [token for token in dict.fromkeys(tokens) if token not in kept]
            if missing:
                if len(kept) + len(missing) > _KEPT_EMBEDDINGS:
                    kept.clear()
                    missing = list(dict.fromkeys(tokens))
                kept.update(zip(missing, self._target.embed(missing)))
            for row, token in enumerate(tokens):
                out[row] = kept[token]

    def rotary(self, positions: int) -> tuple[FloatArray, FloatArray]:
        """cos and sin of at least the first `positions` positions: float32 [n, head_dim / 2] each."""
        if len(self._rotary[0]) < positions:
            self._rotary = self._tables(positions)
        return self._rotary

    def _tables(self, positions: int) -> tuple[FloatArray, FloatArray]:
        count = max(1024, 1 << (positions - 1).bit_length() if positions else 0)
        frequencies, _ = inverse_frequencies(RopeSpec(float(self.spec.rope_theta)), self.spec.head_dim)
        angles = np.arange(count)[:, None] * frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _load(
    name: str, weights: HeadWeights, target: Decoder, temperature: float, threads: int
) -> tuple[ort.InferenceSession, int]:
    """The session that runs one step, and the bytes of its constants."""
    try:
        import onnxruntime as ort

        from drafts.head_graph import head_graph
    except ImportError as error:
        raise DraftError(f"draft {name} needs ONNX Runtime: pip install 'edgespec[cpu]'.") from error
    vocab = weights.vocab.tolist()
    head = None if target.spec.tie_embeddings else target.head_rows(vocab)
    model, nbytes = head_graph(weights, target.embed(vocab), head, temperature)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # As in the target's session: workers that go on spinning after a call would take the cores from the target.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]), nbytes
    except Exception as error:  # ONNX Runtime raises classes of its own, all derived from Exception
        raise DraftError(f"draft {name}: ONNX Runtime cannot load it ({str(error)[:200]}).") from error
