"""The decode loops step by step: what they feed, commit, tell the drafter and the policy, and report.

That their output is the serial one for every drafter and depth is in tests/property/test_decode.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.decode import Decoding, plain_decode, speculate
from draftproof.depth import FixedDepth
from draftproof.record import Decision, Draft, Round, Trace
from draftproof.rules import Rules, RuleSet
from draftproof.testing import FakeClock, ScriptedDrafter, TableSession, TableTarget

PROMPT = [4, 2, 1]
TARGET = TableTarget(8)
TICK_NS = 1000


def serial(prompt: Sequence[int], num_tokens: int, target: TableTarget = TARGET) -> list[int]:
    out: list[int] = []
    for _ in range(num_tokens):
        out.append(int(target.logits([*prompt, *out]).argmax()))
    return out


TRUTH = serial(PROMPT, 40)


def make_run(
    max_new_tokens: int = 8, *, session: Any = None, max_rows: int = 32, margin_bound: float | None = None,
    **rule_options: Any,
) -> Decoding:  # fmt: skip
    rule_set = RuleSet(max_new_tokens=max_new_tokens, **rule_options)
    return Decoding(
        session=session or TARGET.open(100), rules=Rules(rule_set, PROMPT, torch.device("cpu")),
        clock=FakeClock(TICK_NS), max_rows=max_rows, margin_bound=margin_bound,
    )  # fmt: skip


def emitted(rounds: Sequence[Round]) -> list[int]:
    return list(Trace(num_prompt=len(PROMPT), prefill_ns=0, rounds=tuple(rounds)).token_ids)


def truth_after(context: Sequence[int]) -> list[int]:
    return TRUTH[len(context) - len(PROMPT) :]


def right(context: Sequence[int], max_tokens: int) -> Sequence[int]:
    return truth_after(context)[:max_tokens]


def right_up_to(num_right: int) -> ScriptedDrafter:
    """After ``num_right`` right tokens, wrong ones."""

    def script(context: Sequence[int], max_tokens: int) -> Sequence[int]:
        ids = truth_after(context)[:max_tokens]
        return [token if i < num_right else (token + 1) % 8 for i, token in enumerate(ids)]

    return ScriptedDrafter(script)


class SpyPolicy:
    """Logs every call; asks for ``asked`` and verifies ``depth`` of it."""

    def __init__(self, asked: int, depth: int) -> None:
        self.max_depth, self._asked, self._depth = asked, asked, depth
        self.calls: list[tuple[Any, ...]] = []

    def ask(self, source: str, context: int) -> int:
        self.calls.append(("ask", source, context))
        return self._asked

    def choose(self, draft: Draft, context: int) -> Decision:
        self.calls.append(("choose", draft.ids, context))
        return Decision(depth=self._depth, reason="spy", expected_tokens=2.5)

    def rate(self, draft: Draft, context: int) -> float:
        raise AssertionError("one drafter needs no comparison")

    def watch(self, draft: Draft) -> None:
        self.calls.append(("watch", draft.ids))

    def settle(self, emitted: Sequence[int]) -> None:
        self.calls.append(("settle", tuple(emitted)))

    def observe_cost(self, num_rows: int, context: int, seconds: float) -> None:
        self.calls.append(("cost", num_rows, context, seconds))

    def observe_drafting(self, draft: Draft, seconds: float) -> None:
        self.calls.append(("drafting", draft.ids, seconds))


class SpyDrafter:
    """Logs every call; proposes ``ids`` whatever is asked for."""

    name = "spy"

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self._ids = tuple(ids)
        self.calls: list[tuple[Any, ...]] = []

    def reset(self, prompt_ids: Sequence[int]) -> None:
        self.calls.append(("reset", tuple(prompt_ids)))

    def observe(self, token_ids: Sequence[int]) -> None:
        self.calls.append(("observe", tuple(token_ids)))

    def propose(self, max_tokens: int) -> Draft:
        self.calls.append(("propose", max_tokens))
        return Draft(ids=self._ids, source="inner")


# --- serial --------------------------------------------------------------------------------------------


def test_plain_decoding_feeds_one_token_a_forward() -> None:
    run = make_run(4)
    rounds = list(plain_decode(run, PROMPT))
    assert emitted(rounds) == TRUTH[:4]
    assert run.session.tokens == [*PROMPT, *TRUTH[:3]]
    assert (run.session.num_forwards, run.session.num_rows) == (3, 3)
    assert [len(r.emitted) for r in rounds] == [1, 1, 1, 1]
    assert [r.num_forwards for r in rounds] == [0, 1, 1, 1]
    assert [(r.source, r.reason) for r in rounds] == [("prompt", "prompt")] + [("none", "serial")] * 3
    assert [r.verify_ns for r in rounds] == [0] + [TICK_NS] * 3
    assert {(r.num_offered, r.num_drafted, r.num_accepted, r.num_redecided) for r in rounds} == {(0, 0, 0, 0)}


@pytest.mark.parametrize("speculative", [False, True])
def test_an_output_that_ends_with_its_first_token_runs_no_forward(speculative: bool) -> None:
    for run in (make_run(1), make_run(9, eos_ids=frozenset({TRUTH[0]}))):
        drafter = ScriptedDrafter(right)
        rounds = speculate(run, PROMPT, drafter, FixedDepth(4)) if speculative else plain_decode(run, PROMPT)
        assert emitted(list(rounds)) == TRUTH[:1]
        assert run.session.tokens == PROMPT
        assert run.session.num_forwards == 0


@pytest.mark.parametrize("speculative", [False, True])
def test_the_first_round_needs_the_prompt_alone(speculative: bool) -> None:
    """It can be shown before a drafter has been told anything."""
    run, drafter = make_run(4), SpyDrafter()
    rounds = speculate(run, PROMPT, drafter, FixedDepth(4)) if speculative else plain_decode(run, PROMPT)
    assert next(rounds) == Round(
        index=0, position=3, source="prompt", num_offered=0, num_drafted=0, num_accepted=0,
        emitted=(TRUTH[0],), num_forwards=0, reason="prompt",
    )  # fmt: skip
    assert drafter.calls == []


# --- one round -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_right", [0, 1, 3, 4])
def test_one_round_worked_out(num_right: int) -> None:
    """Four drafted, ``num_right`` right: so many and one more token, from one forward of five rows."""
    run = make_run(20)
    source = speculate(run, PROMPT, right_up_to(num_right), FixedDepth(4))
    next(source)
    assert next(source) == Round(
        index=1, position=4, source="scripted", num_offered=4, num_drafted=4, num_accepted=num_right,
        emitted=tuple(TRUTH[1 : num_right + 2]), num_forwards=1, reason="fixed", draft_ns=TICK_NS,
        verify_ns=TICK_NS, commit_ns=TICK_NS,
        offered=tuple(t if i < num_right else (t + 1) % 8 for i, t in enumerate(TRUTH[1:5])),
    )  # fmt: skip
    assert run.session.tokens == [*PROMPT, *TRUTH[: num_right + 1]]
    assert (run.session.num_forwards, run.session.num_rows) == (1, 5)
    following = next(source)
    assert (following.index, following.position) == (2, 5 + num_right)


def test_a_round_without_a_draft_is_a_serial_step() -> None:
    run = make_run(3)
    rounds = list(speculate(run, PROMPT, ScriptedDrafter(lambda *_: []), FixedDepth(4)))
    assert emitted(rounds) == TRUTH[:3]
    assert [(r.source, r.num_offered, r.num_drafted) for r in rounds[1:]] == [("none", 0, 0)] * 2
    assert [r.offered for r in rounds] == [()] * 3
    assert run.session.num_rows == run.session.num_forwards == 2


@pytest.mark.parametrize(
    ("asked", "depth", "num_drafted"), [(6, 6, 6), (6, 2, 2), (6, 0, 0), (2, 6, 2), (9, 9, 9), (12, 12, 9)]
)
def test_a_draft_is_cut_to_what_was_asked_and_what_was_chosen(
    asked: int, depth: int, num_drafted: int
) -> None:
    """The drafter offers 9 whatever it is asked for."""
    run = make_run(30)
    source = speculate(run, PROMPT, SpyDrafter(TRUTH[1:10]), SpyPolicy(asked, depth))
    next(source)
    done = next(source)
    assert (done.num_offered, done.num_drafted, done.num_accepted) == (9, num_drafted, num_drafted)
    assert done.offered == tuple(TRUTH[1:10]), "all of it, also what was not verified"
    assert done.source == ("inner" if num_drafted else "none")
    assert (done.reason, done.expected_tokens) == ("spy", 2.5)
    assert list(done.emitted) == TRUTH[1 : num_drafted + 2]
    assert run.session.num_rows == num_drafted + 1


@pytest.mark.parametrize("speculative", [False, True])
def test_no_draft_reaches_beyond_the_last_token(speculative: bool) -> None:
    """The last round's bonus is the last token: verifying more would be for nothing, or not fit."""
    run = make_run(6, session=TARGET.open(len(PROMPT) + 6))
    drafter = SpyDrafter(TRUTH[1:9]) if speculative else SpyDrafter()
    rounds = list(speculate(run, PROMPT, drafter, FixedDepth(9)))
    assert emitted(rounds) == TRUTH[:6]
    asked = [call[1] for call in drafter.calls if call[0] == "propose"]
    assert asked == ([4] if speculative else [4, 3, 2, 1, 0])


