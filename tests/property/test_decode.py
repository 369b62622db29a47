"""The central claim: whatever drafts and however deep, ``speculate`` emits what serial decoding emits.

Targets are tables whose logits hash the whole prefix, some rounded so that ties are everywhere, some
looking back a few tokens so that text repeats. The reference is the five lines of ``serial`` below, which
share no code with the loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftproof.decode import Decoding, plain_decode, speculate
from draftproof.depth import CostAwareDepth, DepthPolicy, FixedDepth
from draftproof.drafters.base import Drafter
from draftproof.drafters.build import DrafterOptions, build_drafter
from draftproof.record import CostCurve, Round, Trace
from draftproof.rules import Rules, RuleSet
from draftproof.testing import FakeClock, ScriptedDrafter, TableSession, TableTarget

MAX_ROWS = 17


class Table(TableTarget):
    """A table target that remembers its logits and, with ``rounded``, ties often and anywhere."""

    def __init__(self, vocab_size: int, *, rounded: bool = False, **options: Any) -> None:
        super().__init__(vocab_size, max_rows=MAX_ROWS, **options)
        self.rounded = rounded
        self._remembered = lru_cache(maxsize=None)(self._compute)

    def _compute(self, prefix: tuple[int, ...]) -> Tensor:
        logits = super().logits(prefix)
        return logits.round() if self.rounded else logits

    def logits(self, prefix: Sequence[int]) -> Tensor:
        return self._remembered(tuple(prefix)).clone()


def serial(target: TableTarget, prompt: Sequence[int], num_tokens: int, eos: frozenset[int]) -> list[int]:
    """Serial greedy decoding: the first index of the highest logit, again and again."""
    out: list[int] = []
    while len(out) < num_tokens and not (out and out[-1] in eos):
        logits = target.logits([*prompt, *out]).tolist()
        out.append(logits.index(max(logits)))
    return out


@dataclass
class Case:
    """One request; ``truth`` is the serial continuation as if nothing ended it."""

    target: Table
    prompt: list[int]
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    processors: tuple[Any, ...] = ()
    criteria: tuple[Any, ...] = ()
    truth: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.truth = serial(self.target, self.prompt, self.max_new_tokens + MAX_ROWS, frozenset())

    def run(self, session: Any = None, margin_bound: float | None = None, tick_ns: int = 1000) -> Decoding:
        rule_set = RuleSet(
            max_new_tokens=self.max_new_tokens,
            eos_ids=self.eos,
            processors=self.processors,
            criteria=self.criteria,
        )
        return Decoding(
            session=session or self.target.open(self.capacity),
            rules=Rules(rule_set, self.prompt, torch.device("cpu")),
            clock=FakeClock(tick_ns),
            max_rows=MAX_ROWS,
            margin_bound=margin_bound,
        )

    @property
    def capacity(self) -> int:
        """Not a position more than serial decoding needs, which never runs its last token."""
        return len(self.prompt) + self.max_new_tokens - 1


# --- drafters ------------------------------------------------------------------------------------------


def _script(case: Case, change: Callable[[int, int, int], int | None]) -> ScriptedDrafter:
    """The truth with token ``i`` of a draft replaced by ``change(place, i, token)``; ``None`` ends it."""

    def script(context: Sequence[int], max_tokens: int) -> list[int]:
        place = len(context) - len(case.prompt)
        ids: list[int] = []
        for i, token in enumerate(case.truth[place : place + max_tokens]):
            changed = change(place, i, token)
            if changed is None:
                break
            ids.append(changed)
        return ids

    return ScriptedDrafter(script)


def _right_up_to(num_right: int) -> Callable[[Case, DepthPolicy], Drafter]:
    def make(case: Case, policy: DepthPolicy) -> Drafter:
        size = case.target.vocab_size
        return _script(case, lambda place, i, token: token if i < num_right else (token + 1) % size)

    return make


def _built(name: str, model: Callable[[Case], Table] | None = None) -> Callable[[Case, DepthPolicy], Drafter]:
    """A real drafter, with a draft model where one is given."""

    def make(case: Case, policy: DepthPolicy) -> Drafter:
        return build_drafter(
            name,
            DrafterOptions(
                target=case.target,
                policy=policy,
                capacity=case.capacity + 1 + MAX_ROWS,
                draft_model=model(case) if model else None,
            ),
        )

    return make


def _another(case: Case) -> Table:
    """Another table of the same vocabulary: it agrees by chance."""
    return Table(case.target.vocab_size, seed=999, rounded=case.target.rounded)


def _short_sighted(case: Case) -> Table:
    """Right about text that looks back two tokens, else wrong; runs out of context now and then."""
    return Table(case.target.vocab_size, period=2, rounded=case.target.rounded, max_context=30)


DRAFTERS: dict[str, Callable[[Case, DepthPolicy], Drafter]] = {
    "lookup": _built("lookup"),
    "suffix": _built("suffix"),
    "auto": _built("auto"),
    "auto with a model": _built("auto", _another),
    "draft_model": _built("draft_model", _another),
    "draft_model, the target itself": _built("draft_model", lambda case: case.target),
    "draft_model, short-sighted": _built("draft_model", _short_sighted),
    "always right": _right_up_to(99),
    "always wrong": _right_up_to(0),
    "right up to 1": _right_up_to(1),
    "right up to 3": _right_up_to(3),
    "right in turns": lambda case, _: _script(
        case, lambda place, i, token: token if i < place % 5 else (token + 1) % case.target.vocab_size
    ),
    "empty in turns": lambda case, _: _script(
        case, lambda place, i, token: None if place % 3 == 0 or i >= place % 4 else token
    ),
    "the end of the output": lambda case, _: ScriptedDrafter(
        lambda context, max_tokens: [min(case.eos, default=0)] * max_tokens
    ),
    "right, then the end": lambda case, _: _script(
        case, lambda place, i, token: token if i < 2 else min(case.eos, default=0)
    ),
}


# --- what every decode must satisfy --------------------------------------------------------------------


def decode(case: Case, name: str, policy: DepthPolicy, run: Decoding) -> list[int]:
    """Decode with drafter ``name``; check the rounds and the cache against what was emitted."""
    rounds = list(speculate(run, case.prompt, DRAFTERS[name](case, policy), policy))
    emitted = _check(case, run, rounds)
    for round_ in rounds[1:]:
        assert round_.num_drafted <= min(policy.max_depth, MAX_ROWS - 1)
        assert len(round_.emitted) == round_.num_accepted + 1 or round_ is rounds[-1]
    return emitted


def _check(case: Case, run: Decoding, rounds: Sequence[Round]) -> list[int]:
    trace = Trace(num_prompt=len(case.prompt), prefill_ns=0, rounds=tuple(rounds))
    emitted = list(trace.token_ids)
    session: Any = run.session
    assert session.tokens == [*case.prompt, *emitted[:-1]], "the cache of serial decoding, no row more"
    assert session.num_forwards == sum(round_.num_forwards for round_ in rounds)
    assert run.rules.num_left == case.max_new_tokens - len(emitted)
    return emitted


def plain(case: Case, run: Decoding) -> list[int]:
    return _check(case, run, list(plain_decode(run, case.prompt)))


# --- strategies ----------------------------------------------------------------------------------------


@st.composite
def cases(draw: st.DrawFn, **fixed: Any) -> Case:
    vocab_size = draw(st.sampled_from([2, 3, 5, 16]))
    target = Table(
        vocab_size,
        rounded=draw(st.booleans()),
        period=draw(st.sampled_from([None, 1, 2, 3])),
        tie=draw(st.sampled_from([False, False, False, True])),
        seed=draw(st.integers(0, 50)),
    )
    tokens = st.integers(0, vocab_size - 1)
    case = Case(
        target=target,
        prompt=draw(st.lists(tokens, min_size=1, max_size=12)),
        max_new_tokens=draw(st.integers(1, 40)),
        **fixed,
    )
    # An end that serial decoding meets, one that it may not, both, or none.
    met = draw(st.sampled_from(case.truth[: case.max_new_tokens]))
    case.eos = draw(st.sampled_from([frozenset(), frozenset({met}), frozenset({met, draw(tokens)})]))
    return case


@st.composite
def policies(draw: st.DrawFn) -> DepthPolicy:
    """Every fixed depth, or the cost-aware one over a random curve."""
    if draw(st.booleans()):
        return FixedDepth(draw(st.integers(0, MAX_ROWS - 1)))
    rows = (1, 2, 4, 8, MAX_ROWS)
    shapes = st.sampled_from([0.0, 0.01, 0.3, 1.0])
    slope, noise = draw(shapes), draw(st.lists(st.floats(1.0, 1.5), min_size=10, max_size=10))
    seconds = [1e-3 * (1 + slope * (row - 1)) * by for row, by in zip(rows * 2, noise, strict=True)]
    each = {"draft_model": draw(st.sampled_from([0.0, 1e-4, 1.0]))}
    return CostAwareDepth(
        CostCurve(rows=rows, contexts=(1, 30), seconds=(tuple(seconds[:5]), tuple(seconds[5:]))),
        max_depth=draw(st.integers(0, MAX_ROWS - 1)),
        advantage=draw(st.sampled_from([0.0, 1.03])),
        draft_seconds=draw(st.sampled_from([{}, each])),
    )


NAMES = st.sampled_from(sorted(DRAFTERS))
MANY = settings(max_examples=250, deadline=None)


# --- exactness -----------------------------------------------------------------------------------------


@MANY
@given(case=cases())
def test_plain_decoding_is_serial_decoding(case: Case) -> None:
    run = case.run()
    expected = serial(case.target, case.prompt, case.max_new_tokens, case.eos)
    assert plain(case, run) == expected
    assert run.rules.is_stopped == (expected[-1] in case.eos)
    assert run.session.num_forwards == len(expected) - 1  # type: ignore[attr-defined]


@MANY
@given(case=cases(), name=NAMES, policy=policies(), tick_ns=st.sampled_from([1, 1000, 10**7]))
def test_speculation_is_serial_decoding(case: Case, name: str, policy: DepthPolicy, tick_ns: int) -> None:
    run = case.run(tick_ns=tick_ns)
    expected = serial(case.target, case.prompt, case.max_new_tokens, case.eos)
    assert decode(case, name, policy, run) == expected
    assert run.rules.is_stopped == (expected[-1] in case.eos)


@pytest.mark.parametrize("depth", range(MAX_ROWS))
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_at_every_depth(name: str, depth: int) -> None:
    """On text that repeats itself and text that does not, ended by length and by an eos."""
    for period, rounded in ((None, False), (2, True)):
        case = Case(Table(5, period=period, rounded=rounded), prompt=[1, 2], max_new_tokens=35)
        for eos in (frozenset[int](), frozenset({case.truth[20]})):
            case.eos = eos
            expected = serial(case.target, case.prompt, 35, eos)
            assert decode(case, name, FixedDepth(depth), case.run()) == expected


def test_the_cases_are_not_all_alike() -> None:
    """Drafts are accepted, rejected and cut, or the tests above would prove little."""
    curve = CostCurve(rows=(1, 17), contexts=(0,), seconds=((1.0, 1.4),))
    for policy in (FixedDepth(4), CostAwareDepth(curve)):
        accepted: dict[str, set[int]] = {}
        for name, make in DRAFTERS.items():
            case = Case(Table(5, period=2), prompt=[1, 2], max_new_tokens=60)
            rounds = speculate(case.run(), case.prompt, make(case, policy), policy)
            accepted[name] = {round_.num_accepted for round_ in rounds if round_.num_drafted}
        assert max(accepted["always right"]) >= 4
        assert accepted["always wrong"] <= {0}
        assert max(accepted["right up to 1"]) == 1
        for name in ("right in turns", "lookup", "suffix", "auto", "auto with a model"):
            assert len(accepted[name]) > 1, name
        for name in ("draft_model", "draft_model, short-sighted", "right, then the end"):
            assert max(accepted[name]) > 0, name


@given(case=cases(), depth=st.integers(0, MAX_ROWS - 1))
@MANY
def test_right_drafts_save_every_forward_they_can(case: Case, depth: int) -> None:
    """The prompt gives one token, each forward ``depth + 1`` more."""
    for name in ("always right", "draft_model, the target itself"):
        run = case.run()
        emitted = decode(case, name, FixedDepth(depth), run)
        assert run.session.num_forwards == -(-(len(emitted) - 1) // (depth + 1))  # type: ignore[attr-defined]


# --- processors and criteria ---------------------------------------------------------------------------


class Log:
    """What processors and criteria were called with; copies of a processor share it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Log:
        return self

    def add(self, name: str, ids: Tensor) -> None:
        self.calls.append((name, tuple(ids[0].tolist())))


