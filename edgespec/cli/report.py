"""One line, and a longer table, about what a request did: draft, gamma, acceptance, speed, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from edgespec.results import GenerationResult, GenerationStats

if TYPE_CHECKING:
    from edgespec.engine import DraftInfo

PLAIN = "plain"


def size(count: float) -> str:
    """Bytes in the unit that reads best: 412 MB, 1.3 GB."""
    for unit, divisor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= divisor:
            return f"{count / divisor:.1f} {unit}" if unit == "GB" else f"{count / divisor:.0f} {unit}"
    return f"{count:.0f} bytes"


def draft_names(share: Mapping[str, int]) -> str:
    """The drafts that ran, by share of the rounds: 'ngram 80%, plain 20%'; one alone by its bare name."""
    share = {name: rounds for name, rounds in share.items() if rounds}
    total = sum(share.values())
    if not total:
        return "none"
    if len(share) == 1:
        return next(iter(share))
    ranked = sorted(share.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {rounds / total:.0%}" for name, rounds in ranked)


def gamma_text(stats: GenerationStats) -> str:
    """The gammas that were really used: '4', or the range and the mean of several."""
    used = {gamma: rounds for gamma, rounds in stats.gamma_histogram.items() if rounds}
    if not used:
        return "0"
    if len(used) == 1:
        return str(next(iter(used)))
    mean = sum(gamma * rounds for gamma, rounds in used.items()) / sum(used.values())
    return f"{min(used)}-{max(used)} (mean {mean:.1f})"


def status_line(result: GenerationResult, memory_bytes: int, held: str = "") -> str:
    """The line under an answer: draft, gamma, accepted %, tokens per round, tokens/s, working set, loads, memory.

    Where they are measured, energy and the load of the GPU; and what slowed the device down meanwhile.
    held: the working set in words, "" where all drafts are held.
    """
    stats = result.stats
    parts = [f"draft {draft_names(stats.draft_share)}", f"gamma {gamma_text(stats)}"]
    parts.append(f"accepted {stats.acceptance_rate:.0%}" if stats.proposed_tokens else "nothing drafted")
    parts.append(f"{stats.mean_tokens_per_round:.2f} tokens/round")
    parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
    parts.append(f"{stats.new_tokens} tokens")
    if held:
        parts.append(f"held {held}")
    if stats.loads:
        parts.append(f"{_loads(stats.loads)} in {stats.load_seconds_hidden:.2f} s beside it")
    if stats.load_seconds_exposed:
        parts.append(f"{stats.load_seconds_exposed:.2f} s waited for loads")
    parts.append(size(memory_bytes))
    if stats.energy_joules is not None:
        parts.append(_energy(stats))
    if stats.gpu_load is not None:
        parts.append(f"GPU {stats.gpu_load:.0%} busy")
    parts.extend(stats.device_notes)
    if result.finish_reason == "cancelled":
        parts.append("stopped by you")
    return ", ".join(parts)


def _energy(stats: GenerationStats) -> str:
    each = stats.joules_per_token
    return f"{stats.energy_joules:.1f} J" + ("" if each is None else f", {each:.2f} J a token")


def _loads(count: int) -> str:
    return "1 load" if count == 1 else f"{count} loads"


def details(stats: GenerationStats) -> list[str]:
    """All counters of one request, a line each, with what they count."""
    positions = ", ".join(f"{share:.0%}" for share in stats.acceptance_by_position) or "-"
    gammas = ", ".join(f"{gamma}: {rounds}" for gamma, rounds in sorted(stats.gamma_histogram.items())) or "-"
    parts = f"target {stats.target_seconds:.3f}, drafts {stats.draft_seconds:.3f}, rest {stats.bookkeeping_seconds:.3f}"
    decoded = f"1 + {stats.new_tokens - 1}" if stats.new_tokens else "0"  # the first one comes out of the prefill
    waited = f"{stats.load_seconds_exposed:.3f} s waited for" if stats.load_seconds_exposed else "not waited for"
    loads = f"{_loads(stats.loads)} ({stats.load_seconds_hidden:.3f} s, {waited}), {stats.switches} switches, "
    loads += f"{stats.fallback_share:.1%} fallback"
    beside = f"catch-up {stats.catch_up_seconds:.3f}, planning {stats.predictor_seconds:.3f}, "
    beside += f"ranker {stats.ranker_seconds:.3f} in its own thread"
    accepted = f"{stats.accepted_tokens} of {stats.proposed_tokens} proposed ({stats.acceptance_rate:.0%})"
    mean = f"{stats.mean_tokens_per_round:.2f} tokens each"
    rows = [
        ("prompt", f"{stats.prompt_tokens} tokens, {stats.reused_tokens} of them kept from earlier turns"),
        ("prefill", f"{stats.prefill_seconds:.3f} s, {stats.prefill_tokens_per_second:.0f} tokens/s"),
        ("first token", f"after {stats.time_to_first_token_s:.3f} s"),
        ("decode", f"{decoded} tokens in {stats.decode_seconds:.3f} s, {stats.tokens_per_second:.1f} tokens/s"),
        ("rounds", f"{stats.rounds}, {mean} (corrected or bonus token included)"),
        ("drafts", draft_names(stats.draft_share)),
        ("accepted", accepted if stats.proposed_tokens else "nothing was drafted"),
        ("by position", positions),
        ("gamma: rounds", gammas),
        ("seconds", parts),
        ("beside", beside),
        ("working set", loads),
        ("peak memory", size(stats.peak_memory_bytes)),
    ]
    if stats.energy_joules is not None:
        rows.append(("energy", f"{_energy(stats)} (the whole board, prefill included)"))
    if stats.gpu_load is not None:
        rows.append(("GPU", f"{stats.gpu_load:.0%} busy, mean of a look a second"))
    rows.extend(("device", note) for note in stats.device_notes)
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def draft_table(drafts: Sequence[DraftInfo]) -> list[str]:
    """A line a draft: name, kind, domain, size in memory, state."""
    rows = [(d.name, d.kind, d.domain or "-", size(d.nbytes) if d.nbytes else "-", d.status) for d in drafts]
    widths = [max(len(row[column]) for row in rows) for column in range(4)] if rows else []
    return ["  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths)), row[4]]) for row in rows]


def finish_note(result: GenerationResult, limit: int) -> str | None:
    """What to tell a person whose answer ended early, or None."""
    if result.finish_reason != "length":
        return None
    return f"The answer was cut at max_new_tokens = {limit}." if hit_limit(result, limit) else "The context is full."


def hit_limit(result: GenerationResult, limit: int) -> bool:
    """Whether max_new_tokens ended the answer; a "length" before that comes from a full context."""
    return result.stats.new_tokens >= limit
