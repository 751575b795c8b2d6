"""The worker's side of a policy: an engine of its own, asked as a user would ask (`bench.serve` calls it)."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from edgespec.bench.peers.own import EdgespecPeer
from edgespec.memory.working_set import State

WARM_UP_GAMMA = 3
TRACE_EVENTS = 8000  # of the last answers: seven a round, and a file of about a megabyte
ANSWERS_LANE = "answers"


class PolicyArm(EdgespecPeer):
    """An engine under one policy. config: fields of RuntimeConfig."""

    def __init__(self, config: dict[str, Any]) -> None:
        from edgespec.config import RuntimeConfig
        from edgespec.decoding.params import SamplingParams
        from edgespec.engine import Engine
        from edgespec.telemetry.trace import Tracer

        self._tracer = Tracer(TRACE_EVENTS)
        self._params = SamplingParams(max_new_tokens=1)
        self._engine = Engine.from_pretrained(config=RuntimeConfig(**config), tracer=self._tracer)

    @staticmethod
    def prepare(config: dict[str, Any]) -> None:  # type: ignore[override]
        """Build what an engine keeps in files; under `plain`, so that what a policy learned stays as it was."""
        PolicyArm({**config, "policy": "plain"}).close()

    def answer(
        self, ids: list[int], new_tokens: int, label: dict[str, Any], temperature: float = 0.0
    ) -> dict[str, Any]:
        """One turn in a session of its own. label: what the trace says of it. resident: drafts held at its end."""
        with self._tracer.span("answer", lane=ANSWERS_LANE, **label):
            reply = self.generate(ids, new_tokens, temperature=temperature)
        return {**reply, "resident": self._resident()}

    def warm_up(self, ids: list[int], new_tokens: int, temperature: float = 0.0) -> list[str]:
        """Answer once with each draft that can run now (plainly, if none can), and return their names.

        The policy is not asked and sees nothing of it: what it has learned, what it holds, its generator and what is
        saved of it stay as they were.
        """
        from edgespec.decoding.round import Generation
        from predictor.planner import FixedPlanner

        params = dataclasses.replace(self._params, max_new_tokens=new_tokens, temperature=temperature)
        names = [name for name, status in self._engine.drafts.items() if status == "active"]
        for planner in [FixedPlanner(name, WARM_UP_GAMMA) for name in names] or [FixedPlanner(None, 0)]:
            session = self._engine.session()
            try:
                session.planner = planner
                generation = Generation(session, ids, params)
                while generation.step():
                    pass
            finally:
                session.close()
        return names

    def _resident(self) -> list[str]:
        held = self._engine.working_set
        return [] if held is None else [name for name, s in held.states().items() if s.state is State.RESIDENT]

    def keep(self) -> None:
        """Write down what the policy has learned; what happens to this process later does not lose it."""
        self._engine.remember()

    def write_trace(self, path: str) -> None:
        self._tracer.write(Path(path))
