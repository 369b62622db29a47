"""``status``, ``ledger`` and ``integrate``: the tables and documents, exit codes, what is said of losses."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from draftproof.bench.integrate import INTEGRATION, Arms, Choice, PairTimes, read_integration
from draftproof.cli import ledger as command
from draftproof.cli.ledger import AbOptions
from draftproof.errors import EvidenceError, OptionError, UsageError
from draftproof.folder import seal
from draftproof.ledger import Ledger, LedgerRow
from draftproof.record import Leg, Machine

MACHINE = Machine(
    cpu="c", isa="avx", num_threads=2, device="cpu", os="o", python="3.11", torch="2", transformers="5"
)
ROW = LedgerRow(
    time="2026-07-29T11:00:00", name="lookup", kind="bench", status="keep", run="gone", seal="5" * 64,
    quality="exact", claim="bitwise", reasons=("1.53x, interval 1.41-1.62",), flags=("data_dependent",),
    speedup=1.53, diverse_speedup=1.27, interval=(1.41, 1.62), argv=("bench",),
)  # fmt: skip
SLOW = replace(
    ROW, name="suffix", status="discard", reasons=("slower than stock",), flags=(), speedup=0.97,
    diverse_speedup=None, interval=None,
)  # fmt: skip
WRONG = replace(
    SLOW, name="cheat", status="fail", reasons=("code: token 3 is not stock's", "lied"), speedup=None
)
ACCEPTED = replace(ROW, kind="integrate", time="2026-07-29T12:00:00", reasons=("won",), speedup=1.2)


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def path() -> Path:
    return Path("runs") / "ledger.jsonl"


@pytest.fixture
def fill(path: Path) -> Callable[..., list[LedgerRow]]:
    def go(*rows: LedgerRow) -> list[LedgerRow]:
        return [Ledger(path).append(row) for row in rows]

    return go


Fill = Callable[..., list[LedgerRow]]
Capture = pytest.CaptureFixture[str]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("│")[1:-1]]


def lines_of(out: str, name: str) -> list[list[str]]:
    return [cells(line) for line in out.splitlines() if "│" in line and name in cells(line)]


class TestStatus:
    def test_a_line_a_candidate(self, path: Path, fill: Fill, capsys: Capture) -> None:
        fill(replace(ROW, time="earlier", speedup=9.0), ROW, SLOW, WRONG)
        assert command.status(path, json_output=False) == 0
        out = capsys.readouterr().out
        assert lines_of(out, "lookup") == [
            ["lookup", "keep (data-dependent)", "1.53x (1.41-1.62)", "1.27x", "2", "", ""]
        ]
        assert lines_of(out, "suffix") == [["suffix", "discard", "0.97x", "-", "1", "", "slower than stock"]]
        assert lines_of(out, "cheat") == [
            ["cheat", "fail", "withheld", "-", "1", "", "code: token 3 is not stock's; lied"]
        ]
        assert "integrated: stock; fastest kept: lookup" in out
        assert "lost" not in out

    @pytest.mark.parametrize(
        ("later", "shown"),
        [
            ((), "yes"),
            ((replace(ACCEPTED, name="suffix"),), "replaced"),
            ((replace(ACCEPTED, time="later", status="discard", reasons=("no",)),), "yes"),
        ],
    )
    def test_what_is_in(
        self, later: tuple[LedgerRow, ...], shown: str, path: Path, fill: Fill, capsys: Capture
    ) -> None:
        fill(ROW, replace(ROW, name="suffix"), ACCEPTED, *later)
        command.status(path, json_output=False)
        out = capsys.readouterr().out
        (line,) = lines_of(out, "lookup")
        assert line[4:6] == ["1", shown]
        assert f"integrated: {'suffix' if shown == 'replaced' else 'lookup'};" in out

    @pytest.mark.parametrize(
        ("status", "shown"), [("discard", "declined"), ("fail", "failed"), ("void", "undecided")]
    )
    def test_how_an_ab_ended(self, status: Any, shown: str, path: Path, fill: Fill, capsys: Capture) -> None:
        hidden = {} if status == "discard" else {"speedup": None, "diverse_speedup": None, "interval": None}
        fill(ROW, replace(ACCEPTED, status=status, reasons=("why",), **hidden))  # type: ignore[arg-type]
        command.status(path, json_output=False)
        out = capsys.readouterr().out
        assert lines_of(out, "lookup")[0][5] == shown
        assert "integrated: stock" in out

    def test_json_is_one_document_and_nothing_else(self, path: Path, fill: Fill, capsys: Capture) -> None:
        first, slow, _, accepted = fill(ROW, SLOW, WRONG, ACCEPTED)
        assert command.status(path, json_output=True) == 0
        captured = capsys.readouterr()
        assert (captured.out.count("\n"), captured.err) == (1, "")
        document = json.loads(captured.out)
        assert {k: document[k] for k in ("ledger", "lost", "integrated", "best")} == {
            "ledger": str(path), "lost": None, "integrated": "lookup", "best": "lookup",
        }  # fmt: skip
        assert [c["verdict"] for c in document["candidates"]] == ["keep (data-dependent)", "discard", "fail"]
        assert [c["is_integrated"] for c in document["candidates"]] == [True, False, False]
        one, two, _ = document["candidates"]
        assert one["row"] == json.loads(json.dumps(asdict(first)))
        assert one["integration"] == json.loads(json.dumps(asdict(accepted)))
        assert (two["row"]["id"], two["num_evaluations"], two["integration"]) == (slow.id, 1, None)

    def test_the_verdict_stays_in_one_piece(
        self, path: Path, fill: Fill, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        (row,) = fill(replace(ROW, reasons=("a long reason " * 9,), status="discard"))
        command.status(path, json_output=False)
        assert " discard (data-dependent) " in capsys.readouterr().out
        command.ledger(path, check=True, json_output=False)
        out = capsys.readouterr().out
        assert f" {row.id} " in out
        assert " discard (data-dependent) " in out
        assert "1 row, the chain" in out

    @pytest.mark.parametrize("json_output", [False, True])
    def test_a_loss_is_told(self, json_output: bool, path: Path, fill: Fill, capsys: Capture) -> None:
        fill(ROW, SLOW)
        path.write_bytes(path.read_bytes()[:-5])
        assert command.status(path, json_output=json_output) == 0
        assert "1 unfinished row of" in capsys.readouterr().out

    @pytest.mark.parametrize("name", ["[bold]x", "[/red]", ":smile:", "back\\"])
    def test_names_are_shown_as_they_are(self, name: str, path: Path, fill: Fill, capsys: Capture) -> None:
        fill(replace(SLOW, name=name, reasons=(name,), run=name))
        command.status(path, json_output=False)
        command.ledger(path, check=True, json_output=False)
        out = capsys.readouterr().out
        assert lines_of(out, name)[0][-1] == name
        assert len(lines_of(out, name)) == 2
        assert f"{name} is not here" in out

    @pytest.mark.parametrize("json_output", [False, True])
    def test_no_ledger(self, json_output: bool, path: Path, capsys: Capture) -> None:
        for call in (
            lambda: command.status(path, json_output=json_output),
            lambda: command.ledger(path, check=True, json_output=json_output),
        ):
            with pytest.raises(UsageError, match=r"no ledger at runs/ledger\.jsonl; .*--ledger"):
                call()
        assert capsys.readouterr().out == ""

    def test_an_empty_one(self, path: Path, capsys: Capture) -> None:
        path.parent.mkdir()
        path.write_text("")
        assert command.status(path, json_output=False) == 0
        assert "integrated: stock; fastest kept: none" in capsys.readouterr().out

    def test_a_broken_chain_is_no_status(self, path: Path, fill: Fill, capsys: Capture) -> None:
        fill(ROW, SLOW)
        path.write_text(path.read_text().replace("1.53", "9.53", 1))
        with pytest.raises(EvidenceError, match="row 0"):
            command.status(path, json_output=True)
        assert capsys.readouterr().out == ""


@pytest.fixture
def sealed(tmp_path: Path) -> LedgerRow:
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "run.json").write_text("{}")
    return replace(ROW, name="sealed", run="here", seal=seal(folder))


class TestLedger:
    def test_every_row_in_order(self, path: Path, fill: Fill, capsys: Capture) -> None:
        rows = fill(ROW, SLOW, WRONG, ACCEPTED)
        assert command.ledger(path, check=False, json_output=False) == 0
        out = capsys.readouterr().out
        body = [cells(line) for line in out.splitlines() if line.startswith("│")]
        assert body[0] == [
            rows[0].id, ROW.time, "lookup", "bench", "keep (data-dependent)", "1.53x (1.41-1.62)", "1.27x",
            "gone",
        ]  # fmt: skip
        assert [line[0] for line in body] == [row.id for row in rows]
        assert [line[3] for line in body] == ["bench", "bench", "bench", "integrate"]
        assert f"4 rows, the chain is whole; last hash {Ledger(path).read().head}" in out
        assert "not here" not in out

    def test_check_hashes_the_folders(
        self, sealed: LedgerRow, path: Path, fill: Fill, capsys: Capture
    ) -> None:
        (good,) = fill(sealed)
        assert command.ledger(path, check=True, json_output=False) == 0
        assert lines_of(capsys.readouterr().out, "sealed")[0][-1] == "as entered"
        Path("here/run.json").write_text("{ }")
        assert command.ledger(path, check=False, json_output=False) == 0
        capsys.readouterr()
        assert command.ledger(path, check=True, json_output=False) == 1
        out = capsys.readouterr().out
        assert lines_of(out, "sealed")[0][-1] == "CHANGED"
        assert f"{good.id} sealed: run.json was changed" in out

    def test_a_missing_folder_is_said_and_not_fatal(self, path: Path, fill: Fill, capsys: Capture) -> None:
        (row,) = fill(ROW)
        assert command.ledger(path, check=True, json_output=False) == 0
        out = capsys.readouterr().out
        assert lines_of(out, "lookup")[0][-1] == "not here"
        assert f"{row.id} lookup: gone is not here" in out

    @pytest.mark.parametrize("check", [False, True])
    def test_json(self, check: bool, sealed: LedgerRow, path: Path, fill: Fill, capsys: Capture) -> None:
        rows = fill(ROW, sealed)
        assert command.ledger(path, check=check, json_output=True) == 0
        captured = capsys.readouterr()
        assert (captured.out.count("\n"), captured.err) == (1, "")
        document = json.loads(captured.out)
        assert (document["ledger"], document["is_whole"], document["lost"]) == (str(path), True, None)
        assert document["head"] == Ledger(path).read().head
        states = [{"state": "missing", "problems": ["gone is not here"]}, {"state": "sealed", "problems": []}]
        assert document["rows"] == [
            json.loads(json.dumps(asdict(row)))
            | {"verdict": "keep (data-dependent)", "seal_check": made if check else None}
            for row, made in zip(rows, states, strict=True)
        ]

    def test_json_of_a_changed_folder(
        self, sealed: LedgerRow, path: Path, fill: Fill, capsys: Capture
    ) -> None:
        fill(sealed)
        Path("here/new.txt").write_text("")
        assert command.ledger(path, check=True, json_output=True) == 1
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        assert row["seal_check"] == {"state": "differs", "problems": ["new.txt was added"]}

    def test_a_broken_chain(self, path: Path, fill: Fill, capsys: Capture) -> None:
        fill(ROW, SLOW)
        path.write_text(path.read_text().replace("0.97", "9.97", 1))
        with pytest.raises(EvidenceError, match="breaks at row 1"):
            command.ledger(path, check=False, json_output=False)
        assert capsys.readouterr().out == ""
        assert command.ledger(path, check=False, json_output=True) == 1
        captured = capsys.readouterr()
        assert (captured.out.count("\n"), captured.err) == (1, "")
        document = json.loads(captured.out)
        assert (document["is_whole"], document["rows"]) == (False, [])
        assert "breaks at row 1" in document["why"]


def leg(arm: str, number: int, start_ns: int, duration_ns: int) -> Leg:
    return Leg(
        label="news", arm=arm, pair=number, order=0, start_ns=start_ns, duration_ns=duration_ns,
        num_tokens=4, tokens_sha256="same", peak_bytes=1,
    )  # fmt: skip


class Opened:
    """Arms on a made-up clock: A takes ``ratio`` times B's time; remembers what it was asked for."""

    def __init__(self, ratio: float, interrupt_at: int | None = None) -> None:
        self.ratio, self.interrupt_at = ratio, interrupt_at
        self.choices: list[Choice] = []
        self.is_open = False

    def run_pair(self, number: int) -> PairTimes:
        assert self.is_open
        if number == self.interrupt_at:
            raise KeyboardInterrupt
        a_ns, start = round(1000 * self.ratio), 10_000 * number
        a_start, b_start = (start, start + a_ns) if number % 2 == 0 else (start + 1000, start)
        return PairTimes(a=leg("a", number, a_start, a_ns), b=leg("b", number, b_start, 1000))

    @contextmanager
    def __call__(self, choice: Choice, report: Callable[[str, int, int], None]) -> Iterator[Arms]:
        report("loading", 0, 0)
        self.choices.append(choice)
        self.is_open = True
        yield Arms(run_pair=self.run_pair, machine=MACHINE)
        self.is_open = False


