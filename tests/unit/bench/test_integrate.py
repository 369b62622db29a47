"""The A/B rule against hand-made cases and simulations; the rounds, their record and their ledger row."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftproof.bench import integrate as ab
from draftproof.bench.integrate import (
    INTEGRATION,
    AbRule,
    Choice,
    PairTimes,
    Stamp,
    choose,
    decide,
    integrate,
    read_integration,
)
from draftproof.errors import EvidenceError, OptionError, UsageError
from draftproof.folder import check_seal
from draftproof.ledger import Ledger, LedgerRow, check_run
from draftproof.record import Leg, Machine
from draftproof.wire import FORMAT_VERSION, canonical

MACHINE = Machine(
    cpu="c", isa="avx", num_threads=2, device="cpu", os="o", python="3.11", torch="2", transformers="5"
)
STAMP = Stamp(machine=MACHINE, time="2026-07-29T12:00:00+0200", argv=("integrate", "lookup"))
ROW = LedgerRow(
    time="2026-07-29T11:00:00+0200", name="lookup", kind="evaluate", status="keep", run="runs/a",
    seal="5" * 64, quality="exact", claim="bitwise", flags=("data_dependent", "counters_unverified"),
    speedup=1.5, diverse_speedup=1.25, interval=(1.4, 1.6), id="abcd1234",
)  # fmt: skip
CHOICE = Choice(row=ROW, base=None)


class TestDecide:
    def test_the_same_gain_in_every_round(self) -> None:
        made = decide([1.05] * 8)
        assert made.accepted
        assert (made.win_rate, made.num_rounds) == (1.0, 8)
        assert made.gain == pytest.approx(0.05, rel=1e-12)
        assert made.interval == pytest.approx((0.05, 0.05), rel=1e-12)

    def test_seven_wins_and_one_loss_by_hand(self) -> None:
        """Of 8 draws, k hit the loss: P(k >= 4) = 1.1 %, P(k >= 3) = 6.7 %, so the 2.5 % point has k = 3."""
        made = decide([1.1] * 7 + [0.9])
        assert made.win_rate == 7 / 8
        assert made.gain == pytest.approx((1.1**7 * 0.9) ** (1 / 8) - 1, rel=1e-9)
        assert made.interval == pytest.approx(((1.1**5 * 0.9**3) ** (1 / 8) - 1, 0.1), rel=1e-9)
        assert made.accepted  # 2.0 % or more
        assert made.why == (
            "won 7 of 8 rounds (the 80% needed); gained 7.3%, interval 2.0% to 10.0% (above 1.0%)"
        )

    def test_a_large_gain_in_too_few_rounds(self) -> None:
        made = decide([1.5] * 6 + [0.99] * 2)
        assert made.interval[0] > 0.01
        assert not made.accepted
        assert "won 6 of 8 rounds (not the 80% needed)" in made.why

    def test_every_round_won_by_too_little(self) -> None:
        made = decide([1.009] * 8)
        assert made.win_rate == 1.0
        assert not made.accepted
        assert "(not above 1.0%)" in made.why

    def test_slower(self) -> None:
        made = decide([0.5] * 8)
        assert not made.accepted
        assert (made.win_rate, made.gain) == (0.0, pytest.approx(-0.5))

    def test_equal_times_win_nothing(self) -> None:
        made = decide([1.0] * 8, AbRule(min_gain=0))
        assert (made.win_rate, made.gain, made.accepted) == (0.0, 0.0, False)

    def test_the_lower_bound_must_be_above_the_gain_asked_for(self) -> None:
        low = decide([1.1] * 7 + [0.9]).interval[0]
        assert not decide([1.1] * 7 + [0.9], AbRule(min_gain=low)).accepted
        assert decide([1.1] * 7 + [0.9], AbRule(min_gain=math.nextafter(low, 0))).accepted

    @pytest.mark.parametrize(("wins", "rounds", "rate"), [(8, 10, 0.8), (11, 20, 0.55), (8, 8, 1.0)])
    def test_the_win_rate_asked_for_is_enough(self, wins: int, rounds: int, rate: float) -> None:
        ratios = [2.0] * wins + [0.999] * (rounds - wins)
        assert decide(ratios, AbRule(min_win_rate=rate)).accepted
        if wins < rounds:
            assert not decide(ratios, AbRule(min_win_rate=rate + 0.01)).accepted

    def test_a_and_b_swapped_gives_the_inverse(self) -> None:
        ratios = [1.1, 1.2, 0.9, 1.3, 1.05, 1.0, 1.15, 1.4]
        there, back = decide(ratios), decide([1 / ratio for ratio in ratios])
        assert (1 + there.gain) * (1 + back.gain) == pytest.approx(1)

    def test_the_same_rounds_the_same_decision(self) -> None:
        ratios = [1.1, 1.2, 0.9, 1.3, 1.05, 1.0, 1.15, 1.4]
        assert decide(ratios) == decide(ratios)
        assert decide(ratios, AbRule(num_resamples=50)).interval != decide(ratios).interval
        assert decide(ratios, AbRule(num_resamples=50, seed=1)) != decide(ratios, AbRule(num_resamples=50))

    def test_seven_rounds_are_too_few(self) -> None:
        with pytest.raises(UsageError, match="8 rounds or more, got 7"):
            decide([2.0] * 7)

    @pytest.mark.parametrize("bad", [0.0, -1.0, math.inf, math.nan])
    def test_a_ratio_is_a_ratio(self, bad: float) -> None:
        with pytest.raises(EvidenceError, match="positive and finite"):
            decide([1.0] * 8 + [bad])

    @pytest.mark.parametrize(
        "changes",
        [{"min_win_rate": 0}, {"min_win_rate": 1.1}, {"min_win_rate": math.nan}, {"min_gain": -0.1},
         {"min_gain": math.nan}, {"min_gain": math.inf}, {"num_resamples": 0}],
    )  # fmt: skip
    def test_rules_that_make_no_sense(self, changes: dict[str, Any]) -> None:
        with pytest.raises(OptionError, match=next(iter(changes))):
            AbRule(**changes)

    def test_the_thresholds_are_kernel_agents(self) -> None:
        assert (
            8, AbRule(min_win_rate=0.8, min_gain=0.01, num_resamples=10_000)
        ) == (ab.MIN_ROUNDS, ab.RULE)  # fmt: skip


def simulate(gain: float, noise: float, seed: int) -> int:
    """Accepted of 20 A/Bs of 8 rounds whose ratios scatter by ``noise`` around ``1 + gain``."""
    draw = random.Random(seed)
    return sum(
        decide([(1 + gain) * math.exp(draw.gauss(0, noise)) for _ in range(8)]).accepted for _ in range(20)
    )


class TestSimulated:
    @pytest.mark.parametrize("noise", [0.02, 0.2])
    def test_a_against_a_is_declined(self, noise: float) -> None:
        assert simulate(0.0, noise, seed=1) <= 1

    def test_five_percent_in_two_percent_noise_are_accepted(self) -> None:
        assert simulate(0.05, 0.02, seed=2) >= 19

    def test_five_percent_in_twenty_percent_noise_are_not_claimed(self) -> None:
        assert simulate(0.05, 0.2, seed=3) <= 2


def leg(arm: str, number: int, changes: dict[str, Any]) -> Leg:
    fields: dict[str, Any] = {
        "label": "news", "arm": arm, "pair": number, "order": 2 * number, "num_tokens": 4,
        "tokens_sha256": "same", "peak_bytes": 1,
    }  # fmt: skip
    return Leg(**(fields | changes))


def make_pair(number: int, ratio: float, is_a_first: bool | None = None, **b: Any) -> PairTimes:
    """B takes 1000 ns, A ``ratio`` times that; they take turns unless told."""
    a_ns, start = round(1000 * ratio), 10_000 * number
    is_first = number % 2 == 0 if is_a_first is None else is_a_first
    a_start, b_start = (start, start + a_ns) if is_first else (start + 1000, start)
    return PairTimes(
        a=leg("stock", number, {"start_ns": a_start, "duration_ns": a_ns}),
        b=leg("lookup", number, {"start_ns": b_start, "duration_ns": 1000} | b),
    )  # fmt: skip


Act = Callable[[int], PairTimes]


def playing(ratios: Sequence[float]) -> Act:
    return lambda number: make_pair(number, ratios[number])


def raising(error: BaseException, after: int) -> Act:
    def run_pair(number: int) -> PairTimes:
        if number == after:
            raise error
        return make_pair(number, 2.0)

    return run_pair


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.jsonl")


@pytest.fixture
def run(ledger: Ledger, tmp_path: Path) -> Callable[..., ab.Integration]:
    def go(run_pair: Act, num_rounds: int = 8, choice: Choice = CHOICE, **more: Any) -> ab.Integration:
        return integrate(
            run_pair, num_rounds, tmp_path / "ab", choice=choice, ledger=ledger, stamp=STAMP, **more
        )

    return go


Run = Callable[..., ab.Integration]


class TestPairTimes:
    def test_ratio_and_order(self) -> None:
        made = make_pair(0, 1.5)
        assert (made.ratio, made.is_a_first, made.is_equal) == (1.5, True, True)
        assert not make_pair(1, 1.5).is_a_first
        assert not make_pair(0, 1.5, tokens_sha256="other").is_equal

    @pytest.mark.parametrize("changes", [{"label": "code"}, {"pair": 3}])
    def test_both_legs_belong_to_one_round(self, changes: dict[str, Any]) -> None:
        with pytest.raises(EvidenceError, match="one input and one pair"):
            make_pair(0, 1.5, **changes)

    @pytest.mark.parametrize("start", [0, 1499])
    def test_legs_at_the_same_time_are_no_round(self, start: int) -> None:
        with pytest.raises(EvidenceError, match="do not overlap"):
            make_pair(0, 1.5, start_ns=start)


class TestIntegrate:
    def test_accepted(self, run: Run, ledger: Ledger, tmp_path: Path) -> None:
        done = run(playing([1.1] * 8))
        assert done.status == "complete"
        assert done.decision == decide([1.1] * 8)
        folder = tmp_path / "ab"
        assert read_integration(folder) == done
        assert check_seal(folder) == []
        (row,) = ledger.read().rows
        assert check_run(row).state == "sealed"
        assert replace(row, id=None, seal="") == LedgerRow(
            time=STAMP.time, name="lookup", kind="integrate", status="keep", run=str(folder), seal="",
            quality="exact", claim="bitwise", flags=("data_dependent", "counters_unverified"),
            reasons=(f"against stock: {done.decision.why}",), speedup=row.speedup, diverse_speedup=1.25,
            interval=row.interval, argv=("integrate", "lookup"),
        )  # fmt: skip
        assert row.speedup == pytest.approx(1.1)
        assert row.interval == pytest.approx((1.1, 1.1))

    def test_the_document(self, run: Run, tmp_path: Path) -> None:
        run(playing([1.1] * 7 + [0.9]))
        text = (tmp_path / "ab" / INTEGRATION).read_text()
        document = json.loads(text)
        assert text == canonical(document) + "\n"
        assert set(document["decision"]) == {
            "accepted", "win_rate", "gain", "interval", "num_rounds", "why",
        }  # fmt: skip
        assert [round_["a"]["duration_ns"] for round_ in document["rounds"]] == [1100] * 7 + [900]
        assert {round_["b"]["duration_ns"] for round_ in document["rounds"]} == {1000}
        assert document["rule"] == {
            "min_win_rate": 0.8, "min_gain": 0.01, "num_resamples": 10000, "seed": 0,
        }  # fmt: skip
        named = (
            "kind", "status", "candidate", "base", "evaluation", "data_dependent", "benchmark_speedup",
            "diverse_speedup", "quality", "num_planned", "time", "argv", "format_version",
        )  # fmt: skip
        assert [document[name] for name in named] == [
            "integrate", "complete", "lookup", "stock", "abcd1234", True, 1.5, 1.25, "exact", 8, STAMP.time,
            ["integrate", "lookup"], FORMAT_VERSION,
        ]  # fmt: skip
        assert document["machine"]["cpu"] == "c"

    def test_declined(self, run: Run, ledger: Ledger) -> None:
        done = run(playing([1.0] * 8))
        assert done.decision is not None
        assert not done.decision.accepted
        (row,) = ledger.read().rows
        assert (row.status, row.speedup, row.verdict) == ("discard", 1.0, "discard (data-dependent)")

    def test_a_uniform_candidate_carries_no_label(self, run: Run, ledger: Ledger) -> None:
        done = run(playing([2.0] * 8), choice=Choice(row=replace(ROW, flags=()), base=None))
        assert not done.data_dependent
        assert ledger.read().rows[0].verdict == "keep"

    def test_the_rule_given_decides(self, run: Run) -> None:
        done = run(playing([1.1] * 8), rule=AbRule(min_gain=0.5))
        assert done.decision is not None
        assert not done.decision.accepted
        assert done.rule.min_gain == 0.5

    def test_as_many_rounds_as_asked_for(self, run: Run) -> None:
        asked: list[int] = []

        def run_pair(number: int) -> PairTimes:
            asked.append(number)
            return make_pair(number, 1.2)

        done = run(run_pair, 11)
        assert asked == list(range(11))
        assert done.decision is not None
        assert done.decision.num_rounds == 11

    def test_too_few_rounds_touch_nothing(self, run: Run, ledger: Ledger, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="8 rounds or more, got 7"):
            run(playing([2.0] * 7), 7)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("name", ["run.json", "seal.json", INTEGRATION])
    def test_a_folder_in_use_is_refused(self, name: str, run: Run, ledger: Ledger, tmp_path: Path) -> None:
        (tmp_path / "ab").mkdir()
        (tmp_path / "ab" / name).write_text("x")
        with pytest.raises(UsageError, match=f"holds another run.*{name}"):
            run(playing([2.0] * 8))
        assert (tmp_path / "ab" / name).read_text() == "x"
        assert not ledger.path.exists()

    def test_the_record_is_whole_after_every_round(self, run: Run, tmp_path: Path) -> None:
        def run_pair(number: int) -> PairTimes:
            so_far = read_integration(tmp_path / "ab")
            assert (so_far.status, len(so_far.rounds), so_far.decision) == ("running", number, None)
            return make_pair(number, 1.2)

        assert len(run(run_pair).rounds) == 8

    @pytest.mark.parametrize("after", [0, 3, 9])
    def test_an_interrupt_keeps_the_rounds_and_decides_nothing(
        self, after: int, run: Run, ledger: Ledger, tmp_path: Path
    ) -> None:
        done = run(raising(KeyboardInterrupt(), after), 10)
        assert (done.status, len(done.rounds), done.decision) == ("interrupted", after, None)
        assert read_integration(tmp_path / "ab") == done
        (row,) = ledger.read().rows
        assert (row.status, row.speedup) == ("void", None)
        assert row.reasons == (f"against stock: interrupted after {after} rounds",)
        assert check_run(row).state == "sealed"

    def test_an_interrupt_after_the_last_round_changes_nothing(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, calls = ab.write_atomic, [0]

        def write(path: Path, text: str) -> None:
            real(path, text)
            calls[0] += 1
            if calls[0] == 9:  # the first before any round, the ninth after the eighth
                raise KeyboardInterrupt

        monkeypatch.setattr(ab, "write_atomic", write)
        assert run(playing([1.2] * 8)).status == "complete"

    def test_an_arm_that_dies(self, run: Run, ledger: Ledger, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="the engine worker died"):
            run(raising(UsageError("the engine worker died"), 2))
        done = read_integration(tmp_path / "ab")
        assert (done.status, len(done.rounds)) == ("failed: the engine worker died", 2)
        (row,) = ledger.read().rows
        assert row.status == "void"
        assert "the engine worker died" in row.reasons[0]

    def test_arms_that_do_not_take_turns(self, run: Run, ledger: Ledger, tmp_path: Path) -> None:
        with pytest.raises(EvidenceError, match="take turns"):
            run(lambda number: make_pair(number, 2.0, is_a_first=True))
        assert len(read_integration(tmp_path / "ab").rounds) == 1
        assert ledger.read().rows[0].status == "void"

    def test_either_may_begin(self, run: Run) -> None:
        done = run(lambda number: make_pair(number, 2.0, is_a_first=number % 2 == 1))
        assert done.status == "complete"

    @pytest.mark.parametrize("wrong", [0, 5, 7])
    def test_another_output_ends_an_exact_ab(self, wrong: int, run: Run, ledger: Ledger) -> None:
        def run_pair(number: int) -> PairTimes:
            return make_pair(number, 2.0, tokens_sha256="other" if number == wrong else "same")

        done = run(run_pair)
        assert done.status == f"failed: round {wrong}: the output of lookup is not that of stock"
        assert (len(done.rounds), done.decision) == (wrong + 1, None)
        (row,) = ledger.read().rows
        assert (row.status, row.speedup, row.diverse_speedup) == ("fail", None, None)

    def test_another_output_is_allowed_where_quality_was_judged(self, run: Run, ledger: Ledger) -> None:
        choice = Choice(row=replace(ROW, quality="relaxed"), base=None)
        done = run(lambda number: make_pair(number, 2.0, tokens_sha256="other"), choice=choice)
        assert done.decision is not None
        assert done.decision.accepted
        assert ledger.read().rows[0].quality == "relaxed"


class TestRead:
    def test_a_newer_format_is_refused(self, run: Run, tmp_path: Path) -> None:
        run(playing([2.0] * 8))
        path = tmp_path / "ab" / INTEGRATION
        document = json.loads(path.read_text())
        path.write_text(json.dumps(document | {"format_version": FORMAT_VERSION + 1}))
        with pytest.raises(EvidenceError, match="is newer than"):
            read_integration(tmp_path / "ab")

    @pytest.mark.parametrize("change", [{"decision": None}, {"status": "interrupted"}])
    def test_a_decision_belongs_to_a_complete_ab(
        self, change: dict[str, Any], run: Run, tmp_path: Path
    ) -> None:
        run(playing([2.0] * 8))
        path = tmp_path / "ab" / INTEGRATION
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(EvidenceError, match="complete A/B has a decision"):
            read_integration(tmp_path / "ab")


OTHER = replace(ROW, name="suffix")
IN_OTHER = replace(OTHER, kind="integrate", time="2026-07-29T11:30:00")


class TestChoose:
    def test_against_stock(self) -> None:
        made = choose([OTHER, ROW], "lookup")
        assert (made.row, made.base, made.base_name) == (ROW, None, "stock")

    def test_against_what_is_integrated(self) -> None:
        newer = replace(OTHER, speedup=1.7)
        made = choose([OTHER, IN_OTHER, newer, ROW], "lookup")
        assert (made.row, made.base, made.base_name) == (ROW, newer, "suffix")

    def test_the_latest_evaluation_counts(self) -> None:
        later = replace(ROW, speedup=1.1)
        assert choose([ROW, later], "lookup").row == later

    def test_a_declined_candidate_may_try_again(self) -> None:
        declined = replace(ROW, kind="integrate", status="discard", reasons=("slow",))
        assert choose([ROW, declined], "lookup").row == ROW

    @pytest.mark.parametrize(
        ("rows", "name", "message"),
        [
            ([ROW], "lokup", "did you mean 'lookup'"),
            ([ROW], "xyz", "evaluate it first"),
            ([], "lookup", "no candidate 'lookup'"),
            ([ROW, replace(ROW, status="discard", reasons=("0.97x",))], "lookup", r"discard \(0\.97x\)"),
            ([OTHER, IN_OTHER], "suffix", "integrated already"),
            ([IN_OTHER, ROW], "lookup", "no evaluation to rebuild"),
        ],
    )
    def test_refusals(self, rows: list[LedgerRow], name: str, message: str) -> None:
        with pytest.raises(UsageError, match=message):
            choose(rows, name)
