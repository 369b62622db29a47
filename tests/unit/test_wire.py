"""Records through JSON and back, hash chains against every kind of tampering, files whole or not at all."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import math
import os
import stat
import subprocess
import sys
import tempfile
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

from draftproof import record, stats, wire
from draftproof.errors import EvidenceError, StorageError
from draftproof.record import (
    CostCurve,
    Counters,
    Decision,
    Draft,
    Leg,
    Machine,
    MemoryFloor,
    OpEvidence,
    Plan,
    Round,
    Trace,
)

ROUND = Round(
    index=0, position=3, source="sam", num_offered=5, num_drafted=4, num_accepted=1, emitted=(7, 0),
    num_redecided=2, num_forwards=3, reason="cost", expected_tokens=0.1 + 0.2, draft_ns=1, verify_ns=2**60,
    commit_ns=3, offered=(7, 1, 2, 3, 4),
)  # fmt: skip
OP = OpEvidence(
    op="qkv", shape=(8, 4), form="spaced:64", max_rows=10, is_exact=True, num_checked=9,
    # In the order of canonical text, so that representations compare too.
    seconds_by_rows={1: 1.7976931348623157e308, 10: 1e-5, 2: 5e-324}, rejected={"packed": "row 3 of 4 é"},
)  # fmt: skip
# Every record with no field at its default, and the figures made from them.
FULL = [
    Draft(ids=(1, 2), source="lookup", match_length=0),
    Decision(depth=3, reason="cost", expected_tokens=1.25, expected_seconds=1 / 3),
    ROUND,
    Trace(num_prompt=3, prefill_ns=17, rounds=(ROUND,)),
    OP,
    Plan(claim="guarded", dtype="bfloat16", fingerprint="f", ops=(OP,), max_rows=4, margin_bound=0.1),
    Plan(claim="fixed", dtype="bfloat16", fingerprint="f", ops=(OP, OP), max_rows=4, fixed_rows=8),
    CostCurve(rows=(1, 2), contexts=(16, 64), seconds=((0.1, 0.2), (0.3, 0.7))),
    Machine(
        cpu="c", isa="avx", num_threads=2, device="cpu", os="o", python="3.11", torch="2", transformers="5",
        environment=("OMP_NUM_THREADS=2",),
    ),
    Leg(
        label="a", arm="stock", pair=1, order=2, start_ns=3, duration_ns=4, num_tokens=5, tokens_sha256="ab",
        peak_bytes=6, peak_cuda_bytes=7, is_first_seen=True, num_forwards=8,
        counters=Counters(steps=1, verifies=2, drafted=3, accepted=4, tokens=5), host="h",
    ),
    Counters(steps=1, verifies=2, drafted=3, accepted=4, tokens=5),
    MemoryFloor(num_bytes=3, bytes_per_second=0.1 + 0.2),
    stats.decode_stats(Trace(num_prompt=3, prefill_ns=17, rounds=(ROUND,))),
    stats.RatioStats(median=1.5, low=1.0, high=2.0, interval=(1.25, 1.75), num_pairs=3),
]  # fmt: skip
ROWS: list[dict[str, Any]] = [{"n": 1, "s": "é"}, {"n": 2, "list": [1, 2.5]}, {"n": 3}, {"n": 4, "x": None}]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- records -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", FULL, ids=lambda value: type(value).__name__)
def test_a_record_comes_back_equal_from_its_text(value: Any) -> None:
    text = wire.canonical(wire.encode(value))
    back = wire.decode(type(value), json.loads(text))
    assert type(back) is type(value)
    assert back == value
    assert repr(back) == repr(value)  # tuples stay tuples, ints and floats keep their type
    assert wire.canonical(wire.encode(back)) == text


def test_every_record_is_in_the_round_trip() -> None:
    defined = {
        value
        for value in vars(record).values()
        if isinstance(value, type) and is_dataclass(value) and value.__module__ == record.__name__
    }
    assert defined
    assert defined <= {type(value) for value in FULL}


def test_row_counts_are_integers_again() -> None:
    back = wire.decode(OpEvidence, json.loads(wire.canonical(wire.encode(OP))))
    assert list(map(type, back.seconds_by_rows)) == [int, int, int]
    assert back.seconds_by_rows == {1: 1.7976931348623157e308, 2: 5e-324, 10: 1e-5}


@pytest.mark.parametrize(
    ("record_type", "value", "message"),
    [
        (Decision, {"depth": 1}, "not a Decision: reason: Field required"),
        (Decision, {"depth": "two", "reason": ""}, "not a Decision: depth: "),
        (Decision, {"depth": 1.5, "reason": ""}, "not a Decision: depth: "),
        (Decision, [], "not a Decision"),
        (Decision, None, "not a Decision"),
        (Decision, "depth", "not a Decision"),
        (Plan, {**wire.encode(FULL[5]), "claim": "certain"}, "not a Plan: claim: "),
        (Trace, {"num_prompt": 1, "prefill_ns": 0, "rounds": [{"index": 0}]}, r"not a Trace: rounds\.0\."),
    ],
)
def test_what_is_no_record_is_refused_with_the_place(record_type: type, value: Any, message: str) -> None:
    with pytest.raises(EvidenceError, match=message):
        wire.decode(record_type, value)


@pytest.mark.parametrize(
    ("value", "change", "message"),
    [
        (ROUND, {"num_drafted": 6}, "drafted more than it was offered"),
        (FULL[3], {"num_prompt": 4}, "overlap or leave a gap"),
        (FULL[6], {"fixed_rows": None}, "fixed_rows goes with fixed"),
        (FULL[7], {"rows": [2, 3]}, "starts at one row"),
        (FULL[9], {"duration_ns": 0}, "a leg takes time"),
    ],
)
def test_reading_checks_the_invariants_again(value: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(EvidenceError, match=message):
        wire.decode(type(value), {**wire.encode(value), **change})


# --- canonical text ------------------------------------------------------------------------------------


def test_canonical_text_is_sorted_without_spaces_and_ascii() -> None:
    assert wire.canonical({"b": [1, 2.5, None, True], "a": {"d": "é\n", "c": ""}}) == (
        '{"a":{"c":"","d":"\\u00e9\\n"},"b":[1,2.5,null,true]}'
    )


def test_canonical_text_does_not_depend_on_insertion_order() -> None:
    assert wire.canonical({"a": 1, "b": 2}) == wire.canonical({"b": 2, "a": 1})
    assert wire.canonical([1, 2]) != wire.canonical([2, 1])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("nest", [lambda x: x, lambda x: {"a": [x]}, lambda x: [{"a": x}]])
def test_what_is_no_number_is_refused(bad: float, nest: Any) -> None:
    with pytest.raises(EvidenceError, match="NaN or infinity"):
        wire.canonical(nest(bad))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_record_with_nan_does_not_reach_the_disk(bad: float, tmp_path: Path) -> None:
    value = OpEvidence(
        op="a", shape=(), form="plain", max_rows=1, is_exact=False, num_checked=0, seconds_by_rows={1: bad}
    )
    path = tmp_path / "rows.jsonl"
    path.write_text("old")
    with pytest.raises(EvidenceError, match="NaN or infinity"):
        wire.write_lines(path, [wire.encode(FULL[0]), wire.encode(value)])
    assert path.read_text() == "old"
    assert names(tmp_path) == ["rows.jsonl"]


# --- versions ------------------------------------------------------------------------------------------


def test_this_version_is_read() -> None:
    wire.check_version({"format_version": wire.FORMAT_VERSION, "anything": 1})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"format_version": wire.FORMAT_VERSION + 1}, "newer than .*update draftproof"),
        ({}, "no format_version"),
        ({"format_version": None}, "no format_version"),
        ({"format_version": str(wire.FORMAT_VERSION)}, "no format_version"),
    ],
)
def test_newer_and_foreign_documents_are_refused(document: dict[str, Any], message: str) -> None:
    with pytest.raises(EvidenceError, match=message):
        wire.check_version(document)


# --- chains --------------------------------------------------------------------------------------------


def test_a_chain_is_what_its_description_says() -> None:
    """Hashed by hand: each row's text with the hash of the row before, zeros for the first."""
    first = '{"n":1,"previous":"' + "0" * 64 + '"}'
    hash_1 = hashlib.sha256(first.encode()).hexdigest()
    hash_2 = hashlib.sha256(f'{{"previous":"{hash_1}","s":"\\u00e9"}}'.encode()).hexdigest()
    assert wire.chain([{"n": 1}, {"s": "é"}]) == [
        {"n": 1, "previous": "0" * 64, "hash": hash_1},
        {"s": "é", "previous": hash_1, "hash": hash_2},
    ]


