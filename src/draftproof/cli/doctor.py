"""``draftproof doctor``: machine, plan and claim, cost curve, break-even advice."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Group
from rich.table import Table

from draftproof.cli.terminal import progress_line, quiet_transformers, stdout
from draftproof.record import CostCurve, Machine, Plan
from draftproof.wire import encode

_ADVISED_ROWS = 5
_MEANING = {
    "bitwise": "logits, keys and values equal stock's one-token steps bit for bit, as probed on this machine",
    "guarded": "some operations change bits with the row count; near-ties are decided again by one row",
    "unproved": "verification runs other kernels than one-row decoding; only an audit of the output can say",
    "fixed": "bit-identical to draftproof's own serial decoder at a fixed row count, not to stock",
}


def run(load: dict[str, Any], *, json_output: bool) -> None:
    """Probe or read back, then print."""
    from draftproof import engine as engines
    from draftproof.machine import describe

    quiet_transformers()
    with progress_line() as report:
        engine = engines.load(**load, progress=report)
    import torch

    machine = describe(torch.device(load["device"]))
    advice = advise(engine.curve)
    if json_output:
        document = {
            "machine": encode(machine), "plan": encode(engine.plan), "cost_curve": encode(engine.curve),
            "advice": advice,
        }  # fmt: skip
        sys.stdout.write(json.dumps(document) + "\n")
        return
    stdout().print(
        Group(
            _machine_lines(machine, engine.plan),
            _plan_table(engine.plan),
            _curve_table(engine.curve),
            f"\n[bold]{advice}[/bold]",
        )
    )


def advise(curve: CostCurve) -> str:
    """One sentence: whether speculation pays here and from which acceptance length on."""
    rows = min(_ADVISED_ROWS, max(curve.rows))
    needs = {c: curve.at(rows, c) / curve.at(1, c) for c in curve.contexts}
    pays = any(need < rows for need in needs.values())
    costs = ", ".join(f"{need:.2f} serial tokens at {c} positions" for c, need in needs.items())
    return (
        f"Speculation {'pays' if pays else 'does not pay'} here: a verification of {rows} rows costs"
        f" {costs}; it pays from that acceptance length on (bonus included, {rows} at most)."
    )


def _machine_lines(machine: Machine, plan: Plan) -> str:
    return (
        f"{machine.cpu} · {machine.isa} · {machine.num_threads} threads · {machine.device}\n"
        f"torch {machine.torch} · transformers {machine.transformers} · fingerprint {plan.fingerprint}\n"
        f"claim [bold]{plan.claim}[/bold] ({plan.dtype}): {_MEANING[plan.claim]}"
        + (f"\nmargin bound {plan.margin_bound:.3g}" if plan.margin_bound else "")
    )


def _plan_table(plan: Plan) -> Table:
    table = Table(title="What runs how", title_justify="left")
    for column in ("operation", "shape", "form", "exact to rows", "faster or other forms that failed"):
        table.add_column(column, overflow="fold")
    for op in plan.ops:
        exact = str(op.max_rows) if op.is_exact else "1"
        rejected = "; ".join(f"{form} {why}" for form, why in op.rejected.items())
        table.add_row(op.op, "x".join(map(str, op.shape)), op.form, exact, rejected)
    return table


def _curve_table(curve: CostCurve) -> Table:
    table = Table(title="Cost of a verification, ms (times one row)", title_justify="left")
    table.add_column("positions", justify="right")
    for rows in curve.rows:
        table.add_column(f"{rows} row{'s' * (rows > 1)}", justify="right")
    for context, line in zip(curve.contexts, curve.seconds, strict=True):
        table.add_row(str(context), *(f"{s * 1e3:.1f} ({s / line[0]:.2f})" for s in line))
    return table
