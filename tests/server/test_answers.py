"""Whole answers, streams and errors, in OpenAI's shapes."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest

from edgespec.errors import EdgespecError, ParameterError, PromptError, RequestTooLong
from edgespec.server import app as app_module
from edgespec.server import body as body_module
from edgespec.server.app import App
from edgespec.server.settings import Limits, ServerSettings
from tests.server.conftest import Running, Start, until
from tests.server.fakes import CONTEXT, FULL, Script


def test_a_chat(server: Running) -> None:
    answer = server.chat(max_tokens=9).json
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there.", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 12,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    assert answer["model"] == "tiny"
    note = answer["edgespec"]
    assert note["draft_share"] == {"code": 0.75, "plain": 0.25}
    assert (note["gamma"], note["gamma_mean"], note["acceptance_rate"]) == ({"0": 1, "4": 3}, 3.0, 0.75)
    assert server.engine.submitted[0].params.max_new_tokens == 9


def test_a_completion(server: Running) -> None:
    answer = server.ask("/v1/completions", {"prompt": [72, 105], "logprobs": 2}).json
    assert answer["object"] == "text_completion"
    choice = answer["choices"][0]
    assert choice["text"] == "Hello there."
    assert choice["logprobs"]["tokens"][:2] == ["H", "e"]
    assert choice["logprobs"]["text_offset"] == list(range(12))
    assert choice["logprobs"]["token_logprobs"] == [-0.25] * 12
    assert choice["logprobs"]["top_logprobs"][0] == {"a": -0.5, "b": -9999.0}
    assert server.engine.submitted[0].raw


def test_logprobs_of_a_chat(server: Running) -> None:
    server.engine.script = Script(["H€"])
    content = server.chat(logprobs=True, top_logprobs=1).json["choices"][0]["logprobs"]["content"]
    top = [{"token": "a", "logprob": -0.5, "bytes": [97]}]
    assert content[0] == {"token": "H", "logprob": -0.25, "bytes": [72], "top_logprobs": top}
    assert content[1]["token"] == "bytes:\\xe2\\x82"  # part of a character
    assert server.chat(logprobs=True).json["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_logprobs_of_a_chat_come_with_the_chunk_of_their_text(server: Running) -> None:
    events = server.chat(logprobs=True, top_logprobs=1, stream=True).events
    choices = [event["choices"][0] for event in events]
    assert [
        (
            choice["delta"].get("content"),
            choice["logprobs"] and [each["token"] for each in choice["logprobs"]["content"]],
        )
        for choice in choices
    ] == [("", None), ("Hello", [*"Hello"]), (" there", [*" there"]), (".", ["."]), (None, None)]
    whole = server.chat(logprobs=True, top_logprobs=1).json["choices"][0]["logprobs"]["content"]
    assert [each for choice in choices if choice["logprobs"] for each in choice["logprobs"]["content"]] == whole


def test_logprobs_of_a_completion_come_with_the_chunk_of_their_text(server: Running) -> None:
    server.engine.script = Script(["H€", "", "llo"])
    ask = {"prompt": "a", "logprobs": 1}
    whole = server.ask("/v1/completions", ask).json["choices"][0]["logprobs"]
    pieces = [event["choices"][0] for event in server.ask("/v1/completions", {**ask, "stream": True}).events]
    assert [len(piece["logprobs"]["tokens"]) if piece["logprobs"] else None for piece in pieces] == [2, 3, None]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [each for piece in pieces if piece["logprobs"] for each in piece["logprobs"][name]] == whole[name]


def test_the_logprob_of_a_token_without_text_has_a_chunk(server: Running) -> None:
    """Such as that of the end: it has no text to come with."""
    server.engine.script = Script(["Hi", "\x00"])
    server.engine.script.hidden = "\x00"
    pieces = [event["choices"][0] for event in server.chat(logprobs=True, stream=True).events]
    assert [
        (piece["delta"].get("content"), len(piece["logprobs"]["content"])) for piece in pieces if piece["logprobs"]
    ] == [("Hi", 2), ("", 1)]


def test_a_stream(server: Running) -> None:
    answer = server.chat(stream=True, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.events
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert [event["choices"][0]["delta"]["content"] for event in events[1:4]] == ["Hello", " there", "."]
    assert events[2]["edgespec"] == {"draft": "code", "tokens": 6, "accepted": 5, "guessed": 5}
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * 4 + ["stop"]
    assert events[4]["edgespec"]["acceptance_rate"] == 0.75
    assert events[5]["choices"] == []
    assert events[5]["usage"]["completion_tokens"] == 12
    assert all(event["usage"] is None for event in events[:-1])
    assert len({event["id"] for event in events}) == 1


def test_a_stream_without_usage_and_of_a_completion(server: Running) -> None:
    events = server.ask("/v1/completions", {"prompt": "a", "stream": True}).events
    assert "".join(event["choices"][0]["text"] for event in events) == "Hello there."
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert "usage" not in events[0]


def test_whole_and_stream_say_the_same(server: Running) -> None:
    server.engine.script = Script(["a\n\ndata: [DONE]\n\n", "\u2028", '"\\', "😀", ""], finish="length")
    whole = server.chat().json["choices"][0]
    events = server.chat(stream=True).events
    streamed = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert streamed == whole["message"]["content"] == 'a\n\ndata: [DONE]\n\n\u2028"\\😀'
    assert events[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "length"


def test_an_empty_answer(server: Running) -> None:
    server.engine.script = Script([])
    assert server.chat().json["choices"][0]["message"]["content"] == ""
    assert server.chat(stream=True).events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("script", "status", "code"),
    [
        (Script(encode_error=PromptError("The template refuses.")), 400, "invalid_prompt"),
        (Script(submit_error=RequestTooLong("never")), 400, "context_length_exceeded"),
        (Script(submit_error=ParameterError("seed is 5")), 400, "invalid_value"),
        (Script(submit_error=FULL), 429, "queue_full"),
        (Script(submit_error=EdgespecError("the engine is closed")), 500, "engine_error"),
        (Script(submit_error=RuntimeError("secret path")), 500, "internal_error"),
        (Script([EdgespecError("the target failed")]), 500, "engine_error"),
    ],
)
def test_errors_before_a_word_have_a_status(
    server: Running, script: Script, status: int, code: str, stream: bool
) -> None:
    server.engine.script = script
    answer = server.chat(stream=stream)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert "secret" not in answer.body.decode()
    if status == 429:
        assert answer.headers["retry-after"] == "3"
    server.engine.script = Script()  # the next one works
    assert server.chat().status == 200


def test_an_error_after_words(server: Running) -> None:
    server.engine.script = Script(["Hello", EdgespecError("the target failed")])
    events = server.chat(stream=True).events
    assert events[1]["choices"][0]["delta"]["content"] == "Hello"
    assert events[-1]["error"]["message"] == "the target failed"
    assert server.chat().status == 500


def test_lengths(start: Start) -> None:
    server = start(limits=Limits(prompt_tokens=100))
    server.chat()
    server.chat(max_tokens=10**30, min_tokens=10**29)
    assert [one.params.max_new_tokens for one in server.engine.submitted] == [CONTEXT - 2, CONTEXT - 2]
    answer = server.chat(messages=[{"role": "user", "content": "x" * 101}])
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert "101 tokens" in answer.error["message"]
    assert server.chat(max_tokens=0).error["param"] == "max_tokens"
    assert len(server.engine.submitted) == 2


def test_a_prompt_that_fills_the_context(server: Running) -> None:
    for size, status in ((CONTEXT - 1, 200), (CONTEXT, 400), (CONTEXT * 50, 400)):
        answer = server.ask("/v1/completions", {"prompt": "x" * size})
        assert answer.status == status
    assert answer.error["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_the_time_for_a_request(start: Start, stream: bool) -> None:
    gate = threading.Semaphore(0)
    server = start(Script(gate=gate), limits=Limits(request_seconds=7))
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.chat(stream=stream)))
    thread.start()
    server.engine.arrived.acquire(timeout=10)
    assert 0 < server.engine.submitted[0].deadline <= 7
    server.engine.requests[0].cancel("deadline")
    thread.join(10)
    assert (answers[0].status, answers[0].error["code"]) == (504, "timeout")


def test_the_time_runs_while_a_prompt_is_encoded(start: Start) -> None:
    server, go = start(limits=Limits(request_seconds=0.05)), threading.Event()
    server.engine.encode = lambda prompt, raw: go.wait(10) and [1]  # type: ignore[method-assign, assignment]
    try:
        answer = server.chat()
    finally:
        go.set()
    assert (answer.status, answer.error["code"]) == (504, "timeout")
    assert not server.engine.submitted


def test_what_can_never_fit_is_refused_before_it_is_encoded(server: Running) -> None:
    seen: list[Any] = []
    server.engine.encode = lambda prompt, raw: seen.append(prompt) or [1]  # type: ignore[method-assign, assignment]
    try:
        for messages in ([{"role": "user", "content": "x" * CONTEXT}] * 2, [{"role": "user", "content": "x"}]):
            answers = [server.chat(messages=messages), server.ask("/v1/completions", {"prompt": "x" * CONTEXT * 3})]
            assert answers[1].error["code"] == "context_length_exceeded"
    finally:
        del server.engine.encode
    assert len(seen) == 1
    assert answers[0].status == 200


def test_the_body_is_let_go_of_while_an_answer_is_written(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    class Body(dict):  # type: ignore[type-arg]
        """One to which a weak reference may be had."""

    bodies: list[Any] = []

    async def read(*arguments: Any) -> Body:
        body = Body(await body_module.read_json(*arguments))
        bodies.append(weakref.ref(body))
        return body

    monkeypatch.setattr(app_module, "read_json", read)
    gate = threading.Semaphore(0)
    server = start(Script(gate=gate))
    thread = threading.Thread(target=server.chat)
    thread.start()
    server.engine.arrived.acquire(timeout=10)
    until(lambda: server.app.answering.running)
    until(lambda: not server.app.bodies.taken)
    assert [one() for one in bodies] == [None]
    gate.release(10)
    thread.join(10)


def test_what_there_is_when_the_time_is_over(server: Running) -> None:
    gate = threading.Semaphore(1)
    server.engine.script = Script(gate=gate)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(server.chat()))
    thread.start()
    server.engine.arrived.acquire(timeout=10)
    until(lambda: server.engine.requests[0]._deltas)
    server.engine.requests[0].cancel("deadline")
    thread.join(10)
    choice = answers[0].json["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello", "length")
    assert answers[0].json["edgespec"]["cancelled"] == "deadline"


def test_models(server: Running) -> None:
    listed = server.ask("/v1/models").json["data"]
    assert [model["id"] for model in listed] == ["tiny"]
    assert server.ask("/v1/models/tiny").json == listed[0]
    assert server.ask("/v1/models/other/one").error["code"] == "model_not_found"
    assert server.chat(model="tiny").status == 200
    server.engine.config.model = "/secret/models/tiny"
    assert App(server.engine, ServerSettings())._names == {"tiny"}  # no guessing of paths
    server.engine.config.model = "tiny"
    answer = server.chat(model="gpt-9")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")


def test_what_is_not_there(server: Running) -> None:
    nothing = server.ask("/v1/embeddings", {})
    assert (nothing.status, nothing.error["code"]) == (404, "not_found")
    answer = server.ask("/v1/chat/completions")
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert server.ask("/v1/models", {}).error["code"] == "wrong_method"
    for path in ("/", "/health", "/v1/models", "/metrics"):
        head = server.ask(path, method="HEAD")
        assert (head.status, head.body) == (200, b"")
        assert int(head.headers["content-length"]) > 0
    assert server.ask("/docs").status == server.ask("/openapi.json").status == 404
    assert server.ask("/v1/models", method="OPTIONS").status == 405