def test_a_sound_chain_passes_also_through_a_file(tmp_path: Path) -> None:
    rows = [*ROWS, *map(wire.encode, FULL)]
    before = copy.deepcopy(rows)
    linked = wire.chain(rows)
    assert rows == before
    wire.check_chain(linked)
    wire.write_lines(tmp_path / "rows.jsonl", linked)
    back = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert back == linked
    wire.check_chain(back)
    wire.check_chain([])


def _broken(edit: Any) -> list[dict[str, Any]]:
    rows = wire.chain(ROWS)
    edit(rows)
    return rows


def _rehash(row: dict[str, Any]) -> None:
    body = {key: value for key, value in row.items() if key != "hash"}
    row["hash"] = hashlib.sha256(wire.canonical(body).encode()).hexdigest()


def _edit_and_rehash(rows: list[dict[str, Any]], index: int) -> None:
    rows[index]["n"] = 99
    _rehash(rows[index])


TAMPERED = {
    "first edited": (lambda rows: rows[0].update(n=9), 0),
    "middle edited": (lambda rows: rows[1]["list"].append(3), 1),
    "last edited": (lambda rows: rows[3].update(n=9), 3),
    "field added": (lambda rows: rows[2].update(extra=None), 2),
    "field removed": (lambda rows: rows[3].pop("x"), 3),
    "edited with its own hash made right": (lambda rows: _edit_and_rehash(rows, 1), 2),
    "hash edited": (lambda rows: rows[1].update(hash="0" * 64), 1),
    "hash removed": (lambda rows: rows[1].pop("hash"), 1),
    "link edited": (lambda rows: rows[1].update(previous="0" * 64), 1),
    "link edited, own hash made right": (lambda rows: (rows[1].update(previous="f"), _rehash(rows[1])), 1),
    "link removed, own hash made right": (lambda rows: (rows[2].pop("previous"), _rehash(rows[2])), 2),
    "first cut": (lambda rows: rows.pop(0), 0),
    "middle cut": (lambda rows: rows.pop(2), 2),
    "two cut": (lambda rows: rows.__delitem__(slice(1, 3)), 1),
    "moved to the end": (lambda rows: rows.append(rows.pop(1)), 1),
    "swapped": (lambda rows: rows.insert(1, rows.pop(2)), 1),
    "repeated": (lambda rows: rows.insert(2, copy.deepcopy(rows[1])), 2),
    "reversed": (lambda rows: rows.reverse(), 0),
    "from another chain": (lambda rows: rows.append(wire.chain([{"n": 5}])[0]), 4),
}


