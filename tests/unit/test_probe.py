"""The probe tells true forms from lying ones, and its plan claims no more than its evidence.

What a kernel does here is compared with a brute-force check on other data; which form wins is not asserted,
as that is the machine's business. Forms that lie are made by hand.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from draftproof import probe
from draftproof.clock import RealClock
from draftproof.errors import OptionError
from draftproof.ops.linear import MAX_ROWS, LinearSpec, build_form
from draftproof.probe import (
    calibrate_margin,
    cancelling,
    make_plan,
    measure_curve,
    probe_attention,
    probe_linear,
    probe_row_ops,
)
from draftproof.record import OpEvidence
from draftproof.testing import FakeClock, TableSession, TableTarget

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SPECS = [
    LinearSpec(name="qkv", num_in=64, parts=(64, 16, 16)),
    LinearSpec(name="down", num_in=1152, parts=(24,)),
    LinearSpec(name="odd", num_in=77, parts=(13, 5)),
]
SMALL = LinearSpec(name="out", num_in=16, parts=(5,))


def draw(*size: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def one_row_calls(x_TK: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """What stock computes, each row in memory of its own."""
    return torch.stack([torch.cat([F.linear(x[None].clone(), w)[0] for w in parts]) for x in x_TK])


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("share", [False, True])
def test_evidence_agrees_with_brute_force(spec: LinearSpec, dtype: torch.dtype, share: bool) -> None:
    found = probe_linear(spec, dtype, CPU, RealClock(), share=share)
    assert (found.op, found.shape, found.is_exact) == (spec.name, spec.shape, True)
    assert 1 <= found.max_rows <= MAX_ROWS
    assert share <= (found.form == "plain")
    for seed in (101, 102):
        plain = draw(MAX_ROWS, spec.num_in, dtype=dtype, seed=seed)
        plain_parts = [draw(n, spec.num_in, dtype=dtype, seed=n) for n in spec.parts]
        for x_TK, parts in ((plain, plain_parts), cancelling(MAX_ROWS, spec, dtype, seed)):
            linear, want = build_form(found.form, parts), one_row_calls(x_TK, parts)
            assert all(torch.equal(a, b) for a, b in zip(linear.dense_parts(), parts, strict=True))
            for num_rows in range(1, found.max_rows + 1):
                assert torch.equal(linear(x_TK[:num_rows]), want[:num_rows])


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_one_row_more_is_refuted(spec: LinearSpec, dtype: torch.dtype) -> None:
    """The row count is the largest, not just some exact one."""
    found = probe_linear(spec, dtype, CPU, RealClock())
    assert found.form not in found.rejected
    if found.max_rows == MAX_ROWS:
        return
    num_rows = found.max_rows + 1
    cases = [cancelling(MAX_ROWS, spec, dtype, seed) for seed in range(3)]
    assert any(
        not torch.equal(build_form(found.form, w)(x[:num_rows]), one_row_calls(x[:num_rows], w))
        for x, w in cases
    )


CHILD = """
import torch
from draftproof.clock import RealClock
from draftproof.ops.linear import LinearSpec
from draftproof.probe import probe_linear
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    spec = LinearSpec(name="down", num_in=1152, parts=(24,))
    print(probe_linear(spec, dtype, torch.device("cpu"), RealClock()).form)
