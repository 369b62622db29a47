"""The audit of a finished run: every byte, every figure, every token checked again; all findings collected.

Four questions, each answered from the folder alone: is every byte as it was sealed and chained; do legs,
tokens and traces belong together; does every published figure follow from them; and did stock, in one plain
serial pass over every output, want every token of it. Only the last one runs a model.

What it does not prove. A run rewritten from one end to the other (durations, figures, chains and seal) is
found only by a seal's hash kept elsewhere, as the ledger keeps it. That the clock was honest no folder can
show. The text pieces shown in a report are sealed, not derived again from the ids. And a replay speaks for
this machine: where the run's machine or its software was another, bits may differ, and the audit says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from draftproof import results
from draftproof.consistency import differences, emits_ids, hand_problems, num_leaves, record_problems
from draftproof.errors import EvidenceError, StorageError, UsageError
from draftproof.folder import (
    AUDIT,
    REPLAY,
    RUN,
    SEAL,
    STOCK,
    Evidence,
    check_seal,
    read_chained,
    read_json,
    salvage,
    seal,
)
from draftproof.record import Machine
from draftproof.results import SOLO
from draftproof.wire import FORMAT_VERSION, canonical, chain, encode, tokens_sha256, write_atomic

if TYPE_CHECKING:
    from draftproof.replay import Mismatch, ReplayRow

Progress = Callable[[str, int, int], None]
Replay = Callable[[str, Sequence[int], Sequence[int]], "ReplayRow"]
Rebuild = Callable[[Evidence], dict[str, Sequence[int]]]
Check = Literal["seal", "record", "figure", "replay"]

# With none in N, the rate is under 3 / N at 95 %.
_RULE_OF_THREE = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line about one thing; ``is_failure`` is false for what a reader only has to know."""

    check: Check
    message: str
    is_failure: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What an audit looked at and found.

    Attributes:
        outcome: ``fail`` as soon as one finding is a failure.
        num_legs: legs whose records were joined.
        num_figures: published figures recomputed.
        num_outputs: distinct outputs replayed; ``None`` when none was to be.
        num_tokens: tokens replayed.
        num_mismatches: tokens that are not stock's, whatever they are called.
        num_ties: those of them within the measured noise of a guarded plan.
        rate_bound: mismatches a token, at most, at 95 %; only with none in ``num_tokens``.
    """

    outcome: Literal["pass", "fail"]
    num_legs: int
    num_figures: int
    num_outputs: int | None
    num_tokens: int
    num_mismatches: int
    num_ties: int
    rate_bound: float | None
    findings: tuple[Finding, ...]


@dataclass(slots=True, kw_only=True)
class _Audit:
    """What has been found so far."""

    findings: list[Finding] = field(default_factory=list)
    num_figures: int = 0
    replayed: list[tuple[_Output, ReplayRow]] | None = None
    num_ties: int = 0

    def add(self, check: Check, messages: Iterable[str], *, is_failure: bool = True) -> None:
        self.findings += [Finding(check=check, message=m, is_failure=is_failure) for m in messages]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    """One output of one input, and the arms that emitted it."""

    label: str
    token_ids: tuple[int, ...]
    arms: tuple[str, ...]


def audit(
    folder: Path, *, replay: bool = True, progress: Progress | None = None, stock: Replay | None = None,
    prompts: Rebuild | None = None,
) -> AuditReport:  # fmt: skip
    """Check a run folder; writes ``replay.jsonl`` and ``audit.json`` into it unless its seal is broken.

    Args:
        folder: the run folder.
        replay: run stock over every output; without it the tokens are compared with the records only.
        progress: told (what, done, total) during the replay.
        stock: replays one output (label, prompt ids, token ids); ``None`` loads the model of the request.
        prompts: builds the prompts' ids again from the suite, to be compared; asked only with ``replay``.

    Raises:
        UsageError: no run in ``folder``, or one in a format that cannot be audited.
    """
    _refuse_foreign(folder)
    found = _Audit()
    broken = _seal_problems(folder)
    found.add("seal", broken)
    reading = salvage(folder)
    found.add("record", reading.problems)
    evidence = reading.evidence
    if evidence is not None and reading.results is not None:
        found.add("record", record_problems(evidence))
        _check_figures(found, evidence, reading.results)
        if replay:
            source = nullcontext(stock) if stock is not None else _stock(found, evidence, progress)
            _check_tokens(found, evidence, source, prompts)
    report = _report(found, evidence)
    try:
        if not broken:
            _write(folder, found, report)
    except StorageError as error:
        found.add("seal", [f"the audit was not written: {error}"], is_failure=False)
    return replace(report, findings=tuple(found.findings))


def _refuse_foreign(folder: Path) -> None:
    """Refuse what this version cannot audit; what an edit made unreadable is for the audit to find."""
    try:
        version: Any = read_json(folder / RUN).get("format_version")
    except EvidenceError as error:
        version = str(error)
    is_edited = (folder / SEAL).is_file() and bool(_seal_problems(folder))
    if version != FORMAT_VERSION and not is_edited:
        raise UsageError(
            f"{folder} cannot be audited: format {version!r}, this draftproof reads {FORMAT_VERSION};"
            " update draftproof, or run the bench again"
        )


def _seal_problems(folder: Path) -> list[str]:
    """Every file that is not as it was sealed, the derived ones too."""
    if not (folder / SEAL).is_file():
        return [f"{SEAL} is missing"]
    problems = []
    try:
        problems = check_seal(folder)
        if (folder / REPLAY).is_file():
            read_chained(folder / REPLAY)
    except EvidenceError as error:
        problems.append(str(error))
    return problems


def _check_figures(found: _Audit, evidence: Evidence, published: dict[str, Any]) -> None:
    try:
        recomputed = results.compute(evidence)
    except (ArithmeticError, AttributeError, EvidenceError, LookupError, TypeError, ValueError) as error:
        found.add("figure", [f"the figures cannot be recomputed: {error!r}"])
        return
    plain = json.loads(canonical(recomputed))
    found.num_figures = num_leaves(plain)
    found.add("figure", differences(published, plain, "results"))
    found.add("figure", hand_problems(evidence, published))


def _check_tokens(
    found: _Audit, evidence: Evidence, source: AbstractContextManager[Replay], prompts: Rebuild | None
) -> None:
    """Replay every distinct output once, and name every token that is not stock's."""
    groups: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for decode in evidence.decodes:
        if decode.leg.label in evidence.prompts and decode.token_ids:
            groups.setdefault((decode.leg.label, decode.token_ids), []).append(decode.leg.arm)
    if not groups or not emits_ids(evidence):
        found.add(
            "replay", ["nothing to replay: the outputs are not a language model's tokens"], is_failure=False
        )
        return
    outputs = [
        _Output(label=k, token_ids=ids, arms=tuple(dict.fromkeys(a))) for (k, ids), a in groups.items()
    ]
    rows = []
    try:
        with source as replay:
            _check_prompts(found, evidence, prompts)
            rows = [replay(o.label, evidence.prompts[o.label], o.token_ids) for o in outputs]
    except UsageError as error:
        found.add("replay", [f"the tokens could not be replayed (--no-replay audits the rest): {error}"])
        return
    found.replayed = list(zip(outputs, rows, strict=True))
    for output, row in found.replayed:
        for mismatch in row.mismatches:
            kind = _kind(evidence, output, mismatch)
            found.num_ties += kind == _TIE
            message = f"{output.label}, {' and '.join(output.arms)}: {_told(mismatch)}: {kind}"
            found.add("replay", [message], is_failure=kind == _BUG)


