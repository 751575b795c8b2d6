"""The other engines that the benchmarks know, each with what it needs to take part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgespec.bench.peers.base import Contender
from edgespec.bench.peers.llama_cpp import CONTEXT

PREFIX = "peer:"  # of a peer among the arms of a run
LOOKUP_TOKENS = 10
# What llama-cpp-python's own documentation advises where there is only a CPU.
LLAMA_CPP_LOOKUP_TOKENS = 2

_PLAIN = ("domain", "prefill")
_SPECULATIVE = ("domain", "copying")
_FLOAT32 = "float32, dequantised"
_NO_ASSISTANT = (
    "no assistant given: name a Hugging Face checkpoint with this model's vocabulary "
    "('edgespec drafts export --format hf' makes one of a standalone draft)"
)


def peers(*, assistant: Path | None = None, context: int | None = None) -> tuple[Contender, ...]:
    """Every peer, installed or not.

    assistant: folder of a checkpoint that drafts for those that take one. context: most tokens of prompt and answer
    together, which llama.cpp sets aside memory for.
    """
    helper = {"assistant": str(assistant)} if assistant is not None else {}
    return (
        *_llama_cpp(context or CONTEXT),
        Contender(
            "onnxruntime-genai",
            "edgespec.bench.peers.genai:GenaiPeer",
            "its own 4-bit rounding of the dequantised weights (lossier)",
            groups=_PLAIN,
            packages=("onnxruntime_genai", "onnx_ir", "torch", "transformers"),
            python=(3, 11),
        ),
        _transformers("transformers", groups=_PLAIN),
        _transformers("transformers-lookup", {"lookup": LOOKUP_TOKENS}, groups=("copying",), slow=True),
        _transformers(
            "transformers-assisted", helper, groups=_SPECULATIVE, slow=True, absent=None if helper else _NO_ASSISTANT
        ),
        Contender(
            "flashspec",
            "edgespec.bench.peers.flashspec:FlashSpecPeer",
            f"{_FLOAT32}; {'draft checkpoint and prompt lookup' if helper else 'prompt lookup'}",
            helper,
            groups=_SPECULATIVE,
            packages=("flashspec", "torch", "transformers"),
            python=(3, 11),
            slow=True,
        ),
    )


def _llama_cpp(context: int) -> tuple[Contender, ...]:
    factory = "edgespec.bench.peers.llama_cpp:LlamaCppPeer"
    common: dict[str, Any] = {"packages": ("llama_cpp",), "gguf": True}
    lookup = {"context": context, "lookup": LLAMA_CPP_LOOKUP_TOKENS}
    return (
        Contender("llama.cpp", factory, "the same file", {"context": context}, groups=_PLAIN, **common),
        Contender("llama.cpp-lookup", factory, "the same file", lookup, groups=_SPECULATIVE, slow=True, **common),
    )


def _transformers(name: str, options: dict[str, Any] | None = None, **rest: Any) -> Contender:
    factory = "edgespec.bench.peers.hf:TransformersPeer"
    return Contender(name, factory, _FLOAT32, options or {}, packages=("torch", "transformers"), **rest)
