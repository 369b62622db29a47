"""The verdict as a person reads it: one sentence, then why, then what was checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftproof.folder import Evidence
from draftproof.report.words import CLAIMS, NO_CLAIM, count, mib, plural, short, span, times

_MARKS = {"pass": "✓", "tie": "=", "fail": "✕", "void": "?"}
_WORDS = {
    "pass": "passed",
    "tie": "no difference",
    "fail": "failed",
    "void": "withheld",
}
_QUALITY = {"exact": "Exact", "near-lossless": "Near-lossless", "relaxed": "Within the relaxed limits"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The sentence in three parts, so that the figure can stand out, and what stands below it."""

    outcome: str
    mark: str
    word: str
    before: str
    figure: str
    after: str
    around: str
    reasons: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """All of it as plain text."""
        return f"{self.before}{self.figure}{self.after} {self.around}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One figure under the verdict: its name, its value, and a line of explanation."""

    name: str
    value: str
    note: str = ""
    is_bad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the audit; not every one is a failure."""

    check: str
    message: str
    is_failure: bool


def headline(evidence: Evidence, results: Mapping[str, Any]) -> Headline:
    """The verdict in a sentence; where the speed is withheld, the first reason stands in its place."""
    ruling = results["verdict"]
    outcome, reasons = ruling["outcome"], tuple(ruling["reasons"])
    before, figure, after, around = _sentence(evidence, results)
    told = reasons[1:] if results["speedup"] is None else reasons
    return Headline(
        outcome=outcome, mark=_MARKS[outcome], word=_WORDS[outcome], before=before, figure=figure,
        after=after, around=around, reasons=told, notes=(*_status(evidence), *ruling["notes"]),
    )  # fmt: skip


def _sentence(evidence: Evidence, results: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """What stands before the figure, the figure, what follows, and the interval."""
    speed, outcome = results["speedup"], results["verdict"]["outcome"]
    if speed is None:
        first = next(iter(results["verdict"]["reasons"]), "no reason was recorded")
        return ("Failed, so no speed is shown: " if outcome == "fail" else "Withheld: "), "", first, ""
    quality = _QUALITY.get(results["quality"], results["quality"])
    figure, around = times(speed["median"]), _around(evidence, results)
    if outcome == "pass":
        return f"{quality}, and ", f"{figure} faster", " than stock", around
    if outcome == "tie":
        return f"{quality}, with no difference in speed shown: ", figure, "", around
    return f"{quality}, but slower than stock: ", figure, "", around


def _around(evidence: Evidence, results: Mapping[str, Any]) -> str:
    """The interval in brackets, with what it was taken over."""
    speed = results["speedup"]
    is_main = evidence.kind == "evaluate" and any(row["role"] == "main" for row in results["inputs"])
    over_pairs = is_main or len(results["inputs"]) == 1
    over = plural(speed["num_pairs"], "pair" if over_pairs else "input") + (
        " of the main input" if is_main else ""
    )
    return f"(95 % {span(speed['interval'])} over {over})" if speed["interval"] else f"({over}, no interval)"


def _status(evidence: Evidence) -> tuple[str, ...]:
    if evidence.status == "complete":
        return ()
    return (f"The run is not complete ({evidence.status}): the figures cover what was measured until then.",)


def facts(results: Mapping[str, Any], audit: Mapping[str, Any] | None) -> list[Fact]:
    """What was checked, by whom, and the few figures to remember."""
    wrong = results["num_mismatched_tokens"]
    return [
        Fact(name="tokens checked", value=count(results["num_checked_tokens"]),
             note="every leg's output, against stock's own"),
        Fact(name="mismatched", value=count(wrong), note="", is_bad=wrong > 0),
        _audit(audit), *_mean(results), *_extremes(results), _memory(results),
    ]  # fmt: skip


def _audit(audit: Mapping[str, Any] | None) -> Fact:
    if audit is None:
        return Fact(name="audit", value="none", note="not audited; draftproof audit repeats every figure")
    is_bad = audit["outcome"] != "pass"
    return Fact(
        name="audit", value="failed" if is_bad else "passed", note="; ".join(_audited(audit)), is_bad=is_bad
    )


def _audited(audit: Mapping[str, Any]) -> list[str]:
    told = [f"{plural(audit['num_figures'], 'figure')} recomputed"]
    if audit["num_outputs"] is None:
        return [*told, "no token replayed"]
    told.append(f"{plural(audit['num_tokens'], 'token')} replayed, {count(audit['num_mismatches'])} differ")
    if audit["num_ties"]:
        told.append(f"{count(audit['num_ties'])} of them ties within the noise")
    if audit["rate_bound"] is not None:
        told.append(f"at most {short(audit['rate_bound'])} a token (3/N)")
    return told


def findings(audit: Mapping[str, Any] | None) -> list[Finding]:
    """What the audit found, failures first."""
    found = [] if audit is None else audit["findings"]
    rows = [
        Finding(check=row["check"], message=row["message"], is_failure=row["is_failure"]) for row in found
    ]
    return sorted(rows, key=lambda row: not row.is_failure)


def _mean(results: Mapping[str, Any]) -> list[Fact]:
    mean = results["geometric_mean"]
    if mean is None:
        return []
    note = f"95 % {span(mean['interval'])}" if mean["interval"] else "no interval"
    return [Fact(name="geometric mean", value=times(mean["value"]), note=note)]


def _extremes(results: Mapping[str, Any]) -> list[Fact]:
    rows = {row["label"]: row["speedup"] for row in results["inputs"]}
    named = (("worst input", results["worst_input"]), ("best input", results["best_input"]))
    return [
        Fact(name=name, value=times(rows[label]["median"]), note=label)
        for name, label in named
        if label is not None and rows[label] is not None
    ]


def _memory(results: Mapping[str, Any]) -> Fact:
    peaks = results["peak_bytes"]
    return Fact(name="peak memory", value=mib(peaks["engine"]), note=f"stock {mib(peaks['stock'])}")


def claim(results: Mapping[str, Any]) -> tuple[str, str]:
    """The claim and what it means."""
    name = results["claim"]
    return ("none", NO_CLAIM) if name is None else (name, CLAIMS[name])


def dependence(results: Mapping[str, Any]) -> list[str] | None:
    """The data-dependent label as sentences; ``None`` where it was not given."""
    diverse = results["metrics"]["diverse"]
    if diverse is None or not diverse["data_dependent"]:
        return None
    told = [str(diverse["why"])]
    if diverse["median_speedup"] is not None:
        told.append(f"Median over the diverse set: {times(diverse['median_speedup'])}.")
    return told
