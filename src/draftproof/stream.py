"""One request's output as it comes: chunks of a round each, text that is never half a character.

A stream can be left at any point; what was committed until then is a consistent result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from draftproof.clock import Clock
from draftproof.decode import Decoding
from draftproof.record import FinishReason, Plan, Round, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One finished (or interrupted) output and the evidence of how it was made."""

    text: str
    token_ids: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    trace: Trace
    plan: Plan
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens of one round as they are committed: the first ``num_accepted`` were drafted.

    ``drafted_text`` is the text those complete, ``own_text`` that of the target's own token.
    """

    drafted_text: str
    own_text: str
    token_ids: tuple[int, ...]
    num_accepted: int
    round: Round

    @property
    def text(self) -> str:
        """All text this round completes."""
        return self.drafted_text + self.own_text


class Stream:
    """Chunks of one request. Stopping early, also by Ctrl-C, leaves a consistent partial ``result``."""

    def __init__(
        self, rounds: Iterator[Round], run: Decoding, prompt_ids: Sequence[int], plan: Plan, tokenizer: Any,
        clock: Clock,
    ) -> None:  # fmt: skip
        self._source, self._run, self._plan = rounds, run, plan
        self._prompt_ids, self._tokenizer = tuple(prompt_ids), tokenizer
        self._rounds: list[Round] = []
        self._text = TextStream(tokenizer)
        self._clock, self._prefill_ns, self._is_finished = clock, 0, False

    def __iter__(self) -> Iterator[Chunk]:
        start = self._clock.now_ns()
        for round_ in self._source:
            if not self._rounds:
                self._prefill_ns = self._clock.now_ns() - start
            self._rounds.append(round_)
            drafted = round_.emitted[: round_.num_accepted]
            drafted_text = self._text.push(drafted) if drafted else ""
            own_text = self._text.push(round_.emitted[len(drafted) :])
            if self._run.rules.is_stopped or not self._run.rules.num_left:
                own_text += self._text.flush()
            yield Chunk(
                drafted_text=drafted_text, own_text=own_text, token_ids=round_.emitted,
                num_accepted=round_.num_accepted, round=round_,
            )  # fmt: skip
        self._is_finished = True

    def result(self) -> Generation:
        """What has been emitted so far."""
        trace = Trace(
            num_prompt=len(self._prompt_ids), prefill_ns=self._prefill_ns, rounds=tuple(self._rounds)
        )
        reason: FinishReason = "stop" if self._run.rules.is_stopped else "length"
        ids = trace.token_ids
        return Generation(
            text=self._tokenizer.decode(ids, skip_special_tokens=True), token_ids=ids,
            prompt_ids=self._prompt_ids, trace=trace, plan=self._plan,
            finish_reason=reason if self._is_finished else "interrupted",
        )  # fmt: skip


class TextStream:
    """Turns token ids into text as they come; a character split over tokens waits for its last one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = self._shown = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that ``token_ids`` complete."""
        self._ids.extend(token_ids)
        before = self._decode(self._ids[self._start : self._shown])
        after = self._decode(self._ids[self._start :])
        if after.endswith("�"):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return after[len(before) :]

    def flush(self) -> str:
        """What is left at the end of the output, half a character included."""
        before = self._decode(self._ids[self._start : self._shown])
        after = self._decode(self._ids[self._start :])
        self._start = self._shown = len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
