"""A bench over fake workers: what is measured, compared, withheld and written, also when it is cut short."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof.bench import run as runs
from draftproof.bench.run import BenchSettings, run_bench
from draftproof.decode import Decoding, plain_decode, speculate
from draftproof.depth import FixedDepth
from draftproof.drafters.suffix import SuffixAutomatonDrafter
from draftproof.errors import EvidenceError, OptionError, PromptError, StorageError, UsageError
from draftproof.record import CostCurve, Leg, Plan, Round, Trace
from draftproof.rules import Rules, RuleSet
from draftproof.stats import paired_ratios, summarise
from draftproof.testing import FakeClock, TableTarget
from draftproof.wire import check_chain, check_version, decode, encode, tokens_sha256

TARGET = TableTarget(64, period=1)
PLAN = Plan(claim="bitwise", dtype="bfloat16", fingerprint="f" * 16, ops=(), max_rows=32)
CURVE = CostCurve(rows=(1, 2), contexts=(64,), seconds=((0.01, 0.011),))
SUITE = [
    {"label": "one", "prompt": "abcabcabc"},
    {"label": "two", "prompt": "hello there"},
    {"label": "three", "prompt": "zz"},
]
NUM_NEW = 20


class LetterTokenizer:
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(letter) % 64 for letter in text]


@dataclass
class FakeWorkers:
    """Both workers' behaviour: real serial and speculative decoding of a target without weights.

    ``tamper`` may change what an arm emits: it is called with the worker's kind, the request, the number
    of the decode over the whole bench (from 1, warm-up included) and the ids.
    """

    tamper: Callable[[str, dict[str, Any], int, list[int]], list[int]] = lambda kind, request, n, ids: ids
    settings: list[dict[str, Any]] = field(default_factory=list)
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    num_open: int = 0

    def __call__(self, settings: dict[str, Any]) -> FakeWorker:
        self.settings.append(settings)
        return FakeWorker(self, settings["kind"])


@dataclass
class FakeWorker:
    all: FakeWorkers
    kind: str
    machine: dict[str, Any] = field(default_factory=lambda: {"cpu": "fake"})

    def __enter__(self) -> FakeWorker:
        self.all.num_open += 1
        return self

    def __exit__(self, *_: object) -> None:
        self.all.num_open -= 1

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.all.requests.append((self.kind, request))
        trace = decode_table(request)
        ids = self.all.tamper(self.kind, request, len(self.all.requests), list(trace.token_ids))
        if ids != list(trace.token_ids):
            trace = as_trace(trace.num_prompt, ids)
        reply = {"token_ids": ids, "peak_bytes": 5000 if self.kind == "stock" else 3000}
        return dict(as_json(reply if self.kind == "stock" else {**reply, "trace": encode(trace)}))


def as_json(value: Any) -> Any:
    """As it comes back from a file or a pipe: tuples are lists."""
    return json.loads(json.dumps(value))


def decode_table(request: dict[str, Any]) -> Trace:
    ids, max_new = request["prompt_ids"], request["max_new_tokens"]
    rules = Rules(RuleSet(max_new_tokens=max_new), ids, torch.device("cpu"))
    session = TARGET.open(len(ids) + max_new + 40)
    run = Decoding(session=session, rules=rules, clock=FakeClock(), max_rows=32)
    if request["drafter"] in (None, "none"):
        rounds = tuple(plain_decode(run, ids))
    else:
        rounds = tuple(speculate(run, ids, SuffixAutomatonDrafter(), FixedDepth(4)))
    return Trace(num_prompt=len(ids), prefill_ns=1, rounds=rounds)


def as_trace(num_prompt: int, ids: Sequence[int]) -> Trace:
    rounds = tuple(
        Round(
            index=i, position=num_prompt + i, source="none", num_offered=0, num_drafted=0, num_accepted=0,
            emitted=(token,),
        )
        for i, token in enumerate(ids)
    )  # fmt: skip
    return Trace(num_prompt=num_prompt, prefill_ns=1, rounds=rounds)


@dataclass
class Bench:
    """Runs benches into a folder of their own."""

    folder: Path
    suite: Path
    workers: FakeWorkers = field(default_factory=FakeWorkers)
    loads: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    stages: list[tuple[str, int, int]] = field(default_factory=list)

    def __call__(self, **changes: Any) -> dict[str, Any]:
        settings = BenchSettings(
            **{
                "model": "tiny", "suite": str(self.suite), "pairs": 2, "max_new_tokens": NUM_NEW,
                "prompt_len": 40, **changes,
            }
        )  # fmt: skip
        return run_bench(settings, self.folder, lambda *stage: self.stages.append(stage))

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    @property
    def document(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "run.json").read_text()))

    def check_files(self) -> None:
        """Every file parses, holds its own hashes, and speaks of the same legs."""
        legs = [decode(Leg, row) for row in self.rows("legs.jsonl")]
        tokens = self.rows("tokens.jsonl")
        assert [(t["label"], t["arm"], t["pair"]) for t in tokens] == [
            (leg.label, leg.arm, leg.pair) for leg in legs
        ]
        for leg, row in zip(legs, tokens, strict=True):
            assert leg.tokens_sha256 == tokens_sha256(row["token_ids"])
            assert leg.num_tokens == len(row["token_ids"])
        trace = self.rows("trace.jsonl")
        check_chain(trace)
        for leg, row in zip(legs, tokens, strict=True):
            mine = [t for t in trace if (t["label"], t["arm"], t["pair"]) == (leg.label, leg.arm, leg.pair)]
            emitted = [i for t in mine for i in t["emitted"]]
            assert emitted == ([] if leg.arm == "stock" else row["token_ids"])
        check_version(self.document)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    suite = tmp_path / "suite.jsonl"
    suite.write_text("\n".join(map(json.dumps, SUITE)))
    made = Bench(folder=tmp_path / "run", suite=suite)

    @dataclass
    class Loaded:
        plan: Plan = PLAN
        curve: CostCurve = CURVE

    def load(name: str, **options: Any) -> Loaded:
        made.loads.append((name, options))
        return Loaded()

    monkeypatch.setattr(runs, "Worker", lambda settings: made.workers(settings))  # noqa: PLW0108 - a test may replace it
    monkeypatch.setattr(runs.engines, "load", load)
    monkeypatch.setattr(runs, "resolve", lambda name, dtype, progress=None: tmp_path / "model")
    monkeypatch.setattr(runs, "load_tokenizer", lambda folder: LetterTokenizer())
    return made


def wrong_at(place: int, drafter: str | None, *, only: int | None = None) -> Callable[..., list[int]]:
    """Emit another token at ``place`` on the arm with ``drafter``; ``only`` on that decode of the bench."""

    def tamper(kind: str, request: dict[str, Any], number: int, ids: list[int]) -> list[int]:
        is_hit = request["drafter"] == drafter and (only is None or number == only)
        if is_hit and place < len(ids):
            ids[place] = (ids[place] + 1) % 64
        return ids

    return tamper


class TestMeasuring:
    def test_every_pair_of_every_input_has_one_leg_an_arm(self, bench: Bench) -> None:
        bench()
        legs = [decode(Leg, row) for row in bench.rows("legs.jsonl")]
        forth = ["stock", "serial", "auto"]
        assert [(leg.label, leg.pair, leg.arm) for leg in legs] == [
            (item["label"], pair, arm)
            for item in SUITE
            for pair, arms in ((0, forth), (1, forth[::-1]))
            for arm in arms
        ]
        assert [leg.order for leg in legs] == list(range(18))
        assert all(leg.num_tokens == NUM_NEW for leg in legs)
        assert [leg.peak_bytes for leg in legs] == [5000 if leg.arm == "stock" else 3000 for leg in legs]
        ends = [leg.start_ns + leg.duration_ns for leg in legs]
        assert all(end <= leg.start_ns for end, leg in zip(ends, legs[1:], strict=False))

    def test_every_arm_is_warmed_up_on_another_text(self, bench: Bench) -> None:
        bench(pairs=1, labels=("two",))
        warm, measured = bench.workers.requests[:3], bench.workers.requests[3:]
        prompt = LetterTokenizer().encode("hello there", add_special_tokens=False)
        assert [(kind, r["drafter"]) for kind, r in warm] == [
            ("stock", None), ("engine", "none"), ("engine", "auto"),
        ]  # fmt: skip
        assert [(kind, r["drafter"]) for kind, r in measured] == [(kind, r["drafter"]) for kind, r in warm]
        assert all(r["prompt_ids"] == prompt for _, r in measured)
        assert all(r["max_new_tokens"] == NUM_NEW for _, r in measured)
        assert all(r["prompt_ids"] != prompt and r["max_new_tokens"] <= 8 for _, r in warm)

    def test_settings_reach_both_workers_and_the_planning_load(self, bench: Bench, tmp_path: Path) -> None:
        bench(
            dtype="float32", device="cpu", claim="guarded", threads=3, draft_model="small", exit_layer=4,
            drafter="early_exit", depth=5, pairs=1,
        )  # fmt: skip
        stock, engine = bench.workers.settings
        assert (stock.pop("kind"), engine.pop("kind")) == ("stock", "engine")
        assert stock == engine
        assert engine == {
            "folder": str(tmp_path / "model"), "dtype": "float32", "device": "cpu", "claim": "guarded",
            "threads": 3, "draft_model": "small", "exit_layer": 4,
        }  # fmt: skip
        ((name, options),) = bench.loads
        assert name == str(tmp_path / "model")
        assert {k: options[k] for k in ("dtype", "device", "claim", "threads")} == {
            "dtype": "float32", "device": "cpu", "claim": "guarded", "threads": 3,
        }  # fmt: skip
        kinds = {(kind, r["drafter"], r["depth"]) for kind, r in bench.workers.requests}
        assert {(kind, d) for kind, d, _ in kinds} == {
            ("stock", None), ("engine", "none"), ("engine", "early_exit"),
        }  # fmt: skip
        assert {("engine", "early_exit", 5), ("engine", "none", "auto")} <= kinds

    def test_workers_are_left_whatever_happens(self, bench: Bench) -> None:
        bench()
        assert bench.workers.num_open == 0

        def fail(*_: Any) -> list[int]:
            raise UsageError("the engine worker died")

        bench.workers.tamper = fail
        with pytest.raises(UsageError):
            bench()
        assert bench.workers.num_open == 0

    def test_labels_choose_inputs_in_the_suites_order(self, bench: Bench) -> None:
        results = bench(labels=("three", "one"), pairs=1)
        assert [row["label"] for row in results["inputs"]] == ["one", "three"]

    def test_progress_counts_pairs(self, bench: Bench) -> None:
        bench()
        counted = [stage for stage in bench.stages if "pair" in stage[0]]
        names = [f"{item['label']}, pair {pair} of 2" for item in SUITE for pair in (1, 2)]
        assert counted == [(name, i, 6) for i, name in enumerate(names)]
        assert any("warm" in stage for stage, _, _ in bench.stages)


class TestRefusals:
    @pytest.mark.parametrize("pairs", [0, -1])
    def test_no_pairs(self, pairs: int) -> None:
        with pytest.raises(OptionError, match=f"got {pairs}"):
            BenchSettings(model="x", pairs=pairs)

    def test_the_serial_arm_is_no_drafter(self) -> None:
        with pytest.raises(OptionError, match="serial arm"):
            BenchSettings(model="x", drafter="none")

    @pytest.mark.parametrize("max_new_tokens", [0, -4])
    def test_no_new_tokens(self, max_new_tokens: int, bench: Bench) -> None:
        with pytest.raises(OptionError, match=f"got {max_new_tokens}"):
            bench(max_new_tokens=max_new_tokens)
        assert bench.workers.settings == []

    def test_an_unknown_label(self, bench: Bench) -> None:
        with pytest.raises(OptionError, match=r"'four'.*one, two, three"):
            bench(labels=("one", "four"))
        assert bench.workers.settings == []
        assert bench.loads == []

    def test_a_suite_that_is_not_there(self, bench: Bench, tmp_path: Path) -> None:
        with pytest.raises(PromptError, match="no suite file"):
            bench(suite=str(tmp_path / "none.jsonl"))
        assert bench.loads == []

    def test_a_prompt_length_the_request_does_not_fit(self, bench: Bench) -> None:
        with pytest.raises(PromptError, match="prompt length is 3"):
            bench(suite="diverse", prompt_len=3)

    def test_a_run_folder_that_cannot_be_written(self, bench: Bench) -> None:
        bench.folder.write_text("a file is in the way")
        with pytest.raises(StorageError):
            bench()


class TestResults:
    def test_hold_the_medians_over_inputs_of_medians_over_pairs(self, bench: Bench) -> None:
        results = bench(pairs=3)
        legs = [decode(Leg, row) for row in bench.rows("legs.jsonl")]
        columns = {
            "speedup": ("auto", "stock"),
            "serial_speedup": ("serial", "stock"),
            "speculation_speedup": ("auto", "serial"),
        }
        for name, (arm, base) in columns.items():
            medians = []
            for row in results["inputs"]:
                ratios = [
                    time_of(legs, row["label"], base, pair) / time_of(legs, row["label"], arm, pair)
                    for pair in range(3)
                ]
                assert row[name]["median"] == statistics.median(ratios)
                assert (row[name]["low"], row[name]["high"]) == (min(ratios), max(ratios))
                assert row[name]["num_pairs"] == 3
                medians.append(statistics.median(ratios))
            assert results[name]["median"] == statistics.median(medians)
            assert results[name]["num_pairs"] == 3
        slowest = min(results["inputs"], key=lambda row: row["speedup"]["median"])
        assert results["worst_input"] == slowest["label"]

    def test_can_be_recomputed_from_the_raw_legs(self, bench: Bench) -> None:
        results = bench()
        legs = [decode(Leg, row) for row in bench.rows("legs.jsonl")]
        for row in results["inputs"]:
            again = asdict(summarise(paired_ratios(legs, row["label"], "auto")))
            assert row["speedup"] == again
        medians = [row["speedup"]["median"] for row in results["inputs"]]
        assert results["speedup"] == asdict(summarise(medians))

    def test_count_what_was_compared(self, bench: Bench) -> None:
        results = bench()
        assert results["num_checked_tokens"] == 3 * 2 * 2 * NUM_NEW
        assert results["num_mismatched_tokens"] == 0
        assert [row["num_tokens"] for row in results["inputs"]] == [NUM_NEW] * 3
        assert [row["num_checked_tokens"] for row in results["inputs"]] == [2 * 2 * NUM_NEW] * 3
        assert [row["first_difference"] for row in results["inputs"]] == [None] * 3

    def test_counters_come_from_the_engines_own_trace(self, bench: Bench) -> None:
        results = bench()
        row = results["inputs"][0]
        trace = decode_table({"prompt_ids": [ord(c) % 64 for c in "abcabcabc"], "max_new_tokens": NUM_NEW,
                              "drafter": "auto"})  # fmt: skip
        drafted = [r for r in trace.rounds if r.num_drafted]
        assert drafted
        assert row["decode_stats"]["verifies"] == len(drafted)
        assert row["tokens_per_verify"] == sum(len(r.emitted) for r in drafted) / len(drafted)
        assert row["tokens_per_step"] == (NUM_NEW - 1) / (len(trace.rounds) - 1)

    def test_say_what_was_run(self, bench: Bench) -> None:
        results = bench(drafter="suffix")
        assert (results["model"], results["dtype"], results["arm"]) == ("tiny", "bfloat16", "suffix")
        assert (results["claim"], results["status"]) == ("bitwise", "complete")
        assert results["peak_bytes"] == {"stock": 5000, "engine": 3000}


def time_of(legs: Sequence[Leg], label: str, arm: str, pair: int) -> int:
    (leg,) = [x for x in legs if (x.label, x.arm, x.pair) == (label, arm, pair)]
    return leg.duration_ns


SPEEDS = ("speedup", "serial_speedup", "speculation_speedup")


class TestWithholding:
    @pytest.mark.parametrize(("drafter", "num_wrong"), [("auto", 2), ("none", 2)])
    def test_one_wrong_token_withholds_every_speed(self, drafter: str, num_wrong: int, bench: Bench) -> None:
        bench.workers.tamper = wrong_at(12, drafter)
        results = bench(labels=("two",))
        (row,) = results["inputs"]
        assert row["num_mismatched_tokens"] == results["num_mismatched_tokens"] == num_wrong
        assert row["first_difference"] == 12
        assert [row[name] for name in SPEEDS] == [None] * 3
        assert [results[name] for name in (*SPEEDS, "worst_input")] == [None] * 4
        assert results["status"] == "complete"
        bench.check_files()
        assert bench.document["results"] == as_json(results)

    def test_one_leg_of_one_input_is_enough(self, bench: Bench) -> None:
        # Three warm-ups, six legs of the first input, then: stock, serial, auto | auto of the second.
        bench.workers.tamper = wrong_at(19, "auto", only=13)
        results = bench()
        assert [row["num_mismatched_tokens"] for row in results["inputs"]] == [0, 1, 0]
        assert [row["first_difference"] for row in results["inputs"]] == [None, 19, None]
        assert [results[name] for name in (*SPEEDS, "worst_input")] == [None] * 4
        assert results["inputs"][1]["speedup"] is None

    def test_the_first_difference_is_the_first_of_any_leg(self, bench: Bench) -> None:
        def tamper(kind: str, request: dict[str, Any], n: int, ids: list[int]) -> list[int]:
            for place, drafter in ((5, "auto"), (9, "none")):
                ids = wrong_at(place, drafter)(kind, request, n, ids)
            return ids

        bench.workers.tamper = tamper
        results = bench(labels=("one",), pairs=1)
        assert results["inputs"][0]["first_difference"] == 5
        assert results["num_mismatched_tokens"] == 2

    def test_a_shorter_output_differs_where_it_ends(self, bench: Bench) -> None:
        bench.workers.tamper = lambda kind, request, n, ids: ids[:15] if request["drafter"] == "auto" else ids
        results = bench(labels=("one",), pairs=1)
        assert results["num_mismatched_tokens"] == NUM_NEW - 15
        assert results["inputs"][0]["first_difference"] == 15
        assert results["speedup"] is None

    def test_a_longer_output_differs_too(self, bench: Bench) -> None:
        bench.workers.tamper = lambda kind, request, n, ids: ids[:15] if kind == "stock" else ids
        results = bench(labels=("one",), pairs=1)
        assert results["num_mismatched_tokens"] == 2 * (NUM_NEW - 15)
        assert results["speedup"] is None

    def test_a_stock_that_contradicts_itself_withholds_too(self, bench: Bench) -> None:
        bench.workers.tamper = wrong_at(3, None, only=9)  # the second pair's stock leg comes last
        results = bench(labels=("one",))
        assert results["num_mismatched_tokens"] == 1
        assert results["inputs"][0]["first_difference"] == 3
        assert results["speedup"] is None

    def test_a_wrong_warm_up_is_no_leg(self, bench: Bench) -> None:
        bench.workers.tamper = wrong_at(0, "auto", only=3)
        assert bench(labels=("one",))["num_mismatched_tokens"] == 0


class TestFiles:
    def test_the_run_folder_is_whole(self, bench: Bench) -> None:
        results = bench()
        assert {path.name for path in bench.folder.iterdir()} == {
            "run.json", "legs.jsonl", "trace.jsonl", "tokens.jsonl",
        }  # fmt: skip
        bench.check_files()
        document = bench.document
        assert document["results"] == as_json(results)
        assert document["kind"] == "bench"
        assert document["machine"] == {"cpu": "fake"}
        assert decode(Plan, document["plan"]) == PLAN
        assert decode(CostCurve, document["cost_curve"]) == CURVE
        assert document["request"]["suite"] == str(bench.suite)
        settings = BenchSettings(
            model="tiny", suite=str(bench.suite), pairs=2, max_new_tokens=NUM_NEW, prompt_len=40
        )
        assert document["request"] == as_json(asdict(settings))

    def test_an_edited_trace_is_found(self, bench: Bench) -> None:
        bench()
        rows = bench.rows("trace.jsonl")
        for changed in (rows[:3] + rows[4:], [*rows[:5], {**rows[5], "num_accepted": 9}, *rows[6:]]):
            with pytest.raises(EvidenceError, match="hash chain"):
                check_chain(changed)

    def test_files_are_written_after_every_input(self, bench: Bench) -> None:
        seen: list[int] = []

        def look(kind: str, request: dict[str, Any], number: int, ids: list[int]) -> list[int]:
            if (bench.folder / "run.json").exists():
                seen.append(len(bench.rows("legs.jsonl")))
                bench.check_files()
                # A process killed now leaves these files behind.
                assert bench.document["results"]["status"] != "complete"
            else:
                seen.append(0)
            return ids

        bench.workers.tamper = look
        bench()
        assert seen == [0] * 3 + [0] * 6 + [6] * 6 + [12] * 6


class TestCutShort:
    def interrupt_at(self, number: int, error: BaseException) -> Callable[..., list[int]]:
        def tamper(kind: str, request: dict[str, Any], n: int, ids: list[int]) -> list[int]:
            if n == number:
                raise error
            return ids

        return tamper

    @pytest.mark.parametrize(("number", "num_legs"), [(5, 0), (7, 3), (9, 3), (10, 6), (14, 9), (21, 15)])
    def test_an_interrupt_keeps_the_whole_pairs(self, number: int, num_legs: int, bench: Bench) -> None:
        bench.workers.tamper = self.interrupt_at(number, KeyboardInterrupt())
        results = bench()
        assert results["status"] == "interrupted"
        assert len(bench.rows("legs.jsonl")) == num_legs
        bench.check_files()
        assert bench.document["results"] == as_json(results)
        assert results["num_checked_tokens"] == num_legs // 3 * 2 * NUM_NEW
        assert results["num_mismatched_tokens"] == 0
        assert (results["speedup"] is None) == (num_legs == 0)
        assert bench.workers.num_open == 0

    def test_an_interrupt_while_warming_up_measures_nothing(self, bench: Bench) -> None:
        bench.workers.tamper = self.interrupt_at(2, KeyboardInterrupt())
        results = bench()
        assert (results["status"], results["inputs"], results["speedup"]) == ("interrupted", [], None)
        bench.check_files()

    def test_a_worker_that_dies_keeps_the_inputs_before(self, bench: Bench) -> None:
        bench.workers.tamper = self.interrupt_at(11, UsageError("the engine worker died (exit code -9)"))
        with pytest.raises(UsageError, match="died"):
            bench()
        assert len(bench.rows("legs.jsonl")) == 6
        bench.check_files()
        assert [row["label"] for row in bench.document["results"]["inputs"]] == ["one"]
        assert bench.document["results"]["status"] != "complete"


def test_the_trace_a_worker_sends_is_checked(bench: Bench) -> None:
    class Lying(FakeWorkers):
        def __call__(self, settings: dict[str, Any]) -> FakeWorker:
            worker = super().__call__(settings)
            ask = worker.ask

            def lie(request: dict[str, Any]) -> dict[str, Any]:
                reply = ask(request)
                if "trace" in reply:
                    reply["trace"]["rounds"][2]["num_accepted"] = 9
                return reply

            worker.ask = lie  # type: ignore[method-assign]
            return worker

    bench.workers = Lying()
    with pytest.raises(EvidenceError):
        bench(pairs=1)


def test_a_records_own_invariants_hold_for_the_fake(bench: Bench) -> None:
    """The fake decodes with speculation, or the tests above would say little."""
    trace = decode_table({"prompt_ids": [1, 2, 1, 2], "max_new_tokens": 30, "drafter": "auto"})
    plain = decode_table({"prompt_ids": [1, 2, 1, 2], "max_new_tokens": 30, "drafter": None})
    assert trace.token_ids == plain.token_ids
    assert sum(r.num_accepted for r in trace.rounds) > 5
    assert replace(trace, prefill_ns=0).num_prompt == 4