class Counter:
    """Favours another token at every call: one call too many or too few changes the output."""

    def __init__(self, log: Log) -> None:
        self.log, self.num_calls = log, 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.log.add("counter", ids)
        self.num_calls += 1
        scores = scores.clone()
        scores[0, self.num_calls * 7 % scores.shape[1]] += 1.0
        return scores


class Repetition:
    """Takes from a token what it was used: depends on exactly the serial ids."""

    def __init__(self, log: Log) -> None:
        self.log = log

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.log.add("repetition", ids)
        return scores - 0.5 * torch.bincount(ids[0], minlength=scores.shape[1])


class StopAtSum:
    """Stops when the ids add up to a multiple of ``modulus``."""

    def __init__(self, log: Log, modulus: int) -> None:
        self.log, self.modulus = log, modulus

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.log.add("sum", ids)
        return ids.sum(-1) % self.modulus == 0


class StopAfter:
    """Stops at its ``num_calls``-th call."""

    def __init__(self, log: Log, num_calls: int) -> None:
        self.log, self.left = log, num_calls

    def __call__(self, ids: Tensor, scores: Tensor) -> bool:
        self.log.add("after", ids)
        self.left -= 1
        return self.left <= 0


def equip(case: Case, parts: frozenset[str], modulus: int, num_calls: int) -> Log:
    """Give ``case`` fresh processors and criteria; the log they share."""
    log = Log()
    made = {"counter": Counter(log), "repetition": Repetition(log)}
    case.processors = tuple(p for name, p in made.items() if name in parts)
    ends = {"sum": StopAtSum(log, modulus), "after": StopAfter(log, num_calls)}
    case.criteria = tuple(c for name, c in ends.items() if name in parts)
    return log


