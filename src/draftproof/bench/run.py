"""The bench: stock in its own process, the engine in another, interleaved pairs, every token compared.

Writes the run folder as it goes (after every input), so an interrupted run keeps what it measured:
``run.json``, ``legs.jsonl``, ``trace.jsonl`` (hash-chained), ``tokens.jsonl``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftproof import engine as engines
from draftproof import stats
from draftproof.bench.pair import Arm, Stopwatch, TimedDecode, Worker
from draftproof.bench.prompts import BenchInput, build_prompt, diverse_inputs, read_suite
from draftproof.clock import RealClock
from draftproof.errors import OptionError, UsageError
from draftproof.models.load import load_tokenizer, resolve
from draftproof.record import Leg, Trace
from draftproof.wire import FORMAT_VERSION, canonical, chain, decode, encode, write_atomic, write_lines

Report = Callable[[str, int, int], None]
STOCK, SERIAL = "stock", "serial"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """Everything that decides what a bench measures; written to ``run.json`` as it was used."""

    model: str
    drafter: str = "auto"
    depth: int | str = "auto"
    suite: str = "diverse"
    labels: tuple[str, ...] = ()
    pairs: int = 3
    max_new_tokens: int = 256
    prompt_len: int = 512
    dtype: str = "bfloat16"
    device: str = "cpu"
    claim: str = "auto"
    threads: int | None = None
    draft_model: str | None = None
    exit_layer: int | None = None

    def __post_init__(self) -> None:
        if self.pairs < 1:
            raise OptionError(f"pairs must be 1 or more, got {self.pairs}")
        if self.max_new_tokens < 1:
            raise OptionError(f"max_new_tokens must be 1 or more, got {self.max_new_tokens}")
        if self.drafter == "none":
            raise OptionError("drafter 'none' is the own serial arm, which every bench times anyway")


@dataclass(slots=True, kw_only=True)
class _Run:
    """What a bench has gathered so far."""

    settings: BenchSettings
    folder: Path
    model: Path
    started: str
    decodes: list[tuple[str, TimedDecode]] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    curve: dict[str, Any] = field(default_factory=dict)
    status: str = "running"

    @property
    def legs(self) -> list[Leg]:
        return [timed.leg for _, timed in self.decodes]


def run_bench(settings: BenchSettings, folder: Path, report: Report) -> dict[str, Any]:
    """Measure and write the run folder; returns the results as they stand in ``run.json``.

    Raises:
        UsageError: bad settings, an unusable model, or a suite that cannot be read.
    """
    report("fetching and converting the model", 0, 0)
    model = resolve(settings.model, settings.dtype)
    prompts = _prompts(settings, load_tokenizer(model))
    run = _Run(settings=settings, folder=folder, model=model, started=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    load: dict[str, Any] = {"dtype": settings.dtype, "device": settings.device, "claim": settings.claim}
    engine = engines.load(str(model), **load, threads=settings.threads, progress=report)
    run.plan, run.curve = encode(engine.plan), encode(engine.curve)
    del engine
    base = {
        "folder": str(model), **load, "threads": settings.threads, "draft_model": settings.draft_model,
        "exit_layer": settings.exit_layer,
    }  # fmt: skip
    report("starting the stock process and the engine process", 0, 0)
    with Worker({**base, "kind": "stock"}) as stock, Worker({**base, "kind": "engine"}) as own:
        run.machine = own.machine
        arms = (
            Arm(name=STOCK, worker=stock),
            Arm(name=SERIAL, worker=own, drafter="none", depth="auto"),
            Arm(name=settings.drafter, worker=own, drafter=settings.drafter, depth=settings.depth),
        )
        try:
            _measure(run, prompts, arms, report)
            run.status = "complete"
        except KeyboardInterrupt:
            run.status = "interrupted"
        except UsageError as error:
            run.status = f"failed: {error}"
            _write(run)
            raise
    return _write(run)


def _prompts(settings: BenchSettings, tokenizer: Any) -> dict[str, list[int]]:
    """Prompt ids by label, in the suite's order."""
    items: Sequence[BenchInput] = (
        diverse_inputs() if settings.suite == "diverse" else read_suite(Path(settings.suite))
    )
    known = [item.label for item in items]
    unknown = [label for label in settings.labels if label not in known]
    if unknown:
        raise OptionError(f"no input {unknown[0]!r} in this suite; known: {', '.join(known)}")
    chosen = [item for item in items if not settings.labels or item.label in settings.labels]
    chat = bool(getattr(tokenizer, "chat_template", None))
    return {item.label: build_prompt(item, tokenizer, settings.prompt_len, chat=chat) for item in chosen}


