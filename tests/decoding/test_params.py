"""SamplingParams: what is accepted, what it becomes, and what is refused with which words."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from edgespec.decoding.params import SamplingParams
from edgespec.errors import ParameterError

NAN, INF = float("nan"), float("inf")
HUGE, LONGEST = 10**400, 10**5000  # more than a float can be, more than Python writes out


def shown(value: Any) -> str:
    """The beginning of it, as the name of a case."""
    try:
        return repr(value)[:40]
    except ValueError:
        return "too many digits"


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8, None, np.float32(0)])  # B055
def test_greedy_temperatures(temperature: Any) -> None:
    assert SamplingParams(temperature=temperature, top_k=5, top_p=0.5).greedy
    assert not SamplingParams(temperature=1e-6).greedy


@pytest.mark.parametrize(
    "name, value",
    [
        *[("temperature", v) for v in (-1, -1e-9, NAN, INF, "hot", True, [1], HUGE, -HUGE)],  # B055
        *[("top_k", v) for v in (-2, 1.5, True, "5", None)],  # B056
        *[("top_p", v) for v in (0, -0.1, 1.5, NAN, True, None, HUGE)],  # B056
        *[("min_p", v) for v in (-0.1, 1, 1.5, NAN)],
        *[("repetition_penalty", v) for v in (0, -1, NAN, INF, None, HUGE)],
        *[(n, v) for n in ("frequency_penalty", "presence_penalty") for v in (-2.1, 2.1, NAN, "1", Fraction(HUGE))],
        *[("logit_bias", v) for v in (None, [1], {"a": 1.0}, {-1: 1.0}, {True: 1.0}, {1: NAN}, {1: -INF}, {1: 2000})],
        *[("logit_bias", v) for v in ({1: HUGE}, {1: LONGEST}, {HUGE: 1}, {LONGEST: 1}, {-LONGEST: 1})],
        *[("stop", v) for v in ("", [""], ["a", ""], [1], 5, None, b"x", {"a": 1})],
        *[("stop_token_ids", v) for v in (5, None, [-1], [1.0], ["1"], [True], [HUGE], [LONGEST])],
        *[("ignore_eos", v) for v in (1, None, "yes")],
        *[("max_new_tokens", v) for v in (-1, 1.0, True, None, NAN)],
        *[("min_new_tokens", v) for v in (-1, 1.0, True, None, 257, LONGEST)],
        *[("seed", v) for v in (-1, 1.0, "7", True, -LONGEST)],
        *[("logprobs", v) for v in (-1, 1.0, True)],
    ],
    ids=shown,
)
def test_wrong_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    assert "allowed" in message
    assert len(message) < 250
    assert isinstance(caught.value, ValueError)


def test_values_become_plain_python() -> None:
    params = SamplingParams(
        max_new_tokens=np.int64(3),
        temperature=np.float32(0.5),
        top_k=-1,
        stop=["b", "a", "b"],
        stop_token_ids=[7, 3, 7],
        logit_bias={np.int32(3): 1},
        seed=np.uint8(4),
    )
    assert params == SamplingParams(3, 0.5, stop=("b", "a"), stop_token_ids=(3, 7), logit_bias={3: 1.0}, seed=4)
    assert type(params.max_new_tokens) is int
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(max_new_tokens=0).max_new_tokens == 0
    assert isinstance(hash(params), int)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]


def test_from_dict() -> None:
    values = {"temperature": 0.5, "logit_bias": {"12": -1}, "stop": ["x"]}
    assert SamplingParams.from_dict(values) == SamplingParams(temperature=0.5, logit_bias={12: -1.0}, stop=("x",))
    assert SamplingParams.from_dict(dataclasses.asdict(SamplingParams(top_k=3))) == SamplingParams(top_k=3)
    for wrong, meant in {"max_tokens": "max_new_tokens", "temprature": "temperature", "topk": "top_k"}.items():  # B050
        with pytest.raises(ParameterError, match=f"{wrong}.*mean {meant}"):
            SamplingParams.from_dict({wrong: 1})
    with pytest.raises(ParameterError, match=r"'🦆'.*known: .*top_p"):
        SamplingParams.from_dict({"🦆": 1})
    with pytest.raises(ParameterError, match="logit_bias"):
        SamplingParams.from_dict({"logit_bias": {"x": 1}})
    with pytest.raises(ParameterError, match="logit_bias"):
        SamplingParams.from_dict({"logit_bias": {"9" * 5000: 1}})
