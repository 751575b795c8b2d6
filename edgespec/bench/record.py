"""`edgespec bench record`: the target's plain answers, and what every draft would have guessed at every position.

Greedy text does not depend on drafts. So each draft is asked at every position of the recorded answer, through the very
`DraftSession` of a live run, with what a live one would have by then; its own keys and values are kept on the way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from drafts.base import Draft, FloatArray
from drafts.evaluate import GreedyChoice, Trajectory, reads_hidden
from drafts.ngram import NgramDraft
from drafts.recording import record
from drafts.states import HiddenStates
from edgespec.bench.watch import Watch
from edgespec.decoding.session import Session
from edgespec.draft_costs import measure_drafts
from edgespec.errors import DraftError, PromptError
from edgespec.evaluation.prompts import Item, Skipped
from edgespec.evaluation.run import measure_costs
from edgespec.evaluation.trajectories import TrajectoryStore
from predictor.costs import CostTable
from predictor.features import PROMPT_WINDOW
from predictor.traces import TracedText, TraceHeader, TraceWriter, quantised, text_key

if TYPE_CHECKING:
    from edgespec.evaluation.run import Encode

_log = logging.getLogger(__name__)

Uint8 = npt.NDArray[np.uint8]
_MAX_LEVEL = 255


@dataclass
class Scores:
    """One draft at every position that was asked for: accepts and level uint8 [n], confidences uint8 [n, gamma_max]."""

    accepts: Uint8
    level: Uint8
    confidences: Uint8


class _Wrong(Exception):
    """The draft's next guess is wrong: what it would say after it does not matter."""


class _Judge(GreedyChoice):
    """Chooses as greedy decoding does, and ends a block with its first wrong token.

    Says that it is no plain argmax, so that drafts ask it token by token.
    """

    argmax = False

    def __init__(self, token_count: int) -> None:
        super().__init__(token_count)
        self.right: Sequence[int] = ()

    def __call__(self, row: FloatArray, proposed: Sequence[int]) -> tuple[int, None]:
        token, _ = super().__call__(row, proposed)
        if len(proposed) >= len(self.right) or token != self.right[len(proposed)]:
            raise _Wrong
        self.agreed = len(proposed) + 1
        return token, None


def score_positions(
    draft: Draft, trajectory: Trajectory, gamma: int, *, stride: int = 1, whole_blocks: bool = False
) -> Scores:
    """Ask `draft` for `gamma` tokens after every `stride`-th token of the answer but the last.

    whole_blocks: let it make each block to the end, with its confidences; else a block ends with the first wrong token,
    which halves the time, and confidences are 0. Raises what the draft raises.
    """
    answer, known = trajectory.answer, range(1, len(trajectory.answer), stride)
    found = Scores(*(np.zeros(shape, np.uint8) for shape in (len(known), len(known), (len(known), gamma))))
    text = [*trajectory.prompt, *answer]
    states = _empty_states(draft, trajectory) if reads_hidden(draft) else None
    session = draft.open() if states is None else draft.open(states)
    judge, plain = _Judge(trajectory.token_count), GreedyChoice(trajectory.token_count)
    try:
        for column, done in enumerate(known):
            tokens = text[: len(trajectory.prompt) + done]
            if states is not None:
                _show(states, trajectory, len(tokens) - 1)
            level = session.level(tokens)
            found.level[column] = min(level, _MAX_LEVEL)
            if level <= 0:
                continue
            right = answer[done : done + gamma]
            if whole_blocks:
                proposal = session.propose(tokens, gamma, plain)
                found.accepts[column] = _agreed(proposal.tokens[:gamma], right)
                for place, confidence in enumerate(proposal.confidences[:gamma]):
                    found.confidences[column, place] = quantised(confidence)
                continue
            judge.right, judge.agreed = right, 0
            try:
                # A draft that never asks the judge (lookup) hands its whole guess over.
                judge.agreed = _agreed(session.propose(tokens, len(right), judge).tokens, right)
            except _Wrong:
                pass
            found.accepts[column] = judge.agreed
    finally:
        session.close()
    return found


def _agreed(guesses: Iterable[int], right: Sequence[int]) -> int:
    count = 0
    for guess, token in zip(guesses, right):
        if index(guess) != token:
            break
        count += 1
    return count


def _empty_states(draft: Draft, trajectory: Trajectory) -> HiddenStates:
    if trajectory.hidden is None:
        raise DraftError(f"draft {draft.name} reads hidden states, and this target gives none.")
    rows, size = trajectory.hidden.shape
    return HiddenStates(size, max(rows, 1))


def _show(states: HiddenStates, trajectory: Trajectory, end: int) -> None:
    """Hand the states of the positions below `end` over, as verifying them would have done."""
    begin = max(states.end, trajectory.start)
    if trajectory.hidden is not None and begin < end:
        rows = trajectory.hidden[begin - trajectory.start : end - trajectory.start]
        states.write(begin, np.asarray(rows, np.float32))


