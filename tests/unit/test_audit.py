"""An honest run passes; every edit, forgery and wrong token is found and named, and nothing else is said."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof import audit as module
from draftproof import wire
from draftproof.audit import AuditReport, Finding, audit
from draftproof.errors import ModelFileError, StorageError, UsageError
from draftproof.folder import (
    AUDIT,
    CHAINED,
    REPLAY,
    RUN,
    SEAL,
    Evidence,
    check_seal,
    read_chained,
    read_json,
    read_run,
    seal,
    write_run,
)
from draftproof.machine import describe
from draftproof.models.stock import StockModel
from draftproof.models.weights import identity
from draftproof.record import Plan
from draftproof.replay import Mismatch, ReplayRow
from draftproof.results import compute

Honest = Callable[..., Evidence]
CPU = torch.device("cpu")
Rows = list[dict[str, Any]]


class Oracle:
    """Stock as the test says it is: its output by label; counts how often it is asked."""

    def __init__(self, outputs: dict[str, Sequence[int]], gap: float | None = 0.5) -> None:
        self.outputs, self.gap, self.asked = outputs, gap, list[str]()

    def __call__(self, label: str, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> ReplayRow:
        self.asked.append(label)
        wrong = [
            Mismatch(position=i, emitted=token, expected=want, gap=self.gap, rank=1)
            for i, (token, want) in enumerate(zip(token_ids, self.outputs[label], strict=True))
            if token != want
        ]  # fmt: skip
        return ReplayRow(
            label=label, num_tokens=len(token_ids), mismatches=tuple(wrong), margins=(1.5,) * len(token_ids)
        )


def publish(folder: Path, evidence: Evidence) -> Path:
    write_run(folder, evidence, compute(evidence))
    return folder


@pytest.fixture(scope="module")
def plain(honest_run: Honest) -> dict[str, Sequence[int]]:
    """What stock emits."""
    return {d.leg.label: d.token_ids for d in honest_run(pairs=1).decodes if d.leg.arm == "stock"}


@pytest.fixture(scope="module")
def written(honest_run: Honest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("run"), honest_run())


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """An honest run to spoil."""
    return Path(shutil.copytree(written, tmp_path / "run"))


def told(report: AuditReport) -> list[str]:
    return [f"{f.check}: {f.message}" for f in report.findings]


def forge(folder: Path, **edits: Callable[[Rows], Any]) -> None:
    """Edit rows by file (without suffix), chain them anew and seal the folder: what a careful forger does."""
    for name, edit in edits.items():
        path = folder / f"{name}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [{k: v for k, v in row.items() if k not in ("previous", "hash")} for row in lines]
        edit(rows)
        wire.write_lines(path, wire.chain(rows))
    seal(folder)


def publish_again(folder: Path) -> None:
    """Recompute the results too."""
    evidence, _ = read_run(folder)
    publish(folder, evidence)


# --- an honest run -------------------------------------------------------------------------------------


def test_an_honest_run_passes(folder: Path, plain: dict[str, Sequence[int]]) -> None:
    stock, before = Oracle(plain), read_json(folder / SEAL)["hash"]
    report = audit(folder, stock=stock)
    assert told(report) == []
    assert stock.asked == ["news", "code"], "an output three arms share is replayed once"
    assert report == AuditReport(
        outcome="pass", num_legs=18, num_figures=report.num_figures, num_outputs=2, num_tokens=80,
        num_mismatches=0, num_ties=0, rate_bound=3 / 80, findings=(),
    )  # fmt: skip
    assert report.num_figures > 100
    assert check_seal(folder) == []
    assert read_json(folder / SEAL)["hash"] == before, "the ledger's hash still holds"
    assert read_json(folder / AUDIT) == {"format_version": wire.FORMAT_VERSION, **wire.encode(report)}
    rows = read_chained(folder / REPLAY)
    hidden = ("previous", "hash")
    assert [{k: v for k, v in row.items() if k not in hidden} for row in rows] == [
        {"label": label, "arms": ["lookup", "serial", "stock"], "num_tokens": 40, "mismatches": [],
         "margins": [1.5] * 40, "tokens_sha256": wire.tokens_sha256(plain[label])}
        for label in ("news", "code")
    ]  # fmt: skip


def test_an_audit_is_the_same_again(folder: Path, plain: dict[str, Sequence[int]]) -> None:
    first = audit(folder, stock=Oracle(plain))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert audit(folder, stock=Oracle(plain)) == first
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_without_a_replay(folder: Path) -> None:
    def never(*_: Any) -> ReplayRow:
        raise AssertionError

    report = audit(folder, replay=False, stock=never)
    assert (report.outcome, report.num_outputs, report.num_tokens, report.rate_bound) == (
        "pass",
        None,
        0,
        None,
    )
    assert (folder / AUDIT).exists()
    assert not (folder / REPLAY).exists()


def test_an_interrupted_audit_leaves_the_folder_as_it_was(folder: Path) -> None:
    def interrupt(*_: Any) -> ReplayRow:
        raise KeyboardInterrupt

    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(KeyboardInterrupt):
        audit(folder, stock=interrupt)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files


def test_a_folder_that_cannot_be_written_is_audited_all_the_same(
    folder: Path, plain: dict[str, Sequence[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise StorageError("cannot write audit.json: Read-only file system")

    monkeypatch.setattr(module, "write_atomic", refuse)
    report = audit(folder, stock=Oracle(plain))
    assert report.outcome == "pass"
    assert report.findings == (
        Finding(check="seal", is_failure=False,
                message="the audit was not written: cannot write audit.json: Read-only file system"),
    )  # fmt: skip


# --- bytes ---------------------------------------------------------------------------------------------


def test_twenty_random_single_byte_edits_are_found_and_named(
    folder: Path, plain: dict[str, Sequence[int]]
) -> None:
    audit(folder, stock=Oracle(plain))
    (folder / "report.html").write_text("<p>a report</p>")
    seal(folder)
    rng = random.Random(2024)
    names = sorted(path.name for path in folder.iterdir())
    assert len(names) == len(CHAINED) + 5
    full = [name for name in names if (folder / name).stat().st_size]
    assert [name for name in names if name not in full] == ["gates.jsonl"]
    for name in (full + rng.choices(full, k=20))[:20]:
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        data = bytearray(files[name])
        data[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        (folder / name).write_bytes(data)
        report = audit(folder, stock=Oracle(plain))
        assert report.outcome == "fail"
        assert any(f.check == "seal" and name in f.message for f in report.findings), (name, told(report))
        assert {path.name for path in folder.iterdir()} == set(names)
        (folder / name).write_bytes(files[name])
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files, "nothing was written"
    assert audit(folder, stock=Oracle(plain)).outcome == "pass"


def test_a_broken_chain_says_which_row_and_the_rest_is_still_read(
    folder: Path, plain: dict[str, Sequence[int]]
) -> None:
    path = folder / "legs.jsonl"
    path.write_text(path.read_text().replace('"pair":1', '"pair":7', 1))
    report = audit(folder, stock=Oracle(plain))
    assert told(report)[:2] == [
        "seal: legs.jsonl was changed",
        "record: legs.jsonl: the hash chain breaks at row 3",
    ]
    assert "nothing for the leg ('news', 'stock', 7)" in told(report)[2]
    assert report.num_outputs is None
    assert not (folder / AUDIT).exists()


def test_a_seal_made_anew_does_not_hide_a_broken_chain(folder: Path, plain: dict[str, Sequence[int]]) -> None:
    path = folder / "gates.jsonl"
    path.write_text('{"hash":"0","previous":"0"}\n')
    seal(folder)
    report = audit(folder, stock=Oracle(plain))
    assert told(report)[0] == "record: gates.jsonl: the hash chain breaks at row 0"
    assert report.num_outputs == 2, "the audit went on"


def test_every_file_is_named_not_only_the_first(folder: Path, plain: dict[str, Sequence[int]]) -> None:
    (folder / "texts.jsonl").unlink()
    (folder / "more.txt").write_text("")
    (folder / "gates.jsonl").write_text("x\n")
    report = audit(folder, stock=Oracle(plain))
    assert told(report) == [
        "seal: texts.jsonl is missing", "seal: gates.jsonl was changed", "seal: more.txt was added",
        "record: texts.jsonl is missing",
        "record: gates.jsonl: row 0 is damaged: Expecting value: line 1 column 1 (char 0)",
    ]  # fmt: skip
    assert report.num_outputs == 2


def test_a_replay_edited_under_a_new_seal(folder: Path, plain: dict[str, Sequence[int]]) -> None:
    audit(folder, stock=Oracle(plain))
    path = folder / REPLAY
    path.write_text(path.read_text().replace("1.5", "1.6", 1))
    seal(folder)
    assert told(audit(folder, replay=False)) == [f"seal: {path}: the hash chain breaks at row 0"]


# --- what cannot be audited ----------------------------------------------------------------------------


def test_places_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no run in .*: run\.json is missing"):
        audit(tmp_path)
    with pytest.raises(UsageError, match="no run in"):
        audit(tmp_path / "nowhere")
    (tmp_path / RUN).write_text("not ours")
    with pytest.raises(UsageError, match="cannot be audited"):
        audit(tmp_path)


@pytest.mark.parametrize("version", [1, wire.FORMAT_VERSION + 1, None, "2"])
@pytest.mark.parametrize("is_sealed", [True, False])
def test_other_formats_are_refused(folder: Path, version: Any, is_sealed: bool) -> None:
    document = {**read_json(folder / RUN), "format_version": version}
    wire.write_atomic(folder / RUN, wire.canonical(document) + "\n")
    seal(folder)
    if not is_sealed:
        (folder / SEAL).unlink()
    with pytest.raises(UsageError, match=rf"cannot be audited: format {version!r}, this draftproof reads"):
        audit(folder)


def test_a_format_that_an_edit_made_is_an_edit(folder: Path) -> None:
    text = (folder / RUN).read_text()
    for other in ("1", "9"):
        (folder / RUN).write_text(text.replace('"format_version":2', f'"format_version":{other}'))
        assert told(audit(folder, replay=False)) == ["seal: run.json was changed"]


def test_a_run_without_its_seal(folder: Path, plain: dict[str, Sequence[int]]) -> None:
    (folder / SEAL).unlink()
    assert told(audit(folder, stock=Oracle(plain))) == ["seal: seal.json is missing"]
    assert not (folder / SEAL).exists()


# --- forgeries with seal and chains made right ---------------------------------------------------------


def faster(rows: Rows) -> None:
    for row in rows:
        if row["arm"] == "lookup" and row["label"] == "code":
            row["duration_ns"] -= 5_000_000


def test_durations_changed_and_figures_left(folder: Path, plain: dict[str, Sequence[int]]) -> None:
    """Both the recomputation and the arithmetic by hand name the figure, with both values."""
    published = read_json(folder / RUN)["results"]
    forge(folder, legs=faster)
    report = audit(folder, stock=Oracle(plain))
    evidence, _ = read_run(folder)
    recomputed = compute(evidence)
    old, new = published["inputs"][1]["speedup"]["median"], recomputed["inputs"][1]["speedup"]["median"]
    assert new > old + 0.5
    assert f"figure: results.inputs[1].speedup.median: published {old}, recomputed {new}" in told(report)
    assert f"figure: by hand: code, speedup: median is {new}, published {old}" in told(report)
    assert any(line.startswith("figure: results.speedup.median: ") for line in told(report))
    assert any(line.startswith("figure: by hand: speedup: median is ") for line in told(report))
    assert {f.check for f in report.findings} == {"figure"}
    assert read_json(folder / AUDIT)["outcome"] == "fail", "the seal was good, so the verdict is kept"


def test_one_figure_changed(folder: Path, plain: dict[str, Sequence[int]]) -> None:
    document = read_json(folder / RUN)
    document["results"]["peak_bytes"]["engine"] -= 1
    wire.write_atomic(folder / RUN, wire.canonical(document) + "\n")
    seal(folder)
    assert told(audit(folder, stock=Oracle(plain))) == [
        "figure: results.peak_bytes.engine: published 1000999, recomputed 1001000"
    ]


def test_durations_and_figures_changed_is_what_only_the_ledger_finds(
    folder: Path, plain: dict[str, Sequence[int]]
) -> None:
    before = read_json(folder / SEAL)["hash"]
    forge(folder, legs=faster)
    publish_again(folder)
    assert audit(folder, stock=Oracle(plain)).outcome == "pass"
    assert read_json(folder / SEAL)["hash"] != before


def test_tokens_swapped_between_arms(
    honest_run: Honest, tmp_path: Path, plain: dict[str, Sequence[int]]
) -> None:
    """A run whose lookup went wrong; the forger gives its tokens to stock."""
    wrong = (*plain["code"][:-1], 1 + plain["code"][-1] % 287)
    folder = publish(tmp_path, honest_run(changed={("code", "lookup"): wrong}))

    def swap(rows: Rows) -> None:
        arms = {(row["label"], row["arm"], row["pair"]): row for row in rows}
        for pair in range(3):
            one, other = arms["code", "lookup", pair], arms["code", "stock", pair]
            for name in {"token_ids", "tokens_sha256"} & set(one):
                one[name], other[name] = other[name], one[name]

    hashes = "its tokens are not those its leg was timed with (tokens_sha256)"
    forge(folder, tokens=swap)
    findings = told(audit(folder, stock=Oracle(plain)))
    for pair in range(3):
        for arm in ("lookup", "stock"):
            assert f"record: code, {arm}, pair {pair}: {hashes}" in findings
    forge(folder, legs=swap)  # the hashes follow
    publish_again(folder)
    report = audit(folder, stock=Oracle(plain))
    assert [line for line in told(report) if line.startswith("record")] == [
        f"record: code, lookup, pair {pair}: its trace emits other tokens" for pair in (0, 1, 2)
    ]
    assert [line for line in told(report) if line.startswith("replay")] == [
        f"replay: code, stock: token 39 is {wrong[-1]}, stock's is {plain['code'][-1]}"
        " (gap 0.5, rank 1): a bug"
    ]


def test_one_emitted_token_changed_everywhere(
    honest_run: Honest, tmp_path: Path, plain: dict[str, Sequence[int]]
) -> None:
    """Hashes, traces, figures, chains and seal all agree: only a replay can tell."""
    other = (*plain["news"][:17], (plain["news"][17] + 5) % 288, *plain["news"][18:])
    folder = publish(tmp_path, honest_run({"news": other, "code": plain["code"]}))
    assert audit(folder, replay=False).outcome == "pass"
    report = audit(folder, stock=Oracle(plain))
    assert told(report) == [
        f"replay: news, lookup and serial and stock: token 17 is {other[17]}, stock's is {plain['news'][17]}"
        " (gap 0.5, rank 1): a bug"
    ]
    assert (report.outcome, report.num_mismatches, report.rate_bound) == ("fail", 1, None)
    row = read_chained(folder / REPLAY)[0]
    assert row["mismatches"] == [
        {"position": 17, "emitted": other[17], "expected": plain["news"][17], "gap": 0.5, "rank": 1}
    ]


def test_a_leg_deleted(folder: Path, plain: dict[str, Sequence[int]]) -> None:
    """The slowest lookup leg goes from every file, the others are numbered anew, figures are recomputed."""

    def drop(rows: Rows) -> None:
        rows[:] = [r for r in rows if (r["label"], r["arm"], r.get("pair")) != ("news", "lookup", 1)]
        for number, row in enumerate(rows):
            if "order" in row:
                row["order"] = number

    forge(folder, legs=drop, tokens=drop, trace=drop)
    publish_again(folder)
    assert told(audit(folder, stock=Oracle(plain))) == ["record: news, pair 1: no leg of lookup"]


def test_an_accepted_count_raised(folder: Path, plain: dict[str, Sequence[int]]) -> None:
    def raised(rows: Rows) -> None:
        row = next(r for r in rows if r.get("num_drafted") and r["num_accepted"] < r["num_drafted"])
        assert (row["label"], row["arm"], row["pair"]) == ("news", "lookup", 0)
        row["num_accepted"] += 1

    forge(folder, trace=raised)
    publish_again(folder)
    report = audit(folder, stock=Oracle(plain))
    assert [f.check for f in report.findings] == ["record"]
    assert "news, lookup, pair 0: round" in report.findings[0].message
    assert "accepted a token it was not offered" in report.findings[0].message


def test_rows_that_no_figure_can_be_made_from(folder: Path, plain: dict[str, Sequence[int]]) -> None:
    forge(folder, gates=lambda rows: rows.append({"label": "news"}))
    assert told(audit(folder, stock=Oracle(plain))) == [
        "figure: the figures cannot be recomputed: KeyError('is_met')"
    ]


# --- what a mismatch is --------------------------------------------------------------------------------


def wrong_run(
    honest_run: Honest, plain: dict[str, Sequence[int]], plan: Plan | None, **request: Any
) -> Evidence:
    """Lookup emits one other token at the end of ``code``."""
    wrong = (*plain["code"][:-1], (plain["code"][-1] + 1) % 288)
    return replace(honest_run(changed={("code", "lookup"): wrong}, **request), plan=plan)


BITWISE = Plan(claim="bitwise", dtype="float32", fingerprint="f", ops=(), max_rows=4)
GUARDED = replace(BITWISE, claim="guarded", margin_bound=0.25)
FIXED = replace(BITWISE, claim="fixed", fixed_rows=4)
RELAXED = {"quality": "relaxed"}
TIE, BUG, ALLOWED = "a tie within the measured noise", "a bug", "allowed, as stock's tokens are not claimed"


@pytest.mark.parametrize(
    ("plan", "request_", "gap", "kind"),
    [
        (GUARDED, {}, 0.25, TIE), (GUARDED, {}, 0.0, TIE), (GUARDED, {}, 0.2500001, BUG),
        (GUARDED, {}, None, BUG), (BITWISE, {}, 1e-7, BUG), (BITWISE, {}, 0.0, BUG),
        (None, {}, 0.0, BUG), (FIXED, {}, 3.0, ALLOWED),
        (None, RELAXED, 3.0, ALLOWED), (BITWISE, {"quality": "near-lossless"}, 3.0, ALLOWED),
    ],
)  # fmt: skip
def test_the_kind_of_a_mismatch_follows_the_claim(
    honest_run: Honest, tmp_path: Path, plain: dict[str, Sequence[int]], plan: Plan | None,
    request_: dict[str, Any], gap: float | None, kind: str,
) -> None:  # fmt: skip
    folder = publish(tmp_path, wrong_run(honest_run, plain, plan, **request_))
    report = audit(folder, stock=Oracle(plain, gap))
    (finding,) = report.findings
    why = {
        None: " (the rules forbid the one emitted, or the model has no such token)",
        0.0: " (gap 0, rank 1, an exact tie of equal logits)",
    }
    told_gap = why.get(gap, f" (gap {gap:.6g}, rank 1)" if gap else "")
    want = plain["code"][-1]
    got = (want + 1) % 288
    assert finding.message == f"code, lookup: token 39 is {got}, stock's is {want}{told_gap}: {kind}"
    assert finding.is_failure is (kind == BUG)
    assert report.outcome == ("fail" if kind == BUG else "pass")
    assert (report.num_mismatches, report.num_ties, report.num_outputs) == (1, int(kind == TIE), 3)
    assert report.rate_bound is None


@pytest.mark.parametrize(("plan", "request_"), [(GUARDED, {}), (FIXED, {}), (BITWISE, RELAXED)])
def test_stock_itself_has_no_licence_to_differ(
    honest_run: Honest, tmp_path: Path, plain: dict[str, Sequence[int]], plan: Plan, request_: dict[str, Any]
) -> None:
    folder = publish(tmp_path, replace(honest_run(**request_), plan=plan))
    other = {**plain, "news": (*plain["news"][:-1], (plain["news"][-1] + 1) % 288)}
    report = audit(folder, stock=Oracle(other, 0.0))
    assert [f.message.rsplit(": ", 1)[1] for f in report.findings] == [BUG]


@pytest.mark.parametrize(
    ("mismatch", "text"),
    [
        (Mismatch(position=40, emitted=None, expected=7), "it ends after 40 tokens, stock goes on with 7"),
        (Mismatch(position=3, emitted=7, expected=None), "token 3 is 7, stock had stopped"),
    ],
)
def test_outputs_that_end_elsewhere(
    folder: Path, plain: dict[str, Sequence[int]], mismatch: Mismatch, text: str
) -> None:
    def stock(label: str, *_: Any) -> ReplayRow:
        found = (mismatch,) if label == "code" else ()
        return ReplayRow(label=label, num_tokens=40, mismatches=found, margins=(0.5,) * 40)

    assert told(audit(folder, stock=stock)) == [f"replay: code, lookup and serial and stock: {text}: a bug"]


# --- prompts, and runs that cannot be replayed ---------------------------------------------------------


def test_prompts_are_compared_with_what_the_suite_gives(
    folder: Path, plain: dict[str, Sequence[int]], honest_run: Honest
) -> None:
    run = honest_run()
    same = {label: list(ids) for label, ids in run.prompts.items()}
    assert told(audit(folder, stock=Oracle(plain), prompts=lambda _: same)) == []
    other = {**same, "news": [1, *same["news"][1:]], "poem": [1]}
    assert told(audit(folder, stock=Oracle(plain), prompts=lambda _: other)) == [
        "record: news: its prompt in prompts.jsonl is not the one the suite gives",
        "record: poem: its prompt in prompts.jsonl is not the one the suite gives",
    ]


def test_prompts_that_cannot_be_built_are_no_failure(folder: Path, plain: dict[str, Sequence[int]]) -> None:
    def refuse(_: Evidence) -> dict[str, Sequence[int]]:
        raise ModelFileError("no usable tokenizer in x")

    report = audit(folder, stock=Oracle(plain), prompts=refuse)
    assert report.outcome == "pass"
    assert told(report) == ["replay: the prompts were taken as recorded: no usable tokenizer in x"]


def test_speech_is_not_replayed_and_that_is_said(honest_run: Honest, tmp_path: Path) -> None:
    run = honest_run(workload="tts")
    folder = publish(tmp_path, replace(run, prompts={}))
    report = audit(folder, stock=Oracle({}))
    assert told(report) == ["replay: nothing to replay: the outputs are not a language model's tokens"]
    assert (report.outcome, report.num_outputs) == ("pass", None)


def test_a_model_that_is_not_here_fails_the_replay_and_leaves_the_rest(folder: Path) -> None:
    report = audit(folder)
    assert (report.outcome, report.num_outputs) == ("fail", None)
    (line,) = told(report)
    assert line.startswith(
        "replay: the tokens could not be replayed (--no-replay audits the rest): no model 'tiny'"
    )


@pytest.mark.parametrize(
    "request_", [{"max_new_tokens": None}, {"max_new_tokens": 0}, {"stop": None}, {"stop": "soon"}]
)
def test_a_request_that_does_not_say_how_outputs_end(
    honest_run: Honest, tmp_path: Path, request_: dict[str, Any]
) -> None:
    folder = publish(tmp_path, honest_run(**request_))
    (line,) = told(audit(folder))
    assert "could not be replayed" in line
    assert "the request does not say how outputs end" in line


# --- with a real model ---------------------------------------------------------------------------------

PROMPTS = {"news": (17, 200, 3, 44, 121, 9, 250, 31), "code": (8, 3, 120, 44, 6, 15, 91)}


@pytest.fixture(scope="module")
def model(tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder("llama", torch.bfloat16)


def real_run(honest_run: Honest, model: Path, stop: str) -> Evidence:
    """Stock's own tokens in every arm."""
    stock = StockModel(model, torch.bfloat16, CPU)
    options = {"min_new_tokens": 12} if stop == "fixed" else {}
    outputs = {label: stock.generate(ids, 12, **options) for label, ids in PROMPTS.items()}
    settings = {"model": str(model), "dtype": "bfloat16", "max_new_tokens": 12, "stop": stop}
    run = honest_run(outputs, prompts=PROMPTS, machine=describe(CPU), **settings)
    return replace(run, provenance={"weights": identity(model)})


