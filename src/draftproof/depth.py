"""How many draft tokens to verify: a fixed number, or the depth with the most tokens per second.

The cost-aware policy evaluates ``E(d) / C(d)`` for every depth from 0 to the draft's length. ``E(d)`` is
one plus the survival of each position, learned from discounted counts of what earlier proposals *would*
have got right, whether or not they were verified: committed tokens settle them. So a drafter that is not
worth verifying now costs nothing and is still watched, and depth 0 is never a dead end. ``C(d)`` comes
from the measured cost curve, corrected while running. No decision looks at an unverified target token.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from draftproof.errors import OptionError
from draftproof.record import CostCurve, Decision, Draft

MAX_DEPTH = 16
_LOOK_EVERY, _LOOK_TOKENS = 16, 4


class DepthPolicy(Protocol):
    """Chooses the depth of every round."""

    max_depth: int

    def choose(self, draft: Draft, context: int) -> Decision:
        """Depth for ``draft`` over ``context`` cached positions; at most ``len(draft.ids)``."""

    def ask(self, source: str, context: int) -> int:
        """How many tokens a drafter called ``source`` should propose this round."""

    def rate(self, draft: Draft, context: int) -> float:
        """Expected tokens per second of the best depth for ``draft``; to compare drafts."""

    def watch(self, draft: Draft) -> None:
        """Remember a proposal of this round, verified or not."""

    def settle(self, emitted: Sequence[int]) -> None:
        """Learn from the tokens this round committed; call once a round, after ``watch``."""

    def observe_cost(self, num_rows: int, context: int, seconds: float) -> None:
        """Learn from the time a verification took."""

    def observe_drafting(self, draft: Draft, seconds: float) -> None:
        """Learn from the time a proposal took."""


@dataclass(slots=True)
class FixedDepth:
    """Always the same depth, or the draft's length where it is shorter."""

    max_depth: int

    def __post_init__(self) -> None:
        if self.max_depth < 0:
            raise OptionError(f"depth must be 0 or more, got {self.max_depth}")

    def choose(self, draft: Draft, context: int) -> Decision:
        """``max_depth``, whatever the draft."""
        return Decision(depth=min(self.max_depth, len(draft.ids)), reason="fixed")

    def ask(self, source: str, context: int) -> int:
        """``max_depth``."""
        return self.max_depth

    def rate(self, draft: Draft, context: int) -> float:
        """The draft's length: longer first, as nothing is known about cost."""
        return float(min(self.max_depth, len(draft.ids)))

    def watch(self, draft: Draft) -> None:
        """Learns nothing."""

    def settle(self, emitted: Sequence[int]) -> None:
        """Learns nothing."""

    def observe_cost(self, num_rows: int, context: int, seconds: float) -> None:
        """Learns nothing."""

    def observe_drafting(self, draft: Draft, seconds: float) -> None:
        """Learns nothing."""


@dataclass(slots=True)
class _Acceptance:
    """Discounted successes and trials of one position, with a prior of ``weight`` trials."""

    prior: float
    weight: float = 3.0
    successes: float = 0.0
    trials: float = 0.0

    def probability(self) -> float:
        return (self.successes + self.prior * self.weight) / (self.trials + self.weight)

    def update(self, is_right: bool, discount: float) -> None:
        self.successes = self.successes * discount + is_right
        self.trials = self.trials * discount + 1


@dataclass(slots=True)
class _Watched:
    """A proposal not yet settled: its ids, and how many of them committed tokens have confirmed."""

    draft: Draft
    num_right: int = 0


_MATCH_BUCKETS = (1, 2, 4, 8)
_POSITION_GROUPS = (1, 2, 4, 8)  # later positions share their counts: 1, 2, 3-4, 5-8, 9 and more


def match_bucket(match_length: int | None) -> int:
    """Retrieval drafts are as good as their match is long: 0 computed, then 1, 2, 3-4, 5-8, 9 and more."""
    if match_length is None:
        return 0
    return 1 + bisect_left(_MATCH_BUCKETS, match_length)


# First-position acceptance before anything was seen, by match bucket; later positions start higher, as a
# continuation that has begun right usually goes on. Two or three observations outweigh them.
_PRIORS = (0.5, 0.15, 0.3, 0.5, 0.7, 0.85)
_PRIOR_LATER = (0.5, 0.5, 0.6, 0.75, 0.85, 0.92)


