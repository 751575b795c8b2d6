"""What the benchmark makes of texts is what the engine makes of them."""

from __future__ import annotations

from pathlib import Path

from edgespec import SamplingParams
from edgespec.bench.model import PromptEncoder
from tests.support.tiny import write_tiny
from tests.support.tiny_engine import SHAPE, load

MESSAGES = [
    {"role": "user", "content": "the hen"},
    {"role": "assistant", "content": "in the"},
    {"role": "user", "content": "and <|im_end|> then"},
]


def test_prompts_ends_and_texts_are_the_engines(tmp_path: Path) -> None:
    encoder = PromptEncoder(write_tiny(tmp_path / "model", **SHAPE))
    with load(tmp_path / "model", drafts=None) as engine:
        assert encoder.conversation(MESSAGES) == engine.encode(MESSAGES)
        assert encoder.chat("the hen") == engine.encode("the hen")
        assert encoder.stop_ids == engine._stop_ids()
        ids = encoder.chat("the hen")
        whole = engine.generate(ids, SamplingParams(max_new_tokens=9, ignore_eos=True))
        assert encoder.text(whole.token_ids) == whole.text
        end = SamplingParams(max_new_tokens=9, logit_bias={next(iter(encoder.stop_ids)): 100.0})
        ended = engine.generate(ids, end)
        assert ended.finish_reason == "stop"
        assert encoder.text(ended.token_ids) == ended.text == ""


def test_without_a_template_messages_are_texts_with_blank_lines_between(tmp_path: Path) -> None:
    encoder = PromptEncoder(write_tiny(tmp_path / "model", chat_template=None, **SHAPE))
    assert encoder.conversation(MESSAGES[:2]) == encoder.raw("the hen\n\nin the")
