"""What the engine's tests share: a tiny model with drafts, and a plain decoding loop that knows no rounds."""

from __future__ import annotations

from pathlib import Path

from edgespec import Engine, SamplingParams

SHAPE = {"head_dim": 16}
QUESTION = "the hen and the hen and the hen and the"
GREEDY = SamplingParams(max_new_tokens=24, ignore_eos=True)


def load(folder: Path, **settings) -> Engine:
    return Engine.from_pretrained(str(folder), **{"threads": 1, "weight_format": "float32", **settings})


def plain(engine: Engine, prompt, params: SamplingParams = GREEDY) -> tuple[int, ...]:
    """Greedy answer by a loop of its own: one token per forward, no session, no rounds."""
    decoder = engine._target.decoder
    cache, ids, out = decoder.new_cache(), engine.encode(prompt), []
    logits = decoder.forward(ids, cache, logits=1).logits[0]
    for _ in range(params.max_new_tokens):
        out.append(int(logits[: engine.tokenizer.size].argmax()))
        logits = decoder.forward(out[-1:], cache).logits[0]
    return tuple(out)
