"""The prompts a bench decodes: twelve packaged kinds of text, or a user's own JSONL file.

A packaged input is a *context* in one genre or language followed by a *request* about it. The context
does not repeat itself, so a drafter that copies from the prompt gains only what real text gives away.
``build_prompt`` cuts the context, never the request, so that every packaged prompt has the same number
of tokens under any tokenizer.

Prompts are joined as ids, not as text: text that is cut, decoded and tokenised again changes length.
So the ids need not be those the tokenizer gives for the joined text, and where one character takes
several ids (Chinese in a byte-level vocabulary) the cut can fall inside it. Neither affects exactness:
every arm decodes the same ids. Nothing here loads a tokenizer or decodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Protocol

from draftproof.errors import PromptError

LABELS = (
    "news",
    "dialogue",
    "code",
    "recipe",
    "poem",
    "question",
    "maths",
    "table",
    "german",
    "french",
    "spanish",
    "chinese",
)

_DIVIDER = "\n---\n"
_SEPARATOR = "\n\n"
# One word without spaces: templates that strip or re-wrap the user's text leave it whole.
_PLACEHOLDER = "DRAFTPROOFUSERTURN"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that building a prompt needs."""

    @property
    def chat_template(self) -> object:
        """The template of a conversation, ``None`` when the tokenizer has none."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of ``text``, with what the tokenizer puts around it when asked."""

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> object:
        """The rendered conversation: a string when ``tokenize`` is false."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchInput:
    """One prompt of a suite.

    ``context`` is what may be cut to reach a prompt length; when it is empty, ``request`` is the whole
    prompt and is used as it stands.
    """

    label: str
    context: str
    request: str


def diverse_inputs() -> tuple[BenchInput, ...]:
    """The twelve packaged inputs, in the order of ``LABELS``."""
    return tuple(_packaged(label) for label in LABELS)


def _packaged(label: str) -> BenchInput:
    source = resources.files("draftproof.bench") / "texts" / f"{label}.txt"
    context, _, request = source.read_text(encoding="utf-8").partition(_DIVIDER)
    return BenchInput(label=label, context=context.strip(), request=request.strip())


def read_suite(path: str | Path) -> tuple[BenchInput, ...]:
    """The inputs of a JSONL file, one object a line, in file order.

    An object holds ``label`` and either ``prompt`` or both ``context`` and ``request``, all of them
    non-empty strings. Blank lines and other keys are skipped.

    Raises:
        PromptError: the file cannot be read, is empty, or one of its lines is not such an object.
    """
    first_line: dict[str, int] = {}
    items = []
    for number, line in _numbered_lines(Path(path)):
        item = _parse_line(line, f"{path}, line {number}")
        if item.label in first_line:
            raise PromptError(
                f"{path}, line {number}: label {item.label!r} was used on line {first_line[item.label]};"
                " labels must differ"
            )
        first_line[item.label] = number
        items.append(item)
    if not items:
        raise PromptError(f"{path} is empty: expected one JSON object a line")
    return tuple(items)


def _numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise PromptError(f"no suite file at {path}") from error
    except OSError as error:
        raise PromptError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 text: byte {error.start} cannot be decoded") from error
    # Not splitlines: a JSON string may hold a bare U+2028, which that would take for a line end.
    return ((number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip())


def _parse_line(line: str, where: str) -> BenchInput:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise PromptError(f"{where}: not JSON that can be read: nested too deeply") from error
    if not isinstance(entry, dict):
        raise PromptError(f"{where}: expected a JSON object, found {type(entry).__name__}")
    label = _text(entry, "label", where)
    if "prompt" not in entry:
        context, request = _text(entry, "context", where), _text(entry, "request", where)
        return BenchInput(label=label, context=context, request=request)
    if "context" in entry or "request" in entry:
        raise PromptError(f"{where}: give either 'prompt' or 'context' and 'request', not both")
    return BenchInput(label=label, context="", request=_text(entry, "prompt", where))


def _text(entry: dict[str, object], key: str, where: str) -> str:
    if key not in entry:
        hint = "" if key == "label" else " (a line has 'prompt', or 'context' and 'request')"
        raise PromptError(f"{where}: key {key!r} is missing{hint}")
    value = entry[key]
    if not isinstance(value, str) or not value.strip():
        raise PromptError(f"{where}: {key!r} must be a non-empty string")
    return value


def build_prompt(item: BenchInput, tokenizer: Tokenizer, prompt_len: int, chat: bool) -> list[int]:
    """The ids of ``item``: exactly ``prompt_len`` of them when it has a context.

    The context keeps its beginning and is cut to what the blank line, the request and, with ``chat``,
    the tokenizer's template of a user's turn leave. Without a context the request is used whole,
    whatever its length.

    Raises:
        PromptError: the request is empty or does not fit, the context is too short to fill the
            prompt, or the tokenizer has no usable chat template.
    """
    if not item.request.strip():
        raise PromptError(f"{item.label}: the prompt is empty")
    head, tail = _chat_frame(tokenizer) if chat else (_leading_ids(tokenizer), [])
    request = tokenizer.encode(item.request, add_special_tokens=False)
    if not item.context:
        return [*head, *request, *tail]
    separator = tokenizer.encode(_SEPARATOR, add_special_tokens=False)
    context = tokenizer.encode(item.context, add_special_tokens=False)
    num_fixed = len(head) + len(separator) + len(request) + len(tail)
    room = prompt_len - num_fixed
    if room < 0:
        raise PromptError(
            f"{item.label}: the request needs {num_fixed} tokens, the prompt length is {prompt_len}"
        )
    if room > len(context):
        raise PromptError(
            f"{item.label}: context and request give {num_fixed + len(context)} tokens,"
            f" the prompt length is {prompt_len}"
        )
    return [*head, *context[:room], *separator, *request, *tail]


def _leading_ids(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before a text of its own accord, such as BOS; often nothing."""
    marked = tokenizer.encode(_PLACEHOLDER, add_special_tokens=True)
    plain = tokenizer.encode(_PLACEHOLDER, add_special_tokens=False)
    starts = range(len(marked) - len(plain) + 1)
    return next((marked[:i] for i in starts if marked[i : i + len(plain)] == plain), [])


def _chat_frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids before and after the user's text in a conversation that waits for its answer."""
    if tokenizer.chat_template is None:
        raise PromptError("the tokenizer has no chat template: bench this model without chat")
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": _PLACEHOLDER}], add_generation_prompt=True, tokenize=False
    )
    if not isinstance(rendered, str) or rendered.count(_PLACEHOLDER) != 1:
        raise PromptError("the chat template does not show the user's text exactly once: bench without chat")
    before, after = rendered.split(_PLACEHOLDER)
    return (
        tokenizer.encode(before, add_special_tokens=False),
        tokenizer.encode(after, add_special_tokens=False),
    )
