"""What the charts of acceptance and cost draw; like ``charts``, published figures only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftproof.record import CostCurve
from draftproof.report.charts import Chart, Key, Table
from draftproof.report.words import MISSING, count, percent, plain, signed, times

_NO_TRACE = "The judged arm left no trace of rounds."


def positions(acceptance: Mapping[str, Any] | None) -> Chart:
    """Acceptance by place in the draft, conditional and joint."""
    title, rows = "Acceptance by draft position", (acceptance or {}).get("positions")
    if not rows:
        return Chart(name="positions", title=title, hint="", missing=_NO_TRACE)
    first, last = rows[0], rows[-1]
    return Chart(
        name="positions", title=title,
        hint="Conditional: of the drafts that got this far, how many were accepted here. Joint: of the"
        " rounds that drafted this deep, how many were accepted up to and including here.",
        alt=f"Joint acceptance is {percent(first['joint'])} at position {first['position']}"
        f" and {percent(last['joint'])} at position {last['position']}.",
        data={"rows": rows},
        keys=(Key(mark="line conditional", text="conditional"), Key(mark="line joint", text="joint")),
        table=Table(
            columns=("position", "conditional", "joint", "tries", "drafted rounds"),
            rows=tuple(
                (str(row["position"]), percent(row["conditional"]), percent(row["joint"]),
                 count(row["num_trials"]), count(row["num_rounds"]))
                for row in rows
            ),
        ),
    )  # fmt: skip


def offsets(acceptance: Mapping[str, Any] | None) -> Chart:
    """Tokens per forward by distance from the start of the output."""
    title, rows = "Tokens per forward along the output", (acceptance or {}).get("offsets")
    if not rows:
        return Chart(name="offsets", title=title, hint="", missing=_NO_TRACE)
    return Chart(
        name="offsets", title=title,
        hint="Serial decoding emits one token a forward (the line at 1). A rise to the right means the"
        " drafter learns from the output.",
        alt=f"From {plain(rows[0]['tokens_per_forward'])} tokens a forward at the start"
        f" to {plain(rows[-1]['tokens_per_forward'])} at the end.",
        data={"rows": rows},
        table=Table(
            columns=("output tokens", "tokens / forward", "rounds"),
            rows=tuple(
                (f"{row['start']}–{row['end'] - 1}", plain(row["tokens_per_forward"]),
                 count(row["num_rounds"]))
                for row in rows
            ),
        ),
    )  # fmt: skip


def lengths(acceptance: Mapping[str, Any] | None) -> Table | None:
    """Acceptance length, with and without the bonus token, pooled and per prompt."""
    found = (acceptance or {}).get("acceptance_length")
    if not found:
        return None
    named = (("with bonus", found["with_bonus"]), ("without bonus", found["without_bonus"]))
    return Table(
        columns=("acceptance length", "token-weighted", "per prompt"),
        rows=tuple((name, plain(row["token_weighted"]), plain(row["per_prompt"])) for name, row in named),
    )


def drafters(acceptance: Mapping[str, Any] | None) -> Table | None:
    """What each drafter of a cascade contributed."""
    found = (acceptance or {}).get("sources")
    if not found:
        return None
    return Table(
        columns=("drafter", "rounds", "drafted", "accepted", "share accepted"),
        rows=tuple(
            (name, count(row["rounds"]), count(row["drafted"]), count(row["accepted"]),
             percent(row["acceptance_rate"]))
            for name, row in found.items()
        ),
    )  # fmt: skip


def curve(measured: CostCurve | None, acceptance: Mapping[str, Any] | None) -> Chart:
    """Milliseconds of a verification by rows, with the depths that were chosen on the same axis."""
    title = "Cost of a verification, and the depths chosen"
    if measured is None:
        return Chart(name="curve", title=title, hint="", missing="No cost curve was measured.")
    depths = {int(depth): number for depth, number in ((acceptance or {}).get("depths") or {}).items()}
    points = [
        {"context": context, "rows": rows, "ms": seconds * 1e3}
        for context, line in zip(measured.contexts, measured.seconds, strict=True)
        for rows, seconds in zip(measured.rows, line, strict=True)
    ]
    chosen = [{"rows": depth + 1, "depth": depth, "rounds": depths[depth]} for depth in sorted(depths)]
    return Chart(
        name="curve", title=title,
        hint="One line per number of cached positions. Below, how many rounds chose each depth; a round of"
        " depth d verifies d + 1 rows.",
        alt=f"From {points[0]['ms']:.1f} ms at one row to {points[-1]['ms']:.1f} ms at {points[-1]['rows']}"
        f" rows and {points[-1]['context']} cached positions.",
        data={"points": points, "depths": chosen}, table=_curve_table(measured, depths),
    )  # fmt: skip


def _curve_table(measured: CostCurve, depths: Mapping[int, int]) -> Table:
    lines = tuple(
        (f"{context} positions, ms", *(f"{seconds * 1e3:.1f}" for seconds in line))
        for context, line in zip(measured.contexts, measured.seconds, strict=True)
    )
    rounds = ("rounds that chose it", *(count(depths.get(rows - 1, 0)) for rows in measured.rows))
    return Table(
        columns=("rows", *map(str, measured.rows)), rows=(*lines, *([rounds] if depths else []))
    )  # fmt: skip


def predicted(cost: Mapping[str, Any] | None) -> Chart:
    """Each input's speedup from curve and acceptance, beside what the clock said."""
    title = "Predicted against measured"
    rows = [row for row in (cost or {}).get("inputs", ()) if row["predicted"] is not None]
    if cost is None or not rows:
        return Chart(
            name="predicted", title=title, hint="", missing="No cost curve, or no trace to apply it to."
        )
    return Chart(
        name="predicted", title=title,
        hint="Speculation's gain over the engine's own serial decoding. The line between the marks is the"
        " residual, which the table takes apart.",
        alt=f"Median over inputs: predicted {times(cost['predicted'])}, measured {times(cost['measured'])}.",
        data={"rows": [{k: row[k] for k in ("label", "predicted", "measured")} for row in rows]},
        keys=(Key(mark="dot predicted", text=f"predicted, median {times(cost['predicted'])}"),
              Key(mark="dot measured", text=f"measured, median {times(cost['measured'])}")),
        table=_residual_table(cost, rows),
    )  # fmt: skip


