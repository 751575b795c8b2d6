"""What is asked: prompts from a file, as token ids, dealt out to arrivals."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from edgespec.bench.load.arrivals import Arrival
from edgespec.bench.load.records import Ask
from edgespec.bench.prompts import LONG_TEXT
from edgespec.errors import ConfigError, PromptError
from edgespec.evaluation.prompts import Skipped, read_prompts

QUESTIONS = Path(__file__).parents[1] / "data" / "questions.jsonl"

Encode = Callable[[str], list[int]]  # a user's message -> the prompt's token ids


class Prompt(NamedTuple):
    """One prompt of the pool."""

    name: str
    text: str
    ids: tuple[int, ...]


class Pool:
    """The prompts of a run, in an order that depends on the seed alone.

    distinct: each request's prompt begins with its number, so that no two are the same and nothing that another one
    left in memory helps beyond the template.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        encode: Encode,
        *,
        new: int,
        context: int,
        seed: int = 0,
        distinct: bool = False,
    ) -> None:
        self._prompts, self._encode, self._new, self._context = list(prompts), encode, new, context
        self._seed, self._distinct = seed, distinct

    @classmethod
    def read(
        cls, files: Sequence[Path], encode: Encode, *, new: int, context: int, seed: int = 0, distinct: bool = False
    ) -> tuple[Pool, list[Skipped]]:
        """The prompts of the files (first turns of questions) that leave room for `new` tokens, and what is left out.

        Raises PromptError if there are none.
        """
        items, skipped = read_prompts(files)
        kept = []
        for item in items:
            ids = tuple(encode(item.turns[0]))
            if len(ids) + new > context:
                reason = f"its {len(ids)} prompt tokens and {new} new ones do not fit the context of {context}"
                skipped.append(Skipped(item.file, item.line, reason))
            else:
                kept.append(Prompt(item.name, item.turns[0], ids))
        if not kept:
            raise PromptError(f"No prompt can be asked; {skipped[0]}.")
        return cls(kept, encode, new=new, context=context, seed=seed, distinct=distinct), skipped

    def __len__(self) -> int:
        return len(self._prompts)

    def asks(self, arrivals: Sequence[Arrival], seed: int) -> list[Ask]:
        """A request for each arrival; the same arrivals and seed give the same requests. ConfigError for a prompt of
        the arrivals' own file that does not fit."""
        rng = random.Random(f"asks {self._seed} {seed}")
        turns = self._turns(rng)
        return [self._ask(number, arrival, turns, rng) for number, arrival in enumerate(arrivals)]

    def endless(self, seed: int) -> Iterator[Ask]:
        """Requests for a closed loop, all at 0."""
        rng = random.Random(f"endless {self._seed} {seed}")
        turns = self._turns(rng)
        number = 0
        while True:
            yield self._ask(number, Arrival(0.0), turns, rng)
            number += 1

    def each(self) -> list[Ask]:
        """Every prompt of the pool once."""
        return [Ask(number, 0.0, p.name, p.ids, self._new) for number, p in enumerate(self._prompts)]

    def _turns(self, rng: random.Random) -> Iterator[Prompt]:
        """All prompts in a random order, then again in another one."""
        while True:
            yield from rng.sample(self._prompts, len(self._prompts))

    def _ask(self, number: int, arrival: Arrival, turns: Iterator[Prompt], rng: random.Random) -> Ask:
        new = arrival.max_new_tokens or self._new
        if arrival.prompt is not None:
            name, ids = f"arrival {number + 1}", tuple(self._encode(arrival.prompt))
        elif arrival.prompt_tokens is not None:
            name, ids = f"{arrival.prompt_tokens} tokens", self._exactly(arrival.prompt_tokens, rng)
        else:
            prompt = next(turns)
            name, ids = prompt.name, prompt.ids
            if self._distinct:
                ids = tuple(self._encode(f"({rng.randrange(10**6)}) {prompt.text}"))
        if len(ids) + new > self._context:
            raise ConfigError(
                f"{name}: {len(ids)} prompt tokens and {new} new ones do not fit the context of {self._context}: give "
                "more --context, or fewer tokens."
            )
        return Ask(number, arrival.at, name, ids, new)

    def _exactly(self, count: int, rng: random.Random) -> tuple[int, ...]:
        """So many tokens of text, from another place each time, so that prompts do not share their beginnings."""
        words = LONG_TEXT.split()
        begin = rng.randrange(len(words))
        ids: list[int] = []
        while len(ids) < count:
            ids += self._encode(" ".join(words[begin:] + words[:begin]))
        return tuple(ids[:count])
