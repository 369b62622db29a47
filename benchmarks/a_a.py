"""Stock against itself, again and again: how often the harness sees a gain or a label that is not there.

    python benchmarks/a_a.py [--repeats 20] [--labels news --labels code ...] [--pairs 6] [--new-tokens 24]

Every repetition is a whole ``bench --drafter stock``. Right is: no ``data_dependent`` label, and the interval
of the whole over inputs holds 1.0. A repetition the harness voids (too noisy, a drifted baseline) shows no
speed and no label; it is counted apart. Exit code 1 where more than one in twenty is wrong. Run folders are
kept under ``--out``, so that every figure can be audited.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from draftproof.bench.run import BenchSettings, run_bench

_MOST_WRONG, _FEWEST_INPUTS = 0.05, 5


def judged(results: dict[str, Any]) -> str:
    """What one repetition came to: right, void, or what was wrong."""
    if results["speedup"] is None:
        return f"void: {'; '.join(results['verdict']['reasons'])}"
    wrong = ["labelled data-dependent"] if "data_dependent" in results["flags"] else []
    low, high = results["speedup"]["interval"]  # there is one: as many inputs were asked for
    if not low <= 1.0 <= high:
        wrong.append(f"interval {low:.3f}-{high:.3f} without 1.0")
    return (
        "wrong: " + ", ".join(wrong)
        if wrong
        else f"right: {results['speedup']['median']:.3f} ({low:.3f}-{high:.3f})"
    )


def main() -> int:
    """Run all repetitions."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--labels", action="append")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("runs") / time.strftime("a-a-%Y%m%d-%H%M%S"))
    options = parser.parse_args()
    if options.labels is not None and len(options.labels) < _FEWEST_INPUTS:
        parser.error(f"an interval over inputs needs {_FEWEST_INPUTS} labels or more")
    settings = BenchSettings(
        model=options.model, dtype=options.dtype, drafter="stock", pairs=options.pairs, stop="fixed",
        labels=tuple(options.labels or ("news", "code", "table", "german", "question")),
        max_new_tokens=options.new_tokens, prompt_len=options.prompt_len,
    )  # fmt: skip
    found = []
    for number in range(options.repeats):
        results = run_bench(settings, options.out / f"{number:02d}", lambda *_: None)
        found.append(judged(results))
        sys.stdout.write(f"{number:2d} {found[-1]}\n")
        sys.stdout.flush()
    counts = {kind: sum(told.startswith(kind) for told in found) for kind in ("right", "wrong", "void")}
    sys.stdout.write(f"of {len(found)}: {counts}\n")
    return int(counts["wrong"] > _MOST_WRONG * len(found))


if __name__ == "__main__":
    sys.exit(main())
