"""``draftproof status``, ``ledger`` and ``integrate``: what was evaluated, if it still stands, what is in."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from draftproof.cli.terminal import Report, progress_line, stderr, stdout
from draftproof.errors import EvidenceError, UsageError
from draftproof.folder import STOCK
from draftproof.ledger import (
    Candidate,
    Ledger,
    LedgerRow,
    LedgerState,
    SealCheck,
    best,
    candidates,
    check_run,
    integrated,
)
from draftproof.wire import encode

_NUMBERS = ("speedup", "diverse median", "evaluations")
_CHECKED = {"sealed": "as entered", "missing": "not here", "differs": "CHANGED"}


def status(path: Path, *, json_output: bool) -> int:
    """Every candidate by its latest evaluation; always 0, as a discarded candidate is no failure."""
    state = _read(path)
    now, fastest = integrated(state.rows), best(state.rows)
    found = candidates(state.rows)
    if json_output:
        document = {
            "ledger": str(path), "lost": state.lost, "integrated": now.name if now else None,
            "best": fastest.name if fastest else None,
            "candidates": [
                {**encode(c), "verdict": c.row.verdict, "is_integrated": _is_in(c, now)} for c in found
            ],
        }  # fmt: skip
        sys.stdout.write(json.dumps(document) + "\n")
        return 0
    stdout().print(_status_table(found, now))
    said = f"integrated: {now.name if now else STOCK}; fastest kept: {fastest.name if fastest else 'none'}"
    _say(said, state)
    return 0


def _status_table(found: Sequence[Candidate], now: LedgerRow | None) -> Table:
    table = _table(("candidate", "verdict", *_NUMBERS, "integrated", "why not"))
    for candidate in found:
        row = candidate.row
        why = "" if row.status == "keep" else "; ".join(row.reasons)
        table.add_row(
            Text(candidate.name), row.verdict, _speed(row), _times(row.diverse_speedup),
            str(candidate.num_evaluations), _integration(candidate, now), Text(why),
        )  # fmt: skip
    return table


def _is_in(candidate: Candidate, now: LedgerRow | None) -> bool:
    return now is not None and now.name == candidate.name


def _integration(candidate: Candidate, now: LedgerRow | None) -> str:
    """``yes`` for what is in, else how its last A/B ended."""
    if _is_in(candidate, now):
        return "yes"
    if candidate.integration is None:
        return ""
    ends = {"keep": "replaced", "discard": "declined", "fail": "failed", "void": "undecided"}
    return ends[candidate.integration.status]


def ledger(path: Path, *, check: bool, json_output: bool) -> int:
    """Every row; 1 when the chain is broken or, with ``check``, a run folder is not what was entered."""
    try:
        state = _read(path)
    except EvidenceError as error:
        if not json_output:
            raise
        document: dict[str, Any] = {"ledger": str(path), "is_whole": False, "why": str(error), "rows": []}
        sys.stdout.write(json.dumps(document) + "\n")
        return 1
    checks = [check_run(row) for row in state.rows] if check else None
    if json_output:
        document = {
            "ledger": str(path), "is_whole": True, "head": state.head, "lost": state.lost,
            "rows": [_ledger_row(row, checks[i] if checks else None) for i, row in enumerate(state.rows)],
        }  # fmt: skip
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        stdout().print(_ledger_table(state.rows, checks))
        num_rows = f"{len(state.rows)} row{'' if len(state.rows) == 1 else 's'}"
        _say(f"{num_rows}, the chain is whole; last hash {state.head}", state)
        for row, made in zip(state.rows, checks or (), strict=False):
            for problem in made.problems:
                stdout().print(Text(f"{row.id} {row.name}: {problem}"), soft_wrap=True)
    return int(any(made.state == "differs" for made in checks or ()))


def _ledger_row(row: LedgerRow, made: SealCheck | None) -> dict[str, Any]:
    return {**encode(row), "verdict": row.verdict, "seal_check": asdict(made) if made else None}


def _ledger_table(rows: Sequence[LedgerRow], checks: Sequence[SealCheck] | None) -> Table:
    names = ("id", "time", "candidate", "kind", "verdict", *_NUMBERS[:2], "run")
    table = _table((*names, "run folder") if checks is not None else names)
    for index, row in enumerate(rows):
        table.add_row(
            row.id, Text(row.time), Text(row.name), row.kind, row.verdict, _speed(row),
            _times(row.diverse_speedup), Text(row.run),
            *([_CHECKED[checks[index].state]] if checks is not None else []),
        )  # fmt: skip
    return table


@dataclass(frozen=True, slots=True, kw_only=True)
class AbOptions:
    """The options of ``integrate``; ``out`` ``None`` is ``runs/<time>-integrate``."""

    name: str
    ledger: Path
    rounds: int
    min_win_rate: float
    min_gain: float
    out: Path | None


OpenArms = Callable[[Any, Report], AbstractContextManager[Any]]


def integrate(options: AbOptions, open_arms: OpenArms, *, json_output: bool) -> int:
    """0 accepted, 1 declined or wrong, 130 interrupted.

    ``open_arms(choice, report)`` loads A and B of a ``bench.integrate.Choice`` as ``bench.integrate.Arms``.
    """
    from draftproof.bench import integrate as ab

    choice = ab.choose(_read(options.ledger).rows, options.name)
    rule = ab.AbRule(min_win_rate=options.min_win_rate, min_gain=options.min_gain)
    ab.check_rounds(options.rounds)
    folder = options.out or Path("runs") / time.strftime("%Y%m%d-%H%M%S-integrate")
    ab.require_fresh(folder)
    started = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    with progress_line() as report, open_arms(choice, report) as arms:

        def run_pair(number: int) -> Any:
            report(f"round {number + 1} of {options.rounds}", number, options.rounds)
            return arms.run_pair(number)

        stamp = ab.Stamp(machine=arms.machine, time=started, argv=tuple(sys.argv[1:]))
        done = ab.integrate(
            run_pair, options.rounds, folder, choice=choice, ledger=Ledger(options.ledger), stamp=stamp,
            rule=rule,
        )  # fmt: skip
    if json_output:
        sys.stdout.write(json.dumps(encode(done)) + "\n")
    else:
        stdout().print(Text(_ab_summary(done)), soft_wrap=True)
    stderr().print(Text(f"raw legs and the decision: {folder}"), soft_wrap=True)
    if done.status == "interrupted":
        return 130
    return 0 if done.decision is not None and done.decision.accepted else 1


def _ab_summary(done: Any) -> str:
    """The decision, and the numbers a reader must not confuse it with."""
    if done.decision is None:
        return f"undecided after {len(done.rounds)} of {done.num_planned} rounds: {done.status}"
    label = "; its speed is data-dependent" if done.data_dependent else ""
    return (
        f"{'accepted' if done.decision.accepted else 'declined'}: {done.candidate} against {done.base}"
        f" {done.decision.why}\n"
        f"against stock: benchmark {_times(done.benchmark_speedup)}, median of the diverse set"
        f" {_times(done.diverse_speedup)}{label}"
    )


def _table(names: Sequence[str]) -> Table:
    table = Table()
    for name in names:
        side: Literal["right", "left"] = "right" if name in _NUMBERS else "left"
        table.add_column(name, justify=side, overflow="fold", no_wrap=name in ("id", "verdict"))
    return table


def _read(path: Path) -> LedgerState:
    """The ledger, which a reader expects to exist."""
    state = Ledger(path).read()
    if not state.rows and state.lost is None and not path.exists():
        raise UsageError(f"no ledger at {path}; bench and evaluate make one, or name another with --ledger")
    return state


def _say(line: str, state: LedgerState) -> None:
    stdout().print(Text(line), soft_wrap=True)
    if state.lost:
        stdout().print(Text(f"lost: {state.lost}"), soft_wrap=True)


def _speed(row: LedgerRow) -> str:
    """The speedup with its interval."""
    if row.speedup is None:
        return "withheld"
    around = f" ({row.interval[0]:.2f}-{row.interval[1]:.2f})" if row.interval else ""
    return f"{row.speedup:.2f}x{around}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
