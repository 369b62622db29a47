"""A run folder: raw rows on disk, hash-chained, sealed as a whole, and read back as one record.

``run.json`` holds the request, the machine and the published results; the ``.jsonl`` files hold the raw
rows the results are computed from; ``seal.json`` holds the hash of every file. The seal finds an edit of
any byte, the chains say in which row. Neither stops someone who rewrites everything: keep the seal's hash
elsewhere (the ledger does). That hash covers what was measured; a report or an audit written later is
sealed beside it and leaves it as it was. Hidden files are no part of a run.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, TypeVar

from draftproof.errors import EvidenceError, UsageError
from draftproof.record import CostCurve, Leg, Machine, MemoryFloor, Plan, Trace
from draftproof.wire import (
    FORMAT_VERSION,
    canonical,
    chain,
    check_chain,
    check_version,
    decode,
    encode,
    write_atomic,
)

STOCK, SERIAL = "stock", "serial"
RUN, SEAL, REPORT, AUDIT, REPLAY = "run.json", "seal.json", "report.html", "audit.json", "replay.jsonl"
CHAINED = ("prompts.jsonl", "legs.jsonl", "tokens.jsonl", "trace.jsonl", "texts.jsonl", "gates.jsonl")
# Made from the run afterwards, by anyone, again and again.
DERIVED = (REPORT, AUDIT, REPLAY)
_OLDEST = 2

Role = Literal["main", "holdout", "diverse"]
Rows = dict[str, list[dict[str, Any]]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """One leg with what it emitted; ``trace`` is the engine's own record, ``None`` for other arms."""

    leg: Leg
    token_ids: tuple[int, ...]
    trace: Trace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything a run measured; every published figure is a function of this record alone.

    Attributes:
        kind: ``bench`` (a drafter against stock) or ``evaluate`` (a candidate against stock).
        request: the settings as they were used.
        status: ``complete``, ``running``, ``interrupted`` or ``failed: why``.
        arm: name of the judged arm; ``stock`` is always the control and ``serial`` the engine without
            drafts, where a run has it.
        roles: role of every input by label; what a bench decodes is all ``diverse``.
        machine: the machine, or the first of several.
        plan: ``None`` when no engine took part.
        prompts: token ids by label, in the order of the suite; empty for inputs that are not tokens.
        decodes: every timed leg in the order it ran.
        texts: the prompt's and the output's text pieces by label, for people to read.
        gates: raw figures of the quality gates, one row an input and gate (empty for exact runs).
        notes: one-line reasons the run itself gives (an arm that died, inputs that were skipped).
    """

    kind: Literal["bench", "evaluate"]
    request: dict[str, Any]
    status: str
    arm: str
    roles: dict[str, Role]
    machine: Machine
    plan: Plan | None = None
    curve: CostCurve | None = None
    floor: MemoryFloor | None = None
    prompts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    decodes: tuple[Decode, ...] = ()
    texts: dict[str, dict[str, Any]] = field(default_factory=dict)
    gates: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def labels(self) -> tuple[str, ...]:
        """Inputs with at least one leg, in the order of the suite."""
        seen = {decode_.leg.label for decode_ in self.decodes}
        return tuple(label for label in self.roles if label in seen)

    def of(self, label: str, arm: str | None = None) -> list[Decode]:
        """The decodes of one input, of one arm if given."""
        return [d for d in self.decodes if d.leg.label == label and arm in (None, d.leg.arm)]


def write_run(folder: Path, evidence: Evidence, results: dict[str, Any]) -> None:
    """Write or replace the run's files and its seal; each file appears whole or not at all."""
    files = _raw_rows(evidence)
    # Legs last: killed before, the folder holds what the legs in it need, and ``salvage`` can read it.
    for name in sorted(files, key="legs.jsonl".__eq__):
        write_atomic(folder / name, "".join(canonical(row) + "\n" for row in chain(files[name])))
    head = {
        name: encode(value) if value is not None else None
        for name, value in (("machine", evidence.machine), ("plan", evidence.plan),
                            ("cost_curve", evidence.curve), ("memory_floor", evidence.floor))
    }  # fmt: skip
    document = {
        "format_version": FORMAT_VERSION, "kind": evidence.kind, "request": evidence.request,
        "status": evidence.status, "arm": evidence.arm, "roles": evidence.roles,
        "labels": list(evidence.roles), "notes": list(evidence.notes), "provenance": evidence.provenance,
        "results": results, **head,
    }  # fmt: skip
    # Twice, as keys that are numbers are sorted as text only once they are text.
    write_atomic(folder / RUN, canonical(json.loads(canonical(document))) + "\n")
    seal(folder)