def processed_serial(case: Case) -> list[int]:
    """The reference with processors and criteria called once a token."""
    out: list[int] = []
    is_done = False
    while not is_done and len(out) < case.max_new_tokens:
        ids = torch.tensor([[*case.prompt, *out]])
        scores = case.target.logits(ids[0].tolist())[None]
        for processor in case.processors:
            scores = processor(ids, scores)
        out.append(scores[0].tolist().index(scores.max()))
        ids = torch.tensor([[*case.prompt, *out]])
        asked = [bool(criterion(ids, scores)) for criterion in case.criteria]
        is_done = any(asked) or out[-1] in case.eos
    return out


PARTS = st.frozensets(st.sampled_from(["counter", "repetition", "sum", "after"]), min_size=1)


@MANY
@given(
    case=cases(),
    name=NAMES,
    policy=policies(),
    parts=PARTS,
    modulus=st.integers(2, 40),
    num_calls=st.integers(1, 40),
)
def test_processors_and_criteria_see_serial_decoding(
    case: Case, name: str, policy: DepthPolicy, parts: frozenset[str], modulus: int, num_calls: int
) -> None:
    """Equal outputs, and equal calls: each with the same ids, in the same order, once a token."""
    log = equip(case, parts, modulus, num_calls)
    expected = processed_serial(case)
    case.truth = [*expected, *case.truth[len(expected) :]]  # so that scripts draft what is right
    calls = log.calls

    log = equip(case, parts, modulus, num_calls)
    assert plain(case, case.run()) == expected
    assert log.calls == calls

    log = equip(case, parts, modulus, num_calls)
    assert decode(case, name, policy, case.run()) == expected
    assert log.calls == calls


