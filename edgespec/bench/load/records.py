"""What a load run leaves behind: one line a request, one a batch, one a stretch. Times: seconds from its beginning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

# finished: the whole answer came. unfinished: time was up, the bench cancelled it. refused: the queue was full.
# failed: an error. Only what finished, or came before the end, has times; `finished` of the last two is when they did.
Outcome = Literal["finished", "unfinished", "refused", "failed"]


class Ask(NamedTuple):
    """One request to be made. at: seconds. ids: the prompt's tokens. name: of the prompt. new: most new tokens."""

    number: int
    at: float
    name: str
    ids: tuple[int, ...]
    new: int


@dataclass(slots=True)
class Served:
    """What became of one request.

    at: when it was to come; submitted: when it really was handed over. pieces: (time, tokens) of all that arrived.
    """

    number: int
    name: str
    at: float
    prompt_tokens: int
    submitted: float | None = None
    finished: float | None = None
    outcome: Outcome = "unfinished"
    error: str = ""
    pieces: list[tuple[float, int]] = field(default_factory=list)
    ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    reused_tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    reached: tuple[int, ...] = ()  # proposals that reached place i
    stood: tuple[int, ...] = ()  # those of them whose token at place i was accepted
    drafts: Mapping[str, int] = field(default_factory=dict)
    session: int | None = None  # of a closed loop: whose request it was

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.pieces)

    @property
    def first(self) -> float | None:
        """When its first token came."""
        return self.pieces[0][0] if self.pieces else None

    @property
    def ttft(self) -> float | None:
        """Seconds from the time it was to come to its first token: a late client counts against the engine."""
        return None if self.first is None else self.first - self.at

    @property
    def tpot(self) -> float | None:
        """Seconds of each token after the first piece; None where nothing came after it."""
        rest = self.tokens - self.pieces[0][1] if self.pieces else 0
        return (self.pieces[-1][0] - self.pieces[0][0]) / rest if rest else None

    @property
    def latency(self) -> float | None:
        """Seconds from the time it was to come to its end; only of an answer that is whole."""
        return None if self.finished is None or self.outcome != "finished" else self.finished - self.at

    def to_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "name": self.name,
            "at": round(self.at, 6),
            "submitted": _rounded(self.submitted),
            "finished": _rounded(self.finished),
            "outcome": self.outcome,
            "error": self.error,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "tokens": self.tokens,
            "ttft_s": _rounded(self.ttft),
            "tpot_s": _rounded(self.tpot),
            "latency_s": _rounded(self.latency),
            "pieces": [[round(time, 6), count] for time, count in self.pieces],
            "token_ids": list(self.ids),
            "proposed": self.proposed,
            "accepted": self.accepted,
            "reached": list(self.reached),
            "stood": list(self.stood),
            "drafts": dict(self.drafts),
            "session": self.session,
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Served:
        """Raises KeyError, TypeError or ValueError for anything else."""
        return cls(
            number=int(row["number"]), name=str(row["name"]), at=float(row["at"]),
            prompt_tokens=int(row["prompt_tokens"]), submitted=row["submitted"], finished=row["finished"],
            outcome=row["outcome"], error=str(row["error"]),
            pieces=[(float(time), int(count)) for time, count in row["pieces"]],
            ids=tuple(map(int, row["token_ids"])), finish_reason=row["finish_reason"],
            reused_tokens=int(row["reused_tokens"]), proposed=int(row["proposed"]), accepted=int(row["accepted"]),
            reached=tuple(map(int, row["reached"])), stood=tuple(map(int, row["stood"])),
            drafts={str(name): int(count) for name, count in row["drafts"].items()}, session=row["session"],
        )  # fmt: skip


class Sample(NamedTuple):
    """One batch of the loop. time: its end; seconds: how long it took. kv_free: share of all blocks, None where that is
    not known. gamma: mean of the running sequences' plans, None where none was decoding. resident: drafts in memory,
    None where that is not known. elastic: "lend" (the drafts' memory became KV blocks), "return", or "" for neither."""

    time: float
    seconds: float
    sequences: int
    rows: int
    queued: int
    gamma: float | None
    drafted: int
    accepted: int
    emitted: int
    kv_free: float | None
    resident: int | None
    elastic: str
    draft_seconds: float = 0.0
    target_seconds: float = 0.0


@dataclass(slots=True)
class Stretch:
    """One load of one arm: `rate` requests a second for `seconds`, the first `warm_up` of which do not count.

    order: its place in the run. ended: when the last request ended or was cancelled. busy: other processes' share of
    the processors meanwhile. rss: (time, bytes) of this process. stuck: which requests did not end although they were
    cancelled; such a stretch counts as interrupted, and is the last one.
    """

    arm: str
    rate: float
    repeat: int
    order: int
    seconds: float
    warm_up: float
    served: list[Served] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    ended: float = 0.0
    interrupted: bool = False
    stuck: str = ""
    busy: float = 0.0
    rss: list[tuple[float, int]] = field(default_factory=list)

    @property
    def window(self) -> tuple[float, float]:
        """What counts, in seconds: from the end of the warm-up to the last arrival's time (or the interruption)."""
        end = min(self.seconds, self.ended) if self.interrupted else self.seconds
        return min(self.warm_up, end), end

    def counted(self) -> Sequence[Served]:
        """The requests that came within the window."""
        begin, end = self.window
        return [one for one in self.served if begin <= one.at < end]

    def head(self) -> dict[str, Any]:
        """Everything but requests and batches."""
        return {
            "arm": self.arm,
            "rate": self.rate,
            "repeat": self.repeat,
            "order": self.order,
            "seconds": self.seconds,
            "warm_up": self.warm_up,
            "ended": self.ended,
            "interrupted": self.interrupted,
            "stuck": self.stuck,
            "busy": self.busy,
            "rss": [list(pair) for pair in self.rss],
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
