"""Both retrieval drafters against references that scan the whole context at every step.

The references are quadratic and share no code with the drafters. Alphabets are small, because only
repetition makes these drafters work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftproof.drafters.base import Drafter
from draftproof.drafters.lookup import PromptLookup
from draftproof.drafters.suffix import SuffixAutomaton, SuffixAutomatonDrafter
from draftproof.record import Draft


def _texts(max_size: int) -> st.SearchStrategy[list[int]]:
    """Texts over one to four tokens, and texts of repeated phrases, which match at length."""
    letters = st.integers(1, 4).flatmap(
        lambda n: st.lists(st.integers(0, n - 1), min_size=1, max_size=max_size)
    )
    phrases = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=3)
    repeated = phrases.flatmap(lambda p: st.lists(st.sampled_from(p), min_size=1, max_size=max_size // 5))
    return letters | repeated.map(lambda chosen: [token for phrase in chosen for token in phrase])


TEXTS = _texts(40)
DRAFTERS = pytest.mark.parametrize(
    "make",
    [PromptLookup, lambda: PromptLookup(max_ngram=3, min_ngram=2), SuffixAutomatonDrafter],
    ids=["lookup", "lookup-3-2", "suffix"],
)


def _earlier_ends(context: Sequence[int], length: int) -> list[int]:
    """Where the last ``length`` tokens also end, before the end of the context; ascending."""
    suffix = context[len(context) - length :]
    return [end for end in range(length, len(context)) if context[end - length : end] == suffix]


def _longest_match(context: Sequence[int]) -> int:
    """Length of the longest suffix of ``context`` that also ends earlier."""
    return max(m for m in range(len(context)) if m == 0 or _earlier_ends(context, m))


def _continued(context: Sequence[int], start: int, num_tokens: int) -> tuple[int, ...]:
    """Copy token by token onto the context itself."""
    text = list(context)
    for i in range(num_tokens):
        text.append(text[start + i])
    return tuple(text[len(context) :])


def _reference_lookup(context: Sequence[int], max_tokens: int, max_ngram: int, min_ngram: int) -> Draft:
    for length in range(max_ngram, min_ngram - 1, -1):
        ends = _earlier_ends(context, length) if length < len(context) else []
        if ends:
            ids = _continued(context, ends[-1], max_tokens)
            return Draft(ids=ids, source="lookup", match_length=length)
    return Draft(ids=(), source="lookup")


@given(text=TEXTS, max_tokens=st.integers(0, 12), ngrams=st.lists(st.integers(1, 8), min_size=2, max_size=2))
def test_lookup_equals_the_scan_at_every_step(text: list[int], max_tokens: int, ngrams: list[int]) -> None:
    """Longest n-gram, most recent occurrence, self-extended: the same draft as the scan."""
    min_ngram, max_ngram = sorted(ngrams)
    drafter = PromptLookup(max_ngram=max_ngram, min_ngram=min_ngram)
    drafter.reset(text[:1])
    for i in range(1, len(text) + 1):
        expected = _reference_lookup(text[:i], max_tokens, max_ngram, min_ngram)
        assert drafter.propose(max_tokens) == expected
        drafter.observe(text[i : i + 1])


@given(text=TEXTS)
def test_automaton_match_is_the_longest_earlier_suffix(text: list[int]) -> None:
    """At every step, whatever the recency bound, and the end is one of the earlier ends."""
    for max_recency_steps in (0, 1, 32):
        automaton = SuffixAutomaton(max_recency_steps)
        for i, token in enumerate(text, start=1):
            automaton.append(token)
            assert automaton.match_length == _longest_match(text[:i])
            if automaton.match_length:
                assert automaton.match_end in _earlier_ends(text[:i], automaton.match_length)


@given(text=TEXTS, max_recency_steps=st.integers(1, 6))
def test_automaton_recency_is_as_documented(text: list[int], max_recency_steps: int) -> None:
    """The end is the most recent one if the match there was less than the bound longer."""
    automaton = SuffixAutomaton(max_recency_steps)
    for i, token in enumerate(text, start=1):
        automaton.append(token)
        length = _longest_match(text[:i])
        most_recent = max(_earlier_ends(text[:i], length))
        if length and _longest_match(text[:most_recent]) < length + max_recency_steps:
            assert automaton.match_end == most_recent


@given(text=_texts(30), max_tokens=st.integers(0, 12), min_match=st.integers(1, 4))
def test_suffix_equals_the_scan_at_every_step(text: list[int], max_tokens: int, min_match: int) -> None:
    """Texts no longer than the recency bound allow no older occurrence, so the draft is determined."""
    drafter = SuffixAutomatonDrafter(min_match=min_match)
    drafter.reset(text[:1])
    for i in range(1, len(text) + 1):
        length = _longest_match(text[:i])
        expected = Draft(ids=(), source="suffix")
        if length >= min_match:
            ids = _continued(text[:i], max(_earlier_ends(text[:i], length)), max_tokens)
            expected = Draft(ids=ids, source="suffix", match_length=length)
        assert drafter.propose(max_tokens) == expected
        drafter.observe(text[i : i + 1])


@given(runs=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 60)), min_size=1, max_size=4))
def test_suffix_copies_some_earlier_occurrence_of_long_runs(runs: list[tuple[int, int]]) -> None:
    """Beyond the recency bound: still the longest match, and a text that followed it somewhere."""
    text = [token for token, num_repeats in runs for _ in range(num_repeats)]
    drafter = SuffixAutomatonDrafter()
    drafter.reset(text)
    length = _longest_match(text)
    draft = drafter.propose(8)
    if length == 0:
        assert draft == Draft(ids=(), source="suffix")
    else:
        assert draft.match_length == length
        assert draft.ids in {_continued(text, end, 8) for end in _earlier_ends(text, length)}


@DRAFTERS
@given(text=TEXTS, cuts=st.lists(st.integers(0, 40), max_size=6))
def test_one_call_or_many_propose_the_same(
    make: Callable[[], Drafter], text: list[int], cuts: list[int]
) -> None:
    """Neither how tokens are grouped, nor empty groups, nor proposals in between leave a trace."""
    at_once, in_parts = make(), make()
    at_once.reset(text)
    bounds = sorted({1, len(text), *(min(max(cut, 1), len(text)) for cut in cuts)})
    in_parts.reset(text[:1])
    for start, stop in zip(bounds, bounds[1:], strict=False):
        in_parts.propose(5)
        in_parts.observe(text[start:stop])
        in_parts.observe([])
    assert in_parts.propose(9) == at_once.propose(9)


@DRAFTERS
@given(before=TEXTS, text=TEXTS)
def test_reset_forgets_everything(make: Callable[[], Drafter], before: list[int], text: list[int]) -> None:
    """A used drafter proposes what a new one does, at every step of the next request."""
    used, new = make(), make()
    used.reset(before)
    used.observe(before)
    for drafter in (used, new):
        drafter.reset(text[:1])
    for i in range(1, len(text) + 1):
        assert used.propose(6) == new.propose(6)
        for drafter in (used, new):
            drafter.observe(text[i : i + 1])
