"""What is run in which order, how long that may take, and what is refused because it could never end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from edgespec.bench.load.arrivals import MAKE, MOST_ARRIVALS, PARTS, POISSON, STEPS, Arrival, mean_rate, scaled, spans
from edgespec.bench.load.system import Arm
from edgespec.errors import ConfigError

# Of what plain decoding of a full batch can do: from nearly idle to more than it can take.
AUTO_LOADS = (0.1, 0.4, 0.7, 1.0, 1.3)


class Turn(NamedTuple):
    """One stretch to run: `order` is its place."""

    order: int
    rate: float
    repeat: int
    arm: Arm


class Part(NamedTuple):
    """Of a load that changes. times: the rate, in mean rates. begin, end: seconds of a stretch."""

    name: str
    times: float
    begin: float
    end: float


class Capacity(NamedTuple):
    """Of plain decoding with every place taken: tokens a second, and mean tokens of an answer."""

    tokens_per_second: float
    answer_tokens: float

    @property
    def requests_per_second(self) -> float:
        return self.tokens_per_second / self.answer_tokens


@dataclass(frozen=True)
class Schedule:
    """rates: requests a second; empty = `AUTO_LOADS` of the capacity, or a trace as it was recorded. seconds: in
    which requests come; limit_s: for all of them to end; most_s: of the whole run.
    """

    arms: tuple[Arm, ...]
    rates: tuple[float, ...]
    repeats: int
    seconds: float
    warm_up: float
    limit_s: float
    most_s: float
    kind: str = POISSON
    seed: int = 0
    trace: tuple[Arrival, ...] = ()

    def check(self) -> None:
        """Raises ConfigError for what can be seen to be wrong before a model is loaded."""
        if not 0 <= self.warm_up < self.seconds:
            raise ConfigError(
                f"--warm-up {self.warm_up:g} leaves nothing of --seconds {self.seconds:g}: it is their beginning that "
                "does not count."
            )
        if self.limit_s < self.seconds:
            raise ConfigError(f"--limit {self.limit_s:g} is less than the {self.seconds:g} s in which requests come.")
        for rate in self.rates:
            if rate * self.seconds > MOST_ARRIVALS:
                raise ConfigError(
                    f"--rates {rate:g}: {rate * self.seconds:,.0f} requests in {self.seconds:g} s are more than the "
                    f"{MOST_ARRIVALS:,} that a stretch may have."
                )
        if self.stretches * self.seconds > self.most_s:
            raise ConfigError(
                f"{self.stretches} stretches (rates x repeats x arms) of {self.seconds:g} s are at least "
                f"{self.stretches * self.seconds / 60:.1f} minutes; --most-minutes allows {self.most_s / 60:g}."
            )

    @property
    def stretches(self) -> int:
        """How many there are to run."""
        rates = len(self.rates) or (1 if self.trace else len(AUTO_LOADS))
        return rates * self.repeats * len(self.arms)

    def settled(self, capacity: Capacity) -> Schedule:
        """With rates, all of which end within the limit even without speculation. Raises ConfigError."""
        rates = self.rates
        if not rates and self.trace:
            rates = (mean_rate(self.trace),)
        elif not rates:
            rates = tuple(float(f"{load * capacity.requests_per_second:.2g}") for load in AUTO_LOADS)
        for rate in rates:
            needed = rate * self.seconds / capacity.requests_per_second
            if needed > self.limit_s:
                most = self.limit_s / self.seconds * capacity.requests_per_second
                raise ConfigError(
                    f"At {rate:g} requests a second {self.seconds:g} s of arrivals take about {needed:.0f} s without "
                    f"speculation (this machine does {capacity.requests_per_second:.2g} a second), more than --limit "
                    f"{self.limit_s:g}: the queue would never be worked off. Give a rate below {most:.2g}, or more "
                    "--limit."
                )
        made = replace(self, rates=rates)
        made.check()
        return made

    def turns(self) -> list[Turn]:
        """Arms take turns on the same arrivals, another one first each time: a machine that gets slower does so for
        all of them."""
        found: list[Turn] = []
        for repeat in range(self.repeats):
            for place, rate in enumerate(self.rates):
                first = (repeat * len(self.rates) + place) % len(self.arms)
                for arm in (*self.arms[first:], *self.arms[:first]):
                    found.append(Turn(len(found), rate, repeat, arm))
        return found

    def arrivals(self, rate: float, repeat: int) -> list[Arrival]:
        """The same for every arm."""
        if self.trace:
            made = scaled(self.trace, rate) if rate != mean_rate(self.trace) else list(self.trace)
            return [arrival for arrival in made if arrival.at < self.seconds]
        return MAKE[self.kind](rate, self.seconds, seed_of(self.seed, self.rates.index(rate), repeat))

    def parts(self) -> list[Part]:
        """Of a load that changes, what counts of each part of it; of a steady one, none."""
        if self.kind != STEPS:
            return []
        counted = [(max(begin, self.warm_up), end) for begin, end in spans(self.seconds)]
        return [Part(name, times, *span) for (name, times), span in zip(PARTS, counted) if span[0] < span[1]]


def seed_of(seed: int, place: int, repeat: int) -> int:
    """Of the arrivals and of the prompts' order at one rate in one repeat."""
    return (seed * 1009 + place) * 1009 + repeat


def parse_arms(planners: Sequence[str], elastic: str) -> tuple[Arm, ...]:
    """An arm for each planner, with --elastic both two. Raises ConfigError for none, or one that is there twice."""
    choices = {"on": (True,), "off": (False,), "both": (True, False)}[elastic]
    arms = [Arm(planner, choice) for planner in planners for choice in choices]
    if not arms:
        raise ConfigError("--planners names nobody.")
    for arm in arms:
        if arms.count(arm) > 1:
            raise ConfigError(f"--planners has {arm.planner} twice.")
    return tuple(arms)