def _measure(run: _Run, prompts: dict[str, list[int]], arms: Sequence[Arm], report: Report) -> None:
    """Warm every arm up on another text, then all pairs of every input."""
    watch = Stopwatch(clock=RealClock())
    max_new, pairs = run.settings.max_new_tokens, run.settings.pairs
    total = len(prompts) * pairs
    report("warming up", 0, total)
    warm = next(iter(prompts.values()))[::-1]
    for arm in arms:
        watch.time(arm, "warm-up", 0, warm, 8)
    watch.num_legs = 0
    for index, (label, prompt_ids) in enumerate(prompts.items()):
        for pair in range(pairs):
            report(f"{label}, pair {pair + 1} of {pairs}", index * pairs + pair, total)
            for timed in watch.pair(arms, label, pair, prompt_ids, max_new):
                run.decodes.append((label, timed))
        _write(run)


def _write(run: _Run) -> dict[str, Any]:
    """The run folder as it stands; results are recomputed from the raw rows."""
    results = _results(run)
    write_lines(run.folder / "legs.jsonl", [encode(leg) for leg in run.legs])
    rows = [
        {"label": label, "arm": timed.leg.arm, "pair": timed.leg.pair, **round_}
        for label, timed in run.decodes
        if timed.trace is not None
        for round_ in timed.trace["rounds"]
    ]
    write_lines(run.folder / "trace.jsonl", chain(rows))
    tokens = [
        {"label": label, "arm": t.leg.arm, "pair": t.leg.pair, "token_ids": list(t.token_ids)}
        for label, t in run.decodes
    ]
    write_lines(run.folder / "tokens.jsonl", tokens)
    document = {
        "format_version": FORMAT_VERSION, "kind": "bench", "started": run.started, "argv": sys.argv[1:],
        "request": asdict(run.settings), "model_folder": str(run.model), "machine": run.machine,
        "plan": run.plan, "cost_curve": run.curve, "results": results,
    }  # fmt: skip
    write_atomic(run.folder / "run.json", canonical(document) + "\n")
    return results


def _results(run: _Run) -> dict[str, Any]:
    """Figures over all inputs; speeds are withheld as soon as one token differs."""
    labels = list(dict.fromkeys(label for label, _ in run.decodes))
    rows = [_input_row(run, label) for label in labels]
    wrong = sum(row["num_mismatched_tokens"] for row in rows)
    arm = run.settings.drafter
    shown: dict[str, Any] = dict.fromkeys(("speedup", "serial_speedup", "speculation_speedup", "worst_input"))
    if rows and wrong == 0:
        whole = {row["label"]: row["speedup"]["median"] for row in rows}
        shown = {
            "speedup": asdict(stats.summarise(list(whole.values()))),
            "serial_speedup": asdict(stats.summarise([r["serial_speedup"]["median"] for r in rows])),
            "speculation_speedup": asdict(
                stats.summarise([r["speculation_speedup"]["median"] for r in rows])
            ),
            "worst_input": min(whole, key=whole.__getitem__),
        }
    peaks = {
        "stock": max((leg.peak_bytes for leg in run.legs if leg.arm == STOCK), default=0),
        "engine": max((leg.peak_bytes for leg in run.legs if leg.arm != STOCK), default=0),
    }
    return {
        "model": run.settings.model, "dtype": run.settings.dtype, "arm": arm, "claim": run.plan["claim"],
        "status": run.status, "inputs": rows, "peak_bytes": peaks,
        "num_checked_tokens": sum(row["num_checked_tokens"] for row in rows),
        "num_mismatched_tokens": wrong, **shown,
    }  # fmt: skip


def _input_row(run: _Run, label: str) -> dict[str, Any]:
    """One input's ratios, counters and token comparison (every leg against the first stock leg)."""
    arm = run.settings.drafter
    mine = [timed for found, timed in run.decodes if found == label]
    want = next((t.token_ids for t in mine if t.leg.arm == STOCK), ())
    others = [t.token_ids for t in mine]
    wrong = sum(stats.count_mismatches(want, ids) for ids in others)
    differences = [d for ids in others if (d := stats.first_difference(want, ids)) is not None]
    traces = [decode(Trace, t.trace) for t in mine if t.leg.arm == arm and t.trace is not None]
    counters = stats.decode_stats(traces[0]) if traces else None
    row: dict[str, Any] = {
        "label": label, "num_tokens": len(want), "num_mismatched_tokens": wrong,
        "num_checked_tokens": sum(len(t.token_ids) for t in mine if t.leg.arm != STOCK),
        "first_difference": min(differences, default=None),
        "tokens_per_verify": counters.tokens_per_verify if counters else None,
        "tokens_per_step": counters.tokens_per_step if counters else None,
        "decode_stats": asdict(counters) if counters else None,
    }  # fmt: skip
    ratios = {
        "speedup": stats.paired_ratios(run.legs, label, arm),
        "serial_speedup": stats.paired_ratios(run.legs, label, SERIAL),
        "speculation_speedup": stats.paired_ratios(run.legs, label, arm, base=SERIAL),
    }
    is_shown = wrong == 0 and all(ratios.values())
    return row | {k: asdict(stats.summarise(v)) if is_shown else None for k, v in ratios.items()}