def ending(model: Path, tmp_path: Path) -> Path:
    """The model with the fourth token of ``news`` as its end token."""
    fourth = StockModel(model, torch.bfloat16, CPU).generate(PROMPTS["news"], 4)[3]
    made = Path(shutil.copytree(model, tmp_path / "ending"))
    settings = json.loads((made / "generation_config.json").read_text()) | {"eos_token_id": fourth}
    (made / "generation_config.json").write_text(json.dumps(settings))
    return made


@pytest.mark.parametrize("stop", ["natural", "fixed"])
def test_the_model_of_the_request_is_replayed(
    honest_run: Honest, model: Path, tmp_path: Path, stop: str
) -> None:
    run = real_run(honest_run, ending(model, tmp_path), stop)
    folder, seen = publish(tmp_path / "run", run), list[tuple[str, int, int]]()
    assert len(run.of("news")[0].token_ids) == (4 if stop == "natural" else 12)
    report = audit(folder, progress=lambda *told: seen.append(told))
    assert told(report) == []
    assert report.num_tokens == sum(len(run.of(label)[0].token_ids) for label in PROMPTS)
    assert len(seen) == report.num_tokens
    assert seen[0] == ("news", 1, len(run.of("news")[0].token_ids))
    assert all(margin > 0 for row in read_chained(folder / REPLAY) for margin in row["margins"])


