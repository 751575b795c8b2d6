"""A toy decoder with a real list of keys and values, a toy tokenizer, and drafts and planners that follow a script.

Fast (no engine), exact (a row's bits do not depend on how the tokens were cut into forwards), and unforgiving: a
position that should have been rolled back, or a view that outlives its forward, changes the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from drafts.base import Choose, Proposal
from drafts.standalone import StandaloneDraft
from edgespec.decoding.params import SamplingParams
from edgespec.decoding.round import Generation
from edgespec.decoding.session import Session
from edgespec.models.base import ForwardOutput, Part
from edgespec.models.batching import one_after_another
from edgespec.models.checks import check_room, positions_within, token_ids
from edgespec.models.spec import ModelSpec, RopeSpec
from edgespec.results import GenerationResult
from predictor.planner import Candidate, FixedPlanner, Observation, Plan, Planner

TOKENS = 60
PROMPT = [5, 6, 7, 8]


class ToyCache:
    """Keys and values as a plain list, one entry a position."""

    def __init__(self, capacity: int) -> None:
        self.entries: list[np.ndarray] = []
        self.capacity = capacity
        self.handed_out: list[np.ndarray] = []

    @property
    def length(self) -> int:
        return len(self.entries)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)

    def reserve(self, length: int) -> None:
        """All of it is there."""

    def crop(self, length: int) -> int:
        if not 0 <= length <= len(self.entries):
            raise ValueError(f"crop to {length} of {len(self.entries)}")
        dropped = len(self.entries) - length
        del self.entries[length:]
        return dropped


def toy_spec(rows: int, hidden: int = 16, max_positions: int = 256, eos: tuple[int, ...] = ()) -> ModelSpec:
    return ModelSpec(
        architecture="llama",
        vocab_size=rows,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=hidden,
        max_positions=max_positions,
        rms_norm_eps=1e-5,
        rope=RopeSpec(10000.0),
        tie_embeddings=False,
        eos_token_ids=eos,
    )


class ToyDecoder:
    """Logits from a decaying sum over all cached positions (the last `window` of them), float32.

    calls: the ids of every forward. before, after: called around the work of a forward, may raise.
    """

    weight_format = "float32"
    nbytes = 1000
    batch_slots = 1

    def __init__(
        self,
        rows: int = TOKENS,
        *,
        seed: int = 0,
        hidden: int = 16,
        window: int | None = None,
        max_positions: int = 256,
        sharpness: float = 1.5,
    ) -> None:
        self.spec = toy_spec(rows, hidden, max_positions)
        rng = np.random.default_rng(seed)
        self._embedding = rng.standard_normal((512, hidden)).astype(np.float32)[:rows]
        self._positions = (0.2 * rng.standard_normal((1024, hidden))).astype(np.float32)
        self._head = (sharpness * rng.standard_normal((512, hidden))).astype(np.float32)[:rows]
        self._window = window
        self.calls: list[list[int]] = []
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None
        self.closed = False

    def new_cache(self, capacity: int | None = None) -> ToyCache:
        return ToyCache(positions_within(capacity, self.spec.max_positions))

    def forward(
        self, tokens: Sequence[int], cache: ToyCache, *, logits: int | None = None, hidden: bool = False
    ) -> ForwardOutput:
        assert not self.closed
        assert tokens
        assert all(type(token) is int for token in tokens)
        self.before()
        self._check(Part(tokens, cache))
        self.calls.append(list(tokens))
        for array in cache.handed_out:
            array.fill(np.nan)  # what the last forward returned were only views
        begin = cache.length
        for token in tokens:
            cache.entries.append(self._embedding[token] + self._positions[cache.length])
        wanted = len(tokens) if logits is None else logits
        rows = [self._row(cache.entries[: end + 1]) for end in range(begin, cache.length)]
        rows = rows[len(rows) - wanted :]
        out = np.array(rows, np.float32).reshape(wanted, self.spec.vocab_size)
        cache.handed_out = [out]
        states = None
        if hidden:
            states = np.array([self._state(cache.entries[: end + 1]) for end in range(begin, cache.length)], np.float32)
            cache.handed_out.append(states)
        self.after()
        return ForwardOutput(out, states)

    def forward_batch(self, parts: Sequence[Part]) -> list[ForwardOutput]:
        assert self.batch_slots == 1 or len(parts) <= self.batch_slots
        return one_after_another(self, parts, self._check)  # type: ignore[arg-type]

    def _check(self, part: Part) -> None:
        check_room(part.cache, len(token_ids(part.tokens, self.spec.vocab_size)))

    def hidden_states(self, tokens: Sequence[int]) -> np.ndarray:
        """What `forward` must give for a whole text: float32 [len(tokens), hidden_size]."""
        entries = [self._embedding[token] + self._positions[at] for at, token in enumerate(tokens)]
        return np.array([self._state(entries[: end + 1]) for end in range(len(entries))], np.float32)

    def embed(self, ids: Sequence[int]) -> np.ndarray:
        return self._embedding[np.asarray(ids)]

    def head_rows(self, ids: Sequence[int]) -> np.ndarray:
        return self._head[np.asarray(ids)]

    def holds(self, cache: ToyCache, tokens: Sequence[int]) -> bool:
        """True if the first positions in `cache` are exactly those of `tokens`."""
        made = [self._embedding[token] + self._positions[at] for at, token in enumerate(tokens)]
        return cache.length >= len(tokens) and all(map(np.array_equal, cache.entries, made))

    def _row(self, entries: list[np.ndarray]) -> np.ndarray:
        return self._head @ self._state(entries)

    def _state(self, entries: list[np.ndarray]) -> np.ndarray:
        if self._window is not None:
            entries = entries[-self._window :]
        decay = np.float32(0.7) ** np.arange(len(entries) - 1, -1, -1, dtype=np.float32)
        return np.tanh(decay @ np.stack(entries))

    def close(self) -> None:
        self.closed = True


class TableDecoder(ToyDecoder):
    """Its logits depend on the last token only: row `table[token]`. For exact distributions."""

    def __init__(self, table: np.ndarray) -> None:
        super().__init__(len(table))
        self._table = np.asarray(table, np.float32)
        self._embedding = np.arange(len(table), dtype=np.float32)[:, None]
        self._positions = np.zeros((1024, 1), np.float32)

    def _row(self, entries: list[np.ndarray]) -> np.ndarray:
        return self._table[int(entries[-1][0])]


class ToyTokenizer:
    """Byte-level: ids 0 and 1 are special, then letters, short words, and the two halves of an "é"."""

    is_byte_level = True
    bos_id = 0
    adds_bos = False
    chat_template = None

    def __init__(self, size: int = TOKENS, eos_ids: Iterable[int] = ()) -> None:
        self.size = size
        self.eos_ids = tuple(eos_ids)
        self.special_tokens = {"<bos>": 0, "<end>": 1}
        words = ["\xc3", "\xa9", " ", "\n", " the", "ab", "ba", "abc", "..", "!", "e", "er", " x"]
        letters = [chr(97 + i) for i in range(26)] + [chr(65 + i) for i in range(26)]
        self._bytes = [b"<bos>", b"<end>", *(w.encode("latin-1") for w in words), *(c.encode() for c in letters)]
        self._bytes += [f"w{i}".encode() for i in range(len(self._bytes), size)]

    def is_special(self, token: int) -> bool:
        return token < 2

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        kept = (self._bytes[i] for i in ids if not (skip_special and self.is_special(i)))
        return b"".join(kept).decode("utf-8", "replace")


def plain_greedy(decoder: ToyDecoder, prompt: Sequence[int], count: int, *, tokens: int = TOKENS) -> list[int]:
    """G(p): one token a forward, nothing of the speculative path. Ids from `tokens` on are padding."""
    cache, out, feed = decoder.new_cache(), [], list(prompt)
    while len(out) < count and cache.length + len(feed) < decoder.spec.max_positions:
        row = np.array(decoder.forward(feed, cache, logits=1).logits[0])
        feed = [int(np.argmax(row[:tokens]))]
        out += feed
    return out


# Drafts

Script = Callable[[Sequence[int], int], Sequence[Any]]


class ScriptedDraft:
    """Proposes what `script(tokens, gamma)` returns, with one-hot rows. calls: (length of the text, gamma)."""

    kind = "standalone"
    nbytes = 100

    def __init__(self, script: Script, name: str = "scripted", *, level: int = 1) -> None:
        self.name = name
        self.script = script
        self.level_value = level
        self.calls: list[tuple[int, int]] = []
        self.opened = 0

    def open(self) -> ScriptedDraft:
        self.opened += 1
        return self

    def level(self, tokens: Sequence[int]) -> int:
        return self.level_value

    def propose(self, tokens: Sequence[int], gamma: int, choose: Choose, *, floor: float = 0.0) -> Proposal:
        self.calls.append((len(tokens), gamma))
        guess = list(self.script(tokens, gamma))
        return Proposal(guess, [None] * len(guess))

    def crop(self, length: int) -> None:
        pass

    def close(self) -> None:
        pass


def oracle(text: Sequence[int], name: str = "oracle") -> ScriptedDraft:
    """Always right: continues along `text` (prompt and answer), with token 2 behind its end."""
    return ScriptedDraft(lambda t, gamma: _along(text, len(t), gamma), name)


def anti(text: Sequence[int], name: str = "anti", tokens: int = TOKENS) -> ScriptedDraft:
    """Always wrong."""
    return ScriptedDraft(lambda t, gamma: [(x + 1) % tokens for x in _along(text, len(t), gamma)], name)


def mixed(
    text: Sequence[int], wrong: Callable[[int], bool], name: str = "mixed", tokens: int = TOKENS
) -> ScriptedDraft:
    """Wrong exactly at the absolute positions where `wrong` says so."""

    def script(t: Sequence[int], gamma: int) -> list[int]:
        right = _along(text, len(t), gamma)
        return [(x + 1) % tokens if wrong(len(t) + i) else x for i, x in enumerate(right)]

    return ScriptedDraft(script, name)


def empty(name: str = "empty") -> ScriptedDraft:
    return ScriptedDraft(lambda t, gamma: [], name)


def short(text: Sequence[int], name: str = "short") -> ScriptedDraft:
    """Right, but with fewer than gamma tokens, also none."""
    return ScriptedDraft(lambda t, gamma: _along(text, len(t), gamma)[: len(t) % gamma], name)


def self_draft(target: ToyDecoder, name: str = "self", **kwargs: Any) -> StandaloneDraft:
    """The target's own numbers in a second object: everything it proposes must be accepted."""
    twin = object.__new__(type(target))
    twin.__dict__.update(target.__dict__)
    twin.calls = []
    twin.before = twin.after = lambda: None
    return StandaloneDraft(name, twin, kwargs.pop("token_count", TOKENS), **kwargs)


