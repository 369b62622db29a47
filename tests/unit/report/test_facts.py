"""Machine, command, hashes: what a reader needs to repeat a run."""

from __future__ import annotations

import shlex
from dataclasses import replace

from draftproof.folder import Evidence
from draftproof.report import facts


def test_the_machine_and_its_memory_floor(honest: Evidence) -> None:
    rows = dict(facts.environment(honest).rows)
    assert rows["processor"] == "AMD EPYC (family 26 model 2)"
    assert rows["environment"] == "OMP_NUM_THREADS=2"
    assert rows["memory floor"] == "257 MiB at 22.0 GB/s: 12.3 ms a forward"
    assert "machines" not in rows


def test_what_is_absent_is_not_invented(honest: Evidence) -> None:
    bare = replace(honest, floor=None, machine=replace(honest.machine, environment=()))
    rows = dict(facts.environment(bare).rows)
    assert "memory floor" not in rows
    assert rows["environment"] == "nothing set that matters"


def test_several_machines_are_all_named(honest: Evidence) -> None:
    one, two, *rest = honest.decodes
    spread = (
        replace(one, leg=replace(one.leg, host="b")), replace(two, leg=replace(two.leg, host="a")), *rest,
    )  # fmt: skip
    assert dict(facts.environment(replace(honest, decodes=spread)).rows)["machines"] == "a, b"


def test_the_plan_says_what_failed(honest: Evidence) -> None:
    table = facts.plan_table(honest.plan)
    assert table is not None
    assert table.rows == (
        ("qkv", "960×576", "prepacked linear", "32", "none"),
        ("attention", "9×3×64", "row by row", "1", "one call: row 1 of 4 differs"),
    )
    assert facts.plan_table(None) is None


def test_the_command_is_what_was_typed(honest: Evidence) -> None:
    typed = ["bench", "--suite", "my file.jsonl"]
    evidence = replace(honest, provenance={"argv": typed})
    assert facts.command(evidence) == "draftproof bench --suite 'my file.jsonl'"


def test_the_command_follows_from_the_request_where_nothing_was_recorded(
    honest: Evidence, evaluation: Evidence
) -> None:
    request = {"model": "m", "threads": None, "raw": True, "chat": False, "labels": ["a", "b"], "pairs": 5}
    evidence = replace(honest, request=request, provenance={})
    assert shlex.split(facts.command(evidence)) == [
        "draftproof", "bench", "--model", "m", "--raw", "--labels", "a", "--labels", "b", "--pairs", "5",
    ]  # fmt: skip
    assert facts.command(evaluation).startswith("draftproof evaluate candidates/lookup.py --workload llm")


def test_values_read_as_text_or_json() -> None:
    table = facts.named_values(
        {"prompt_len": 512, "threads": None, "labels": [], "tree": "clean", "x": ["a"]}
    )
    assert table.rows == (
        ("labels", "not set"), ("prompt len", "512"), ("threads", "not set"), ("tree", "clean"),
        ("x", '["a"]'),
    )  # fmt: skip


def test_hashes_are_those_of_the_seal() -> None:
    table = facts.hashes({"files": {"run.json": "ab", "legs.jsonl": "cd"}, "hash": "ef"})
    assert table is not None
    assert table.rows == (("legs.jsonl", "cd"), ("run.json", "ab"))
    assert facts.hashes(None) is None


def test_gates_show_value_and_limit() -> None:
    row = {"label": "news", "gate": "kl", "value": 0.123456, "limit": 0.05, "is_met": False}
    table = facts.gates([row, {**row, "is_met": True}])
    assert table is not None
    assert table.rows == (("news", "kl", "0.1235", "0.05", "NO"), ("news", "kl", "0.1235", "0.05", "yes"))
    assert facts.gates([]) is None
