"""What came of every draft's blocks in every domain, whichever policy had chosen the draft."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from edgespec.bench.reporting.counters import by_draft
from edgespec.bench.reporting.pairs import Comparison, Part
from edgespec.bench.specbench.folder import PLAIN, Record
from edgespec.bench.words import counted, do
from edgespec.results import DraftTally

LEAST_BLOCKS = 50  # of fewer, a share may be off by 14 points and more (two standard errors)
LOOKUP = "ngram"


def draft_map(part: Part, comparisons: Mapping[str, Comparison]) -> dict[str, Any]:
    """By draft and domain, over the turns of all policies that count, every repeat.

    drafts: {draft: {domain: blocks, first, proposed, accepted, and the shares of these}}, domains without a block left
    out. left_out: why there is none, if the records do not tell.
    """
    domains = part.names("domain")
    records = [r for comparison in comparisons.values() for r in comparison.records() if r.stats]
    silent = sum(not _told(record) for record in records)
    if silent:
        why = (
            f"{counted(silent, 'answer')}, of an earlier version, {do(silent)} not say what came of each draft's blocks"
        )
        return {"domains": domains, "drafts": {}, "least_blocks": LEAST_BLOCKS, "left_out": why}
    by_domain = {domain: by_draft(r for r in records if r.domain == domain) for domain in domains}
    names = {name for found in by_domain.values() for name in found}
    return {
        "domains": domains,
        "drafts": {
            name: {domain: _shares(found[name]) for domain, found in by_domain.items() if name in found}
            for name in ordered(names, domains)
        },
        "least_blocks": LEAST_BLOCKS,
        "left_out": None,
    }


def ordered(drafts: Iterable[str], domains: Sequence[str]) -> list[str]:
    """Drafts that are named after a domain in the order of the domains, then the others, lookup and "plain" last."""
    place = {domain: number for number, domain in enumerate(domains)}
    return sorted(drafts, key=lambda name: (name == PLAIN, name == LOOKUP, place.get(name, len(place)), name))


def _told(record: Record) -> bool:
    """Whether an answer says what came of each draft's blocks; one without any has nothing to say."""
    return "by_draft" in record.stats or not record.stats.get("proposed_tokens")


def total(domains: Collection[Mapping[str, Any]]) -> dict[str, Any]:
    """A draft's figures of several domains put together."""
    return _shares(DraftTally(*(sum(cell[name] for cell in domains) for name in DraftTally._fields)))


def _shares(tally: DraftTally) -> dict[str, Any]:
    return {
        **tally._asdict(),
        "first_share": tally.first / tally.blocks if tally.blocks else None,
        "acceptance_rate": tally.accepted / tally.proposed if tally.proposed else None,
    }
