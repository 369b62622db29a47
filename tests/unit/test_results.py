"""Published figures against numbers worked out by hand, from small records of legs and tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.folder import SERIAL, STOCK, Decode, Evidence
from draftproof.record import CostCurve, Counters, Leg, Machine, MemoryFloor, Plan, Round, Trace
from draftproof.results import SOLO, compute
from draftproof.stats import MeanRatio, bootstrap_median, mean_ratio, pair_noise
from draftproof.wire import canonical, tokens_sha256

ARM = "lookup"
MACHINE = Machine(
    cpu="c", isa="i", num_threads=2, device="cpu", os="o", python="3", torch="2", transformers="5"
)
PLAN = Plan(claim="bitwise", dtype="float32", fingerprint="f", ops=(), max_rows=8)
CURVE = CostCurve(rows=(1, 3), contexts=(4,), seconds=((0.01, 0.011),))
TOKENS = tuple(range(10, 21))
# Four forwards after the prompt's: two drafts of three (all right, then one right), two serial steps.
STEPS, TOKENS_PER_STEP = 4, 2.5
SPEEDS = (
    "speedup", "serial_speedup", "speculation_speedup", "geometric_mean", "worst_input", "best_input",
    "first_seen_speedup", "repeat_speedup",
)  # fmt: skip
OF_INPUT = (
    "speedup",
    "serial_speedup",
    "speculation_speedup",
    "first_seen_speedup",
    "repeat_speedup",
    "noise",
)


def step(index: int, position: int, emitted: Sequence[int], offered: Sequence[int] = ()) -> Round:
    return Round(
        index=index, position=position, source="lookup" if offered else "none", num_offered=len(offered),
        num_drafted=len(offered), num_accepted=len(emitted) - 1, emitted=tuple(emitted),
        offered=tuple(offered), num_forwards=int(index > 0),
    )  # fmt: skip


def drafted(tokens: Sequence[int] = TOKENS, num_prompt: int = 3) -> Trace:
    """Eleven tokens: 1 from the prompt, then 4 + 2 + 1 + 3, of 3 + 3 + 0 + 2 drafted."""
    t = tuple(tokens)
    rounds = (
        step(0, num_prompt, t[:1]), step(1, num_prompt + 1, t[1:5], t[1:4]),
        step(2, num_prompt + 5, t[5:7], (t[5], 0, 0)), step(3, num_prompt + 7, t[7:8]),
        step(4, num_prompt + 8, t[8:11], t[8:10]),
    )  # fmt: skip
    return Trace(num_prompt=num_prompt, prefill_ns=0, rounds=rounds)


def serial(tokens: Sequence[int] = TOKENS, num_prompt: int = 3) -> Trace:
    rounds = tuple(step(i, num_prompt + i, (token,)) for i, token in enumerate(tokens))
    return Trace(num_prompt=num_prompt, prefill_ns=0, rounds=rounds)


def leg(
    label: str, arm: str, pair: int, duration_ns: int, tokens: Sequence[int] = TOKENS, **changes: Any
) -> Decode:
    """One decode; ``trace`` and the fields of its leg may be given."""
    trace = changes.pop("trace", None)
    ids = changes.pop("token_ids", tuple(tokens))
    made = Leg(
        label=label, arm=arm, pair=pair, order=0, start_ns=0, duration_ns=duration_ns, num_tokens=len(tokens),
        tokens_sha256=tokens_sha256(tokens), peak_bytes=100, is_first_seen=pair == 0,
    )  # fmt: skip
    return Decode(leg=replace(made, **changes), token_ids=ids, trace=trace)


def triple(label: str, pair: int, times: Sequence[int], tokens: Sequence[int] = TOKENS) -> list[Decode]:
    """Stock, the engine without drafts and the judged arm, as the bench would record them."""
    stock_ns, serial_ns, arm_ns = times
    told = Counters(steps=STEPS, verifies=3, drafted=8, accepted=6, tokens=10)
    return [
        leg(label, ARM, pair, arm_ns, tokens, trace=drafted(tokens), num_forwards=STEPS, counters=told,
            peak_bytes=1400),
        leg(label, SERIAL, pair, serial_ns, tokens, trace=serial(tokens), num_forwards=10,
            counters=Counters(steps=10, tokens=10), peak_bytes=1000),
        leg(label, STOCK, pair, stock_ns, tokens, num_forwards=10, peak_bytes=1900),
    ]  # fmt: skip


def evidence(decodes: Sequence[Decode], **changes: Any) -> Evidence:
    labels = dict.fromkeys(d.leg.label for d in decodes)
    return Evidence(
        **{
            "kind": "bench", "request": {"model": "m", "dtype": "float32", "quality": "exact"},
            "status": "complete", "arm": ARM, "roles": dict.fromkeys(labels, "diverse"), "machine": MACHINE,
            "plan": PLAN, "curve": CURVE, "decodes": tuple(decodes),
            "prompts": dict.fromkeys(labels, (1, 2, 3)), **changes,
        }
    )  # fmt: skip


# Stock, own serial, arm, in nanoseconds by input and pair: a 2x, b 3x, c 4x on most of their pairs.
TIMES: Mapping[str, Sequence[Sequence[int]]] = {
    "a": [(3200, 2400, 1600), (3200, 1600, 1600), (3520, 2400, 1600)],
    "b": [(4800, 3200, 1600), (4800, 3200, 1600), (4800, 2400, 1600)],
    "c": [(6400, 3200, 1600), (5600, 3200, 1600), (6400, 3200, 1600)],
}


def bench(times: Mapping[str, Sequence[Sequence[int]]] = TIMES, **changes: Any) -> Evidence:
    rows = [triple(label, pair, row) for label, pairs in times.items() for pair, row in enumerate(pairs)]
    return evidence([decode for row in rows for decode in row], **changes)


def ratio(median_: float, low: float, high: float, values: Sequence[float]) -> dict[str, Any]:
    interval = bootstrap_median(values)
    return {
        "median": median_, "low": low, "high": high, "num_pairs": len(values),
        "interval": None if interval is None else list(interval),
    }  # fmt: skip


def _range(judged: MeanRatio) -> str:
    assert judged.interval is not None
    return f"{judged.interval[0]:.2f}-{judged.interval[1]:.2f}"


def with_decodes(run: Evidence, change: Any) -> Evidence:
    return replace(run, decodes=tuple(map(change, run.decodes)))


class TestFigures:
    def test_of_an_input_are_those_of_its_pairs(self) -> None:
        a, b, c = compute(bench())["inputs"]
        assert a["speedup"] == ratio(2.0, 2.0, 2.2, [2, 2, 2.2])
        assert a["serial_speedup"] == ratio(2.0, 4 / 3, 2.0, [4 / 3, 2, 22 / 15]) | {
            "median": 3520 / 2400, "interval": a["serial_speedup"]["interval"],
        }  # fmt: skip
        assert a["speculation_speedup"] == ratio(1.5, 1.0, 1.5, [1.5, 1, 1.5])
        assert b["speedup"] == ratio(3.0, 3.0, 3.0, [3, 3, 3])
        assert b["serial_speedup"] == ratio(1.5, 1.5, 2.0, [1.5, 1.5, 2])
        assert c["speedup"] == ratio(4.0, 3.5, 4.0, [4, 3.5, 4])
        assert [row["noise"] for row in (a, b, c)] == [pair_noise([2, 2, 2.2]), 0.0, pair_noise([4, 3.5, 4])]

    def test_over_inputs_are_medians_of_their_medians(self) -> None:
        found = compute(bench())
        assert found["speedup"] == ratio(3.0, 2.0, 4.0, [2, 3, 4])
        assert found["serial_speedup"] == ratio(1.5, 3520 / 2400, 2.0, [3520 / 2400, 1.5, 2])
        assert found["speculation_speedup"] == ratio(2.0, 1.5, 2.0, [1.5, 2, 2])
        assert (found["worst_input"], found["best_input"]) == ("a", "c")
        assert found["geometric_mean"]["value"] == pytest.approx(24 ** (1 / 3), rel=1e-12)
        assert found["geometric_mean"]["interval"] is None  # of three inputs it would be their range

    def test_the_verdict_rests_on_the_geometric_mean_over_inputs(self) -> None:
        """Of inputs as far apart as 2x, 3x and 4x three say little; of six within 3 to 3.3 enough."""
        found = compute(bench())
        assert found["verdict"]["outcome"] == "tie"
        figure = f"2.88x (geometric mean over 3 inputs, 99 % {_range(mean_ratio([2, 3, 4]))})"
        assert found["verdict"]["reasons"] == [f"not shown to differ from stock's speed: {figure}"]
        times = {f"input {i}": [(4800 + 96 * i, 3200, 1600)] * 3 for i in range(6)}
        ratios = [3 + 0.06 * i for i in range(6)]
        found = compute(bench(times))
        assert found["verdict"]["outcome"] == "pass"
        judged = mean_ratio(ratios)
        figure = f"{judged.value:.2f}x (geometric mean over 6 inputs, 99 % {_range(judged)})"
        assert found["verdict"]["reasons"] == [f"faster than stock: {figure}"]

    def test_first_decodes_are_apart_from_repeats(self) -> None:
        """Pair 0 is first seen: a 2, b 3, c 4; the others are repeats, with medians 2.1, 3 and 3.75."""
        found = compute(bench())
        assert [row["first_seen_speedup"]["median"] for row in found["inputs"]] == [2, 3, 4]
        assert [row["first_seen_speedup"]["num_pairs"] for row in found["inputs"]] == [1, 1, 1]
        assert [row["repeat_speedup"]["median"] for row in found["inputs"]] == [2.1, 3, 3.75]
        assert found["first_seen_speedup"] == ratio(3.0, 2.0, 4.0, [2, 3, 4])
        assert found["repeat_speedup"] == ratio(3.0, 2.1, 3.75, [2.1, 3, 3.75])

    def test_a_pair_seen_first_again_counts_as_first(self) -> None:
        """As in a run that was resumed: the judged arm's flag says it, not the number of the pair."""

        def change(d: Decode) -> Decode:
            is_first = d.leg.arm == ARM and d.leg.pair in (0, 2)
            return replace(d, leg=replace(d.leg, is_first_seen=is_first))

        row = compute(with_decodes(bench(), change))["inputs"][0]
        assert row["first_seen_speedup"] == ratio(2.1, 2.0, 2.2, [2, 2.2])
        assert row["repeat_speedup"] == ratio(2.0, 2.0, 2.0, [2])

    def test_of_a_single_input_are_over_its_pairs(self) -> None:
        found = compute(bench({"a": TIMES["a"]}))
        assert found["speedup"] == ratio(2.0, 2.0, 2.2, [2, 2, 2.2])
        assert (found["worst_input"], found["best_input"]) == ("a", "a")
        assert found["geometric_mean"] == {"value": 2.0, "interval": None}
        assert found["metrics"]["diverse"]["status"] == "skipped"

    def test_of_two_inputs_have_no_interval(self) -> None:
        found = compute(bench({"a": TIMES["a"], "c": TIMES["c"]}))
        assert found["speedup"] == {"median": 3.0, "low": 2.0, "high": 4.0, "interval": None, "num_pairs": 2}

    def test_a_pair_without_its_partner_gives_no_ratio(self) -> None:
        run = bench({"a": TIMES["a"]})
        run = replace(run, decodes=tuple(d for d in run.decodes if (d.leg.arm, d.leg.pair) != (STOCK, 2)))
        (row,) = compute(run)["inputs"]
        assert row["speedup"]["num_pairs"] == 2
        assert row["serial_speedup"]["num_pairs"] == 2
        assert row["speculation_speedup"]["num_pairs"] == 3

    def test_say_what_was_compared(self) -> None:
        found = compute(bench())
        assert found["num_checked_tokens"] == 3 * 3 * 2 * 11
        assert found["num_mismatched_tokens"] == 0
        (row, *_) = found["inputs"]
        assert (row["label"], row["role"], row["num_prompt"], row["num_tokens"]) == ("a", "diverse", 3, 11)
        assert (row["num_checked_tokens"], row["num_mismatched_tokens"]) == (66, 0)
        assert row["first_difference"] is None
        assert [found[k] for k in ("model", "dtype", "arm", "claim", "status", "quality")] == [
            "m", "float32", ARM, "bitwise", "complete", "exact",
        ]  # fmt: skip

    def test_of_the_decode_loop(self) -> None:
        found = compute(bench())
        stats = {
            "steps": 4, "verifies": 3, "drafted": 8, "accepted": 6, "tokens": 10, "acceptance_rate": 0.75,
            "tokens_per_verify": 3.0, "tokens_per_step": 2.5,
        }  # fmt: skip
        assert found["metric_detail"] == {"decode_stats": stats}
        for row in found["inputs"]:
            assert row["decode_stats"] == stats
            assert (row["tokens_per_step"], row["num_forwards"], row["reconciled"]) == (2.5, 4, True)
        assert found["acceptance"]["acceptance_rate"] == 0.75
        assert found["acceptance"]["num_rounds"] == 27

    def test_of_the_cost_model_compare_with_the_speculation(self) -> None:
        found = compute(bench())
        measured = {row["label"]: row["measured"] for row in found["cost"]["inputs"]}
        assert measured == {"a": 1.5, "b": 2.0, "c": 2.0}
        # No time for the prompt: 10 one-row steps of 10 ms over verifications of 4, 4, 1 and 3 rows.
        predicted = 0.1 / (0.0115 + 0.0115 + 0.01 + 0.011)
        assert found["cost"]["inputs"][0]["predicted"] == pytest.approx(predicted, rel=1e-9)

    def test_memory_by_side_and_what_the_drafter_adds(self) -> None:
        def change(d: Decode) -> Decode:
            more = {(ARM, 1): 1450, (SERIAL, 2): 1050, (STOCK, 0): 2000}.get((d.leg.arm, d.leg.pair))
            return (
                d if more is None or d.leg.label != "b" else replace(d, leg=replace(d.leg, peak_bytes=more))
            )

        found = compute(with_decodes(bench(), change))
        assert found["peak_bytes"] == {"stock": 2000, "engine": 1450, "drafter": 400}
        assert found["peak_cuda_bytes"] is None
        assert found["inputs"][0]["peak_bytes"] == {"stock": 1900, "serial": 1000, ARM: 1400}
        assert found["inputs"][1]["peak_bytes"] == {"stock": 2000, "serial": 1050, ARM: 1450}

    def test_cuda_memory_where_it_was_measured(self) -> None:
        of = {STOCK: 70, SERIAL: 60, ARM: 85}
        run = with_decodes(bench(), lambda d: replace(d, leg=replace(d.leg, peak_cuda_bytes=of[d.leg.arm])))
        assert compute(run)["peak_cuda_bytes"] == {"stock": 70, "engine": 85, "drafter": 25}

    def test_the_label_counts_as_a_flag(self) -> None:
        found = compute(bench())
        diverse = found["metrics"]["diverse"]
        assert (diverse["median_speedup"], diverse["min_speedup"], diverse["max_speedup"]) == (3, 2, 4)
        assert (diverse["min_input"], diverse["max_input"]) == ("a", "c")
        assert diverse["spread"] == pytest.approx(2 / 3)
        assert diverse["steps_vary"] is False
        assert diverse["data_dependent"] is True
        assert found["flags"] == ["data_dependent"]
        assert [row["steps_per_token"] for row in diverse["inputs"]] == [0.4, 0.4, 0.4]

    def test_the_label_by_steps_alone(self) -> None:
        """Times are alike; one input takes six forwards where the others take four."""
        times = {label: [(3200, 2400, 1600)] * 3 for label in "abc"}

        def change(d: Decode) -> Decode:
            if (d.leg.label, d.leg.arm) != ("c", ARM):
                return d
            told = Counters(steps=6, verifies=1, drafted=4, accepted=4, tokens=10)
            return replace(d, trace=None, leg=replace(d.leg, num_forwards=6, counters=told))

        assert compute(bench(times))["flags"] == []
        found = compute(with_decodes(bench(times), change))
        assert found["metrics"]["diverse"]["spread"] == 0
        assert found["flags"] == ["data_dependent"]
        assert found["inputs"][2]["tokens_per_step"] == 10 / 6


