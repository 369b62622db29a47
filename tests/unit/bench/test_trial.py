"""The order of an evaluation and what it records; the verdicts over it are tested in tests/adversarial."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from draftproof import gate
from draftproof.bench.runner import Failure, Reply
from draftproof.bench.trial import Case, JudgedInput, StockError, Trial
from draftproof.bench.workloads.base import Comparison, Inputs, Output, compare_tokens
from draftproof.folder import Evidence
from draftproof.record import Counters, Machine
from draftproof.results import SOLO, compute
from draftproof.testing import FakeClock
from draftproof.wire import decode

MACHINE = Machine(cpu="", isa="", num_threads=1, device="", os="", python="", torch="", transformers="")
EVIDENCE = Evidence(kind="evaluate", request={}, status="running", arm="mine", roles={}, machine=MACHINE)
ROLES = {"main": "main", "holdout": "holdout", "news": "diverse"}
IDS = {"main": (1, 2), "holdout": (3, 4), "news": (5, 6)}
REPLY = Reply(
    output=Output(token_ids=(7, 8)), counters=Counters(steps=1, tokens=1), num_forwards=1, peak_bytes=5,
    peak_cuda_bytes=6,
)  # fmt: skip
LOG = list[tuple[str, tuple[int, ...]]]


@dataclass
class Scripted:
    """Answers ``reply`` to everything, takes 100 ns, and writes down what it is asked."""

    name: str
    log: LOG
    clock: FakeClock
    reply: Reply = REPLY
    scores: dict[str, Any] = field(default_factory=dict)

    plain_reply: Reply | None = None
    scored: LOG = field(default_factory=list)

    def run(
        self, prompt_ids: Sequence[int], max_new_tokens: int, *, is_plain: bool = False
    ) -> Reply | Failure:
        assert max_new_tokens == 9
        self.log.append((f"{self.name} plain" if is_plain else self.name, tuple(prompt_ids)))
        self.clock.advance(100)
        return self.plain_reply if is_plain and self.plain_reply else self.reply

    def score(self, request: dict[str, Any]) -> Any:
        self.log.append((f"{self.name} {request['score']}", tuple(request["prompt_ids"])))
        self.scored.append((request["score"], tuple(request["token_ids"])))
        return self.scores[request["score"]]


def case(**changes: Any) -> Case:
    inputs = tuple(
        JudgedInput(label=label, role=role, inputs=Inputs(token_ids=IDS[label], max_new_tokens=9))  # type: ignore[arg-type]
        for label, role in ROLES.items()
    )
    made = Case(
        inputs=inputs, warm_up=Inputs(token_ids=(0,), max_new_tokens=9), pairs=5,
        compare=lambda a, b: compare_tokens(a.token_ids, b.token_ids),
    )  # fmt: skip
    return replace(made, **changes)


@dataclass
class Stage:
    """A trial over two scripted runners, with all they were asked."""

    case: Case = field(default_factory=case)
    stock_reply: Reply = REPLY
    mine_reply: Reply = REPLY
    plain_reply: Reply | None = None
    stock_scores: dict[str, Any] = field(default_factory=dict)
    mine_scores: dict[str, Any] = field(default_factory=dict)
    log: LOG = field(default_factory=list)
    scored: LOG = field(default_factory=list)
    published: list[Evidence] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)

    def run(self) -> Evidence:
        clock = FakeClock(tick_ns=1)
        stock = Scripted("stock", self.log, clock, self.stock_reply, self.stock_scores, scored=self.scored)
        mine = Scripted(
            "mine", self.log, clock, self.mine_reply, self.mine_scores, self.plain_reply, self.scored
        )

        def start() -> Scripted:
            self.log.append(("start", ()))
            return mine

        trial = Trial(self.case, EVIDENCE, clock, self.published.append, lambda s, *_: self.stages.append(s))
        return trial.run(stock, start)


def test_stock_runs_alone_before_the_candidate_exists_then_both_warm_up_and_take_turns() -> None:
    stage = Stage()
    evidence = stage.run()
    alone = [("stock", (0,)), *[("stock", (1, 2))] * 5]
    assert stage.log[:8] == [*alone, ("start", ()), ("mine", (0,))]
    pairs = [stage.log[i : i + 2] for i in range(8, len(stage.log), 2)]
    assert [pair[0][1] for pair in pairs] == [ids for ids in IDS.values() for _ in range(5)]
    assert all({name for name, _ in pair} == {"stock", "mine"} for pair in pairs)
    assert len({pair[0][0] for pair in pairs}) == 2, "one arm always went first"
    assert evidence.status == "complete"
    assert evidence.roles == ROLES
    assert evidence.prompts == IDS


def test_a_drafter_is_also_timed_without_its_drafts() -> None:
    """In every pair, last in an input's first one: the judged arm sees new content first."""
    stage = Stage(case(has_serial=True))
    evidence = stage.run()
    legs = [d.leg for d in evidence.decodes if d.leg.arm != SOLO]
    triples = [legs[i : i + 3] for i in range(0, len(legs), 3)]
    assert all({leg.arm for leg in triple} == {"stock", "mine", "serial"} for triple in triples)
    assert all(triple[2].arm == "serial" for triple in triples if triple[0].pair == 0)
    assert len({tuple(leg.arm for leg in triple) for triple in triples}) > 3, "always the same order"
    assert ("mine plain", (0,)) not in stage.log
    assert compute(evidence)["serial_speedup"] is not None


