"""llama.cpp as a contender, through llama-cpp-python, on the very same GGUF file."""

from __future__ import annotations

import itertools
from typing import Any

from edgespec.bench.peers.base import Recorder

CONTEXT = 2048


class LlamaCppPeer:
    """`Llama.generate`, greedy, nothing kept between prompts."""

    def __init__(self, model: str, threads: int) -> None:
        from llama_cpp import Llama

        self._llama = Llama(
            model, n_ctx=CONTEXT, n_threads=threads, n_threads_batch=threads, logits_all=False, verbose=False
        )

    def generate(self, ids: list[int], new_tokens: int) -> dict[str, Any]:
        """Greedy answer to token ids; `generate` itself never looks at end tokens."""
        # Without this it would keep the keys and values of the part that two prompts share.
        self._llama.reset()
        answer: list[int] = []
        recorder = Recorder()
        for token in itertools.islice(self._llama.generate(ids, temp=0.0, repeat_penalty=1.0), new_tokens):
            recorder.emit()
            answer.append(token)
        return recorder.reply(answer)

    def close(self) -> None:
        self._llama.close()