@pytest.fixture
def options(path: Path, tmp_path: Path) -> AbOptions:
    return AbOptions(
        name="lookup", ledger=path, rounds=8, min_win_rate=0.8, min_gain=0.01, out=tmp_path / "ab"
    )


class TestIntegrate:
    def test_accepted(
        self, options: AbOptions, fill: Fill, capsys: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["draftproof", "integrate", "lookup"])
        (row,) = fill(ROW)
        opened = Opened(1.25)
        assert command.integrate(options, opened, json_output=False) == 0
        assert opened.choices == [Choice(row=row, base=None)]
        assert not opened.is_open
        captured = capsys.readouterr()
        assert captured.out == (
            "accepted: lookup against stock won 8 of 8 rounds (the 80% needed); gained 25.0%, interval 25.0%"
            " to 25.0% (above 1.0%)\n"
            "against stock: benchmark 1.53x, median of the diverse set 1.27x; its speed is data-dependent\n"
        )
        assert str(options.out) in captured.err
        done = read_integration(options.out or Path())
        assert (done.argv, done.machine) == (("integrate", "lookup"), MACHINE)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", done.time)
        entered = Ledger(options.ledger).read().rows[-1]
        assert (entered.kind, entered.status, entered.run) == ("integrate", "keep", str(options.out))

    def test_the_next_is_up_against_it(self, options: AbOptions, fill: Fill, capsys: Capture) -> None:
        base, row = fill(ROW, replace(ROW, name="suffix", flags=()))
        command.integrate(options, Opened(1.25), json_output=False)
        capsys.readouterr()
        opened = Opened(1.25)
        again = replace(options, name="suffix", out=Path("ab2"))
        assert command.integrate(again, opened, json_output=False) == 0
        assert opened.choices == [Choice(row=row, base=base)]
        out = capsys.readouterr().out
        assert "accepted: suffix against lookup" in out
        assert "data-dependent" not in out

    def test_declined(self, options: AbOptions, fill: Fill, capsys: Capture) -> None:
        fill(ROW)
        assert command.integrate(options, Opened(0.9), json_output=False) == 1
        assert capsys.readouterr().out.startswith("declined: lookup against stock won 0 of 8 rounds")

    @pytest.mark.parametrize(
        ("change", "code"), [({}, 0), ({"min_gain": 0.3}, 1), ({"min_win_rate": 1.0}, 0), ({"rounds": 9}, 0)]
    )
    def test_options_reach_the_rule(
        self, change: dict[str, Any], code: int, options: AbOptions, fill: Fill
    ) -> None:
        fill(ROW)
        options = replace(options, **change)
        assert command.integrate(options, Opened(1.25), json_output=False) == code
        done = read_integration(options.out or Path())
        assert (done.rule.min_gain, done.rule.min_win_rate, len(done.rounds)) == (
            options.min_gain, options.min_win_rate, options.rounds,
        )  # fmt: skip

    def test_interrupted(self, options: AbOptions, fill: Fill, capsys: Capture) -> None:
        fill(ROW)
        assert command.integrate(options, Opened(1.25, interrupt_at=3), json_output=False) == 130
        assert capsys.readouterr().out == "undecided after 3 of 8 rounds: interrupted\n"

    @pytest.mark.parametrize(("ratio", "code"), [(1.25, 0), (0.9, 1)])
    def test_json_is_the_record(
        self, ratio: float, code: int, options: AbOptions, fill: Fill, capsys: Capture
    ) -> None:
        fill(ROW)
        assert command.integrate(options, Opened(ratio), json_output=True) == code
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        assert json.loads(out) == json.loads(((options.out or Path()) / INTEGRATION).read_text())

    def test_the_default_folder_is_named_by_the_time(
        self, options: AbOptions, fill: Fill, capsys: Capture
    ) -> None:
        fill(ROW)
        command.integrate(replace(options, out=None), Opened(1.25), json_output=False)
        (made,) = Path("runs").glob(f"*/{INTEGRATION}")
        assert re.fullmatch(r"\d{8}-\d{6}-integrate", made.parent.name)
        assert str(made.parent) in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"name": "lokup"}, UsageError, "did you mean 'lookup'"),
            ({"rounds": 7}, UsageError, "8 rounds or more"),
            ({"min_win_rate": 0.0}, OptionError, "min_win_rate"),
            ({"ledger": Path("none.jsonl")}, UsageError, "no ledger at none"),
        ],
    )
    def test_refused_before_anything_is_loaded(
        self, change: dict[str, Any], error: type[Exception], message: str, options: AbOptions, fill: Fill
    ) -> None:
        fill(ROW)
        opened = Opened(1.25)
        with pytest.raises(error, match=message):
            command.integrate(replace(options, **change), opened, json_output=False)
        assert opened.choices == []
        assert not (options.out or Path()).exists()

    def test_a_folder_in_use_is_refused_as_early(self, options: AbOptions, fill: Fill) -> None:
        fill(ROW)
        Path("run.json").write_text("{}")
        opened = Opened(1.25)
        with pytest.raises(UsageError, match="holds another run"):
            command.integrate(replace(options, out=Path()), opened, json_output=False)
        assert opened.choices == []
