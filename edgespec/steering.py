"""Between rounds and the working set: features to the ranker, its ranking to the policy, the policy's wish to memory.

One `Scheduler` belongs to an engine, one `Steering` to an answer. The ranker runs in a thread of its own, and only its
newest question counts; policy and working set are asked on the decoding thread, which costs microseconds and never
waits (except under a policy that asks for it, `mab-sync`; those seconds are counted as exposed).
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from edgespec.memory.states import DraftState
from edgespec.memory.working_set import State, WorkingSet
from edgespec.telemetry.trace import NULL_TRACER, NullTracer, Tracer
from predictor.costs import CostTable
from predictor.features import PROMPT_WINDOW, RECENT, lately
from predictor.holding import rounds_left
from predictor.planner import Candidate, Observation
from predictor.policies import Holding, Policy, View

if TYPE_CHECKING:
    from edgespec.decoding.session import DraftStatus, Session
    from predictor.features import TextFeatures

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

FloatArray = npt.NDArray[np.float32]
_FAILURES = 3  # of the ranker in a row, until it is given up; each answer makes good half of one
_FIRST_WAIT = 0.005  # seconds, before the prefill: a load that starts now is done when the first round begins
_SECOND_WAIT = 0.001  # the same, before the first round
_PATIENCE = 5.0  # seconds, after which a question that was not answered counts as a failure of the ranker
_MOST_TEXTS = 32  # whose questions and answers are kept; texts end without a word
_WAIT_SECONDS = 30.0  # at most, for a load under a policy that waits

RANKER_LANE = "ranker"


class Ranks(Protocol):
    """Expected acceptance of every draft from a feature vector, see `predictor.ranker.Ranker`."""

    def rank(self, features: FloatArray) -> Mapping[str, float]: ...


def _put(kept: dict[int, _T], ticket: int, value: _T) -> None:
    """Add it, and drop the oldest of too many."""
    kept[ticket] = value
    if len(kept) > _MOST_TEXTS:
        del kept[next(iter(kept))]


class RankerThread:
    """Answers questions of one ranker: of each text (a ticket) the newest only, the text that asked last first.

    A ranker that fails three times in a row, or more often than one time in three, or does not answer, is given up.
    """

    def __init__(self, ranker: Ranks, tracer: Tracer | NullTracer = NULL_TRACER) -> None:
        self._ranker = ranker
        self._tracer = tracer
        # Only ever entered as `with lock`: entering a condition runs Python code, in which Ctrl-C could strike.
        self._lock = threading.Lock()
        self._asked = threading.Condition(self._lock)
        self._questions: dict[int, FloatArray] = {}
        self._answers: dict[int, Mapping[str, float]] = {}
        self._closed = False
        self._failures = 0
        self._since: float | None = None  # when the question was taken up that is being answered
        self.reason: str | None = None  # why it was given up
        self.seconds = 0.0
        self.answers = 0
        self._thread = threading.Thread(target=self._run, name="edgespec-ranker", daemon=True)
        self._thread.start()

    def ask(self, ticket: int, features: FloatArray) -> None:
        """Put a question; one of the same text that waits still is replaced."""
        since = self._since
        if self.reason is None and since is not None and time.perf_counter() - since > _PATIENCE:
            self._give_up(f"it has not answered for {_PATIENCE:.0f} seconds")
        if self.reason is not None:
            return
        with self._lock:
            self._questions.pop(ticket, None)
            _put(self._questions, ticket, features)
            self._asked.notify_all()

    def take(self, ticket: int, timeout: float = 0.0) -> Mapping[str, float] | None:
        """The newest answer to a question of that ticket, once; None if there is none (within `timeout` seconds)."""
        if timeout <= 0 and ticket not in self._answers:  # no lock in most rounds
            return None
        with self._lock:
            if timeout > 0:
                self._asked.wait_for(lambda: ticket in self._answers or self.reason is not None, timeout)
            return self._answers.pop(ticket, None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._asked.notify_all()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._asked.wait_for(lambda: self._closed or bool(self._questions))
                if self._closed:
                    return
                ticket, features = self._questions.popitem()
            begin = time.perf_counter_ns()
            self._since = begin * 1e-9
            try:
                ranking = {name: float(rate) for name, rate in self._ranker.rank(features).items()}
            except Exception as error:  # whatever a file made by somebody else does: text goes on by observation
                self._failed(error)
                continue
            finally:
                self._since = None
            end = time.perf_counter_ns()
            self._failures = max(self._failures - 1, 0)
            self.seconds += (end - begin) * 1e-9
            self.answers += 1
            told = {name: round(rate, 3) for name, rate in ranking.items()}
            self._tracer.event("rank", begin, end, lane=RANKER_LANE, ranking=str(told))
            with self._lock:
                _put(self._answers, ticket, ranking)
                self._asked.notify_all()

    def _failed(self, error: Exception) -> None:
        self._failures += 2
        if self._failures >= 2 * _FAILURES and self.reason is None:
            self._give_up(f"{type(error).__name__}: {error}")

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        _log.warning("the ranker failed, drafts are chosen by observation alone: %s", reason)


class Scheduler:
    """What the answers of one engine share: policy, working set, ranker.

    drafts: the statuses of all drafts with weights, in a fixed order. costs: the policy's measured seconds.
    features: makes an empty `TextFeatures`; None = there is no ranker.
    """

    def __init__(
        self,
        policy: Policy,
        working_set: WorkingSet,
        drafts: Sequence[DraftStatus],
        costs: CostTable,
        *,
        ranker: Ranks | None = None,
        features: Callable[[], TextFeatures] | None = None,
        tracer: Tracer | NullTracer = NULL_TRACER,
    ) -> None:
        self.policy = policy
        self.working_set = working_set
        self.drafts = list(drafts)
        self.costs = costs
        self.ranker = None if ranker is None else RankerThread(ranker, tracer)
        self.features = features if ranker is not None else None
        self.exposed_seconds = 0.0  # in which rounds waited for loads
        self.pinned: str | None = None  # asked for by name: what is held is not the policy's business then
        self.tracer = tracer
        self._tickets = 0
        self._lock = threading.Lock()

    def text(self, params_limit: int) -> Steering:
        """The steering of one answer of at most `params_limit` new tokens."""
        return Steering(self, self.ticket(), params_limit)

    def ticket(self) -> int:
        """A number that no other answer has: its questions to the ranker bear it."""
        with self._lock:
            self._tickets += 1
            return self._tickets

    def pin(self, name: str | None) -> None:
        """Hold this draft and no other, whatever the policy wants; None = let the policy say again what to hold."""
        with self._lock:
            self.pinned = name
            if name is not None:
                self.working_set.retarget([name], reason="asked for", in_use=name)

    def retarget(self, wanted: Sequence[str], reason: str, *, in_use: str | None = None) -> bool:
        """Pass a wish on, unless a draft was pinned while it was thought of; whether it counts."""
        with self._lock:
            if self.pinned is not None:
                return False
            self.working_set.retarget(wanted, reason=reason, in_use=in_use)
            return True

    def states(self) -> Mapping[str, DraftState]:
        """All drafts with weights, as the working set has them now."""
        return self.working_set.states()

    def settle(self) -> None:
        """What was wished for has been passed on after this call; here it always has."""

    def hold(
        self, *, rounds: int, rounds_left: float, active: str | None, ranking: Mapping[str, float] | None
    ) -> Holding:
        """Ask the policy what to hold, and pass it on. Waits only if the policy says so (`mab-sync`)."""
        if self.pinned is not None:
            return Holding((), "")
        states = self.states()
        usable = [status.name for status in self.drafts if status.active]
        by_state: dict[State, set[str]] = {}
        for name, state in states.items():
            by_state.setdefault(state.state, set()).add(name)
        given_up = {status.name for status in self.drafts if not status.active}
        view = View(
            round=rounds,
            resident=frozenset(by_state.get(State.RESIDENT, ())) - given_up,
            loading=frozenset(by_state.get(State.LOADING, ())),
            failed=frozenset(by_state.get(State.FAILED, ())) | given_up,
            capacity=self.working_set.capacity,
            drafts=tuple(usable),
            active=active,
            ranking=ranking,
            rounds_left=rounds_left,
        )
        holding = self.policy.hold(view)
        if holding is None or not self.retarget(holding.wanted, holding.reason, in_use=active):
            return Holding((), "")
        if holding.wait and holding.wanted:
            self.settle()
            begin = time.perf_counter()
            self.working_set.wait_for(holding.wanted[0], _WAIT_SECONDS)
            self.exposed_seconds += time.perf_counter() - begin
        return holding

    def close(self) -> None:
        if self.ranker is not None:
            self.ranker.close()


def _guarded(method: Callable[..., _T]) -> Callable[..., _T | None]:
    """What a policy, a ranking or the books may raise ends the steering of this answer, never the answer."""

    @functools.wraps(method)
    def guarded(self: Steering, *arguments: Any) -> _T | None:
        if self.given_up:
            return None
        try:
            return method(self, *arguments)
        except Exception as error:
            self.given_up = True
            cause = f"{type(error).__name__}: {error}"
            _log.warning("the working set is left as it is for this answer, steering it failed: %s", cause)
            return None

    return guarded


class Steering:
    """Looks after the working set while one answer is made (see `edgespec.decoding.watching.Steering`)."""

    def __init__(self, scheduler: Scheduler, ticket: int, limit: int) -> None:
        self._scheduler = scheduler
        self._policy = scheduler.policy
        self._ticket = ticket
        self._limit = limit
        self._features: TextFeatures | None = None
        self._prompt_mean: FloatArray | None = None
        self._recent: dict[str, float] = {}
        self._ranking: Mapping[str, float] | None = None
        self._active: str | None = None
        self._rounds = self._emitted = 0
        self._due = 0
        self._waiting = False  # for an answer of the ranker
        self.given_up = False  # after something failed

    @_guarded
    def begin(self, prompt: Sequence[int]) -> None:
        self._policy.begin()
        if self._scheduler.features is not None:
            self._features = self._scheduler.features()
            self._features.begin(list(prompt))
            self._ask(None)
            self._take(_FIRST_WAIT)
        else:
            self._hold()

    @_guarded
    def chunk(self) -> None:
        self._take()

    @_guarded
    def first(self, tokens: Sequence[int], session: Session) -> None:
        if self._features is None:
            return
        self._features.push(list(tokens))
        # Before the prefill only the prompt's words were known; its hidden states say twice as much.
        self._ask(session)
        self._take(_SECOND_WAIT)
        self._due = max(self._policy.interval(), 1)

    @_guarded
    def saw(self, draft: str, right: bool) -> None:
        self._recent[draft] = lately(self._recent.get(draft), right)

    @_guarded
    def read_up(self, draft: str, tokens: int, seconds: float) -> None:
        self._scheduler.costs.observe_catch_up(draft, tokens, seconds)

    @_guarded
    def preferred(self) -> str | None:
        name = self._policy.preferred()
        return name if isinstance(name, str) else None

    @_guarded
    def reads(self) -> str | None:
        name = self._policy.reads()
        return name if isinstance(name, str) else None

    @_guarded
    def pays_to_read(self, lagging: Candidate, candidates: Sequence[Candidate]) -> bool:
        return self._policy.pays_to_read(lagging, candidates)

    @_guarded
    def informed(self) -> bool:
        return self._ranking is not None and self._policy.informed() is True

    @_guarded
    def round(self, observation: Observation, emitted: Sequence[int], session: Session) -> None:
        self._rounds += 1
        self._emitted += len(emitted)
        status = None if observation.draft is None else session.statuses.get(observation.draft)
        if status is not None and status.loadable:
            self._active = observation.draft
        if self._features is not None:
            self._features.push(list(emitted))
        self._take()
        if self._rounds < self._due:
            return
        self._due = self._rounds + max(self._policy.interval(), 1)
        if self._features is None or self._waiting:  # a ranker that takes its time must not keep memory as it is
            self._hold()
        if self._features is not None:
            self._ask(session)

    def _take(self, timeout: float = 0.0) -> None:
        """A ranking that came in: tell the policy, and let it say what to hold."""
        ranker = self._scheduler.ranker
        ranking = None if ranker is None else ranker.take(self._ticket, timeout)
        if ranking is not None:
            self._waiting = False
            self._ranking = ranking
            self._policy.rank(ranking)
            self._hold()

    def _ask(self, session: Session | None) -> None:
        """Ask for a ranking of the text as it is now; without a session, of the prompt's text alone."""
        ranker = self._scheduler.ranker
        if ranker is None or self._features is None:
            return
        if ranker.reason is not None:
            self._features = None
            self._hold()
            return
        recent = None
        states = None if session is None else session.states
        end = 0 if session is None or states is None else min(states.end, session.valid)  # beyond: rejected guesses
        if states is not None and end > states.begin:
            rows = states.rows(states.begin, end)
            if self._prompt_mean is None:
                prompt_end = max(len(rows) - self._emitted, 1)
                self._prompt_mean = rows[max(prompt_end - PROMPT_WINDOW, 0) : prompt_end].mean(axis=0)
            recent = rows[-RECENT:]
        vector = self._features.vector(recent, self._prompt_mean, self._recent)
        ranker.ask(self._ticket, vector)
        self._waiting = True

    def _hold(self) -> None:
        left = rounds_left(self._limit, self._emitted, self._rounds)
        self._scheduler.hold(rounds=self._rounds, rounds_left=left, active=self._active, ranking=self._ranking)


def describe(states: Mapping[str, Any]) -> str:
    """The working set on one line: what is resident, what is on its way."""
    resident = [name for name, state in states.items() if state.state is State.RESIDENT]
    loading = [name for name, state in states.items() if state.state is State.LOADING]
    text = ", ".join(resident) or "none"
    return text + (f" (loading {', '.join(loading)})" if loading else "")
