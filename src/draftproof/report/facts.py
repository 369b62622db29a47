"""Where and how a run was made: machine, versions, plan, command, hashes, provenance."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from draftproof.folder import Evidence
from draftproof.record import OpEvidence, Plan
from draftproof.report.charts import Table
from draftproof.report.words import mib
from draftproof.wire import canonical


def environment(evidence: Evidence) -> Table:
    """The machine, the software, and what the run asked for, name by name."""
    machine, floor = evidence.machine, evidence.floor
    rows = [
        ("processor", machine.cpu), ("instructions", machine.isa), ("threads", str(machine.num_threads)),
        ("device", machine.device), ("system", machine.os), ("Python", machine.python),
        ("torch", machine.torch), ("transformers", machine.transformers),
        ("environment", " · ".join(machine.environment) or "nothing set that matters"),
    ]  # fmt: skip
    if floor is not None:
        speed = f"{floor.bytes_per_second / 1e9:.1f} GB/s"
        rows.append(
            ("memory floor", f"{mib(floor.num_bytes)} at {speed}: {floor.seconds * 1e3:.1f} ms a forward")
        )
    hosts = sorted({decode.leg.host for decode in evidence.decodes if decode.leg.host})
    if len(hosts) > 1:
        rows.append(("machines", ", ".join(hosts)))
    return Table(columns=("", ""), rows=tuple(rows))


def plan_table(plan: Plan | None) -> Table | None:
    """What runs batched and what row by row, with what the probe saw."""
    if plan is None:
        return None
    return Table(
        columns=("operation", "shape", "form", "exact to rows", "forms that failed"),
        rows=tuple(_op_cells(op) for op in plan.ops),
    )


def _op_cells(op: OpEvidence) -> tuple[str, ...]:
    failed = "; ".join(f"{form}: {why}" for form, why in op.rejected.items()) or "none"
    return op.op, "×".join(map(str, op.shape)), op.form, str(op.max_rows if op.is_exact else 1), failed


def command(evidence: Evidence) -> str:
    """The command line that repeats the run: as it was typed where that is known, else from the request."""
    typed = evidence.provenance.get("argv")
    if isinstance(typed, Sequence) and not isinstance(typed, str):
        return shlex.join(["draftproof", *map(str, typed)])
    words = ["draftproof", evidence.kind]
    for name, value in evidence.request.items():
        words += _option(name, value)
    return shlex.join(words)


def _option(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if name == "transform":
        return [str(value)]
    values = value if isinstance(value, list | tuple) else [value]
    return [word for one in values for word in (flag, str(one))]


def named_values(values: Mapping[str, Any]) -> Table:
    """A mapping as rows; what is not text or a number reads as JSON."""
    return Table(
        columns=("", ""),
        rows=tuple((name.replace("_", " "), _read(value)) for name, value in sorted(values.items())),
    )


def _read(value: Any) -> str:
    if value is None or value in ([], ()):
        return "not set"
    return value if isinstance(value, str) else canonical(value)


def hashes(seal: Mapping[str, Any] | None) -> Table | None:
    """The measured files with their SHA-256; this page, made from them, is not among them."""
    if seal is None:
        return None
    files: Mapping[str, str] = seal["files"]
    return Table(
        columns=("file", "SHA-256"),
        rows=tuple((name, digest) for name, digest in sorted(files.items())),
    )


def gates(rows: Sequence[Mapping[str, Any]]) -> Table | None:
    """The raw figures of the quality gates."""
    if not rows:
        return None
    return Table(
        columns=("input", "gate", "value", "limit", "met"),
        rows=tuple(
            (row["label"], row["gate"], f"{row['value']:.4g}", f"{row['limit']:.4g}",
             "yes" if row["is_met"] else "NO")
            for row in rows
        ),
    )  # fmt: skip