_BUG, _TIE, _ALLOWED = (
    "a bug",
    "a tie within the measured noise",
    "allowed, as stock's tokens are not claimed",
)


def _kind(evidence: Evidence, output: _Output, mismatch: Mismatch) -> str:
    """What a mismatch is under the run's claim. Stock's own arm has neither noise nor licence to differ."""
    plan = evidence.plan
    if {STOCK, SOLO} & set(output.arms):
        return _BUG
    if evidence.request.get("quality", "exact") != "exact" or (plan is not None and plan.claim == "fixed"):
        return _ALLOWED
    bound = plan.margin_bound if plan is not None and plan.claim == "guarded" else None
    return _BUG if bound is None or mismatch.gap is None or mismatch.gap > bound else _TIE


def _told(mismatch: Mismatch) -> str:
    if mismatch.emitted is None:
        return f"it ends after {mismatch.position} tokens, stock goes on with {mismatch.expected}"
    if mismatch.expected is None:
        return f"token {mismatch.position} is {mismatch.emitted}, stock had stopped"
    start = f"token {mismatch.position} is {mismatch.emitted}, stock's is {mismatch.expected}"
    if mismatch.gap is None:
        return f"{start} (the rules forbid the one emitted, or the model has no such token)"
    tie = ", an exact tie of equal logits" if mismatch.gap == 0 else ""
    return f"{start} (gap {mismatch.gap:.6g}, rank {mismatch.rank}{tie})"


