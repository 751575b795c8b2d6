"""`--soak`: mixed requests for a long time, some of which leave, are late, or are wrong, under a watch.

Looked at are texts, memory, threads, files, and requests that do not move. It ends with a verdict.
"""

from __future__ import annotations

import asyncio
import faulthandler
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil

from edgespec.bench.load.arrivals import bursty
from edgespec.bench.load.records import Ask, Sample, Served
from edgespec.bench.load.runner import GRACE_S, run
from edgespec.bench.load.system import Handle, System
from edgespec.bench.load.texts import Difference, differs_at
from edgespec.decoding.params import SamplingParams
from edgespec.errors import EdgespecError, QueueFullError

STUCK_S = 60.0  # without a sign of life although there is work
SHORTEST_S = 240.0  # below that, growth of memory says nothing
_LOOK_S = 1.0
_SETTLE_S = 5.0
_GROWTH, _GROWTH_BYTES = 0.05, 24 << 20
_MORE_THREADS, _MORE_FILES = 2, 4

# What a request does, and how often of 100. wrong: it must be refused at once, with a message.
KINDS = {
    "whole": 44, "leaves": 15, "early": 8, "deadline": 8, "slow": 6, "unread": 6, "seeded": 8, "wrong": 5,
}  # fmt: skip
_TO_THE_END = ("whole", "slow", "unread", "seeded")
_NO_TOKEN = 1 << 30


class Look(NamedTuple):
    """What the process was at a time (seconds since the beginning)."""

    time: float
    rss: int
    threads: int
    files: int
    running: int
    queued: int


class Finding(NamedTuple):
    """One line of the verdict."""

    name: str
    ok: bool
    detail: str


@dataclass
class Soaked:
    """What came of it. counts: by kind and how it ended. stuck: requests that did not move, or did not end."""

    seconds: float = 0.0
    interrupted: bool = False
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    looks: list[Look] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    compared: int = 0
    differences: list[Difference] = field(default_factory=list)
    state: Mapping[str, Any] = field(default_factory=dict)
    submitted: int = 0


@dataclass
class _Moving:
    """A request on its way. progress: when something last came of it, or it got from the queue into a batch."""

    handle: Handle
    kind: str
    progress: float
    status: str = "queued"


