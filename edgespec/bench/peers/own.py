"""edgespec itself as a contender, and a bare decoder for what needs its logits or its time by width."""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

from edgespec.bench.peers.base import Recorder


class EdgespecPeer:
    """The engine as a user runs it: `generate` in a fresh session for every prompt."""

    def __init__(self, model: str, threads: int, weight_format: str, draft: str | None) -> None:
        from edgespec.decoding.params import SamplingParams
        from edgespec.engine import Engine

        self._params = SamplingParams(max_new_tokens=1, ignore_eos=True)
        drafts = [draft] if draft else None
        self._engine = Engine.from_pretrained(
            model, drafts=drafts, weight_format=weight_format, threads=threads, device="cpu"
        )

    @staticmethod
    def prepare(model: str, threads: int, weight_format: str, draft: str | None) -> None:
        """Build and cache the graph, so that the timed process starts from the cache as a second start does."""
        EdgespecPeer(model, threads, weight_format, draft).close()

    def generate(self, ids: list[int], new_tokens: int, temperature: float = 0.0) -> dict[str, Any]:
        """Answer to token ids; greedy, and end tokens are ignored, unless this was made otherwise."""
        params = dataclasses.replace(self._params, max_new_tokens=new_tokens, temperature=temperature)
        recorder = Recorder()
        result = self._engine.generate(ids, params, on_delta=lambda delta: recorder.emit(len(delta.token_ids)))
        if result.stats.reused_tokens:
            raise RuntimeError(
                f"{result.stats.reused_tokens} prompt tokens were reused; every run must be a fresh session"
            )
        return recorder.reply(result.token_ids, result.stats.to_dict())

    def close(self) -> None:
        self._engine.close()


class Probe:
    """A decoder without the engine around it."""

    def __init__(self, model: str, threads: int, weight_format: str, device: str = "cpu") -> None:
        from edgespec.bench.model import open_decoder

        self._decoder = open_decoder(Path(model), weight_format=weight_format, threads=threads, device=device)

    def widths(self, ids: list[int], position: int, widths: list[int], repeats: int) -> dict[str, float]:
        """Median milliseconds of one forward over `width` tokens at `position`; each repeat goes through all widths."""
        cache = self._decoder.new_cache(position + max(widths) + 1)
        self._decoder.forward(ids[:position], cache, logits=0)
        milliseconds: dict[int, list[float]] = {width: [] for width in widths}
        for repeat in range(repeats + 2):  # the first two warm up
            for width in widths:
                started = time.perf_counter()
                self._decoder.forward(ids[position : position + width], cache)
                elapsed = time.perf_counter() - started
                cache.crop(position)
                if repeat >= 2:
                    milliseconds[width].append(elapsed * 1e3)
        return {str(width): statistics.median(values) for width, values in milliseconds.items()}

    def gap(self, ids: list[int], left: int, right: int) -> dict[str, float]:
        """Teacher-forced over `ids`, last row: top-1 minus top-2 logit, and how far `left` and `right` are apart."""
        row = self._decoder.forward(ids, self._decoder.new_cache(len(ids)), logits=1).logits[0]
        second, first = sorted(row.tolist())[-2:]
        return {"margin": first - second, "gap": abs(float(row[left]) - float(row[right]))}

    def close(self) -> None:
        self._decoder.close()
