"""Why the prompt matters: prompt lookup on a repeated paragraph, on the main prompt and on the diverse set.

    python benchmarks/prompts.py [--pairs 6] [--new-tokens 128] [--prompt-len 512] [--out runs/prompts]

One ``bench`` of one drafter over fourteen inputs, interleaved pairs as always: a paragraph of the packaged
news text repeated until it fills the prompt, with the request to repeat it once more; the main prompt of
``evaluate``, which does not repeat itself; and the twelve packaged kinds of text. Prints one Markdown row for
each of the three. The run folder is kept, so that every figure can be audited.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftproof.bench.prompts import diverse_inputs
from draftproof.bench.run import BenchSettings, run_bench
from draftproof.bench.workloads.llm import evaluation_texts
from draftproof.errors import DraftproofError

REPEATED, MAIN = "repeated", "main"
_TIMES = 40
_WANTED = "Repeat the paragraph above once more, word for word."


def suite() -> list[dict[str, str]]:
    """All fourteen inputs, as lines of a suite file."""
    diverse = diverse_inputs()
    paragraph = next(item for item in diverse if item.label == "news").context.split("\n\n")[0]
    main, _, request = evaluation_texts()[MAIN].rpartition("\n\n")
    rows = [
        {"label": REPEATED, "context": "\n\n".join([paragraph] * _TIMES), "request": _WANTED},
        {"label": MAIN, "context": main, "request": request},
    ]
    return rows + [{"label": i.label, "context": i.context, "request": i.request} for i in diverse]


def row(name: str, items: Iterable[dict[str, Any]]) -> str:
    """One row of the table: medians over inputs, and the widest reach of their 95 % intervals."""
    shown = [item for item in items if item["speedup"] is not None]
    if not shown:
        return f"| {name} | withheld | | | |"
    ratios = [item["speedup"]["median"] for item in shown]
    stats = [item["decode_stats"] for item in shown]
    steps = statistics.median(s["tokens_per_step"] for s in stats)
    accepted = statistics.median(s["acceptance_rate"] or 0.0 for s in stats)
    spread = [b for item in shown for b in item["speedup"]["interval"] or (item["speedup"]["median"],)]
    return (
        f"| {name} | {statistics.median(ratios):.2f}x | {min(spread):.2f}-{max(spread):.2f} | {accepted:.0%}"
        f" | {steps:.2f} |"
    )


def main() -> int:
    """Run the bench and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--drafter", default="lookup")
    parser.add_argument("--depth", default="auto")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("runs") / time.strftime("prompts-%Y%m%d-%H%M%S"))
    options = parser.parse_args()
    file = options.out.with_suffix(".jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in suite()), encoding="utf-8")
    depth = int(options.depth) if options.depth.isdigit() else options.depth

    def report(stage: str, done: int, total: int) -> None:
        sys.stderr.write(f"{stage} {done}/{total}\n")

    try:
        settings = BenchSettings(
            model=options.model, dtype=options.dtype, drafter=options.drafter, depth=depth, suite=str(file),
            pairs=options.pairs, max_new_tokens=options.new_tokens, prompt_len=options.prompt_len,
        )  # fmt: skip
        results = run_bench(settings, options.out, report)
    except DraftproofError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    by_label = {item["label"]: item for item in results["inputs"]}
    sys.stdout.write(f"{json.dumps(results['verdict'])}\nflags: {results['flags']}\n")
    sys.stdout.write(
        "| prompt | against stock | 95 %, widest | accepted | tokens a forward |\n|---|---|---|---|---|\n"
    )
    for name, items in (
        ("a repeated paragraph", [by_label.pop(REPEATED)]), ("the main prompt", [by_label.pop(MAIN)]),
        ("the diverse set", list(by_label.values())),
    ):  # fmt: skip
        sys.stdout.write(row(name, items) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