class TestSteps:
    """Tokens per forward come from what was counted, else traced, else reported."""

    @pytest.mark.parametrize(
        ("num_forwards", "has_trace", "reported", "expected"),
        [(5, True, 4, 2.0), (None, True, 4, 2.5), (None, False, 10, 1.0), (None, False, None, None),
         (0, True, 4, 2.5)],
    )  # fmt: skip
    def test_in_that_order(
        self, num_forwards: int | None, has_trace: bool, reported: int | None, expected: float | None
    ) -> None:
        counters = None if reported is None else Counters(steps=reported, tokens=10)
        decodes = [
            leg("a", STOCK, 0, 3000),
            leg("a", ARM, 0, 2000, num_forwards=num_forwards, counters=counters,
                trace=drafted() if has_trace else None),
        ]  # fmt: skip
        assert compute(evidence(decodes))["inputs"][0]["tokens_per_step"] == expected


class TestWithheld:
    def withheld(self, run: Evidence) -> dict[str, Any]:
        found = compute(run)
        assert [found[name] for name in SPEEDS] == [None] * 8
        assert found["metrics"]["diverse"] is None
        assert found["cost"] is None
        assert "data_dependent" not in found["flags"]
        for row in found["inputs"]:
            assert [row[name] for name in OF_INPUT] == [None] * 6
        return found

    def test_on_one_different_token(self) -> None:
        def change(d: Decode) -> Decode:
            if (d.leg.label, d.leg.arm, d.leg.pair) != ("b", ARM, 1):
                return d
            return leg("b", ARM, 1, 1600, (*TOKENS[:6], 99, *TOKENS[7:]), num_forwards=STEPS)

        found = self.withheld(with_decodes(bench(), change))
        assert found["verdict"]["outcome"] == "fail"
        assert found["verdict"]["reasons"] == ["b: token 6 is not stock's (1 of its compared tokens differ)"]
        assert found["num_mismatched_tokens"] == 1
        assert [row["first_difference"] for row in found["inputs"]] == [None, 6, None]
        assert [row["num_mismatched_tokens"] for row in found["inputs"]] == [0, 1, 0]
        # What is no speed stays.
        assert found["acceptance"] is not None
        assert found["peak_bytes"]["stock"] == 1900

    def test_on_a_serial_arm_that_is_wrong(self) -> None:
        wrong = (*TOKENS[:10], 99)

        def change(d: Decode) -> Decode:
            return (
                leg("a", SERIAL, 0, 2400, wrong)
                if (d.leg.label, d.leg.arm, d.leg.pair) == ("a", SERIAL, 0)
                else d
            )

        assert "token 10" in self.withheld(with_decodes(bench(), change))["verdict"]["reasons"][0]

    def test_on_other_token_counts(self) -> None:
        def change(d: Decode) -> Decode:
            return (
                leg("a", ARM, 2, 1600, TOKENS[:9])
                if (d.leg.label, d.leg.arm, d.leg.pair) == ("a", ARM, 2)
                else d
            )

        found = self.withheld(with_decodes(bench(), change))
        assert found["verdict"]["reasons"] == ["a: 9 tokens where stock emits 11"]
        assert found["inputs"][0]["first_difference"] == 9
        assert found["inputs"][0]["num_mismatched_tokens"] == 2

    @pytest.mark.parametrize(
        ("told", "reason"),
        [
            (
                Counters(steps=6, verifies=3, drafted=8, accepted=6, tokens=10),
                "the harness counted 4",
            ),
            (Counters(steps=4, verifies=3, drafted=5, accepted=6, tokens=10), "6 accepted of 5 drafted"),
            (Counters(steps=4, verifies=3, drafted=8, accepted=6, tokens=30), "30 tokens, emitted 11"),
        ],
    )
    def test_on_counters_that_lie(self, told: Counters, reason: str) -> None:
        def change(d: Decode) -> Decode:
            is_hit = (d.leg.label, d.leg.arm, d.leg.pair) == ("c", ARM, 1)
            return replace(d, leg=replace(d.leg, counters=told)) if is_hit else d

        found = self.withheld(with_decodes(bench(), change))
        assert found["verdict"]["outcome"] == "fail"
        assert reason in found["verdict"]["reasons"][0]
        assert [row["reconciled"] for row in found["inputs"]] == [True, True, False]

    def test_on_too_much_noise(self) -> None:
        """Pairs of one input spread far more than a quarter; nothing else is wrong."""
        times = {label: [(3200, 2400, 1600), (3200, 2400, 3200), (3200, 2400, 800)] for label in "abc"}
        found = self.withheld(bench(times))
        assert found["verdict"]["outcome"] == "void"
        assert "too noisy" in found["verdict"]["reasons"][0]
        assert [row["reconciled"] for row in found["inputs"]] == [True] * 3

    def test_on_a_leg_under_the_memory_floor(self) -> None:
        """Four forwards take 1600 ns; one read of the weights takes 600 ns, four 2400."""
        found = self.withheld(bench(floor=MemoryFloor(num_bytes=600, bytes_per_second=1e9)))
        assert found["verdict"]["outcome"] == "void"
        assert "reading the weights" in found["verdict"]["reasons"][0]
        assert compute(bench(floor=MemoryFloor(num_bytes=400, bytes_per_second=1e9)))["speedup"] is not None

    def test_on_speculation_beyond_the_tokens_it_emitted(self) -> None:
        """2.5 tokens a forward cannot make 3x."""
        found = self.withheld(bench({label: [(4800, 4800, 1600)] * 3 for label in "abc"}))
        assert found["verdict"]["outcome"] == "void"
        assert "only 2.50 tokens a forward" in found["verdict"]["reasons"][0]

    def test_on_inputs_that_are_missing(self) -> None:
        roles = dict.fromkeys("abcd", "diverse")
        found = self.withheld(bench(roles=roles))
        assert found["verdict"]["reasons"] == ["only 3 of 4 inputs were measured"]

    def test_on_a_run_that_failed(self) -> None:
        found = self.withheld(bench(status="failed: the engine worker died"))
        assert found["verdict"]["reasons"] == ["failed: the engine worker died"]

    def test_when_nothing_was_measured(self) -> None:
        found = self.withheld(evidence([], roles=dict.fromkeys("ab", "diverse"), status="interrupted"))
        assert found["inputs"] == []
        assert found["verdict"] == {"outcome": "void", "reasons": ["nothing was measured"], "notes": []}
        assert found["metric_detail"]["decode_stats"] is None
        assert found["peak_bytes"] == {"stock": None, "engine": None, "drafter": None}


