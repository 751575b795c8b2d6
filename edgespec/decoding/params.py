"""SamplingParams: what a request may ask for, checked before any model work."""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from edgespec.errors import ParameterError

GREEDY_BELOW = 1e-6  # temperatures under this are greedy: dividing by them only turns rounding into randomness
_MOST_ID = (1 << 31) - 1  # no vocabulary has more tokens, and larger numbers fit no array


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request; wrong ones raise ParameterError here, with name, value and what is allowed.

    max_new_tokens: at most this many tokens (0: none). min_new_tokens: nothing ends the answer before that many.
    temperature: 0, None or less than 1e-6 = greedy (the default), then seed, top_k, top_p and min_p change nothing.
    top_k: 0 or -1 = off. top_p: the smallest set of tokens that reaches this share. min_p: at least this share of the
    best token's probability.
    repetition_penalty: divides positive (multiplies negative) logits of tokens in prompt and answer.
    frequency_penalty, presence_penalty: subtracted per occurrence, and once, for tokens in the answer.
    logit_bias: {token id: value added to its logit}.
    stop: texts that end the answer and are not part of it (a string or several). stop_token_ids: ids that end it.
    ignore_eos: the model's own end tokens do not end the answer; stop and stop_token_ids still do.
    seed: None = different on every run. logprobs: None = off, 0 = of each chosen token, k = and of the k best ones.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__  # frozen: the checked, plain Python values replace what came in
        put(self, "max_new_tokens", _integer("max_new_tokens", self.max_new_tokens, 0))
        temperature = 0.0 if self.temperature is None else self.temperature
        put(self, "temperature", _number("temperature", temperature, "0 (greedy) or more", lambda t: t >= 0))
        put(self, "top_k", max(0, _integer("top_k", self.top_k, -1, "-1 or 0 (off), or a positive integer")))
        put(self, "top_p", _number("top_p", self.top_p, "above 0, at most 1", lambda p: 0 < p <= 1))
        put(self, "min_p", _number("min_p", self.min_p, "0 (off) or more, below 1", lambda p: 0 <= p < 1))
        penalty = _number(
            "repetition_penalty", self.repetition_penalty, "from 0.01 to 100 (1 = off)", lambda p: 0.01 <= p <= 100
        )
        put(self, "repetition_penalty", penalty)
        for name in ("frequency_penalty", "presence_penalty"):
            put(self, name, _number(name, getattr(self, name), "-2 to 2", lambda p: -2 <= p <= 2))
        put(self, "logit_bias", _biases(self.logit_bias))
        put(self, "stop", _stops(self.stop))
        put(self, "stop_token_ids", _ids(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise wrong("ignore_eos", self.ignore_eos, "True or False")
        put(self, "min_new_tokens", _integer("min_new_tokens", self.min_new_tokens, 0))
        if self.min_new_tokens > self.max_new_tokens:
            most = f"at most max_new_tokens ({_shown(self.max_new_tokens)})"
            raise wrong("min_new_tokens", self.min_new_tokens, most)
        if self.seed is not None:
            put(self, "seed", _integer("seed", self.seed, 0, "None, or an integer >= 0"))
        if self.logprobs is not None:
            put(self, "logprobs", _integer("logprobs", self.logprobs, 0, "None, or an integer >= 0"))

    @property
    def greedy(self) -> bool:
        """True if the best token is always taken."""
        return self.temperature < GREEDY_BELOW

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Parameters from JSON or TOML. Unknown names raise ParameterError with the nearest known one."""
        known = [f.name for f in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}."
                raise ParameterError(f"Unknown sampling parameter {name!r}; {hint}")
        values = dict(values)
        bias = values.get("logit_bias")
        if isinstance(bias, Mapping):  # JSON and TOML have string keys only
            values["logit_bias"] = {int(k) if _spells_id(k) else k: v for k, v in bias.items()}
        return cls(**values)


def wrong(name: str, value: object, allowed: str) -> ParameterError:
    """The error for a value that is not allowed."""
    return ParameterError(f"{name} is {_shown(value)}; allowed: {allowed}.")


def _shown(value: object) -> str:
    """The beginning of it."""
    try:
        shown = repr(value)
    except ValueError:  # whole numbers of more than 4300 digits are not written out
        return "something of too many digits"
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _integer(name: str, value: Any, low: int, allowed: str | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < low:
        raise wrong(name, value, allowed or f"an integer >= {low}")
    return int(value)


def _number(name: str, value: Any, allowed: str, fits: Any) -> float:
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # of a whole number beyond any float
            number = float(value)
    if not math.isfinite(number) or not fits(number):
        raise wrong(name, value, f"a number, {allowed}")
    return number


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise wrong("logit_bias", value, "a mapping from token ids to numbers")
    biases = {}
    for token, bias in value.items():
        if not _is_id(token):
            raise wrong("logit_bias", value, f"a token id (an integer >= 0) in logit_bias, not {_shown(token)}")
        biases[int(token)] = _number(f"logit_bias[{token}]", bias, "-1000 to 1000", lambda b: -1000 <= b <= 1000)
    return biases


def _stops(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, (tuple, list)) or not all(isinstance(s, str) and s for s in stops):
        raise wrong("stop", value, "a non-empty text, or a list of them")
    return tuple(dict.fromkeys(stops))


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list, set, frozenset)):
        raise wrong("stop_token_ids", value, "a list of token ids")
    for token in value:
        if not _is_id(token):
            raise wrong("stop_token_ids", token, "token ids (integers >= 0)")
    return tuple(sorted({int(token) for token in value}))


def _spells_id(key: object) -> bool:
    return isinstance(key, str) and key.isdecimal() and len(key) <= 10


def _is_id(token: Any) -> bool:
    return isinstance(token, numbers.Integral) and not isinstance(token, bool) and 0 <= int(token) <= _MOST_ID