@pytest.mark.parametrize("max_rows", [1, 2, 5])
def test_no_verification_has_more_rows_than_allowed(max_rows: int) -> None:
    run = make_run(12, max_rows=max_rows)
    rounds = list(speculate(run, PROMPT, ScriptedDrafter(right), FixedDepth(16)))
    assert emitted(rounds) == TRUTH[:12]
    assert max(r.num_drafted for r in rounds) == max_rows - 1
    assert run.session.num_forwards == -(-11 // max_rows)


# --- who is told what ----------------------------------------------------------------------------------


def test_the_drafter_learns_the_prompt_and_every_emitted_token() -> None:
    run, drafter = make_run(5, max_rows=3), SpyDrafter([TRUTH[1], TRUTH[2], 0])
    rounds = list(speculate(run, PROMPT, drafter, FixedDepth(2)))
    told = [call for call in drafter.calls if call[0] != "propose"]
    assert told[:2] == [("reset", tuple(PROMPT)), ("observe", (TRUTH[0],))]
    assert told[1:] == [("observe", r.emitted) for r in rounds]
    assert rounds[1].emitted == tuple(TRUTH[1:4])


def test_the_policy_is_told_in_order_what_happened() -> None:
    """Tick by tick: one reading for the draft, one for the verification."""
    run, policy = make_run(7), SpyPolicy(asked=3, depth=2)
    rounds = list(speculate(run, PROMPT, SpyDrafter(TRUTH[1:4]), policy))
    first = policy.calls[:6]
    assert first == [
        ("ask", "spy", 4),
        ("choose", tuple(TRUTH[1:4]), 4),
        ("drafting", tuple(TRUTH[1:4]), TICK_NS / 1e9),
        ("watch", tuple(TRUTH[1:4])),
        ("settle", tuple(TRUTH[1:4])),
        ("cost", 3, 4, TICK_NS / 1e9),
    ]
    assert policy.calls[6] == ("ask", "spy", 7)
    assert [call[1] for call in policy.calls if call[0] == "settle"] == [r.emitted for r in rounds[1:]]


@pytest.mark.parametrize("speculative", [False, True])
def test_a_listener_that_stops_has_a_consistent_prefix(speculative: bool) -> None:
    run = make_run(30)
    source: Iterator[Round] = plain_decode(run, PROMPT)
    if speculative:
        source = speculate(run, PROMPT, right_up_to(2), FixedDepth(4))
    rounds = [next(source) for _ in range(4)]
    source.close()  # type: ignore[attr-defined]
    got = emitted(rounds)
    assert got == TRUTH[: len(got)]
    assert run.session.tokens == [*PROMPT, *got[:-1]]
    assert run.rules.num_left == 30 - len(got)


# --- the end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", range(1, 12))
def test_an_eos_ends_the_output_wherever_it_falls_in_a_draft(num_tokens: int) -> None:
    """The cache ends as after serial decoding: every emitted token in it but the last."""
    eos = TRUTH[num_tokens - 1]
    expected = TRUTH[: TRUTH.index(eos) + 1]
    run = make_run(30, eos_ids=frozenset({eos}))
    rounds = list(speculate(run, PROMPT, ScriptedDrafter(right), FixedDepth(4)))
    assert emitted(rounds) == expected
    assert run.rules.is_stopped
    assert run.session.tokens == [*PROMPT, *expected[:-1]]


def test_an_eos_that_is_only_drafted_ends_nothing() -> None:
    eos = next(token for token in range(8) if token not in TRUTH[:10])
    run = make_run(10, eos_ids=frozenset({eos}))
    rounds = list(speculate(run, PROMPT, ScriptedDrafter(lambda _, n: [eos] * n), FixedDepth(3)))
    assert emitted(rounds) == TRUTH[:10]
    assert not run.rules.is_stopped


# --- guarded -------------------------------------------------------------------------------------------


class Batched:
    """A session whose rows of a batch have other logits than one-row calls, by row: ``lines[row]``."""

    def __init__(self, one_row: dict[int, list[float]], batch: list[list[float]]) -> None:
        self._one_row, self._batch = one_row, batch
        self._inner = TableTarget(4).open(50)
        self.fed: list[list[int]] = []
        self.commits: list[int] = []

    @property
    def tokens(self) -> list[int]:
        return self._inner.tokens

    @property
    def num_cached(self) -> int:
        return self._inner.num_cached

    def prefill(self, token_ids: Sequence[int]) -> Tensor:
        self._inner.prefill(token_ids)
        return torch.tensor(self._one_row[len(token_ids)])

    def verify(self, token_ids: Sequence[int]) -> Tensor:
        self._inner.verify(token_ids)
        self.fed.append(list(token_ids))
        if len(token_ids) == 1:
            return torch.tensor([self._one_row[self._inner.num_cached + 1]])
        return torch.tensor(self._batch[: len(token_ids)])

    def commit(self, num_rows: int) -> None:
        self.commits.append(num_rows)
        self._inner.commit(num_rows)


def top(token: int, margin: float = 1.0) -> list[float]:
    """Logits over 4 tokens, ``token`` first by ``margin``."""
    return [5.0 if i == token else 5.0 - margin for i in range(4)]


def guarded(
    batch: list[list[float]], draft: Sequence[int], bound: float = 0.25
) -> tuple[Round, Batched, Any]:
    """The first drafted round after prompt ``4 2 1``; one-row forwards choose 3, 0, 1, 2, 3, 0 onwards."""
    one_row = {3 + i: top(token) for i, token in enumerate([3, 0, 1, 2, 3, 0])}
    session, policy = Batched(one_row, batch), SpyPolicy(asked=len(draft), depth=len(draft))
    run = make_run(20, session=session, margin_bound=bound)
    source = speculate(run, PROMPT, SpyDrafter(draft), policy)
    next(source)
    return next(source), session, policy


def test_wide_margins_are_decided_by_the_batch() -> None:
    done, session, policy = guarded([top(0), top(1), top(2), top(3)], [0, 1, 2])
    assert done.emitted == (0, 1, 2, 3)
    assert (done.num_accepted, done.num_redecided, done.num_forwards) == (3, 0, 1)
    assert session.fed == [[3, 0, 1, 2]]
    assert session.commits == [4]
    assert [call[0] for call in policy.calls].count("cost") == 1


def test_a_margin_at_the_bound_is_wide() -> None:
    done, _, _ = guarded([top(0, 0.25), top(1, 0.25), top(2, 0.25)], [0, 1])
    assert (done.emitted, done.num_redecided) == ((0, 1, 2), 0)


def test_a_near_tie_and_what_follows_are_decided_by_one_row_arithmetic() -> None:
    """Row 1 is a near-tie that the batch decides wrongly; rows 2 and 3 were computed behind it."""
    done, session, policy = guarded([top(0), top(3, 0.2), top(3), top(0)], [0, 1, 2])
    assert done.emitted == (0, 1, 2, 3)
    assert (done.num_drafted, done.num_accepted, done.num_redecided, done.num_forwards) == (3, 3, 3, 4)
    assert session.fed == [[3, 0, 1, 2], [0], [1], [2]]
    assert session.commits == [1, 1, 1, 1]
    assert session.tokens == [*PROMPT, 3, 0, 1, 2]
    assert "cost" not in [call[0] for call in policy.calls], "its time says nothing about a verification"


def test_a_near_tie_in_the_first_row_commits_nothing_of_the_batch() -> None:
    done, session, _ = guarded([top(1, 0.2), top(1), top(2)], [0, 9])
    assert done.emitted == (0, 1)
    assert (done.num_accepted, done.num_redecided) == (1, 2)
    assert session.fed == [[3, 0, 9], [3], [0]]
    assert session.commits == [0, 1, 1]
    assert session.tokens == [*PROMPT, 3, 0]


def test_a_near_tie_behind_the_first_wrong_token_costs_nothing() -> None:
    done, session, _ = guarded([top(0), top(1, 0.2), top(2)], [2, 1])
    assert (done.emitted, done.num_redecided) == ((0,), 0)
    assert session.fed == [[3, 2, 1]]
    assert session.tokens == [*PROMPT, 3]


def test_a_round_of_one_row_is_exact_and_needs_no_guard() -> None:
    done, session, _ = guarded([], [], bound=99.0)
    assert (done.emitted, done.num_redecided) == ((0,), 0)
    assert session.fed == [[3]]


def test_an_exact_session_ignores_margins_without_a_bound() -> None:
    """Ties are decided as serial decoding decides them; no second forward is run."""
    target = TableTarget(8, tie=True)
    session: TableSession = target.open(60)
    run = make_run(10, session=session)
    rounds = list(speculate(run, PROMPT, ScriptedDrafter(lambda _, n: [0] * n), FixedDepth(4)))
    assert emitted(rounds) == [0] * 10
    assert session.num_forwards == 2
