"""Chat templates for the packaged tokenizer, which has none, and conversations."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer

from hf_dart.hub.loading import PACKAGED_TARGET

_TURNS = (
    "{% for m in messages %}"
    "{{ '<' + m.role + '>\n' }}{% if m.role == 'assistant' %}%s{% else %}{{ m.content + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}"
)
PLAIN = _TURNS.replace("%s", "{{ m.content + eos_token + '\n' }}")
MARKED = _TURNS.replace("%s", "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{{ '\n' }}")
# As Qwen3's: thoughts stay in the last turn only, and are switched off by an empty thought in the prompt.
THINKING = (
    "{% for m in messages %}{{ '<' + m.role + '>\n' }}"
    "{% if m.role == 'assistant' %}"
    "{% if loop.last and '</think>' not in m.content %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ (m.content if loop.last else m.content.split('</think>')[-1]) + eos_token + '\n' }}"
    "{% else %}{{ m.content + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
# The prompt for a turn is not how the turn begins.
OTHER_PROMPT = PLAIN.replace("{{ '<assistant>\n' }}", "{{ '<now write>\n' }}")

CONVERSATION = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "Add two numbers."},
    {"role": "assistant", "content": "def add(a, b):\n    return a + b"},
    {"role": "user", "content": "And multiply."},
    {"role": "assistant", "content": "def multiply(a, b):\n    return a * b"},
]


def chat_tokenizer(template: str | None = PLAIN) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(PACKAGED_TARGET)
    tokenizer.chat_template = template
    return tokenizer
