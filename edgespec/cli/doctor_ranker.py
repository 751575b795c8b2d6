"""Whether `edgespec doctor` finds a ranker for the drafts that are configured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgespec.cli.doctor_check import Check
from edgespec.errors import EdgespecError

if TYPE_CHECKING:
    from drafts.manifest import Manifest
    from drafts.zoo import TargetFacts
    from edgespec.config import RuntimeConfig

_ADVICE = "docs/predictor.md says how to make one; without it drafts are chosen by observation."


def checks(config: RuntimeConfig) -> list[Check]:
    """Which ranker is found, and how many of the drafts it knows; nothing where there are no two drafts to rank."""
    from edgespec import catalog
    from edgespec.loading import target_facts
    from edgespec.rankers import find_ranker

    try:
        facts = target_facts(config)
        manifests = {} if facts is None else _manifests(config, facts)
    except EdgespecError:  # the lines about model and drafts say why
        return []
    if facts is None or len(manifests) < 2:
        return []
    found, reasons = find_ranker(facts.fingerprint, manifests, catalog.home(config.home))
    known = "" if found is None else f"{found.label}, knows {len(found.names)} of {len(manifests)} drafts"
    if reasons:
        return [Check("ranker", "warn", "; ".join([*([known] if known else []), *reasons]), _ADVICE)]
    return [Check("ranker", "ok", known or "none for these drafts: they are chosen by observation")]


def _manifests(config: RuntimeConfig, facts: TargetFacts) -> dict[str, Manifest]:
    """Of the configured drafts that have weights and come from a set."""
    from edgespec.draft_loading import sources

    entries = [source for source in sources(config, facts) if not isinstance(source, str)]
    manifests = {entry.name: entry.manifest for entry in entries}
    return {name: each for name, each in manifests.items() if each is not None and each.kind != "phrases"}
