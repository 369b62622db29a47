"""``draftproof head``: the steps of the head lab with progress, and what each made as tables."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from draftproof.cli.terminal import Report, progress_line, quiet_transformers, stderr, stdout

_INTERRUPTED = 130
_SELF_INSTRUCT = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a corpus goes, what it is kept clear of, and who makes it."""

    out: Path
    against: tuple[Path, ...]
    ray: str | None
    json_output: bool


def corpus(settings: dict[str, Any], amount: dict[str, int | None], place: Place) -> int:
    """0 when the corpus is complete, 130 when interrupted."""
    from draftproof.heads.corpus import CorpusSettings, make_corpus
    from draftproof.heads.writer import WriterSettings

    quiet_transformers()
    evaluation = _evaluation(place.against)
    with progress_line() as report:
        facts = provenance_of(settings, report)
        if settings["self_instruct_share"] is None:
            settings["self_instruct_share"] = _SELF_INSTRUCT if _has_template(settings) else 0.0
        writer = WriterSettings(**settings, evaluation=evaluation)
        made = CorpusSettings(**amount, writer=writer)
        ray: Any = None
        if place.ray is not None:
            from draftproof.heads.cluster import OnRay

            ray = OnRay(place.ray, writer)
        summary = make_corpus(made, place.out, report, provenance=facts, place=ray)
    if place.json_output:
        sys.stdout.write(json.dumps(summary) + "\n")
    else:
        _show(summary)
    return _INTERRUPTED if summary["status"] == "interrupted" else 0


def _evaluation(against: tuple[Path, ...]) -> dict[str, str]:
    """Texts no prompt and no answer may overlap: the packaged suites and the user's own."""
    from draftproof.bench.prompts import read_suite
    from draftproof.bench.workloads.llm import evaluation_texts

    texts = evaluation_texts()
    for path in against:
        for item in read_suite(path):
            texts[f"{path.name}: {item.label}"] = f"{item.context}\n\n{item.request}".strip()
    return texts


def provenance_of(settings: dict[str, Any], report: Report) -> dict[str, Any]:
    """Facts about this run on the model that ``settings`` names by ``model`` and ``dtype``."""
    from importlib.metadata import version

    from draftproof.bench.provenance import provenance

    facts = provenance(_folder(settings, report), sys.argv[1:])
    names = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
    return {**facts, "versions": {name: version(name) for name in names}}


def _folder(settings: dict[str, Any], report: Report) -> Path:
    from draftproof.errors import OptionError
    from draftproof.models.load import DTYPES, resolve

    if settings["dtype"] not in DTYPES:
        raise OptionError(f"unknown dtype {settings['dtype']!r}; known: {', '.join(DTYPES)}")
    return resolve(settings["model"], settings["dtype"], progress=report)


def _has_template(settings: dict[str, Any]) -> bool:
    from draftproof.heads.chat import Chat
    from draftproof.models.load import load_tokenizer

    return Chat(load_tokenizer(_folder(settings, lambda *_: None))).has_template


def _show(summary: dict[str, Any]) -> None:
    console = stdout()
    if summary["tokens_by_category"]:
        console.print(table(summary))
    console.print(Text("\n".join(lines(summary))), soft_wrap=True)
    for broken in summary["redone"]:
        stderr().print(Text(f"made again: {broken}"), soft_wrap=True)


def table(summary: dict[str, Any]) -> Table:
    """Kept answer tokens, a line a category, a column a language."""
    counts = summary["tokens_by_category"]
    languages = sorted({language for row in counts.values() for language in row})
    title = f"{summary['model']} · {summary['num_rows']} answers, {summary['num_tokens']} tokens"
    made = Table(title=Text(title), box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    made.add_column("tokens", no_wrap=True)
    for language in (*languages, "all"):
        made.add_column(language, justify="right", no_wrap=True)
    for category, row in counts.items():
        made.add_row(category, *(str(row.get(name, 0)) for name in languages), str(sum(row.values())))
    totals = [sum(row.get(name, 0) for row in counts.values()) for name in languages]
    made.add_section()
    made.add_row("all", *map(str, totals), str(sum(totals)))
    return made


def lines(summary: dict[str, Any]) -> list[str]:
    """Parts, what was removed, overlap, speed against stock, equality, and how to go on."""
    found = [
        ", ".join(
            f"{name} {part['num_rows']} answers ({part['num_tokens']} tokens)"
            for name, part in sorted(summary["parts"].items())
        )
        or "no answer was kept"
    ]
    removed = summary["removed"]
    gone = ", ".join(f"{number} {reason}" for reason, number in removed.items())
    found.append(f"removed {sum(removed.values())} of {summary['num_prompts']}: {gone or 'nothing'}")
    by_text = summary["overlap"]["by_text"]
    hits = ", ".join(f"{label} {number}" for label, number in by_text.items())
    found.append(
        f"overlap with evaluation texts: {sum(by_text.values())} excluded{f' ({hits})' if hits else ''}"
    )
    found += _speed(summary)
    if summary["status"] == "interrupted":
        found.append("interrupted: the same command goes on")
    found.append(f"corpus: {summary['out']}, {summary['num_shards']} shards")
    return found


def _speed(summary: dict[str, Any]) -> list[str]:
    stock = summary["stock"]
    if summary["ratio"] is None:
        return ["too little was decoded to compare with stock"]
    each = sorted(summary["ratio_by_shard"])
    return [
        f"{summary['tokens_per_second']:.0f} tokens a second, stock alone {stock['tokens_per_second']:.1f}:"
        f" {summary['ratio']:.1f}x (shard by shard {each[0]:.1f}x to {each[-1]:.1f}x)",
        f"{stock['num_equal']} of {stock['num_rows']} greedy answers checked are token for token what stock"
        " decodes alone",
    ]