@pytest.mark.parametrize(("edit", "index"), TAMPERED.values(), ids=TAMPERED.keys())
def test_a_tampered_chain_is_found_at_its_row(edit: Any, index: int) -> None:
    rows = _broken(edit)
    with pytest.raises(EvidenceError, match=rf"breaks at row {index}$"):
        wire.check_chain(rows)


def test_token_hashes_tell_where_one_token_ends() -> None:
    assert wire.tokens_sha256([1, 23, 4]) == hashlib.sha256(b"1,23,4").hexdigest()
    assert wire.tokens_sha256(iter((12, 34))) == wire.tokens_sha256([12, 34])
    different = [[], [0], [0, 0], [1, 2], [12], [2, 1]]
    assert len({wire.tokens_sha256(ids) for ids in different}) == len(different)


# --- files ---------------------------------------------------------------------------------------------


def test_a_file_and_its_folders_appear(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "run.json"
    wire.write_atomic(path, "é\n")
    assert path.read_bytes() == "é\n".encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    wire.write_atomic(path, "")
    assert path.read_bytes() == b""
    wire.write_atomic(path, b"\xff\x00")
    assert path.read_bytes() == b"\xff\x00"
    assert names(path.parent) == ["run.json"]


def test_lines_are_canonical_and_ended(tmp_path: Path) -> None:
    wire.write_lines(tmp_path / "rows.jsonl", iter([{"b": 1, "a": 2}, {}]))
    assert (tmp_path / "rows.jsonl").read_text() == '{"a":2,"b":1}\n{}\n'


def test_the_new_content_is_on_disk_before_it_gets_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    seen: list[tuple[str, list[str]]] = []
    really = os.fsync

    def spy(descriptor: int) -> None:
        others = [p.read_text() for p in tmp_path.iterdir() if p != path]
        seen.append((path.read_text(), others))
        really(descriptor)

    monkeypatch.setattr(os, "fsync", spy)
    wire.write_atomic(path, "new")
    assert seen == [("old", ["new"])]
    assert path.read_text() == "new"


def _fail_with(error: BaseException) -> Any:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


PLACES = {
    "making the folder": (Path, "mkdir"),
    "making the file": (tempfile, "mkstemp"),
    "flushing": (os, "fsync"),
    "setting the mode": (os, "fchmod"),
    "renaming": (Path, "replace"),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "no space left to write .*run.json"),
        (errno.EDQUOT, "no space left to write .*run.json"),
        (errno.EACCES, "cannot write .*run.json: Permission denied"),
        (errno.EROFS, "cannot write .*run.json: Read-only file system"),
    ],
)
def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(
    place: tuple[Any, str], number: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(*place, _fail_with(OSError(number, os.strerror(number))))
        with pytest.raises(StorageError, match=message):
            wire.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["run.json"]


def test_an_interrupt_is_no_storage_error_and_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _fail_with(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            wire.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["run.json"]


def test_places_that_cannot_hold_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    for path in (tmp_path / "file" / "run.json", tmp_path / "folder"):
        with pytest.raises(StorageError, match="cannot write"):
            wire.write_atomic(path, "new")
    assert (tmp_path / "file").read_text() == "old"
    assert names(tmp_path) == ["file", "folder"]
    assert names(tmp_path / "folder") == ["inside"]


LIMITED = """
import resource, signal, sys
from pathlib import Path
from draftproof import wire
from draftproof.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    wire.write_atomic(Path(sys.argv[1]), "x" * 100_000)
except StorageError as error:
    print(error)
"""


def test_a_write_that_really_fails_half_way_keeps_the_old_file(tmp_path: Path) -> None:
    """The kernel stops this one after a page, inside ``write`` itself."""
    path = tmp_path / "run.json"
    path.write_text("old")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], check=True, capture_output=True, text=True
    )
    assert done.stdout == f"cannot write {path}: File too large\n"
    assert path.read_text() == "old"
    assert names(tmp_path) == ["run.json"]
