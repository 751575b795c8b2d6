"""How often a draft is right: rounds replayed on text that the target has already written.

Greedy output is the target's own, whatever drafts do. So every draft can be judged on the same recorded answer,
through the very `DraftSession` that a live run uses, and without the target: the rounds, and what is accepted in each,
are those of a live run with that draft and gamma, up to the cut at the answer's end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import index
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from drafts.base import Choose, Draft, DraftSession, FloatArray, InvalidLogits, Proposal
from drafts.ngram import NgramDraft
from edgespec.errors import DraftError

if TYPE_CHECKING:
    from drafts.states import HiddenStates

LOOKUP = "lookup+"  # name of a hybrid: lookup where it has a match, else what is named behind it
PHRASES_LEVEL = 6  # of a table of phrases, from which on it goes before a model: nine of ten first tokens are right
_BINS = 10


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One prompt and the target's plain greedy answer to it.

    limit: new tokens that were allowed (>= len(answer)); like a live round, a replayed one never proposes beyond it.
    token_count: ids from here on are no tokens. hidden: float [n, hidden_size], the target's states after the final
    norm of the positions `start` .. `start + n - 1`, the last one being that of the last token but one (the last token
    was never read). None where the target has none.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    limit: int
    token_count: int
    hidden: npt.NDArray[np.floating] | None = None
    start: int = 0

    def __post_init__(self) -> None:
        if not self.prompt or not 1 <= len(self.answer) <= self.limit:
            raise ValueError(f"a prompt of {len(self.prompt)} and an answer of {len(self.answer)} of {self.limit}")
        end = len(self.prompt) + len(self.answer) - 1
        if self.hidden is not None and (self.hidden.ndim != 2 or self.start + len(self.hidden) != end):
            raise ValueError(f"states {self.hidden.shape} from {self.start} do not end at {end}")


@dataclass(slots=True)
class Score:
    """Counters of replayed rounds; those of several prompts can be added up.

    rounds: target steps after the first token, plain ones included. emitted: tokens they gave (accepted, and the
    target's own one of each round). accepted, proposed: draft tokens that stood, and all that the target would have
    verified. tries, hits: by place in the block; a place is tried if all before it stood and the text got that far.
    asked: rounds in which the draft could run; short: of these, with fewer tokens than asked for (none included).
    widths: rounds by tokens the target reads (1 + proposed). seconds: inside `level` and `propose`. pairs: (confidence,
    hit) of each try.
    """

    rounds: int = 0
    emitted: int = 0
    accepted: int = 0
    proposed: int = 0
    asked: int = 0
    short: int = 0
    seconds: float = 0.0
    tries: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    widths: Counter[int] = field(default_factory=Counter)
    pairs: list[tuple[float, bool]] = field(default_factory=list)

    def add(self, other: Score) -> None:
        """Take in another prompt's counters."""
        for name in ("rounds", "emitted", "accepted", "proposed", "asked", "short", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, more in ((self.tries, other.tries), (self.hits, other.hits)):
            mine.extend([0] * (len(more) - len(mine)))
            for place, count in enumerate(more):
                mine[place] += count
        self.widths.update(other.widths)
        self.pairs.extend(other.pairs)

    def judge(self, judged: int, stood: int) -> None:
        """Count the places of one block of which `judged` tokens were compared and the first `stood` were right."""
        missing = judged - len(self.tries)
        self.tries.extend([0] * missing)
        self.hits.extend([0] * missing)
        for place in range(min(judged, stood + 1)):
            self.tries[place] += 1
            self.hits[place] += place < stood


@dataclass(slots=True)
class FirstToken:
    """At every position of the answer but the first: was a token proposed (`asked`), was it the right one (`hits`)."""

    positions: int = 0
    asked: int = 0
    hits: int = 0

    def add(self, other: FirstToken) -> None:
        self.positions += other.positions
        self.asked += other.asked
        self.hits += other.hits


def score(draft: Draft, trajectory: Trajectory, gamma: int, *, floor: float = 0.0) -> Score:
    """Replay the answer in rounds of at most `gamma` >= 0 proposed tokens (0: plain decoding, the draft is not asked).

    floor: the draft ends a block where it expects less than this, see `DraftSession.propose`. Raises what the draft
    raises, and DraftError for a draft that needs hidden states where the recording has none.
    """
    found = Score()
    answer, total = trajectory.answer, len(trajectory.answer)
    with _Replay(draft, trajectory, floor) as replay:
        done = 1  # the first token comes from the prompt's own forward
        while done < total:
            room = min(gamma, trajectory.limit - done - 1)
            proposal = replay.propose(done, room) if room > 0 else None
            guesses = [] if proposal is None else proposal.tokens
            agreed = _agreed(guesses, answer[done:])
            emitted = min(agreed + 1, total - done)
            stood = min(agreed, emitted)
            judged = len(guesses) if emitted > agreed else stood  # behind the answer's end nothing is right or wrong
            found.rounds += 1
            found.emitted += emitted
            found.accepted += stood
            found.proposed += len(guesses)
            found.widths[1 + len(guesses)] += 1
            if proposal is not None:
                found.asked += 1
                found.short += len(guesses) < room
                tried = min(judged, stood + 1)
                found.pairs += [(c, place < stood) for place, c in enumerate(proposal.confidences[:tried])]
            found.judge(judged, stood)
            done += emitted
        found.seconds = replay.seconds
    return found


def first_token(draft: Draft, trajectory: Trajectory) -> FirstToken:
    """Ask the draft for one token at every position of the answer but the first, whatever was right before."""
    found = FirstToken()
    with _Replay(draft, trajectory, 0.0) as replay:
        for done in range(1, len(trajectory.answer)):
            proposal = replay.propose(done, 1)
            guesses = [] if proposal is None else proposal.tokens
            found.positions += 1
            found.asked += bool(guesses)
            found.hits += guesses[:1] == [trajectory.answer[done]]
    return found


def _agreed(guesses: Sequence[int], text: Sequence[int]) -> int:
    return next(
        (i for i, (guess, right) in enumerate(zip(guesses, text)) if guess != right), min(len(guesses), len(text))
    )


class _Replay:
    """One draft's session on one recorded answer, given what a live session would have by then, never more.

    Like a live one it crops nothing between rounds: guesses that were rejected are the draft's own business.
    """

    def __init__(self, draft: Draft, trajectory: Trajectory, floor: float) -> None:
        self._trajectory = trajectory
        self._text = [*trajectory.prompt, *trajectory.answer]
        self._choose = GreedyChoice(trajectory.token_count)
        self._floor = floor
        self.seconds = 0.0  # inside the draft
        self._states = _empty_states(draft, trajectory) if reads_hidden(draft) else None
        self._session = draft.open() if self._states is None else draft.open(self._states)

    def __enter__(self) -> _Replay:
        return self

    def __exit__(self, *error: object) -> None:
        self._session.close()

    def propose(self, done: int, gamma: int) -> Proposal | None:
        """The draft's block after `done` tokens of the answer, cut before the first id that is no token.

        None if it has nothing to go on there.
        """
        tokens = self._text[: len(self._trajectory.prompt) + done]
        self._show(len(tokens) - 1)
        begin = perf_counter()
        able = self._session.level(tokens) > 0
        proposal = self._session.propose(tokens, gamma, self._choose, floor=self._floor) if able else None
        self.seconds += perf_counter() - begin
        if proposal is None:
            return None
        if len(proposal.rows) != len(proposal.tokens):
            raise ValueError(f"{len(proposal.tokens)} guesses with {len(proposal.rows)} rows")
        proposal.tokens = proposal.tokens[:gamma]
        for place, token in enumerate(map(index, proposal.tokens)):
            if not 0 <= token < self._trajectory.token_count:
                proposal.tokens = proposal.tokens[:place]
                break
        return proposal

    def _show(self, end: int) -> None:
        """Hand the states of the positions below `end` over, as verifying them would have done."""
        states, trajectory = self._states, self._trajectory
        if states is not None and trajectory.hidden is not None:
            begin = max(states.end, trajectory.start)
            if begin < end:
                rows = trajectory.hidden[begin - trajectory.start : end - trajectory.start]
                states.write(begin, np.asarray(rows, np.float32))


def reads_hidden(draft: Draft) -> bool:
    """Whether it needs the target's hidden states; False for kinds that do not say."""
    return bool(getattr(draft, "reads_hidden", False))


def _empty_states(draft: Draft, trajectory: Trajectory) -> HiddenStates:
    from drafts.states import HiddenStates

    if trajectory.hidden is None:
        raise DraftError(f"draft {draft.name} reads hidden states, and this target gives none.")
    rows, size = trajectory.hidden.shape
    return HiddenStates(size, max(rows, 1))


class GreedyChoice:
    """`Choose` of greedy decoding without bias and penalties: the best of the target's tokens, the lowest of equals."""

    argmax = True
    temperature = None
    row_length = 0

    def __init__(self, token_count: int) -> None:
        self._count = token_count

    def uniform(self) -> float:
        raise NotImplementedError("greedy choices need no random numbers")

    def __call__(self, row: FloatArray, proposed: Sequence[int]) -> tuple[int, None]:
        known = np.asarray(row, np.float32)[: self._count]
        if known.ndim != 1 or not known.size:
            raise InvalidLogits(f"a logits row of shape {known.shape}")
        best = int(np.argmax(known))
        if not np.isfinite(known[best]):
            raise InvalidLogits("a logits row with NaN, +inf, or nothing finite")
        return best, None


class Plain:
    """Never proposes: the row of plain decoding."""

    name = kind = "plain"
    nbytes = 0
    reads_hidden = False

    def open(self, states: HiddenStates | None = None) -> DraftSession:
        return _PlainSession()

    def close(self) -> None:
        pass


class _PlainSession:
    def level(self, tokens: Sequence[int]) -> int:
        return 0

    def propose(self, tokens: Sequence[int], gamma: int, choose: Choose, *, floor: float = 0.0) -> Proposal:
        return Proposal()

    def crop(self, length: int) -> None:
        pass

    def close(self) -> None:
        pass


class LookupFirst:
    """Lookup where a suffix of at least two tokens occurred before, `draft` elsewhere: all in one session.

    What an engine with these drafts, in this order, and a fixed gamma does. phrases: a table that is taken before
    `draft`, where lookup has nothing and the table's level is at least `least`; an engine has no such limit.
    """

    kind = "hybrid"

    def __init__(
        self,
        draft: Draft,
        lookup: NgramDraft | None = None,
        phrases: Draft | None = None,
        *,
        least: int = PHRASES_LEVEL,
    ) -> None:
        self.draft = draft
        self.reads_hidden = reads_hidden(draft)
        self._front: list[tuple[Draft, int]] = [(lookup or NgramDraft(), 1)]
        if phrases is not None:
            self._front.append((phrases, least))
        self.name = "+".join([LOOKUP[:-1], *(front.name for front, _ in self._front[1:]), draft.name])

    @property
    def front(self) -> list[dict[str, str | int]]:
        """What is asked before the draft, in order, and the level from which on it is taken."""
        return [{"draft": draft.name, "least_level": least} for draft, least in self._front]

    @property
    def nbytes(self) -> int:
        return self.draft.nbytes + sum(draft.nbytes for draft, _ in self._front)

    def open(self, states: HiddenStates | None = None) -> DraftSession:
        front = [(draft.open(), least) for draft, least in self._front]
        return _HybridSession([*front, (self.draft.open() if states is None else self.draft.open(states), 1)])

    def close(self) -> None:
        """The drafts belong to somebody else."""


class _HybridSession:
    def __init__(self, sessions: Sequence[tuple[DraftSession, int]]) -> None:
        self._sessions = sessions

    def level(self, tokens: Sequence[int]) -> int:
        return next((level for session, least in self._sessions if (level := session.level(tokens)) >= least), 0)

    def propose(self, tokens: Sequence[int], gamma: int, choose: Choose, *, floor: float = 0.0) -> Proposal:
        for session, least in self._sessions:
            if session.level(tokens) >= least:
                return session.propose(tokens, gamma, choose, floor=floor)
        return Proposal()

    def crop(self, length: int) -> None:
        for session, _ in self._sessions:
            session.crop(length)

    def close(self) -> None:
        for session, _ in self._sessions:
            session.close()


def calibration_error(pairs: Iterable[tuple[float, bool]], bins: int = _BINS) -> float | None:
    """Expected calibration error: the mean distance between confidence and share of hits over `bins` equal bins of
    confidence, weighted by their pairs. None without pairs. Raises ValueError for a confidence outside [0, 1]."""
    table = np.array([(confidence, hit) for confidence, hit in pairs], np.float64).reshape(-1, 2)
    if not len(table):
        return None
    confidence, hit = table.T
    if not ((confidence >= 0) & (confidence <= 1)).all():
        raise ValueError("confidences must lie in 0 .. 1")
    place = np.minimum((confidence * bins).astype(int), bins - 1)
    gaps = np.bincount(place, confidence - hit, bins)
    return float(np.abs(gaps).sum() / len(table))


def coverage(vocabulary: npt.NDArray[np.integer], trajectories: Iterable[Trajectory]) -> tuple[int, int]:
    """(tokens of the answers that a draft with this reduced vocabulary can propose, tokens it could be asked for)."""
    known, total = 0, 0
    for trajectory in trajectories:
        asked = np.asarray(trajectory.answer[1:])
        known += int(np.isin(asked, vocabulary).sum())
        total += len(asked)
    return known, total