class Soak:
    """One soak of `seconds` at `rate` requests a second in bursts. asks: the prompts, each with the longest answer.

    stacks: where all threads' stacks go if the event loop itself stops. tell: called now and then with one line.
    """

    def __init__(
        self,
        system: System,
        asks: Sequence[Ask],
        *,
        seconds: float,
        rate: float,
        seed: int = 0,
        stuck_s: float = STUCK_S,
        stacks: IO[str] | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._system, self._asks, self._seconds, self._rate, self._seed = system, list(asks), seconds, rate, seed
        self._stuck_s, self._stacks, self._tell = stuck_s, stacks, tell
        self._rng = random.Random(f"soak {seed}")
        self._moving: dict[int, _Moving] = {}
        self._last = 0.0  # when anything moved
        self._ending = False  # what runs is cancelled now
        self._greedy: dict[str, tuple[int, ...]] = {}
        self._seeded: dict[str, tuple[int, ...]] = {}
        self.soaked = Soaked()

    def run(self) -> Soaked:
        """Answers alone first, then the load, then what is left is waited for. After Ctrl-C with what there is."""
        for ask in self._asks:
            self._tell(f"alone: {ask.name}")
            self._greedy[ask.name] = tuple(self._system.alone(ask.ids, _greedy(ask.new)).token_ids)
            self._seeded[ask.name] = tuple(self._system.alone(ask.ids, _sampled(ask)).token_ids)
        self.soaked.interrupted = run(self._load)
        return self.soaked

    async def _load(self, stop: asyncio.Event) -> None:
        self._clock = asyncio.get_running_loop().time
        self._begin = self._clock()
        arrivals = bursty(self._rate, self._seconds, self._seed)
        watching = asyncio.create_task(self._watch())
        unwatch = self._system.watch(self._batch)
        tasks: list[asyncio.Task[None]] = []
        try:
            for number, arrival in enumerate(arrivals):
                if await _stopped(stop, arrival.at - self._now()) or self.soaked.stuck:
                    break
                tasks.append(asyncio.create_task(self._request(number)))
                tasks = [task for task in tasks if not task.done()]
            self.soaked.seconds = self._now()
            await self._rest(tasks, stop)
            await self._settle()
        finally:
            unwatch()
            watching.cancel()
            if self._stacks is not None:
                faulthandler.cancel_dump_traceback_later()

    def _batch(self, sample: Sample) -> None:
        """From the serving thread: something moves, whether anybody reads it or not."""
        if sample.emitted:
            self._last = self._now()

    def _now(self) -> float:
        return self._clock() - self._begin

    async def _rest(self, tasks: Sequence[asyncio.Task[None]], stop: asyncio.Event) -> None:
        """Wait for what runs, or cancel it: it must end one way or the other."""
        if tasks and not stop.is_set() and not self.soaked.stuck:
            _, pending = await asyncio.wait(tasks, timeout=4 * self._stuck_s)
            if pending and not self.soaked.stuck:
                self.soaked.stuck += [f"{n} ({m.kind}, {m.handle.status}) did not end" for n, m in self._moving.items()]
        self._ending = True
        for moving in self._moving.values():
            moving.handle.cancel("the soak ended")
        left = [task for task in tasks if not task.done()]
        if left:
            await asyncio.wait(left, timeout=GRACE_S)
        self.soaked.stuck += [
            f"{number} ({m.kind}, {m.handle.status}) did not end when it was cancelled"
            for number, m in self._moving.items()
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _settle(self) -> None:
        """What the system holds when all requests have ended: it may need a moment to put the last ones away."""
        until = self._now() + _SETTLE_S
        while True:
            self.soaked.state = state = dict(self._system.state())
            held = state.get("running") or state.get("queued") or state.get("pool_free") != state.get("pool_total")
            if not held or self._now() > until:
                return
            await asyncio.sleep(0.05)

    # One request

    async def _request(self, number: int) -> None:
        rng = random.Random(f"request {self._seed} {number}")
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        ended = "failed"
        try:
            ended = self._wrong(rng) if kind == "wrong" else await self._right(number, kind, rng)
        except QueueFullError:
            ended = "refused"
        except Exception as error:  # any: it is what the soak looks for
            self.soaked.errors.append(f"request {number} ({kind}): {type(error).__name__}: {error}")
        finally:
            self._moving.pop(number, None)
            counts = self.soaked.counts.setdefault(kind, {})
            counts[ended] = counts.get(ended, 0) + 1

    def _wrong(self, rng: random.Random) -> str:
        """Requests that must be refused before anything is queued."""
        prompts: list[Any] = ["", [-1, 2], [1] * (self._system.context + 1), [_NO_TOKEN], [{"role": 7}], 5]
        prompt = rng.choice(prompts)
        try:
            handle = self._system.submit(prompt, _greedy(8))
        except QueueFullError:
            raise
        except EdgespecError:
            return "rejected"
        handle.cancel("it should not be there")
        raise EdgespecError(f"a wrong prompt ({str(prompt)[:40]}) was taken")

    async def _right(self, number: int, kind: str, rng: random.Random) -> str:
        ask = rng.choice(self._asks)
        params = _sampled(ask) if kind == "seeded" else _greedy(rng.choice((ask.new, ask.new, max(ask.new // 3, 1))))
        deadline = rng.uniform(0.05, 3.0) if kind == "deadline" else None
        self.soaked.submitted += 1
        handle = self._system.submit(list(ask.ids), params, deadline_s=deadline)
        moving = self._moving[number] = _Moving(handle, kind, self._now())
        ids = await self._read(moving, rng)
        result = handle.result(GRACE_S)
        if result.finish_reason == "cancelled" and kind in _TO_THE_END and not self._ending:
            raise EdgespecError("it was cancelled although nobody asked for that")
        if kind not in ("unread", "leaves") and tuple(result.token_ids) != tuple(ids):
            raise EdgespecError("the pieces that came are not the tokens of the result")
        cut = result.finish_reason == "cancelled" or len(result.token_ids) == params.max_new_tokens
        self._compare(number, kind, ask, tuple(result.token_ids), cut)
        return "cancelled" if result.finish_reason == "cancelled" else "finished"

    async def _read(self, moving: _Moving, rng: random.Random) -> list[int]:
        """Read as this kind of client does."""
        handle, pieces = moving.handle, 0
        ids: list[int] = []
        leaves_after = rng.randrange(1, 8)
        if moving.kind == "early":
            await asyncio.sleep(rng.choice((0.0, 0.01, 0.2)))
            handle.cancel("early")
        if moving.kind == "unread":
            while handle.status not in ("finished", "cancelled", "failed"):
                await asyncio.sleep(0.1)
            return ids
        async for delta in handle:
            ids += delta.token_ids
            pieces += 1
            moving.progress = self._last = self._now()
            if moving.kind == "slow":
                await asyncio.sleep(0.2)
            if moving.kind == "leaves" and pieces >= leaves_after:
                handle.cancel("the client left")
                break
        while handle.status not in ("finished", "cancelled", "failed"):  # one that left ends within a batch or two
            await asyncio.sleep(0.01)
        return ids

    def _compare(self, number: int, kind: str, ask: Ask, ids: tuple[int, ...], cut: bool) -> None:
        expected = (self._seeded if kind == "seeded" else self._greedy)[ask.name]
        if not ids:
            return
        self.soaked.compared += 1
        served = Served(number, ask.name, 0.0, len(ask.ids), outcome="unfinished" if cut else "finished", ids=ids)
        at = differs_at(served, expected)
        if at is not None:
            left, right = (text[at] if at < len(text) else None for text in (ids, expected))
            if kind == "seeded":  # what was drawn says nothing about ties: any difference is a fault
                left = right = None
            before = (*ask.ids, *ids[:at])
            name = f"{ask.name} ({kind})"
            self.soaked.differences.append(Difference("", self._rate, 0, number, name, at, before, left, right))

    # The watchdog

    async def _watch(self) -> None:
        process, shown = psutil.Process(), 0.0
        while True:
            if self._stacks is not None:  # armed anew: fires only if this loop stands still
                faulthandler.dump_traceback_later(2 * self._stuck_s, file=self._stacks)
            look = self._look(process)
            self.soaked.looks.append(look)
            self._find_stuck(look)
            if look.time >= shown:
                shown = look.time + 15
                self._tell(
                    f"{look.time:.0f} s: {self.soaked.submitted} requests, {look.running} running, "
                    f"{look.queued} queued, {look.rss / 2**20:.0f} MiB, {len(self.soaked.errors)} errors"
                )
            await asyncio.sleep(_LOOK_S)

    def _look(self, process: psutil.Process) -> Look:
        state = self._system.state()
        files = len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else process.num_fds()
        running, queued = int(state.get("running", 0)), int(state.get("queued", 0))
        return Look(self._now(), process.memory_info().rss, process.num_threads(), files, running, queued)

    def _find_stuck(self, look: Look) -> None:
        """No piece for anybody, or a running request of which nothing comes. One that waits in the queue is not."""
        limit = look.time - self._stuck_s
        for moving in self._moving.values():
            if moving.handle.status != moving.status:
                moving.status, moving.progress = moving.handle.status, look.time
        if self.soaked.stuck or not self._moving:
            self._last = look.time if not self._moving else self._last
            return
        still = [
            f"{number} ({m.kind}, {m.handle.status}) has not moved for {look.time - m.progress:.0f} s"
            for number, m in self._moving.items()
            if m.progress < limit and (self._last < limit or (m.handle.status == "running" and m.kind != "unread"))
        ]
        self.soaked.stuck += still


async def _stopped(stop: asyncio.Event, seconds: float) -> bool:
    """Wait so long, or until `stop` is set; whether it is."""
    if seconds <= 0:
        await asyncio.sleep(0)
        return stop.is_set()
    try:
        await asyncio.wait_for(stop.wait(), seconds)
    except asyncio.TimeoutError:
        return False
    return True


def _greedy(new: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=new)


def _sampled(ask: Ask) -> SamplingParams:
    return SamplingParams(max_new_tokens=ask.new, temperature=0.8, top_p=0.95, seed=sum(ask.ids) % 1000)


def verdict(soaked: Soaked, faults: int) -> list[Finding]:
    """All that was looked at. faults: differences that are no near ties."""
    state, looks = soaked.state, soaked.looks
    ended = sum(sum(counts.values()) for kind, counts in soaked.counts.items() if kind != "wrong")
    found = [
        Finding("no stuck request", not soaked.stuck, "; ".join(soaked.stuck[:3]) or "all moved, and ended"),
        Finding("no error", not soaked.errors, "; ".join(soaked.errors[:3]) or "none"),
        Finding(
            "texts as alone", not faults,
            f"{soaked.compared} compared, {len(soaked.differences)} differ, {faults} of them no near tie",
        ),
        Finding("none lost", ended == soaked.submitted, f"{soaked.submitted} submitted, {ended} ended"),
        Finding(
            "nothing left over", not state.get("running") and not state.get("queued"),
            f"{state.get('running', 0)} running, {state.get('queued', 0)} queued at the end",
        ),
    ]  # fmt: skip
    if "pool_total" in state:
        free, total = state["pool_free"], state["pool_total"]
        found.append(Finding("KV blocks come back", free == total, f"{free} of {total} are free at the end"))
    return [*found, *_growth(looks, soaked.seconds)]


def _growth(looks: Sequence[Look], seconds: float) -> list[Finding]:
    """The last quarter beside the second: the first one is for warming up."""
    if seconds < SHORTEST_S or len(looks) < 40:
        return [Finding("memory", True, f"{seconds:.0f} s are too short to tell")]
    second = [look for look in looks if 0.25 * seconds <= look.time < 0.5 * seconds]
    last = [look for look in looks if 0.75 * seconds <= look.time <= seconds]
    before, after = (statistics.median(look.rss for look in part) for part in (second, last))
    found = [
        Finding(
            "memory is flat", after - before <= max(_GROWTH * before, _GROWTH_BYTES),
            f"{before / 2**20:.0f} MiB in the second quarter, {after / 2**20:.0f} in the last",
        )
    ]  # fmt: skip
    for name, most in (("threads", _MORE_THREADS), ("files", _MORE_FILES)):
        early, late = (statistics.median(getattr(look, name) for look in part) for part in (second, last))
        found.append(Finding(f"{name} do not grow", late - early <= most, f"{early:.0f}, then {late:.0f}"))
    return found


def to_json(soaked: Soaked, findings: Sequence[Finding], about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything, for the run's folder."""
    return {
        **about,
        "seconds": soaked.seconds,
        "interrupted": soaked.interrupted,
        "verdict": [finding._asdict() for finding in findings],
        "passed": all(finding.ok for finding in findings),
        "counts": soaked.counts,
        "errors": soaked.errors[:200],
        "stuck": soaked.stuck,
        "state": dict(soaked.state),
        "looks": [list(look) for look in soaked.looks],
    }
