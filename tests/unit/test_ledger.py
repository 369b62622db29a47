"""The ledger: chained and append-only, whatever kills the writer, fills the disk or edits the file."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from draftproof import ledger as ledgers
from draftproof.errors import EvidenceError, StorageError, UsageError
from draftproof.folder import SEAL, seal
from draftproof.ledger import (
    Ledger,
    LedgerRow,
    best,
    candidates,
    check_run,
    integrated,
    row_from_results,
)
from draftproof.wire import FORMAT_VERSION, canonical, chain, check_chain

ROW = LedgerRow(
    time="2026-07-29T12:00:00+0200", name="lookup", kind="bench", status="keep", run="runs/a", seal="5" * 64,
    quality="exact", claim="bitwise", reasons=("1.50x, interval 1.40-1.60",), flags=("data_dependent",),
    speedup=1.5, diverse_speedup=1.25, interval=(1.4, 1.6), argv=("bench", "--drafter", "lookup"),
)  # fmt: skip
SMALL = LedgerRow(time="", name="c", kind="bench", status="keep", run="", seal="", quality="", speedup=1.5)
HIDDEN = {"speedup": None, "diverse_speedup": None, "interval": None}
INTEGRATED = replace(ROW, kind="integrate", diverse_speedup=None)


def failed(row: LedgerRow, reason: str = "news: token 3 is not stock's") -> LedgerRow:
    return replace(row, status="fail", reasons=(reason,), **HIDDEN)  # type: ignore[arg-type]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "runs" / "ledger.jsonl")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here survives a power cut, and one schema serves all rows: a thousand appends in seconds."""
    adapter = cache(TypeAdapter)
    monkeypatch.setattr(ledgers.os, "fsync", lambda handle: None)
    monkeypatch.setattr(ledgers, "decode", lambda kind, value: adapter(kind).validate_python(value))


def filled(ledger: Ledger, count: int = 3, row: LedgerRow = ROW) -> bytes:
    for number in range(count):
        ledger.append(replace(row, name=f"c{number}"))
    return ledger.path.read_bytes()


def raw_rows(ledger: Ledger) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ledger.path.read_text().splitlines()]


def write_raw(ledger: Ledger, rows: list[dict[str, Any]]) -> None:
    ledger.path.write_text("".join(canonical(row) + "\n" for row in rows))


def side_files(ledger: Ledger) -> list[Path]:
    return [path for path in ledger.path.parent.iterdir() if path != ledger.path]