"""


@pytest.mark.parametrize("isa", ["AVX2", "AVX512_CORE"])
def test_a_processor_with_fewer_instructions(isa: str) -> None:
    """Zen 3 and most desktop processors have no prepacked bf16 linear: stock runs there, so must we."""
    environment = {"ONEDNN_MAX_CPU_ISA": isa, "ATEN_CPU_CAPABILITY": "avx2"}
    run = subprocess.run(
        [sys.executable, "-c", CHILD],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr.splitlines()[-1]
    assert len(run.stdout.split()) == 3


@pytest.mark.parametrize("num_in", [16, 77, 1152])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_probe_data_cancel(num_in: int, dtype: torch.dtype) -> None:
    """Sums far smaller than their terms, so that another order of additions shows; the same every time."""
    spec = LinearSpec(name="x", num_in=num_in, parts=(9, 4))
    x_TK, parts = cancelling(12, spec, dtype, seed=4)
    assert (x_TK.shape, x_TK.dtype) == ((12, num_in), dtype)
    assert [w.shape for w in parts] == [(9, num_in), (4, num_in)]
    terms = x_TK.double()[:, None] * torch.cat(parts).double()[None]
    assert (terms.sum(-1).abs().median() / terms.abs().sum(-1).median()) < 0.05
    again = cancelling(12, spec, dtype, seed=4)
    assert torch.equal(again[0], x_TK)
    assert all(torch.equal(a, b) for a, b in zip(again[1], parts, strict=True))
    assert not torch.equal(cancelling(12, spec, dtype, seed=5)[0], x_TK)


Lie = Callable[[Tensor], bool]


class Form:
    """Stock's arithmetic, row by row; flips the last bit of its last number whenever ``lies`` says so."""

    def __init__(self, parts: Sequence[Tensor], lies: Lie, cost_ns: int, clock: FakeClock) -> None:
        self._parts, self._lies, self._cost, self._clock = list(parts), lies, cost_ns, clock

    def __call__(self, x_TK: Tensor) -> Tensor:
        self._clock.advance(self._cost)
        out = one_row_calls(x_TK, self._parts)
        if self._lies(x_TK):
            out.view(torch.int32)[-1, -1] ^= 1
        return out

    def dense_parts(self) -> list[Tensor]:
        return self._parts


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> Callable[..., OpEvidence]:
    """Probe with forms made by hand: ``forms(name=(lies, cost in ns), ...)``, in fp32."""

    def run(**kinds: tuple[Lie, int]) -> OpEvidence:
        clock = FakeClock()
        monkeypatch.setattr(probe, "candidate_forms", lambda *_: tuple(kinds))
        monkeypatch.setattr(probe, "build_form", lambda form, parts: Form(parts, *kinds[form], clock))
        return probe_linear(SMALL, FP32, CPU, clock)

    return run


def never(x_TK: Tensor) -> bool:
    return False


def test_true_forms_pass(forms: Callable[..., OpEvidence]) -> None:
    found = forms(a=(never, 500), b=(never, 300), c=(never, 400))
    assert (found.form, found.max_rows, found.rejected) == ("b", MAX_ROWS, {})
    assert found.seconds_by_rows == {1: 1.3e-6, 8: 1.3e-6}
    assert found.num_checked == 3 * sum(range(1, MAX_ROWS + 1))


@pytest.mark.parametrize("good", [1, 4, 31])
def test_a_form_that_lies_from_some_row_count_on(good: int, forms: Callable[..., OpEvidence]) -> None:
    assert forms(a=(lambda x: len(x) > good, 100)).max_rows == good


def test_one_lie_in_between_ends_it(forms: Callable[..., OpEvidence]) -> None:
    """Every smaller count must be exact, not only the count itself."""
    assert forms(a=(lambda x: len(x) == 7, 100)).max_rows == 6


def test_a_lie_on_the_last_data_set_alone(forms: Callable[..., OpEvidence]) -> None:
    last = cancelling(MAX_ROWS, SMALL, FP32, 2)[0][0]
    assert forms(a=(lambda x: len(x) > 4 and torch.equal(x[0], last), 100)).max_rows == 4


def test_a_lie_about_one_row_disqualifies(forms: Callable[..., OpEvidence]) -> None:
    found = forms(a=(lambda x: len(x) == 1, 1), b=(never, 900))
    assert (found.form, found.max_rows, found.rejected) == ("b", MAX_ROWS, {"a": "at 1 row"})


