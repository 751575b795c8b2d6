"""Who takes part in the speed benchmark, what each is compared with, and what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edgespec.bench.peers.base import Contender
from edgespec.bench.peers.registry import peers
from edgespec.errors import ConfigError


def _own(name: str, weight_format: str, draft: str | None, weights: str, *, slow: bool = False) -> Contender:
    options = {"weight_format": weight_format, "draft": draft}
    packages = ("onnxruntime",)
    return Contender(name, "edgespec.bench.peers.own:EdgespecPeer", weights, options, packages=packages, slow=slow)


_EXACT = "the file's own blocks (4-bit where the file is)"

CONTENDERS = (
    _own("plain", "exact", None, _EXACT),
    _own("ngram", "exact", "ngram", _EXACT),
    _own("plain-int8", "int8", None, "8-bit blocks", slow=True),
    _own("plain-float32", "float32", None, "float32"),
    _own("ngram-float32", "float32", "ngram", "float32"),
    *peers(),
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A published ratio: rate of `over` by rate of `under` on the same prompt in the same repeat."""

    name: str
    over: str
    under: str
    groups: tuple[str, ...] = ("domain",)
    metric: Literal["decode", "prefill"] = "decode"


def _over_peers(over: str) -> tuple[Ratio, ...]:
    found = []
    for peer in ("llama.cpp", "transformers", "onnxruntime-genai"):
        found.append(Ratio(f"{over}/{peer}", over, peer))
        found.append(Ratio(f"{over}/{peer} prefill", over, peer, ("prefill",), "prefill"))
    return tuple(found)


def _lookup(over: str, under: str) -> tuple[Ratio, ...]:
    name = f"{over}/{under}"
    split = tuple(Ratio(f"{name} {group}", over, under, (group,)) for group in ("copying", "prose", "domain"))
    return (Ratio(name, over, under, ("domain", "copying", "prose")), *split)


RATIOS = (
    *_over_peers("plain"),
    Ratio("plain-float32/transformers", "plain-float32", "transformers"),
    Ratio("plain-float32/transformers prefill", "plain-float32", "transformers", ("prefill",), "prefill"),
    Ratio("plain-int8/plain", "plain-int8", "plain"),
    *_lookup("ngram", "plain"),
    *_lookup("ngram-float32", "plain-float32"),
    Ratio("ngram-float32/transformers-lookup copying", "ngram-float32", "transformers-lookup", ("copying",)),
)

# Pairs whose answers must be the same tokens: a draft may never change the text, and in float32 nor may the engine.
SAME_TEXT = (("ngram", "plain"), ("ngram-float32", "plain-float32"), ("plain-float32", "transformers"))


def choose(names: Sequence[str] | None, *, quick: bool = False) -> list[Contender]:
    """The contenders called `names`, in the fixed order; all of them for None (without the slow ones when `quick`)."""
    if names is None:
        return [contender for contender in CONTENDERS if not (quick and contender.slow)]
    known = {contender.name for contender in CONTENDERS}
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown contender {name!r}; use some of: {', '.join(c.name for c in CONTENDERS)}")
    return [contender for contender in CONTENDERS if contender.name in names]
