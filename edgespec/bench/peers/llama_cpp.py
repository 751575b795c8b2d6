"""llama.cpp as a contender, through llama-cpp-python, on the very same GGUF file; plain or with its prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.bench.peers.base import Recorder

CONTEXT = 2048


class LlamaCppPeer:
    """`Llama.generate`, greedy, nothing kept between prompts.

    context: most tokens of prompt and answer together. lookup: tokens that its prompt lookup proposes at a time, 0 for
    plain decoding; with it the binding computes and keeps the logits of every position, the prompt's too.
    """

    def __init__(self, model: str, threads: int, context: int = CONTEXT, lookup: int = 0) -> None:
        from llama_cpp import Llama

        self._context = context
        self._lookup = _counting_lookup(lookup) if lookup else None
        self._llama = Llama(
            model,
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            logits_all=lookup > 0,  # else the binding, which keeps all with a draft model, has room for one batch only
            verbose=False,
            draft_model=self._lookup,
        )

    def generate(self, ids: list[int], new_tokens: int, eos_ids: Sequence[int] = ()) -> dict[str, Any]:
        """Greedy answer to token ids, up to a token of `eos_ids`; `generate` itself never looks at end tokens."""
        if len(ids) + new_tokens > self._context:
            raise ValueError(f"{len(ids)} prompt tokens and {new_tokens} new ones exceed the context, {self._context}")
        # Without this it would keep the keys and values of the part that two prompts share.
        self._llama.reset()
        if self._lookup is not None:
            self._lookup.rounds = 0
        answer: list[int] = []
        rounds: list[int] = []  # the round of each token
        recorder = Recorder()
        for token in self._llama.generate(ids, temp=0.0, repeat_penalty=1.0):
            recorder.emit()
            answer.append(token)
            if self._lookup is not None:
                rounds.append(self._lookup.rounds)
            if len(answer) == new_tokens or token in eos_ids:
                break
        stats = {"round_tokens": [rounds.count(number) for number in range(1, rounds[-1] + 1)]} if rounds else None
        return recorder.reply(answer, stats)

    def close(self) -> None:
        self._llama.close()


def _counting_lookup(tokens: int) -> Any:
    """llama-cpp-python's prompt lookup, which also counts in `rounds` how often it was asked: once a forward."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    class Counting(LlamaPromptLookupDecoding):
        rounds = 0

        def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
            self.rounds += 1
            return super().__call__(input_ids, **kwargs)

    return Counting(num_pred_tokens=tokens)
