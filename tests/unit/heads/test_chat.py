"""Conversations become the template's ids; the opening ends where a user's text begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof.heads.chat import Chat
from draftproof.models.load import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('none') }}{% endif %}" + TEMPLATE


@pytest.fixture
def tokenizer(tiny_folder: Callable[..., Path]) -> Any:
    return load_tokenizer(tiny_folder("llama"))


def chat(tokenizer: Any, template: str | None) -> Chat:
    tokenizer.chat_template = template
    return Chat(tokenizer)


def test_a_conversation_is_the_templates(tokenizer: Any) -> None:
    made = chat(tokenizer, TEMPLATE)
    ids = made.ids([("user", "Hi"), ("assistant", "Yes?"), ("user", "Why")])
    assert made.text(ids) == "<user>Hi</><assistant>Yes?</><user>Why</><assistant>"


def test_a_raw_text_is_left_as_it_stands(tokenizer: Any) -> None:
    assert chat(tokenizer, TEMPLATE).ids([("text", "So it")]) == tuple(tokenizer.encode("So it"))


def test_without_a_template_the_last_turn_is_raw(tokenizer: Any) -> None:
    made = chat(tokenizer, None)
    assert not made.has_template
    assert made.ids([("user", "Hi")]) == tuple(tokenizer.encode("Hi"))
    assert made.opening("a hint") is None


@pytest.mark.parametrize(
    ("template", "text"),
    [(TEMPLATE, "<system>a hint</><user>"), (NO_SYSTEM, "<user>"), ("{{ 'hidden' }}", None)],
)
def test_the_opening_of_a_users_turn(tokenizer: Any, template: str, text: str | None) -> None:
    made = chat(tokenizer, template)
    opening = made.opening("a hint")
    assert (None if opening is None else made.text(opening)) == text
