"""Which of several heads is best, from what each did in the engine on the same prompts; no torch.

Every prompt is decoded serially and by every candidate, so all figures are paired by prompt. The best is not
simply the fastest: of the candidates that are not shown to be slower than the fastest one, it is the one with
the highest acceptance length, which time's noise does not touch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from draftproof.stats import bootstrap_median, geometric_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """One prompt decoded by one arm, without the prompt's own forward.

    Attributes:
        duration_ns: drafting, verifying and committing.
        num_tokens: emitted.
        rounds: of every round that drafted: draft tokens verified, accepted, tokens emitted.
    """

    duration_ns: int
    num_tokens: int
    rounds: tuple[tuple[int, int, int], ...] = ()

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a round with a draft emitted, bonus included."""
        return fmean(emitted for _, _, emitted in self.rounds) if self.rounds else None

    @property
    def first_acceptance(self) -> float | None:
        """Share of those rounds whose first draft token was accepted."""
        return fmean(accepted >= 1 for _, accepted, _ in self.rounds) if self.rounds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """One prompt: the serial decode, and every candidate's by name."""

    label: str
    category: str
    language: str
    serial: Decoded
    candidates: Mapping[str, Decoded]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A value over prompts with its 95 % bootstrap interval, ``None`` for fewer than five prompts."""

    value: float
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a candidate did.

    Attributes:
        name: of the candidate.
        acceptance_length: median over prompts, bonus included.
        mean_length: mean over prompts.
        first_acceptance: mean over prompts.
        speedup: geometric mean over prompts of serial time over its own; speculation alone.
        against_fastest: geometric mean of the fastest one's time over its own; below 1 is slower.
        is_slower: shown to be slower than the fastest: the whole interval lies below 1.
        worst_kind: category of the lowest median acceptance length, and that length.
        by_kind: median acceptance length by category.
    """

    name: str
    acceptance_length: Figure
    mean_length: float
    first_acceptance: float
    speedup: Figure
    against_fastest: Figure
    is_slower: bool
    worst_kind: tuple[str, float]
    by_kind: Mapping[str, float]

    def row(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)


def standings(heats: Sequence[Heat]) -> list[Standing]:
    """All candidates, the best first.

    Args:
        heats: at least one, all with the same candidates. A candidate that never drafted counts with an
            acceptance length of one.
    """
    names = list(heats[0].candidates)
    fastest = max(names, key=lambda name: geometric_mean(_ratios(heats, name, None)).value)
    found = [_standing(heats, name, fastest) for name in names]
    return sorted(found, key=lambda one: (one.is_slower, -one.mean_length, one.name))


def _standing(heats: Sequence[Heat], name: str, fastest: str) -> Standing:
    lengths = [heat.candidates[name].acceptance_length or 1.0 for heat in heats]
    firsts = [heat.candidates[name].first_acceptance or 0.0 for heat in heats]
    by_kind: dict[str, list[float]] = {}
    for heat, length in zip(heats, lengths, strict=True):
        by_kind.setdefault(heat.category, []).append(length)
    kinds = {kind: median(of) for kind, of in sorted(by_kind.items())}
    worst = min(kinds, key=lambda kind: kinds[kind])
    speed = geometric_mean(_ratios(heats, name, None))
    behind = geometric_mean(_ratios(heats, name, fastest))
    return Standing(
        name=name, acceptance_length=Figure(value=median(lengths), interval=bootstrap_median(lengths)),
        mean_length=fmean(lengths), first_acceptance=fmean(firsts),
        speedup=Figure(value=speed.value, interval=speed.interval),
        against_fastest=Figure(value=behind.value, interval=behind.interval),
        is_slower=behind.interval is not None and behind.interval[1] < 1.0,
        worst_kind=(worst, kinds[worst]), by_kind=kinds,
    )  # fmt: skip


def _ratios(heats: Sequence[Heat], name: str, base: str | None) -> list[float]:
    """Time of ``base``, serial where ``None``, over that of ``name``, prompt by prompt."""
    bases = [heat.serial if base is None else heat.candidates[base] for heat in heats]
    return [
        other.duration_ns / heat.candidates[name].duration_ns
        for heat, other in zip(heats, bases, strict=True)
    ]
