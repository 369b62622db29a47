"""``draftproof evaluate``: one candidate through ``evaluate_e2e``; verdict, table, report, ledger row."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from draftproof.cli.bench import summary
from draftproof.cli.generate import parse_depth
from draftproof.cli.publish import publish
from draftproof.cli.terminal import progress_line, quiet_transformers, stderr, stdout

_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where results go: the run folder, the ledger the run is entered into, and how they are shown."""

    out: Path | None
    ledger: Path
    json_output: bool


def run(candidate: dict[str, Any], settings: dict[str, Any], place: Place) -> int:
    """0 when the candidate passes, 1 for every other verdict, 130 when interrupted."""
    from draftproof.bench.evaluate import Candidate, EvaluateSettings, evaluate_e2e

    judged = Candidate(**candidate | {"depth": parse_depth(candidate["depth"])})
    made = EvaluateSettings(**settings)
    folder = place.out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    quiet_transformers()
    with progress_line() as report:
        results = evaluate_e2e(judged, made, folder, report)
        publish(results, folder, place.ledger, name=results["arm"], kind="evaluate")
    if place.json_output:
        sys.stdout.write(json.dumps(results | {"run": str(folder)}) + "\n")
    else:
        stdout().print(table(results))
        stdout().print(Text(summary(results)), soft_wrap=True)
        stdout().print(Text(f"report: {folder / 'report.html'}"), soft_wrap=True)
    stderr().print(Text(f"raw legs and tokens: {folder}"), soft_wrap=True)
    if results["status"] == "interrupted":
        return _INTERRUPTED
    return 0 if results["verdict"]["outcome"] == "pass" else 1


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """``KEY=VALUE`` options; a value is JSON where it reads as JSON, else text.

    Raises:
        OptionError: no ``=`` in it.
    """
    from draftproof.errors import OptionError

    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise OptionError(f"an option is KEY=VALUE, got {pair!r}")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def table(results: dict[str, Any]) -> Table:
    """One line an input: speed at first sight and on repeats, what was accepted, equality."""
    title = f"{results['arm']} on {results['model']} · {results['dtype']}"
    made = Table(title=Text(title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column("input", no_wrap=True)
    for column in ("tokens", "speedup", "95 %", "noise", "first seen", "repeat", "tok a forward"):
        made.add_column(column, justify="right", no_wrap=column == "95 %")
    made.add_column("equal stock's")
    for row in results["inputs"]:
        interval = (row["speedup"] or {}).get("interval")
        made.add_row(
            Text(row["label"]), str(row["num_tokens"]), _times(row["speedup"]),
            f"{interval[0]:.2f}-{interval[1]:.2f}" if interval else "",
            "-" if row["noise"] is None else f"{row['noise']:.0%}", _times(row["first_seen_speedup"]),
            _times(row["repeat_speedup"]),
            "-" if row["tokens_per_step"] is None else f"{row['tokens_per_step']:.2f}",
            _equality(row),
        )  # fmt: skip
    return made


def _equality(row: dict[str, Any]) -> str:
    if row["first_difference"] is not None:
        return f"NO, from token {row['first_difference']}"
    return "yes" if row["num_checked_tokens"] else "see the gates"


def _times(ratio: dict[str, Any] | None) -> str:
    return "-" if ratio is None else f"{ratio['median']:.2f}x"
