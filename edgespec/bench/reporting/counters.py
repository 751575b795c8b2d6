"""What an arm's own statistics add up to: tokens a round, acceptance, drafts, loads, where the seconds went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from edgespec.bench.specbench.folder import Record
from edgespec.results import DraftTally

# Seconds of a round that exclude each other.
PARTS = {
    "target": "target_seconds",
    "draft": "draft_seconds",
    "planning": "predictor_seconds",
    "catch-up": "catch_up_seconds",
    "bookkeeping": "bookkeeping_seconds",
}
_SLACK, _SLACK_S = 1.02, 0.005  # two clocks, read a moment apart


def counters(records: Sequence[Record]) -> dict[str, Any]:
    """Over these turns. What an engine does not tell is None, never 0."""
    rounds = [count for record in records for count in record.round_tokens]
    return {
        "first_token_s": _median(record.first_token_s for record in records),
        "prefill_tokens_per_second": _share(
            sum(r.prompt_tokens for r in records if r.first_token_s), sum(r.first_token_s or 0.0 for r in records)
        ),
        "tokens": sum(len(record.token_ids) for record in records),
        "rounds": len(rounds),
        "tokens_per_round": _share(sum(rounds), len(rounds)),
        **_own(records),
    }


def _own(records: Sequence[Record]) -> dict[str, Any]:
    """From the statistics that edgespec's own engine gives; {} without them."""
    told = [record for record in records if record.stats]
    if not told:
        return {}
    total = {name: sum(number(record, name) for record in told) for name in SUMMED}
    seconds, rounds = total["decode_seconds"], total["rounds"]
    energy = [number(record, "energy_joules") for record in told if record.stats.get("energy_joules") is not None]
    joules = sum(energy) if len(energy) == len(told) else None
    parts = {part: _share(total[name], seconds) for part, name in PARTS.items()}
    known = [share for share in parts.values() if share is not None]
    return {
        "acceptance_rate": _share(total["accepted_tokens"], total["proposed_tokens"]),
        "accepted_tokens": int(total["accepted_tokens"]),
        "proposed_tokens": int(total["proposed_tokens"]),
        "acceptance_by_position": by_position(told),
        "gamma_share": _shares(told, "gamma_histogram", by_number=True),
        "draft_share": _shares(told, "draft_share"),
        "fallback_share": _share(sum(number(r, "fallback_share") * number(r, "rounds") for r in told), rounds),
        "switches": int(total["switches"]),
        "loads": int(total["loads"]),
        "load_seconds_hidden": total["load_seconds_hidden"],
        "load_seconds_exposed": total["load_seconds_exposed"],
        "predictor_seconds": total["predictor_seconds"],
        "ranker_seconds": total["ranker_seconds"],
        "ranker_share": _share(total["ranker_seconds"], seconds),
        "decode_seconds": seconds,
        "time_share": {**parts, "other": max(0.0, 1 - sum(known))} if known else {},
        "energy_joules": joules,
        "joules_per_token": None if joules is None else _share(joules, sum(len(r.token_ids) for r in told)),
    }


SUMMED = (
    *PARTS.values(), "decode_seconds", "rounds", "accepted_tokens", "proposed_tokens", "switches", "loads",
    "load_seconds_hidden", "load_seconds_exposed", "ranker_seconds",
)  # fmt: skip


def number(record: Record, name: str) -> float:
    """One of the statistics, 0 where it is not there. (`checks` has seen to it that it is a number.)"""
    return float(record.stats.get(name) or 0)


def by_position(records: Iterable[Record]) -> list[float]:
    """Accepted share of the proposals that reached each place of a block.

    Nothing if an answer does not tell how many they were, as in runs that were measured before it was counted.
    """
    hits: Counter[int] = Counter()
    tries: Counter[int] = Counter()
    for record in records:
        shares, told = (record.stats.get(name) or () for name in ("acceptance_by_position", "tries_by_position"))
        if len(told) < len(shares):
            return []
        for place, (share, tried) in enumerate(zip(shares, told)):
            tries[place] += tried
            hits[place] += tried * share
    return [hits[place] / tries[place] for place in sorted(tries) if tries[place]]


def draft_counts(records: Iterable[Record]) -> dict[str, float]:
    """Rounds by draft."""
    total: Counter[str] = Counter()
    for record in records:
        total.update(_counts(record, "draft_share"))  # type: ignore[arg-type]
    return {name: count for name, count in total.items() if count}


def by_draft(records: Iterable[Record]) -> dict[str, DraftTally]:
    """What came of each draft's blocks, of those that proposed any."""
    found: dict[str, DraftTally] = {}
    for record in records:
        for name, counts in (record.stats.get("by_draft") or {}).items():
            before = found.get(str(name), DraftTally())
            found[str(name)] = DraftTally(*map(sum, zip(before, counts)))
    return {name: tally for name, tally in found.items() if tally.blocks}


def _counts(record: Record, name: str) -> dict[str, float]:
    value = record.stats.get(name) or {}
    return {str(key): float(count) for key, count in value.items()}


def _shares(records: Sequence[Record], name: str, *, by_number: bool = False) -> dict[str, float]:
    total: Counter[str] = Counter()
    for record in records:
        total.update(_counts(record, name))  # type: ignore[arg-type]
    everything = sum(total.values())
    keys = sorted(total, key=int) if by_number else sorted(total, key=lambda key: -total[key])
    return {key: total[key] / everything for key in keys if total[key]}


def parts_exceed_total(record: Record) -> bool:
    """Whether parts of a turn that exclude each other add up to more than the whole: then none can be trusted."""
    if not record.stats or record.first_token_s is None:
        return False
    seconds = number(record, "decode_seconds")
    rounds = sum(number(record, name) for name in PARTS.values())
    turn = number(record, "prefill_seconds") + seconds
    pairs = (rounds, seconds), (turn, record.seconds), (record.first_token_s + record.decode_s, record.seconds)
    return any(part > whole * _SLACK + _SLACK_S for part, whole in pairs)


def empty_share(records: Sequence[Record]) -> float:
    """Share of rounds whose draft proposed nothing, in answers of versions that counted those as fallbacks, too."""
    old = [record for record in records if record.stats and "tries_by_position" not in record.stats]
    empty = sum(_counts(r, "draft_share").get("plain", 0) - _counts(r, "gamma_histogram").get("0", 0) for r in old)
    return max(0.0, _share(empty, sum(number(record, "rounds") for record in old)) or 0.0)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
