"""How figures read."""

from __future__ import annotations

import pytest

from draftproof.report import words


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (words.times(2.344), "2.34×"),
        (words.times(None), "not measured"),
        (words.span([2.09, 2.514]), "2.09–2.51"),
        (words.span(None), ""),
        (words.median({"median": 1.5}), "1.50×"),
        (words.median(None), "not measured"),
        (words.percent(0.614), "61 %"),
        (words.percent(0.0061, 1), "0.6 %"),
        (words.percent(None), "not measured"),
        (words.signed(-0.031), "−3.1 %"),
        (words.signed(0.0), "+0.0 %"),
        (words.signed(None), "not measured"),
        (words.plain(2.0), "2.00"),
        (words.plain(None), "not measured"),
        (words.short(0.00130208), "0.0013"),
        (words.short(None), "not measured"),
        (words.count(18432), "18\u202f432"),
        (words.count(None), "not measured"),
        (words.mib(3 << 30), "3\u202f072 MiB"),
        (words.mib(None), "not measured"),
        (words.plural(1, "input"), "1 input"),
        (words.plural(12, "input"), "12 inputs"),
    ],
)
def test_figures_read_as_people_write_them(shown: str, expected: str) -> None:
    assert shown == expected


def test_every_claim_and_word_is_explained_in_a_sentence() -> None:
    assert set(words.CLAIMS) == {"bitwise", "guarded", "unproved", "fixed"}
    assert all(text.endswith(".") for text in (*words.CLAIMS.values(), *words.GLOSSARY.values()))