def test_a_serial_arm_with_other_tokens_is_wrong_too() -> None:
    other = replace(REPLY, output=Output(token_ids=(9, 9, 9)))
    evidence = Stage(case(has_serial=True), plain_reply=other).run()
    assert {d.leg.label for d in evidence.decodes} == {"main"}
    assert any("not run, as main did not pass" in note for note in evidence.notes)


def test_the_gates_judge_the_judged_arms_tokens_whatever_the_serial_arm_emits() -> None:
    mine, other = (replace(REPLY, output=Output(token_ids=ids)) for ids in ((7, 9), (7, 1)))
    stage = Stage(
        case(limits=gate.NEAR_LOSSLESS, has_serial=True), mine_reply=mine, plain_reply=other,
        stock_scores={"reference": REFERENCE, "own_nll": 0.2}, mine_scores={"forward": FORWARD},
    )  # fmt: skip
    assert stage.run().status == "complete"
    assert [ids for score, ids in stage.scored if score == "own_nll"] == [(7, 9)] * len(ROLES)


def test_the_order_within_pairs_comes_from_the_seed() -> None:
    def order(seed: int) -> list[str]:
        stage = Stage(case(seed=seed))
        stage.run()
        return [name for name, _ in stage.log]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_legs_hold_what_was_measured_told_and_seen() -> None:
    evidence = Stage().run()
    assert [d.leg.order for d in evidence.decodes] == list(range(35))
    assert len(evidence.of("main", "stock-solo")) == 5
    for label in ROLES:
        legs = [d.leg for d in evidence.of(label, "mine")]
        assert [leg.is_first_seen for leg in legs] == [True, False, False, False, False]
        assert [leg.pair for leg in legs] == [0, 1, 2, 3, 4]
    # Stock has met the main input alone before.
    firsts = [d.leg.label for d in evidence.decodes if d.leg.arm != "mine" and d.leg.is_first_seen]
    assert firsts == ["main", "holdout", "news"]
    leg = evidence.of("news", "mine")[0].leg
    assert (leg.duration_ns, leg.num_tokens, leg.num_forwards) == (101, 2, 1)
    assert (leg.peak_bytes, leg.peak_cuda_bytes) == (5, 6)
    assert leg.counters == Counters(steps=1, tokens=1)
    assert leg.tokens_sha256 == Output(token_ids=(7, 8)).sha256


def test_the_run_is_published_after_every_input_with_its_prompts_only() -> None:
    stage = Stage()
    stage.run()
    assert [e.status for e in stage.published] == ["running"] * 3 + ["complete"]
    assert [list(e.prompts) for e in stage.published[:3]] == [
        ["main"],
        ["main", "holdout"],
        ["main", "holdout", "news"],
    ]
    assert stage.stages[-1] == "news, pair 5 of 5"
    assert "stock alone, run 2 of 5" in stage.stages


