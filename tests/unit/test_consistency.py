"""Rows that cannot be true together are named; honest ones, from the real loop, never are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.consistency import differences, emits_ids, hand_problems, num_leaves, record_problems
from draftproof.decode import Decoding, speculate
from draftproof.depth import FixedDepth
from draftproof.folder import Decode, Evidence
from draftproof.record import Leg, Round, Trace
from draftproof.results import SOLO, compute
from draftproof.rules import Rules, RuleSet
from draftproof.testing import FakeClock, ScriptedDrafter, TableTarget
from draftproof.wire import tokens_sha256

Honest = Callable[..., Evidence]
PROMPT = (1, 2, 3)


def problems(evidence: Evidence) -> list[str]:
    return list(record_problems(evidence))


def with_leg(evidence: Evidence, index: int, **changes: Any) -> Evidence:
    decodes = list(evidence.decodes)
    decodes[index] = replace(decodes[index], leg=replace(decodes[index].leg, **changes))
    return replace(evidence, decodes=tuple(decodes))


def with_decodes(evidence: Evidence, decodes: Iterable[Decode]) -> Evidence:
    """The legs given, numbered anew, as a careful forger would."""
    kept = [replace(d, leg=replace(d.leg, order=i)) for i, d in enumerate(decodes)]
    return replace(evidence, decodes=tuple(kept))


def with_trace(evidence: Evidence, index: int, change: Callable[[Trace], Trace]) -> Evidence:
    decodes = list(evidence.decodes)
    trace = decodes[index].trace
    assert trace is not None
    decodes[index] = replace(decodes[index], trace=change(trace))
    return replace(evidence, decodes=tuple(decodes))


# --- honest runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", [1, 2, 5])
def test_an_honest_run(honest_run: Honest, pairs: int) -> None:
    assert problems(honest_run(pairs=pairs)) == []


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 99), num_right=st.integers(0, 6), depth=st.integers(0, 5), num_new=st.integers(1, 20),
    eos=st.sets(st.integers(0, 7), max_size=2),
)  # fmt: skip
def test_what_the_real_loop_records(
    seed: int, num_right: int, depth: int, num_new: int, eos: set[int]
) -> None:
    """Drafts right for a while, cut by depth, by the limit and by end tokens inside them."""
    target = TableTarget(8, seed=seed)

    def script(context: Any, limit: int) -> list[int]:
        found = list(context)
        for _ in range(num_right):
            found.append(int(target.logits(found).argmax()))
        return [*found[len(context) :], 0, 1][:limit]

    rules = Rules(RuleSet(max_new_tokens=num_new, eos_ids=frozenset(eos)), PROMPT, torch.device("cpu"))
    run = Decoding(session=target.open(64), rules=rules, clock=FakeClock(), max_rows=16)
    rounds = tuple(speculate(run, PROMPT, ScriptedDrafter(script), FixedDepth(depth)))
    trace = Trace(num_prompt=3, prefill_ns=1, rounds=rounds)
    ids = trace.token_ids
    leg = Leg(label="a", arm="x", pair=0, order=0, start_ns=0, duration_ns=10**9, num_tokens=len(ids),
              tokens_sha256=tokens_sha256(ids), peak_bytes=1)  # fmt: skip
    stock = replace(leg, arm="stock", order=1, start_ns=10**9)
    evidence = Evidence(
        kind="bench", request={"pairs": 1}, status="complete", arm="x", roles={"a": "diverse"},
        machine=None, prompts={"a": PROMPT},  # type: ignore[arg-type]
        decodes=(Decode(leg=leg, token_ids=ids, trace=trace), Decode(leg=stock, token_ids=ids)),
    )  # fmt: skip
    assert problems(evidence) == []


# --- which legs there are ------------------------------------------------------------------------------


def test_a_leg_that_is_not_there(honest_run: Honest) -> None:
    run = honest_run()
    left = [d for d in run.decodes if d != run.decodes[4]]
    assert run.decodes[4].leg.arm == "serial"
    assert problems(with_decodes(run, left)) == ["news, pair 1: no leg of serial"]
    assert problems(replace(run, decodes=tuple(left))) == [
        "leg 4 says it is number 5 of the run: legs are missing or out of order",
        "news, pair 1: no leg of serial",
    ]


def test_a_pair_that_is_not_there(honest_run: Honest) -> None:
    run = honest_run()
    kept = [d for d in run.decodes if (d.leg.label, d.leg.pair) != ("news", 1)]
    assert problems(with_decodes(run, kept)) == ["news: its pairs are [0, 2], a run has 3 an input"]
    last = [d for d in run.decodes if d.leg.pair < 2]
    assert problems(with_decodes(run, last)) == [
        "news: its pairs are [0, 1], a run has 3 an input",
        "code: its pairs are [0, 1], a run has 3 an input",
    ]
    none = [d for d in run.decodes if d.leg.label == "code"]
    assert problems(with_decodes(run, none)) == ["news: its pairs are [], a run has 3 an input"]


def test_a_run_that_was_interrupted_may_have_fewer_pairs_but_whole_ones(honest_run: Honest) -> None:
    run = replace(honest_run(), status="interrupted")
    assert problems(replace(run, decodes=run.decodes[:12])) == []
    assert problems(replace(run, decodes=run.decodes[:11])) == ["code, pair 0: no leg of stock"]
    assert problems(with_decodes(run, run.decodes[3:9])) == [
        "news: its pairs are [1, 2], a run has 3 an input"
    ]


def test_a_candidate_may_die_in_the_last_pair_of_an_input(honest_run: Honest) -> None:
    run = replace(honest_run(), kind="evaluate")
    for cut in (7, 8, 14):
        died = replace(run, status="failed: it died", decodes=run.decodes[:cut])
        assert problems(died) == []
        assert problems(replace(died, status="complete")) != []
    without = [d for d in run.decodes if d != run.decodes[4]]
    assert problems(with_decodes(replace(run, status="failed: it died"), without)) == [
        "news, pair 1: no leg of serial"
    ]


def test_an_evaluation_stops_an_input_at_its_first_wrong_output_only(honest_run: Honest) -> None:
    fewer = [d for d in honest_run().decodes if d.leg.label == "news" or d.leg.pair < 2]
    run = replace(with_decodes(honest_run(), fewer), kind="evaluate")
    assert problems(run) == ["code: its pairs are [0, 1], a run has 3 an input"]
    wrong = honest_run(changed={("code", "lookup"): (1,) * 40})
    fewer = [d for d in wrong.decodes if d.leg.label == "news" or d.leg.pair < 1]
    assert problems(replace(with_decodes(wrong, fewer), kind="evaluate")) == []
    bench = ["code: its pairs are [0], a run has 3 an input"]
    assert problems(with_decodes(wrong, fewer)) == bench
    only = [d for d in honest_run().decodes if d.leg.label == "news"]
    assert problems(replace(with_decodes(honest_run(), only), kind="evaluate")) == []


def test_stock_alone_beforehand_needs_no_pair(honest_run: Honest) -> None:
    run = honest_run()
    solo = replace(run.decodes[2], leg=replace(run.decodes[2].leg, arm=SOLO, start_ns=0))
    assert problems(with_decodes(run, [solo, *run.decodes])) == []


def test_a_leg_that_is_there_twice(honest_run: Honest) -> None:
    run = honest_run()
    again = with_leg(run, 17, pair=1)
    assert (run.decodes[17].leg.arm, run.decodes[17].leg.pair) == ("stock", 2)
    assert problems(again) == ["code, stock, pair 1: timed twice", "code, pair 2: no leg of stock"]


def test_a_judged_arm_without_legs(honest_run: Honest) -> None:
    run = replace(honest_run(pairs=1), arm="suffix")
    assert problems(run) == ["news, pair 0: no leg of suffix", "code, pair 0: no leg of suffix"]


def test_one_machine_times_one_leg_after_the_other(honest_run: Honest) -> None:
    run = honest_run()
    end = run.decodes[4].leg.start_ns + run.decodes[4].leg.duration_ns
    assert problems(with_leg(run, 5, start_ns=end)) == []
    early = with_leg(run, 5, start_ns=end - 1)
    assert problems(early) == ["leg 5 starts before leg 4 of the same machine has ended"]
    assert problems(with_leg(early, 5, start_ns=end - 1, host="other")) == []


def test_an_input_the_run_does_not_know(honest_run: Honest) -> None:
    run = with_leg(replace(honest_run(), status="running"), 2, label="other")
    assert problems(run) == [
        "news, pair 0: no leg of stock", "other, pair 0: no leg of lookup, serial",
        "other, stock, pair 0: an input the run does not list",
        "other, stock, pair 0: its prompt is not in prompts.jsonl",
    ]  # fmt: skip


# --- tokens and traces ---------------------------------------------------------------------------------


def test_tokens_that_are_not_the_legs(honest_run: Honest) -> None:
    run = honest_run()
    first = run.decodes[2]
    other = replace(first, token_ids=(*first.token_ids[:-1], first.token_ids[-1] + 1))
    decodes = (*run.decodes[:2], other, *run.decodes[3:])
    told = ["news, stock, pair 0: its tokens are not those its leg was timed with (tokens_sha256)"]
    assert problems(replace(run, decodes=decodes)) == told
    short = replace(first, token_ids=first.token_ids[:-1])
    decodes = (*run.decodes[:2], short, *run.decodes[3:])
    assert problems(replace(run, decodes=decodes)) == [
        *told, "news, stock, pair 0: 39 tokens, its leg counted 40",
    ]  # fmt: skip


def test_sound_has_no_tokens_to_compare(honest_run: Honest) -> None:
    run = honest_run(pairs=1)
    bare = [replace(d, token_ids=(), trace=None) for d in run.decodes]
    assert len(problems(replace(run, decodes=tuple(bare)))) == 12
    speech = replace(run, decodes=tuple(bare), request={**run.request, "workload": "tts"}, prompts={})
    assert problems(speech) == []
    assert (emits_ids(run), emits_ids(speech)) == (True, False)


def test_traces_that_are_not_the_legs(honest_run: Honest) -> None:
    run = honest_run()
    lookup = run.decodes[0]
    assert lookup.trace is not None
    spent = 1_000_000 + 201_500 * (len(lookup.trace.rounds) - 1)
    assert problems(with_leg(run, 0, duration_ns=spent)) == []
    assert problems(with_leg(run, 0, duration_ns=spent - 1)) == [
        f"news, lookup, pair 0: its trace spends {spent} ns, the leg took {spent - 1} ns"
    ]
    other = with_trace(run, 0, lambda _: run.decodes[9].trace or pytest.fail("no trace"))
    assert problems(other) == [
        "news, lookup, pair 0: its trace emits other tokens",
        "news, lookup, pair 0: its trace starts after 7 tokens, the prompt has 5",
    ]
    gone = (replace(lookup, trace=None), *run.decodes[1:])
    assert problems(replace(run, decodes=gone)) == [
        "lookup: some of its legs have a trace and some have none"
    ]


def one_round(**changes: Any) -> Callable[[Trace], Trace]:
    """A trace of the prompt's round, one round that is changed, and one more, over eight tokens."""

    def make(trace: Trace) -> Trace:
        ids = trace.token_ids
        middle: dict[str, Any] = {
            "num_offered": 4, "num_drafted": 4, "num_accepted": 2, "emitted": ids[1:4],
            "offered": (*ids[1:3], (ids[3] + 1) % 288, 0),
        }  # fmt: skip
        common = {"source": "lookup", "num_offered": 0, "num_drafted": 0, "num_accepted": 0}
        made: list[Round] = []
        for part in ({"emitted": ids[:1]}, middle | changes, {"emitted": ids[4:]}):
            position = trace.num_prompt + sum(len(r.emitted) for r in made)
            if "emitted" in part and part["emitted"] == ids[4:]:
                continue
            made.append(Round(index=len(made), position=position, **{**common, **part}))
        done = sum(len(r.emitted) for r in made)
        for token in ids[done:]:
            made.append(Round(index=len(made), position=trace.num_prompt + done, **common, emitted=(token,)))
            done += 1
        return replace(trace, rounds=tuple(made))

    return make