def test_an_interrupted_run_publishes_what_it_has() -> None:
    """Inputs that were not reached are no fault then."""
    found = compute(bench(roles=dict.fromkeys("abcd", "diverse"), status="interrupted"))
    assert (found["status"], found["speedup"]["median"]) == ("interrupted", 3)


def test_stock_against_itself_has_no_plan_no_curve_and_no_split() -> None:
    times = [(3200, 3200), (3200, 3264), (3264, 3200)]
    decodes = [
        made
        for label in "abc"
        for pair, (first, second) in enumerate(times)
        for made in (
            leg(label, STOCK, pair, first, num_forwards=10),
            leg(label, "stock-again", pair, second, num_forwards=10),
        )
    ]
    found = compute(evidence(decodes, arm="stock-again", plan=None, curve=None))
    assert (found["claim"], found["cost"], found["acceptance"]) == (None, None, None)
    assert found["speedup"]["median"] == 1
    assert (found["serial_speedup"], found["speculation_speedup"]) == (None, None)
    assert found["verdict"]["outcome"] == "tie"
    assert found["flags"] == []
    assert found["metric_detail"]["decode_stats"] is None
    assert found["peak_bytes"] == {"stock": 100, "engine": 100, "drafter": None}
    assert [row["reconciled"] for row in found["inputs"]] == [None] * 3
    assert [row["tokens_per_step"] for row in found["inputs"]] == [1.0] * 3


