"""``draftproof audit``: the verdict first, then every finding, one line each."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from draftproof.cli.terminal import progress_line, quiet_transformers, stderr, stdout
from draftproof.folder import Evidence
from draftproof.wire import encode

# More of one kind say nothing new on a terminal; --json and audit.json have them all.
_MOST_SHOWN = 20


def run(folder: Path, *, replay: bool, json_output: bool) -> int:
    """0 when nothing failed, 1 otherwise, 130 when interrupted (nothing is written then)."""
    from draftproof.audit import audit

    if replay:
        quiet_transformers()
    try:
        with progress_line() as progress:
            report = audit(folder, replay=replay, progress=progress, prompts=rebuild)
    except KeyboardInterrupt:
        stderr().print("interrupted: the run folder was left as it was")
        return 130
    if json_output:
        sys.stdout.write(json.dumps(encode(report)) + "\n")
    else:
        for line in lines(report):
            stdout().print(Text(line), soft_wrap=True)
    return 0 if report.outcome == "pass" else 1


def rebuild(evidence: Evidence) -> dict[str, Sequence[int]]:
    """The prompts of the packaged suite, from the texts and the model's tokenizer; a user's own are his."""
    from draftproof.bench.prompts import build_prompt, diverse_inputs
    from draftproof.models.load import load_tokenizer, resolve

    request, length = evidence.request, evidence.request.get("prompt_len")
    if evidence.kind != "bench" or request.get("suite") != "diverse" or not isinstance(length, int):
        return {}
    tokenizer = load_tokenizer(resolve(str(request.get("model")), str(request.get("dtype"))))
    chat = request.get("chat")
    is_chat = bool(getattr(tokenizer, "chat_template", None)) if chat is None else bool(chat)
    return {
        item.label: build_prompt(item, tokenizer, length, chat=is_chat)
        for item in diverse_inputs()
        if item.label in evidence.roles
    }


def lines(report: Any) -> list[str]:
    """An ``AuditReport`` for people: verdict, what it rests on, failures, what else one has to know."""
    failures = [f for f in report.findings if f.is_failure]
    notes = [f for f in report.findings if not f.is_failure]
    head = "PASS" if report.outcome == "pass" else f"FAIL: {_count(len(failures), 'finding')}"
    checked = (
        f"{_count(report.num_legs, 'leg')} joined, {_count(report.num_figures, 'figure')} recomputed,"
        f" {_replayed(report)}"
    )
    shown = [f"{f.check}: {f.message}" for f in failures[:_MOST_SHOWN]]
    if len(failures) > _MOST_SHOWN:
        shown.append(f"and {len(failures) - _MOST_SHOWN} more (--json lists them)")
    return [head, checked, *shown, *(f"note: {f.message}" for f in notes[:_MOST_SHOWN])]


def _replayed(report: Any) -> str:
    if report.num_outputs is None:
        return "no token replayed"
    tokens = f"{_count(report.num_tokens, 'token')} of {_count(report.num_outputs, 'output')} replayed"
    if report.rate_bound is not None:
        return f"{tokens}, 0 mismatched: under {1000 * report.rate_bound:.2g} in 1000 (95 %)"
    ties = f", {report.num_ties} of them within the measured noise" if report.num_ties else ""
    return f"{tokens}, {report.num_mismatches} mismatched{ties}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