ROUNDS: dict[str, tuple[dict[str, Any], str | None]] = {
    "honest": ({}, None),
    "accepted raised": ({"num_accepted": 3}, "accepted a token it was not offered"),
    "accepted lowered": ({"num_accepted": 1, "emitted": 2}, "emitted a token it was offered and does not"),
    "offer hidden": ({"offered": ()}, "does not list what it was offered"),
    "no bonus": ({"emitted": 2}, "has no bonus token, and the output goes on"),
    "cut by depth": ({"num_drafted": 2, "offered": "right"}, None),
    "depth raised": ({"num_drafted": 4, "offered": "right"}, "emitted a token it was offered and does not"),
}


@pytest.mark.parametrize("case", ROUNDS)
def test_rounds_follow_the_accept_rule(honest_run: Honest, case: str) -> None:
    changes, expected = ROUNDS[case]
    run = honest_run()
    ids = run.decodes[0].token_ids
    if "emitted" in changes:
        changes = {**changes, "emitted": ids[1 : 1 + changes["emitted"]]}
    if changes.get("offered") == "right":
        changes = {**changes, "offered": ids[1:5]}
    found = problems(with_trace(run, 0, one_round(**changes)))
    assert len(found) == (expected is not None)
    assert expected is None or found[0].startswith(f"news, lookup, pair 0: round 1 {expected}")