class _ThisProcess:
    """This process, as `Watch` wants it."""

    def cpu_seconds(self) -> float:
        return time.process_time()


@dataclass
class Recorder:
    """Records prompts into a trace folder. `add` takes in one prompt after the other, and is done with it.

    session: of an engine with the target; its drafts are not used. drafts: those of the header, in its order, ready to
    run. encode: messages to token ids as the engine would.
    """

    session: Session
    encode: Encode
    drafts: Sequence[Draft]
    header: TraceHeader
    store: TrajectoryStore
    writer: TraceWriter
    window: int = PROMPT_WINDOW
    skipped: list[Skipped] = field(default_factory=list)
    recorded: int = 0
    known: int = 0
    lengths: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"answers": 0.0, "drafts": 0.0})

    def add(self, item: Item) -> None:
        """Record one prompt (its first turn), unless it is there; one that does not fit is noted in `skipped`."""
        try:
            prompt = self._fitting(item)
        except PromptError as error:
            self.skipped.append(Skipped(item.file, item.line, str(error)))
            return
        self.lengths.append(len(prompt) + self.header.max_new_tokens // 2)
        key = text_key(prompt)
        if key in self.writer:
            self.known += 1
            return
        begin = time.perf_counter()
        trajectory = self.store.get(prompt, lambda: self._plain(prompt))
        self.seconds["answers"] += time.perf_counter() - begin
        if len(trajectory.answer) < 2:
            self.skipped.append(Skipped(item.file, item.line, "the target's answer is empty"))
            return
        begin = time.perf_counter()
        self.writer.add(self._text(key, item, trajectory))
        self.seconds["drafts"] += time.perf_counter() - begin
        self.recorded += 1

    def _fitting(self, item: Item) -> list[int]:
        prompt = self.session.check(self.encode([{"role": "user", "content": item.turns[0]}]))
        room = self.session.context - len(prompt)
        if room < self.header.max_new_tokens:
            raise PromptError(
                f"the prompt has {len(prompt)} tokens, which leaves room for {room} of the "
                f"{self.header.max_new_tokens} new ones in the context of {self.session.context}"
            )
        return prompt

    def _plain(self, prompt: list[int]) -> Trajectory:
        session = self.session
        return record(
            session.target,
            prompt,
            self.header.max_new_tokens,
            eos_ids=session.eos_ids,
            token_count=session.token_count,
            window=self.window,
        )

    def _text(self, key: str, item: Item, trajectory: Trajectory) -> TracedText:
        header = self.header
        if trajectory.hidden is None:
            raise DraftError("the target gives no hidden states, which a ranker looks at; load it on another device.")
        scores = [
            score_positions(draft, trajectory, header.gamma_max, stride=header.stride, whole_blocks=header.confidences)
            for draft in self.drafts
        ]
        lookup = score_positions(NgramDraft(), trajectory, header.gamma_max, stride=header.stride, whole_blocks=True)
        columns = len(lookup.accepts)
        begin = len(trajectory.prompt) - trajectory.start  # rows of the prompt that were kept
        rows = trajectory.hidden[max(begin - header.recent, 0) :]
        prompt_rows = trajectory.hidden[max(begin - header.prompt_window, 0) : begin]
        return TracedText(
            key=key,
            name=item.name,
            domain=item.domain,
            prompt=np.array(trajectory.prompt, np.int32),
            answer=np.array(trajectory.answer, np.int32),
            accepts=np.array([s.accepts for s in scores], np.uint8).reshape(len(scores), columns),
            lookup_level=lookup.level,
            lookup_accepts=lookup.accepts,
            hidden=rows.astype(np.float16),
            prompt_hidden=prompt_rows.mean(axis=0, dtype=np.float32),
            confidences=np.array([s.confidences for s in scores], np.uint8) if header.confidences else None,
        )

    def measure(self, load: Callable[[str], float | None]) -> dict[str, Any]:
        """Seconds of the target's forwards by width, of each draft's step, and of loads; and what share of the
        processors other processes took meanwhile ("disturbance").

        load: seconds that loading a draft takes, None where that cannot be told.
        """
        position = sorted(self.lengths)[len(self.lengths) // 2] if self.lengths else 256
        reading = any(reads_hidden(draft) for draft in self.drafts)
        watch = Watch(_ThisProcess(), ())
        table = measure_costs(self.session.target, position, range(1, self.header.gamma_max + 2), hidden=reading)
        names = [draft.name for draft in self.header.drafts if not draft.free]
        measure_drafts(self.session, names, table)
        loads = {name: load(name) for name in names}
        return {
            **CostTable.to_json(table),
            "load_seconds": {name: seconds for name, seconds in loads.items() if seconds is not None},
            "position": position,
            "disturbance": watch.shares()[0],
        }
