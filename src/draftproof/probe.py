"""Measures what this machine's kernels do with several rows, and derives a plan and a cost curve.

Every linear shape is tried in every form at every row count up to 32 on data built to cancel (each large
term is paired with its negative, plus a little noise), because random data in bf16 hides differences
behind output rounding. A form passes at a row count when every row has the bits of stock's one-row call.

What this does not prove: it samples data. Equality is claimed for the kernel and shape, not derived from
its source; the audit of finished outputs is the second line. Attention runs row by row and is checked on
the cache's memory layout only. Results belong to one machine fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draftproof.clock import Clock
from draftproof.errors import OptionError
from draftproof.models.base import Target
from draftproof.ops.activation import gelu_gate, silu_gate
from draftproof.ops.attention import attend_row
from draftproof.ops.linear import MAX_ROWS, LinearSpec, build_form, candidate_forms, reference
from draftproof.ops.norm import (
    rms_norm,
    rms_norm_reference,
    rms_norm_shifted,
    rms_norm_shifted_reference,
)
from draftproof.ops.rotary import rotate, rotate_reference, sign_first_half
from draftproof.record import CostCurve, OpEvidence, Plan

CURVE_ROWS = (1, 2, 3, 5, 9, 17)
CURVE_CONTEXTS = (64, 512, 1536)
_SEEDS = 3
_HUGE_OUTPUT = 16384
_TIMED_ROWS = (1, 8)
_GUARD_FACTOR = 8.0

Progress = Callable[[str, int, int], None]
ClaimRequest = Literal["auto", "bitwise", "guarded", "fixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One data set for one linear: rows, weights, and stock's one-row results."""

    x_TK: Tensor
    parts_NK: list[Tensor]
    want_TN: Tensor


def cancelling(num_rows: int, spec: LinearSpec, dtype: torch.dtype, seed: int) -> tuple[Tensor, list[Tensor]]:
    """Rows ``[T, K]`` and weights whose exact products nearly cancel, magnitudes spread over decades."""
    generator = torch.Generator().manual_seed(seed)
    half = spec.num_in // 2
    order = torch.randperm(spec.num_in, generator=generator)
    big = torch.randn(num_rows, half, generator=generator)
    big = big * torch.exp(2 * torch.randn(num_rows, half, generator=generator))
    x_TK = torch.randn(num_rows, spec.num_in, generator=generator)
    x_TK[:, order[:half]] = big
    x_TK[:, order[half : 2 * half]] = big
    return x_TK.to(dtype), [_cancelling_weight(n, spec, order, dtype, generator) for n in spec.parts]


