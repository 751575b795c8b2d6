"""When requests come: Poisson, in bursts, under a load that rises and falls, or as a file of recorded arrivals says."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from edgespec.config import nearest
from edgespec.errors import ConfigError

POISSON, BURSTY, STEPS = "poisson", "bursty", "steps"
MOST_ARRIVALS = 20_000  # of one stretch: each is an object with its tokens' times

# In bursts: a fifth of the time, requests come at four times the mean rate, and the rest of them in between.
BURST, SHARE_ON, SECONDS_ON = 4.0, 0.2, 4.0

# In steps: equal parts of the time, and times the mean rate at which requests come in each.
PARTS = (("low", 0.25), ("high", 2.5), ("low again", 0.25))

# A recorded file's columns, by what they mean. The second names are those of a well-known public trace.
_COLUMNS = {
    "time": ("time", "timestamp"),
    "prompt": ("prompt",),
    "prompt_tokens": ("prompt_tokens", "contexttokens"),
    "max_new_tokens": ("max_new_tokens", "generatedtokens"),
}
_MOST_TOKENS = 1 << 20


class Arrival(NamedTuple):
    """One request. at: seconds from the beginning. None = whatever the run's prompts and limit say."""

    at: float
    prompt: str | None = None
    prompt_tokens: int | None = None
    max_new_tokens: int | None = None