class TestRow:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"name": ""}, "names its candidate"),
            ({"speedup": None}, "has a speedup"),
            ({"status": "fail"}, "no other"),
            ({"status": "void", "speedup": None}, "withheld"),
            ({"status": "void", "reasons": (), **HIDDEN}, "says why"),
            ({"status": "discard", "reasons": ()}, "says why"),
        ],
    )
    def test_what_cannot_be_true_is_refused(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(EvidenceError, match=message):
            replace(ROW, **changes)

    def test_a_kept_row_needs_no_reason(self) -> None:
        assert replace(ROW, reasons=()).status == "keep"

    @pytest.mark.parametrize(
        ("row", "verdict"),
        [
            (ROW, "keep (data-dependent)"),
            (replace(ROW, flags=()), "keep"),
            (replace(ROW, flags=("counters_unverified",)), "keep"),
            (replace(ROW, status="discard"), "discard (data-dependent)"),
        ],
    )
    def test_the_verdict_people_read(self, row: LedgerRow, verdict: str) -> None:
        assert row.verdict == verdict


class TestAppend:
    def test_rows_come_back_in_order(self, ledger: Ledger) -> None:
        rows = [ledger.append(row) for row in (ROW, failed(ROW), replace(ROW, name="ä \n 語"))]
        state = ledger.read()
        assert state.rows == tuple(rows)
        assert [replace(row, id=None) for row in rows] == [ROW, failed(ROW), replace(ROW, name="ä \n 語")]
        assert state.lost is None
        assert side_files(ledger) == []

    def test_the_file_is_what_wire_chains(self, ledger: Ledger) -> None:
        entered = [ledger.append(replace(ROW, name=name)) for name in "abc"]
        expected = chain(asdict(row) for row in entered)
        assert ledger.path.read_text() == "".join(canonical(row) + "\n" for row in expected)
        assert ledger.read().head == expected[-1]["hash"]

    def test_an_append_only_adds_bytes(self, ledger: Ledger) -> None:
        before = filled(ledger)
        ledger.append(ROW)
        assert ledger.path.read_bytes().startswith(before)
        assert len(ledger.path.read_bytes()) > len(before)

    def test_ids_are_short_and_differ(self, ledger: Ledger) -> None:
        ids = [ledger.append(replace(ROW, time=f"2026-07-29T12:00:{second:02}")).id for second in range(20)]
        assert len(set(ids)) == 20
        assert all(len(row_id or "") == 8 and int(row_id or "x", 16) >= 0 for row_id in ids)

    def test_an_id_that_is_taken_is_made_longer(self, ledger: Ledger, tmp_path: Path) -> None:
        row_id = Ledger(tmp_path / "other.jsonl").append(ROW).id
        ledger.path.parent.mkdir()
        write_raw(ledger, chain([asdict(replace(ROW, name="b", id=row_id))]))
        longer = ledger.append(ROW).id or ""
        assert (longer[:8], len(longer)) == (row_id, 9)

    def test_the_same_row_twice_is_refused(self, ledger: Ledger) -> None:
        entered = ledger.append(ROW)
        before = ledger.path.read_bytes()
        for again in (ROW, entered):
            with pytest.raises(UsageError, match=f"already in .*as {entered.id}"):
                ledger.append(again)
        assert ledger.path.read_bytes() == before

    def test_many_evaluations_of_one_name_are_kept(self, ledger: Ledger) -> None:
        for hour in range(3):
            ledger.append(replace(ROW, time=f"2026-07-29T{hour:02}:00:00"))
        assert [row.name for row in ledger.read().rows] == ["lookup"] * 3

    def test_whole_numbers_are_read_back(self, ledger: Ledger) -> None:
        ledger.append(replace(ROW, speedup=2, interval=(1, 3)))
        assert ledger.read().rows[0].interval == (1.0, 3.0)

    @pytest.mark.parametrize("changes", [{"speedup": float("nan")}, {"status": "good"}, {"flags": ("x",)}])
    def test_a_row_that_could_not_be_read_back_is_refused(
        self, changes: dict[str, Any], ledger: Ledger
    ) -> None:
        with pytest.raises(EvidenceError):
            ledger.append(replace(ROW, **changes))
        assert not ledger.path.exists()

    def test_what_was_never_written_is_empty(self, ledger: Ledger) -> None:
        state = ledger.read()
        assert (state.rows, state.lost, state.head) == ((), None, None)
        assert not ledger.path.parent.exists()

    def test_a_folder_in_its_place(self, ledger: Ledger) -> None:
        ledger.path.mkdir(parents=True)
        with pytest.raises(StorageError, match="cannot write"):
            ledger.append(ROW)
        with pytest.raises(StorageError, match="cannot read"):
            ledger.read()

    def test_a_file_in_place_of_its_folder(self, ledger: Ledger) -> None:
        ledger.path.parent.write_text("")
        with pytest.raises(StorageError, match="cannot write"):
            ledger.append(ROW)


class TestTorn:
    def test_cut_at_every_byte(self, ledger: Ledger, quick: None) -> None:
        whole = filled(ledger, 2, SMALL)
        rows = ledger.read().rows
        ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
        for cut in range(len(whole) + 1):
            for path in side_files(ledger):
                path.unlink()
            ledger.path.write_bytes(whole[:cut])
            num_finished = sum(end <= cut for end in ends)
            good = max((end for end in ends if end <= cut), default=0)
            state = ledger.read()
            assert state.rows == rows[:num_finished]
            if cut == good:
                assert state.lost is None
            else:
                assert f"1 unfinished row of {cut - good} bytes at the end" in (state.lost or "")
            entered = ledger.append(replace(ROW, name="next"))
            state = ledger.read()
            assert state.rows == (*rows[:num_finished], entered)
            assert ledger.path.read_bytes().startswith(whole[:good])
            if cut == good:
                assert state.lost is None
                assert side_files(ledger) == []
            else:
                (side,) = side_files(ledger)
                assert side.read_bytes() == whole[good:cut]
                assert state.lost == f"1 unfinished row of {cut - good} bytes was set aside in {side.name}", (
                    "what was lost is said for good"
                )

    def test_reading_moves_nothing(self, ledger: Ledger) -> None:
        torn = filled(ledger)[:-9]
        ledger.path.write_bytes(torn)
        assert "the next append sets it aside in ledger.jsonl.lost-" in (ledger.read().lost or "")
        assert ledger.path.read_bytes() == torn
        assert side_files(ledger) == []

    def test_every_loss_is_told(self, ledger: Ledger) -> None:
        for count, cut in ((2, 5), (1, 7)):
            whole = filled(Ledger(ledger.path.with_name("other.jsonl")), count)
            ledger.path.with_name("other.jsonl").unlink()
            ledger.path.write_bytes(whole[:-cut])
            ledger.append(replace(ROW, name="next"))
        assert (ledger.read().lost or "").count("was set aside in") == 2

    def test_killed_between_setting_aside_and_cutting(
        self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        torn = filled(ledger)[:-9]
        ledger.path.write_bytes(torn)

        def killed(handle: int, size: int) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(ledgers.os, "ftruncate", killed)
            with pytest.raises(KeyboardInterrupt):
                ledger.append(ROW)
        assert ledger.path.read_bytes() == torn
        (side,) = side_files(ledger)
        assert (ledger.read().lost or "").count("unfinished") == 1
        side.write_bytes(b"half")  # as if the side file itself had been cut off
        ledger.append(ROW)
        assert side.read_bytes() == torn[torn.rfind(b"\n") + 1 :]
        assert len(ledger.read().rows) == 3

    def test_bytes_that_are_no_text(self, ledger: Ledger) -> None:
        whole = filled(ledger, 1)
        ledger.path.write_bytes(whole + b"\xff\x00\x80")
        ledger.append(ROW)
        (side,) = side_files(ledger)
        assert side.read_bytes() == b"\xff\x00\x80"


class TestBroken:
    def test_one_changed_byte_anywhere(self, ledger: Ledger, quick: None) -> None:
        whole = filled(ledger, 3, SMALL)
        last = len(whole) - 1
        for index in range(last):
            bad = bytearray(whole)
            bad[index] ^= 1
            ledger.path.write_bytes(bad)
            with pytest.raises(EvidenceError, match=r"row \d"):
                ledger.read()
            if index % 50 == 0:
                with pytest.raises(EvidenceError, match=r"row \d"):
                    ledger.append(ROW)
                assert ledger.path.read_bytes() == bad
        ledger.path.write_bytes(whole[:last] + b"\x0b")
        assert len(ledger.read().rows) == 2
        assert ledger.read().lost is not None, "the newline that finishes the last row"

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
    @given(data=st.data())
    def test_rows_cut_out_moved_or_doubled(self, ledger: Ledger, quick: None, data: st.DataObject) -> None:
        ledger.path.unlink(missing_ok=True)
        lines = filled(ledger, 4).splitlines(keepends=True)
        chosen = data.draw(st.lists(st.sampled_from(range(4)), max_size=6))
        ledger.path.write_bytes(b"".join(lines[i] for i in chosen))
        if chosen == list(range(len(chosen))):
            assert len(ledger.read().rows) == len(chosen)
        else:
            first = next(i for i, number in enumerate(chosen) if i != number)
            with pytest.raises(EvidenceError, match=f"breaks at row {first}"):
                ledger.read()

    def test_an_edit_is_found_even_if_its_own_hash_is_made_to_fit(self, ledger: Ledger) -> None:
        filled(ledger)
        rows = raw_rows(ledger)
        (edited,) = chain(
            [{k: v for k, v in rows[0].items() if k not in ("hash", "previous")} | {"name": "x"}]
        )
        write_raw(ledger, [edited, *rows[1:]])
        before = ledger.path.read_bytes()
        for touch in (ledger.read, lambda: ledger.append(ROW)):
            with pytest.raises(EvidenceError, match=r"ledger\.jsonl: .* breaks at row 1.*edited.*cut out"):
                touch()
        assert ledger.path.read_bytes() == before

    @pytest.mark.parametrize("newer", [0, 1])
    def test_a_newer_format_is_refused(self, newer: int, ledger: Ledger) -> None:
        bodies = [asdict(replace(ROW, name=name, id=name * 8)) for name in "ab"]
        bodies[newer]["format_version"] = FORMAT_VERSION + 1
        ledger.path.parent.mkdir()
        write_raw(ledger, chain(bodies))
        before = ledger.path.read_bytes()
        for touch in (ledger.read, lambda: ledger.append(ROW)):
            with pytest.raises(EvidenceError, match=f"row {newer}.* is newer than {FORMAT_VERSION}"):
                touch()
        assert ledger.path.read_bytes() == before

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"colour": "red"}, "row 0 has fields"),
            ({"id": None}, "row 0 has fields"),
            ({"speedup": "1.5"}, "row 0 has fields"),
            ({"status": "good"}, r"0\.status"),
            ({"speedup": None}, "has a speedup"),
        ],
    )
    def test_rows_of_another_writer(self, change: dict[str, Any], message: str, ledger: Ledger) -> None:
        ledger.path.parent.mkdir()
        write_raw(ledger, chain([asdict(replace(ROW, id="a" * 8)) | change]))
        with pytest.raises(EvidenceError, match=message):
            ledger.read()

    @pytest.mark.parametrize("line", [b"", b"[]", b"{}", b"null", b"{", b"\xff", b'{"a": 1}'])
    def test_lines_that_are_no_rows(self, line: bytes, ledger: Ledger) -> None:
        whole = filled(ledger, 1)
        ledger.path.write_bytes(whole + line + b"\n")
        with pytest.raises(EvidenceError, match="row 1"):
            ledger.read()


