"""Serial and speculative decoding side by side, same signature, one round at a time.

Both yield rounds as they are committed, so a caller that stops listening has a consistent prefix. The
first round comes from the prompt's own forward and drafts nothing. Neither knows text, files or models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from draftproof.clock import Clock
from draftproof.depth import DepthPolicy
from draftproof.drafters.base import Drafter
from draftproof.models.base import Session
from draftproof.record import Round
from draftproof.rules import Rules
from draftproof.verify import Walk, walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """One request ready to run: where it computes, its rules, and how it is timed.

    ``margin_bound`` is the guarded plan's bound, ``None`` otherwise. ``max_rows`` caps a verification.
    """

    session: Session
    rules: Rules
    clock: Clock
    max_rows: int
    margin_bound: float | None = None


def plain_decode(run: Decoding, prompt_ids: Sequence[int]) -> Iterator[Round]:
    """Serial greedy decoding: one row a forward."""
    first = _prompt_round(run, prompt_ids)
    yield first
    last, position, index = first.emitted[-1], len(prompt_ids) + 1, 1
    while not run.rules.is_stopped and run.rules.num_left:
        start = run.clock.now_ns()
        logits_TV = run.session.verify([last])
        run.session.commit(1)
        done = walk((), run.rules.chooser(logits_TV), run.rules.push)
        yield Round(
            index=index, position=position, source="none", num_offered=0, num_drafted=0, num_accepted=0,
            emitted=done.emitted, reason="serial", verify_ns=run.clock.now_ns() - start,
        )  # fmt: skip
        last, position, index = done.emitted[-1], position + 1, index + 1


def speculate(
    run: Decoding, prompt_ids: Sequence[int], drafter: Drafter, policy: DepthPolicy
) -> Iterator[Round]:
    """Propose, verify, commit: emits what ``plain_decode`` emits, several tokens a forward."""
    first = _prompt_round(run, prompt_ids)
    yield first
    last, position, index = first.emitted[-1], len(prompt_ids) + 1, 1
    while not run.rules.is_stopped and run.rules.num_left:
        start = run.clock.now_ns()
        if index == 1:
            drafter.reset(prompt_ids)
            drafter.observe(first.emitted)
        limit = min(policy.ask(drafter.name, position), run.rules.num_left - 1, run.max_rows - 1)
        draft = drafter.propose(limit)
        decision = policy.choose(draft, position)
        ids = draft.ids[: min(decision.depth, limit)]
        drafted = run.clock.now_ns()
        done, num_redecided = _verify(run, last, ids)
        verified = run.clock.now_ns()
        drafter.observe(done.emitted)
        policy.observe_drafting(draft, (drafted - start) / 1e9)
        policy.watch(draft)
        policy.settle(done.emitted)
        if not num_redecided:
            policy.observe_cost(len(ids) + 1, position, (verified - drafted) / 1e9)
        yield Round(
            index=index, position=position, source=draft.source if ids else "none",
            num_offered=len(draft.ids), num_drafted=len(ids), num_accepted=done.num_accepted,
            emitted=done.emitted, num_redecided=num_redecided, num_forwards=1 + num_redecided,
            reason=decision.reason, expected_tokens=decision.expected_tokens, draft_ns=drafted - start,
            verify_ns=verified - drafted, commit_ns=run.clock.now_ns() - verified, offered=draft.ids,
        )  # fmt: skip
        last, position, index = done.emitted[-1], position + len(done.emitted), index + 1


def _prompt_round(run: Decoding, prompt_ids: Sequence[int]) -> Round:
    """The first token, chosen from the prompt's forward."""
    logits_V = run.session.prefill(prompt_ids)
    done = walk((), run.rules.chooser(logits_V[None]), run.rules.push)
    return Round(
        index=0, position=len(prompt_ids), source="prompt", num_offered=0, num_drafted=0, num_accepted=0,
        emitted=done.emitted, num_forwards=0, reason="prompt",
    )  # fmt: skip


def _verify(run: Decoding, last: int, ids: Sequence[int]) -> tuple[Walk, int]:
    """One forward over ``last`` and the draft, the accept rule, the commit; near-ties decided again."""
    logits_TV = run.session.verify([last, *ids])
    if run.margin_bound is None or not ids:
        done = walk(ids, run.rules.chooser(logits_TV), run.rules.push)
        run.session.commit(len(done.emitted))
        return done, 0
    guard = _Guard(run, logits_TV, [last, *ids], run.margin_bound)
    done = walk(ids, guard.choose, run.rules.push)
    if not guard.num_redecided:
        run.session.commit(len(done.emitted))
    return done, guard.num_redecided


class _Guard:
    """Chooses from batched rows while their margins are wide, then from one-row forwards.

    Once a row is decided again, the rows after it were computed behind a row that is now replaced; they
    are decided by one-row arithmetic too.
    """

    def __init__(self, run: Decoding, logits_TV: Tensor, fed: Sequence[int], bound: float) -> None:
        self._run, self._logits, self._fed, self._bound = run, logits_TV, fed, bound
        self._choose = run.rules.chooser(logits_TV)
        self.num_redecided = 0

    def choose(self, row: int) -> int:
        """The token after ``row``."""
        if not self.num_redecided:
            if self._run.rules.margin(self._logits[row]) >= self._bound:
                return self._choose(row)
            self._run.session.commit(row)
        self.num_redecided += 1
        logits_TV = self._run.session.verify([self._fed[row]])
        self._run.session.commit(1)
        return self._run.rules.chooser(logits_TV)(0)