def test_a_wrong_output_ends_its_input_after_the_pair() -> None:
    stage = Stage(mine_reply=replace(REPLY, output=Output(token_ids=(7, 9))))
    evidence = stage.run()
    assert len(evidence.of("main", "mine")) == len(evidence.of("main", "stock")) == 1
    assert evidence.labels == ("main",)
    assert evidence.notes == ("not run, as main did not pass: holdout, news",)


def sound(value: int) -> Reply:
    return Reply(output=Output(samples=bytes([value] * 8), sample_rate=8000), peak_bytes=1)


def test_sounds_are_judged_by_their_distance_and_the_worst_is_kept() -> None:
    distances = iter([0.25, 0.5, 0.125] + [0.0625] * 12)

    def compare(expected: Output, actual: Output) -> Comparison:
        if expected == actual:
            return Comparison(is_equal=True, distance=0.0, limit=1.0)
        return Comparison(is_equal=True, distance=next(distances), limit=1.0)

    evidence = Stage(case(compare=compare), stock_reply=sound(1), mine_reply=sound(2)).run()
    rows = {row["label"]: row["value"] for row in evidence.gates}
    assert rows == {"main": 0.5, "holdout": 0.0625, "news": 0.0625}
    assert all(row["is_met"] and row["gate"] == "distance" for row in evidence.gates)
    assert evidence.decodes[0].token_ids == ()
    assert evidence.decodes[0].leg.num_tokens == 2
    assert evidence.status == "complete"


def test_a_sound_that_cannot_be_compared_fails_with_the_reason() -> None:
    def compare(expected: Output, actual: Output) -> Comparison:
        return Comparison(is_equal=expected == actual, detail="too short")

    evidence = Stage(case(compare=compare), stock_reply=sound(1), mine_reply=sound(2)).run()
    assert evidence.status == "failed: main: too short"
    assert evidence.gates == ()


REFERENCE = {"token_ids": [7, 8], "top_ids": [[7, 1], [8, 1]], "top_logprobs": [[-0.1, -3.0]] * 2, "nll": 0.1}
FORWARD = {"top_logprobs": [[-0.1, -3.0]] * 2, "argmax_ids": [7, 8], "best_logprobs": [-0.1, -0.1]}


def gated(mine: Any) -> Stage:
    return Stage(
        case(limits=gate.NEAR_LOSSLESS), mine_reply=replace(REPLY, output=Output(token_ids=(7, 9))),
        stock_scores={"reference": REFERENCE, "own_nll": 0.2}, mine_scores={"forward": mine},
    )  # fmt: skip


def test_gates_take_the_place_of_equality_where_the_run_is_not_exact() -> None:
    stage = gated(FORWARD)
    evidence = stage.run()
    assert evidence.labels == ("main", "holdout", "news")
    assert [name for name, _ in stage.log[-9:]] == ["stock reference", "mine forward", "stock own_nll"] * 3
    samples = [decode(gate.GateSample, row) for row in evidence.gates]
    assert [sample.label for sample in samples] == ["main", "holdout", "news"]
    assert {sample.own_nll for sample in samples} == {0.2}
    assert all(row.is_met for row in gate.judge(samples, gate.NEAR_LOSSLESS))


@pytest.mark.parametrize(
    "answer", [None, {}, {**FORWARD, "top_logprobs": "x"}, {**FORWARD, "argmax_ids": []}]
)
def test_nonsense_in_place_of_a_distribution_fails(answer: Any) -> None:
    evidence = gated(answer).run()
    assert "main, quality gate: the candidate failed (error): answered nonsense" in evidence.status


def test_a_failing_gate_is_the_failing_arms() -> None:
    failure = Failure(kind="oom", reason="no room")
    assert gated(failure).run().status == "failed: main, quality gate: the candidate failed (oom): no room"
    stage = gated(FORWARD)
    stage.stock_scores["own_nll"] = failure
    with pytest.raises(StockError, match="stock: main: no room"):
        stage.run()
    assert stage.published[-1].status == "failed: stock: main: no room"