def _check_prompts(found: _Audit, evidence: Evidence, prompts: Rebuild | None) -> None:
    """Compare the recorded prompt ids with those the suite gives now."""
    try:
        built = prompts(evidence) if prompts is not None else {}
    except UsageError as error:
        found.add("replay", [f"the prompts were taken as recorded: {error}"], is_failure=False)
        return
    found.add("record", (
        f"{label}: its prompt in prompts.jsonl is not the one the suite gives"
        for label, ids in built.items() if evidence.prompts.get(label) != tuple(ids)
    ))  # fmt: skip


@contextmanager
def _stock(found: _Audit, evidence: Evidence, progress: Progress | None) -> Iterator[Replay]:
    """The model of the request, with the run's number of threads; says what is not as it was in the run."""
    import torch  # noqa: PLC0415 - an audit without a replay loads no torch

    from draftproof import machine, replay  # noqa: PLC0415
    from draftproof.models import weights  # noqa: PLC0415

    threads = torch.get_num_threads()
    given = evidence.request.get("options")  # an evaluation's workload has its own
    request = {**(given if isinstance(given, dict) else {}), **evidence.request}
    limit, stop = request.get("max_new_tokens"), request.get("stop")
    if type(limit) is not int or limit < 1 or stop not in ("natural", "fixed"):
        raise UsageError(f"the request does not say how outputs end: {limit!r} new tokens, stop {stop!r}")
    options: dict[str, Any] = {"min_new_tokens": limit} if stop == "fixed" else {}
    torch.set_num_threads(max(evidence.machine.num_threads, 1))
    try:
        loaded = replay.load_stock(
            str(request.get("model")), str(request.get("dtype")), str(request.get("device", "cpu"))
        )
        here = _facts(machine.describe(loaded.model.module.device), weights.identity(loaded.folder))
        run = _facts(evidence.machine, evidence.provenance.get("weights"))
        found.add("replay", (
            f"replayed with another {name}: {here[name]} here, {run[name]} in the run; bits may differ"
            for name in run if run[name] is not None and run[name] != here[name]
        ), is_failure=False)  # fmt: skip
        yield partial(replay.replay, loaded.model, max_new_tokens=limit, progress=progress, **options)
    finally:
        torch.set_num_threads(threads)


def _facts(machine: Machine, weights: Any) -> dict[str, Any]:
    """What bits depend on. The threads are set as they were, so the variable that set them says nothing."""
    variables = [v for v in machine.environment if not v.startswith("OMP_NUM_THREADS=")]
    return {**asdict(machine), "environment": " ".join(variables), "weights": weights}


def _report(found: _Audit, evidence: Evidence | None) -> AuditReport:
    rows = [row for _, row in found.replayed or ()]
    num_tokens = sum(len(row.margins) for row in rows)
    num_mismatches = sum(len(row.mismatches) for row in rows)
    return AuditReport(
        outcome="fail" if any(f.is_failure for f in found.findings) else "pass",
        num_legs=len(evidence.decodes) if evidence else 0, num_figures=found.num_figures,
        num_outputs=None if found.replayed is None else len(rows), num_tokens=num_tokens,
        num_mismatches=num_mismatches, num_ties=found.num_ties,
        rate_bound=_RULE_OF_THREE / num_tokens if num_tokens and not num_mismatches else None,
        findings=tuple(found.findings),
    )  # fmt: skip


def _write(folder: Path, found: _Audit, report: AuditReport) -> None:
    """Leave the audit in the folder and seal it anew; the seal's hash of what was measured stays."""
    if found.replayed is not None:
        rows = chain(
            {**encode(row), "arms": list(output.arms), "tokens_sha256": tokens_sha256(output.token_ids)}
            for output, row in found.replayed
        )
        write_atomic(folder / REPLAY, "".join(canonical(row) + "\n" for row in rows))
    write_atomic(folder / AUDIT, canonical({"format_version": FORMAT_VERSION, **encode(report)}) + "\n")
    seal(folder)
