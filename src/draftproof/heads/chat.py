"""Conversations as the target's own template writes them, and the place where a user's turn begins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError

Message = tuple[str, str]

# One word without spaces: templates that strip or re-wrap the user's text leave it whole.
_PLACEHOLDER = "DRAFTPROOFUSERTURN"


class Chat:
    """A tokenizer of transformers, with or without a chat template.

    Without one every prompt is a raw text: the last user turn.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))

    def ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The conversation up to where the answer begins; a message of role ``text`` as it stands."""
        if not self.has_template or messages[0][0] == "text":
            return tuple(self._tokenizer.encode(messages[-1][1]))
        return self._encode(self._render(messages))

    def opening(self, hint: str) -> tuple[int, ...] | None:
        """Ids after which the model itself writes a user's turn; ``None`` where the template hides it.

        ``hint`` is the system message, left out where the template knows none.
        """
        if not self.has_template:
            return None
        asked = ("user", _PLACEHOLDER)
        try:
            text = self._render([("system", hint), asked])
        except TemplateError:
            text = self._render([asked])
        before, found, _ = text.partition(_PLACEHOLDER)
        return self._encode(before) if found else None

    def text(self, ids: Sequence[int]) -> str:
        """Readable text, special tokens left out."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

    def _render(self, messages: Sequence[Message]) -> str:
        turns = [{"role": role, "content": text} for role, text in messages]
        return str(self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))
