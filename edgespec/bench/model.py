"""The model under test: its decoder and its token ids, loaded in the same way by every part of the benchmark."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgespec.bench.prompts import Prompt
    from edgespec.models.base import Decoder
    from edgespec.models.tokenizer import Tokenizer


def bench_folder() -> Path:
    """Where the benchmark keeps what is built once (other engines' graphs)."""
    from edgespec.catalog import home

    return Path(home()) / "bench"


def open_decoder(
    path: Path, *, weight_format: str, threads: int | None, device: str = "cpu", keep: bool = True
) -> Decoder:
    """A decoder for the model at `path`; with `keep`, graphs come from and go to the ordinary cache."""
    from edgespec.catalog import home
    from edgespec.models.build import build_decoder
    from edgespec.models.weights.opening import open_weights

    with open_weights(path) as weights:
        cache_dir = Path(home()) / "graphs" if keep else None
        return build_decoder(weights, device=device, weight_format=weight_format, threads=threads, cache_dir=cache_dir)


class PromptEncoder:
    """Turns the benchmark's texts into the token ids that every contender is fed."""

    def __init__(self, path: Path) -> None:
        from edgespec.decoding.template import ChatTemplate
        from edgespec.models.tokenizer import load_tokenizer

        self.tokenizer: Tokenizer = load_tokenizer(path)
        self._path = path
        template = self.tokenizer.chat_template
        self._template = ChatTemplate(template, self.tokenizer) if template else None

    def chat(self, text: str) -> list[int]:
        """One user message in the model's chat template (the bare text where it has none)."""
        return self.conversation([{"role": "user", "content": text}])

    def conversation(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Messages in the model's chat template (their texts with blank lines between where it has none).

        Raises PromptError.
        """
        if self._template is None:
            return self.raw("\n\n".join(message["content"] for message in messages))
        return self._template.encode(messages)

    def text(self, ids: Sequence[int]) -> str:
        """An answer's text, without its end token."""
        end = len(ids) - 1 if ids and ids[-1] in self.stop_ids else len(ids)
        return self.tokenizer.decode(ids[:end])

    @functools.cached_property
    def stop_ids(self) -> frozenset[int]:
        """Every id that ends an answer, as the engine has it: the model's, the tokenizer's and the template's."""
        from edgespec.models.weights.opening import open_weights

        with open_weights(self._path) as weights:
            ids = {*self.tokenizer.eos_ids, *weights.spec.eos_token_ids}
        turn_end = None if self._template is None else self._template.turn_end_id
        return frozenset(ids if turn_end is None else ids | {turn_end})

    def raw(self, text: str) -> list[int]:
        """The text as it stands."""
        return self.tokenizer.encode(text, add_special=True)

    def exactly(self, text: str, length: int) -> list[int]:
        """Exactly `length` tokens of `text`, which is repeated if it is too short."""
        ids = self.raw(text)
        while len(ids) < length:
            ids += self.tokenizer.encode("\n\n" + text)
        return ids[:length]

    def all(self, prompts: Sequence[Prompt]) -> dict[str, list[int]]:
        """Token ids of every prompt, by name."""
        return {prompt.name: self.chat(prompt.text) for prompt in prompts}