def _raw_rows(evidence: Evidence) -> Rows:
    def key(leg: Leg) -> dict[str, Any]:
        return {"label": leg.label, "arm": leg.arm, "pair": leg.pair}

    traced = [d for d in evidence.decodes if d.trace is not None]
    heads = [
        {**key(d.leg), "num_prompt": d.trace.num_prompt, "prefill_ns": d.trace.prefill_ns}
        for d in traced if d.trace is not None
    ]  # fmt: skip
    rounds = [{**key(d.leg), **round_} for d in traced for round_ in encode(d.trace)["rounds"]]
    return {
        "prompts.jsonl": [{"label": k, "token_ids": list(v)} for k, v in evidence.prompts.items()],
        "legs.jsonl": [encode(d.leg) for d in evidence.decodes],
        "tokens.jsonl": [{**key(d.leg), "token_ids": list(d.token_ids)} for d in evidence.decodes],
        "trace.jsonl": [*heads, *rounds],
        "texts.jsonl": [{"label": label, **text} for label, text in evidence.texts.items()],
        "gates.jsonl": list(evidence.gates),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a run folder says, and every fault found on the way, one line each.

    ``evidence`` and ``results`` are ``None`` where the faults left nothing to build them from.
    """

    evidence: Evidence | None
    results: dict[str, Any] | None
    problems: tuple[str, ...]


def read_run(folder: Path) -> tuple[Evidence, dict[str, Any]]:
    """The evidence and the published results of a run folder; chains are checked, the seal is not.

    Raises:
        UsageError: there is no run in ``folder``.
        EvidenceError: a file is damaged, or written by a version that cannot be read.
    """
    document = read_json(folder / RUN)
    check_version(document)
    if document["format_version"] < _OLDEST:
        raise EvidenceError(
            f"{folder} has format {document['format_version']}, too old to read; run the bench again"
        )
    found = salvage(folder)
    if found.problems or found.evidence is None or found.results is None:
        raise EvidenceError(f"{folder}: {found.problems[0]}")
    return found.evidence, found.results


def salvage(folder: Path) -> Reading:
    """Read on past every fault: for an audit, which names them all. The seal is not checked.

    Raises:
        UsageError: there is no run in ``folder``.
    """
    problems: list[str] = []
    rows: Rows = {}
    for name in CHAINED:
        rows[name], faults = _read_rows(folder / name)
        problems += faults
    try:
        document = read_json(folder / RUN)
        if (folder / RUN).read_bytes() != (canonical(document) + "\n").encode():
            problems.append(f"{RUN} is damaged: not as draftproof writes it")
        results = document["results"]
        if not isinstance(results, dict):
            raise EvidenceError("the results are not a JSON object")
        evidence = _evidence(document, rows)
    except (EvidenceError, KeyError, TypeError, AttributeError) as error:
        why = str(error) if isinstance(error, EvidenceError) else repr(error)
        return Reading(evidence=None, results=None, problems=(*problems, f"not a complete run: {why}"))
    return Reading(evidence=evidence, results=results, problems=(*problems, *_strays(evidence, rows)))


def _strays(evidence: Evidence, rows: Rows) -> list[str]:
    """Files that say more, less or other things than the record read from them."""
    found = []
    for name, expected in _raw_rows(evidence).items():
        pairs = zip_longest(map(_without, rows[name]), expected)
        first = next((i for i, (row, want) in enumerate(pairs) if row != want), None)
        if first is not None:
            found.append(f"{name}: row {first} is not as draftproof writes it, or is one too many")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDocument:
    """The part of ``run.json`` that is no record of its own."""

    kind: Literal["bench", "evaluate"]
    request: dict[str, Any]
    status: str
    arm: str
    roles: dict[str, Role]
    labels: tuple[str, ...]
    notes: tuple[str, ...]
    provenance: dict[str, Any]


def _evidence(document: dict[str, Any], rows: Rows) -> Evidence:
    def maybe(record_type: type[Any], name: str) -> Any:
        return None if document[name] is None else decode(record_type, document[name])

    head = decode(RunDocument, document)
    if sorted(head.labels) != sorted(head.roles):
        raise EvidenceError(f"{RUN}: its labels are not those of its roles")
    return Evidence(
        kind=head.kind, request=head.request, status=head.status, arm=head.arm,
        roles={label: head.roles[label] for label in head.labels},
        machine=decode(Machine, document["machine"]), plan=maybe(Plan, "plan"),
        curve=maybe(CostCurve, "cost_curve"), floor=maybe(MemoryFloor, "memory_floor"),
        prompts={row["label"]: _ids("prompts.jsonl", row) for row in rows["prompts.jsonl"]},
        decodes=_decodes(rows),
        texts={row["label"]: _without(row, "label") for row in rows["texts.jsonl"]},
        gates=tuple(_without(row) for row in rows["gates.jsonl"]),
        notes=head.notes, provenance=head.provenance,
    )  # fmt: skip


def _ids(name: str, row: dict[str, Any]) -> tuple[int, ...]:
    ids = row["token_ids"]
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise EvidenceError(f"{name}: {_key(row)} holds token ids that are no whole numbers")
    return tuple(ids)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["label"], row.get("arm"), row.get("pair")


def _decodes(rows: Rows) -> tuple[Decode, ...]:
    """Legs joined with their tokens and traces."""
    tokens = {_key(row): _ids("tokens.jsonl", row) for row in rows["tokens.jsonl"]}
    heads = {_key(row): row for row in rows["trace.jsonl"] if "prefill_ns" in row}
    rounds: dict[tuple[Any, ...], list[dict[str, Any]]] = {k: [] for k in heads}
    for row in rows["trace.jsonl"]:
        if "prefill_ns" not in row:
            if _key(row) not in rounds:
                raise EvidenceError(f"trace.jsonl: a round of {_key(row)}, which has no prompt row")
            rounds[_key(row)].append(_without(row, "label", "arm", "pair"))
    traces = {
        k: _named("trace.jsonl", k, Trace, {**_without(head, "label", "arm", "pair"), "rounds": rounds[k]})
        for k, head in heads.items()
    }
    decodes = []
    for number, row in enumerate(rows["legs.jsonl"]):
        leg = _named("legs.jsonl", f"row {number}", Leg, _without(row))
        key = (leg.label, leg.arm, leg.pair)
        if key not in tokens:
            raise EvidenceError(f"tokens.jsonl: nothing for the leg {key}")
        decodes.append(Decode(leg=leg, token_ids=tokens[key], trace=traces.get(key)))
    return tuple(decodes)


def _named(name: str, where: object, record_type: type[T], value: dict[str, Any]) -> T:
    """The record, or an error that says where it stood."""
    try:
        return decode(record_type, value)
    except EvidenceError as error:
        raise EvidenceError(f"{name}: {where}: {error}") from error


def _without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k not in (*names, "previous", "hash")}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object written by draftproof."""
    try:
        document = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"no run in {path.parent}: {path.name} is missing") from error
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"{path} is damaged: {error}") from error
    if not isinstance(document, dict):
        raise EvidenceError(f"{path} is damaged: not a JSON object")
    return document