def test_an_output_may_end_inside_a_draft_in_the_last_round_only(honest_run: Honest) -> None:
    run = honest_run()

    def shorten(trace: Trace) -> Trace:
        ids = trace.token_ids
        last = Round(index=1, position=trace.num_prompt + 1, source="lookup", num_offered=39, num_drafted=39,
                     num_accepted=39, emitted=ids[1:], offered=ids[1:])  # fmt: skip
        return replace(trace, rounds=(trace.rounds[0], last))

    assert problems(with_trace(run, 0, shorten)) == []


# --- figures -------------------------------------------------------------------------------------------


def test_every_leaf_that_differs_is_named() -> None:
    published = {"a": 2.41, "b": [1, {"c": None}, 3], "d": "x", "only": 1, "long": "y" * 99}
    recomputed = {"a": 2.31, "b": [1, {"c": 0}], "d": "x", "other": {"e": 1}, "long": "y"}
    assert list(differences(published, recomputed, "results")) == [
        "results.a: published 2.41, recomputed 2.31",
        "results.b[1].c: published null, recomputed 0",
        "results.b[2]: published 3, recomputed nothing",
        'results.long: published "' + "y" * 79 + '..., recomputed "y"',
        "results.only: published 1, recomputed nothing",
        'results.other: published nothing, recomputed {"e":1}',
    ]
    assert num_leaves(published) == 7