@dataclass(slots=True)
class CostAwareDepth:
    """The depth with the most expected tokens per second, 0 included.

    Args:
        curve: seconds of a verification by rows and context.
        max_depth: largest depth considered.
        half_life: rounds after which an observation counts half.
        advantage: by how much a depth must beat depth 0 (hysteresis against noise in the curve).
        draft_seconds: seconds a computed draft token costs, by source; retrieval costs nothing.
    """

    curve: CostCurve
    max_depth: int = MAX_DEPTH
    half_life: float = 30.0
    advantage: float = 1.03
    draft_seconds: dict[str, float] = field(default_factory=dict)
    _acceptance: dict[tuple[str, int, int], _Acceptance] = field(default_factory=dict)
    _watched: list[_Watched] = field(default_factory=list)
    _num_asked: dict[str, int] = field(default_factory=dict)
    _ratio: dict[bool, float] = field(default_factory=lambda: {True: 1.0, False: 1.0})

    def __post_init__(self) -> None:
        if self.max_depth < 0:
            raise OptionError(f"depth must be 0 or more, got {self.max_depth}")

    def choose(self, draft: Draft, context: int) -> Decision:
        """The best depth for ``draft``; ties go to the smaller one."""
        best, best_rate, best_tokens = 0, self._serial_rate(context), 1.0
        bar, expected, survival = best_rate * self.advantage, 1.0, 1.0
        for depth in range(1, min(self.max_depth, len(draft.ids)) + 1):
            survival *= self._cell(draft, depth).probability()
            expected += survival
            rate = expected / self.seconds(depth + 1, context)
            if rate > max(bar, best_rate):
                best, best_rate, best_tokens = depth, rate, expected
        return Decision(
            depth=best, reason="cost", expected_tokens=best_tokens, expected_seconds=best_tokens / best_rate
        )

    def ask(self, source: str, context: int) -> int:
        """As many as pay for their own drafting; retrieval is free and always asked for all.

        A drafter not worth its cost is still asked for ``_LOOK_TOKENS`` every ``_LOOK_EVERY`` rounds.
        """
        each = self.draft_seconds.get(source)
        if each is None:
            return self.max_depth
        asked = self._num_asked[source] = self._num_asked.get(source, 0) + 1
        template = Draft(ids=(0,) * self.max_depth, source=source)
        best, bar = 0, self._serial_rate(context) * self.advantage
        expected, survival = 1.0, 1.0
        for depth in range(1, self.max_depth + 1):
            survival *= self._cell(template, depth).probability()
            expected += survival
            rate = expected / (self.seconds(depth + 1, context) + depth * each)
            if rate > bar:
                best, bar = depth, rate
        is_due = asked % _LOOK_EVERY == 1
        return max(best, min(_LOOK_TOKENS, self.max_depth) if is_due else 0)

    def rate(self, draft: Draft, context: int) -> float:
        """Tokens per second of the chosen depth, drafting paid for."""
        decision = self.choose(draft, context)
        drafting = self.draft_seconds.get(draft.source, 0.0) * len(draft.ids)
        return (decision.expected_tokens or 1.0) / ((decision.expected_seconds or 1.0) + drafting)

    def seconds(self, num_rows: int, context: int) -> float:
        """The curve, corrected by what verifications have taken in this request."""
        return self.curve.at(num_rows, context) * self._ratio[num_rows == 1]

    def observe_cost(self, num_rows: int, context: int, seconds: float) -> None:
        """Move the correction a tenth towards measured over predicted, outliers clipped."""
        measured = min(max(seconds / self.curve.at(num_rows, context), 0.5), 2.0)
        self._ratio[num_rows == 1] += 0.1 * (measured - self._ratio[num_rows == 1])

    def observe_drafting(self, draft: Draft, seconds: float) -> None:
        """Move a computing drafter's cost a token a fifth towards what it took."""
        if draft.ids and draft.source in self.draft_seconds:
            each = seconds / len(draft.ids)
            self.draft_seconds[draft.source] += 0.2 * (each - self.draft_seconds[draft.source])

    def watch(self, draft: Draft) -> None:
        """Watch ``draft`` until committed tokens have settled it."""
        if draft.ids:
            self._watched.append(_Watched(draft))

    def settle(self, emitted: Sequence[int]) -> None:
        """Compare every watched proposal with the tokens just committed."""
        self._watched = [watched for watched in self._watched if not self._settle(watched, emitted)]

    def _settle(self, watched: _Watched, emitted: Sequence[int]) -> bool:
        """Count each newly decided position; true when nothing is left to learn from the proposal."""
        discount = 0.5 ** (1 / self.half_life)
        ids = watched.draft.ids
        for token in emitted:
            if watched.num_right == min(len(ids), self.max_depth):
                return True
            is_right = ids[watched.num_right] == token
            self._cell(watched.draft, watched.num_right + 1).update(is_right, discount)
            if not is_right:
                return True
            watched.num_right += 1
        return watched.num_right == min(len(ids), self.max_depth)

    def _cell(self, draft: Draft, position: int) -> _Acceptance:
        """Acceptance of the ``position``-th draft token given that those before were right."""
        bucket = match_bucket(draft.match_length)
        key = (draft.source, bucket, bisect_left(_POSITION_GROUPS, position))
        if key not in self._acceptance:
            priors = _PRIORS if position == 1 else _PRIOR_LATER
            self._acceptance[key] = _Acceptance(prior=priors[bucket])
        return self._acceptance[key]

    def _serial_rate(self, context: int) -> float:
        return 1.0 / self.seconds(1, context)
