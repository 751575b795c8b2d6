"""OpenAI's requests become asks, or complaints that name the field."""

from __future__ import annotations

import gc
import json
import tracemalloc
from typing import Any

import pytest

from edgespec.server import body as body_module
from edgespec.server.body import MOST_PARTS, parse_object
from edgespec.server.errors import ApiError
from edgespec.server.schemas import chat_ask, completion_ask, sampling_params

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> Any:
    return chat_ask({"messages": [USER], **fields}, {})


def test_all_fields_reach_the_parameters() -> None:
    ask = chat(
        max_tokens=7, temperature=0.5, top_p=0.9, presence_penalty=1, frequency_penalty=-1, logit_bias={"5": -100},
        stop=["a", "b"], seed=-3, logprobs=True, top_logprobs=2, top_k=4, min_p=0.1, repetition_penalty=1.1,
        stop_token_ids=[9], ignore_eos=True, min_tokens=2, n=1, stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    params = sampling_params(ask.params)
    assert (params.max_new_tokens, params.temperature, params.top_p) == (7, 0.5, 0.9)
    assert (params.presence_penalty, params.frequency_penalty) == (1, -1)
    assert params.logit_bias == {5: -100}
    assert params.stop == ("a", "b")
    assert params.seed == 2**64 - 3
    assert params.logprobs == 2
    assert (params.top_k, params.min_p, params.repetition_penalty) == (4, 0.1, 1.1)
    assert (params.stop_token_ids, params.ignore_eos, params.min_new_tokens) == ((9,), True, 2)
    assert ask.stream
    assert ask.include_usage


def test_null_is_as_if_it_was_not_given() -> None:
    names = ("max_tokens", "temperature", "top_p", "stop", "seed", "logprobs", "n", "stream", "stream_options", "tools")
    assert chat(**dict.fromkeys(names)).params == {}


def test_defaults_give_way() -> None:
    ask = chat_ask({"messages": [USER], "temperature": 0}, {"temperature": 0.8, "top_p": 0.5, "max_new_tokens": 9})
    assert ask.params == {"temperature": 0, "top_p": 0.5, "max_new_tokens": 9}
    assert completion_ask({"prompt": "a"}, {}).params["max_new_tokens"] == 16


def test_max_completion_tokens_is_the_newer_name() -> None:
    assert chat(max_tokens=5, max_completion_tokens=6).params["max_new_tokens"] == 6


def test_roles_and_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "s", "name": "x"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    assert chat(messages=messages).prompt == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": "no"},
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ({"messages": [USER] * 4097}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 4097}]}, "messages[0].content"),
        ({"stop": [5]}, "stop"),
        ({"stop": {}}, "stop"),
        ({"stop_token_ids": [1.5]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias.1"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"tools": [{}]}, "tools"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": "0"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 1e999}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"min_p": 10**400}, "min_p"),
        ({"max_tokens": -(10**400)}, "max_tokens"),
        ({"top_p": 1.1}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"stop": 5}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 501}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"logit_bias": {"1": float("inf")}}, "logit_bias"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias"),
        ({"seed": 1.5}, "seed"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 10**400}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
    ],
)
def test_complaints_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as raised:
        sampling_params(chat(**fields).params)
    assert raised.value.status == 400
    assert raised.value.kind == "invalid_request_error"
    assert raised.value.param == param
    assert len(raised.value.message) < 300


@pytest.mark.parametrize(
    ("prompt", "taken"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), (["", "b"], None), ([], None),
                          ("", None), ([""], None), (["a", "b"], None), ([1, "a"], None), (None, None), ([True], None)]
)  # fmt: skip
def test_prompts(prompt: Any, taken: Any) -> None:
    if taken is not None:
        assert completion_ask({"prompt": prompt}, {}).prompt == taken
        return
    with pytest.raises(ApiError) as raised:
        completion_ask({"prompt": prompt}, {})
    assert raised.value.param == "prompt"