@pytest.mark.parametrize(
    ("a", "b", "is_same"),
    [
        (1.0, 1.0 + 1e-15, True), (2.0, 2, True), (1.0, 1.0 + 1e-8, False), (1, 2, False), (True, 1, False),
        (1.0, True, False), (0, False, False), (0.0, 1e-300, False), (None, 0, False), ("1", 1, False),
        (None, None, True), ([], {}, False), ([], [], True), (10**16, 10**16 + 1, False),
    ],
)  # fmt: skip
def test_what_counts_as_the_same_figure(a: Any, b: Any, is_same: bool) -> None:
    assert (not list(differences(a, b, "x"))) is is_same
    assert (not list(differences(b, a, "x"))) is is_same


def test_the_second_opinion_agrees_with_the_first(honest_run: Honest) -> None:
    for run in (honest_run(), honest_run(pairs=4), honest_run(pairs=1)):
        published = compute(run)
        assert published["speedup"] is not None
        assert list(hand_problems(run, published)) == []


def test_the_second_opinion_by_hand(honest_run: Honest) -> None:
    """Ratios 2, 3 and 10 of one input, 4 of the other: medians 3 and 4, overall 3.5."""
    base = honest_run(pairs=3)
    ratios = {("news", 0): 2, ("news", 1): 10, ("news", 2): 3, ("code", 0): 4, ("code", 1): 4, ("code", 2): 4}
    run = base
    for index, decode in enumerate(base.decodes):
        leg = decode.leg
        factor = {"stock": ratios[leg.label, leg.pair], "serial": 2, "lookup": 1}[leg.arm]
        run = with_leg(run, index, duration_ns=1000 * factor)

    def rows(news: dict[str, Any], code: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"label": "news", "speedup": news}, {"label": "code", "speedup": code}]

    news = {"median": 3.0, "low": 2.0, "high": 10.0, "num_pairs": 3}
    code = {"median": 4.0, "low": 4.0, "high": 4.0, "num_pairs": 3}
    assert list(hand_problems(run, {"inputs": rows(news, code), "speedup": {"median": 3.5}})) == []
    wrong = {"inputs": rows({**news, "high": 3.0}, {**code, "num_pairs": 2}), "speedup": {"median": 4.0},
             "serial_speedup": {"median": 1.5}, "speculation_speedup": {"median": 1.0}}  # fmt: skip
    assert list(hand_problems(run, wrong)) == [
        "by hand: news, speedup: high is 10.0, published 3.0",
        "by hand: code, speedup: num_pairs is 3, published 2",
        "by hand: speedup: median is 3.5, published 4.0",
        "by hand: serial_speedup: median is 1.75, published 1.5",
        "by hand: speculation_speedup: median is 2.0, published 1.0",
    ]


def test_an_evaluation_is_quoted_by_its_main_input(honest_run: Honest) -> None:
    run = replace(honest_run(), kind="evaluate", roles={"news": "diverse", "code": "main"})
    published = compute(run)
    assert list(hand_problems(run, published)) == []
    other = {**published, "speedup": published["inputs"][0]["speedup"]}
    assert [line.split(" is ")[0] for line in hand_problems(run, other)] == ["by hand: speedup: median"]


def test_figures_from_no_legs_and_documents_of_another_shape(honest_run: Honest) -> None:
    run = honest_run()
    kept = replace(run, decodes=tuple(d for d in run.decodes if d.leg.arm != "serial"))
    shown = {"inputs": [{"serial_speedup": {"median": 1.2, "num_pairs": 3}}]}
    assert list(hand_problems(kept, shown)) == ["by hand: news, serial_speedup: num_pairs is 0, published 3"]
    for shape in ({}, {"inputs": 3}, {"inputs": [None]}, {"speedup": None}):
        assert list(hand_problems(run, shape)) == []
    assert len(list(hand_problems(run, {"speedup": 7, "inputs": [{"speedup": []}]}))) == 5
