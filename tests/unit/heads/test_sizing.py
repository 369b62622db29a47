"""What sizes cost and yield: worked examples, the rule of ``auto``, and real layers under a fake clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof.errors import OptionError
from draftproof.heads import sizing
from draftproof.heads.sizing import StepCosts, Wish
from draftproof.record import CostCurve

CURVE = CostCurve(rows=(1, 2, 5), contexts=(64,), seconds=((0.010, 0.011, 0.014),))
WISH = Wish(depth=1, acceptance=0.5)


def costs(output: dict[int, float], body: float = 0.001, verification: float = 0.01) -> StepCosts:
    return StepCosts(
        output=output, spread=dict.fromkeys(output, 0.0), body=body, is_body_measured=True,
        verification=verification, num_repeats=3,
    )  # fmt: skip


def test_a_worked_example() -> None:
    made = costs({10: 0.001, 20: 0.003, 100: 0.009})
    small, middle, whole = sizing.worths({10: 0.6, 20: 0.8}, made, WISH)
    assert (small.size, small.coverage, small.marginal) == (10, 0.6, None)
    assert small.output_ms == pytest.approx(1)
    assert small.saved_ms == pytest.approx(8)
    assert small.tokens_per_second == pytest.approx(1.3 / 0.012)
    assert middle.marginal == pytest.approx(0.2 / 2)
    assert middle.tokens_per_second == pytest.approx(1.4 / 0.014)
    assert (whole.coverage, whole.saved_ms) == (1.0, 0.0)
    assert whole.marginal == pytest.approx(0.2 / 6)


def test_a_chain_needs_every_token_before() -> None:
    made = costs({10: 0.001, 100: 0.002})
    (small, whole) = sizing.worths({10: 0.5}, made, Wish(depth=3, acceptance=0.8))
    assert small.tokens_per_second == pytest.approx((1 + 0.4 + 0.16 + 0.064) / (0.01 + 3 * 0.002))
    assert whole.tokens_per_second == pytest.approx((1 + 0.8 + 0.64 + 0.512) / (0.01 + 3 * 0.003))


def test_no_marginal_gain_is_told_where_more_ids_were_not_slower() -> None:
    made = costs({10: 0.002, 20: 0.002, 100: 0.009})
    assert sizing.worths({10: 0.6, 20: 0.8}, made, WISH)[1].marginal is None


def test_the_best_size_is_where_the_marginal_gain_falls_to_the_average() -> None:
    output = {size: 1e-5 * size for size in (100, 200, 400, 800, 1600)}
    shares = {100: 0.5, 200: 0.8, 400: 0.9, 800: 0.905}
    found = sizing.worths(shares, costs(output), WISH)
    taken = sizing.best(found)
    assert taken.size == 200
    per_ms = taken.tokens_per_second / 1e3
    by_size = {worth.size: worth for worth in found}
    assert WISH.acceptance * (by_size[200].marginal or 0) > per_ms
    assert WISH.acceptance * (by_size[400].marginal or 0) < per_ms


def test_all_ids_may_be_best_and_equals_go_to_the_smaller() -> None:
    assert sizing.best(sizing.worths({10: 0.2}, costs({10: 0.001, 99: 0.001}), WISH)).size == 99
    assert sizing.best(sizing.worths({10: 1.0}, costs({10: 0.001, 99: 0.001}), WISH)).size == 10


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"depth": 0, "acceptance": 0.5}, "--depth must be 1 or more, got 0"),
        ({"depth": 1, "acceptance": 0.0}, "--acceptance must be above 0 and at most 1, got 0"),
        ({"depth": 1, "acceptance": 1.5}, "got 1.5"),
    ],
)
def test_wishes_that_cannot_be(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        Wish(**fields)


class StepClock:
    """A clock that goes on by a step each time it is read; counts readings."""

    def __init__(self, step_ns: int) -> None:
        self.step_ns, self.readings = step_ns, 0

    def now_ns(self) -> int:
        self.readings += 1
        return self.step_ns * self.readings


def test_every_size_all_ids_and_the_heads_layer_are_timed_in_turn(
    tiny_target: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, calls = tiny_target("qwen3_5_mtp", torch.float32), list[int]()
    made = sizing._calls

    def noted(*arguments: Any) -> Any:
        def note(key: int, call: Any) -> Any:
            return lambda: (calls.append(key), call())

        return {key: note(key, call) for key, call in made(*arguments).items()}

    monkeypatch.setattr(sizing, "_calls", noted)
    heard: list[int] = []
    found = sizing.measure(
        target, CURVE, range(288), [20, 50, 288], Wish(depth=3, acceptance=0.5), clock=StepClock(1000),
        report=lambda stage, done, total: heard.append(done),
    )  # fmt: skip
    assert list(found.output) == [20, 50, 288]
    assert set(found.output.values()) == {1e-6}
    assert (found.body, found.is_body_measured, found.num_repeats) == (1e-6, True, 200)
    assert found.verification == pytest.approx(0.013)
    rounds = [calls[i : i + 4] for i in range(0, len(calls), 4)]
    assert len(rounds) == len(heard) == 205
    assert all(sorted(keys) == [0, 20, 50, 288] for keys in rounds)
    assert len({tuple(keys) for keys in rounds}) > 5, "in an order drawn anew"


def test_a_slow_layer_is_timed_less_often(tiny_target: Callable[..., Any]) -> None:
    target = tiny_target("llama", torch.float32)
    found = sizing.measure(target, CURVE, range(288), [20], WISH, clock=StepClock(10**9))
    assert 5 < found.num_repeats < 20
    assert not found.is_body_measured
    assert found.body == 0.0, "never below nothing"
    fast = sizing.measure(target, CURVE, range(288), [20], WISH, clock=StepClock(10**6))
    assert fast.body == pytest.approx((0.010 - 0.001) / target.num_layers)


def test_the_timed_layer_is_the_drafters(tiny_target: Callable[..., Any], tmp_path: Path) -> None:
    from draftproof.models.mtp import shortened  # noqa: PLC0415 - the twin of what a drafter calls

    target = tiny_target("qwen3_5_mtp", torch.float32)
    ids, row = torch.tensor([3, 9, 200]), torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    mine = shortened(target.parts.head, ids).rows(row)
    assert torch.equal(mine, target.parts.native_head.shortlist(ids).rows(row))


def test_as_plain_values() -> None:
    made = costs({10: 0.001, 100: 0.009})
    told = sizing.cost_summary(made, sizing.worths({10: 0.6}, made, WISH), WISH)
    assert (told["depth"], told["acceptance"], told["body_ms"]) == (1, 0.5, 1.0)
    assert [line["size"] for line in told["sizes"]] == [10, 100]
    assert told["sizes"][0]["tokens_per_second"] == pytest.approx(1.3 / 0.012)
