"""Chat templates of strangers: no way out of the sandbox, and bounds on time and memory; always a PromptError."""

from __future__ import annotations

import time

import pytest

from edgespec.decoding import sandbox
from edgespec.decoding.template import ChatTemplate
from edgespec.errors import PromptError
from tests.support.tokenizers import byte_level


def text_of(source: str) -> str:
    tokenizer = byte_level()
    ids = ChatTemplate(source, tokenizer).encode([{"role": "user", "content": "hello, <b> & 'you'"}])
    return tokenizer.decode(ids, skip_special=False)


GROW = "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ no_such.thing }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{{ messages[0].content.format.__globals__ }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}",
        "{{" * 3000,
        "{{ " + "(" * 3000 + ")" * 3000 + " }}",
        "{{ 1 / 0 }}",
        "{{ messages[99].content }}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ 2 ** (10 ** 9) }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ 'x\n' | indent(10 ** 8) }}",
        "{{ '%1000000000d' % 3 }}",
        "{{ '%*d' % (1000000000, 3) }}",
        "{{ '{:>1000000000}'.format(3) }}",
        "{{ '{:>{}}'.format(3, 1000000000) }}",
        "{{ '%1000000000d' | format(3) }}",
        "{{ range(10 ** 8) | list }}",
        "{{ ('x,' * 100000) | join('y' * 100000) }}",
        "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
        "{{ {'x' * 2000000: 1} | tojson }}{{ 'y' * 4000000 }}",
        "{% for i in range(100000) %}" + "x" * 10000 + "{% endfor %}",
        "{% macro m() %}{% for i in range(100000) %}" + "x" * 10000 + "{% endfor %}{% endmacro %}{{ m()|length }}",
        "{{ lipsum(n=100000) }}",
        GROW.replace("STEP", "ns.x ~ ns.x"),
        GROW.replace("STEP", "ns.x + ns.x"),
        GROW.replace("STEP", "ns.x * 2"),
        GROW.replace("STEP", "[ns.x, ns.x]"),
        GROW.replace("STEP", "(ns.x, ns.x)"),
        GROW.replace("STEP", "{'a': ns.x, 'b': ns.x}"),
        GROW.replace("STEP", "ns.x.replace('a', ns.x)"),
        GROW.replace("STEP", "'%s%s' % (ns.x, ns.x)"),
        GROW.replace("STEP", "namespace(a=ns.x, b=ns.x)"),
        GROW.replace("{% set ns.x = STEP %}", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"),
        "x" * 300_000 + "{{ messages[0].content }}",
    ],
)
def test_bad_templates_are_refused(source: str) -> None:
    began = time.thread_time()
    with pytest.raises(PromptError) as caught:
        text_of(source)
    assert time.thread_time() - began < 4
    assert "chat template" in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_endless_templates_are_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    began = time.thread_time()
    with pytest.raises(PromptError, match="runs for more than"):
        text_of(source)
    assert time.thread_time() - began < 2


def test_a_failed_render_does_not_stay() -> None:
    chat = ChatTemplate("{{ 'x' * messages[0].content|int }}", byte_level())
    with pytest.raises(PromptError, match="refused"):
        chat.encode([{"role": "user", "content": "999999999"}])
    assert len(chat.encode([{"role": "user", "content": "7"}])) == 7