def test_a_form_that_lies_is_named_when_another_is_faster(forms: Callable[..., OpEvidence]) -> None:
    found = forms(a=(lambda x: len(x) > 4, 900), b=(never, 100))
    assert (found.form, found.max_rows, found.rejected) == ("b", MAX_ROWS, {"a": "from 5 rows"})


def test_a_form_for_single_rows_loses_to_any_for_several(forms: Callable[..., OpEvidence]) -> None:
    found = forms(a=(lambda x: len(x) > 1, 1), b=(lambda x: len(x) > 2, 10_000))
    assert (found.form, found.max_rows, found.rejected) == ("b", 2, {"a": "from 2 rows"})


def test_a_form_that_cannot_give_its_weights_back_is_not_used(
    forms: Callable[..., OpEvidence], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefill needs them; one bit of one weight is enough."""

    class Lossy(Form):
        def dense_parts(self) -> list[Tensor]:
            changed = self._parts[-1].clone()
            changed.view(torch.int32)[-1, -1] ^= 1
            return [*self._parts[:-1], changed]

    clock = FakeClock()
    monkeypatch.setattr(probe, "candidate_forms", lambda *_: ("lossy", "true"))
    kinds = {"lossy": (Lossy, 1), "true": (Form, 500)}
    monkeypatch.setattr(
        probe, "build_form", lambda form, parts: kinds[form][0](parts, never, kinds[form][1], clock)
    )
    found = probe_linear(SMALL, FP32, CPU, clock)
    assert (found.form, found.rejected) == ("true", {"lossy": "at 1 row"})


def by_place(linear: Form, x_TK: Tensor) -> Tensor:
    out = one_row_calls(x_TK, linear._parts)
    out[3:4] += 1e-3
    return out


def by_place_of_some(linear: Form, x_TK: Tensor) -> Tensor:
    """The first row of every data set is treated well wherever it is."""
    firsts = [cancelling(MAX_ROWS, SMALL, FP32, seed)[0][0] for seed in range(3)]
    out = one_row_calls(x_TK, linear._parts)
    if not any(torch.equal(x_TK[5], first) for first in firsts):
        out[5] += 1e-3
    return out


def by_neighbours(linear: Form, x_TK: Tensor) -> Tensor:
    """The same in whatever order they stand."""
    return one_row_calls(x_TK, linear._parts) + 1e-3 * x_TK.abs().amax()


@pytest.mark.parametrize("call", [by_place, by_place_of_some, by_neighbours])
def test_rows_that_influence_each_other_are_no_fixed_reference(
    call: Callable[[Form, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mixing(Form):
        def __call__(self, x_TK: Tensor) -> Tensor:
            return call(self, x_TK)

    monkeypatch.setattr(probe, "build_form", lambda form, parts: Mixing(parts, never, 0, FakeClock()))
    found = probe_linear(SMALL, FP32, CPU, FakeClock(), fixed_rows=8)
    assert not found.is_exact
    with pytest.raises(OptionError, match="rows influence each other in out"):
        make_plan([found], request="fixed", dtype=FP32, fingerprint="f")


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_fixed_reference_agrees_with_brute_force(dtype: torch.dtype, spec: LinearSpec) -> None:
    found = probe_linear(spec, dtype, CPU, RealClock(), fixed_rows=8)
    assert (found.form, found.max_rows) == ("plain", 8)
    if not found.is_exact:
        pytest.skip("this machine's kernels mix rows at eight rows a call")
    x_TK, parts = cancelling(8, spec, dtype, 77)
    linear = build_form("plain", parts)
    want = linear(x_TK)
    for num_real in range(1, 8):
        padded = F.pad(x_TK[:num_real], (0, 0, 0, 8 - num_real))
        assert torch.equal(linear(padded)[:num_real], want[:num_real])


@pytest.mark.parametrize(("hidden", "inner", "size"), [(64, 160, 16), (72, 77, 24), (1152, 1600, 64)])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_row_evidence_agrees_with_brute_force(hidden: int, inner: int, size: int, dtype: torch.dtype) -> None:
    found = {e.op: e for e in probe_row_ops(hidden, inner, size, dtype, CPU)}
    assert list(found) == ["norm", "norm_shifted", "rotary", "silu_gate", "gelu_gate"]
    weight, gamma = draw(hidden, dtype=dtype, seed=1), 1.0 + draw(hidden, dtype=dtype, seed=1).float()
    cos, sin = (draw(MAX_ROWS, 1, size, dtype=dtype, seed=s) for s in (2, 3))
    functions: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "norm": (lambda x: probe.rms_norm(x, weight, 1e-6), [draw(MAX_ROWS, hidden, dtype=dtype, seed=4)]),
        "norm_shifted": (
            lambda x: probe.rms_norm_shifted(x, gamma, 1e-6),
            [draw(MAX_ROWS, hidden, dtype=dtype, seed=5)],
        ),
        "rotary": (probe.rotate, [draw(MAX_ROWS, 4, size, dtype=dtype, seed=6), cos, sin]),
        "silu_gate": (
            lambda x: probe.silu_gate(*x.chunk(2, -1)),
            [draw(MAX_ROWS, 2 * inner, dtype=dtype, seed=7)],
        ),
        "gelu_gate": (
            lambda x: probe.gelu_gate(*x.chunk(2, -1)),
            [draw(MAX_ROWS, 2 * inner, dtype=dtype, seed=8)],
        ),
    }
    for op, (function, inputs) in functions.items():
        assert found[op].is_exact == (found[op].max_rows == MAX_ROWS)
        single = [function(*(x[t : t + 1].clone() for x in inputs))[0] for t in range(MAX_ROWS)]
        for num_rows in range(1, found[op].max_rows + 1):
            many = function(*(x[:num_rows] for x in inputs))
            assert torch.equal(many, torch.stack(single[:num_rows])), op


@pytest.mark.parametrize(("good", "max_rows"), [(12, 12), (1, 1), (0, 1), (31, 31)])
@pytest.mark.parametrize("name", ["rms_norm", "rms_norm_shifted", "rotate", "silu_gate", "gelu_gate"])
def test_a_lying_row_operation_is_found(
    name: str, good: int, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against stock's own code where there is a reference; one flipped bit in the last row."""
    honest = getattr(probe, name)

    def lying(x: Tensor, *others: Any) -> Tensor:
        out: Tensor = honest(x, *others)
        if len(x) > good and not (good == 0 and name.endswith("gate")):
            out.view(torch.int32)[-1].reshape(-1)[-1] ^= 1
        return out

    monkeypatch.setattr(probe, name, lying)
    op = {"rms_norm": "norm", "rms_norm_shifted": "norm_shifted", "rotate": "rotary"}.get(name, name)
    found = {e.op: e for e in probe_row_ops(64, 64, 16, FP32, CPU)}[op]
    if good == 0 and name.endswith("gate"):  # stock's own code: it cannot differ from itself
        assert found.is_exact
    else:
        assert (found.max_rows, found.is_exact) == (max_rows, False)


@pytest.mark.parametrize(
    ("name", "op"), [("rms_norm", "norm"), ("rms_norm_shifted", "norm_shifted"), ("rotate", "rotary")]
)
def test_a_row_operation_must_agree_with_stock_not_with_itself(
    name: str, op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = getattr(probe, name)
    monkeypatch.setattr(probe, name, lambda x, *others: honest(x, *others) * 1.001)
    found = {e.op: e for e in probe_row_ops(64, 64, 16, FP32, CPU)}[op]
    assert (found.max_rows, found.is_exact) == (1, False)


def test_attention_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    found = probe_attention(4, 2, 16, BF16, CPU)
    assert (found.op, found.shape, found.max_rows) == ("attention", (4, 2, 16), MAX_ROWS)
    honest = probe.attend_row

    def lying(q_HK: Tensor, keys: Tensor, values: Tensor, scale: float, *, masked: bool) -> Tensor:
        out = honest(q_HK, keys, values, scale, masked=masked)
        # Only over views, only with a mask, only for one length.
        return out + float(masked and keys.shape[1] == 513 and not keys.is_contiguous())

    monkeypatch.setattr(probe, "attend_row", lying)
    assert not probe_attention(4, 2, 16, BF16, CPU).is_exact


def evidence(op: str = "qkv", max_rows: int = 32, is_exact: bool = True) -> OpEvidence:
    form = "batched" if op == "norm" else "row by row" if op == "attention" else "packed"
    return OpEvidence(
        op=op, shape=(4, 4), form=form, max_rows=max_rows, is_exact=is_exact, num_checked=7,
        seconds_by_rows={1: 0.5}, rejected={"x": "at 1 row"},
    )  # fmt: skip


GOOD = [evidence("qkv"), evidence("out"), evidence("norm"), evidence("attention")]
SOME = [evidence("qkv", 8), *GOOD[1:]]
SLOW = [evidence("qkv", 1), *GOOD[1:]]
BAD_ROWS = [*GOOD[:2], evidence("norm", 5, is_exact=False), GOOD[3]]
BAD_ATTENTION = [*GOOD[:3], evidence("attention", is_exact=False)]


@pytest.mark.parametrize(
    ("request_", "dtype", "found", "claim"),
    [
        ("auto", BF16, GOOD, "bitwise"),
        ("auto", FP32, GOOD, "bitwise"),
        ("auto", FP32, SOME, "bitwise"),
        ("auto", BF16, SLOW, "bitwise"),
        ("auto", FP16, SLOW, "bitwise"),
        ("auto", FP32, SLOW, "guarded"),
        ("bitwise", FP32, SLOW, "bitwise"),
        ("guarded", BF16, GOOD, "guarded"),
        ("guarded", FP32, SLOW, "guarded"),
        ("auto", BF16, BAD_ROWS, "guarded"),
        ("auto", BF16, BAD_ATTENTION, "guarded"),
        ("fixed", BF16, GOOD, "fixed"),
        ("fixed", FP32, SLOW, "fixed"),
    ],
)
def test_decision_table(request_: Any, dtype: torch.dtype, found: list[OpEvidence], claim: str) -> None:
    plan = make_plan(found, request=request_, dtype=dtype, fingerprint="abc", fixed_rows=16)
    assert plan.claim == claim
    assert plan.dtype == str(dtype).removeprefix("torch.")
    assert (plan.fingerprint, plan.max_rows, plan.margin_bound) == ("abc", MAX_ROWS, None)
    assert plan.fixed_rows == (16 if claim == "fixed" else None)
    if claim == "guarded":
        # What runs one row at a time would cost what speculation saves: batched, and said to be inexact.
        assert [e.max_rows for e in plan.ops] == [e.max_rows if e.max_rows > 1 else MAX_ROWS for e in found]
        assert [e.is_exact for e in plan.ops] == [e.is_exact and e.max_rows > 1 for e in found]
        kept = [(e.op, e.shape, e.form, e.num_checked, e.seconds_by_rows, e.rejected) for e in plan.ops]
        assert kept == [(e.op, e.shape, e.form, e.num_checked, e.seconds_by_rows, e.rejected) for e in found]
    else:
        assert plan.ops == tuple(found)


def test_a_fixed_reference_needs_rows_that_leave_each_other_alone() -> None:
    with pytest.raises(OptionError, match="rows influence each other in norm$"):
        make_plan(BAD_ROWS, request="fixed", dtype=BF16, fingerprint="f")


class PricedSession(TableSession):
    """A verification takes what its target says; the first round of them twenty times as long."""

    def verify(self, token_ids: Sequence[int]) -> Tensor:
        target: Any = self._target
        target.clock.advance(target.price(len(token_ids), len(self.tokens), self.num_forwards))
        return super().verify(token_ids)


class PricedTarget(TableTarget):
    def __init__(self, price: Callable[[int, int, int], int], **kwargs: Any) -> None:
        super().__init__(period=1, **kwargs)
        self.price, self.clock = price, FakeClock(tick_ns=1)
        self.opened: list[PricedSession] = []

    def open(self, capacity: int) -> PricedSession:
        self.opened.append(PricedSession(self, capacity))
        return self.opened[-1]


def test_a_cost_curve_is_what_calls_took() -> None:
    """Warm-up rounds and slow outliers do not count."""

    def price(num_rows: int, context: int, call: int) -> int:
        return 1000 * num_rows + context + (50_000 if call < 6 or call % 5 == 0 else 0)

    target = PricedTarget(price)
    curve = measure_curve(target, target.clock)
    assert (curve.rows, curve.contexts) == ((1, 2, 3, 5, 9, 17), (64, 512, 1536))
    want = [[(1000 * r + c + 1) / 1e9 for r in curve.rows] for c in curve.contexts]
    assert [list(line) for line in curve.seconds] == want
    assert [(s.num_cached, s._pending) for s in target.opened] == [(c, []) for c in curve.contexts]


def test_more_rows_never_cost_less() -> None:
    target = PricedTarget(lambda rows, context, call: {1: 5000, 2: 4000, 3: 6000, 5: 5500}.get(rows, 7000))
    line = measure_curve(target, target.clock).seconds[0]
    assert [round(s * 1e9) - 1 for s in line] == [5000, 5000, 6000, 6000, 7000, 7000]


@pytest.mark.parametrize(
    ("max_context", "contexts"),
    [
        (4096, (64, 512, 1536)),
        (1599, (64, 512)),
        (576, (64, 512)),
        (575, (64,)),
        (127, (63,)),
        (66, (2,)),
        (40, (1,)),
    ],
)
def test_contexts_fit_the_model(max_context: int, contexts: tuple[int, ...]) -> None:
    target = PricedTarget(lambda rows, context, call: rows, max_context=max_context)
    assert measure_curve(target, target.clock).contexts == contexts


def test_rows_fit_the_plan() -> None:
    told: list[tuple[str, int, int]] = []
    target = TableTarget(period=1, max_rows=4)
    curve = measure_curve(target, FakeClock(tick_ns=1000), lambda *report: told.append(report))
    assert curve.rows == (1, 2, 3)
    assert curve.seconds == ((1e-6,) * 3,) * 3
    assert told == [("cost curve", done, 3) for done in range(3)]


class NoisySession(TableSession):
    """Several rows at once get one logit that is off by what the target says for that position."""

    def verify(self, token_ids: Sequence[int]) -> Tensor:
        start = len(self.tokens)
        rows = super().verify(token_ids)
        if len(token_ids) > 1:
            for t in range(len(token_ids)):
                rows[t, 3] += self._target.noise(start + t)  # type: ignore[attr-defined]
        return rows


class NoisyTarget(TableTarget):
    def __init__(self, noise: Callable[[int], float]) -> None:
        super().__init__(vocab_size=16)
        self.noise = noise

    def open(self, capacity: int) -> NoisySession:
        return NoisySession(self, capacity)


@pytest.mark.parametrize(
    ("noise", "worst"),
    [
        (lambda position: 0.25, 0.25),
        (lambda position: -0.25, 0.25),
        (lambda position: 0.5 if position == 24 else 0.0, 0.5),
        (lambda position: 0.5 if position == 24 + 47 else 0.125, 0.5),
    ],
    ids=["everywhere", "negative", "first", "last"],
)
def test_a_margin_is_eight_times_the_largest_difference(noise: Callable[[int], float], worst: float) -> None:
    assert calibrate_margin(NoisyTarget(noise)) == pytest.approx(8 * worst, rel=1e-5)


def test_a_margin_is_never_nothing() -> None:
    """No difference seen is no proof that there is none."""
    assert calibrate_margin(TableTarget()) == pytest.approx(8e-6)
