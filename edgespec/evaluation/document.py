"""What an evaluation leaves behind: one JSON document with every figure, what it was measured on, and definitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

from drafts.figures import DEFINITIONS, RESAMPLES
from edgespec.bench.machine import describe
from edgespec.loading import device_of
from edgespec.models.onnx.graph_version import GRAPH_VERSION

if TYPE_CHECKING:
    from drafts.base import Draft
    from edgespec.decoding.session import Session
    from edgespec.engine import Engine
    from edgespec.evaluation.prompts import Skipped
    from edgespec.evaluation.run import Evaluation, Settings
    from edgespec.evaluation.trajectories import TrajectoryStore
    from predictor.costs import CostTable

FORMAT = 1  # raise when a key changes its meaning


def make_document(
    run_of: Mapping[str, Any],
    engine: Engine,
    evaluation: Evaluation,
    costs: CostTable,
    store: TrajectoryStore,
    failed: Sequence[Mapping[str, Any]],
    skipped: Sequence[Skipped],
) -> dict[str, Any]:
    """All of it as JSON values.

    run_of: command, files, turns, against. failed: entries of drafts that could not be loaded. skipped: lines of the
    prompt files that were not read; those that the evaluation skipped are added.
    """
    return {
        "format": FORMAT,
        "command": run_of["command"],
        "definitions": DEFINITIONS,
        "machine": describe(engine.config.threads or 0),
        "target": {"name": engine.target_facts.name, **target_build(engine)},
        "parameters": {
            **asdict(evaluation.settings),
            "gammas": list(evaluation.settings.gammas),
            "resamples": RESAMPLES,
            "turns": run_of["turns"],
            "against": run_of["against"],
        },
        "prompts": {
            "files": list(map(str, run_of["files"])),
            "used": len(evaluation.items),
            "domains": {domain: len(keys) for domain, keys in evaluation.domains().items()},
            "answer_tokens": sum(evaluation.answer_tokens.values()),
            "skipped": [asdict(entry) for entry in (*skipped, *evaluation.skipped)],
            "recorded": {"now": store.recorded, "reused": store.reused, "damaged": store.damaged},
        },
        "costs": {**costs.to_json(), "position": evaluation.usual_length},
        "drafts": [
            *(draft_entry(row.draft, row.domain, evaluation.summary(row), row.reason) for row in evaluation.rows),
            *failed,
        ],
        **evaluation.figures(costs, run_of["against"]),
        "by_prompt": evaluation.by_prompt(),
    }


def draft_entry(draft: Draft, domain: str, summary: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
    """One draft of the document. reason: why it was not evaluated, None if it was."""
    return {
        "name": draft.name,
        "kind": draft.kind,
        "domain": domain,
        "bytes": draft.nbytes,
        "reason": reason,
        "front": list(getattr(draft, "front", ())),
        "seconds_per_token": summary.get("seconds_per_token", {}),
        "coverage": summary.get("coverage"),
        "calibration_error": summary.get("calibration_error"),
    }


def target_build(engine: Engine) -> dict[str, Any]:
    """The target's weights and what runs them: all that decides which bits it computes."""
    device = device_of(engine.config)
    package = "onnxruntime" if device == "cpu" else "torch"
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:  # another build of it, with another name
        version = "unknown"
    return {
        "fingerprint": engine.target_facts.fingerprint,
        "weight_format": engine.config.weight_format,
        "device": device,
        "graph_version": GRAPH_VERSION,
        "runtime": f"{package} {version}",
    }


def answer_key(engine: Engine, session: Session, settings: Settings) -> dict[str, Any]:
    """All that decides what the target writes after given ids, and what is kept of it."""
    return {
        **target_build(engine),
        "eos": sorted(session.eos_ids),
        "tokens": session.token_count,
        "max_new_tokens": settings.max_new_tokens,
        "window": settings.window,
    }
