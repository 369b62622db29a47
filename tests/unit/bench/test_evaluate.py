"""What is refused before anything is timed, what is frozen, and whole evaluations on a small model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof.bench import evaluate
from draftproof.bench.evaluate import Candidate, EvaluateSettings, evaluate_e2e, freeze
from draftproof.bench.workloads.base import Output
from draftproof.bench.workloads.llm import LLMWorkload
from draftproof.errors import OptionError, UsageError
from draftproof.folder import check_seal, read_run
from draftproof.stats import paired_ratios

Folder = Callable[..., Path]
PLAIN = "def apply(workload):\n    pass\n"


def quiet(*_: object) -> None:
    return None


def file(tmp_path: Path, body: str | bytes = PLAIN, name: str = "mine.py") -> Path:
    path = tmp_path / name
    path.write_bytes(body if isinstance(body, bytes) else body.encode())
    return path


def settings(folder: Path, **changes: Any) -> EvaluateSettings:
    options = {"model": str(folder), "dtype": "float32", "prompt_len": 400, "max_new_tokens": 8}
    return EvaluateSettings(**{"options": options, "threads": 1, **changes})


@pytest.fixture
def _two_diverse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts in place of twelve, in the judge's process."""
    chosen = {label: {"text": label} for label in ("poem", "code")}
    monkeypatch.setattr(LLMWorkload, "diverse_inputs", lambda _: chosen)


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ("def apply(workload:\n", r"mine.py is not Python in UTF-8: .*line 1"),
        (b"\xff\xfe", "mine.py is not Python in UTF-8"),
        (b"x = 1\0", "mine.py is not Python in UTF-8"),
        ("def run(workload): pass\n", r"mine.py defines no function apply\(workload\)"),
        ("apply(3)\n", r"mine.py defines no function apply\(workload\)"),
        ("", r"mine.py defines no function apply\(workload\)"),
    ],
)
def test_a_file_that_cannot_be_applied_is_refused(body: str | bytes, match: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=match):
        Candidate(transform=file(tmp_path, body)).read()


@pytest.mark.parametrize(
    "body",
    [PLAIN, "apply = print\n", "class apply: pass\n", "from os import getcwd as apply\n",
     "from os import *\n",
     "if True:\n    def apply(w): pass\n", "import os\n(apply := os.getcwd)\n"],
)  # fmt: skip
def test_a_file_that_may_define_apply_is_read(body: str, tmp_path: Path) -> None:
    assert Candidate(transform=file(tmp_path, body)).read() == body.encode()


def test_a_missing_file_is_refused_before_anything_else(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*gone.py: No such file"):
        evaluate_e2e(
            Candidate(transform=tmp_path / "gone.py"), settings(tmp_path / "no-model"), tmp_path, quiet
        )


def test_a_candidate_is_a_file_or_a_drafter(tmp_path: Path) -> None:
    for both in ({}, {"transform": tmp_path, "drafter": "lookup"}):
        with pytest.raises(OptionError, match="give either a file with apply"):
            Candidate(**both)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="unknown drafter 'luck'; known: none, auto"):
        Candidate(drafter="luck")
    assert Candidate(drafter="lookup").read() is None


