"""The page of a training: its figures as given, self-contained, escaped, the same bytes every time."""

from __future__ import annotations

import json
import re
from typing import Any

from draftproof.report.training import render_training

FACTS: dict[str, Any] = {"model": "m<b>x</b>", "dtype": "float32", "depth": 2, "num_parameters": 5}


def look(step: int, *, train: float, held: float, last: float | None = 0.25) -> dict[str, Any]:
    def part(rate: float) -> dict[str, Any]:
        return {"loss": [2.0 - rate, 3.0 - rate], "acceptance": [rate, last], "acceptance_length": 1 + rate,
                "num_drafts": 40}  # fmt: skip

    return {
        "step": step, "epoch": 0, "rate": 1e-3, "num_tokens": 10 * step, "seconds": 1.5,
        "training_loss": 2.125 if step else None, "train": part(train), "held_out": part(held),
    }  # fmt: skip


HISTORY = [look(0, train=0.125, held=0.0, last=None), look(1000, train=0.75, held=0.5)]


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


def test_every_figure_is_drawn_and_in_the_table() -> None:
    page = render_training(FACTS, HISTORY)
    data = data_of(page)
    assert data["length"]["rows"] == [
        {"step": 0, "part": "train", "value": 1.125}, {"step": 0, "part": "held-out", "value": 1.0},
        {"step": 1000, "part": "train", "value": 1.75}, {"step": 1000, "part": "held-out", "value": 1.5},
    ]  # fmt: skip
    assert {"step": 1000, "part": "held-out", "draft": 2, "value": 0.25} in data["acceptance"]["rows"]
    assert len(data["acceptance"]["rows"]) == 6, "what was not reached is not drawn"
    assert {"step": 1000, "part": "train", "value": 1.75} in data["loss"]["rows"]
    cells = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", page)
    start = cells.index("1\u202f000")
    assert cells[start : start + 9] == [
        "1\u202f000", "10\u202f000", "2.12", "1.75", "1.50", "75 %", "25 %", "50 %", "25 %",
    ]  # fmt: skip
    assert "not measured" in cells


def test_it_is_one_file_that_asks_for_nothing() -> None:
    page = render_training(FACTS, HISTORY)
    assert page == render_training(FACTS, HISTORY)
    assert "m&lt;b&gt;x&lt;/b&gt;" in page
    assert "<b>x</b>" not in page
    assert not re.search(r'<(link|script|img)[^>]+(src|href)="(?!data:)', page)
    assert "default-src 'none'" in page
    for name in data_of(page):
        assert f'data-chart="{name}"' in page


def test_before_the_first_look_there_is_nothing_to_draw() -> None:
    page = render_training(FACTS, [])
    assert data_of(page) == {}
    assert page.count('class="missing"') == 3
