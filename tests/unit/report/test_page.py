"""The document: whole, escaped, self-contained, the same bytes every time."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from draftproof import results as published
from draftproof.errors import EvidenceError, UsageError
from draftproof.folder import AUDIT, REPLAY, Evidence, check_seal, seal, write_run
from draftproof.report.page import render, write_report
from draftproof.wire import canonical, chain, write_lines

Make = Callable[..., Evidence]
EVIL = [
    "</script><script>alert(1)</script>", "]]>", "<!--", "--></style>", "\u202ereversed", "\x00", "\ud800",
    "<img src=x onerror=alert(2)>", "{{ 7 * 7 }}", "&lt;", "\u2028",
]  # fmt: skip
VENDORED = {
    "d3.min.js": "912111098ea99503a6f4967361d2bbdc9dbf58cf9c678c8e27e5b02d1a07f0c1",
    "plot.min.js": "4358086467740777dd788d6b27a95cebdbaefdd50c730a3060117073bd7134cb",
}


class Reader(HTMLParser):
    """Counts tags, keeps attributes that could load something, the data, and the text outside scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.open: list[str] = []
        self.text = self.data = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in {"meta", "link", "br"}:
            self.open.append(tag)
        self.links += [value or "" for name, value in attrs if name in {"src", "href", "srcset", "action"}]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.data = self.data or data
        elif self.open and self.open[-1] != "style":
            self.text += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def lines(evidence: Evidence, results: dict[str, Any], *more: Any) -> str:
    """The text of the page with every run of white space as one space."""
    return re.sub(r"\s+", " ", read(render(evidence, results, *(more or (None, None)))).text)


def test_everything_is_on_the_page(
    honest: Evidence, honest_results: dict[str, Any], audit_of: Any, margins_of: Any
) -> None:
    html = render(honest, honest_results, audit_of(honest), margins_of(honest))
    page = read(html)
    text = re.sub(r"\s+", " ", page.text)
    assert re.search(r"Exact, and 2\.\d\d× faster than stock \(95 % \d\.\d\d–\d\.\d\d over 12 inputs\)", text)
    assert "Claim: bitwise" in text
    assert "Data-dependent" in text
    assert "A property of the method, not a fault" in text
    assert "draftproof bench --model smollm2-135m-instruct" in text
    assert "OMP_NUM_THREADS=2" in text
    assert "margins appear once" not in text
    data = json.loads(page.data)
    assert set(data["charts"]) == {
        "speedups", "split", "positions", "offsets", "curve", "predicted", "memory", "repeats",
    }  # fmt: skip
    assert len(data["texts"]) == 12
    assert all(len(row["margins"]) == 192 for row in data["texts"])
    assert len(re.findall(r'<span class="t [pdou][^"]*" data-r=', html)) == 12 * 192
    assert html.count("<table") >= 12


def test_nothing_points_outside(honest: Evidence, honest_results: dict[str, Any]) -> None:
    page = read(render(honest, honest_results, None, None))
    assert [link for link in page.links if not link.startswith("#")] == ["data:,"]
    assert not {"iframe", "object", "embed", "base", "img"} & set(page.tags)
    css = (files("draftproof.report") / "page.css").read_text()
    assert "url(" not in css
    assert "@import" not in css


def test_two_renderings_are_the_same_bytes(honest: Evidence, honest_results: dict[str, Any]) -> None:
    assert render(honest, honest_results, None, None) == render(honest, honest_results, None, None)


def test_what_a_model_or_a_user_wrote_never_becomes_markup(make: Make) -> None:
    base = make(labels=("news", "code"))
    pieces = [*EVIL, *base.texts["news"]["pieces"][len(EVIL) :]]
    evidence = replace(
        base, texts={**base.texts, "news": {"prompt": "".join(EVIL), "pieces": pieces}},
        request={**base.request, "model": EVIL[0]}, notes=(EVIL[0],), provenance={"argv": EVIL[:2]},
        status=EVIL[0],
    )  # fmt: skip
    clean = read(render(base, published.compute(base), None, None))
    audit = {**_audit(), "findings": [{"check": "seal", "message": EVIL[0], "is_failure": True}]}
    html = render(evidence, published.compute(evidence), audit, None)
    page = read(html)
    assert page.tags.count("script") == clean.tags.count("script")
    assert "img" not in page.tags
    assert "\u202e" not in html
    assert "[U+202E]" in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert page.text.count("</script><script>alert(1)</script>") >= 5
    json.loads(page.data)
    html.encode("utf-8")


def test_labels_are_escaped_in_the_data_too(make: Make) -> None:
    base = make(labels=("news",))
    name = "</script>\ud800"
    evidence = replace(
        base, roles={name: "diverse"}, prompts={name: base.prompts["news"]}, texts={name: base.texts["news"]},
        decodes=tuple(replace(d, leg=replace(d.leg, label=name)) for d in base.decodes),
    )  # fmt: skip
    html = render(evidence, published.compute(evidence), None, None)
    assert json.loads(read(html).data)["charts"]["speedups"]["rows"][0]["label"] == name
    html.encode("utf-8")


