"""``draftproof doctor``: the plan, the curve and the advice, as text and as one JSON document."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

import pytest

from draftproof import engine as engines
from draftproof.cli import doctor
from draftproof.record import Claim, CostCurve, Machine, OpEvidence, Plan
from draftproof.wire import decode

QKV = OpEvidence(
    op="qkv", shape=(576, 576, 192, 192), form="packed", max_rows=32, is_exact=True, num_checked=9,
    rejected={"plain": "from 2 rows"},
)  # fmt: skip
NORM = OpEvidence(op="norm", shape=(577,), form="batched", max_rows=32, is_exact=False, num_checked=9)
PLAN = Plan(claim="bitwise", dtype="bfloat16", fingerprint="feedc0ffee123456", ops=(QKV, NORM), max_rows=32)
CURVE = CostCurve(
    rows=(1, 2, 5, 17), contexts=(64, 512), seconds=((0.010, 0.011, 0.015, 0.04), (0.02, 0.03, 0.06, 0.2))
)
LOAD = {
    "name_or_path": "m",
    "dtype": "bfloat16",
    "device": "cpu",
    "claim": "auto",
    "threads": None,
    "refresh": True,
}
Run = Callable[..., tuple[str, str]]


@dataclass
class FakeEngine:
    plan: Plan = PLAN
    curve: CostCurve = CURVE


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def runner(engine: FakeEngine | None = None, *, json_output: bool = False) -> tuple[str, str]:
        seen: list[dict[str, Any]] = []

        def load(*, progress: Any, **options: Any) -> FakeEngine:
            seen.append(options)
            progress("probing qkv", 0, 3)
            return engine or FakeEngine()

        monkeypatch.setattr(engines, "load", load)
        doctor.run(dict(LOAD), json_output=json_output)
        assert seen == [LOAD]
        captured = capsys.readouterr()
        return captured.out, captured.err

    return runner


def test_json_is_one_document_and_nothing_else(run: Run) -> None:
    out, err = run(json_output=True)
    assert out.count("\n") == 1
    assert err.strip() == ""
    document = json.loads(out)
    assert set(document) == {"machine", "plan", "cost_curve", "advice"}
    assert decode(Machine, document["machine"]).device == "cpu"
    assert decode(Plan, document["plan"]) == PLAN
    assert decode(CostCurve, document["cost_curve"]) == CURVE
    assert document["advice"] == doctor.advise(CURVE)


def test_text_shows_claim_forms_and_costs(run: Run) -> None:
    out, err = run()
    assert err.strip() == ""
    lines = out.splitlines()
    assert "fingerprint feedc0ffee123456" in out
    assert "claim bitwise (bfloat16): logits, keys and values equal stock's" in out
    assert "margin bound" not in out
    (qkv,) = [line for line in lines if "576x576x192x192" in line]
    assert "packed" in qkv
    assert "32" in qkv
    assert "plain from 2 rows" in qkv
    (norm,) = [line for line in lines if "577" in line]
    assert "32" not in norm  # not exact: no row count is promised
    (first,) = [line for line in lines if "10.0 (1.00)" in line]
    assert all(cell in first for cell in ("64", "11.0 (1.10)", "15.0 (1.50)", "40.0 (4.00)"))
    (second,) = [line for line in lines if "20.0 (1.00)" in line]
    assert all(cell in second for cell in ("512", "30.0 (1.50)", "60.0 (3.00)", "200.0 (10.00)"))
    assert doctor.advise(CURVE) in out


@pytest.mark.parametrize("claim", get_args(Claim))
def test_every_claim_is_explained(claim: Any, run: Run) -> None:
    plan = replace(PLAN, claim=claim, fixed_rows=8 if claim == "fixed" else None)
    out, _ = run(FakeEngine(plan=plan))
    meanings = [meaning for meaning in doctor._MEANING.values() if meaning in " ".join(out.split())]
    assert meanings == [doctor._MEANING[claim]]


def test_a_margin_bound_is_told(run: Run) -> None:
    out, _ = run(FakeEngine(plan=replace(PLAN, claim="guarded", margin_bound=0.03125)))
    assert "margin bound 0.0312" in out


class TestAdvice:
    def curve(self, *costs: float, rows: tuple[int, ...] = (1, 2, 5, 17)) -> CostCurve:
        return CostCurve(rows=rows, contexts=(64,), seconds=(costs,))

    def test_speculation_pays_when_five_rows_cost_less_than_five_tokens(self) -> None:
        advice = doctor.advise(self.curve(1.0, 1.1, 1.5, 3.0))
        assert advice.startswith("Speculation pays here")
        assert "1.50 serial tokens at 64 positions" in advice

    def test_it_does_not_when_they_cost_as_much(self) -> None:
        advice = doctor.advise(self.curve(1.0, 2.0, 5.0, 17.0))
        assert advice.startswith("Speculation does not pay here")
        assert "5.00 serial tokens at 64 positions" in advice

    def test_one_context_where_it_pays_is_enough(self) -> None:
        curve = CostCurve(rows=(1, 5), contexts=(64, 512), seconds=((1.0, 1.5), (1.0, 6.0)))
        advice = doctor.advise(curve)
        assert advice.startswith("Speculation pays here")
        assert "1.50 serial tokens at 64 positions, 6.00 serial tokens at 512 positions" in advice

    def test_a_target_of_few_rows(self) -> None:
        assert "a verification of 2 rows" in doctor.advise(self.curve(1.0, 1.2, rows=(1, 2)))

    def test_a_target_of_one_row_cannot_speculate(self) -> None:
        assert "does not pay" in doctor.advise(self.curve(1.0, rows=(1,)))
