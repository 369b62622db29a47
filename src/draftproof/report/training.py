"""The page of a head's training: loss and acceptance on train and held-out rows, step by step.

One HTML file that asks nothing of any network. It draws the rows of ``history.jsonl`` and computes nothing:
how such a row comes about is ``heads.train_watch``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftproof.report.assets import environment
from draftproof.report.charts import Chart, Key, Table
from draftproof.report.facts import named_values
from draftproof.report.words import MISSING, count, percent, plain

_PARTS = (("train", "train"), ("held_out", "held-out"))
_KEYS = (Key(mark="line joint", text="train"), Key(mark="line", text="held-out"))


def render_training(facts: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> str:
    """The page as one HTML document.

    Args:
        facts: of the head, named values.
        history: rows as ``heads.train_loop`` notes them, in the order of their steps.
    """
    drawn = (_length(history), _acceptance(history), _loss(history))
    page = environment().get_template("training.html.j2")
    html = page.render(
        title=f"A draft head for {facts['model']}", facts=facts, named=named_values(facts), charts=drawn,
        history=_history(history),
        data={chart.name: chart.data for chart in drawn if chart.data is not None},
    )  # fmt: skip
    return html.encode("utf-8", "replace").decode("utf-8")


def _length(history: Sequence[Mapping[str, Any]]) -> Chart:
    """Acceptance length of both samples."""
    last = history[-1] if history else None
    told = (
        ", ".join(f"{name} {plain(last[part]['acceptance_length'])}" for part, name in _PARTS) if last else ""
    )
    rows = [
        {"step": row["step"], "part": name, "value": row[part]["acceptance_length"]}
        for row in history
        for part, name in _PARTS
    ]
    return Chart(
        name="length", title="Tokens a verification, teacher forced",
        hint="Bonus included. Where the held-out line falls behind while the train line goes on rising, the"
        " head learns its rows by heart.",
        alt=f"Acceptance length by step; last: {told}.", keys=_KEYS,
        data={"rows": rows, "label": "tokens", "percent": False} if rows else None,
    )  # fmt: skip


def _acceptance(history: Sequence[Mapping[str, Any]]) -> Chart:
    """Conditional acceptance by draft step."""
    rows = [
        {"step": row["step"], "part": name, "draft": draft, "value": rate}
        for row in history
        for part, name in _PARTS
        for draft, rate in enumerate(row[part]["acceptance"], 1)
        if rate is not None
    ]
    return Chart(
        name="acceptance", title="Acceptance by draft step",
        hint="Share of drafts whose next token is the target’s, of those that were right so far. One panel a"
        " draft step.",
        alt="Acceptance of train and held-out rows by training step, one panel a draft step.",
        data={"rows": rows, "label": "accepted", "percent": True} if rows else None, keys=_KEYS,
    )  # fmt: skip


def _loss(history: Sequence[Mapping[str, Any]]) -> Chart:
    """Mean loss over draft steps."""
    rows = [
        {"step": row["step"], "part": name, "value": sum(row[part]["loss"]) / len(row[part]["loss"])}
        for row in history
        for part, name in _PARTS
    ]
    return Chart(
        name="loss", title="Loss",
        hint="Mean over draft steps and places of each sample, unweighted.",
        alt="Loss of train and held-out rows by training step.",
        data={"rows": rows, "label": "loss", "percent": False} if rows else None,
        keys=_KEYS,
    )  # fmt: skip


def _history(history: Sequence[Mapping[str, Any]]) -> Table:
    """Every row as figures."""
    depth = len(history[-1]["train"]["loss"]) if history else 0
    drafts = [f"{name} {draft}" for _, name in _PARTS for draft in range(1, depth + 1)]
    return Table(
        columns=("step", "tokens", "training loss", *(f"{name} length" for _, name in _PARTS), *drafts),
        rows=tuple(
            (
                count(row["step"]), count(row["num_tokens"]),
                MISSING if row["training_loss"] is None else plain(row["training_loss"]),
                *(plain(row[part]["acceptance_length"]) for part, _ in _PARTS),
                *(percent(rate) for part, _ in _PARTS for rate in row[part]["acceptance"]),
            )
            for row in history
        ),
    )  # fmt: skip