def _audit() -> dict[str, Any]:
    return {
        "outcome": "fail", "num_figures": 3, "num_outputs": None, "num_tokens": 0, "num_mismatches": 0,
        "num_ties": 0, "rate_bound": None, "findings": [],
    }  # fmt: skip


def test_without_audit_replay_and_seal_the_page_says_so(
    honest: Evidence, honest_results: dict[str, Any]
) -> None:
    text = lines(honest, honest_results)
    assert "not audited" in text
    assert "margins appear once the run is audited" in text
    assert "The folder is not sealed." in text


def test_a_withheld_run_shows_its_reason_and_no_speed(make: Make) -> None:
    evidence = make(wrong_on="code")
    text = lines(evidence, published.compute(evidence))
    assert "Failed, so no speed is shown: code: token 191 is not stock's" in text
    assert "faster" not in text.split("Speed by input")[0]
    assert "differs from token 191" in text
    assert "The speed is withheld; see the verdict." in text


def test_an_evaluation_without_engine_says_what_is_missing(
    evaluation: Evidence, evaluation_results: dict[str, Any]
) -> None:
    text = lines(evaluation, evaluation_results)
    assert "Claim: none" in text
    assert "The judged arm left no trace of rounds." in text
    assert "No cost curve was measured." in text
    assert "No plan: draftproof’s engine took no part." in text
    assert "Nothing was recorded." in text
    assert "No token here is known to be drafted" in text


def test_a_run_without_texts_says_so(honest: Evidence, honest_results: dict[str, Any]) -> None:
    assert "This run kept no text of its inputs." in lines(replace(honest, texts={}), honest_results)


def test_gates_are_shown(honest: Evidence, honest_results: dict[str, Any]) -> None:
    gate = {"label": "news", "gate": "kl", "value": 0.2, "limit": 0.05, "quality": "relaxed", "is_met": False}
    text = lines(honest, {**honest_results, "gates": [gate], "quality": "relaxed"})
    assert "Quality gates: relaxed" in text


@pytest.fixture
def run(tmp_path: Path, make: Make) -> Path:
    evidence = make(labels=("news", "code"))
    write_run(tmp_path, evidence, published.compute(evidence))
    return tmp_path


def test_a_report_is_written_from_the_folder_alone(run: Path) -> None:
    path = write_report(run)
    assert path == run / "report.html"
    html = path.read_text()
    assert json.loads((run / "seal.json").read_text())["hash"] in html
    assert json.loads((run / "seal.json").read_text())["files"]["legs.jsonl"] in html
    seal(run)
    assert check_seal(run) == []
    assert write_report(run).read_text() == html


def test_a_report_elsewhere_leaves_the_folder_as_it_was(run: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path.parent / "else" / "page.html"
    assert write_report(run, elsewhere) == elsewhere
    assert check_seal(run) == []


def test_audit_and_margins_come_from_the_folder(run: Path, make: Make) -> None:
    (run / AUDIT).write_text(canonical(_audit()) + "\n")
    evidence = make(labels=("news", "code"))
    shown = evidence.of("news", "auto")[0].leg.tokens_sha256
    rows = [
        {"label": "news", "margins": [9.0] * 192, "tokens_sha256": "another output"},
        {"label": "news", "margins": [0.5] * 192, "tokens_sha256": shown},
    ]
    write_lines(run / REPLAY, chain(rows))
    page = read(write_report(run).read_text())
    assert "no token replayed" in page.text
    assert [text["margins"] for text in json.loads(page.data)["texts"]] == [[0.5] * 192, None]


def test_a_damaged_or_missing_run_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run in"):
        write_report(tmp_path / "nothing")
    rows = (run / "legs.jsonl").read_text()
    (run / "legs.jsonl").write_text(rows.replace('"pair":0', '"pair":1', 1))
    with pytest.raises(EvidenceError, match=r"legs\.jsonl"):
        write_report(run)


@pytest.mark.parametrize("name", VENDORED)
def test_the_chart_library_is_the_published_file_with_its_licence(name: str) -> None:
    content = (files("draftproof.report") / "vendor" / name).read_bytes()
    assert hashlib.sha256(content).hexdigest() == VENDORED[name]
    assert b"</script" not in content


def test_the_licences_travel_with_the_page(honest: Evidence, honest_results: dict[str, Any]) -> None:
    licences = (files("draftproof.report") / "vendor" / "LICENSES.txt").read_text()
    assert "--" not in licences, "would end the comment it stands in"
    assert licences.count("this permission notice appear in all copies") == 2
    assert licences in render(honest, honest_results, None, None)
