"""What a replay runs on, and what it comes to: recorded texts, the device, the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from predictor.costs import CostTable

Uint8 = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class TextTrace:
    """One answer, with what every draft would have done at every position of it.

    Column i belongs to the position at which i + 1 tokens of the answer are known (the first one comes with the
    prefill); an answer of L tokens has L - 1 columns.
    accepts: uint8 [drafts, L - 1], how many of a draft's first gamma_max guesses there are right.
    lookup_level, lookup_accepts: uint8 [L - 1], length of the match of prompt lookup, and how many of its guesses are
    right. confidences: uint8 [drafts, L - 1, gamma_max] in 255ths, each guess's chance by the draft itself; None = the
    drafts do not end their blocks early. levels: uint8 [L - 1] for drafts without weights, what they have to go on at
    each position (0 = nothing); those that are not named can always run.
    """

    domain: str
    prompt_length: int
    accepts: Uint8
    lookup_level: Uint8
    lookup_accepts: Uint8
    confidences: Uint8 | None = None
    name: str = ""
    levels: Mapping[str, Uint8] = field(default_factory=dict)

    def __post_init__(self) -> None:
        columns = self.accepts.shape[1] if self.accepts.ndim == 2 else -1
        if self.lookup_level.shape != (columns,) or self.lookup_accepts.shape != (columns,):
            raise ValueError(f"text {self.name or self.domain}: accepts has {columns} positions, lookup others")
        if self.confidences is not None and self.confidences.shape[:2] != self.accepts.shape:
            raise ValueError(f"text {self.name or self.domain}: confidences and accepts differ in shape")
        if any(level.shape != (columns,) for level in self.levels.values()):
            raise ValueError(f"text {self.name or self.domain}: accepts has {columns} positions, levels others")

    # What every replay of the text reads, as Python's own numbers, which rounds are faster with; made once.

    @cached_property
    def rights(self) -> list[list[int]]:
        """`accepts` by draft, and `lookup_accepts` at the end."""
        return [*self.accepts.tolist(), self.lookup_accepts.tolist()]

    @cached_property
    def grounds(self) -> dict[str, list[int]]:
        """`levels`."""
        return {name: level.tolist() for name, level in self.levels.items()}

    @cached_property
    def lookup_grounds(self) -> list[int]:
        """`lookup_level`."""
        return self.lookup_level.tolist()

    def chances(self, row: int) -> list[list[float]] | None:
        """By position and place the chance, by a draft itself, that its block is right so far; None = not recorded."""
        if self.confidences is None:
            return None
        made: list[list[float]] = np.cumprod(self.confidences[row] / 255.0, axis=-1).tolist()
        return made


Rankings = Callable[[TextTrace, int, Mapping[str, float]], Mapping[str, float] | None]
"""The ranking for a text when so many tokens of its answer are known (0 = from the prompt alone), and what was seen of
drafts in it: the share of their first tokens that was right lately."""


@dataclass(frozen=True)
class World:
    """The device of a replay. Times in seconds.

    names: of the rows of `accepts`. free: those of them without weights. costs: the true ones, from which the policy's
    own table may start (see `known_costs`). capacity: slots. resident: what they hold at first. slow_down: of work done
    while a draft loads. prefill: seconds per prompt token, in which loads go on but which are not counted. overhead: of
    each round besides: judging, and what the policy takes to plan and learn. window: tokens that a draft looks back at
    most. max_new_tokens: the limit that answers had (0 = each ended at its own). typical_tokens: few answers are taken
    to be longer, whatever the limit (0 = they are as long as the limit). interval: rounds between scheduling points,
    whatever the policy says (0 = as it says). prefetch: False = only the draft that is wanted most is ever loaded, and
    only from the first round on.
    """

    names: tuple[str, ...]
    costs: CostTable
    capacity: int = 2
    free: frozenset[str] = frozenset()
    resident: tuple[str, ...] = ()
    slow_down: float = 1.0
    prefill: float = 0.0
    overhead: float = 0.0
    window: int = 256
    max_new_tokens: int = 0
    typical_tokens: int = 0
    failing: frozenset[str] = frozenset()
    interval: int = 0
    prefetch: bool = True

    @property
    def weighted(self) -> tuple[str, ...]:
        """The drafts with weights."""
        return tuple(name for name in self.names if name not in self.free)

    def known_costs(self) -> CostTable:
        """A copy of the true costs, for a policy that measured them at start-up."""
        return CostTable.from_json(self.costs.to_json())


@dataclass(frozen=True)
class TextResult:
    """One text. tokens: without the first one, which comes with the prefill. fallbacks: rounds in which the draft the
    policy wanted most could not run: it was away, or still reading."""

    domain: str
    tokens: int
    seconds: float
    rounds: int
    fallbacks: int
    exposed_seconds: float
    share: Mapping[str, int]


@dataclass
class Outcome:
    """What a replay came to. hidden_seconds: of completed loads; exposed_seconds: of loads that were waited for."""

    texts: list[TextResult] = field(default_factory=list)
    share: Counter[str] = field(default_factory=Counter)
    gammas: Counter[int] = field(default_factory=Counter)
    loads: int = 0
    cancelled: int = 0
    switches: int = 0
    hidden_seconds: float = 0.0
    shadow_seconds: float = 0.0
    catch_up_seconds: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(text.tokens for text in self.texts)

    @property
    def seconds(self) -> float:
        return sum(text.seconds for text in self.texts)

    @property
    def rounds(self) -> int:
        return sum(text.rounds for text in self.texts)

    @property
    def speed(self) -> float:
        """Tokens per second of decoding, exposed loads included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def fallback_share(self) -> float:
        return sum(text.fallbacks for text in self.texts) / self.rounds if self.rounds else 0.0

    @property
    def exposed_seconds(self) -> float:
        return sum(text.exposed_seconds for text in self.texts)

    def domain_speed(self, domain: str) -> float:
        """Tokens per second of one domain's texts."""
        mine = [text for text in self.texts if text.domain == domain]
        return sum(text.tokens for text in mine) / max(sum(text.seconds for text in mine), 1e-12)
