"""A run comes back from its folder as it went in; one changed byte anywhere is found and its file named."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftproof import wire
from draftproof.errors import EvidenceError, UsageError
from draftproof.folder import (
    CHAINED,
    DERIVED,
    RUN,
    SEAL,
    Evidence,
    check_seal,
    read_chained,
    read_json,
    read_run,
    salvage,
    seal,
    write_run,
)
from draftproof.record import CostCurve

Honest = Callable[..., Evidence]
RESULTS = {"speedup": {"median": 2.5}, "inputs": [], "by_depth": {2: 0.5, 10: 0.25}}
PLAIN = {**RESULTS, "by_depth": {"2": 0.5, "10": 0.25}}
FILES = (*CHAINED, RUN, SEAL)


@pytest.fixture(scope="module")
def written(honest_run: Honest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with a report; treat as read-only."""
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, full(honest_run()), RESULTS)
    (folder / "report.html").write_text("<p>é</p>")
    seal(folder)
    return folder


def full(run: Evidence) -> Evidence:
    """With everything a run can have."""
    curve = CostCurve(rows=(1, 2), contexts=(16,), seconds=((0.1, 0.125),))
    gate = {"label": "news", "gate": "kl", "value": 0.01, "limit": 0.05, "is_met": True, "quality": "relaxed"}
    return replace(run, curve=curve, gates=(gate,))


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(written, tmp_path / "run"))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def forge(path: Path, edit: Callable[[list[dict[str, Any]]], Any]) -> None:
    """Edit the rows of a file, chain them anew and seal the folder again."""
    rows = [{k: v for k, v in row.items() if k not in ("previous", "hash")} for row in rows_of(path)]
    edit(rows)
    wire.write_lines(path, wire.chain(rows))
    seal(path.parent)


def change_run(folder: Path, **changes: Any) -> None:
    document = {**read_json(folder / RUN), **changes}
    wire.write_atomic(folder / RUN, wire.canonical(document) + "\n")
    seal(folder)


# --- there and back ------------------------------------------------------------------------------------


def test_a_run_comes_back_equal(written: Path, honest_run: Honest) -> None:
    evidence, results = read_run(written)
    assert evidence == full(honest_run())
    assert list(evidence.roles) == ["news", "code"]
    assert results == PLAIN
    assert check_seal(written) == []
    assert sorted(p.name for p in written.iterdir()) == sorted((*FILES, "report.html"))


def test_what_a_run_has_not(honest_run: Honest, tmp_path: Path) -> None:
    bare = replace(
        honest_run(), plan=None, floor=None, prompts={}, decodes=(), texts={}, gates=(), notes=(),
        provenance={}, kind="evaluate", status="failed: why", arm="mine",
    )  # fmt: skip
    write_run(tmp_path, bare, {})
    assert read_run(tmp_path) == (bare, {})
    assert bare.labels == ()


def test_writing_again_replaces_everything(honest_run: Honest, tmp_path: Path) -> None:
    write_run(tmp_path, full(honest_run()), RESULTS)
    less = honest_run({"code": (1, 2, 3)}, pairs=1)
    write_run(tmp_path, less, {"a": 1})
    assert read_run(tmp_path) == (less, {"a": 1})
    assert check_seal(tmp_path) == []


def test_labels_and_decodes_of_an_input(honest_run: Honest) -> None:
    run = honest_run()
    some = replace(run, decodes=tuple(d for d in run.decodes if d.leg.label == "code"))
    assert (run.labels, some.labels) == (("news", "code"), ("code",))
    assert [d.leg.order for d in run.of("code")] == list(range(9, 18))
    assert [d.leg.order for d in run.of("code", "stock")] == [11, 12, 17]


def test_files_are_chained_canonical_and_name_a_version(written: Path) -> None:
    for name in CHAINED:
        rows = rows_of(written / name)
        assert rows == read_chained(written / name)
        assert rows
        assert (written / name).read_text() == "".join(wire.canonical(row) + "\n" for row in rows)
    text = (written / RUN).read_text()
    assert text == wire.canonical(json.loads(text)) + "\n"
    assert json.loads(text)["format_version"] == wire.FORMAT_VERSION


