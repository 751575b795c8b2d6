"""Chat templates in the manner of families of models, a conversation for them, and the text that comes out."""

from __future__ import annotations

from typing import Any

from edgespec.decoding.template import ChatTemplate
from edgespec.models.tokenizer import Tokenizer
from tests.support.tiny import CHAT_TEMPLATE, tiny_tokenizer
from tests.support.tokenizers import wrapped

Messages = list[dict[str, Any]]

CHAT: Messages = [
    {"role": "system", "content": "Be terse."},
    {"role": "user", "content": "  the “hello”\n\n"},
    {"role": "assistant", "content": "<think>\nhm & <b>\n</think>\n\nwell, 'hi'"},
    {"role": "user", "content": "再见 👩‍👩‍👧"},
]

# Each in the manner of a family of models, with the constructs that its real template uses.
TEMPLATES = {
    "chatml": CHAT_TEMPLATE,
    "with a default system message": """
{%- if messages[0]['role'] == 'system' -%}
    {{- '<|im_start|>system\\n' + messages[0]['content'] }}
{%- else -%}
    {{- 'You are helpful.' }}
{%- endif %}
{%- for message in messages[1:] %}
    {{- '<|im_start|>' + message.role + '\n' + message.content | trim }}
    {%- if not loop.last %}{{ '<|im_end|>' }}{% endif %}
{%- endfor %}
""",
    "dropping thoughts of earlier turns": """
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.last < 0 and message.role == 'user' and message.content is string %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if '</think>' in content and loop.index0 < ns.last %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ content ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
""",
    "strict roles": """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- for m in rest %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant/...') }}
    {%- endif %}
    {%- if m.role == 'user' %}
        {{- ' [INST] ' + m.content + ' [/INST]' }}
    {%- else %}
        {{- m.content + eos_token }}
    {%- endif %}
{%- endfor %}
""",
    "tools, macros and JSON": """
{% macro turn(role, text='') %}
<|im_start|>{{ role|upper }}
  {{ caller() if caller else text }}<|im_end|>
{% endmacro %}
{% if tools is not none %}{{ tools|tojson(indent=2) }}{% endif %}
{% if not documents %}no documents{% endif %}
{% for m in messages if m.role != 'system' %}
    {% if loop.first %}first {{ loop.length }}/{{ loop.revindex }}{% endif %}
    {{ turn(m.role, m['content']) }}
    {{ {'role': m.role, 'text': m.content, 'n': [1, 2.5, none, true]}|tojson }}
    {{ loop.previtem.role if loop.previtem is defined else 'start' }} {{ loop.cycle('odd', 'even') }}
{% endfor %}
{% call turn('x') %}called{% endcall %}
{{ messages|map(attribute='role')|unique|join(', ') }}
{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ (messages|last).content[:2] }}
""",
    "loop controls and generation": """
{% for m in messages %}
    {% if m.role == 'system' %}{% continue %}{% endif %}
    {{ m.role }}:
    {%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endif %}
{% endfor %}
{{ '%s-%d' % ('a', 3) }}{{ '{}: {:.1f}'.format('b', 2) }}{{ 7 // 2 * 3 ** 2 + 1 }}{{ undefined_thing }}{{ [1] + [2] }}
{{ (1, 'x') }}{% set a, b = 1, 2 %}{{ a ~ b }}{{ 'abc'|replace('b', 'x') }}{{ strftime_now('%Y')|length }}
""",
}


def text_of(source: str, messages: Any = CHAT, tokenizer: Tokenizer | None = None, **options: Any) -> str:
    tokenizer = tokenizer or named()
    return tokenizer.decode(ChatTemplate(source, tokenizer).encode(messages, **options), skip_special=False)


def named() -> Tokenizer:
    return wrapped(tiny_tokenizer(), bos_id=0, named_tokens={"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"})
