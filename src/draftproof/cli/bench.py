"""``draftproof bench``: progress while it runs, a table and the run folder's path at the end."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from draftproof.cli.generate import parse_depth
from draftproof.cli.terminal import progress_line, quiet_transformers, stderr, stdout


def run(settings: dict[str, Any], out: Path | None, *, json_output: bool) -> int:
    """0 when every token of every leg equals stock's, 1 otherwise, 130 when interrupted."""
    from draftproof.bench.run import BenchSettings, run_bench

    settings["depth"] = parse_depth(settings["depth"])
    folder = out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    quiet_transformers()
    with progress_line() as report:
        results = run_bench(BenchSettings(**settings), folder, report)
    if json_output:
        sys.stdout.write(json.dumps(results) + "\n")
    else:
        stdout().print(table(results))
        stdout().print(Text(summary(results)), soft_wrap=True)
    stderr().print(Text(f"raw legs, traces and tokens: {folder}"), soft_wrap=True)
    if results["status"] == "interrupted":
        return 130
    return 0 if results["num_mismatched_tokens"] == 0 else 1


def table(results: dict[str, Any]) -> Table:
    """One line an input: both ratios, tokens per verification, equality."""
    made = Table(title=Text(f"{results['model']} · {results['dtype']} · claim {results['claim']}"))
    made.add_column("input")
    for column in ("tokens", "own serial", results["arm"], "range", "tok/verify", "tok/forward"):
        made.add_column(column, justify="right")
    made.add_column("tokens equal stock's")
    for row in results["inputs"]:
        serial, speed = row["serial_speedup"], row["speedup"]
        made.add_row(
            Text(row["label"]), str(row["num_tokens"]), _times(serial), _times(speed),
            f"{speed['low']:.2f}-{speed['high']:.2f}" if speed else "",
            _plain(row["tokens_per_verify"]), _plain(row["tokens_per_step"]),
            "yes" if row["first_difference"] is None else f"NO, from token {row['first_difference']}",
        )  # fmt: skip
    return made


def summary(results: dict[str, Any]) -> str:
    """Three sentences: the median and the worst, the split, the memory and the proof."""
    checked, wrong = results["num_checked_tokens"], results["num_mismatched_tokens"]
    proof = f"{checked} tokens checked against stock, {wrong} mismatched"
    if not results["inputs"]:
        return "nothing was measured"
    if results["speedup"] is None:
        return f"{proof}: the speed of an output that differs is withheld."
    whole, serial, gain = results["speedup"], results["serial_speedup"], results["speculation_speedup"]
    interval = whole["interval"]
    around = f" (95 % interval {interval[0]:.2f}-{interval[1]:.2f} over inputs)" if interval else ""
    memory = results["peak_bytes"]
    return (
        f"median speedup {whole['median']:.2f}x{around}, worst input {results['worst_input']}"
        f" {whole['low']:.2f}x, best {whole['high']:.2f}x\n"
        f"of it: leaner forward {serial['median']:.2f}x (own serial decoding against stock),"
        f" speculation {gain['median']:.2f}x (against own serial decoding)\n"
        f"peak resident memory {memory['engine'] / 2**20:.0f} MiB, stock {memory['stock'] / 2**20:.0f} MiB"
        f" ({memory['engine'] / memory['stock']:.2f}x)\n"
        f"{proof}"
    )


def _times(ratio: dict[str, Any] | None) -> str:
    return "withheld" if ratio is None else f"{ratio['median']:.2f}x"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