def _residual_table(cost: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> Table:
    names = list(dict.fromkeys(name for row in rows for name in row["parts"] or ()))
    return Table(
        columns=("input", "predicted", "measured", "residual", *(f"of it {name}" for name in names)),
        rows=tuple(
            (name, times(row["predicted"]), times(row["measured"]), signed(row["residual"]),
             *(signed((row["parts"] or {}).get(part)) for part in names))
            for name, row in [*((row["label"], row) for row in rows), ("all inputs", cost)]
        ),
    )  # fmt: skip


def break_even(cost: Mapping[str, Any] | None) -> Table | None:
    """Tokens a verification must emit to pay, by depth, beside what it emits."""
    found = (cost or {}).get("break_even")
    if not found:
        return None
    return Table(
        columns=("depth", "must emit", "with drafting", "emits", "rounds offered", "pays"),
        rows=tuple(
            (str(row["depth"]), plain(row["needed"]), plain(row["needed_with_drafting"]),
             plain(row["acceptance_length"]) if row["num_rounds"] else "never offered",
             count(row["num_rounds"]), "yes" if row["depth"] in found["paying_depths"] else "")
            for row in found["depths"]
        ),
    )  # fmt: skip


def advice(cost: Mapping[str, Any] | None) -> list[str]:
    """What to do about the depth, and the regret of the policy, as sentences."""
    if not cost:
        return []
    found, regret = cost["break_even"], cost["regret"]
    told = [found["advice"]] if found else []
    if regret is None:
        return [*told, f"Regret of the depth policy: {MISSING}, as the trace does not hold what was offered."]
    best = regret["best_fixed"]["depth"]
    lost, ceiling = regret["regret_fixed"], regret["regret_oracle"]
    against = f"{percent(lost, 1)} slower than" if lost > 0 else f"{percent(-lost, 1)} faster than"
    return [
        *told,
        f"On the same rounds the depth policy was {against} the best fixed depth ({best}), and"
        f" {percent(ceiling, 1)} under the best choice of every single round, which only hindsight knows.",
    ]