def failing(error: BaseException | Callable[[], BaseException], name: str = "failing") -> ScriptedDraft:
    def script(t: Sequence[int], gamma: int) -> list[int]:
        raise error if isinstance(error, BaseException) else error()

    return ScriptedDraft(script, name)


def _along(text: Sequence[int], at: int, gamma: int) -> list[int]:
    guess = list(text[at : at + gamma])
    return guess + [2] * (gamma - len(guess))


DRAFTERS = ("self", "oracle", "anti", "mixed", "empty", "short", "ngram")


def drafter(kind: str, target: ToyDecoder, text: Sequence[int]) -> Any:
    """One of the shared drafters for `target`, whose plain text (prompt and answer) is `text`."""
    from drafts.ngram import NgramDraft

    if kind == "self":
        return self_draft(target)
    if kind == "mixed":
        return mixed(text, lambda at: at % 5 in (1, 2))
    if kind in ("oracle", "anti", "short"):
        return {"oracle": oracle, "anti": anti, "short": short}[kind](text)
    return empty() if kind == "empty" else NgramDraft()


# Planners


class ScheduledPlanner:
    """Follows a schedule of (draft, gamma), one entry a round, over and over. Keeps what it was asked and told."""

    off = False

    def seeded(self) -> Planner:
        return self

    def __init__(self, schedule: Iterable[tuple[str | None, int]]) -> None:
        self._schedule: Iterator[tuple[str | None, int]] = cycle(schedule)
        self.asked: list[tuple[tuple[Candidate, ...], int]] = []
        self.seen: list[Observation] = []
        self.credits: list[tuple[Candidate, int, int]] = []
        self.shadowed: tuple[str, ...] = ()

    def plan(self, candidates: Sequence[Candidate], limit: int) -> Plan:
        self.asked.append((tuple(candidates), limit))
        return Plan(*next(self._schedule))

    def shadows(self, plan: Plan, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return [c for c in candidates if c.name in self.shadowed and c.name != plan.draft]

    def observe(self, observation: Observation) -> None:
        self.seen.append(observation)

    def credit(self, candidate: Candidate, proposed: int, accepted: int, **measured: Any) -> None:
        self.credits.append((candidate, proposed, accepted))


# Requests


def session(target: ToyDecoder | None = None, drafts: Iterable[Any] = (), gamma: int = 3, **kwargs: Any) -> Session:
    """A session that always plans `gamma` tokens of the first draft that can run, unless `planner` says otherwise."""
    kwargs.setdefault("planner", FixedPlanner(None, gamma))
    return Session(target or ToyDecoder(), kwargs.pop("tokenizer", None) or ToyTokenizer(), drafts, **kwargs)


def run(session: Session, prompt: Sequence[int], **params: Any) -> GenerationResult:
    """Answer `prompt`, checking that the pieces of the stream are the result."""
    generation = Generation(session, prompt, SamplingParams(**params))
    deltas = list(generation.deltas())
    result = generation.result
    assert "".join(d.text for d in deltas) == result.text
    assert tuple(t for d in deltas for t in d.token_ids) == result.token_ids
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + [result.finish_reason]
    assert sum(d.accepted for d in deltas) == sum(d is not None for d in result.drafts) == result.stats.accepted_tokens
    assert len(result.drafts) == len(result.token_ids) == result.stats.new_tokens
    assert session.valid <= len(session.tokens)
    return result
