"""The page itself: Jinja2 fills ``page.html.j2`` with what the other files of this package prepared.

Style, scripts and the chart library (Observable Plot on d3, kept in ``vendor``) are written into the page:
it asks nothing of any network, and two renderings of one run are the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from draftproof.folder import AUDIT, REPLAY, REPORT, SEAL, Evidence, read_chained, read_json, read_run
from draftproof.report import charts, curves, facts, headline, tokens, words
from draftproof.report.assets import environment
from draftproof.wire import write_atomic


def render(
    evidence: Evidence, results: Mapping[str, Any], audit: Mapping[str, Any] | None,
    margins: tokens.Margins | None, seal: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
    """The report as one HTML document.

    Args:
        evidence: what the run measured.
        results: what it published.
        audit: ``audit.json``, ``None`` where the run was not audited.
        margins: top-2 margin of every emitted token by label, ``None`` where nothing was replayed.
        seal: ``seal.json``, ``None`` where the run is not sealed.

    Raises:
        EvidenceError: the texts, tokens and margins of an input do not belong together.
    """
    texts = tokens.input_texts(evidence, margins)
    drawn = _charts(evidence, results)
    page = environment().get_template("page.html.j2")
    html = page.render(
        evidence=evidence, results=results, audit=audit, words=words, charts=drawn, texts=texts,
        head=headline.headline(evidence, results), facts=headline.facts(results, audit),
        claim=headline.claim(results), dependence=headline.dependence(results),
        findings=headline.findings(audit),
        sources=tokens.sources(texts), rows={row["label"]: row for row in results["inputs"]},
        tables=_tables(evidence, results, seal), advice=curves.advice(results["cost"]),
        command=facts.command(evidence), seal=seal, data=_data(drawn, texts),
    )  # fmt: skip
    return html.encode("utf-8", "replace").decode("utf-8")  # a label can hold half a surrogate pair


def write_report(folder: Path, out: Path | None = None) -> Path:
    """Write the page of a run folder to ``out``, or to its ``report.html``: then the caller seals it again.

    Raises:
        UsageError: there is no run in ``folder``.
        EvidenceError: a file of the run is damaged.
    """
    evidence, results = read_run(folder)
    audit = read_json(folder / AUDIT) if (folder / AUDIT).exists() else None
    seal = read_json(folder / SEAL) if (folder / SEAL).exists() else None
    page = render(evidence, results, audit, _margins(folder / REPLAY, evidence), seal)
    path = out or folder / REPORT
    write_atomic(path, page)
    return path


def _margins(path: Path, evidence: Evidence) -> tokens.Margins | None:
    """Margins of the outputs that are shown: a replay has a row for every distinct output."""
    if not path.exists():
        return None
    shown = {label: evidence.of(label, evidence.arm) for label in evidence.labels}
    hashes = {label: decodes[0].leg.tokens_sha256 for label, decodes in shown.items() if decodes}
    rows = read_chained(path)
    return {r["label"]: r["margins"] for r in rows if hashes.get(r["label"]) == r["tokens_sha256"]}


def _charts(evidence: Evidence, results: Mapping[str, Any]) -> dict[str, charts.Chart]:
    accepted, cost = results["acceptance"], results["cost"]
    drawn = (
        charts.speedups(results), charts.split(results), curves.positions(accepted), curves.offsets(accepted),
        curves.curve(evidence.curve, accepted), curves.predicted(cost), charts.memory(results),
        charts.repeats(results),
    )  # fmt: skip
    return {chart.name: chart for chart in drawn}


def _tables(
    evidence: Evidence, results: Mapping[str, Any], seal: Mapping[str, Any] | None
) -> dict[str, charts.Table | None]:
    return {
        "lengths": curves.lengths(results["acceptance"]), "drafters": curves.drafters(results["acceptance"]),
        "break_even": curves.break_even(results["cost"]), "gates": facts.gates(results["gates"]),
        "environment": facts.environment(evidence),
        "plan": facts.plan_table(evidence.plan), "request": facts.named_values(evidence.request),
        "provenance": facts.named_values(evidence.provenance), "hashes": facts.hashes(seal),
    }  # fmt: skip


def _data(drawn: Mapping[str, charts.Chart], texts: Sequence[tokens.InputText]) -> dict[str, Any]:
    """What the scripts read: chart data by name, rounds and margins by input."""
    return {
        "charts": {name: chart.data for name, chart in drawn.items() if chart.data is not None},
        "texts": [{"rounds": text.rounds, "margins": text.margins} for text in texts],
    }
