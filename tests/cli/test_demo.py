"""`edgespec demo`: four prompts, two ways, honest ratios."""

from __future__ import annotations

import os
import signal

import pytest

from edgespec.cli import demo
from edgespec.cli.main import main
from tests.cli.fakes import FakeEngine, Script


def test_every_prompt_is_run_both_ways_interleaved(
    engine: type[FakeEngine], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "-n", "5"]) == 0
    out = capsys.readouterr().out
    warm_up, requests = engine.requests[:2], engine.requests[2:]
    assert [request["draft"] for request in warm_up] == ["off", "auto"]
    assert [request["draft"] for request in requests] == ["auto", "off"] * demo.REPEATS * len(demo.PROMPTS)
    assert [request["prompt"] for request in requests[:: 2 * demo.REPEATS]] == list(demo.PROMPTS.values())
    assert {request["params"].max_new_tokens for request in requests} == {5}
    for domain in ("code", "maths", "summary", "chat"):
        assert f"[{domain}]" in out
    assert out.count("\nanswer:\nHello there.") == 4, "the question is told from the answer"
    assert "with its own words where you can. (with a text of " in out, "which is not shown"
    assert out.count("Hello there.") == 4  # the first answer with drafts is shown, the other runs are not
    assert (
        out.count("-> drafts ngram; accepted 75%; 4.00 tokens/round; 10.0 tokens/s, plain 10.0 tokens/s: 1.00x;") == 4
    )
    assert out.count("same tokens as plain decoding") == 4
    assert "All four: 10.0 tokens/s, plain 10.0 tokens/s: 1.00x." in out
    assert engine.closed == 1


def test_a_difference_is_shown_with_its_gap(
    engine: type[FakeEngine], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.cli import fakes

    def unequal(text: str, ids: list[int], finish: str, draft: str | None, params: object = None) -> object:
        return original(text, [*ids[:1], 9, *ids[2:]] if draft else ids, finish, draft, params)

    original = fakes.result
    monkeypatch.setattr(fakes, "result", unequal)
    assert main(["demo"]) == 0
    out = capsys.readouterr().out
    assert out.count("leaves plain decoding at token 2, where its two best logits are 0.2500 apart") == 4
    assert "same tokens" not in out


def test_ctrl_c_ends_the_demo(engine: type[FakeEngine], capsys: pytest.CaptureFixture[str]) -> None:
    def press() -> str:
        if len(engine.requests) > 2:
            os.kill(os.getpid(), signal.SIGINT)
        return "two "

    engine.reset(Script(pieces=["one ", press, "three"]))
    assert main(["demo"]) == 130
    assert len(engine.requests) == 3
    assert capsys.readouterr().out.endswith("one two \n")


def test_ratios_count_decoded_tokens_over_seconds() -> None:
    from edgespec.results import GenerationResult, GenerationStats

    def side(*runs: tuple[int, float]) -> demo.Side:
        total = demo.Side()
        for tokens, seconds in runs:
            stats = GenerationStats(new_tokens=tokens, decode_seconds=seconds)
            total.add(GenerationResult("", (), "stop", 1, stats))
        return total

    assert demo._ratio(side((11, 1.0), (11, 3.0)), side((21, 1.0), (21, 1.0))) == (
        "20.0 tokens/s, plain 5.0 tokens/s: 4.00x"
    )
    assert demo._ratio(side((1, 0.0)), side((0, 0.0))).endswith("no ratio")