class TestEvaluation:
    ROLES = {"main": "main", "other": "holdout", "a": "diverse", "b": "diverse", "c": "diverse"}

    def run(self, arm_ns: Mapping[str, int] | None = None, **changes: Any) -> Evidence:
        """A candidate that reports counters and leaves no trace; stock takes 6400 ns everywhere."""
        told = Counters(steps=4, verifies=3, drafted=8, accepted=6, tokens=10)
        fast = {"main": 1600, "other": 3200, "a": 4000, "b": 5000, "c": 6400} | dict(arm_ns or {})
        decodes = [
            made
            for label in self.ROLES
            for pair in range(5)
            for made in (
                leg(label, STOCK, pair, 6400, num_forwards=10),
                leg(label, ARM, pair, fast[label], num_forwards=4, counters=told),
            )
        ]
        return evidence(
            decodes, **{"kind": "evaluate", "roles": self.ROLES, "plan": None, "curve": None, **changes}
        )

    def test_is_quoted_by_its_main_input(self) -> None:
        """Four times on the main input; the median over all would be 1.6."""
        found = compute(self.run())
        assert found["speedup"] == ratio(4.0, 4.0, 4.0, [4] * 5)
        reason = "faster than stock: 4.00x (geometric mean over 5 pairs of main, 99 % 4.00-4.00)"
        assert found["verdict"] == {"outcome": "pass", "reasons": [reason], "notes": []}
        assert (found["worst_input"], found["best_input"]) == ("c", "main")
        assert found["geometric_mean"]["value"] == pytest.approx((4 * 2 * 1.6 * 1.28) ** 0.2, rel=1e-12)

    def test_the_diverse_set_is_without_main_and_holdout(self) -> None:
        diverse = compute(self.run())["metrics"]["diverse"]
        assert [row["label"] for row in diverse["inputs"]] == ["a", "b", "c"]
        assert (diverse["median_speedup"], diverse["min_speedup"], diverse["max_speedup"]) == (1.28, 1.0, 1.6)
        assert diverse["data_dependent"] is True

    def test_a_main_input_that_is_slower_fails_whatever_the_others_do(self) -> None:
        found = compute(self.run({"main": 8000}))
        assert found["verdict"]["outcome"] == "fail"
        assert found["speedup"]["median"] == 0.8
        reason = "slower than stock: 0.80x (geometric mean over 5 pairs of main, 99 % 0.80-0.80)"
        assert found["verdict"]["reasons"] == [reason]

    def test_counters_without_a_trace_are_published_as_reported(self) -> None:
        found = compute(self.run())
        assert found["metric_detail"]["decode_stats"] == {
            "steps": 4, "verifies": 3, "drafted": 8, "accepted": 6, "tokens": 10, "acceptance_rate": 0.75,
            "tokens_per_verify": 3.0, "tokens_per_step": 2.5,
        }  # fmt: skip
        assert found["acceptance"] is None
        assert "counters_unverified" not in found["flags"]

    def test_counters_nobody_could_check_are_flagged(self) -> None:
        def change(d: Decode) -> Decode:
            return replace(d, leg=replace(d.leg, num_forwards=None)) if d.leg.arm == ARM else d

        found = compute(with_decodes(self.run(), change))
        assert "counters_unverified" in found["flags"]
        assert found["speedup"]["median"] == 4
        assert [row["reconciled"] for row in found["inputs"]] == [None] * 5

    def test_a_slowed_control_is_void(self) -> None:
        """Before the candidate was loaded stock took half the time."""
        solo = [leg("main", SOLO, pair, 3200, num_forwards=10) for pair in range(3)]
        run = self.run()
        found = compute(replace(run, decodes=(*solo, *run.decodes)))
        assert found["verdict"]["outcome"] == "void"
        assert "2.00x slower beside the candidate than alone" in found["verdict"]["reasons"][0]
        assert found["speedup"] is None
        # Not compared, and no arm of a pair.
        assert found["num_checked_tokens"] == 25 * 11

    GATE = {"label": "main", "gate": "kl", "quality": "near-lossless", "value": 0.25, "limit": 0.0625}

    def test_a_gate_that_is_not_met_fails(self) -> None:
        request = {"model": "m", "dtype": "float32", "quality": "near-lossless"}
        gates = ({**self.GATE, "is_met": False}, {**self.GATE, "gate": "top1", "is_met": True})
        found = compute(self.run(request=request, gates=gates))
        assert found["verdict"]["outcome"] == "fail"
        assert found["verdict"]["reasons"] == ["main: kl is 0.25, the near-lossless limit 0.0625"]
        assert found["speedup"] is None
        assert found["gates"] == [dict(row) for row in gates]

    def test_other_tokens_are_no_fault_where_gates_judge(self) -> None:
        def change(d: Decode) -> Decode:
            return d if d.leg.arm != ARM else replace(d, token_ids=(*TOKENS[:10], 99))

        run = with_decodes(self.run(), change)
        assert compute(run)["speedup"] is None
        request = {"model": "m", "dtype": "float32", "quality": "near-lossless"}
        found = compute(replace(run, request=request, gates=({**self.GATE, "is_met": True},)))
        assert found["speedup"]["median"] == 4
        assert found["verdict"]["outcome"] == "pass"
        assert found["num_mismatched_tokens"] == 25
        assert found["metrics"]["diverse"]["status"] == "ok"

    @pytest.mark.parametrize(("is_met", "outcome"), [(True, "pass"), (False, "fail")])
    def test_outputs_without_ids_are_judged_by_gates_alone(self, is_met: bool, outcome: str) -> None:
        """Audio: legs hold a hash and a number of frames, and nothing to compare token by token."""
        gates = ({**self.GATE, "gate": "spectral", "quality": "exact", "is_met": is_met},)
        run = with_decodes(self.run(gates=gates, prompts={}), lambda d: replace(d, token_ids=()))
        found = compute(run)
        assert (found["num_checked_tokens"], found["num_mismatched_tokens"]) == (0, 0)
        assert found["verdict"]["outcome"] == outcome
        assert found["inputs"][0]["num_tokens"] == 11
        assert found["inputs"][0]["num_prompt"] == 0
        assert (found["speedup"] is None) == (not is_met)

    def test_an_arm_that_emits_nothing_is_no_output_without_ids(self) -> None:
        """Stock has ids: an arm without any is wrong from its first token."""
        run = with_decodes(self.run(), lambda d: replace(d, token_ids=()) if d.leg.arm == ARM else d)
        found = compute(run)
        assert found["verdict"]["outcome"] == "fail"
        assert found["inputs"][0]["first_difference"] == 0

    def test_its_own_notes_are_passed_on(self) -> None:
        assert compute(self.run(notes=("c was skipped",)))["verdict"]["notes"] == ["c was skipped"]


