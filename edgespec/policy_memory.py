"""What a policy learned about drafts, kept in a file from run to run."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from edgespec.config import RuntimeConfig
from edgespec.errors import ModelError
from edgespec.files import write_text
from edgespec.loading import Target
from predictor.memory import PlannerState
from predictor.planner import AutoPlanner
from predictor.policies import Policy

_log = logging.getLogger(__name__)


class PolicyMemory:
    """What a policy learned, kept from run to run: bound to device, model, drafts and policy.

    A damaged file is set aside, a folder that cannot be written costs nothing but the memory.
    """

    def __init__(self, config: RuntimeConfig, target: Target, fingerprints: Mapping[str, str]) -> None:
        text = json.dumps([target.costs_file.stem, config.policy, sorted(fingerprints.items())])
        folder = config.policy_memory or target.costs_file.parent.parent / "policies"
        self.file: Path = folder / f"{_digest(text)}.json"

    def restore(self, policy: Policy) -> None:
        try:
            content = self.file.read_bytes()
        except OSError:
            return
        if not isinstance(policy, AutoPlanner):
            return
        try:
            policy.restore(PlannerState.from_json(json.loads(content)))
        except Exception as error:  # whatever it holds, it is only a saving
            aside = self.file.with_suffix(".damaged")
            _log.warning("what was learned about drafts (%s) is damaged and set aside: %s", self.file, error)
            with suppress(OSError):
                self.file.replace(aside)

    def keep(self, policy: Policy) -> None:
        if not isinstance(policy, AutoPlanner):
            return
        with suppress(OSError, ModelError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self.file, json.dumps(policy.state().to_json()))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