@pytest.mark.parametrize(
    ("name", "arm"),
    [("lookup.py", "lookup"), ("stock.py", "candidate-stock"), ("serial.py", "candidate-serial"),
     ("stock-solo.py", "candidate-stock-solo")],
)  # fmt: skip
def test_the_arm_is_named_after_the_file_and_never_like_the_control(name: str, arm: str) -> None:
    assert Candidate(transform=Path("somewhere") / name).arm == arm


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"pairs": 4}, "pairs must be 5 or more, got 4"),
        ({"timeout": 0}, "timeout must be more than 0 seconds, got 0"),
        ({"limits": {"max_mean_kl": 1}}, "quality 'exact' has no limits to set, got max_mean_kl"),
        ({"quality": "relaxed", "workload": "tts"}, "quality 'relaxed' is measured on language models"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        settings(Path("m"), **changes)


def test_limits_replace_those_of_the_quality() -> None:
    found = settings(Path("m"), quality="relaxed", limits={"max_mean_kl": 0.5}).thresholds
    assert found is not None
    assert (found.max_mean_kl, found.min_top1) == (0.5, 0.80)
    assert settings(Path("m")).thresholds is None


def test_a_bad_drafter_or_quality_is_refused_before_anything_is_timed(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    transform = Candidate(transform=file(tmp_path))
    for changes, match in (
        ({"quality": "good"}, "quality 'good' has no gates"),
        ({"options": {}}, "a workload needs a model"),
        ({"workload": "image"}, "unknown workload 'image'"),
    ):
        with pytest.raises(OptionError, match=match):
            evaluate_e2e(transform, settings(tiny_folder("llama"), **changes), tmp_path / "run", quiet)
    with pytest.raises(OptionError, match="a drafter decodes language models"):
        evaluate_e2e(
            Candidate(drafter="lookup"),
            settings(tiny_folder("llama"), workload="tts", options={"model": str(tiny_folder("llama"))}),
            tmp_path / "run", quiet,
        )  # fmt: skip
    assert not (tmp_path / "run" / "run.json").exists()


def test_inputs_and_comparison_are_frozen(tiny_folder: Folder) -> None:
    workload = LLMWorkload(model=str(tiny_folder("llama")), dtype="float32", prompt_len=400, max_new_tokens=8)
    case = freeze(workload, settings(tiny_folder("llama"), seed=3))
    assert [item.role for item in case.inputs] == ["main", "holdout", *["diverse"] * 12]
    assert len({item.inputs.token_ids for item in case.inputs}) == 14
    assert {len(item.inputs.token_ids) for item in case.inputs} == {400}
    # The warm-up has the shape of an input and none of its text.
    main = case.inputs[0].inputs
    assert sorted(case.warm_up.token_ids) == sorted(main.token_ids)
    assert case.warm_up.max_new_tokens == main.max_new_tokens
    grams = {main.token_ids[i : i + 6] for i in range(395)}
    assert not grams & {case.warm_up.token_ids[i : i + 6] for i in range(395)}
    assert not case.compare(Output(token_ids=(1,)), Output(token_ids=(2,))).is_equal


@pytest.mark.slow
@pytest.mark.usefixtures("_two_diverse")
def test_a_file_is_evaluated_end_to_end(tiny_folder: Folder, tmp_path: Path) -> None:
    transform = file(tmp_path)
    stages: list[str] = []
    results = evaluate_e2e(
        Candidate(transform=transform), settings(tiny_folder("llama")), tmp_path / "run",
        lambda stage, *_: stages.append(stage),
    )  # fmt: skip
    assert results["status"] == "complete"
    assert results["num_mismatched_tokens"] == 0
    assert [row["label"] for row in results["inputs"]] == ["main", "holdout", "poem", "code"]
    evidence, written = read_run(tmp_path / "run")
    assert written == results
    assert check_seal(tmp_path / "run") == []
    assert evidence.kind == "evaluate"
    assert evidence.request["candidate"]["sha256"] == hashlib.sha256(PLAIN.encode()).hexdigest()
    assert evidence.floor is not None
    assert evidence.plan is None
    assert (tmp_path / "run" / evaluate.TRANSFORM).read_text() == PLAIN
    assert set(evidence.texts) == {"main", "holdout", "poem", "code"}
    assert len(evidence.texts["code"]["pieces"]) == 8
    assert len(evidence.of("main", "stock-solo")) == len(evidence.of("main", "mine")) == 5
    assert "stock alone, run 1 of 5" in stages


@pytest.mark.slow
@pytest.mark.usefixtures("_two_diverse")
def test_a_built_in_drafter_is_evaluated_with_its_plan_and_traces(
    tiny_folder: Folder, tmp_path: Path, scratch_cache: Path
) -> None:
    results = evaluate_e2e(
        Candidate(drafter="lookup", depth=4), settings(tiny_folder("llama")), tmp_path / "run", quiet
    )
    evidence, _ = read_run(tmp_path / "run")
    assert results["num_mismatched_tokens"] == 0
    assert results["arm"] == "lookup"
    assert evidence.plan is not None
    assert evidence.curve is not None
    assert results["claim"] == evidence.plan.claim
    assert all(d.trace is not None for d in evidence.of("code", "lookup"))
    plain = evidence.of("code", "serial")
    assert len(plain) == 5
    assert all(r.num_drafted == 0 for d in plain for r in d.trace.rounds)  # type: ignore[union-attr]
    legs = [d.leg for d in evidence.decodes]
    assert len(paired_ratios(legs, "code", "lookup", base="serial")) == 5
    assert all(row["reconciled"] for row in results["inputs"])
    assert not (tmp_path / "run" / evaluate.TRANSFORM).exists()


@pytest.mark.slow
@pytest.mark.usefixtures("_two_diverse")
def test_ctrl_c_leaves_the_finished_rows_in_a_folder_that_opens(tiny_folder: Folder, tmp_path: Path) -> None:
    def report(stage: str, *_: object) -> None:
        if stage == "poem, pair 3 of 5":
            raise KeyboardInterrupt

    results = evaluate_e2e(
        Candidate(transform=file(tmp_path)), settings(tiny_folder("llama")), tmp_path / "run", report
    )
    assert results["status"] == "interrupted"
    evidence, written = read_run(tmp_path / "run")
    assert written == results
    assert evidence.status == "interrupted"
    assert [len(evidence.of(label, "mine")) for label in ("main", "holdout", "poem", "code")] == [5, 5, 2, 0]
    assert check_seal(tmp_path / "run") == []


@pytest.mark.slow
@pytest.mark.usefixtures("_two_diverse")
def test_a_run_that_is_not_exact_is_judged_by_the_gates(tiny_folder: Folder, tmp_path: Path) -> None:
    body = (
        "def apply(workload):\n"
        "    stock = workload.run\n"
        "    workload.run = lambda inputs: [*stock(inputs)[:-1], 5]\n"
    )
    results = evaluate_e2e(
        Candidate(transform=file(tmp_path, body)),
        settings(tiny_folder("llama"), quality="near-lossless", limits={"max_nll_increase": 1e-6}),
        tmp_path / "run", quiet,
    )  # fmt: skip
    rows = {row["gate"]: row for row in results["gates"]}
    assert rows["mean_kl"]["value"] < 1e-9
    assert rows["top1"]["value"] == 1
    assert rows["nll_increase"]["value"] > 1e-6
    assert results["verdict"]["outcome"] == "fail"
    assert any("nll_increase is" in reason for reason in results["verdict"]["reasons"])