def test_killed_between_two_files_the_legs_of_before_can_be_read(
    honest_run: Honest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was written of the second state, the first one's legs and all they need are there."""
    first, second = honest_run({"news": (1, 2, 3)}), honest_run({"news": (1, 2, 3), "code": (4, 5)})
    for stop in range(len(FILES)):
        folder, left = tmp_path / str(stop), [stop]
        write_run(folder, first, {})

        def write(path: Path, text: str, left: list[int] = left) -> None:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            wire.write_atomic(path, text)

        with monkeypatch.context() as patch:
            patch.setattr("draftproof.folder.write_atomic", write)
            with pytest.raises(KeyboardInterrupt):
                write_run(folder, second, {})
        evidence = salvage(folder).evidence
        assert evidence is not None
        assert evidence.decodes == (second if stop >= len(CHAINED) else first).decodes


# --- the seal ------------------------------------------------------------------------------------------


def test_the_seal_by_hand(tmp_path: Path) -> None:
    (tmp_path / RUN).write_text("run")
    (tmp_path / "audit.json").write_text("audit")
    digest = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("run", "audit")}
    body = f'{{"files":{{"run.json":"{digest["run"]}"}},"format_version":{wire.FORMAT_VERSION}}}'
    own = hashlib.sha256(body.encode()).hexdigest()
    assert seal(tmp_path) == own
    derived = f'{{"audit.json":"{digest["audit"]}"}}'
    assert read_json(tmp_path / SEAL) == {
        **json.loads(body), "hash": own, "derived": json.loads(derived),
        "derived_hash": hashlib.sha256(derived.encode()).hexdigest(),
    }  # fmt: skip


def test_what_is_made_later_leaves_the_hash_of_what_was_measured(folder: Path) -> None:
    before = read_json(folder / SEAL)["hash"]
    for name in DERIVED:
        (folder / name).write_text("new")
        assert check_seal(folder) != []
        assert seal(folder) == before
        assert check_seal(folder) == []
    (folder / "transform.py").write_text("pass")
    assert seal(folder) != before


def test_files_that_come_go_and_change_are_named(folder: Path) -> None:
    (folder / "legs.jsonl").unlink()
    (folder / "texts.jsonl").write_bytes((folder / "texts.jsonl").read_bytes() + b"\n")
    (folder / "sub").mkdir()
    (folder / "sub" / "new.txt").write_text("")
    (folder / ".hidden").write_text("")
    assert check_seal(folder) == ["legs.jsonl is missing", "texts.jsonl was changed", "sub/new.txt was added"]
    seal(folder)
    (folder / "sub" / "new.txt").write_text("x")
    assert check_seal(folder) == ["sub/new.txt was changed"]


def test_a_file_that_became_a_folder(folder: Path) -> None:
    (folder / "legs.jsonl").unlink()
    (folder / "legs.jsonl").mkdir()
    assert check_seal(folder) == ["legs.jsonl is missing"]
    with pytest.raises(UsageError, match=r"cannot read .*legs\.jsonl: Is a directory"):
        salvage(folder)


@pytest.mark.parametrize(
    "edit",
    [
        lambda d: d.update(hash="0" * 64), lambda d: d.update(derived_hash="0" * 64), lambda d: d.pop("hash"),
        lambda d: d.pop("files"), lambda d: d.pop("derived"), lambda d: d.update(files=[]),
        lambda d: d.update(derived=3), lambda d: d.update(more=1), lambda d: d.update(format_version=1),
        lambda d: d["files"].pop(RUN), lambda d: d["derived"].update(x="0"),
    ],
)  # fmt: skip
def test_a_seal_that_was_edited(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    document = read_json(folder / SEAL)
    edit(document)
    wire.write_atomic(folder / SEAL, wire.canonical(document) + "\n")
    assert check_seal(folder) == ["seal.json was changed"]


def test_a_seal_written_otherwise_is_not_the_seal(folder: Path) -> None:
    document = read_json(folder / SEAL)
    for text in (json.dumps(document) + "\n", wire.canonical(document), wire.canonical(document) + "\n\n"):
        (folder / SEAL).write_text(text)
        assert check_seal(folder) == ["seal.json was changed"]
    (folder / SEAL).write_text('{"files": NaN, "derived": {}, "format_version": 2}')
    assert check_seal(folder) == ["seal.json was changed"]
    (folder / SEAL).write_text("[]")
    with pytest.raises(EvidenceError, match=r"seal\.json is damaged: not a JSON object"):
        check_seal(folder)


# --- one byte ------------------------------------------------------------------------------------------


def found(folder: Path) -> str:
    """What the seal says, as text."""
    try:
        return "; ".join(check_seal(folder))
    except EvidenceError as error:
        return str(error)


def flip(path: Path, offset: int, mask: int) -> bytes:
    """Change one byte; returns the bytes before."""
    before = path.read_bytes()
    data = bytearray(before)
    data[offset % len(data)] ^= mask
    path.write_bytes(data)
    return before


def test_twenty_random_single_byte_edits(folder: Path) -> None:
    rng = random.Random(20)
    names = sorted(path.name for path in folder.iterdir())
    for name in (*names, *rng.choices(names, k=20)):
        before = flip(folder / name, rng.randrange(1 << 30), rng.randrange(1, 256))
        assert name in found(folder)
        (folder / name).write_bytes(before)
    assert found(folder) == ""


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), offset=st.integers(0, 1 << 24), mask=st.integers(1, 255))
def test_any_single_byte_edit(folder: Path, name: str, offset: int, mask: int) -> None:
    """The seal names the file; reading without the seal never fails but in the ways it says."""
    before = flip(folder / name, offset, mask)
    try:
        assert name in found(folder)
        reading = salvage(folder)
        if name in CHAINED:
            assert any(problem.startswith(f"{name}: row ") or name in problem for problem in reading.problems)
            with pytest.raises(EvidenceError, match=name):
                read_run(folder)
    finally:
        (folder / name).write_bytes(before)