# --- guarded -------------------------------------------------------------------------------------------


class NoisySession(TableSession):
    """Adds up to ``noise`` to every logit of a batch, as batched kernels do; one-row calls are exact."""

    def __init__(self, target: TableTarget, capacity: int, noise: float) -> None:
        super().__init__(target, capacity)
        self._noise = noise
        self._generator = torch.Generator().manual_seed(capacity)

    def verify(self, token_ids: Sequence[int]) -> Tensor:
        logits_TV = super().verify(token_ids)
        if len(token_ids) == 1:
            return logits_TV
        return logits_TV + self._noise * (2 * torch.rand(logits_TV.shape, generator=self._generator) - 1)


NOISE = 0.2
# Two logits may move towards each other by the noise each; a little more for the rounding of the sums.
BOUND = 2 * NOISE + 1e-5


@MANY
@given(
    case=cases(),
    name=NAMES,
    policy=policies(),
    parts=st.sampled_from([frozenset[str](), frozenset({"counter"}), frozenset({"repetition", "sum"})]),
)
def test_a_margin_above_the_noise_restores_serial_decoding(
    case: Case, name: str, policy: DepthPolicy, parts: frozenset[str]
) -> None:
    """Output, cache and the processors' state; each row decided again costs one more forward."""
    equip(case, parts, 7, 0)
    expected = processed_serial(case)
    case.truth = [*expected, *case.truth[len(expected) :]]
    equip(case, parts, 7, 0)
    run = case.run(NoisySession(case.target, case.capacity, NOISE), BOUND)
    rounds = list(speculate(run, case.prompt, DRAFTERS[name](case, policy), policy))
    assert _check(case, run, rounds) == expected
    assert all(round_.num_forwards == 1 + round_.num_redecided for round_ in rounds[1:])
    assert all(round_.num_redecided <= len(round_.emitted) for round_ in rounds)
    assert not any(round_.num_redecided for round_ in rounds if not round_.num_drafted)


