"""The `openai` package's own calls, unchanged."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import openai
import pytest

from edgespec.errors import EdgespecError
from tests.server.conftest import Running, until
from tests.server.fakes import FULL, Script

MESSAGES: list = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0.2, seed=1, stop=["x"])
    assert answer.choices[0].message.content == "Hello there."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer._request_id is not None
    assert answer.edgespec["acceptance_rate"] == 0.75  # type: ignore[attr-defined]


def test_stream(client: openai.OpenAI) -> None:
    options: dict = {"include_usage": True}
    with client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, stream_options=options) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello there."
    assert chunks[-1].usage is not None


def test_the_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=1) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello there."
    assert final.choices[0].logprobs is not None
    assert len(final.choices[0].logprobs.content or []) == 12


def test_completions(client: openai.OpenAI) -> None:
    assert client.completions.create(model="tiny", prompt="a", max_tokens=5).choices[0].text == "Hello there."
    pieces = client.completions.create(model="tiny", prompt=[1, 2], stream=True, logprobs=1)
    assert "".join(piece.choices[0].text for piece in pieces) == "Hello there."


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "edgespec"


def test_errors(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=MESSAGES, n=3)
    assert (wrong.value.param, wrong.value.type) == ("n", "invalid_request_error")
    server.engine.script = Script(submit_error=FULL)
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="tiny", messages=MESSAGES)
    server.engine.script = Script(["Hello", EdgespecError("the target failed")])
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="tiny", messages=MESSAGES)
    with pytest.raises(openai.APIError, match="the target failed"):
        list(client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True))


def test_a_client_that_gives_up(client: openai.OpenAI, server: Running) -> None:
    server.engine.script = Script(gate=threading.Semaphore(0))
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).chat.completions.create(model="tiny", messages=MESSAGES)
    until(lambda: server.engine.requests[0].status == "cancelled")


def test_a_stream_that_is_closed(client: openai.OpenAI, server: Running) -> None:
    server.engine.script = Script(gate=threading.Semaphore(1))
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    next(iter(stream))
    stream.close()
    until(lambda: server.engine.requests[0].status == "cancelled")


def test_several_at_once(server: Running) -> None:
    async def ask() -> list[str | None]:
        base = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="any", max_retries=0) as client:
            calls = [client.chat.completions.create(model="tiny", messages=MESSAGES) for _ in range(20)]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

    assert asyncio.run(ask()) == ["Hello there."] * 20
