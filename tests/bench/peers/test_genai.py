"""onnxruntime-genai as it is asked, without it: up to the end of an answer, or for a number of tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.bench.peers.genai import GenaiPeer

END = 7


class Params:
    def __init__(self, model: Any) -> None:
        self.options: dict[str, Any] = {}

    def set_search_options(self, **options: Any) -> None:
        self.options.update(options)


class Generator:
    """Would write 1, 2, END, END, ...; below the minimum length it never writes END, as the real one."""

    def __init__(self, model: Any, params: Params) -> None:
        self._options = params.options
        self._tokens: list[int] = []

    def append_tokens(self, ids: list[int]) -> None:
        self._tokens += ids
        self._begin = len(ids)

    def is_done(self) -> bool:
        return self._tokens[-1] == END or len(self._tokens) >= self._options["max_length"]

    def generate_next_token(self) -> None:
        answered = len(self._tokens) - self._begin
        least = self._options["min_length"]
        self._tokens.append(answered + 1 if answered < 2 else END if len(self._tokens) >= least else 3)

    def get_next_tokens(self) -> list[int]:
        return self._tokens[-1:]


@pytest.fixture
def peer() -> GenaiPeer:
    made = GenaiPeer.__new__(GenaiPeer)
    made._genai = SimpleNamespace(GeneratorParams=Params, Generator=Generator)
    made._model = None
    return made


def test_an_answer_ends_at_its_end_token(peer: GenaiPeer) -> None:
    assert peer.generate([5, 6], 9, eos_ids=[END])["token_ids"] == [1, 2, END]


def test_without_end_tokens_it_writes_as_many_as_are_asked_for(peer: GenaiPeer) -> None:
    assert peer.generate([5, 6], 6)["token_ids"] == [1, 2, 3, 3, 3, 3]
