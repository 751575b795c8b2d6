"""ChatTemplate: the same text as transformers renders, and messages that cannot be rendered are named."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest

from edgespec.decoding.template import ChatTemplate
from edgespec.errors import PromptError
from tests.support.templates import CHAT, TEMPLATES, named, text_of
from tests.support.tiny import CHAT_TEMPLATE
from tests.support.tokenizers import byte_level


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_text_equals_transformers(name: str, prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source, tokenizer = TEMPLATES[name], named()
    (expected,), _ = render_jinja_template(
        [CHAT], chat_template=source, add_generation_prompt=prompt, **tokenizer.named_tokens
    )
    ids = ChatTemplate(source, tokenizer).encode(CHAT, add_generation_prompt=prompt)
    assert tokenizer.decode(ids, skip_special=False) == expected
    assert ids == tokenizer.encode(expected)


def test_decoded_text_of_the_tiny_tokenizer() -> None:
    """What these tests rely on: decoding with specials gives back exactly what was encoded."""
    tokenizer = byte_level()
    for text in ("<|im_start|>user\nhi<|im_end|>", "\ue000 再见"):
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


# --- messages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "roles",
    [
        ["system"],
        ["user", "user"],
        ["assistant", "user"],
        ["user", "assistant", "assistant"],
        ["tool"],
        ["system", "system"],
    ],
)
def test_orders_of_roles(roles: list[str]) -> None:  # B166
    messages = [{"role": role, "content": f"{i}"} for i, role in enumerate(roles)]
    expected = "".join(f"<|im_start|>{role}\n{i}<|im_end|>\n" for i, role in enumerate(roles))
    assert text_of(CHAT_TEMPLATE, messages, add_generation_prompt=False) == expected


def test_a_template_may_refuse_an_order() -> None:  # B166
    with pytest.raises(PromptError, match="does not accept this: roles must alternate user/assistant"):
        text_of(TEMPLATES["strict roles"], [{"role": "user", "content": "a"}] * 2)


def test_empty_content_is_content() -> None:  # B166
    assert (
        text_of(CHAT_TEMPLATE, [{"role": "user", "content": ""}], add_generation_prompt=False)
        == "<|im_start|>user\n<|im_end|>\n"
    )


def test_parts_are_joined() -> None:  # B170
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}]
    for content in (parts, tuple(parts)):
        assert text_of("{{ messages[0].content }}", [{"role": "user", "content": content}]) == "a b"


@pytest.mark.parametrize(
    "messages, words",
    [
        ([], ["empty"]),
        ((), ["empty"]),
        (None, ["list", "NoneType"]),
        ("hi", ["list", "str"]),
        ({"role": "user", "content": "hi"}, ["list", "dict"]),
        (5, ["list", "int"]),
        (iter([]), ["list"]),
        ([CHAT[0], "hi"], ["Message 1", "str"]),
        ([CHAT[0], None], ["Message 1", "NoneType"]),
        ([{"content": "hi"}], ["Message 0", "role"]),
        ([{"role": None, "content": "hi"}], ["Message 0", "role", "None"]),
        ([{"role": "", "content": "hi"}], ["Message 0", "role"]),
        ([CHAT[0], {"role": "user"}], ["Message 1", "user", "no", "content"]),
        ([CHAT[0], {"role": "user", "content": None}], ["message 1", "NoneType"]),
        ([CHAT[0], {"role": "user", "content": 5}], ["message 1", "int"]),
        ([CHAT[0], {"role": "user", "content": b"x"}], ["message 1", "bytes"]),
        ([{"role": "user", "content": []}], ["message 0", "empty list"]),
        ([{"role": "user", "content": {"type": "text", "text": "x"}}], ["message 0", "dict"]),
        ([{"role": "user", "content": ["x"]}], ["part 0", "message 0"]),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]}],
            ["part 1", "message 0", "text"],
        ),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], ["part 0"]),
    ],
)
def test_other_messages_are_named(messages: Any, words: list[str]) -> None:  # B166, B170
    with pytest.raises(PromptError) as caught:
        ChatTemplate(CHAT_TEMPLATE, named()).encode(messages)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_very_long_messages() -> None:
    with pytest.raises(PromptError, match=r"3000004 characters; 2097152 is the most"):
        text_of(CHAT_TEMPLATE, [{"role": "user", "content": "x" * 3_000_000}])
    assert (
        len(
            ChatTemplate("{{ messages[0].content[:3] | upper }}", named()).encode(
                [{"role": "user", "content": "x" * 2_000_000}]
            )
        )
        == 3
    )


def test_nothing_to_say() -> None:
    with pytest.raises(PromptError, match="nothing"):
        text_of("{% if false %}x{% endif %}")


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}]
    text_of(CHAT_TEMPLATE, messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "<|im_end|>"}]}]
    assert "\ufffd" in text_of(CHAT_TEMPLATE, [{"role": "user", "content": "lone \ud800"}])  # B157


# --- use --------------------------------------------------------------------------------------------------------------


def test_long_conversations_are_fine() -> None:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"{i} words"} for i in range(600)]
    for name in ("chatml", "dropping thoughts of earlier turns", "tools, macros and JSON"):
        assert "598 words" in text_of(TEMPLATES[name], messages)


def test_threads_share_a_template() -> None:
    chat = ChatTemplate(TEMPLATES["dropping thoughts of earlier turns"], named())
    expected = chat.encode(CHAT)
    wrong: list[list[int]] = []

    def work() -> None:
        wrong.extend(ids for ids in (chat.encode(CHAT) for _ in range(30)) if ids != expected)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_jinja_is_imported_late() -> None:
    code = "import sys, edgespec.decoding.template; assert 'jinja2' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
