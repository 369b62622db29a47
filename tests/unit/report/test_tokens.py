"""How every token came about, and characters that must not reach a page as they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftproof.errors import EvidenceError
from draftproof.folder import Decode, Evidence
from draftproof.record import Leg, Round, Trace
from draftproof.report import tokens
from draftproof.report.tokens import Part

IDS = (11, 12, 13, 14, 15)
ROUNDS = (
    Round(index=0, position=3, source="none", num_offered=0, num_drafted=0, num_accepted=0, emitted=(11,)),
    Round(index=1, position=4, source="suffix", num_offered=3, num_drafted=3, num_accepted=2,
          emitted=(12, 13, 14), reason="gain", num_redecided=1),
    Round(index=2, position=7, source="none", num_offered=0, num_drafted=0, num_accepted=0, emitted=(15,)),
)  # fmt: skip


@pytest.fixture
def small(honest: Evidence) -> Evidence:
    leg = Leg(label="a", arm="auto", pair=0, order=0, start_ns=0, duration_ns=1, num_tokens=5,
              tokens_sha256="", peak_bytes=1)  # fmt: skip
    trace = Trace(num_prompt=3, prefill_ns=1, rounds=ROUNDS)
    texts = {"a": {"prompt": "Once\nupon", "pieces": ["A", " b", "", "é", "\n"]}}
    decode = Decode(leg=leg, token_ids=IDS, trace=trace)
    return replace(honest, roles={"a": "diverse"}, decodes=(decode,), texts=texts)


def test_tokens_are_told_apart(small: Evidence) -> None:
    (text,) = tokens.input_texts(small, {"a": [0.5, 0.25, None, 4.0]})
    assert [(t.kind, t.round, t.place, t.source) for t in text.tokens] == [
        ("prompt", 0, 0, None), ("drafted", 1, 0, "suffix"), ("drafted", 1, 1, "suffix"),
        ("own", 1, 2, None), ("own", 2, 0, None),
    ]  # fmt: skip
    assert [t.is_part_of_character for t in text.tokens] == [False, False, True, False, False]
    assert text.tokens[2].parts == (Part(text="·", is_named=True),)
    assert text.tokens[4].parts == (Part(text="↵\n", is_named=True),)
    assert text.prompt == (Part(text="Once\nupon"),)
    assert text.margins == (0.5, 0.25, None, 4.0)  # shorter where stock had stopped
    assert text.rounds[1] == {
        "depth": 3, "accepted": 2, "emitted": 3, "source": "suffix", "reason": "gain", "redecided": 1,
    }  # fmt: skip
    assert tokens.sources([text]) == ["suffix"]


def test_without_a_trace_nothing_is_said(small: Evidence) -> None:
    decode = replace(small.decodes[0], trace=None)
    (text,) = tokens.input_texts(replace(small, decodes=(decode,)), None)
    assert {t.kind for t in text.tokens} == {"untraced"}
    assert {t.round for t in text.tokens} == {None}
    assert text.rounds == ()
    assert text.margins is None
    assert tokens.sources([text]) == []


def test_inputs_without_a_text_are_left_out(small: Evidence) -> None:
    assert tokens.input_texts(replace(small, texts={}), None) == []


def test_pieces_and_tokens_must_belong_together(small: Evidence) -> None:
    short: dict[str, dict[str, Any]] = {"a": {"prompt": "", "pieces": ["A"]}}
    with pytest.raises(EvidenceError, match="a: 1 pieces of text for 5 tokens"):
        tokens.input_texts(replace(small, texts=short), None)
    with pytest.raises(EvidenceError, match="a: 6 margins for 5 tokens"):
        tokens.input_texts(small, {"a": [1.0] * 6})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", (("plain", False),)),
        ("a  b", (("a  b", False),)),
        ("a\nb", (("a", False), ("↵\n", True), ("b", False))),
        ("\t\r\x00", (("⇥\t", True), ("␍", True), ("␀", True))),
        ("\u202eevil", (("[U+202E]", True), ("evil", False))),
        ("x\u200b", (("x", False), ("[U+200B]", True))),
        ("\ud83d", (("[U+D83D]", True),)),
        ("\x9b", (("[U+009B]", True),)),
        ("👩\u200d🔬 שלום", (("👩\u200d🔬 שלום", False),)),
        ("\ufffd", (("\ufffd", False),)),
        ("", ()),
    ],
)
def test_characters_that_would_not_show_are_named(text: str, shown: tuple[tuple[str, bool], ...]) -> None:
    assert tuple((part.text, part.is_named) for part in tokens.show(text)) == shown


def test_half_a_character_is_marked(small: Evidence) -> None:
    texts = {"a": {"prompt": "", "pieces": ["A", "b", "c", "d", "\ufffd"]}}
    (text,) = tokens.input_texts(replace(small, texts=texts), None)
    assert [t.is_part_of_character for t in text.tokens] == [False] * 4 + [True]


@given(st.text())
def test_nothing_is_lost_and_nothing_dangerous_stays(text: str) -> None:
    parts = tokens.show(text, mark_breaks=False)
    kept = "".join(part.text for part in parts if not part.is_named)
    assert not set(kept) & {"\u202e", "\u2066", "\x00", "\u200b", "\r", "\t"}
    assert kept == "".join(c for c in text if c == "\n" or tokens._named(c) is None)
    kept.encode("utf-8")
