"""Prompt lookup on contexts small enough to read, and a count of the work it does."""

from __future__ import annotations

import pytest

from draftproof.drafters.base import Drafter
from draftproof.drafters.lookup import PromptLookup, copy_onward
from draftproof.errors import OptionError
from draftproof.record import Draft

A, B, C, D, X = 1, 2, 3, 4, 9


class CountedToken(int):
    """A token that counts how often any of its kind is hashed or compared."""

    num_operations = 0

    def __hash__(self) -> int:
        """Count, then hash like an int."""
        CountedToken.num_operations += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        """Count, then compare like an int."""
        CountedToken.num_operations += 1
        return super().__eq__(other)


def _propose(context: list[int], max_tokens: int, max_ngram: int = 5, min_ngram: int = 1) -> Draft:
    drafter: Drafter = PromptLookup(max_ngram=max_ngram, min_ngram=min_ngram)
    drafter.reset(context)
    return drafter.propose(max_tokens)


def test_is_a_drafter_named_lookup() -> None:
    """The runtime protocol check passes and the name is the one in the drafter table."""
    assert isinstance(PromptLookup(), Drafter)
    assert PromptLookup().name == "lookup"


def test_copies_what_followed() -> None:
    """The plain case: one earlier occurrence, enough text behind it."""
    draft = _propose([A, B, C, D, X, A, B], max_tokens=2)
    assert draft == Draft(ids=(C, D), source="lookup", match_length=2)


def test_most_recent_occurrence_wins() -> None:
    """A was followed by B first and by C later."""
    assert _propose([A, B, A, C, D, A], max_tokens=1).ids == (C,)


def test_longest_ngram_beats_a_more_recent_shorter_one() -> None:
    """X A was followed by B; A alone was followed by C later."""
    draft = _propose([X, A, B, A, C, X, A], max_tokens=1)
    assert draft == Draft(ids=(B,), source="lookup", match_length=2)


def test_max_ngram_limits_the_match() -> None:
    """With one-token n-grams the more recent continuation wins over the longer match."""
    draft = _propose([X, A, B, A, C, X, A], max_tokens=1, max_ngram=1)
    assert draft == Draft(ids=(C,), source="lookup", match_length=1)


def test_min_ngram_refuses_short_matches() -> None:
    """A two-token match is drafted from 2 on and not from 3 on."""
    context = [A, B, C, X, A, B]
    assert _propose(context, max_tokens=1, min_ngram=2).ids == (C,)
    assert _propose(context, max_tokens=1, min_ngram=3) == Draft(ids=(), source="lookup")


def test_periodic_text_drafts_full_length() -> None:
    """The copy runs into the end of the context and goes on in itself."""
    assert _propose([A, B, C, A, B, C, A], max_tokens=8).ids == (B, C, A, B, C, A, B, C)
    assert _propose([A, A], max_tokens=4).ids == (A, A, A, A)


@pytest.mark.parametrize("context", [[A], [A, B, C]])
def test_nothing_repeats_nothing_drafted(context: list[int]) -> None:
    """The end of the context never matches itself."""
    assert _propose(context, max_tokens=4) == Draft(ids=(), source="lookup")


def test_nothing_is_drafted_before_reset() -> None:
    """A new drafter has an empty context, which is not an error."""
    assert PromptLookup().propose(4) == Draft(ids=(), source="lookup")


def test_zero_tokens_may_be_asked() -> None:
    """The match is reported even when no id is wanted."""
    assert _propose([A, A], max_tokens=0) == Draft(ids=(), source="lookup", match_length=1)


def test_output_is_context_too() -> None:
    """What was observed after the prompt is matched and copied like the prompt."""
    drafter = PromptLookup()
    drafter.reset([A])
    drafter.observe([B, C])
    drafter.observe([A])
    assert drafter.propose(2).ids == (B, C)


def test_the_callers_list_is_not_kept() -> None:
    """Changing the prompt list after reset changes nothing."""
    prompt = [A, B, A]
    drafter = PromptLookup()
    drafter.reset(prompt)
    prompt.append(X)
    assert drafter.propose(1).ids == (B,)


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(0, 0), (5, 0), (2, 3), (-1, -2)])
def test_impossible_ngrams_are_refused(max_ngram: int, min_ngram: int) -> None:
    """The message names both values found."""
    with pytest.raises(OptionError, match=f"min_ngram={min_ngram} and max_ngram={max_ngram}"):
        PromptLookup(max_ngram=max_ngram, min_ngram=min_ngram)


@pytest.mark.parametrize("num_distinct", [1, 2, 1000])
@pytest.mark.parametrize("num_tokens", [500, 2000])
def test_work_a_token_does_not_grow_with_the_context(num_tokens: int, num_distinct: int) -> None:
    """Each token hashes and compares at most the ids of its n-grams, once for writing, once for reading."""
    max_ngram = 5
    drafter = PromptLookup(max_ngram=max_ngram)
    drafter.reset([CountedToken(0)])
    CountedToken.num_operations = 0
    for i in range(num_tokens):
        drafter.observe([CountedToken(i * i % num_distinct)])
        drafter.propose(4)
    num_ids = max_ngram * (max_ngram + 1) // 2
    assert 0 < CountedToken.num_operations <= 2 * 2 * num_ids * num_tokens


def test_copy_onward_repeats_the_tail() -> None:
    """From the last token, from the middle, and short of the end."""
    assert copy_onward([A, B, C], 2, 3) == (C, C, C)
    assert copy_onward([A, B, C], 1, 5) == (B, C, B, C, B)
    assert copy_onward([A, B, C], 0, 2) == (A, B)
