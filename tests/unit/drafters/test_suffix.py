"""The suffix automaton drafter on readable contexts, and counts that show linear building."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import SupportsIndex, overload

import pytest

from draftproof.drafters.base import Drafter
from draftproof.drafters.suffix import SuffixAutomaton, SuffixAutomatonDrafter
from draftproof.errors import OptionError
from draftproof.record import Draft

A, B, C, D, X = 1, 2, 3, 4, 9


class CountedLinks(list[int | None]):
    """A list of suffix links that counts how often one is followed."""

    num_reads = 0

    @overload
    def __getitem__(self, key: SupportsIndex) -> int | None: ...
    @overload
    def __getitem__(self, key: slice) -> list[int | None]: ...
    def __getitem__(self, key: SupportsIndex | slice) -> int | None | list[int | None]:
        """Count, then read like a list."""
        self.num_reads += 1
        return super().__getitem__(key)


def _propose(context: list[int], max_tokens: int, min_match: int = 1) -> Draft:
    drafter: Drafter = SuffixAutomatonDrafter(min_match=min_match)
    drafter.reset(context)
    return drafter.propose(max_tokens)


def _automaton(text: Iterable[int], max_recency_steps: int = 32) -> SuffixAutomaton:
    automaton = SuffixAutomaton(max_recency_steps)
    automaton.links = CountedLinks(automaton.links)
    for token in text:
        automaton.append(token)
    return automaton


def _num_link_reads(automaton: SuffixAutomaton) -> int:
    assert isinstance(automaton.links, CountedLinks)
    return automaton.links.num_reads


def _texts(num_tokens: int) -> Iterator[list[int]]:
    """Texts that stress an automaton: runs, the worst cases for states and transitions, self-similar."""
    yield [A] * num_tokens
    yield [A] + [B] * (num_tokens - 1)
    yield [A] + [B] * (num_tokens - 2) + [C]
    yield [A, B] * (num_tokens // 2)
    yield list(range(num_tokens))
    yield [A] * (num_tokens // 2) + [B] + [A] * (num_tokens // 2 - 1)
    yield [i.bit_count() % 2 for i in range(num_tokens)]
    shorter, longer = [A], [A, B]
    while len(longer) < num_tokens:
        shorter, longer = longer, longer + shorter
    yield longer[:num_tokens]
    yield random.Random(0).choices(range(2), k=num_tokens)
    yield random.Random(0).choices(range(50), k=num_tokens)
    yield [token for i in range(num_tokens // 4) for token in (X, A, i + 10, C)]


def test_is_a_drafter_named_suffix() -> None:
    """The runtime protocol check passes and the name is the one in the drafter table."""
    assert isinstance(SuffixAutomatonDrafter(), Drafter)
    assert SuffixAutomatonDrafter().name == "suffix"


def test_copies_what_followed_the_longest_match() -> None:
    """Seven tokens match; nothing limits the length."""
    context = [*range(10, 18), X, *range(10, 17)]
    assert _propose(context, max_tokens=2) == Draft(ids=(17, X), source="suffix", match_length=7)


def test_most_recent_occurrence_wins() -> None:
    """A was followed by B first and by C later."""
    assert _propose([A, B, A, C, D, A], max_tokens=1).ids == (C,)


def test_longest_match_beats_a_more_recent_shorter_one() -> None:
    """X A was followed by B; A alone was followed by C later."""
    draft = _propose([X, A, B, A, C, X, A], max_tokens=1)
    assert draft == Draft(ids=(B,), source="suffix", match_length=2)


def test_min_match_refuses_short_matches() -> None:
    """A two-token match is drafted at 2 and not at 3."""
    context = [A, B, C, X, A, B]
    assert _propose(context, max_tokens=1, min_match=2).ids == (C,)
    assert _propose(context, max_tokens=1, min_match=3) == Draft(ids=(), source="suffix")


def test_periodic_text_drafts_full_length() -> None:
    """The copy runs into the end of the context and goes on in itself."""
    draft = _propose([A, B, C, A, B, C, A], max_tokens=8)
    assert draft == Draft(ids=(B, C, A, B, C, A, B, C), source="suffix", match_length=4)
    assert _propose([A, A], max_tokens=4).ids == (A, A, A, A)


@pytest.mark.parametrize("context", [[A], [A, B, C]])
def test_nothing_repeats_nothing_drafted(context: list[int]) -> None:
    """The end of the context never matches itself."""
    assert _propose(context, max_tokens=4) == Draft(ids=(), source="suffix")


def test_nothing_is_drafted_before_reset() -> None:
    """A new drafter has an empty context, which is not an error."""
    assert SuffixAutomatonDrafter().propose(4) == Draft(ids=(), source="suffix")


def test_zero_tokens_may_be_asked() -> None:
    """The match is reported even when no id is wanted."""
    assert _propose([A, A], max_tokens=0) == Draft(ids=(), source="suffix", match_length=1)


def test_output_is_context_too() -> None:
    """What was observed after the prompt is matched and copied like the prompt."""
    drafter = SuffixAutomatonDrafter()
    drafter.reset([A])
    drafter.observe([B, C])
    drafter.observe([A])
    assert drafter.propose(2).ids == (B, C)


@pytest.mark.parametrize("min_match", [0, -1])
def test_impossible_min_match_is_refused(min_match: int) -> None:
    """The message names the value found."""
    with pytest.raises(OptionError, match=f"found {min_match}:"):
        SuffixAutomatonDrafter(min_match=min_match)


def test_recency_is_bounded_as_documented() -> None:
    """After a run of A the deep suffix A A is not told of the run's end, only with enough steps."""
    text = [A] * 50 + [B, A, A]
    stale, exact = _automaton(text, max_recency_steps=4), _automaton(text, max_recency_steps=50)
    assert (stale.match_length, exact.match_length) == (2, 2)
    assert exact.match_end == 50
    assert 2 <= stale.match_end < 50


@pytest.mark.parametrize("num_tokens", [100, 1000, 4000])
def test_building_is_linear(num_tokens: int) -> None:
    """States, transitions and followed links stay under fixed multiples of the text, never n squared.

    Each link followed while appending creates a transition (3n) or redirects one (n), and each token reads
    at most one more for a split; recency adds ``max_recency_steps``.
    """
    for text in _texts(num_tokens):
        automaton = _automaton(text, max_recency_steps=0)
        assert len(automaton.lengths) <= 2 * num_tokens
        assert sum(map(len, automaton.transitions)) <= 3 * num_tokens
        assert _num_link_reads(automaton) <= 5 * num_tokens
        with_recency = _automaton(text, max_recency_steps=8)
        assert _num_link_reads(with_recency) <= (5 + 8) * num_tokens
