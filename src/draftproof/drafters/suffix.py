"""Suffix automaton: find the longest suffix of the context seen earlier, at any length, and copy on.

The automaton of the current request (Blumer et al., "The smallest automaton recognizing the subwords of a
text", 1985) grows with every committed token in amortised linear time. Drafting from it follows "SAM
Decoding" (arXiv 2411.10666), without that paper's automaton over a fixed corpus and without its separate
matching walk: the suffix link of the state of the whole context *is* the longest suffix that occurred
earlier. Against prompt lookup the match has no maximal length, hence a ``match_length`` that tells more.

What is guaranteed: the match is the longest suffix that occurred earlier, and the draft copies what
followed one of its earlier occurrences. *Which* one is bounded work, see ``SuffixAutomaton``.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.drafters.lookup import copy_onward
from draftproof.errors import OptionError
from draftproof.record import Draft

ROOT = 0


class SuffixAutomaton:
    """The online suffix automaton of one text, with an end position for each state.

    A state stands for a class of strings that end at exactly the same positions of the text; ``lengths``
    has the longest of them and ``links`` leads to the next shorter suffixes. For n tokens there are at
    most 2n states and 3n transitions, and copying transitions on a split only creates such transitions,
    so building is linear in n for any alphabet.

    ``match_length`` is the length of the longest suffix of the text that also ended earlier (overlap
    allowed), ``match_end`` the number of tokens up to the end of such an earlier occurrence.

    *Recency.* Every appended token is an occurrence of every suffix, but only the ``max_recency_steps``
    longest classes of suffixes seen before are told. So ``match_end`` is always an earlier occurrence,
    and the most recent one if at that occurrence at most ``max_recency_steps - 1`` classes lay between
    the matched suffix and the longest match of then; in particular if the longest match of then was less
    than ``max_recency_steps`` tokens longer. Else it may be an older one. Telling all would be quadratic
    on runs of one token.
    """

    def __init__(self, max_recency_steps: int = 32) -> None:
        """Start with the empty text; see the class for ``max_recency_steps``."""
        self.transitions: list[dict[int, int]] = [{}]
        self.links: list[int | None] = [None]
        self.lengths: list[int] = [0]
        self.ends: list[int] = [0]
        self.match_length = 0
        self.match_end = 0
        self._max_recency_steps = max_recency_steps
        self._whole = ROOT

    def append(self, token: int) -> None:
        """Extend the text by ``token`` and find the longest suffix that ended before it."""
        end = self.lengths[self._whole] + 1
        whole = self._add_state(length=end, link=ROOT, end=end, transitions={})
        state: int | None = self._whole
        while state is not None and token not in self.transitions[state]:
            self.transitions[state][token] = whole
            state = self.links[state]
        match = ROOT if state is None else self._class_of(state, token)
        self.links[whole] = match
        self._whole = whole
        # Read before it is told of this end, which is no earlier occurrence.
        self.match_length = self.lengths[match]
        self.match_end = self.ends[match]
        self._tell_end(match, end)

    def _class_of(self, state: int, token: int) -> int:
        """The state of exactly the suffixes of ``state``'s longest string followed by ``token``."""
        target = self.transitions[state][token]
        if self.lengths[target] == self.lengths[state] + 1:
            return target
        return self._split(state, token, target)

    def _split(self, state: int, token: int, target: int) -> int:
        """Move the strings of ``target`` that just occurred, and its longer ones did not, to a clone."""
        clone = self._add_state(
            length=self.lengths[state] + 1,
            link=self.links[target],
            end=self.ends[target],
            transitions=self.transitions[target].copy(),
        )
        self.links[target] = clone
        shorter: int | None = state
        while shorter is not None and self.transitions[shorter][token] == target:
            self.transitions[shorter][token] = clone
            shorter = self.links[shorter]
        return clone

    def _add_state(self, *, length: int, link: int | None, end: int, transitions: dict[int, int]) -> int:
        self.lengths.append(length)
        self.links.append(link)
        self.ends.append(end)
        self.transitions.append(transitions)
        return len(self.lengths) - 1

    def _tell_end(self, match: int, end: int) -> None:
        state: int | None = match
        for _ in range(self._max_recency_steps):
            if state is None:
                return
            self.ends[state] = end
            state = self.links[state]


class SuffixAutomatonDrafter:
    """Drafts what followed an earlier occurrence of the longest suffix of the context seen before.

    Matches of fewer than ``min_match`` tokens draft nothing. Like prompt lookup, a copy that reaches the
    end of the context goes on reading from itself.

    Raises:
        OptionError: if ``min_match`` is less than 1.
    """

    name: str = "suffix"

    def __init__(self, min_match: int = 1) -> None:
        """Draft from matches of ``min_match`` tokens on; the context starts empty."""
        if min_match < 1:
            raise OptionError(f"the suffix drafter needs min_match >= 1, found {min_match}: raise it")
        self._min_match = min_match
        self._context: list[int] = []
        self._automaton = SuffixAutomaton()

    def reset(self, prompt_ids: Sequence[int]) -> None:
        """Forget everything and start a request whose prompt is ``prompt_ids``."""
        self._context = []
        self._automaton = SuffixAutomaton()
        self.observe(prompt_ids)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append committed ``token_ids`` to the context, in order."""
        for token in token_ids:
            self._context.append(token)
            self._automaton.append(token)

    def propose(self, max_tokens: int) -> Draft:
        """Copy what followed the match; no ids when it is shorter than ``min_match``."""
        automaton = self._automaton
        if automaton.match_length < self._min_match:
            return Draft(ids=(), source=self.name)
        ids = copy_onward(self._context, automaton.match_end, max_tokens)
        return Draft(ids=ids, source=self.name, match_length=automaton.match_length)
