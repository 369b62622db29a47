"""How figures read on the page, and what each of them means in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MISSING = "not measured"

CLAIMS: Mapping[str, str] = {
    "bitwise": "Every operation run over several rows was probed on this machine and gives the bits of"
    " stock's one-row call: logits, keys and values are stock's, bit for bit.",
    "guarded": "Some operation changes its last bits with the number of rows here. Near-ties are decided"
    " again by one-row arithmetic; the rest is a measured bet, counted below.",
    "unproved": "No plan was probed. Only comparing the finished output with stock's can say, and that is"
    " what this run did.",
    "fixed": "Bit-identical to draftproof's own serial decoder at a fixed row count, not to stock.",
}
NO_CLAIM = (
    "The judged arm is not draftproof's engine: only comparing the finished output with stock's can say."
)

GLOSSARY: Mapping[str, str] = {
    "stock": "Serial greedy decoding with transformers' generate: same weights, dtype, threads and prompt, in"
    " a process of its own.",
    "speedup": "Stock's time over the judged arm's time of the same pair and prompt. An input's figure is the"
    " median of its pairs; a bench's is the median over inputs.",
    "interval": "95 % percentile bootstrap of the median. None exists for fewer than five values: of three it"
    " would be their range, which misses the truth one time in four.",
    "leaner forward": "Stock's time over the engine's own serial decoding: what the engine gains without"
    " drafting anything.",
    "speculation": "The engine's own serial time over the judged arm's: what drafting adds.",
    "noise": "How far the ratios of one input's own pairs spread, as a share of their median.",
    "data-dependent": "The speedup depends on the text: its spread over inputs exceeds 10 % and three times"
    " the noise, or the forwards per token change with the input. It says how to quote the number, and is no"
    " fault.",
    "round": "One cycle: draft a few tokens, verify them in one forward, commit the longest correct prefix.",
    "depth": "Draft tokens verified in a round; a verification computes depth + 1 rows.",
    "acceptance, conditional": "Share of the drafts that reached this position which were accepted at it.",
    "acceptance, joint": "Share of the rounds that drafted this deep which accepted this position and every"
    " one before it.",
    "acceptance length": "Tokens emitted per verification; with bonus counts the model's own token too.",
    "token-weighted, per prompt": "Pooled over all verifications, or first per input and then over inputs.",
    "margin": "Difference of the two largest logits where the token was chosen, in a plain serial replay."
    " Near zero means a near-tie.",
    "predicted": "The speedup the cost curve and the trace's acceptance lead to; what it misses is the"
    " residual, measured / predicted − 1.",
    "regret": "Share of tokens per second the depth policy gave away against another choice at the same"
    " rounds, by the curve.",
    "break-even": "Tokens a verification of a depth must emit to be faster than plain steps.",
    "first seen, repeat": "Whether the arm's process had decoded this prompt before.",
    "3/N": "With no mismatch in N independent tokens, the mismatch rate is below 3/N with 95 % confidence.",
    "seal": "SHA-256 of every file of the run. It finds any edit; keep its own hash elsewhere.",
}  # fmt: skip


def times(ratio: float | None) -> str:
    """A speedup: ``2.34×``."""
    return MISSING if ratio is None else f"{ratio:.2f}×"


def span(interval: Any) -> str:
    """An interval: ``2.09–2.51``; empty where none exists."""
    return f"{interval[0]:.2f}–{interval[1]:.2f}" if interval else ""


def median(ratio: Mapping[str, Any] | None) -> str:
    """The median of a published ratio."""
    return MISSING if ratio is None else times(ratio["median"])


def percent(share: float | None, digits: int = 0) -> str:
    """A share: ``61 %``."""
    return MISSING if share is None else f"{share * 100:.{digits}f} %"


def signed(share: float | None) -> str:
    """A share with its sign: ``−3.1 %``."""
    if share is None:
        return MISSING
    return f"{'−' if share < 0 else '+'}{abs(share) * 100:.1f} %"


def plain(value: float | None, digits: int = 2) -> str:
    """A number with fixed digits."""
    return MISSING if value is None else f"{value:.{digits}f}"


def short(value: float | None) -> str:
    """Three significant digits, for figures of any size."""
    return MISSING if value is None else f"{value:.3g}"


def count(value: int | None) -> str:
    """A whole number with thin spaces between thousands."""
    return MISSING if value is None else f"{value:,}".replace(",", "\u202f")


def mib(size: float | None) -> str:
    """Bytes as MiB."""
    return MISSING if size is None else f"{size / 2**20:,.0f}".replace(",", "\u202f") + " MiB"


def plural(number: int, noun: str) -> str:
    """``1 input``, ``12 inputs``."""
    return f"{count(number)} {noun}{'' if number == 1 else 's'}"