def _cancelling_weight(
    num_out: int, spec: LinearSpec, order: Tensor, dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    half = spec.num_in // 2
    weight = torch.empty(num_out, spec.num_in, dtype=dtype)
    for start in range(0, num_out, 8192):  # an output layer in fp32 would take a gigabyte
        count = min(8192, num_out - start)
        pair = torch.randn(count, half, generator=generator)
        block = torch.randn(count, spec.num_in, generator=generator)
        block[:, order[:half]] = pair
        block[:, order[half : 2 * half]] = -pair
        block += 1e-3 * torch.randn(count, spec.num_in, generator=generator)
        weight[start : start + count] = block
    return weight


@torch.inference_mode()
def probe_linear(
    spec: LinearSpec, dtype: torch.dtype, device: torch.device, clock: Clock, *, share: bool = False,
    fixed_rows: int | None = None,
) -> OpEvidence:  # fmt: skip
    """Find the fastest form of ``spec`` that reproduces stock's one-row bits for several rows.

    With ``share`` only the checkpoint's own layout is considered. With ``fixed_rows`` the question is
    another: whether, at that row count, a row's bits depend on its place or on the other rows.
    """
    cases = _cases(spec, dtype, device)
    if fixed_rows is not None:
        return _probe_fixed(spec, cases, fixed_rows)
    found: list[tuple[float, str, int, dict[int, float]]] = []
    rejected: dict[str, str] = {}
    for form in ("plain",) if share else candidate_forms(spec, device, dtype):
        good, times = _try_form(form, cases, clock)
        if good < MAX_ROWS:
            rejected[form] = "at 1 row" if not good else f"from {good + 1} rows"
        if good:
            found.append((_score(times, good), form, good, times))
    _, form, good, times = min(found)
    rejected.pop(form, None)
    return OpEvidence(
        op=spec.name, shape=spec.shape, form=form, max_rows=good, is_exact=True, seconds_by_rows=times,
        num_checked=len(cases) * MAX_ROWS * (MAX_ROWS + 1) // 2, rejected=rejected,
    )  # fmt: skip


def _score(times: dict[int, float], good: int) -> float:
    """Seconds of one row and of several, in as many calls as the exact row count asks for."""
    most = max(times)
    return times[1] + times[most] * -(-most // good) if good > 1 else 1e6 + times[1]


def _probe_fixed(spec: LinearSpec, cases: Sequence[_Case], num_rows: int) -> OpEvidence:
    """Stock's layout at a constant row count: every row moved to every place, among other rows."""
    same, checked = True, 0
    for case in cases:
        linear, rows = build_form("plain", case.parts_NK), case.x_TK[:num_rows]
        want = linear(rows)
        for shift in range(1, num_rows):
            others = case.x_TK[-num_rows:].flip(0).clone()
            others[shift] = rows[0]
            same &= torch.equal(linear(rows.roll(shift, 0)), want.roll(shift, 0))
            same &= torch.equal(linear(others)[shift], want[0])
            checked += num_rows + 1
    return OpEvidence(
        op=spec.name,
        shape=spec.shape,
        form="plain",
        max_rows=num_rows,
        is_exact=same,
        num_checked=checked,
    )


def _cases(spec: LinearSpec, dtype: torch.dtype, device: torch.device) -> list[_Case]:
    """Fewer seeds for huge layers: many outputs are many samples already."""
    seeds = _SEEDS if sum(spec.parts) <= _HUGE_OUTPUT else 1
    cases = []
    for seed in range(seeds):
        x_TK, parts = cancelling(MAX_ROWS, spec, dtype, seed)
        x_TK, parts = x_TK.to(device), [w.to(device) for w in parts]
        cases.append(_Case(x_TK=x_TK, parts_NK=parts, want_TN=reference(x_TK, parts)))
    return cases


def _try_form(form: str, cases: Sequence[_Case], clock: Clock) -> tuple[int, dict[int, float]]:
    """Up to how many rows ``form`` is exact on every case, and seconds by rows on the first."""
    good, times = MAX_ROWS, {}
    for index, case in enumerate(cases):
        linear = build_form(form, case.parts_NK)
        if not all(torch.equal(a, b) for a, b in zip(linear.dense_parts(), case.parts_NK, strict=True)):
            return 0, {}  # a layout that cannot be unpacked exactly cannot serve the prefill
        for rows in range(1, good + 1):
            if not torch.equal(linear(case.x_TK[:rows]), case.want_TN[:rows]):
                good = rows - 1
                break
        if index == 0:
            times = {rows: _fastest(linear, case.x_TK[:rows], clock) for rows in _TIMED_ROWS}
    return good, times


def _fastest(function: Callable[[Tensor], Tensor], x_TK: Tensor, clock: Clock, repeats: int = 40) -> float:
    best = None
    for _ in range(repeats):
        start = clock.now_ns()
        function(x_TK)
        _synchronize(x_TK.device)
        elapsed = clock.now_ns() - start
        best = elapsed if best is None else min(best, elapsed)
    return (best or 1) / 1e9


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def probe_row_ops(
    hidden: int, inner: int, head_size: int, dtype: torch.dtype, device: torch.device
) -> tuple[OpEvidence, ...]:
    """Whether norms, rotary embedding and gated activations give one row's bits among many."""
    generator = torch.Generator().manual_seed(7)

    def rows(*size: int) -> Tensor:
        return (3 * torch.randn(MAX_ROWS, *size, generator=generator)).to(dtype).to(device)

    weight, cos, sin = rows(hidden)[0], rows(1, head_size), rows(1, head_size)
    gamma = 1.0 + weight.float()
    cases: dict[str, tuple[tuple[int, ...], list[Tensor], Callable[..., Tensor]]] = {
        "norm": ((hidden,), [rows(hidden)], lambda x: rms_norm(x, weight, 1e-6)),
        "norm_shifted": ((hidden,), [rows(hidden)], lambda x: rms_norm_shifted(x, gamma, 1e-6)),
        "rotary": ((4, head_size), [rows(4, head_size), cos, sin], rotate),
        "silu_gate": ((inner,), [rows(2 * inner)], lambda x: silu_gate(*x.chunk(2, -1))),
        "gelu_gate": ((inner,), [rows(2 * inner)], lambda x: gelu_gate(*x.chunk(2, -1))),
    }
    stock: dict[str, Callable[..., Tensor]] = {
        "norm": lambda x: rms_norm_reference(x, weight, 1e-6),
        "norm_shifted": lambda x: rms_norm_shifted_reference(x, weight, 1e-6),
        "rotary": lambda x, cos, signed: rotate_reference(x, cos[:, 0], sign_first_half(signed[:, 0])),
    }
    return tuple(_row_evidence(name, *case, stock.get(name, case[2])) for name, case in cases.items())


def _row_evidence(
    name: str, shape: tuple[int, ...], inputs: list[Tensor], function: Callable[..., Tensor],
    stock: Callable[..., Tensor],
) -> OpEvidence:  # fmt: skip
    """Compare ``function`` over many rows with ``stock``'s own code, one row a call."""
    want = torch.cat([stock(*(x[t : t + 1] for x in inputs)) for t in range(MAX_ROWS)])
    good = 0
    for count in range(1, MAX_ROWS + 1):
        if not torch.equal(function(*(x[:count] for x in inputs)), want[:count]):
            break
        good = count
    return OpEvidence(
        op=name, shape=shape, form="batched", max_rows=max(good, 1), is_exact=good == MAX_ROWS,
        num_checked=MAX_ROWS * (MAX_ROWS + 1) // 2,
    )  # fmt: skip


@torch.inference_mode()
def probe_attention(
    num_heads: int, num_groups: int, head_size: int, dtype: torch.dtype, device: torch.device
) -> OpEvidence:
    """Row-by-row attention over the static cache's strided views against contiguous keys and values."""
    generator = torch.Generator().manual_seed(11)
    lengths = (1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 127, 200, 511, 512, 513, 700)
    size = (num_groups, 768, head_size)
    keys, values = (torch.randn(size, generator=generator).to(dtype).to(device) for _ in range(2))
    query = (2 * torch.randn(num_heads, head_size, generator=generator)).to(dtype).to(device)
    same = True
    for length in lengths:
        for masked in (False, True):
            views = attend_row(query, keys[:, :length], values[:, :length], head_size**-0.5, masked=masked)
            copies = attend_row(
                query, keys[:, :length].contiguous(), values[:, :length].contiguous(), head_size**-0.5,
                masked=masked,
            )  # fmt: skip
            same &= torch.equal(views, copies)
    return OpEvidence(
        op="attention", shape=(num_heads, num_groups, head_size), form="row by row", max_rows=MAX_ROWS,
        is_exact=same, num_checked=2 * len(lengths),
    )  # fmt: skip


def make_plan(
    evidence: Sequence[OpEvidence], *, request: ClaimRequest, dtype: torch.dtype, fingerprint: str,
    fixed_rows: int = 8,
) -> Plan:  # fmt: skip
    """What runs batched and what row by row, and the claim that follows.

    ``auto`` claims ``bitwise`` where each linear has an exact form for several rows, or the dtype is a half
    type (failing linears then run row by row); otherwise ``guarded``: failing linears run batched in
    stock's own layout, one-row calls keep stock's bits, and near-ties are decided again.
    """
    name = str(dtype).removeprefix("torch.")
    batched = [e for e in evidence if e.op not in ("attention",)]
    is_all_exact = all(e.is_exact for e in evidence)
    if request == "fixed":
        if not is_all_exact:
            failed = ", ".join(e.op for e in evidence if not e.is_exact)
            raise OptionError(f"no fixed reference here: rows influence each other in {failed}")
        return Plan(
            claim="fixed", dtype=name, fingerprint=fingerprint, fixed_rows=fixed_rows, max_rows=MAX_ROWS,
            ops=tuple(evidence),
        )  # fmt: skip
    can_batch = all(e.max_rows > 1 for e in batched)
    if request == "bitwise" and not is_all_exact:
        failed = ", ".join(e.op for e in evidence if not e.is_exact)
        raise OptionError(f"no bitwise claim here: one row among many has other bits in {failed}")
    is_half = dtype in (torch.bfloat16, torch.float16)
    if is_all_exact and (request == "bitwise" or (request == "auto" and (can_batch or is_half))):
        return Plan(
            claim="bitwise", dtype=name, fingerprint=fingerprint, ops=tuple(evidence), max_rows=MAX_ROWS
        )
    return Plan(
        claim="guarded", dtype=name, fingerprint=fingerprint, ops=tuple(_guarded(e) for e in evidence),
        max_rows=MAX_ROWS,
    )  # fmt: skip


def _guarded(evidence: OpEvidence) -> OpEvidence:
    """The same operation run batched although several rows do not carry the one-row bits."""
    if evidence.max_rows > 1:
        return evidence
    return OpEvidence(
        op=evidence.op, shape=evidence.shape, form=evidence.form, max_rows=MAX_ROWS, is_exact=False,
        num_checked=evidence.num_checked, seconds_by_rows=evidence.seconds_by_rows,
        rejected=evidence.rejected,
    )  # fmt: skip


def measure_curve(
    target: Target, clock: Clock, progress: Progress | None = None, repeats: int = 3
) -> CostCurve:
    """Seconds of a verification by rows and context: the fastest of ``repeats`` interleaved calls.

    The fastest, because other load on the machine only ever adds; speeds are never quoted from it.
    """
    contexts = [c for c in CURVE_CONTEXTS if c + 2 * MAX_ROWS <= target.max_context]
    contexts = contexts or [max(target.max_context - 2 * MAX_ROWS, 1)]
    most = min(target.max_rows, target.max_context - contexts[0])
    rows = tuple(r for r in CURVE_ROWS if r <= max(most, 1))
    lines = []
    for done, context in enumerate(contexts):
        if progress:
            progress("cost curve", done, len(contexts))
        session = target.open(context + MAX_ROWS)
        session.prefill([(7 * i) % (target.vocab_size - 1) + 1 for i in range(context)])
        samples: dict[int, list[int]] = {r: [] for r in rows}
        for _ in range(repeats + 1):
            for count in rows:
                start = clock.now_ns()
                session.verify([1] * count).argmax(-1).tolist()
                samples[count].append(clock.now_ns() - start)
                session.commit(0)
        lines.append(tuple(min(samples[r][1:]) / 1e9 for r in rows))
    return CostCurve(rows=rows, contexts=tuple(contexts), seconds=tuple(_ascending(line) for line in lines))


def _ascending(line: Sequence[float]) -> tuple[float, ...]:
    """More rows never cost less: noise that says otherwise is lifted to the smaller count's figure."""
    out: list[float] = []
    for value in line:
        out.append(max(value, out[-1]) if out else value)
    return tuple(out)


@torch.inference_mode()
def calibrate_margin(target: Target, num_tokens: int = 48, rows: int = 8) -> float:
    """The margin under which a batched choice is not trusted: 8 times the largest logit difference seen.

    A greedy continuation is decoded row by row, then verified ``rows`` at a time over the same tokens. A
    measured bet, not a bound: report tokens checked and mismatches with it.
    """
    num_prompt = min(24, max(target.max_context // 4, 1))
    num_tokens = max(min(num_tokens, target.max_context - num_prompt - rows), 1)
    prompt = [(13 * i) % (target.vocab_size - 1) + 1 for i in range(num_prompt)]
    serial = target.open(len(prompt) + num_tokens + rows)
    token = int(serial.prefill(prompt).argmax())
    tokens, want = [], []
    for _ in range(num_tokens):
        tokens.append(token)
        want.append(serial.verify([token])[0])
        serial.commit(1)
        token = int(want[-1].argmax())
    batched = target.open(len(prompt) + num_tokens + rows)
    batched.prefill(prompt)
    worst = 0.0
    for start in range(0, num_tokens, rows):
        chunk = tokens[start : start + rows]
        got = batched.verify(chunk)
        batched.commit(len(chunk))
        difference = (got.float() - torch.stack(want[start : start + rows]).float()).abs().max()
        worst = max(worst, float(difference))
    return _GUARD_FACTOR * max(worst, 1e-6)
