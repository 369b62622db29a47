"""The sentence on top for every outcome, what stands below it, and what is never called a fault."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from draftproof import results as published
from draftproof.folder import Evidence
from draftproof.report import headline

Make = Callable[..., Evidence]


def ratio(median: float, interval: list[float] | None, num_pairs: int = 12) -> dict[str, Any]:
    return {"median": median, "low": 1.0, "high": 3.0, "interval": interval, "num_pairs": num_pairs}


def changed(results: dict[str, Any], outcome: str, **more: Any) -> dict[str, Any]:
    ruling = {"outcome": outcome, "reasons": ["first reason", "second reason"], "notes": ["a note"]}
    return {**results, "verdict": ruling, **more}


@pytest.mark.parametrize(
    ("outcome", "speed", "expected"),
    [
        (
            "pass", ratio(2.344, [2.09, 2.51]),
            "Exact, and 2.34× faster than stock (95 % 2.09–2.51 over 12 inputs)",
        ),
        ("pass", ratio(2.344, None, 2), "Exact, and 2.34× faster than stock (2 inputs, no interval)"),
        (
            "tie", ratio(1.02, [0.97, 1.06]),
            "Exact, with no difference in speed shown: 1.02× (95 % 0.97–1.06 over 12 inputs)",
        ),
        (
            "fail", ratio(0.87, [0.8, 0.9]),
            "Exact, but slower than stock: 0.87× (95 % 0.80–0.90 over 12 inputs)",
        ),
        ("fail", None, "Failed, so no speed is shown: first reason"),
        ("void", None, "Withheld: first reason"),
    ],
)  # fmt: skip
def test_the_sentence(
    honest: Evidence,
    honest_results: dict[str, Any],
    outcome: str,
    speed: dict[str, Any] | None,
    expected: str,
) -> None:
    found = headline.headline(honest, changed(honest_results, outcome, speedup=speed))
    assert found.sentence == expected
    assert found.outcome == outcome
    assert found.reasons == (("first reason", "second reason") if speed else ("second reason",))
    assert found.notes == ("a note",)


def test_marks_and_words_differ_by_outcome(honest: Evidence, honest_results: dict[str, Any]) -> None:
    heads = [headline.headline(honest, changed(honest_results, o)) for o in ("pass", "tie", "fail", "void")]
    assert [(head.mark, head.word) for head in heads] == [
        ("✓", "passed"), ("=", "no difference"), ("✕", "failed"), ("?", "withheld"),
    ]  # fmt: skip


def test_a_bench_of_one_input_counts_pairs(make: Make) -> None:
    evidence = make(labels=("news",))
    found = headline.headline(evidence, published.compute(evidence))
    assert found.around.endswith("over 5 pairs)")


def test_an_evaluation_is_quoted_by_its_main_input(
    evaluation: Evidence, evaluation_results: dict[str, Any]
) -> None:
    found = headline.headline(evaluation, evaluation_results)
    assert found.sentence.startswith("Exact, and 2.")
    assert found.around.endswith("over 5 pairs of the main input)")


def test_quality_is_named(honest: Evidence, honest_results: dict[str, Any]) -> None:
    for quality, word in (("near-lossless", "Near-lossless"), ("relaxed", "Within the relaxed limits")):
        found = headline.headline(honest, {**honest_results, "quality": quality})
        assert found.sentence.startswith(f"{word}, and ")


def test_an_unfinished_run_says_so_first(honest: Evidence, honest_results: dict[str, Any]) -> None:
    notes = headline.headline(replace(honest, status="interrupted"), honest_results).notes
    assert notes[0] == (
        "The run is not complete (interrupted): the figures cover what was measured until then."
    )


def test_what_was_checked(honest: Evidence, honest_results: dict[str, Any], audit_of: Any) -> None:
    rows = {fact.name: fact for fact in headline.facts(honest_results, audit_of(honest))}
    assert rows["tokens checked"].value == "23\u202f040"  # 12 inputs, 2 arms, 5 pairs, 192 tokens
    assert (rows["mismatched"].value, rows["mismatched"].is_bad) == ("0", False)
    assert rows["audit"].value == "passed"
    assert rows["audit"].note == (
        "1\u202f893 figures recomputed; 2\u202f304 tokens replayed, 0 differ; at most 0.0013 a token (3/N)"
    )
    assert rows["worst input"].note == "chinese"
    assert rows["best input"].note == "table"
    assert rows["peak memory"].value.endswith("MiB")
    assert rows["geometric mean"].note.startswith("95 % ")


def test_an_audit_that_failed_or_replayed_nothing_says_so(
    honest: Evidence, honest_results: dict[str, Any], audit_of: Any
) -> None:
    bad = {**audit_of(honest), "outcome": "fail", "num_mismatches": 3, "num_ties": 2, "rate_bound": None}
    fact = next(f for f in headline.facts(honest_results, bad) if f.name == "audit")
    assert (fact.value, fact.is_bad) == ("failed", True)
    assert fact.note.endswith("3 differ; 2 of them ties within the noise")
    none = {**audit_of(honest), "num_outputs": None, "num_tokens": 0, "rate_bound": None}
    fact = next(f for f in headline.facts(honest_results, none) if f.name == "audit")
    assert fact.note == "1\u202f893 figures recomputed; no token replayed"


def test_a_run_without_an_audit_says_so(honest_results: dict[str, Any]) -> None:
    fact = next(f for f in headline.facts(honest_results, None) if f.name == "audit")
    assert (fact.value, fact.is_bad) == ("none", False)
    assert fact.note.startswith("not audited")


def test_a_withheld_run_has_no_worst_input(make: Make) -> None:
    evidence = make(wrong_on="code")
    rows = {fact.name: fact for fact in headline.facts(published.compute(evidence), None)}
    assert "worst input" not in rows
    assert "geometric mean" not in rows
    assert rows["mismatched"].is_bad


def test_failures_of_the_audit_come_first() -> None:
    rows = [
        {"check": "replay", "message": "other threads", "is_failure": False},
        {"check": "seal", "message": "legs.jsonl was changed", "is_failure": True},
    ]
    assert [f.message for f in headline.findings({"findings": rows})] == [
        "legs.jsonl was changed", "other threads",
    ]  # fmt: skip
    assert headline.findings(None) == []


def test_claims_are_explained(honest_results: dict[str, Any], evaluation_results: dict[str, Any]) -> None:
    name, meaning = headline.claim(honest_results)
    assert name == "bitwise"
    assert "bit for bit" in meaning
    assert headline.claim(evaluation_results)[0] == "none"


def test_data_dependence_is_told_with_its_reason(honest_results: dict[str, Any]) -> None:
    lines = headline.dependence(honest_results)
    assert lines is not None
    assert lines[0] == honest_results["metrics"]["diverse"]["why"]
    assert lines[1].startswith("Median over the diverse set: 2.")
    same = copy.deepcopy(honest_results)
    same["metrics"]["diverse"]["data_dependent"] = False
    assert headline.dependence(same) is None
    assert headline.dependence({"metrics": {"diverse": None}}) is None
