"""The text of every input, token by token, with how each token came about.

A token is the prompt's (chosen by the prompt's own forward), the model's own (the bonus of a round), or
drafted and accepted. A leg without a trace says nothing about that; its tokens are ``untraced``.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftproof.errors import EvidenceError
from draftproof.folder import Evidence
from draftproof.record import Round, Trace

PROMPT, OWN, DRAFTED, UNTRACED = "prompt", "own", "drafted", "untraced"
# Direction marks would reorder the page around them; they are named instead.
_DIRECTION = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_INVISIBLE = frozenset("\u00ad\u200b\u2060\ufeff")
_BREAKS = {"\n": "↵\n", "\r": "␍", "\t": "⇥\t", "\u2028": "↵\u2028", "\u2029": "↵\u2029", "\u00a0": "⍽"}
_HALF, _SPACE = "�", 0x20


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A run of text, or one character that is named because it would not show as itself."""

    text: str
    is_named: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One emitted token; ``place`` counts from 0 inside its round."""

    parts: tuple[Part, ...]
    kind: str
    round: int | None = None
    place: int | None = None
    source: str | None = None
    is_part_of_character: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class InputText:
    """One input's prompt and output; ``rounds`` and ``margins`` are what hovering shows."""

    label: str
    prompt: tuple[Part, ...]
    tokens: tuple[Token, ...]
    rounds: tuple[Mapping[str, Any], ...]
    margins: tuple[float | None, ...] | None


Margins = Mapping[str, Sequence[float | None]]


def input_texts(evidence: Evidence, margins: Margins | None) -> list[InputText]:
    """Every input that has a text, in the order of the suite.

    Raises:
        EvidenceError: pieces, tokens or margins of an input do not belong together.
    """
    labels = [label for label in evidence.roles if label in evidence.texts]
    return [_input_text(evidence, label, (margins or {}).get(label)) for label in labels]


def sources(texts: Sequence[InputText]) -> list[str]:
    """Drafters that had a token accepted, by name."""
    return sorted({token.source for text in texts for token in text.tokens if token.source is not None})


def _input_text(evidence: Evidence, label: str, margins: Sequence[float | None] | None) -> InputText:
    text = evidence.texts[label]
    pieces: Sequence[str] = text["pieces"]
    first = next(iter(evidence.of(label, evidence.arm)), None)
    trace = first.trace if first is not None else None
    if first is not None and first.token_ids and len(first.token_ids) != len(pieces):
        raise EvidenceError(f"{label}: {len(pieces)} pieces of text for {len(first.token_ids)} tokens")
    if margins is not None and len(margins) > len(pieces):
        raise EvidenceError(f"{label}: {len(margins)} margins for {len(pieces)} tokens")
    return InputText(
        label=label, prompt=show(text["prompt"], mark_breaks=False), tokens=tuple(_tokens(pieces, trace)),
        rounds=tuple(_round_row(r) for r in trace.rounds) if trace else (),
        margins=None if margins is None else tuple(margins),
    )  # fmt: skip


def _tokens(pieces: Sequence[str], trace: Trace | None) -> list[Token]:
    if trace is None:
        return [_token(piece, UNTRACED) for piece in pieces]
    places = [(round_, place) for round_ in trace.rounds for place in range(len(round_.emitted))]
    return [
        _token(piece, _kind(round_, place), round_, place)
        for piece, (round_, place) in zip(pieces, places, strict=True)
    ]


def _kind(round_: Round, place: int) -> str:
    if round_.index == 0:
        return PROMPT
    return DRAFTED if place < round_.num_accepted else OWN


def _token(piece: str, kind: str, round_: Round | None = None, place: int | None = None) -> Token:
    return Token(
        parts=show(piece) or (Part(text="·", is_named=True),), kind=kind,
        round=round_.index if round_ else None, place=place,
        source=round_.source if round_ and kind == DRAFTED else None,
        is_part_of_character=not piece or _HALF in piece,
    )  # fmt: skip


def _round_row(round_: Round) -> dict[str, Any]:
    return {
        "depth": round_.num_drafted, "accepted": round_.num_accepted, "emitted": len(round_.emitted),
        "source": round_.source, "reason": round_.reason, "redecided": round_.num_redecided,
    }  # fmt: skip


def show(text: str, *, mark_breaks: bool = True) -> tuple[Part, ...]:
    """The text in parts: what shows as itself, and named stand-ins for what does not."""
    parts: list[Part] = []
    for run in re.findall(r"[^\W\d_]+|.", text, re.DOTALL):
        is_plain = len(run) > 1 or (run == "\n" and not mark_breaks)
        stand_in = None if is_plain else _named(run)
        if stand_in is not None:
            parts.append(Part(text=stand_in, is_named=True))
        elif parts and not parts[-1].is_named:
            parts[-1] = Part(text=parts[-1].text + run)
        else:
            parts.append(Part(text=run))
    return tuple(parts)


def _named(character: str) -> str | None:
    """What to write for a character that is invisible, not a character, or would disturb the page."""
    if character in _BREAKS:
        return _BREAKS[character]
    code = ord(character)
    if code < _SPACE:
        return chr(0x2400 + code)
    is_odd = character in _DIRECTION | _INVISIBLE or unicodedata.category(character) in ("Cc", "Cs")
    return f"[U+{code:04X}]" if is_odd else None