@pytest.mark.parametrize("fields", [{"echo": True}, {"suffix": "x"}, {"best_of": 2}, {"logprobs": 21}])
def test_completions_refuse(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as raised:
        completion_ask({"prompt": "a", **fields}, {})
    assert raised.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("ask", "values"),
    [
        (chat_ask, {"messages": [1] * 50_000}),
        (chat_ask, {"messages": [USER], **{str(n): 1 for n in range(50_000)}}),
        (chat_ask, {"messages": [{"role": "user", "content": [1] * 50_000}]}),
        (chat_ask, {"messages": [USER], "logit_bias": {str(n): "x" for n in range(50_000)}}),
        (chat_ask, {"messages": [USER], "stop": [1] * 50_000}),
        (chat_ask, {"messages": [USER], "stop_token_ids": ["x"] * 50_000}),
        (completion_ask, {"prompt": [True] * 50_000}),
        (completion_ask, {"prompt": [[1, "a"] * 25_000]}),
        (completion_ask, {"prompt": {str(n): 1 for n in range(50_000)}}),
    ],
)
def test_a_complaint_is_about_the_first_of_many_and_costs_as_one(ask: Any, values: dict[str, Any]) -> None:
    """One kilobyte each would be gigabytes for a body of 8 MiB, and seconds in which nobody else is served."""
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as raised:
            ask(values, {})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20
    assert len(raised.value.message) < 300


def test_seeds_are_told_apart() -> None:
    seeds = (-1, 2**63 - 1, -(2**63), 0)
    assert len({chat(seed=seed).params["seed"] for seed in seeds}) == len(seeds)


def test_no_top_logprobs_may_be_said() -> None:
    assert "logprobs" not in chat(top_logprobs=0).params


def test_unknown_fields_are_ignored_and_named() -> None:
    assert chat(user="me", metadata={}, temprature=1, zzz=[1]).ignored == ["temprature", "zzz"]


def test_json() -> None:
    assert parse_object(b'{"a": "\\ud83d\\ude00 \\ud83d", "b": ["\\ude00"]}') == {"a": "😀 \ufffd", "b": ["\ufffd"]}
    assert parse_object(b'\xef\xbb\xbf{"a": 1.5e3}') == {"a": 1500}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"5", b'{"a": NaN}', b'{"a": -Infinity}', b"\xff\xfe\xfa",
             b'{"a": ' + b"9" * 5000 + b"}", b"[" * 100_000,
             b'{"a": 1e999}', b'{"a": "\xed\xa0\x80"}', '{"a": "\\ud800"}'.encode("utf-16"), b'{"a":' * 50_000]
)  # fmt: skip
def test_what_is_no_json_object(body: bytes) -> None:
    with pytest.raises(ApiError) as raised:
        parse_object(body)
    assert (raised.value.status, raised.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("part", ["[],", "{},", "1,"])
def test_a_body_of_many_values_is_refused_before_they_are_made(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Making millions of them takes seconds, in which neither other clients nor the engine get on."""
    marks = 1 if part == "1," else 2
    body = ('{"x":[' + part * ((MOST_PARTS - 2) // marks) + "0]}").encode()
    assert set(parse_object(body)) == {"x"}
    monkeypatch.setattr(json, "loads", lambda *args, **options: pytest.fail("it is parsed"))
    with pytest.raises(ApiError, match=f"more than the {MOST_PARTS} that it may have") as raised:
        parse_object(body.replace(b"0]", part.encode() * 2 + b"0]"))
    assert (raised.value.status, raised.value.code) == (413, "body_too_large")


@pytest.mark.parametrize("before", [True, False])
def test_nothing_is_collected_while_values_are_made(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(body_module, "_finite_float", lambda word: seen.append(gc.isenabled()) or float(word))
    was = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        assert parse_object(b'{"a": 0.5}') == {"a": 0.5}
        assert (seen, gc.isenabled()) == ([False], before)
        with pytest.raises(ApiError):
            parse_object(b'{"a": 0.5')
        assert gc.isenabled() == before
    finally:
        (gc.enable if was else gc.disable)()
