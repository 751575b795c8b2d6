"""FlashSpec as a contender, float32 on the same dequantised weights.

It has no streaming; what it tells while it runs is one call of its bandit after each step, and that is where the clock
sits. It has no plain decoding either: without a checkpoint that drafts for it, it runs its prompt lookup alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgespec.bench.peers.base import Recorder
from edgespec.bench.peers.hf import build_model, load_assistant


class FlashSpecPeer:
    """`SpeculativeEngine.generate`, greedy, everything that is not said here as FlashSpec has it by default.

    assistant: folder of a checkpoint that drafts for it, beside prompt lookup.
    """

    def __init__(self, model: str, threads: int, assistant: str | None = None) -> None:
        import torch
        from flashspec import BanditConfig, FlashSpecConfig, SamplingConfig, SpeculativeEngine
        from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel

        torch.set_num_threads(threads)
        device, dtype = torch.device("cpu"), torch.float32
        target = TargetModel("target", device, dtype, model=build_model(Path(model)))
        settings: dict[str, Any] = {"device": "cpu", "sampling": SamplingConfig(temperature=0.0)}
        if assistant is None:
            drafter: Any = NgramDrafter()
            settings.update(drafter_strategy="bandit", bandit=BanditConfig(n_arms=1))
        else:
            checkpoint = load_assistant(Path(assistant), Path(model))
            drafter = HuggingFaceDrafter("assistant", device, dtype, model=checkpoint)
        self._clock = _clock()
        self._engine = SpeculativeEngine(FlashSpecConfig(**settings), [drafter], target, self._clock)

    def generate(self, ids: list[int], new_tokens: int, eos_ids: Sequence[int] = ()) -> dict[str, Any]:
        """Greedy answer to token ids, up to a token of `eos_ids`."""
        import torch

        recorder = Recorder()
        self._clock.start(recorder)
        with torch.inference_mode():
            result = self._engine.generate(torch.tensor([ids]), max_new_tokens=new_tokens, eos_token_ids=list(eos_ids))
        for moment, step in zip(self._clock.moments, result.arm_steps, strict=True):
            recorder.emit(step.emitted, at=moment)
        answer = result.output_ids[0, : result.n_tokens_generated].tolist()
        return recorder.reply(answer, recorder.rounds())


def _clock() -> Any:
    """The selector that FlashSpec itself takes for a single arm, noting when each step ended."""
    from flashspec.bandit import UCB1Selector

    class Clock(UCB1Selector):
        def start(self, recorder: Recorder) -> None:
            self.recorder = recorder
            self.moments: list[float] = []

        def update(self, *args: Any, **kwargs: Any) -> None:
            self.moments.append(self.recorder.now())
            super().update(*args, **kwargs)

    return Clock(n_arms=1)