# --- what is wrong, and where --------------------------------------------------------------------------


def no_run(folder: Path) -> None:
    (folder / RUN).unlink()


DAMAGE: dict[str, tuple[str, bytes, str]] = {
    "cut": ("legs.jsonl", b'{"a":1', "legs.jsonl: the last row is cut off"),
    "not JSON": ("legs.jsonl", b"{\n", "legs.jsonl: row 0 is damaged: Expecting"),
    "not UTF-8": ("texts.jsonl", b"{}\n\xff\n", "texts.jsonl: row 1 is damaged: 'utf-8' codec"),
    "no object": ("trace.jsonl", b"[]\n", "trace.jsonl: row 0 is damaged: not as draftproof writes it"),
    "spaces": ("gates.jsonl", b'{"a": 1}\n', "gates.jsonl: row 0 is damaged: not as draftproof writes it"),
    "twice": ("gates.jsonl", b'{"a":1,"a":2}\n', "gates.jsonl: row 0 is damaged: not as"),
    "NaN": ("gates.jsonl", b'{"a":NaN}\n', "gates.jsonl: row 0 is damaged: a record cannot hold NaN"),
    "deep": ("gates.jsonl", b"[" * 10**5 + b"\n", "gates.jsonl: row 0 is damaged: "),
    "empty row": ("gates.jsonl", b"\n", "gates.jsonl: row 0 is damaged: Expecting"),
    "no chain": ("gates.jsonl", b'{"a":1}\n', "gates.jsonl: the hash chain breaks at row 0"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_rows_are_named(folder: Path, case: str) -> None:
    name, data, message = DAMAGE[case]
    (folder / name).write_bytes(data)
    assert salvage(folder).problems[0].startswith(message)
    for read in (lambda: read_run(folder), lambda: read_chained(folder / name)):
        with pytest.raises(EvidenceError) as caught:
            read()
        assert message in str(caught.value)
        assert str(folder) in str(caught.value)


def test_every_damaged_row_is_named_and_the_others_are_read(folder: Path) -> None:
    path = folder / "gates.jsonl"
    good = wire.canonical({"a": 1}).encode()
    path.write_bytes(b"{}}\n" + good + b"\n\xff\n" + good + b"\n")
    reading = salvage(folder)
    assert [problem.split(" is ")[0] for problem in reading.problems[:2]] == [
        "gates.jsonl: row 0", "gates.jsonl: row 2",
    ]  # fmt: skip
    assert reading.evidence is not None
    assert reading.evidence.gates == ({"a": 1}, {"a": 1})


def test_a_missing_file(folder: Path) -> None:
    (folder / "gates.jsonl").unlink()
    assert salvage(folder).problems == ("gates.jsonl is missing",)
    with pytest.raises(EvidenceError, match=r"gates\.jsonl is missing"):
        read_run(folder)


def ids(value: Any) -> Callable[[list[dict[str, Any]]], Any]:
    return lambda rows: rows[0].update(token_ids=value)


FORGED: dict[str, tuple[str, Callable[[list[dict[str, Any]]], Any], str]] = {
    "leg without tokens": ("tokens.jsonl", lambda rows: rows.pop(0), "tokens.jsonl: nothing for the leg"),
    "tokens without leg": ("legs.jsonl", lambda rows: rows.pop(), "tokens.jsonl: row 17 is not as"),
    "tokens twice": ("tokens.jsonl", lambda rows: rows.append(rows[0]), "tokens.jsonl: row 18 is not as"),
    "tokens reordered": ("tokens.jsonl", lambda rows: rows.reverse(), "tokens.jsonl: row 0 is not as"),
    "words for tokens": ("tokens.jsonl", ids(["a"]), "tokens.jsonl: ('news'"),
    "true for a token": ("tokens.jsonl", ids([True]), "tokens.jsonl: ('news'"),
    "text for tokens": ("prompts.jsonl", ids("ab"), "prompts.jsonl: ('news'"),
    "prompt twice": ("prompts.jsonl", lambda rows: rows.append(rows[1]), "prompts.jsonl: row 2 is not as"),
    "text twice": ("texts.jsonl", lambda rows: rows.append(rows[1]), "texts.jsonl: row 2 is not as"),
    "leg that takes no time": ("legs.jsonl", lambda rows: rows[3].update(duration_ns=0),
                               "legs.jsonl: row 3: a leg takes time" ),
    "leg with text for a time": ("legs.jsonl", lambda rows: rows[3].update(duration_ns="40"),
                                 "legs.jsonl: row 3 is not as"),
    "leg with more to say": ("legs.jsonl", lambda rows: rows[3].update(x=1), "legs.jsonl: row 3 is not as"),
    "leg with less": ("legs.jsonl", lambda rows: rows[2].pop("arm"), "legs.jsonl: row 2: not a Leg: arm:"),
    "rounds without prompt": ("trace.jsonl", lambda rows: rows.pop(0), "trace.jsonl: a round of ('news'"),
    "round gone": ("trace.jsonl", lambda rows: rows.pop(20), "lookup', 0): rounds out of order"),
    "prompt of no leg": ("trace.jsonl", lambda rows: rows.insert(0, {**rows[0], "label": "x"}),
                         "trace.jsonl: row 0 is not as"),
    "no label": ("texts.jsonl", lambda rows: rows[0].pop("label"), "KeyError('label')"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_rows_that_do_not_fit_are_named_though_sealed_and_chained(folder: Path, case: str) -> None:
    name, edit, message = FORGED[case]
    forge(folder / name, edit)
    assert check_seal(folder) == []
    reading = salvage(folder)
    assert len(reading.problems) == 1
    assert message in reading.problems[0]
    with pytest.raises(EvidenceError) as caught:
        read_run(folder)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"results": None}, "the results are not a JSON object"),
        ({"kind": "other"}, "not a RunDocument: kind"),
        ({"roles": {"news": "diverse"}}, "its labels are not those of its roles"),
        ({"labels": ["news", "news"]}, "its labels are not those of its roles"),
        ({"roles": {"news": "x", "code": "main"}}, "not a RunDocument: roles.news"),
        ({"machine": {}}, "not a Machine: cpu"),
        ({"plan": 3}, "not a Plan"),
        ({"notes": None}, "not a RunDocument: notes"),
    ],
)
def test_a_run_document_that_is_no_run(folder: Path, changes: dict[str, Any], message: str) -> None:
    change_run(folder, **changes)
    reading = salvage(folder)
    assert (reading.evidence, reading.results) == (None, None)
    assert message in reading.problems[-1]
    with pytest.raises(EvidenceError, match="not a complete run"):
        read_run(folder)


def test_a_run_document_without_a_field_or_written_otherwise(folder: Path) -> None:
    document = read_json(folder / RUN)
    (folder / RUN).write_text(json.dumps(document))
    assert salvage(folder).problems == ("run.json is damaged: not as draftproof writes it",)
    del document["arm"]
    wire.write_atomic(folder / RUN, wire.canonical(document) + "\n")
    with pytest.raises(EvidenceError, match="not a complete run: not a RunDocument: arm"):
        read_run(folder)
    (folder / RUN).write_text('{"a":')
    assert "run.json is damaged" in salvage(folder).problems[0]


@pytest.mark.parametrize(
    ("version", "message"),
    [(wire.FORMAT_VERSION + 1, "is newer than"), (1, "too old to read"), (None, "no format")],
)
def test_versions(folder: Path, version: int | None, message: str) -> None:
    change_run(folder, format_version=version)
    with pytest.raises(EvidenceError, match=message):
        read_run(folder)


def test_places_without_a_run(tmp_path: Path) -> None:
    for read in (read_run, salvage, check_seal):
        with pytest.raises(UsageError, match="no run in"):
            read(tmp_path)
        with pytest.raises(UsageError, match="no run in"):
            read(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot read"):
        read_run(tmp_path / "file")
