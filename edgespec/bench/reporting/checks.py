"""Whether a record can be true: numbers that no clock and no counter gives would spoil every sum they are in."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edgespec.bench.reporting.counters import SUMMED
from edgespec.bench.specbench.folder import Record
from edgespec.errors import ConfigError
from edgespec.results import DraftTally

_NUMBERS = (*SUMMED, "prefill_seconds", "energy_joules", "fallback_share", "acceptance_rate")
_SHARES = ("fallback_share", "acceptance_rate")
_COUNTS = ("draft_share", "gamma_histogram")


def check(arm: str, record: Record) -> None:
    """ConfigError that names the record and what is wrong with it."""
    try:
        possible(record)
    except ValueError as error:
        raise ConfigError(
            f"The record of arm {arm!r}, question {record.question_id}, repeat {record.repeat}, turn {record.turn} is "
            f"damaged: {error}. Take its line out, and --resume measures it anew."
        ) from None


def possible(record: Record) -> None:
    """ValueError that says what is wrong with it."""
    _check_times(record)
    _check_stats(record.stats)


def _check_times(record: Record) -> None:
    for name in ("decode_s", "seconds", "decode_tokens", "first_token_s", "at"):
        value = getattr(record, name)
        if value is not None:
            _check_number(name, value)
    tokens = len(record.token_ids)
    if record.decode_tokens and record.decode_s < 1e-9:  # finer than any clock
        raise ValueError(f"{record.decode_tokens} tokens in no time (decode_s is {record.decode_s:g})")
    if record.decode_tokens > tokens:
        raise ValueError(f"decode_tokens is {record.decode_tokens} of {tokens} token_ids")
    if any(count < 0 for count in record.round_tokens) or sum(record.round_tokens) > tokens:
        raise ValueError(f"round_tokens come to {sum(record.round_tokens)} of {tokens} token_ids")


def _check_stats(stats: Mapping[str, Any]) -> None:
    for name, value in stats.items():
        if isinstance(value, float) or (name in _NUMBERS and value is not None):
            _check_number(name, value)
        if name in _SHARES and (value or 0) > 1:
            raise ValueError(f"{name} is {value}, more than all")
        if name in _COUNTS and value is not None:
            _check_counts(name, value)
        if name == "by_draft":
            _check_tallies(value)
    accepted, proposed = (stats.get(f"{name}_tokens") or 0 for name in ("accepted", "proposed"))
    if accepted > proposed:
        raise ValueError(f"accepted_tokens is {accepted} of {proposed} proposed")
    shares, tries = (_numbers(stats, name) for name in ("acceptance_by_position", "tries_by_position"))
    if any(share > 1 for share in shares) or (tries and len(tries) != len(shares)):
        raise ValueError("acceptance_by_position and tries_by_position are not shares and counts of the same places")


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is {value!r}, not a number")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value}")


def _check_counts(name: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is not counts by name")
    for key, count in value.items():
        _check_number(f"{name} of {key}", count)
        if name == "gamma_histogram" and not str(key).isdecimal():
            raise ValueError(f"{name} has {key!r} among its lengths")


def _check_tallies(value: Any) -> None:
    if not isinstance(value, Mapping):
        raise ValueError("by_draft is not counts by name")
    for draft, counts in value.items():
        if not isinstance(counts, (list, tuple)) or len(counts) != len(DraftTally._fields):
            raise ValueError(f"by_draft of {draft} is {counts!r}, not {', '.join(DraftTally._fields)}")
        for count in counts:
            _check_number(f"by_draft of {draft}", count)
        tally = DraftTally(*counts)
        if tally.first > tally.blocks or tally.accepted > tally.proposed:
            raise ValueError(f"by_draft of {draft} is {list(counts)}, more accepted than proposed")


def _numbers(stats: Mapping[str, Any], name: str) -> list[float]:
    found = stats.get(name) or []
    if not isinstance(found, list):
        raise ValueError(f"{name} is {found!r}, not a list")
    for value in found:
        _check_number(f"a value of {name}", value)
    return found
