"""``draftproof head select``: every candidate in one table, the best first, and what was refused and why."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from draftproof.cli.head import provenance_of
from draftproof.cli.terminal import progress_line, quiet_transformers, stdout

_INTERRUPTED = 130


def run(settings: dict[str, Any], out: Path, *, json_output: bool) -> int:
    """0 with a winner, 1 where every candidate was refused, 130 when interrupted."""
    from draftproof.heads.select import SelectSettings, select_head

    quiet_transformers()
    wanted = SelectSettings(**settings)
    with progress_line() as report:
        summary = select_head(wanted, out, report, provenance=provenance_of(settings, report))
    if json_output:
        sys.stdout.write(json.dumps(summary) + "\n")
    else:
        if summary["candidates"]:
            stdout().print(table(summary))
        stdout().print(Text("\n".join(lines(summary))), soft_wrap=True)
    if summary["status"] == "interrupted":
        return _INTERRUPTED
    return 0 if summary["winner"] is not None else 1


def table(summary: dict[str, Any]) -> Table:
    """A line a candidate."""
    title = (
        f"{summary['model']} · depth {summary['depth']} · {summary['num_decoded']} held-out prompts, median"
        " length with bonus and speed against own serial decoding, 95 %"
    )
    made = Table(title=Text(title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column("candidate", overflow="fold")
    for name in ("length", "first draft", "speed", "against fastest", "worst kind", ""):
        made.add_column(name, justify="right")
    refused = {one["name"] for one in summary["refused"]}
    for one in summary["candidates"]:
        kind, length = one["worst_kind"]
        verdict = "chosen" if one["name"] == summary["winner"] else ""
        verdict = verdict or ("refused" if one["name"] in refused else "slower" * one["is_slower"])
        made.add_row(
            one["name"], _figure(one["acceptance_length"]), f"{one['first_acceptance']:.1%}",
            _figure(one["speedup"], "x"), _figure(one["against_fastest"], "x"), f"{length:.2f} {kind}",
            verdict,
        )  # fmt: skip
    return made


def _figure(figure: dict[str, Any], unit: str = "") -> str:
    reach = figure["interval"]
    spread = "" if reach is None else f" ({reach[0]:.2f}-{reach[1]:.2f})"
    return f"{figure['value']:.2f}{unit}{spread}"


def lines(summary: dict[str, Any]) -> list[str]:
    """Who was refused and why, who was chosen and by what rule, and where everything is."""
    found = [
        f"refused: {one['name']} left stock's text on held-out prompt {one['prompt']} at token"
        f" {one['from_token']}"
        for one in summary["refused"]
    ]
    if summary["winner"] is not None:
        found.append(
            f"chosen: {summary['winner']}, the longest acceptance of those not shown to be slower than the"
            f" fastest; every token of {summary['num_dev_prompts']} more prompts was stock's (claim"
            f" {summary['claim']})"
        )
        found.append(f"its copy: {Path(summary['out']) / 'head'}")
    elif summary["status"] == "interrupted":
        done = f"{summary['num_decoded']} of {summary['num_prompts']} prompts"
        found.append(f"interrupted after {done}: the same command goes on")
    else:
        found.append("no candidate decodes what stock decodes")
    return found
