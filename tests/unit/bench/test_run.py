"""A bench over fake workers: what is measured, compared, withheld and written, also when it is cut short."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof import folder as folders
from draftproof import results as figures
from draftproof.bench import run as runs
from draftproof.bench import station as stations
from draftproof.bench.run import BenchSettings, pieces, run_bench
from draftproof.consistency import hand_problems, record_problems
from draftproof.decode import Decoding, plain_decode, speculate
from draftproof.depth import FixedDepth
from draftproof.drafters.suffix import SuffixAutomatonDrafter
from draftproof.errors import EvidenceError, OptionError, PromptError, StorageError, UsageError
from draftproof.folder import Decode, Evidence, check_seal, read_run
from draftproof.machine import describe
from draftproof.models.load import load_tokenizer
from draftproof.record import CostCurve, Counters, Leg, MemoryFloor, Plan, Round, Trace
from draftproof.rules import Rules, RuleSet
from draftproof.stats import decode_stats
from draftproof.testing import FakeClock, TableTarget
from draftproof.wire import encode

TARGET = TableTarget(64, period=1)
PLAN = Plan(claim="bitwise", dtype="bfloat16", fingerprint="f" * 16, ops=(), max_rows=32)
CURVE = CostCurve(rows=(1, 2), contexts=(64,), seconds=((0.01, 0.011),))
MACHINE = describe(torch.device("cpu"))
FLOOR = MemoryFloor(num_bytes=1000, bytes_per_second=1e9)
SUITE = [
    {"label": "one", "prompt": "abcabcabc"},
    {"label": "two", "prompt": "hello there"},
    {"label": "three", "prompt": "zz"},
]
NUM_NEW = 20
# A forward of stock takes twice one of the engine; a prompt takes nothing.
STOCK_NS, ENGINE_NS = 2_000_000, 1_000_000


class LetterTokenizer:
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(letter) % 64 for letter in text]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(64 + i) for i in ids)


@dataclass
class FakeWorkers:
    """Both workers' behaviour: real serial and speculative decoding of a target without weights.

    ``tamper`` may change what an arm emits: it is called with the worker's kind, the request, the number
    of the decode over the whole bench (from 1, warm-up included) and the ids. ``clock`` times the legs.
    """

    clock: FakeClock = field(default_factory=lambda: FakeClock(1))
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
    machine: dict[str, Any] = field(default_factory=lambda: encode(MACHINE))

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
        steps = decode_stats(trace).steps
        self.all.clock.advance(steps * (STOCK_NS if self.kind == "stock" else ENGINE_NS))
        peak = {None: 5000, "none": 3000}.get(request["drafter"], 3400)
        reply = {"token_ids": ids, "peak_bytes": peak, "peak_cuda_bytes": None, "num_forwards": steps}
        return dict(as_json(reply if self.kind == "stock" else {**reply, "trace": encode(trace)}))


def as_json(value: Any) -> Any:
    """As it comes back from a file or a pipe: tuples are lists."""
    return json.loads(json.dumps(value))


def decode_table(request: dict[str, Any]) -> Trace:
    ids, max_new = request["prompt_ids"], request["max_new_tokens"]
    rules = Rules(RuleSet(max_new_tokens=max_new), ids, torch.device("cpu"))
    session = TARGET.open(len(ids) + max_new + 40)
    run = Decoding(session=session, rules=rules, clock=FakeClock(), max_rows=32)
    if request["drafter"] in (None, "none", "stock"):
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
    """Runs benches into a folder of their own, and looks at the folder after every write."""

    folder: Path
    suite: Path
    workers: FakeWorkers = field(default_factory=FakeWorkers)
    loads: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    stages: list[tuple[str, int, int]] = field(default_factory=list)
    writes: list[tuple[str, int]] = field(default_factory=list)

    def __call__(self, *, resume: bool = False, **changes: Any) -> dict[str, Any]:
        settings = BenchSettings(
            **{
                "model": "tiny", "suite": str(self.suite), "pairs": 2, "max_new_tokens": NUM_NEW,
                "prompt_len": 40, **changes,
            }
        )  # fmt: skip
        return run_bench(settings, self.folder, lambda *stage: self.stages.append(stage), resume=resume)

    def write(self, folder: Path, evidence: Evidence, results: dict[str, Any]) -> None:
        """In the place of ``write_run``: what it wrote is whole, sealed, and reads back as it was."""
        folders.write_run(folder, evidence, results)
        self.writes.append((evidence.status, len(evidence.decodes)))
        assert check_seal(folder) == []
        assert read_run(folder) == (evidence, results)
        assert figures.compute(evidence) == results
        assert list(record_problems(evidence)) == []
        assert list(hand_problems(evidence, results)) == []

    def restart(self) -> None:
        """New processes that work, later on the same clock."""
        self.workers = FakeWorkers(clock=self.workers.clock)

    @property
    def evidence(self) -> Evidence:
        return read_run(self.folder)[0]

    @property
    def legs(self) -> list[Leg]:
        return [d.leg for d in self.evidence.decodes]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    suite = tmp_path / "suite.jsonl"
    suite.write_text("\n".join(map(json.dumps, SUITE)))
    made = Bench(folder=tmp_path / "run", suite=suite)

    class Weights:
        nbytes = 270
        max_context = 200

    @dataclass
    class Loaded:
        plan: Plan = PLAN
        curve: CostCurve = CURVE
        target: Any = field(default_factory=Weights)

    def load(name: str, **options: Any) -> Loaded:
        made.loads.append((name, options))
        return Loaded()

    def facts(model: Path, argv: Sequence[str]) -> dict[str, Any]:
        return {"weights": "w0", "argv": list(argv), "started": "2026-01-01T00:00:00+0000"}

    monkeypatch.setattr(stations, "Worker", lambda settings: made.workers(settings))  # noqa: PLW0108 - a test may replace it
    monkeypatch.setattr(stations, "RealClock", lambda: made.workers.clock)
    monkeypatch.setattr(runs.engines, "load", load)
    monkeypatch.setattr(runs, "resolve", lambda name, dtype, progress=None: tmp_path / "model")
    monkeypatch.setattr(runs, "load_tokenizer", lambda folder: LetterTokenizer())
    monkeypatch.setattr(runs, "provenance", facts)
    monkeypatch.setattr(runs, "write_run", made.write)
    monkeypatch.setattr(runs, "DecoderTarget", Weights)
    monkeypatch.setattr(runs, "describe", lambda device: MACHINE)
    monkeypatch.setattr(runs, "memory_floor", lambda size, device, clock: replace(FLOOR, num_bytes=size))
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
        legs = bench.legs
        forth = ["stock", "serial", "auto"]
        assert [(leg.label, leg.pair, leg.arm) for leg in legs] == [
            (item["label"], pair, arm)
            for item in SUITE
            for pair, arms in ((0, forth[::-1]), (1, forth))
            for arm in arms
        ]
        assert [leg.order for leg in legs] == list(range(18))
        assert all(leg.num_tokens == NUM_NEW for leg in legs)
        peaks = {"stock": 5000, "serial": 3000, "auto": 3400}
        assert [leg.peak_bytes for leg in legs] == [peaks[leg.arm] for leg in legs]
        assert {(leg.arm, leg.pair) for leg in legs if leg.is_first_seen} == {("stock", 0), ("auto", 0)}
        assert {leg.host for leg in legs} == {""}

    def test_every_arm_is_warmed_up_on_another_text(self, bench: Bench) -> None:
        bench(pairs=1, labels=("two",))
        warm, measured = bench.workers.requests[:3], bench.workers.requests[3:]
        prompt = LetterTokenizer().encode("hello there", add_special_tokens=False)
        assert [(kind, r["drafter"]) for kind, r in warm] == [
            ("stock", None), ("engine", "none"), ("engine", "auto"),
        ]  # fmt: skip
        assert [(kind, r["drafter"]) for kind, r in measured] == [
            ("engine", "auto"), ("engine", "none"), ("stock", None),
        ]  # fmt: skip
        assert all(r["prompt_ids"] == prompt for _, r in measured)
        assert all(r["max_new_tokens"] == NUM_NEW for _, r in measured)
        assert all(r["prompt_ids"] != prompt and r["max_new_tokens"] <= 8 for _, r in warm)

    def test_settings_reach_both_workers_and_the_planning_load(self, bench: Bench, tmp_path: Path) -> None:
        bench(
            dtype="float32", device="cpu", claim="guarded", threads=3, draft_model="small", exit_layer=4,
            shortlist="ids.json",
            drafter="early_exit", depth=5, pairs=1,
        )  # fmt: skip
        stock, engine = bench.workers.settings
        assert (stock.pop("kind"), engine.pop("kind")) == ("stock", "engine")
        assert stock == engine
        assert engine == {
            "folder": str(tmp_path / "model"), "dtype": "float32", "device": "cpu", "claim": "guarded",
            "threads": 3, "draft_model": "small", "exit_layer": 4,
            "head": None, "shortlist": "ids.json",
        }  # fmt: skip
        ((name, options),) = bench.loads
        assert name == str(tmp_path / "model")
        assert {k: options[k] for k in ("dtype", "device", "claim", "threads")} == {
            "dtype": "float32", "device": "cpu", "claim": "guarded", "threads": 3,
        }  # fmt: skip
        kinds = {(kind, r["drafter"], r["depth"]) for kind, r in bench.workers.requests}
        assert kinds == {("stock", None, None), ("engine", "none", "auto"), ("engine", "early_exit", 5)}

    @pytest.mark.parametrize(("stop", "options"), [("natural", {}), ("fixed", {"min_new_tokens": NUM_NEW})])
    def test_a_fixed_length_masks_the_end_in_every_arm(
        self, stop: str, options: dict[str, Any], bench: Bench
    ) -> None:
        bench(stop=stop, pairs=1)
        warm = dict.fromkeys(options, 8)  # no more can be asked of a warm-up
        assert [r["options"] for _, r in bench.workers.requests] == [warm] * 3 + [options] * 9
        assert bench.evidence.request["stop"] == stop

    def test_a_chat_template_is_used_where_there_is_one_unless_told(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[bool] = []

        def build(item: Any, tokenizer: Any, length: int, *, chat: bool) -> list[int]:
            asked.append(chat)
            return [1, 2, 3]

        monkeypatch.setattr(runs, "build_prompt", build)
        for template in (None, "{{ messages }}"):
            monkeypatch.setattr(LetterTokenizer, "chat_template", template)
            for chat in (None, False, True):
                bench(labels=("one",), pairs=1, chat=chat)
        assert asked == [False, False, True, True, False, True]

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
        assert bench.evidence.roles == {"one": "diverse", "three": "diverse"}

    def test_progress_counts_pairs(self, bench: Bench) -> None:
        bench()
        counted = [stage for stage in bench.stages if "pair" in stage[0]]
        names = [f"{item['label']}, pair {pair}" for item in SUITE for pair in (1, 2)]
        assert counted == [(name, i, 6) for i, name in enumerate(names)]

    def test_another_place_gets_the_settings_and_yields_in_its_own_order(self, bench: Bench) -> None:
        """What a cluster does: pairs come back as they are done, with the name of the machine."""
        seen: list[Any] = []

        class Elsewhere(runs.Here):
            def run(self, items: Sequence[Any], announce: Any) -> Any:
                seen.append([(item.label, item.pair) for item in items])
                for item, decodes in super().run(list(reversed(items)), announce):
                    yield item, [replace(d, leg=replace(d.leg, host=f"node{item.pair}")) for d in decodes]

        def place(settings: stations.StationSettings, warm: Sequence[int]) -> Elsewhere:
            seen.append((settings.arm, settings.drafter, settings.max_new_tokens))
            return Elsewhere(settings, warm)

        settings = BenchSettings(
            model="tiny", suite=str(bench.suite), pairs=2, max_new_tokens=NUM_NEW, prompt_len=40
        )
        results = run_bench(settings, bench.folder, lambda *_: None, place=place)
        every = [(item["label"], pair) for item in SUITE for pair in (0, 1)]
        assert seen == [("auto", "auto", NUM_NEW), every]
        pairs = list(dict.fromkeys((leg.label, leg.pair) for leg in bench.legs))
        assert pairs == every[::-1]
        assert [leg.order for leg in bench.legs] == list(range(18))
        assert all(leg.host == f"node{leg.pair}" for leg in bench.legs)
        # The suite's order stays that of what is published.
        assert [row["label"] for row in results["inputs"]] == ["one", "two", "three"]


class TestRefusals:
    def test_a_prompt_beyond_the_context_before_any_process_starts(self, bench: Bench) -> None:
        bench(max_new_tokens=191, labels=("one",))
        bench.workers.settings.clear()
        with pytest.raises(PromptError, match=r"^one: 9 prompt tokens and 192 new ones exceed .* of 200;"):
            bench(max_new_tokens=192, labels=("one",))
        assert bench.workers.settings == []

    @pytest.mark.parametrize("pairs", [0, -1])
    def test_no_pairs(self, pairs: int) -> None:
        with pytest.raises(OptionError, match=f"got {pairs}"):
            BenchSettings(model="x", pairs=pairs)

    def test_the_serial_arm_is_no_drafter(self) -> None:
        with pytest.raises(OptionError, match="serial arm"):
            BenchSettings(model="x", drafter="none")
        with pytest.raises(OptionError, match="unknown drafter 'psychic'; known: none, auto"):
            BenchSettings(model="x", drafter="psychic")
        with pytest.raises(
            OptionError, match="--head does nothing with drafter 'lookup'; it is for mtp and auto"
        ):
            BenchSettings(model="x", drafter="lookup", head="folder")

    def test_a_depth_that_is_none(self) -> None:
        with pytest.raises(OptionError, match="a number or 'auto', got 'deep'"):
            BenchSettings(model="x", depth="deep")

    def test_a_stop_that_is_none(self) -> None:
        with pytest.raises(OptionError, match="natural or fixed, got 'maybe'"):
            BenchSettings(model="x", stop="maybe")

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
        assert bench.workers.num_open == 0


class TestResults:
    def test_hold_the_medians_over_inputs_of_medians_over_pairs(self, bench: Bench) -> None:
        results = bench(pairs=3)
        legs = bench.legs
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

    def test_split_the_speedup_as_the_fake_forwards_cost(self, bench: Bench) -> None:
        """A tick of the clock a leg is all that is not exact."""
        results = bench()
        assert results["serial_speedup"]["median"] == pytest.approx(2, rel=1e-6)
        for row in results["inputs"]:
            assert row["speculation_speedup"]["median"] == pytest.approx(row["tokens_per_step"], rel=1e-6)
            assert row["speedup"]["median"] == pytest.approx(2 * row["tokens_per_step"], rel=1e-6)
            assert row["first_seen_speedup"]["median"] == pytest.approx(row["speedup"]["median"], rel=1e-6)
        assert results["metrics"]["diverse"]["steps_vary"] is True
        assert results["flags"] == ["data_dependent"]

    def test_count_what_was_compared(self, bench: Bench) -> None:
        results = bench()
        assert results["num_checked_tokens"] == 3 * 2 * 2 * NUM_NEW
        assert results["num_mismatched_tokens"] == 0
        assert [row["num_tokens"] for row in results["inputs"]] == [NUM_NEW] * 3
        assert [row["num_checked_tokens"] for row in results["inputs"]] == [2 * 2 * NUM_NEW] * 3
        assert [row["first_difference"] for row in results["inputs"]] == [None] * 3

    def test_counters_come_from_the_engines_own_trace_and_agree_with_the_count(self, bench: Bench) -> None:
        results = bench()
        row = results["inputs"][0]
        trace = decode_table({"prompt_ids": [ord(c) % 64 for c in "abcabcabc"], "max_new_tokens": NUM_NEW,
                              "drafter": "auto"})  # fmt: skip
        drafted = [r for r in trace.rounds if r.num_drafted]
        assert drafted
        steps = len(trace.rounds) - 1
        assert row["decode_stats"]["verifies"] == len(drafted)
        assert row["decode_stats"]["tokens"] == NUM_NEW - 1
        assert row["tokens_per_step"] == (NUM_NEW - 1) / steps
        assert row["num_forwards"] == steps
        assert row["reconciled"] is True
        (leg,) = [x for x in bench.legs if (x.label, x.arm, x.pair) == ("one", "auto", 1)]
        assert leg.counters == Counters(
            steps=steps, verifies=len(drafted), drafted=sum(r.num_drafted for r in drafted),
            accepted=sum(r.num_accepted for r in drafted), tokens=NUM_NEW - 1,
        )  # fmt: skip

    def test_say_what_was_run(self, bench: Bench) -> None:
        results = bench(drafter="suffix")
        assert (results["model"], results["dtype"], results["arm"]) == ("tiny", "bfloat16", "suffix")
        assert (results["claim"], results["status"]) == ("bitwise", "complete")
        assert results["quality"] == "exact"
        assert results["peak_bytes"] == {"stock": 5000, "engine": 3400, "drafter": 400}
        assert results["peak_cuda_bytes"] is None


def time_of(legs: Sequence[Leg], label: str, arm: str, pair: int) -> int:
    (leg,) = [x for x in legs if (x.label, x.arm, x.pair) == (label, arm, pair)]
    return leg.duration_ns


class TestStockAgainstItself:
    def test_two_stock_processes_and_nothing_of_the_engine(self, bench: Bench) -> None:
        results = bench(drafter="stock", pairs=3)
        assert [settings["kind"] for settings in bench.workers.settings] == ["stock", "stock"]
        assert {r["drafter"] for _, r in bench.workers.requests[:2]} == {None, "stock"}
        evidence = bench.evidence
        assert (evidence.arm, evidence.plan, evidence.curve) == ("stock-again", None, None)
        assert [leg.arm for leg in bench.legs[:4]] == ["stock-again", "stock", "stock", "stock-again"]
        assert results["verdict"]["outcome"] == "tie"
        assert results["speedup"]["median"] == 1
        assert (results["claim"], results["cost"], results["serial_speedup"]) == (None, None, None)
        assert results["num_checked_tokens"] == 3 * 3 * NUM_NEW
        assert results["peak_bytes"]["drafter"] is None
        assert "data_dependent" not in results["flags"]


SPEEDS = ("speedup", "serial_speedup", "speculation_speedup")
OVER_INPUTS = (*SPEEDS, "worst_input", "best_input", "geometric_mean", "first_seen_speedup", "repeat_speedup",
               "cost")  # fmt: skip


class TestWithholding:
    @pytest.mark.parametrize(("drafter", "num_wrong"), [("auto", 2), ("none", 2)])
    def test_one_wrong_token_withholds_every_speed(self, drafter: str, num_wrong: int, bench: Bench) -> None:
        bench.workers.tamper = wrong_at(12, drafter)
        results = bench(labels=("two",))
        (row,) = results["inputs"]
        assert row["num_mismatched_tokens"] == results["num_mismatched_tokens"] == num_wrong
        assert row["first_difference"] == 12
        assert [row[name] for name in SPEEDS] == [None] * 3
        assert [results[name] for name in OVER_INPUTS] == [None] * 9
        assert results["metrics"]["diverse"] is None
        assert results["status"] == "complete"
        assert results["verdict"]["outcome"] == "fail"
        assert results["verdict"]["reasons"] == [
            f"two: token 12 is not stock's ({num_wrong} of its compared tokens differ)"
        ]

    def test_one_leg_of_one_input_is_enough(self, bench: Bench) -> None:
        # Three warm-ups, six legs of the first input, then: auto of the second.
        bench.workers.tamper = wrong_at(19, "auto", only=10)
        results = bench()
        assert [row["num_mismatched_tokens"] for row in results["inputs"]] == [0, 1, 0]
        assert [row["first_difference"] for row in results["inputs"]] == [None, 19, None]
        assert [results[name] for name in OVER_INPUTS] == [None] * 9
        assert [row["speedup"] for row in results["inputs"]] == [None] * 3

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
        assert results["verdict"]["reasons"] == ["one: 15 tokens where stock emits 20"]

    def test_a_longer_output_differs_too(self, bench: Bench) -> None:
        bench.workers.tamper = lambda kind, request, n, ids: ids[:15] if kind == "stock" else ids
        results = bench(labels=("one",), pairs=1)
        assert results["num_mismatched_tokens"] == 2 * (NUM_NEW - 15)
        assert results["speedup"] is None

    def test_a_stock_that_contradicts_itself_withholds_too(self, bench: Bench) -> None:
        bench.workers.tamper = wrong_at(3, None, only=7)  # the second pair's stock leg comes first
        results = bench(labels=("one",))
        assert results["num_mismatched_tokens"] == 1
        assert results["inputs"][0]["first_difference"] == 3
        assert results["speedup"] is None

    def test_a_wrong_warm_up_is_no_leg(self, bench: Bench) -> None:
        bench.workers.tamper = wrong_at(0, "auto", only=3)
        results = bench(labels=("one",))
        assert results["num_mismatched_tokens"] == 0
        assert results["speedup"] is not None

    def test_an_engine_that_counts_wrongly_is_found(self, bench: Bench) -> None:
        """Its trace says one thing, the sessions that were counted another."""
        made = bench.workers

        def lying(settings: dict[str, Any]) -> FakeWorker:
            worker = made(settings)
            ask = worker.ask

            def lie(request: dict[str, Any]) -> dict[str, Any]:
                reply = ask(request)
                return reply | {"num_forwards": reply["num_forwards"] + 2 * (request["drafter"] == "auto")}

            worker.ask = lie  # type: ignore[method-assign]
            return worker

        bench.workers = lying  # type: ignore[assignment]
        lying.clock = made.clock  # type: ignore[attr-defined]
        results = bench(labels=("one",))
        assert results["verdict"]["outcome"] == "fail"
        assert "the harness counted" in results["verdict"]["reasons"][0]
        assert results["inputs"][0]["reconciled"] is False
        assert results["speedup"] is None


class TestFiles:
    def test_the_run_folder_is_whole(self, bench: Bench) -> None:
        results = bench()
        assert {path.name for path in bench.folder.iterdir()} == {
            "run.json", "seal.json", "prompts.jsonl", "legs.jsonl", "tokens.jsonl", "trace.jsonl",
            "texts.jsonl", "gates.jsonl",
        }  # fmt: skip
        evidence, published = read_run(bench.folder)
        assert published == results == figures.compute(evidence)
        assert (evidence.kind, evidence.status, evidence.arm) == ("bench", "complete", "auto")
        assert (evidence.machine, evidence.plan, evidence.curve) == (MACHINE, PLAN, CURVE)
        assert evidence.floor == replace(FLOOR, num_bytes=270)
        settings = BenchSettings(
            model="tiny", suite=str(bench.suite), pairs=2, max_new_tokens=NUM_NEW, prompt_len=40
        )
        assert evidence.request == as_json(asdict(settings)) | {"quality": "exact"}
        assert evidence.provenance["weights"] == "w0"
        encoded = [(item["label"], item["prompt"]) for item in SUITE]
        assert evidence.prompts == {
            label: tuple(LetterTokenizer().encode(text, add_special_tokens=False)) for label, text in encoded
        }

    def test_texts_are_the_prompt_and_one_piece_a_token(self, bench: Bench) -> None:
        bench(labels=("one",))
        text = bench.evidence.texts["one"]
        (first, *_) = bench.evidence.of("one", "auto")
        assert text["prompt"] == "abcabcabc"
        assert text["pieces"] == [chr(64 + token) for token in first.token_ids]

    def test_files_are_written_after_every_input(self, bench: Bench) -> None:
        bench()
        assert bench.writes == [("running", 6), ("running", 12), ("running", 18), ("complete", 18)]

    def test_an_edit_is_found(self, bench: Bench) -> None:
        bench()
        path = bench.folder / "trace.jsonl"
        lines = path.read_text().splitlines()
        for changed in (lines[:3] + lines[4:], [*lines[:5], lines[5].replace(":1", ":2"), *lines[6:]]):
            assert changed != lines
            path.write_text("\n".join(changed) + "\n")
            with pytest.raises(EvidenceError, match="hash chain"):
                read_run(bench.folder)
            assert check_seal(bench.folder) == ["trace.jsonl was changed"]


def stop_at(number: int, error: BaseException) -> Callable[..., list[int]]:
    def tamper(kind: str, request: dict[str, Any], n: int, ids: list[int]) -> list[int]:
        if n == number:
            raise error
        return ids

    return tamper


class TestCutShort:
    @pytest.mark.parametrize(("number", "num_legs"), [(5, 0), (7, 3), (9, 3), (10, 6), (14, 9), (21, 15)])
    def test_an_interrupt_keeps_the_whole_pairs(self, number: int, num_legs: int, bench: Bench) -> None:
        bench.workers.tamper = stop_at(number, KeyboardInterrupt())
        results = bench()
        assert results["status"] == "interrupted"
        assert len(bench.legs) == num_legs
        assert bench.writes[-1] == ("interrupted", num_legs)
        assert results["num_checked_tokens"] == num_legs // 3 * 2 * NUM_NEW
        assert results["num_mismatched_tokens"] == 0
        assert (results["speedup"] is None) == (num_legs == 0)
        assert bench.workers.num_open == 0
        if not num_legs:
            assert results["inputs"] == []
            assert results["verdict"]["reasons"] == ["nothing was measured"]

    def test_an_interrupt_while_warming_up_writes_nothing(self, bench: Bench) -> None:
        bench.workers.tamper = stop_at(2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            bench()
        assert bench.writes == []
        assert not bench.folder.exists()
        assert bench.workers.num_open == 0

    def test_a_worker_that_dies_keeps_the_pairs_before_and_says_why(self, bench: Bench) -> None:
        bench.workers.tamper = stop_at(11, UsageError("the engine worker died (exit code -9)"))
        with pytest.raises(UsageError, match="died"):
            bench()
        evidence, results = read_run(bench.folder)
        assert len(evidence.decodes) == 6
        assert evidence.status == "failed: the engine worker died (exit code -9)"
        assert [row["label"] for row in results["inputs"]] == ["one"]
        assert results["speedup"] is None
        assert results["verdict"] == {
            "outcome": "fail", "reasons": ["failed: the engine worker died (exit code -9)"], "notes": [],
        }  # fmt: skip

    def test_the_trace_a_worker_sends_is_checked(self, bench: Bench) -> None:
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


def interrupted(bench: Bench, number: int, **changes: Any) -> tuple[Decode, ...]:
    """The decodes an interrupt at decode ``number`` left; the workers then work again."""
    bench.workers.tamper = stop_at(number, KeyboardInterrupt())
    bench(**changes)
    bench.restart()
    bench.writes.clear()
    return bench.evidence.decodes


class TestResuming:
    @pytest.mark.parametrize(("number", "num_kept"), [(7, 1), (10, 2), (14, 3), (21, 5)])
    def test_only_what_is_missing_is_measured(self, number: int, num_kept: int, bench: Bench) -> None:
        kept = interrupted(bench, number)
        results = bench(resume=True)
        assert len(bench.workers.requests) == 3 + 3 * (6 - num_kept)
        evidence = bench.evidence
        assert evidence.decodes[: 3 * num_kept] == kept
        assert [leg.order for leg in bench.legs] == list(range(18))
        every = [(item["label"], pair) for item in SUITE for pair in (0, 1)]
        assert list(dict.fromkeys((leg.label, leg.pair) for leg in bench.legs)) == every
        assert (results["status"], evidence.status) == ("complete", "complete")
        assert results["speedup"]["num_pairs"] == 3
        assert set(evidence.texts) == {"one", "two", "three"}

    def test_another_process_has_not_seen_the_prompt(self, bench: Bench) -> None:
        interrupted(bench, 7)
        bench(resume=True)
        first = {(leg.arm, leg.pair) for leg in bench.legs if leg.label == "one" and leg.is_first_seen}
        assert first == {("auto", 0), ("stock", 0), ("stock", 1), ("auto", 1)}

    def test_a_run_interrupted_twice(self, bench: Bench) -> None:
        interrupted(bench, 7)
        bench.workers.tamper = stop_at(7, KeyboardInterrupt())
        assert bench(resume=True)["status"] == "interrupted"
        assert len(bench.legs) == 6
        bench.restart()
        assert bench(resume=True)["status"] == "complete"
        assert len(bench.legs) == 18

    def test_a_complete_run_starts_no_process(self, bench: Bench) -> None:
        before = bench()
        bench.restart()
        assert bench(resume=True) == before
        assert bench.workers.settings == []

    def test_a_clock_that_began_anew_keeps_the_legs_in_order(self, bench: Bench) -> None:
        """After a reboot monotonic time starts at zero."""
        kept = interrupted(bench, 10)
        late = [replace(d, leg=replace(d.leg, start_ns=d.leg.start_ns + 10**15)) for d in kept]
        evidence, results = read_run(bench.folder)
        folders.write_run(bench.folder, replace(evidence, decodes=tuple(late)), results)
        bench(resume=True)
        legs = bench.legs
        assert len(legs) == 18
        assert all(a.start_ns + a.duration_ns <= b.start_ns for a, b in pairwise(legs))
        assert [leg.start_ns for leg in legs[:6]] == [d.leg.start_ns for d in late]

    def test_a_failed_run_goes_on(self, bench: Bench) -> None:
        bench.workers.tamper = stop_at(11, UsageError("gone"))
        with pytest.raises(UsageError):
            bench()
        bench.restart()
        assert bench(resume=True)["speedup"]["num_pairs"] == 3

    def test_a_pair_that_lacks_an_arm_is_decoded_again(self, bench: Bench) -> None:
        bench()
        evidence, results = read_run(bench.folder)
        lacking = [d for d in evidence.decodes if (d.leg.label, d.leg.arm, d.leg.pair) != ("two", "auto", 1)]
        folders.write_run(bench.folder, replace(evidence, decodes=tuple(lacking)), results)
        bench.restart()
        bench(resume=True)
        assert len(bench.workers.requests) == 3 + 3
        assert [leg.order for leg in bench.legs] == list(range(18))
        assert [(leg.label, leg.pair) for leg in bench.legs[-3:]] == [("two", 1)] * 3

    def test_a_run_killed_while_it_wrote(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tokens and traces of the second input are there, its legs are not yet."""
        real = folders.write_atomic

        def write(path: Path, text: str) -> None:
            if path.name == "legs.jsonl" and len(bench.writes) == 1:
                raise SystemExit("killed")
            real(path, text)

        with monkeypatch.context() as patch:
            patch.setattr(folders, "write_atomic", write)
            with pytest.raises(SystemExit):
                bench()
        with pytest.raises(EvidenceError, match="one too many"):
            read_run(bench.folder)
        bench.restart()
        assert bench(resume=True)["speedup"]["num_pairs"] == 3
        assert len(bench.workers.requests) == 3 + 3 * 4

    @pytest.mark.parametrize(
        ("changes", "named"),
        [({"pairs": 3}, "pairs"), ({"drafter": "suffix"}, "drafter"), ({"dtype": "float32"}, "dtype"),
         ({"labels": ("one",)}, "labels"), ({"stop": "fixed"}, "stop"), ({"threads": 2}, "threads")],
    )  # fmt: skip
    def test_another_run_is_refused(self, changes: dict[str, Any], named: str, bench: Bench) -> None:
        interrupted(bench, 10)
        with pytest.raises(UsageError, match=rf"holds another run \(other {named}[,)]"):
            bench(resume=True, **changes)
        assert bench.workers.settings == []
        assert bench.writes == []

    def test_another_suite_machine_or_model_is_refused(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        interrupted(bench, 10)
        with monkeypatch.context() as patch:
            patch.setattr(runs, "describe", lambda device: replace(MACHINE, num_threads=77))
            with pytest.raises(UsageError, match=r"\(other machine\)"):
                bench(resume=True)
        with monkeypatch.context() as patch:
            patch.setattr(runs, "provenance", lambda model, argv: {"weights": "w1"})
            with pytest.raises(UsageError, match=r"\(other weights\)"):
                bench(resume=True)
        known = bench.evidence.provenance
        with monkeypatch.context() as patch:
            patch.setattr(runs, "provenance", lambda model, argv: {**known, "commit": "another"})
            with pytest.raises(UsageError, match=r"\(other commit\)"):
                bench(resume=True)
        bench.suite.write_text(bench.suite.read_text().replace("hello", "hallo"))
        with pytest.raises(UsageError, match=r"\(other prompts\)"):
            bench(resume=True)

    def test_a_folder_without_a_run_is_refused(self, bench: Bench) -> None:
        with pytest.raises(UsageError, match="no run in"):
            bench(resume=True)

    def test_an_edited_run_is_refused(self, bench: Bench) -> None:
        interrupted(bench, 10)
        path = bench.folder / "legs.jsonl"
        path.write_text(path.read_text().replace('"peak_bytes":5000', '"peak_bytes":5001', 1))
        with pytest.raises(EvidenceError, match="hash chain breaks at row 2"):
            bench(resume=True)


def test_pieces_join_to_the_text_and_no_character_is_split(tiny_folder: Any) -> None:
    """Bytes are the tokens here: a character of three bytes comes with its last one."""
    tokenizer = load_tokenizer(tiny_folder("llama"))
    text = "né €!"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == 8
    assert pieces(tokenizer, ids) == ["n", "", "é", " ", "", "", "€", "!"]
    cut = pieces(tokenizer, tuple(ids[:6]))
    assert cut == ["n", "", "é", " ", "", "\N{REPLACEMENT CHARACTER}"]
    assert pieces(tokenizer, []) == []


def test_the_fake_decodes_with_speculation() -> None:
    """Or the tests above would say little."""
    trace = decode_table({"prompt_ids": [1, 2, 1, 2], "max_new_tokens": 30, "drafter": "auto"})
    plain = decode_table({"prompt_ids": [1, 2, 1, 2], "max_new_tokens": 30, "drafter": None})
    assert trace.token_ids == plain.token_ids
    assert sum(r.num_accepted for r in trace.rounds) > 5