class TestFullDisk:
    @pytest.mark.parametrize("torn", [0, 9])
    @pytest.mark.parametrize("room", [0, 1, 100])
    def test_the_finished_rows_stay_as_they_were(
        self, room: int, torn: int, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = filled(ledger)
        ledger.path.write_bytes(whole[: len(whole) - torn])
        good = whole[: whole[: len(whole) - torn].rfind(b"\n") + 1]
        real, left = os.write, [room]

        def write(handle: int, data: Any) -> int:
            if not left[0]:
                raise OSError(errno.ENOSPC, "No space left on device")
            done = real(handle, bytes(data)[: left[0]])
            left[0] -= done
            return done

        with monkeypatch.context() as patch:
            patch.setattr(ledgers.os, "write", write)
            with pytest.raises(StorageError, match="no space left to write .*ledger.jsonl"):
                ledger.append(ROW)
        assert ledger.path.read_bytes() == good
        ledger.append(ROW)
        assert ledger.path.read_bytes().startswith(good)

    def test_a_sync_that_fails(self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = filled(ledger)

        def fsync(handle: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(ledgers.os, "fsync", fsync)
            with pytest.raises(StorageError, match="Input/output error"):
                ledger.append(ROW)
        assert ledger.path.read_bytes() == whole

    def test_no_room_for_the_side_file(self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        torn = filled(ledger)[:-9]
        ledger.path.write_bytes(torn)

        def fsync(handle: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(ledgers.os, "fsync", fsync)
            with pytest.raises(StorageError, match="no space left to write .*lost-"):
                ledger.append(ROW)
        assert ledger.path.read_bytes() == torn

    def test_an_interrupt_while_writing(self, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = filled(ledger)
        real = os.write

        def write(handle: int, data: Any) -> int:
            real(handle, bytes(data)[:50])
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(ledgers.os, "write", write)
            with pytest.raises(KeyboardInterrupt):
                ledger.append(ROW)
        assert ledger.path.read_bytes() == whole

    def test_the_kernel_cuts_a_write_short(self, ledger: Ledger) -> None:
        whole = filled(ledger)
        limit = len(whole) + 100
        done = child(f"""
            import resource
            resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, resource.RLIM_INFINITY))
            try:
                Ledger(path).append(row("late"))
            except StorageError as error:
                print(error)
            """, ledger)  # fmt: skip
        assert "File too large" in done
        assert ledger.path.read_bytes() == whole
        assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != limit


PRELUDE = """
import json, os, random, signal, sys, time
from functools import cache
from pathlib import Path
from pydantic import TypeAdapter
import draftproof.ledger
from draftproof.errors import StorageError
from draftproof.ledger import Ledger, LedgerRow
path = Path(sys.argv[1])
adapter = cache(TypeAdapter)
draftproof.ledger.decode = lambda kind, value: adapter(kind).validate_python(value)
adapter(LedgerRow), adapter(tuple[LedgerRow, ...])

def row(name):
    return LedgerRow(time="t", name=name, kind="bench", status="keep", run="r", seal="s", quality="exact",
                     speedup=1.5, argv=("bench",))
"""

TWO_AT_ONCE = """
children = []
for writer in range(4):
    child = os.fork()
    if child == 0:
        for number in range(8):
            Ledger(path).append(row(f"{writer}-{number}"))
        os._exit(0)
    children.append(child)
print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
"""

KILLED = """
draw = random.Random(11)
real = os.write
lives, told, torn = 0, [], 0

def append_for_ever(life, ends):
    def dribble(handle, data):
        time.sleep(2e-4)
        return real(handle, bytes(data)[:16])
    os.write = dribble
    number = 0
    while True:
        Ledger(path).append(row(f"{life}-{number}"))
        real(ends, f"{life}-{number}\\n".encode())
        number += 1

while lives < 400 and (lives < 25 or torn < 3 or sum(map(len, told)) < 25):
    life, lives = lives, lives + 1
    mine, ends = os.pipe()
    child = os.fork()
    if child == 0:
        append_for_ever(life, ends)
    os.close(ends)
    time.sleep(draw.uniform(0.01, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(mine) as stream:
        told.append(stream.read().split())
    data = path.read_bytes() if path.exists() else b""
    torn += not data.endswith(b"\\n") and data != b""
    state = Ledger(path).read()
    is_loss = torn > 0 or any(other != path for other in path.parent.iterdir())
    assert (state.lost is not None) == is_loss, state.lost
print(json.dumps({"told": told, "torn": torn}))
"""


def child(code: str, ledger: Ledger) -> str:
    """What a fresh interpreter prints that runs ``code`` (dedented) with ``path`` and ``row(name)``."""
    lines = code.strip("\n").split("\n")
    indent = len(lines[0]) - len(lines[0].lstrip())
    source = PRELUDE + "\n".join(line[indent:] for line in lines)
    done = subprocess.run(
        [sys.executable, "-c", source, str(ledger.path)], capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestProcesses:
    def test_appends_at_once_all_land(self, ledger: Ledger) -> None:
        assert child(TWO_AT_ONCE, ledger) == "[0, 0, 0, 0]\n"
        rows = ledger.read().rows
        assert sorted(row.name for row in rows) == [f"{w}-{n}" for w in range(4) for n in range(8)]
        for writer in "0123":
            assert [r.name for r in rows if r.name[0] == writer] == [f"{writer}-{n}" for n in range(8)]
        check_chain(raw_rows(ledger))
        assert side_files(ledger) == []

    def test_killed_at_any_moment(self, ledger: Ledger) -> None:
        ledger.path.parent.mkdir()
        done = json.loads(child(KILLED, ledger))
        ledger.append(replace(ROW, name="last"))
        state = ledger.read()
        names = [row.name for row in state.rows]
        told = [name for life in done["told"] for name in life]
        assert names[-1] == "last"
        assert [name for name in names[:-1] if name in set(told)] == told, "a finished row was lost"
        # Killed after the row was written and before it could say so: one row a life at most.
        extra = [name.split("-")[0] for name in names[:-1] if name not in set(told)]
        assert len(extra) == len(set(extra))
        assert done["torn"] >= 1, "no kill hit a row half written: the test shows nothing"
        assert len(told) >= 25
        # Equal beginnings of one row, torn twice, share a side file.
        assert 1 <= (state.lost or "").count("was set aside") <= done["torn"]


def ratio(median: float, interval: list[float] | None = None) -> dict[str, Any]:
    return {"median": median, "low": median, "high": median, "interval": interval, "num_pairs": 5}


def results(outcome: str, **changes: Any) -> dict[str, Any]:
    return {
        "verdict": {"outcome": outcome, "reasons": ["because"], "notes": []}, "status": "complete",
        "quality": "exact", "claim": "bitwise", "speedup": ratio(1.5, [1.4, 1.6]), "flags": [],
        "metrics": {"diverse": {"data_dependent": False, "median_speedup": 1.25}},
    } | changes  # fmt: skip


def entered(document: dict[str, Any]) -> LedgerRow:
    return row_from_results(document, "lookup", "bench", "runs/a", "5" * 64, "t", ["bench", "-m", "x"])


class TestRowFromResults:
    def test_every_field(self) -> None:
        document = results(
            "pass", metrics={"diverse": {"data_dependent": True, "median_speedup": 1.25}},
            flags=["data_dependent", "counters_unverified"],
        )  # fmt: skip
        assert entered(document) == LedgerRow(
            time="t", name="lookup", kind="bench", status="keep", run="runs/a", seal="5" * 64,
            quality="exact", claim="bitwise", reasons=("because",),
            flags=("data_dependent", "counters_unverified"), speedup=1.5, diverse_speedup=1.25,
            interval=(1.4, 1.6), argv=("bench", "-m", "x"),
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("outcome", "changes", "status"),
        [
            ("pass", {}, "keep"),
            ("tie", {}, "discard"),
            ("fail", {}, "discard"),  # the speed is shown: sound, and slower
            ("fail", {"speedup": None}, "fail"),
            ("void", {"speedup": None}, "void"),
            ("pass", {"status": "interrupted"}, "void"),
            ("tie", {"status": "interrupted"}, "void"),
            ("fail", {"status": "failed: the worker died", "speedup": None}, "fail"),
            ("pass", {"speedup": None}, "void"),
        ],
    )
    def test_the_status(self, outcome: str, changes: dict[str, Any], status: str) -> None:
        row = entered(results(outcome, **changes))
        assert row.status == status
        assert "because" in row.reasons
        shown = status in ("keep", "discard")
        assert (row.speedup, row.diverse_speedup, row.interval) == (
            (1.5, 1.25, (1.4, 1.6)) if shown else (None, None, None)
        )

    def test_an_interrupted_run_says_so(self) -> None:
        assert "interrupted" in entered(results("pass", status="interrupted")).reasons[0]

    @pytest.mark.parametrize("outcome", ["tie", "void", "pass"])
    def test_there_is_always_a_reason_for_no(self, outcome: str) -> None:
        verdict = {"outcome": outcome, "reasons": [], "notes": []}
        speedup = ratio(1.0) if outcome == "tie" else None
        assert entered(results(outcome, verdict=verdict, speedup=speedup)).reasons

    def test_without_a_diverse_set_or_an_interval(self) -> None:
        row = entered(results("pass", metrics={"diverse": None}, speedup=ratio(1.5)))
        assert (row.status, row.diverse_speedup, row.interval, row.flags) == ("keep", None, None, ())

    def test_a_skipped_diverse_set_has_no_median(self) -> None:
        diverse = {"data_dependent": False, "median_speedup": None}
        assert entered(results("pass", metrics={"diverse": diverse})).diverse_speedup is None


A = replace(ROW, name="a", speedup=2.0)
B = replace(ROW, name="b", speedup=1.5)
IN_A, IN_B = (replace(INTEGRATED, name=name) for name in "ab")


class TestCandidates:
    def test_the_latest_evaluation_counts(self) -> None:
        later = failed(A)
        found = candidates([A, B, replace(A, speedup=3.0), later])
        assert [(c.name, c.row, c.num_evaluations) for c in found] == [("a", later, 3), ("b", B, 1)]

    def test_an_ab_is_no_evaluation(self) -> None:
        (found,) = candidates([A, IN_A])
        assert (found.row, found.num_evaluations, found.integration) == (A, 1, IN_A)

    def test_a_name_with_an_ab_only(self) -> None:
        (found,) = candidates([IN_A])
        assert (found.row, found.num_evaluations) == (IN_A, 0)

    def test_nothing(self) -> None:
        assert candidates([]) == ()

    @pytest.mark.parametrize(
        ("rows", "expected"),
        [
            ([], None),
            ([A, B], A),
            ([B, A], A),
            ([A, B, failed(A)], B),
            ([failed(A)], None),
            ([replace(A, status="discard")], None),
            ([A, replace(B, speedup=2.0)], A),
            ([B, replace(IN_A, speedup=9.0)], B),
        ],
    )
    def test_best(self, rows: list[LedgerRow], expected: LedgerRow | None) -> None:
        assert best(rows) == expected

    @pytest.mark.parametrize(
        ("rows", "expected"),
        [
            ([A, B], None),
            ([A, IN_A, B], IN_A),
            ([IN_A, IN_B], IN_B),
            ([IN_A, replace(IN_B, status="discard")], IN_A),
            ([IN_A, failed(IN_B)], IN_A),
        ],
    )
    def test_integrated(self, rows: list[LedgerRow], expected: LedgerRow | None) -> None:
        assert integrated(rows) == expected


class TestCheckRun:
    @pytest.fixture
    def row(self, tmp_path: Path) -> LedgerRow:
        folder = tmp_path / "run"
        folder.mkdir()
        (folder / "run.json").write_text("{}")
        return replace(ROW, run=str(folder), seal=seal(folder))

    def test_as_it_was(self, row: LedgerRow) -> None:
        assert (check_run(row).state, check_run(row).problems) == ("sealed", ())

    def test_gone(self, row: LedgerRow) -> None:
        made = check_run(replace(row, run=row.run + "-moved"))
        assert made.state == "missing"
        assert "run-moved" in made.problems[0]

    def test_edited(self, row: LedgerRow) -> None:
        (Path(row.run) / "run.json").write_text("{ }")
        made = check_run(row)
        assert (made.state, made.problems) == ("differs", ("run.json was changed",))

    def test_edited_and_sealed_again(self, row: LedgerRow) -> None:
        (Path(row.run) / "run.json").write_text("{ }")
        seal(Path(row.run))
        made = check_run(row)
        assert made.state == "differs"
        assert "sealed again" in made.problems[0]

    @pytest.mark.parametrize("text", [None, "", "[]", "{}"])
    def test_without_a_good_seal(self, text: str | None, row: LedgerRow) -> None:
        path = Path(row.run) / SEAL
        path.unlink()
        if text is not None:
            path.write_text(text)
        made = check_run(row)
        assert made.state == "differs"
        assert made.problems