@pytest.mark.parametrize(("stop", "other"), [("fixed", "natural"), ("natural", "fixed")])
def test_the_rule_of_the_end_counts(
    honest_run: Honest, model: Path, tmp_path: Path, stop: str, other: str
) -> None:
    """A fixed run masked the end token that a natural one has as its fourth."""
    run = real_run(honest_run, ending(model, tmp_path), stop)
    called = replace(run, request={**run.request, "stop": other})
    report = audit(publish(tmp_path / "run", called))
    (line,) = told(report)
    assert line.startswith("replay: news, lookup and serial and stock: token 3 is ")
    assert line.endswith("rank 1): a bug" if stop == "fixed" else "has no such token): a bug")


def test_an_evaluations_options_are_its_workloads(honest_run: Honest, model: Path, tmp_path: Path) -> None:
    run = real_run(honest_run, ending(model, tmp_path), "fixed")
    own = {k: v for k, v in run.request.items() if k not in ("max_new_tokens", "stop")}
    options = {"max_new_tokens": 12, "stop": "fixed"}
    evaluated = replace(run, kind="evaluate", request={**own, "workload": "llm", "options": options})
    assert told(audit(publish(tmp_path / "run", evaluated))) == []


def test_one_token_of_a_real_output(honest_run: Honest, model: Path, tmp_path: Path) -> None:
    run = real_run(honest_run, model, "fixed")
    first = {label: run.of(label)[0].token_ids for label in PROMPTS}
    other = (*first["code"][:-1], (first["code"][-1] + 1) % 288)
    wrong = honest_run({**first, "code": other}, prompts=PROMPTS, machine=run.machine, **run.request)
    (line,) = told(audit(publish(tmp_path / "run", wrong)))
    start = "replay: code, lookup and serial and stock: token 11 is"
    assert line.startswith(f"{start} {other[-1]}, stock's is {first['code'][-1]} (gap ")


def test_another_machine_is_said_and_the_threads_are_the_runs(
    honest_run: Honest, model: Path, tmp_path: Path
) -> None:
    run = real_run(honest_run, model, "fixed")
    assert torch.get_num_threads() == 2
    machine = replace(
        run.machine, torch="1.0", num_threads=1, environment=("OMP_NUM_THREADS=9", "MKL_CBWR=X")
    )
    folder, threads = (
        publish(tmp_path / "run", replace(run, machine=machine, provenance={"weights": "w"})),
        set(),
    )
    report = audit(folder, progress=lambda *_: threads.add(torch.get_num_threads()))
    assert threads == {1}
    assert torch.get_num_threads() == 2
    notes = [f.message for f in report.findings if not f.is_failure]
    rest = dict(note.removeprefix("replayed with another ").split(": ", 1) for note in notes)
    assert set(rest) >= {"torch", "weights", "environment"}
    assert "num_threads" not in rest
    assert rest["torch"] == f"{torch.__version__} here, 1.0 in the run; bits may differ"
    assert rest["environment"].endswith("MKL_CBWR=X in the run; bits may differ")
    assert rest["weights"] == f"{identity(model)} here, w in the run; bits may differ"
