"""``draftproof bench``: progress while it runs; verdict, table, audit and the report's path at the end."""

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

from draftproof.cli.audit import lines as audit_lines
from draftproof.cli.generate import parse_depth
from draftproof.cli.publish import publish
from draftproof.cli.terminal import Report, progress_line, quiet_transformers, stderr, stdout
from draftproof.wire import encode

_INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What a bench does besides measuring.

    ``out`` is the run folder, ``ray`` a cluster's address, ``ledger`` the file the run is entered into.
    """

    out: Path | None
    resume: bool
    audit: bool
    ray: str | None
    ledger: Path
    json_output: bool


def run(settings: dict[str, Any], wishes: Wishes) -> int:
    """0 for a pass or a tie, 1 for a bad verdict or a failed audit, 130 when interrupted."""
    from draftproof.bench.run import BenchSettings, Here, run_bench
    from draftproof.errors import OptionError

    settings["depth"] = parse_depth(settings["depth"])
    made = BenchSettings(**settings)
    if wishes.resume and wishes.out is None:
        raise OptionError("--resume continues a run folder: name it with --out")
    folder = wishes.out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    place: Any = Here
    if wishes.ray is not None:
        from draftproof.bench.cluster import OnRay

        place = OnRay(address=wishes.ray, model=made.model)
    quiet_transformers()
    with progress_line() as report:
        results = run_bench(made, folder, report, place=place, resume=wishes.resume)
        checked = None
        if wishes.audit and results["inputs"] and results["status"] == "complete":
            checked = _audit(folder, report)
        if results["inputs"]:
            publish(results, folder, wishes.ledger, name=settings["drafter"], kind="bench")
    if wishes.json_output:
        sys.stdout.write(
            json.dumps(results | {"audit": encode(checked) if checked else None, "run": str(folder)}) + "\n"
        )
    else:
        _show(results, checked, folder)
    if results["status"] == "interrupted":
        return _INTERRUPTED
    is_good = results["verdict"]["outcome"] in ("pass", "tie")
    return 0 if is_good and (checked is None or checked.outcome == "pass") else 1


def _audit(folder: Path, report: Report) -> Any:
    from draftproof.audit import audit
    from draftproof.cli.audit import rebuild

    report("audit: replaying every token", 0, 0)
    return audit(folder, progress=report, prompts=rebuild)


def _show(results: dict[str, Any], checked: Any | None, folder: Path) -> None:
    console = stdout()
    console.print(table(results))
    console.print(Text(summary(results)), soft_wrap=True)
    if checked is not None:
        for line in audit_lines(checked):
            console.print(Text(f"audit: {line}"), soft_wrap=True)
    if results["status"] == "interrupted":
        console.print(
            Text(f"interrupted: --resume --out {folder} with the same options goes on"), soft_wrap=True
        )
    if results["inputs"]:
        console.print(Text(f"report: {folder / 'report.html'}"), soft_wrap=True)
    stderr().print(Text(f"raw legs, traces and tokens: {folder}"), soft_wrap=True)


def table(results: dict[str, Any]) -> Table:
    """One line an input: ratios with their interval, tokens per verification, equality."""
    title = f"{results['model']} · {results['dtype']} · claim {results['claim']}"
    made = Table(title=Text(title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column("input", no_wrap=True)
    has_intervals = any((row["speedup"] or {}).get("interval") for row in results["inputs"])
    around = "95 %" if has_intervals else "range of pairs"
    for column in ("tokens", "own serial", results["arm"], around, "noise", "tok a verify", "tok a forward"):
        made.add_column(column, justify="right", no_wrap=column == around)
    made.add_column("equal stock's")
    for row in results["inputs"]:
        counters = row["decode_stats"] or {}
        made.add_row(
            Text(row["label"]), str(row["num_tokens"]), _times(row["serial_speedup"]),
            _times(row["speedup"]), _interval(row["speedup"]),
            f"{row['noise']:.0%}" if row["noise"] is not None else "-",
            _plain(counters.get("tokens_per_verify")), _plain(row["tokens_per_step"]),
            "yes" if row["first_difference"] is None else f"NO, from token {row['first_difference']}",
        )  # fmt: skip
    return made


def summary(results: dict[str, Any]) -> str:
    """The verdict, the split, the label, the memory and the proof."""
    if not results["inputs"]:
        return "nothing was measured"
    ruling = results["verdict"]
    lines = [f"verdict: {ruling['outcome']}: {reason}" for reason in ruling["reasons"]]
    lines += [f"note: {note}" for note in ruling["notes"]]
    if results["speedup"] is None:
        lines.append("no speed is shown for such a run; the raw legs are kept")
    else:
        lines += _speed_lines(results)
    lines.append(
        f"{results['num_checked_tokens']} tokens checked against stock,"
        f" {results['num_mismatched_tokens']} mismatched"
    )
    return "\n".join(lines)


def _speed_lines(results: dict[str, Any]) -> list[str]:
    diverse = results["metrics"]["diverse"]
    lines = _quoted(results)
    serial, gain = results["serial_speedup"], results["speculation_speedup"]
    if serial and gain:
        lines.append(
            f"of it: leaner forward {serial['median']:.2f}x (own serial decoding against stock),"
            f" speculation {gain['median']:.2f}x (against own serial decoding)"
        )
    if diverse["data_dependent"]:
        lines.append(f"data-dependent: {diverse['why']}")
    if results["cost"] and results["cost"]["break_even"]:
        lines.append(results["cost"]["break_even"]["advice"])
    memory = results["peak_bytes"]
    lines.append(
        f"peak resident memory {memory['engine'] / 2**20:.0f} MiB, stock {memory['stock'] / 2**20:.0f} MiB"
        f" ({memory['engine'] / memory['stock']:.2f}x)"
    )
    return lines


def _quoted(results: dict[str, Any]) -> list[str]:
    """The number a run is quoted by and the spread beside it: an evaluation's is its main input's."""
    whole, diverse = results["speedup"], results["metrics"]["diverse"]
    pairs = f"pairs from {whole['low']:.2f}x to {whole['high']:.2f}x"
    if any(row["role"] == "main" for row in results["inputs"]):
        lines = [f"main input {whole['median']:.2f}x{_around(whole, 'pairs')}, {pairs}"]
        if diverse["median_speedup"] is not None:
            lines.append(
                f"diverse set: median {diverse['median_speedup']:.2f}x,"
                f" worst input {diverse['min_input']} {diverse['min_speedup']:.2f}x,"
                f" best {diverse['max_input']} {diverse['max_speedup']:.2f}x"
            )
        return lines
    if len(results["inputs"]) == 1:
        return [f"median speedup {whole['median']:.2f}x{_around(whole, 'pairs')}, {pairs}"]
    return [
        f"median speedup {whole['median']:.2f}x{_around(whole, 'inputs')},"
        f" worst input {results['worst_input']} {whole['low']:.2f}x,"
        f" best {results['best_input']} {whole['high']:.2f}x"
    ]


def _around(ratio: dict[str, Any], over: str) -> str:
    if not ratio["interval"]:
        return ""
    return f" (95 % interval {ratio['interval'][0]:.2f}-{ratio['interval'][1]:.2f} over {over})"


def _interval(ratio: dict[str, Any] | None) -> str:
    """The interval, or with few pairs, which have none, their range."""
    if ratio is None:
        return ""
    low, high = ratio["interval"] or (ratio["low"], ratio["high"])
    return f"{low:.2f}-{high:.2f}"


def _times(ratio: dict[str, Any] | None) -> str:
    return "-" if ratio is None else f"{ratio['median']:.2f}x"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
