"""A head's memory of one conversation: keys and values of the rows in its window, and the buffers of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from drafts.base import Choose, FloatArray, InvalidLogits, Proposal
from drafts.states import HiddenStates

if TYPE_CHECKING:
    import onnxruntime as ort

    from drafts.head import HeadDraft

SLACK = 128  # rows beyond the window: kept ones are moved once in so many tokens, and a block fits behind them
KEPT_ROWS = 64  # new rows of a call whose binding is kept: a round's, or a piece of what was missed


class HeadSession:
    """Keys and values of the rows of positions `begin` .. `end` - 1, all of them from the target's own hidden states.

    Rows of guesses are computed behind them and never counted. `end` is raised after the call that makes it true, so
    an exception anywhere costs a few recomputed rows, nothing else. Keys and values of a row depend on nothing but that
    row and the weights, so they are the same whenever, and beside whatever others, it is read.
    """

    def __init__(self, draft: HeadDraft, states: HiddenStates) -> None:
        self._draft = draft
        self._states = states
        self.begin = self.end = 0
        self._buffers: _Buffers | None = None

    def level(self, tokens: Sequence[int]) -> int:
        return int(self._draft.loaded and self._readable(tokens))

    def _readable(self, tokens: Sequence[int]) -> bool:
        # The row behind the last token is the first that is missing: the target has not seen that token yet.
        return self._states.begin < len(tokens) - 1 <= self._states.end

    def behind(self, tokens: Sequence[int]) -> int:
        if not self._readable(tokens):
            return 0
        return len(tokens) - 2 - self._start(len(tokens) - 1)

    def catch_up(self, tokens: Sequence[int], limit: int) -> int:
        self._draft.check_loaded()
        missing = self.behind(tokens)
        count = min(limit, missing)
        if count > 0:
            start = self._start(len(tokens) - 1)
            steps = self._fill(tokens, start, start + count, 0)
            steps.first(with_logits=False)
            self.end = start + count
        return missing - count

    def propose(self, tokens: Sequence[int], gamma: int, choose: Choose, *, floor: float = 0.0) -> Proposal:
        self._draft.check_loaded()
        proposal = Proposal()
        if not self._readable(tokens):
            return proposal
        gamma = min(gamma, SLACK)
        end = len(tokens) - 1
        steps = self._fill(tokens, self._start(end), end, gamma - 1)
        argmax = bool(getattr(choose, "argmax", False))
        reached = 1.0
        steps.first(with_logits=not argmax)
        for step in range(gamma):
            confidence = steps.confidence()
            if step == 0:
                self.end = end
            reached *= confidence
            # Lossless when sampling: whether this token is proposed depends on the law that it would be drawn from (and
            # on the tokens before it), never on the token that is drawn. A block that ended because an unlikely token
            # came up would tilt the text towards likely ones.
            if reached < floor:
                break
            own = steps.token()
            token, row = (own, None) if argmax else choose(steps.row(), proposal.tokens)
            proposal.tokens.append(token)
            proposal.rows.append(row)
            proposal.confidences.append(confidence)
            if step + 1 < gamma:
                if token != own:
                    steps.read(token)
                steps.next(with_logits=not argmax)
        return proposal

    def _start(self, end: int) -> int:
        """The first position that must be read to go on from row `end` - 1. That one is always read again."""
        first = self._first(end)
        holds = self._buffers is not None and self._buffers.offset <= self.begin <= first <= self.end
        return min(self.end, end - 1) if holds else first

    def _first(self, end: int) -> int:
        """The oldest position that is there and that row `end` - 1 looks at."""
        return max(self._states.begin, end - self._draft.window)

    def _fill(self, tokens: Sequence[int], start: int, stop: int, ahead: int) -> _Buffers:
        """Put the rows of positions `start` .. `stop` - 1 into the buffers of the next call; room for `ahead` more.

        Rows before them are kept as far as the last row of the text, or one of these, looks at them.
        """
        if self._buffers is None:
            self._buffers = _Buffers(self._draft)
        buffers, first = self._buffers, self._first(len(tokens) - 1)
        if not buffers.offset <= self.begin <= first <= self.end:
            self.begin = self.end = first
            buffers.move(first, 0)
        if stop + ahead - buffers.offset > buffers.capacity:
            self.end = self.begin  # interrupted from here on, there are none
            buffers.move(first, start - first)
            self.begin = first
            self.end = start
        buffers.fill(start, tokens[start + 1 : stop + 1], self._states.rows(start, stop))
        return buffers

    def crop(self, length: int) -> None:
        # A row reaches to the token after its position.
        self.end = min(self.end, max(length - 1, 0))
        self.begin = min(self.begin, self.end)

    def release(self) -> None:
        """The weights are going: let go of what points to them. Keys and values stay."""
        buffers = self._buffers  # once: its conversation may be closed meanwhile
        if buffers is not None:
            buffers.release()

    def close(self) -> None:
        self._buffers = None
        self.crop(0)


class _Buffers:
    """Keys, values, inputs and outputs of one conversation, bound to the draft's session once per number of rows.

    offset: the position of the buffers' first row.
    """

    def __init__(self, draft: HeadDraft) -> None:
        spec = draft.spec
        self._draft = draft
        self.capacity = spec.window + SLACK
        self.offset = 0
        self._keys, self._values = (
            np.zeros((1, spec.num_kv_heads, self.capacity, spec.head_dim), np.float32) for _ in range(2)
        )
        self._embedding = np.empty((KEPT_ROWS, spec.hidden_size), np.float32)
        self._hidden = np.empty((KEPT_ROWS, spec.hidden_size), np.float32)
        self._count = 0
        self._seqlens, self._total = np.zeros(1, np.int32), np.zeros(1, np.int32)
        self._token, self._confidence = np.zeros(1, np.int64), np.zeros(1, np.float32)
        # What a step gives, and the next one takes.
        self._feature, self._next = (np.zeros((1, spec.hidden_size), np.float32) for _ in range(2))
        self._logits = np.zeros(spec.vocab_rows, np.float32)
        self._row = np.full(draft.target_rows, -np.inf, np.float32)
        self._bindings: dict[tuple[str, int, bool], Any] = {}
        self._rotary: tuple[FloatArray, FloatArray] | None = None

    def move(self, first: int, count: int) -> None:
        """Make `first` the position of the buffers' first row, keeping the `count` rows from there on."""
        shift = first - self.offset
        if count:
            for buffer in (self._keys, self._values):
                buffer[:, :, :count] = buffer[:, :, shift : shift + count].copy()
        self._bindings.clear()
        self._rotary = None
        self.offset = first

    def release(self) -> None:
        """Drop all bindings: each holds the draft's ONNX session, and with it the weights."""
        self._bindings.clear()

    def fill(self, start: int, tokens: Sequence[int], hidden: FloatArray) -> None:
        """Take the rows of positions `start`, ...: pairs of a hidden state and the token after it."""
        count, size = len(tokens), max(len(tokens), KEPT_ROWS)
        if len(self._embedding) != size:  # larger for this call, or the usual size again after a large one
            width = self._draft.spec.hidden_size
            self._bindings.clear()
            self._embedding, self._hidden = (np.empty((size, width), np.float32) for _ in range(2))
        self._draft.embed(tokens, self._embedding)
        self._hidden[:count] = hidden
        self._count = count
        self._total[0] = start - self.offset

    def first(self, *, with_logits: bool) -> None:
        """Run the rows that were filled in."""
        self._run("first", self._count, with_logits)

    def next(self, *, with_logits: bool) -> None:
        """Run one more step, on what the last one gave."""
        self._run("next", 1, with_logits)

    def read(self, token: int) -> None:
        """Let the next step follow `token` rather than the last step's own."""
        self._draft.embed([token], self._next)

    def confidence(self) -> float:
        """Of the last step's token. Raises InvalidLogits if its logits are no numbers."""
        confidence = float(self._confidence[0])
        if not 0 < confidence < 1.001:  # also false for NaN
            raise InvalidLogits(f"a confidence of {confidence}")
        return min(confidence, 1.0)

    def token(self) -> int:
        """The last step's best token."""
        return int(self._vocab_ids[self._token[0]])

    @property
    def _vocab_ids(self) -> npt.NDArray[np.int64]:
        ids = self._draft.vocab_ids
        assert ids is not None  # a step was run
        return ids

    def row(self) -> FloatArray:
        """The last step's logits as a row of the target's length; the next call overwrites it."""
        self._row[self._vocab_ids] = self._logits
        return self._row

    def _run(self, kind: str, count: int, with_logits: bool) -> None:
        session = self._draft.check_loaded()
        key = (kind, count, with_logits)
        bound = self._bindings.get(key)
        if bound is None:
            bound = self._bound(session, *key)
            if count <= KEPT_ROWS:
                self._bindings[key] = bound
        self._total[0] += count
        self._seqlens[0] = self._total[0] - 1
        session.run_with_iobinding(bound)

    def _bound(self, session: ort.InferenceSession, kind: str, count: int, with_logits: bool) -> Any:
        if self._rotary is None:
            begin, end = self.offset, self.offset + self.capacity
            cos, sin = self._draft.rotary(end)
            self._rotary = cos[begin:end], sin[begin:end]
        inputs = (self._next, self._feature) if kind == "next" else (self._embedding[:count], self._hidden[:count])
        bound = session.io_binding()
        _bind(bound.bind_input, "embedding", inputs[0][None])
        _bind(bound.bind_input, "hidden", inputs[1][None])
        _bind(bound.bind_input, "past_key", self._keys)
        _bind(bound.bind_input, "past_value", self._values)
        _bind(bound.bind_input, "seqlens_k", self._seqlens)
        _bind(bound.bind_input, "total_length", self._total)
        _bind(bound.bind_input, "cos", self._rotary[0])
        _bind(bound.bind_input, "sin", self._rotary[1])
        _bind(bound.bind_output, "present_key", self._keys)
        _bind(bound.bind_output, "present_value", self._values)
        _bind(bound.bind_output, "token", self._token)
        _bind(bound.bind_output, "confidence", self._confidence)
        _bind(bound.bind_output, "feature", self._feature[None])
        _bind(bound.bind_output, "next_embedding", self._next[None])
        if with_logits:
            _bind(bound.bind_output, "logits", self._logits[None, None])
        return bound


def _bind(bind: Any, name: str, array: npt.NDArray[Any]) -> None:
    bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
