"""``draftproof generate``: streams text; statistics, colours and JSON on request."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.table import Table

from draftproof.cli.terminal import progress_line, quiet_transformers, read_prompt, stderr, stdout
from draftproof.stats import DecodeStats, decode_stats
from draftproof.wire import encode

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"


def run(
    argument: str, load: dict[str, Any], request: dict[str, Any], draft_model: str | None, *, stats: bool,
    color: bool, json_output: bool,
) -> int:  # fmt: skip
    """Decode one prompt; 0, or 130 when interrupted (what was emitted is printed all the same)."""
    prompt = read_prompt(argument)
    request["depth"] = parse_depth(request["depth"])
    from draftproof import engine as engines
    from draftproof.drafters.build import check_head
    from draftproof.drafters.shortlist import read_shortlist

    if request.get("shortlist") is not None:
        request["shortlist"] = read_shortlist(request["shortlist"])
    check_head(load.get("head"), request["drafter"])
    quiet_transformers()
    with progress_line() as report:
        engine = engines.load(**load, progress=report)
        if draft_model is not None:
            request["draft_model"] = engines.load_target(
                draft_model, dtype=load["dtype"], device=load["device"], like=engine
            )
    stream = engine.stream(prompt, **request)
    color = color and stdout().is_terminal  # rich counts FORCE_COLOR as one
    interrupted = False
    try:
        for chunk in stream:
            if not json_output:
                _show(chunk, color=color)
    except KeyboardInterrupt:
        interrupted = True
    done = stream.result()
    if json_output:
        sys.stdout.write(json.dumps(_document(done), ensure_ascii=False) + "\n")
    else:
        sys.stdout.write("\n")
    if stats:
        stderr().print(_table(decode_stats(done.trace), done))
    return 130 if interrupted else 0


def parse_depth(text: str) -> int | str:
    """A number where it is one; the engine refuses any other word but ``auto``."""
    try:
        return int(text)
    except ValueError:
        return text


def _show(chunk: Any, *, color: bool) -> None:
    drafted = chunk.drafted_text
    if color and drafted:
        drafted = f"{_GREEN}{drafted}{_PLAIN}"
    sys.stdout.write(drafted + chunk.own_text)
    sys.stdout.flush()


def _document(done: Any) -> dict[str, Any]:
    plan = done.plan
    return {
        "text": done.text, "token_ids": list(done.token_ids), "num_prompt": len(done.prompt_ids),
        "finish_reason": done.finish_reason, "claim": plan.claim, "margin_bound": plan.margin_bound,
        "decode_stats": encode(decode_stats(done.trace)), "trace": encode(done.trace),
    }  # fmt: skip


def _table(stats: DecodeStats, done: Any) -> Table:
    table = Table(title=f"claim: {done.plan.claim} · finished: {done.finish_reason}", show_header=False)
    decode_ns = max(stats.draft_ns + stats.verify_ns + stats.commit_ns, 1)
    rows = {
        "tokens": f"{stats.tokens} after {len(done.prompt_ids)} prompt tokens",
        "forwards": f"{stats.steps}, of which {stats.verifies} verified a draft",
        "draft tokens": f"{stats.drafted} verified, {stats.accepted} accepted ({_percent(stats)})",
        "tokens per verification": _number(stats.tokens_per_verify) + " (bonus included)",
        "tokens per forward": _number(stats.tokens_per_step),
        "near-ties decided again": str(stats.redecided),
        "prompt": f"{done.trace.prefill_ns / 1e6:.0f} ms",
        "decode": f"{decode_ns / 1e6:.0f} ms, {decode_ns / 1e6 / max(stats.tokens - 1, 1):.1f} ms a token",
        "of it": " · ".join(
            f"{name} {part / decode_ns:.0%}"
            for name, part in (
                ("draft", stats.draft_ns),
                ("verify and commit", stats.verify_ns),
                ("learn", stats.commit_ns),
            )  # fmt: skip
        ),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _percent(stats: DecodeStats) -> str:
    return "none drafted" if stats.acceptance_rate is None else f"{stats.acceptance_rate:.0%}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"