def noisy_decode(seed: int, bound: float | None) -> tuple[list[int], list[int], int]:
    """Serial tokens, speculated tokens with noise, and how many were decided again."""
    case = Case(Table(16, seed=seed), prompt=[seed % 16, 3], max_new_tokens=40)
    run = case.run(NoisySession(case.target, case.capacity, NOISE), bound)
    rounds = list(speculate(run, case.prompt, DRAFTERS["always right"](case, FixedDepth(4)), FixedDepth(4)))
    got = [token for round_ in rounds for token in round_.emitted]
    return case.truth[:40], got, sum(round_.num_redecided for round_ in rounds)


def test_the_noise_would_show() -> None:
    """Without the guard, or with a bound of 0, most of these outputs are wrong; with it, none."""
    seeds = range(20)
    for bound in (None, 0.0):
        wrong = [want != got for want, got, _ in (noisy_decode(seed, bound) for seed in seeds)]
        assert sum(wrong) >= 10
    guarded = [noisy_decode(seed, BOUND) for seed in seeds]
    assert all(want == got for want, got, _ in guarded)
    assert all(0 < num_redecided < 40 for _, _, num_redecided in guarded)


def test_an_endless_bound_decides_everything_again() -> None:
    """39 tokens follow the prompt's; each is decided by a one-row forward, none by the batch."""
    want, got, num_redecided = noisy_decode(0, float("inf"))
    assert got == want
    assert num_redecided == 39
