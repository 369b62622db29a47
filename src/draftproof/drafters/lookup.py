"""Prompt lookup: find the end of the context earlier in the context and copy what followed.

Works where the output repeats the input: code edits, summaries, quotations, JSON. The idea is Apoorv
Saxena's "Prompt Lookup Decoding" (2023, github.com/apoorvumang/prompt-lookup-decoding). Here the context
is the prompt *and* the committed output, the most recent occurrence wins, and a copy that reaches the end
of the context goes on reading from itself, so that periodic text is drafted to full length.

A committed token costs ``max_ngram`` dictionary writes and a proposal at most as many reads, whatever the
length of the context. It does not weigh alternatives: the longest n-gram decides alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.errors import OptionError
from draftproof.record import Draft


class PromptLookup:
    """Drafts the continuation of the most recent earlier occurrence of the context's last n-gram.

    The longest n-gram of ``min_ngram`` to ``max_ngram`` tokens that ends the context and occurred before
    is taken. The occurrence may overlap the end of the context, but is never the end itself.

    Raises:
        OptionError: unless ``1 <= min_ngram <= max_ngram``.
    """

    name: str = "lookup"

    def __init__(self, max_ngram: int = 5, min_ngram: int = 1) -> None:
        """Match n-grams of ``min_ngram`` to ``max_ngram`` tokens; the context starts empty."""
        if not 1 <= min_ngram <= max_ngram:
            raise OptionError(
                "prompt lookup needs 1 <= min_ngram <= max_ngram, "
                f"found min_ngram={min_ngram} and max_ngram={max_ngram}: change one of them"
            )
        self._max_ngram = max_ngram
        self._min_ngram = min_ngram
        self._context: list[int] = []
        # Keys of every length share one table: tuples of different lengths are never equal.
        self._continuation_by_ngram: dict[tuple[int, ...], int] = {}

    def reset(self, prompt_ids: Sequence[int]) -> None:
        """Forget everything and start a request whose prompt is ``prompt_ids``."""
        self._context = []
        self._continuation_by_ngram = {}
        self.observe(prompt_ids)

    def observe(self, token_ids: Sequence[int]) -> None:
        """Append committed ``token_ids`` to the context, in order."""
        for token in token_ids:
            self._index_end()
            self._context.append(token)

    def propose(self, max_tokens: int) -> Draft:
        """Copy what followed the longest n-gram seen before; no ids when none was."""
        end = len(self._context)
        for length in range(min(self._max_ngram, end), self._min_ngram - 1, -1):
            start = self._continuation_by_ngram.get(tuple(self._context[end - length : end]))
            if start is not None:
                ids = copy_onward(self._context, start, max_tokens)
                return Draft(ids=ids, source=self.name, match_length=length)
        return Draft(ids=(), source=self.name)

    def _index_end(self) -> None:
        """Index the n-grams that end the context, just before the token that continues them arrives.

        Indexing one token late keeps the end of the context out of its own look-up.
        """
        end = len(self._context)
        for length in range(self._min_ngram, min(self._max_ngram, end) + 1):
            self._continuation_by_ngram[tuple(self._context[end - length : end])] = end


def copy_onward(context: Sequence[int], start: int, max_tokens: int) -> tuple[int, ...]:
    """Copy ``max_tokens`` ids of ``context`` from ``start`` on, going on in the copy itself at the end.

    Reading one's own copy repeats ``context[start:]``. ``start`` lies inside the context.
    """
    period = len(context) - start
    return tuple(context[start + i % period] for i in range(max_tokens))
