"""``draftproof head train``: progress while it runs, then what every look found, as a table."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from draftproof.cli.head import provenance_of
from draftproof.cli.terminal import progress_line, quiet_transformers, stdout

_INTERRUPTED = 130
_PARTS = ("train", "held_out")


def run(settings: dict[str, Any], out: Path, *, json_output: bool) -> int:
    """0 when the training is complete, 130 when interrupted; of several processes the first one tells."""
    from draftproof.heads.train import train_head
    from draftproof.heads.train_settings import TrainSettings

    quiet_transformers()
    wanted = TrainSettings(**settings)
    with progress_line() as report:
        summary = train_head(wanted, out, report, provenance=provenance_of(settings, report))
    if os.environ.get("RANK", "0") == "0":
        if json_output:
            sys.stdout.write(json.dumps(summary) + "\n")
        else:
            stdout().print(table(summary))
            stdout().print(Text("\n".join(lines(summary))), soft_wrap=True)
    return _INTERRUPTED if summary["status"] == "interrupted" else 0


def table(summary: dict[str, Any]) -> Table:
    """A line a look: loss, acceptance length of both samples, and held-out acceptance by draft step."""
    title = f"{summary['model']} · {summary['start']} head, {summary['num_parameters']:,} parameters"
    made = Table(title=Text(title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    drafts = [f"held-out {step}" for step in range(1, summary["depth"] + 1)]
    for name in ("step", "tokens", "loss", "train length", "held-out length", *drafts):
        made.add_column(name, justify="right")
    for row in summary["history"]:
        loss = row["training_loss"]
        made.add_row(
            str(row["step"]), str(row["num_tokens"]), "" if loss is None else f"{loss:.3f}",
            *(f"{row[part]['acceptance_length']:.2f}" for part in _PARTS),
            *("" if rate is None else f"{rate:.1%}" for rate in row["held_out"]["acceptance"]),
        )  # fmt: skip
    return made


def lines(summary: dict[str, Any]) -> list[str]:
    """What was read, which checkpoint was best on held-out rows, whether it overfits, where all of it is."""
    rows, sampled = summary["num_rows"], summary["num_sample_rows"]
    found = [
        f"{rows['train']} train and {rows['held_out']} held-out answers; acceptance over {sampled['train']}"
        f" and {sampled['held_out']} of them, teacher forced, bonus included"
    ]
    by_step = {row["step"]: row["held_out"]["acceptance_length"] for row in summary["history"]}
    best = summary["best_step"]
    if best is not None:
        found.append(f"best held-out length {by_step[best]:.2f}: {Path(summary['out']) / f'step-{best:06d}'}")
        last = max(by_step)
        if best != last:
            found.append(f"held-out length fell from there to {by_step[last]:.2f} at step {last}")
    if summary["status"] == "interrupted":
        done = f"after step {summary['step']} of {summary['num_steps']}"
        found.append(f"interrupted {done}: the same command goes on")
    found.append(f"training: {summary['out']}, plotted in {Path(summary['out']) / 'training.html'}")
    return found
