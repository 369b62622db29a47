"""What the charts of speed and memory draw, each with the same figures as a table.

A chart is published figures arranged for ``page.js``, which draws them; nothing is computed here. Where
there is nothing to draw, ``data`` is ``None`` and ``missing`` says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftproof.report.words import MISSING, count, median, mib, percent, plain, span, times

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Cells as they read; the first column names the row, the others are figures."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One entry of a legend; ``mark`` is the class of its swatch."""

    mark: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One figure: ``alt`` says in a sentence what it shows, ``hint`` how to read it."""

    name: str
    title: str
    hint: str
    alt: str = ""
    data: Mapping[str, Any] | None = None
    keys: tuple[Key, ...] = ()
    table: Table | None = None
    missing: str = MISSING


def speedups(results: Mapping[str, Any]) -> Chart:
    """Every input's speedup with its interval, best first; the leaner forward alone beside it."""
    rows = _by_speed(results["inputs"])
    withheld = [row["label"] for row in results["inputs"] if row["speedup"] is None]
    has_intervals = any(row["speedup"]["interval"] for row in rows)
    around = "95 % interval over pairs" if has_intervals else "range of pairs (an interval takes five)"
    hint = f"Each input's median ratio and its {around}. Right of the line at 1 is faster."
    if rows and withheld:
        hint += f" Not drawn, because withheld: {', '.join(withheld)}."
    table = _inputs_table(results["inputs"])
    if not rows:
        return Chart(name="speedups", title="Speed by input", hint="", table=table,
                     missing="The speed is withheld; see the verdict.")  # fmt: skip
    whole = results["speedup"]
    data = {
        "rows": [
            {"label": row["label"], "whole": _point(row["speedup"]), "serial": _point(row["serial_speedup"])}
            for row in rows
        ],
        "quoted": {"name": _quoted(results), "value": whole["median"]} if whole else None,
        "worst": results["worst_input"],
    }  # fmt: skip
    has_serial = any(row["serial_speedup"] for row in rows)
    return Chart(
        name="speedups", title="Speed by input", hint=hint, data=data, table=table,
        alt=f"Speedup of {len(rows)} inputs, from {median(rows[-1]['speedup'])} ({rows[-1]['label']})"
        f" to {median(rows[0]['speedup'])} ({rows[0]['label']}).",
        keys=(Key(mark="dot whole", text="against stock"),
              *([Key(mark="dot serial", text="leaner forward alone")] if has_serial else [])),
    )  # fmt: skip


def _quoted(results: Mapping[str, Any]) -> str:
    """What the run's own figure is of: an evaluation is quoted by its main input."""
    return "main input" if any(row["role"] == "main" for row in results["inputs"]) else "median"


def _by_speed(rows: Rows) -> list[Mapping[str, Any]]:
    return sorted((row for row in rows if row["speedup"]), key=lambda row: -row["speedup"]["median"])


