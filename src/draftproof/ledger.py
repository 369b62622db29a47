"""The ledger: one line an evaluation, chained by hashes, only ever appended to; the only writer of it.

A row is finished by its newline, written and synced under an exclusive lock. What a killed writer leaves
after the last newline is an unfinished row: readers say so, and the next append moves it to a file beside
the ledger before it writes. A row edited or cut out of the middle breaks the chain, and nothing is appended
to a broken chain. Rows cut from the *end* cannot be found here: keep ``LedgerState.head`` elsewhere.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from draftproof.errors import EvidenceError, StorageError, UsageError
from draftproof.folder import SEAL, check_seal, read_json
from draftproof.record import Claim
from draftproof.wire import FORMAT_VERSION, canonical, chain, check_chain, check_version, decode

DEFAULT_PLACE = Path("runs") / "ledger.jsonl"
_ID_DIGITS = 8

Kind = Literal["bench", "evaluate", "integrate"]
Status = Literal["keep", "discard", "fail", "void"]
Flag = Literal["data_dependent", "counters_unverified"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """One evaluation of one candidate.

    Attributes:
        id: first digits of the hash of everything else; ``None`` until the ledger has entered the row.
        time: ISO 8601, when the evaluation started.
        name: the candidate.
        status: ``keep``; ``discard`` (sound, but not faster); ``fail`` (the candidate's fault); ``void``
            (the evidence's fault). A failed or void row shows no speed.
        reasons: why, one line each; never empty unless kept.
        speedup: the number it is quoted by: the median of the main input, or over the inputs; for
            ``integrate`` against what was integrated before.
        diverse_speedup: median over the diverse set against stock, ``None`` without such a set.
        interval: 95 % interval of ``speedup``.
        run: the run folder as it was named on the command line.
        seal: hash in the run's ``seal.json`` when the row was entered.
        argv: the command.
    """

    time: str
    name: str
    kind: Kind
    status: Status
    run: str
    seal: str
    quality: str
    claim: Claim | None = None
    reasons: tuple[str, ...] = ()
    flags: tuple[Flag, ...] = ()
    speedup: float | None = None
    diverse_speedup: float | None = None
    interval: tuple[float, float] | None = None
    argv: tuple[str, ...] = ()
    id: str | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        is_measured = self.status in ("keep", "discard")
        checks = (
            (bool(self.name), "a ledger row names its candidate"),
            (is_measured == (self.speedup is not None), "a kept or discarded row has a speedup, no other"),
            (is_measured or self.diverse_speedup is None, "the speed of a failed or void row is withheld"),
            (self.status == "keep" or bool(self.reasons), "a row that is not kept says why"),
        )
        for is_true, message in checks:
            if not is_true:
                raise EvidenceError(message)

    @property
    def is_data_dependent(self) -> bool:
        """Whether its speed changes with what is decoded; a label, never a rejection."""
        return "data_dependent" in self.flags

    @property
    def verdict(self) -> str:
        """The status as people read it: ``keep (data-dependent)``."""
        return f"{self.status} (data-dependent)" if self.is_data_dependent else self.status


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """Every finished row, what was lost to killed writers (``None``: nothing), and the last row's hash."""

    rows: tuple[LedgerRow, ...]
    lost: str | None
    head: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """The file in parts: checked rows, where they end (in bytes), and what an unfinished append left."""

    rows: list[dict[str, Any]]
    num_bytes: int
    tail: bytes


class Ledger:
    """The ledger at ``path``; the file is made by the first append."""

    def __init__(self, path: Path = DEFAULT_PLACE) -> None:
        self.path = path

    def append(self, row: LedgerRow) -> LedgerRow:
        """Enter ``row`` and return it with its id; it is on the disk when this returns.

        Raises:
            UsageError: this very row has been entered before.
            StorageError: it could not be written; the finished rows are as they were.
            EvidenceError: the chain is broken, or a newer draftproof has written to it.
        """
        row = decode(LedgerRow, json.loads(canonical(asdict(row))))
        with _locked(self.path, is_writer=True) as handle:
            content = _read(handle, self.path)
            entered = _with_id(row, content.rows, self.path)
            bodies = [_body(r) for r in content.rows]
            line = canonical(chain([*bodies, asdict(entered)])[-1]) + "\n"
            if content.tail:
                self._set_aside(handle, content)
            _write(handle, line.encode(), content.num_bytes, self.path)
            if not content.rows:
                _sync_folder(self.path)
        return entered

    def read(self) -> LedgerState:
        """All finished rows; a ledger that was never written to has none.

        Raises:
            EvidenceError: a row was edited or cut out (named), or a newer draftproof wrote it.
        """
        try:
            with _locked(self.path, is_writer=False) as handle:
                content = _read(handle, self.path)
                lost = self._lost(content)
        except FileNotFoundError:
            return LedgerState(rows=(), lost=None, head=None)
        try:
            rows = decode(tuple[LedgerRow, ...], [_body(row) for row in content.rows])
        except EvidenceError as error:
            raise EvidenceError(f"{self.path}: {error}") from error
        for number, (row, raw) in enumerate(zip(rows, content.rows, strict=True)):
            if row.id is None or canonical(asdict(row)) != canonical(_body(raw)):
                raise EvidenceError(f"{self.path}: row {number} has fields that draftproof does not write")
        return LedgerState(rows=rows, lost=lost, head=content.rows[-1]["hash"] if content.rows else None)

    def _side_file(self, tail: bytes) -> Path:
        digest = hashlib.sha256(tail).hexdigest()[:16]
        return self.path.with_name(f"{self.path.name}.lost-{digest}")

    def _set_aside(self, handle: int, content: _Content) -> None:
        """Move the tail to its own file. Killed in between, the next append does the same again."""
        side = self._side_file(content.tail)
        try:
            with side.open("wb") as stream:
                stream.write(content.tail)
                stream.flush()
                os.fsync(stream.fileno())
            _sync_folder(side)
            os.ftruncate(handle, content.num_bytes)
        except OSError as error:
            raise _unwritable(error, side) from error

    def _lost(self, content: _Content) -> str | None:
        """One line on every unfinished row, still at the end or already set aside."""
        pending = self._side_file(content.tail) if content.tail else None
        prefix = f"{self.path.name}.lost-"
        sides = sorted(p for p in self.path.parent.iterdir() if p.name.startswith(prefix) and p != pending)
        said = [f"{_unfinished(side.stat().st_size)} was set aside in {side.name}" for side in sides]
        if pending is not None:
            tail = _unfinished(len(content.tail))
            said.append(f"{tail} at the end; the next append sets it aside in {pending.name}")
        return "; ".join(said) or None


def _unfinished(num_bytes: int) -> str:
    return f"1 unfinished row of {num_bytes} bytes"


@contextlib.contextmanager
def _locked(path: Path, *, is_writer: bool) -> Iterator[int]:
    """The open file under a lock of its own: writers alone, readers together."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT if is_writer else os.O_RDONLY
    try:
        if is_writer:
            path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, flags | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not is_writer:
            raise
        raise _unwritable(error, path, "write" if is_writer else "read") from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if is_writer else fcntl.LOCK_SH)
        yield handle
    finally:
        os.close(handle)  # gives the lock back


def _read(handle: int, path: Path) -> _Content:
    """Split the file at its last newline and check every row before it."""
    try:
        with os.fdopen(os.dup(handle), "rb") as stream:
            data = stream.read()
    except OSError as error:
        raise _unwritable(error, path, "read") from error
    end = data.rfind(b"\n") + 1
    rows = [_row(path, number, line) for number, line in enumerate(data[:end].split(b"\n")[:-1])]
    try:
        check_chain(rows)
    except EvidenceError as error:
        raise EvidenceError(
            f"{path}: {error}: it was edited, or a row before it was cut out; a broken chain takes no rows"
        ) from error
    return _Content(rows=rows, num_bytes=end, tail=data[end:])


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """One finished line as it was written, byte for byte."""
    try:
        row = json.loads(line.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"{path}: row {number} is damaged: {error}") from error
    if not isinstance(row, dict):
        raise EvidenceError(f"{path}: row {number} is damaged: not a JSON object")
    try:
        check_version(row)
        is_as_written = canonical(row).encode() == line
    except EvidenceError as error:
        raise EvidenceError(f"{path}: row {number}: {error}") from error
    if not is_as_written:
        raise EvidenceError(f"{path}: row {number} is damaged: not as draftproof writes it")
    return row


def _body(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("previous", "hash")}


def _with_id(row: LedgerRow, entered: Sequence[dict[str, Any]], path: Path) -> LedgerRow:
    """The row with the shortest free prefix of its content's hash, eight digits or more."""
    content = {key: value for key, value in asdict(row).items() if key != "id"}
    text = canonical(content)
    taken = set()
    for other in entered:
        taken.add(other["id"])
        if canonical({k: v for k, v in _body(other).items() if k != "id"}) == text:
            raise UsageError(f"this evaluation is already in {path}, as {other['id']}")
    digest = hashlib.sha256(text.encode()).hexdigest()
    lengths = range(_ID_DIGITS, len(digest) + 1)
    return replace(row, id=next(digest[:n] for n in lengths if digest[:n] not in taken))


def _write(handle: int, data: bytes, num_bytes: int, path: Path) -> None:
    """Append ``data`` and sync; whatever goes wrong, cut the file back to ``num_bytes``."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
    except BaseException as error:
        with contextlib.suppress(OSError):  # what then stays is an unfinished row, and is read as one
            os.ftruncate(handle, num_bytes)
        if isinstance(error, OSError):
            raise _unwritable(error, path) from error
        raise


def _sync_folder(path: Path) -> None:
    """Make a new file's name as durable as its bytes."""
    handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unwritable(error: OSError, path: Path, verb: str = "write") -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"no space left to {verb} {path}; free some and run again")
    return StorageError(f"cannot {verb} {path}: {error.strerror}")


def row_from_results(
    results: dict[str, Any], name: str, kind: Kind, run: str, seal: str, time: str, argv: Sequence[str]
) -> LedgerRow:
    """The row of one run's published results.

    Kept only if the verdict is ``pass`` and the run is complete; a tie, or sound and slower, is discarded.
    """
    status, reasons = _status(results)
    is_shown = status in ("keep", "discard")
    speedup, diverse = results["speedup"], results["metrics"]["diverse"]
    flags: list[Flag] = []
    if diverse is not None and diverse["data_dependent"]:
        flags.append("data_dependent")
    if "counters_unverified" in results.get("flags", ()):
        flags.append("counters_unverified")
    return LedgerRow(
        time=time, name=name, kind=kind, status=status, run=run, seal=seal, quality=results["quality"],
        claim=results["claim"], reasons=reasons, flags=tuple(flags), argv=tuple(argv),
        speedup=speedup["median"] if is_shown else None,
        diverse_speedup=diverse["median_speedup"] if is_shown and diverse is not None else None,
        interval=tuple(speedup["interval"]) if is_shown and speedup["interval"] else None,
    )  # fmt: skip


def _status(results: dict[str, Any]) -> tuple[Status, tuple[str, ...]]:
    outcome, reasons = results["verdict"]["outcome"], tuple(results["verdict"]["reasons"])
    has_speed = results["speedup"] is not None
    if outcome == "fail" and not has_speed:
        return "fail", reasons
    if outcome == "void" or not has_speed:
        return "void", reasons or ("no speed was measured",)
    if results["status"] != "complete":
        return "void", (f"the run was not finished: {results['status']}", *reasons)
    if outcome == "pass":
        return "keep", reasons
    return "discard", reasons or ("no faster than stock",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What the ledger knows of one name: its latest evaluation and its latest A/B, if it had one."""

    name: str
    row: LedgerRow
    num_evaluations: int
    integration: LedgerRow | None


def candidates(rows: Sequence[LedgerRow]) -> tuple[Candidate, ...]:
    """Every name in the order it first appeared. A name that only had an A/B is judged by that."""
    names = dict.fromkeys(row.name for row in rows)
    return tuple(_candidate(name, [row for row in rows if row.name == name]) for name in names)


def _candidate(name: str, rows: Sequence[LedgerRow]) -> Candidate:
    evaluations = [row for row in rows if row.kind != "integrate"]
    integrations = [row for row in rows if row.kind == "integrate"]
    return Candidate(
        name=name, row=(evaluations or integrations)[-1], num_evaluations=len(evaluations),
        integration=integrations[-1] if integrations else None,
    )  # fmt: skip


def best(rows: Sequence[LedgerRow]) -> LedgerRow | None:
    """The fastest candidate whose latest evaluation is kept; the earlier one of two equals."""
    kept = [c.row for c in candidates(rows) if c.num_evaluations and c.row.status == "keep"]
    return max(kept, key=lambda row: row.speedup or 0.0, default=None)


def integrated(rows: Sequence[LedgerRow]) -> LedgerRow | None:
    """The A/B that put in what is integrated now; ``None`` while that is stock."""
    accepted = [row for row in rows if row.kind == "integrate" and row.status == "keep"]
    return accepted[-1] if accepted else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SealCheck:
    """Whether a row's run folder is what it was when the row was entered."""

    state: Literal["sealed", "missing", "differs"]
    problems: tuple[str, ...] = ()


def check_run(row: LedgerRow) -> SealCheck:
    """Hash the run folder of ``row`` again; relative folders are looked for where the command runs."""
    folder = Path(row.run)
    if not folder.is_dir():
        return SealCheck(state="missing", problems=(f"{row.run} is not here",))
    try:
        problems = check_seal(folder)
        found = read_json(folder / SEAL).get("hash")
    except (UsageError, EvidenceError) as error:
        return SealCheck(state="differs", problems=(str(error),))
    if found != row.seal:
        problems = [*problems, f"it was sealed again: {str(found)[:12]}, entered as {row.seal[:12]}"]
    return SealCheck(state="differs" if problems else "sealed", problems=tuple(problems))