def read_chained(path: Path) -> list[dict[str, Any]]:
    """The rows of a chained file; ``EvidenceError`` names the first row that is wrong."""
    rows, problems = _read_rows(path)
    if problems:
        raise EvidenceError(f"{path.parent}/{problems[0]}")
    return rows


def _read_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Every row that can be read, and what is wrong with the file."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], [f"{path.name} is missing"]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    problems = [f"{path.name}: the last row is cut off"] if lines.pop() else []
    rows = []
    for number, line in enumerate(lines):
        try:
            rows.append(_row(line))
        except EvidenceError as error:
            problems.append(f"{path.name}: row {number} is damaged: {error}")
    if not problems:
        try:
            check_chain(rows)
        except EvidenceError as error:
            problems.append(f"{path.name}: {error}")
    return rows, problems


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
        is_canonical = isinstance(row, dict) and canonical(row).encode() == line
    except (ValueError, RecursionError) as error:
        raise EvidenceError(str(error)) from error
    if not is_canonical:
        raise EvidenceError("not as draftproof writes it")
    return dict(row)


def seal(folder: Path) -> str:
    """Hash every file of the run into ``seal.json``; returns the hash of what was measured."""
    digests = {name: _digest(path) for name, path in _files(folder).items()}
    measured = {name: digest for name, digest in digests.items() if name not in DERIVED}
    derived = {name: digest for name, digest in digests.items() if name in DERIVED}
    document = _sealed(measured, derived, FORMAT_VERSION)
    write_atomic(folder / SEAL, canonical(document) + "\n")
    return str(document["hash"])


def _sealed(measured: dict[str, str], derived: dict[str, str], version: int) -> dict[str, Any]:
    """The seal of these files; ``hash`` stays the same when only derived files come and go."""
    body = {"files": measured, "format_version": version}
    own, other = (hashlib.sha256(canonical(part).encode()).hexdigest() for part in (body, derived))
    return {**body, "hash": own, "derived": derived, "derived_hash": other}


def check_seal(folder: Path) -> list[str]:
    """What differs from the seal, one line a file; empty when every byte is as it was sealed."""
    document = read_json(folder / SEAL)
    try:
        expected = _sealed(document["files"], document["derived"], document["format_version"])
        sealed: dict[str, str] = {**document["files"], **document["derived"]}
        is_intact = (canonical(expected) + "\n").encode() == (folder / SEAL).read_bytes()
    except (KeyError, TypeError, EvidenceError):
        is_intact = False
    if not is_intact:
        return [f"{SEAL} was changed"]
    present = _files(folder)
    missing = [f"{name} is missing" for name in sealed if name not in present]
    added = [f"{name} was added" for name in present if name not in sealed]
    changed = [
        f"{name} was changed"
        for name, digest in sealed.items() if name in present and _digest(present[name]) != digest
    ]  # fmt: skip
    return [*missing, *changed, *added]


def _files(folder: Path) -> dict[str, Path]:
    """Every file of the run by its path in the folder, the seal itself and hidden ones left out."""
    found = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name.as_posix(): path
        for name, path in found.items()
        if name.as_posix() != SEAL and not any(part.startswith(".") for part in name.parts)
    }


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