def _point(ratio: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a dot needs: its place, and its interval, or the range of its pairs where no interval exists."""
    if ratio is None:
        return None
    extremes = [ratio["low"], ratio["high"]] if ratio["num_pairs"] > 1 else None
    return {
        "median": ratio["median"], "around": ratio["interval"] or extremes,
        "kind": "95 %" if ratio["interval"] else "range", "pairs": ratio["num_pairs"],
    }  # fmt: skip


def _inputs_table(rows: Rows) -> Table:
    return Table(
        columns=("input", "role", "prompt", "tokens", "mismatched", "against stock", "95 %", "leaner forward",
                 "speculation", "noise", "tokens / forward", "accepted", "counters agree"),
        rows=tuple(_input_cells(row) for row in rows),
    )  # fmt: skip


def _input_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    speed, counters, agree = row["speedup"], row["decode_stats"] or {}, row["reconciled"]
    first = row["first_difference"]
    wrong = count(row["num_mismatched_tokens"]) + ("" if first is None else f" (first at {first})")
    return (
        row["label"], row["role"], count(row["num_prompt"]), count(row["num_tokens"]), wrong,
        times(speed["median"]) if speed else "withheld", span(speed["interval"]) or "none" if speed else "",
        median(row["serial_speedup"]), median(row["speculation_speedup"]), percent(row["noise"]),
        plain(counters.get("tokens_per_step")), percent(counters.get("acceptance_rate")),
        MISSING if agree is None else "yes" if agree else "NO",
    )  # fmt: skip


def split(results: Mapping[str, Any]) -> Chart:
    """The gain as two factors on a logarithmic axis: their lengths add up."""
    serial, gain, whole = (results[f"{name}speedup"] for name in ("serial_", "speculation_", ""))
    title = "Where the gain comes from"
    if serial is None or gain is None or whole is None:
        why = "The speed is withheld; see the verdict." if whole is None else (
            "This run has no serial arm of the same engine, so the gain cannot be split.")  # fmt: skip
        return Chart(name="split", title=title, hint="", missing=why)
    named = (("leaner forward", serial), ("speculation", gain), ("together", whole))
    return Chart(
        name="split", title=title,
        hint="Factors on a logarithmic axis: the first two bars, end to end, make the third. Medians over"
        " inputs of each ratio, so the product may miss the whole by a little.",
        alt=f"Leaner forward {median(serial)}, speculation {median(gain)}, together {median(whole)}.",
        data={"serial": serial["median"], "speculation": gain["median"], "whole": whole["median"]},
        table=Table(
            columns=("factor", "median", "95 %", "lowest", "highest"),
            rows=tuple(
                (name, times(r["median"]), span(r["interval"]) or "none", times(r["low"]), times(r["high"]))
                for name, r in named
            ),
        ),
    )  # fmt: skip


def repeats(results: Mapping[str, Any]) -> Chart:
    """Each input's speedup when its prompt was new, and when it had been seen."""
    title = "New prompts against repeats"
    rows = [row for row in results["inputs"] if row["first_seen_speedup"] or row["repeat_speedup"]]
    if not rows:
        return Chart(name="repeats", title=title, hint="")
    first, again = median(results["first_seen_speedup"]), median(results["repeat_speedup"])
    return Chart(
        name="repeats", title=title,
        hint="A store that remembers prompts would be faster on repeats. The two marks should lie close"
        " together.",
        alt=f"Median speedup on prompts seen for the first time {first}, on repeats {again}.",
        data={
            "rows": [
                {"label": row["label"], "first": _point(row["first_seen_speedup"]),
                 "repeat": _point(row["repeat_speedup"])}
                for row in rows
            ]
        },
        keys=(Key(mark="dot first", text=f"first seen, median {first}"),
              Key(mark="dot repeat", text=f"repeats, median {again}")),
        table=Table(
            columns=("input", "first seen", "repeats"),
            rows=tuple(
                (row["label"], median(row["first_seen_speedup"]), median(row["repeat_speedup"]))
                for row in rows
            ),
        ),
    )  # fmt: skip


def memory(results: Mapping[str, Any]) -> Chart:
    """Peak memory of both sides, resident and on CUDA, with what the drafter adds."""
    kinds = [("resident", results["peak_bytes"]), ("CUDA", results["peak_cuda_bytes"])]
    peaks = [(kind, sizes) for kind, sizes in kinds if sizes is not None]
    bars = [
        {"kind": kind, "arm": arm, "bytes": sizes[arm]}
        for kind, sizes in peaks
        for arm in ("stock", "engine")
        if sizes[arm] is not None
    ]  # fmt: skip
    if not bars:
        return Chart(name="memory", title="Peak memory", hint="")
    added = "; ".join(f"{kind} {_signed(sizes['drafter'])}" for kind, sizes in peaks)
    return Chart(
        name="memory", title="Peak memory",
        hint=f"Of each arm's own process. The drafter's part (judged arm less the engine without drafts):"
        f" {added}.",
        alt="; ".join(f"{bar['kind']}, {bar['arm']}: {mib(bar['bytes'])}" for bar in bars) + ".",
        data={"bars": bars},
        table=Table(
            columns=("memory", "stock", "engine", "drafter's part"),
            rows=tuple(
                (kind, mib(sizes["stock"]), mib(sizes["engine"]), _signed(sizes["drafter"]))
                for kind, sizes in peaks
            ),
        ),
    )  # fmt: skip


def _signed(size: int | None) -> str:
    if size is None:
        return MISSING
    return ("−" if size < 0 else "+") + mib(abs(size))
