"""Each toy candidate gets the right verdict for the right reason; no process, no model, a fake clock."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from draftproof.bench.runner import Failure
from draftproof.bench.trial import StockError
from draftproof.record import Counters

Make = Callable[..., Any]
Parts = dict[str, Any]


def spoiled(label: str, at: int) -> Callable[[str, list[int]], list[int]]:
    """Another token at ``at``, on one input or on all (``label`` empty)."""

    def spoil(found: str, ids: list[int]) -> list[int]:
        if label in ("", found):
            ids = [*ids[:at], ids[at] + 1, *ids[at + 1 :]]
        return ids

    return spoil


def test_twice_as_fast_everywhere_passes_without_a_label(evaluate: Make, toy: Make, parts: Parts) -> None:
    half = parts["step_ns"] / 2
    done = evaluate(
        toy(step_ns=lambda *_: half, counters=lambda steps: Counters(steps=steps, tokens=steps)),
    )
    assert done.outcome == "pass"
    assert re.match(r"faster than stock: (1\.9[89]|2\.0[0-2])x ", done.reasons)
    assert done.results["flags"] == []
    assert not done.results["metrics"]["diverse"]["data_dependent"]
    assert done.results["metrics"]["diverse"]["steps_vary"] is False
    assert done.results["speedup"]["median"] == pytest.approx(2, rel=0.02)
    assert all(row["reconciled"] for row in done.results["inputs"])
    assert done.evidence.status == "complete"
    assert done.notes == ""


def test_an_exact_lookup_passes_and_is_labelled_by_timing_and_by_steps(
    evaluate: Make, toy: Make, parts: Parts
) -> None:
    done = evaluate(toy(steps=parts["lookup_steps"], counters=parts["honest"]))
    assert done.outcome == "pass"
    assert done.results["flags"] == ["data_dependent"]
    diverse = done.results["metrics"]["diverse"]
    assert diverse["steps_vary"] is True
    assert diverse["spread"] > diverse["threshold"] == 0.1
    assert (diverse["min_input"], diverse["max_input"]) == ("poem", "code")
    assert diverse["max_speedup"] == pytest.approx(4, rel=0.03)
    assert "decode steps" in diverse["why"]
    assert done.results["speedup"]["median"] == pytest.approx(2, rel=0.03)
    stats = done.results["metric_detail"]["decode_stats"]
    assert stats["steps"] == 128
    assert stats["acceptance_rate"] == 128 / (4 * 128)
    assert stats["tokens_per_step"] == 2.0


def test_a_lookup_nobody_can_count_is_labelled_by_its_timing_alone(
    evaluate: Make, toy: Make, parts: Parts
) -> None:
    done = evaluate(toy(steps=parts["lookup_steps"], is_counted=False))
    assert done.outcome == "pass"
    assert done.results["metrics"]["diverse"]["steps_vary"] is None
    assert "data_dependent" in done.results["flags"]
    assert "steps are unknown" in done.notes


def test_equal_times_with_other_steps_are_labelled_by_the_steps_alone(
    evaluate: Make, toy: Make, parts: Parts
) -> None:
    steps = parts["lookup_steps"]
    total = parts["num_steps"] * parts["step_ns"] / 2
    done = evaluate(toy(steps=steps, counters=parts["honest"], step_ns=lambda label, _: total / steps(label)))
    diverse = done.results["metrics"]["diverse"]
    assert diverse["spread"] < diverse["threshold"]
    assert diverse["steps_vary"]
    assert done.results["flags"] == ["data_dependent"]
    assert done.outcome == "pass"


def test_wrong_on_code_only_fails_and_names_it(evaluate: Make, toy: Make, parts: Parts) -> None:
    half = parts["step_ns"] / 2
    done = evaluate(toy(step_ns=lambda *_: half, spoil=spoiled("code", 17)))
    assert done.outcome == "fail"
    assert done.reasons.startswith("code: token 17 is not stock's")
    assert done.results["speedup"] is None
    assert [row["first_difference"] for row in done.results["inputs"] if row["label"] == "code"] == [17]
    assert [row["label"] for row in done.results["inputs"]] == list(parts["labels"])


def test_wrong_at_token_200_only_fails_at_token_200(evaluate: Make, toy: Make, parts: Parts) -> None:
    half = parts["step_ns"] / 2
    done = evaluate(toy(step_ns=lambda *_: half, spoil=spoiled("", 200)))
    assert done.outcome == "fail"
    assert done.reasons.startswith("main: token 200 is not stock's")
    assert done.results["speedup"] is None
    # The main input decides: nothing after it was run, and the run says so.
    assert [row["label"] for row in done.results["inputs"]] == ["main"]
    assert "not run, as main did not pass: holdout, news, code, poem, table, german" in done.notes


def test_wrong_on_the_held_out_input_stops_before_the_diverse_set(evaluate: Make, toy: Make) -> None:
    done = evaluate(toy(spoil=spoiled("holdout", 3)))
    assert done.outcome == "fail"
    assert done.reasons.startswith("holdout: token 3 ")
    assert [row["label"] for row in done.results["inputs"]] == ["main", "holdout"]


@pytest.mark.parametrize(("cut", "found"), [(slice(0, 256), 256), (slice(0, 10), 10)])
def test_an_output_that_ends_early_fails(cut: slice, found: int, evaluate: Make, toy: Make) -> None:
    done = evaluate(toy(spoil=lambda label, ids: ids[cut]))
    assert done.outcome == "fail"
    assert done.reasons == f"main: {found} tokens where stock emits 257"


def test_right_at_first_and_wrong_on_a_repeat_fails(evaluate: Make, toy: Make) -> None:
    calls: list[str] = []

    def spoil(label: str, ids: list[int]) -> list[int]:
        calls.append(label)
        return spoiled("news", 5)(label, ids) if calls.count("news") == 3 else ids

    done = evaluate(toy(spoil=spoil))
    assert done.outcome == "fail"
    assert done.reasons.startswith("news: token 5 ")


def test_a_baseline_that_gets_slower_and_slower_is_void(evaluate: Make, toy: Make, parts: Parts) -> None:
    def slower(label: str, seen: int) -> float:
        return float(parts["step_ns"] * (1 + 0.3 * (seen % 6)))

    done = evaluate(toy(), stock=toy(step_ns=slower, seed=2), pairs=6)
    assert done.outcome == "void"
    assert "stock drifted: the later half of its legs took" in done.reasons
    assert done.results["speedup"] is None


def test_a_baseline_slower_beside_the_candidate_than_alone_is_void(
    evaluate: Make, toy: Make, parts: Parts
) -> None:
    """Sleeping in the control: the candidate holds stock up as soon as it is there."""
    factor = [1.0]
    stock = toy(step_ns=lambda *_: parts["step_ns"] * factor[0], seed=2)
    done = evaluate(toy(), stock=stock, on_start=lambda: factor.append(factor.pop() * 2))
    assert done.outcome == "void"
    assert re.search(r"stock ran (1\.9[5-9]|2\.0[0-5])x slower", done.reasons)
    assert "slower beside the candidate than alone" in done.reasons
    assert done.results["speedup"] is None


def test_unreported_counters_pass_with_a_note_and_counted_steps(
    evaluate: Make, toy: Make, parts: Parts
) -> None:
    done = evaluate(toy(steps=parts["lookup_steps"]))
    assert done.outcome == "pass"
    assert done.notes == (
        "no counters were reported (report_stats); steps are the forwards the harness counted"
    )
    assert done.results["metrics"]["diverse"]["steps_vary"] is True
    assert done.results["metric_detail"]["decode_stats"] is None
    rates = {row["label"]: row["tokens_per_step"] for row in done.results["inputs"]}
    assert rates["code"] == 4.0
    assert rates["poem"] == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        (lambda n: Counters(steps=1, verifies=1, drafted=999, accepted=255, tokens=256),
         "main: reported 1 steps, the harness counted 128 forwards"),
        (lambda n: Counters(steps=n, verifies=n, drafted=2 * n, accepted=n, tokens=2 * n + 9),
         "main: reported 265 tokens, emitted 257"),
        (lambda n: Counters(steps=n, verifies=n, drafted=n, accepted=2 * n, tokens=256),
         "main: reported 256 accepted of 128 drafted tokens"),
        (lambda n: Counters(steps=n, verifies=2 * n, drafted=4 * n, accepted=n, tokens=256),
         "main: reported 256 verifications in 128 steps"),
        (lambda n: Counters(steps=n, verifies=n, drafted=4 * n, accepted=n // 2, tokens=256),
         "main: reported 256 tokens from 128 steps and 64 accepted"),
    ],
)  # fmt: skip
def test_lying_counters_fail(lie: Make, reason: str, evaluate: Make, toy: Make, parts: Parts) -> None:
    done = evaluate(toy(steps=parts["lookup_steps"], counters=lie))
    assert done.outcome == "fail"
    assert reason in done.reasons
    assert done.results["speedup"] is None


def test_a_store_that_knows_a_prompt_when_it_comes_again_fails(
    evaluate: Make, toy: Make, parts: Parts
) -> None:
    done = evaluate(toy(step_ns=lambda label, seen: parts["step_ns"] / (5 if seen else 1), is_counted=False))
    assert done.outcome == "fail"
    assert "repeats of a prompt are" in done.reasons
    assert "something kept from the first decode is used again" in done.reasons
    assert done.results["speedup"] is None


def test_drafts_that_are_always_right_are_void(evaluate: Make, toy: Make, parts: Parts) -> None:
    def counters(steps: int) -> Counters:
        return Counters(steps=steps, verifies=steps, drafted=steps, accepted=steps, tokens=2 * steps)

    done = evaluate(toy(steps=lambda _: parts["num_steps"] // 2, counters=counters))
    assert done.outcome == "void"
    assert "the drafts were known beforehand" in done.reasons


def test_a_noisy_machine_is_void(evaluate: Make, toy: Make, parts: Parts) -> None:
    rng = random.Random(3)
    done = evaluate(toy(step_ns=lambda *_: parts["step_ns"] / 2 * rng.choice((0.5, 1.0, 2.0))))
    assert done.outcome == "void"
    assert "the machine was too noisy" in done.reasons


def test_stock_against_itself_is_a_tie_and_never_labelled(evaluate: Make, toy: Make) -> None:
    runs = [
        evaluate(
            toy(seed=2 * seed, counters=lambda steps: Counters(steps=steps, tokens=steps)),
            stock=toy(seed=2 * seed + 1),
        )
        for seed in range(20)
    ]
    assert [run.results["flags"] for run in runs] == [[]] * 20
    ties = [run for run in runs if run.outcome == "tie"]
    assert len(ties) >= 19
    assert all(run.reasons.startswith("not shown to differ from stock's speed: ") for run in ties)


def test_a_slower_candidate_fails_and_shows_its_speed(evaluate: Make, toy: Make, parts: Parts) -> None:
    done = evaluate(toy(step_ns=lambda *_: parts["step_ns"] * 1.5))
    assert done.outcome == "fail"
    assert done.reasons.startswith("slower than stock: 0.6")
    assert done.results["speedup"]["median"] == pytest.approx(1 / 1.5, rel=0.03)


@pytest.mark.parametrize("kind", ["error", "oom", "exit", "timeout"])
def test_a_failure_on_one_diverse_input_fails_and_names_it(
    kind: Any, evaluate: Make, toy: Make, parts: Parts
) -> None:
    def fail(label: str, seen: int) -> Failure | None:
        return Failure(kind=kind, reason="it broke") if (label, seen) == ("code", 2) else None

    done = evaluate(toy(fail=fail))
    assert done.outcome == "fail"
    assert f"code: the candidate failed ({kind}): it broke" in done.reasons
    assert done.results["speedup"] is None
    is_gone = kind in ("exit", "timeout")
    measured = [row["label"] for row in done.results["inputs"]]
    assert measured == (["main", "holdout", "news", "code"] if is_gone else list(parts["labels"]))
    assert ("not run, as code did not pass: poem, table, german" in done.notes) is is_gone


@pytest.mark.parametrize("label", ["warm-up", "main"])
def test_a_failure_at_the_start_leaves_stocks_own_legs(label: str, evaluate: Make, toy: Make) -> None:
    failure = Failure(kind="error", reason="ValueError: no")
    done = evaluate(toy(fail=lambda found, _: failure if found == label else None))
    assert done.outcome == "fail"
    assert f"{label}: the candidate failed (error): ValueError: no" in done.reasons
    assert [d.leg.arm for d in done.evidence.decodes][:5] == ["stock-solo"] * 5


def test_a_failing_stock_says_nothing_of_the_candidate(evaluate: Make, toy: Make) -> None:
    stock = toy(fail=lambda label, seen: Failure(kind="oom", reason="no memory") if seen == 7 else None)
    with pytest.raises(StockError, match="^stock: main: no memory$"):
        evaluate(toy(), stock=stock)


def test_a_stock_that_changes_its_mind_says_nothing_of_the_candidate(evaluate: Make, toy: Make) -> None:
    calls: list[str] = []

    def spoil(label: str, ids: list[int]) -> list[int]:
        calls.append(label)
        return ids[:-1] if calls.count("holdout") == 2 else ids

    with pytest.raises(StockError, match="stock is not deterministic: holdout: 256 tokens"):
        evaluate(toy(), stock=toy(spoil=spoil))


def test_an_interrupt_leaves_the_finished_rows(evaluate: Make, toy: Make) -> None:
    def fail(label: str, seen: int) -> None:
        if (label, seen) == ("code", 1):
            raise KeyboardInterrupt

    done = evaluate(toy(fail=fail))
    assert done.evidence.status == "interrupted"
    finished = [row for row in done.results["inputs"] if row["label"] != "code"]
    assert [row["label"] for row in finished] == ["main", "holdout", "news"]
    legs = {(d.leg.label, d.leg.arm) for d in done.evidence.decodes}
    for row in finished:
        assert len(done.evidence.of(row["label"], "toy")) == 5, legs