def poisson(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Independent arrivals, `rate` a second on average."""
    rng = random.Random(f"poisson {seed}")
    return _bounded(_steady(rng, rate, 0.0, seconds), rate, seconds)


def bursty(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Poisson arrivals of two rates, whose turns have random (exponential) lengths; `rate` a second on average."""
    rng = random.Random(f"bursty {seed}")
    quiet = rate * (1 - BURST * SHARE_ON) / (1 - SHARE_ON)
    turns = {True: (BURST * rate, SECONDS_ON), False: (quiet, SECONDS_ON * (1 - SHARE_ON) / SHARE_ON)}
    found: list[Arrival] = []
    begin, on = 0.0, rng.random() < SHARE_ON
    while begin < seconds:
        speed, mean = turns[on]
        end = min(begin + rng.expovariate(1 / mean), seconds)
        found += _bounded(_steady(rng, speed, begin, end), rate, seconds)
        begin, on = end, not on
    return found


def steps(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Poisson arrivals of a low rate, then of a tenfold one, then of the low one again; `rate` a second on average."""
    rng = random.Random(f"steps {seed}")
    found: list[Arrival] = []
    for (_, times), (begin, end) in zip(PARTS, spans(seconds)):
        found += _bounded(_steady(rng, times * rate, begin, end), rate, seconds)
    return found


def spans(seconds: float) -> list[tuple[float, float]]:
    """From when to when each of `PARTS` goes."""
    ends = [seconds * place / len(PARTS) for place in range(len(PARTS) + 1)]
    return list(itertools.pairwise(ends))


def _steady(rng: random.Random, rate: float, begin: float, end: float) -> Iterator[Arrival]:
    at = begin + rng.expovariate(rate)
    while at < end:
        yield Arrival(at)
        at += rng.expovariate(rate)


def _bounded(arrivals: Iterator[Arrival], rate: float, seconds: float) -> list[Arrival]:
    if rate * seconds > MOST_ARRIVALS:
        raise ConfigError(
            f"{rate:g} requests a second for {seconds:g} s are {rate * seconds:,.0f}; {MOST_ARRIVALS:,} at most are "
            "kept in memory: lower the rate or --seconds."
        )
    return list(arrivals)


MAKE: Mapping[str, Callable[[float, float, int], list[Arrival]]] = {POISSON: poisson, BURSTY: bursty, STEPS: steps}


def scaled(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same arrivals, their times stretched so that they come at `rate` a second on average."""
    factor = mean_rate(arrivals) / rate
    return [arrival._replace(at=arrival.at * factor) for arrival in arrivals]


def mean_rate(arrivals: Sequence[Arrival]) -> float:
    """Arrivals a second from the first to the last; all at once count as within one second."""
    return len(arrivals) / (arrivals[-1].at or 1.0) if arrivals else 0.0


def read_trace(path: Path) -> list[Arrival]:
    """Recorded arrivals from a .csv (with headings) or .jsonl file, in the order of time, the first one at 0.

    Columns: time (seconds, or a date and time), and as far as they are there prompt, prompt_tokens (ContextTokens),
    max_new_tokens (GeneratedTokens). Raises ConfigError naming the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"The arrivals {path} cannot be read: {reason}.") from error
    rows = _json_rows(path, text) if path.suffix.lower() in (".jsonl", ".json") else _csv_rows(path, text)
    found = []
    for line, row in rows:
        try:
            found.append(_arrival(row))
        except ValueError as error:
            raise ConfigError(f"{path}, line {line}: {error}.") from error
    if not found:
        raise ConfigError(f"{path} has no arrivals: one line each is wanted, with a time.")
    if len(found) > MOST_ARRIVALS:
        raise ConfigError(f"{path} has {len(found):,} arrivals; {MOST_ARRIVALS:,} at most are kept in memory.")
    found.sort(key=lambda arrival: arrival.at)
    first = found[0].at
    return [arrival._replace(at=arrival.at - first) for arrival in found]


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))  # a quoted prompt may have line ends of any kind
    try:
        names = {str(name).strip().lower() for name in reader.fieldnames or ()}
        if not names & set(_COLUMNS["time"]):
            raise ConfigError(f"{path} has no column 'time': {_did_you_mean(names)}.")
        yield from ((reader.line_num, row) for row in reader)
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num + 1}: {error}.") from error


def _did_you_mean(names: Iterable[str]) -> str:
    close = nearest("time", sorted(names)) if names else "it is empty"
    return close.rstrip("?")


def _json_rows(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):  # a prompt may have the other line ends of Unicode
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, line {number}: it is not a JSON object.")
        yield number, row


def _arrival(row: Mapping[Any, Any]) -> Arrival:
    """Raises ValueError saying what is wrong."""
    values = {str(key).strip().lower(): value for key, value in row.items()}
    found = {
        meaning: next((values[name] for name in names if values.get(name) not in (None, "")), None)
        for meaning, names in _COLUMNS.items()
    }
    prompt = found["prompt"]
    if prompt is not None and (not isinstance(prompt, str) or not prompt.strip()):
        raise ValueError("'prompt' must be a text")
    if prompt is not None and found["prompt_tokens"] is not None:
        raise ValueError("it has both 'prompt' and 'prompt_tokens'; give one of them")
    return Arrival(
        _time(found["time"]), prompt, _tokens(found, "prompt_tokens"), _tokens(found, "max_new_tokens")
    )  # fmt: skip


def _time(value: Any) -> float:
    if value is None:
        raise ValueError("it has no 'time'")
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = _date(str(value))
    if not math.isfinite(seconds):
        raise ValueError(f"'time' must be seconds or a date and time, not {value!r}")
    return seconds


def _date(text: str) -> float:
    head, dot, fraction = text.strip().partition(".")
    digits = fraction.rstrip("Z")
    try:
        # Some files have seven digits of a second, which only newer versions of Python read.
        part = float(f"0.{digits}") if dot and digits.isdigit() else 0.0
        return datetime.fromisoformat(head.rstrip("Z")).timestamp() + part
    except ValueError:
        return math.nan


def _tokens(found: Mapping[str, Any], name: str) -> int | None:
    value = found[name]
    if value is None:
        return None
    try:
        count = int(str(value))
    except ValueError:
        count = 0
    if isinstance(value, bool) or not 1 <= count <= _MOST_TOKENS:
        raise ValueError(f"{name!r} must be a whole number from 1 to {_MOST_TOKENS:,}, not {value!r}")
    return count