def test_the_document_is_plain_and_the_same_every_time() -> None:
    """As a file would give it back: the audit compares leaf by leaf."""
    for run in (bench(), TestEvaluation().run(), bench(status="failed: x")):
        found = compute(run)
        assert json.loads(canonical(found)) == found
        assert canonical(compute(run)) == canonical(found)


durations = st.integers(min_value=1, max_value=10**12)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(durations, durations, durations), min_size=1, max_size=4), min_size=1, max_size=4
    )
)
def test_medians_follow_from_the_raw_legs_in_plain_arithmetic(
    pairs: list[list[tuple[int, int, int]]],
) -> None:
    """For any times at all: what is published is the median of medians, and what is not has a reason."""
    run = bench({f"input {i}": rows for i, rows in enumerate(pairs)})
    found = compute(run)
    assert json.loads(canonical(found)) == found
    if found["speedup"] is None:
        assert found["verdict"]["outcome"] in ("fail", "void")
        assert found["verdict"]["reasons"]
    names = {"speedup": (0, 2), "serial_speedup": (0, 1), "speculation_speedup": (1, 2)}
    for name, (base, arm) in names.items():
        ratios = [[times[base] / times[arm] for times in rows] for rows in pairs]
        if found["speedup"] is None:
            assert found[name] is None
            continue
        assert [row[name]["median"] for row in found["inputs"]] == [median(values) for values in ratios]
        assert found[name]["median"] == median([median(values) for values in ratios])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(min_value=-40, max_value=40), min_size=3, max_size=5),
    st.integers(min_value=1, max_value=6), st.integers(min_value=1, max_value=10**6),
)  # fmt: skip
def test_quiet_runs_always_show_their_speed(changes: list[int], gain: int, unit: int) -> None:
    """Within 4 % of their times nothing is refused, so the property above is not about nothing."""
    stock = [(1000 + c) * unit * gain for c in changes]
    times = {f"input {i}": [(ns, 2000 * unit, 1000 * unit)] * 3 for i, ns in enumerate(stock)}
    found = compute(bench(times))
    medians = [ns / (1000 * unit) for ns in stock]
    assert found["speedup"]["median"] == median(medians)
    assert (found["speedup"]["low"], found["speedup"]["high"]) == (min(medians), max(medians))


def test_an_evaluation_cut_short_is_void_and_a_bench_is_not() -> None:
    cut = bench(status="interrupted")
    assert compute(cut)["verdict"]["outcome"] != "void"
    found = compute(replace(cut, kind="evaluate"))
    assert found["verdict"] == {
        "outcome": "void", "reasons": ["the evaluation did not end: interrupted"], "notes": [],
    }  # fmt: skip
    assert found["speedup"] is None
