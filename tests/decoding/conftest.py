"""The conversation that the tests of rounds, counters and seeds follow."""

from __future__ import annotations

import pytest

from tests.support.scripted import PROMPT, ToyDecoder, plain_greedy


@pytest.fixture(scope="module")
def text() -> list[int]:
    """PROMPT and its plain greedy continuation on the toy decoder."""
    return PROMPT + plain_greedy(ToyDecoder(), PROMPT, 60)
