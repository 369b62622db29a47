"""Quality gates for candidates that are not exact: how far from stock, against documented limits. Pure.

Four gates, all of which must be met:

- ``mean_kl``: KL divergence of the candidate's next-token distribution from stock's, teacher forced on
  stock's own continuation: mean over the positions of an input, then over inputs;
- ``worst_kl``: the same for the one input where it is largest, so that twelve good inputs cannot hide a
  bad one. A single position is no measure: weights that are good on average move one by a nat;
- ``top1``: share of positions where stock's most likely token is the candidate's too, mean over inputs;
- ``nll_increase``: how much less likely pristine stock finds the tokens the candidate's *decode loop*
  emitted than the tokens it emitted itself, nats a token, mean over inputs.

The first three judge the candidate's plain forward pass and say nothing about its loop; the last judges
the loop alone. It is one-sided: a loop that emits less surprising tokens than stock passes it, even where
they are dull repetition, and so does one that is wrong in a few tokens out of sixty-four. Only the
``exact`` quality proves a loop right. Inputs count alike, whatever their number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean

from draftproof.errors import EvidenceError, OptionError

ALL = "all"
TOP_K = 32
_SMALLEST = 1e-12
LOG_FLOOR = math.log(_SMALLEST)
_MASS_SLACK = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Limits of one quality; each is an option of the same name. KL and likelihoods in nats.

    Raises:
        OptionError: a limit that is not a number of its range.
    """

    quality: str
    max_mean_kl: float
    max_worst_kl: float
    min_top1: float
    max_nll_increase: float

    def __post_init__(self) -> None:
        for name in LIMITS:
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise OptionError(f"{name} must be a number of 0 or more, got {value}")
        if self.min_top1 > 1:
            raise OptionError(f"min_top1 is a share and at most 1, got {self.min_top1}")


LIMITS = tuple(f.name for f in fields(Thresholds) if f.name != "quality")

# The limits are those of kernel-agent, chosen on Qwen3-0.6B. Measured here on SmolLM2-135M, bf16, over six
# prompts (news, code, question, table, German, Chinese) of 200 tokens and 64 new ones; weights rounded to
# nearest by absolute maximum:
#                                 mean KL   worst KL   top-1   nats (range over prompts)
#   bf16 against fp32              0.0007    0.0014    1.00    +0.02 (-0.07 .. +0.24)
#   8 bits a row                   0.0033    0.0064    0.98    -0.01 (-0.24 .. +0.18)
#   6 bits a row                   0.033     0.069     0.92    -0.01
#   5 bits, groups of 32           0.055     0.103     0.88    -0.02 (-0.45 .. +0.38)
#   4 bits, groups of 32           0.196     0.255     0.82    +0.09 (-0.60 .. +0.44)
#   4 bits a row                   0.489     0.597     0.74    +0.10 (-0.34 .. +0.81)
#   the loop one token late        0         0         1.00    +2.97 (+1.22 .. +5.44)
#   the loop repeats one token     0         0         1.00    +1.49 (+0.44 .. +2.83)
# So KL finds bad weights and the likelihood does not; it finds bad loops, and needs several inputs for it.
NEAR_LOSSLESS = Thresholds(
    quality="near-lossless", max_mean_kl=0.05, max_worst_kl=0.15, min_top1=0.85, max_nll_increase=0.25
)
RELAXED = Thresholds(
    quality="relaxed", max_mean_kl=0.10, max_worst_kl=0.30, min_top1=0.80, max_nll_increase=0.30
)
GATED = {limits.quality: limits for limits in (NEAR_LOSSLESS, RELAXED)}


def thresholds(quality: str, /, **limits: float) -> Thresholds:
    """The limits of ``quality`` (``near-lossless`` or ``relaxed``), any of them replaced.

    Raises:
        OptionError: a quality without gates, an unknown limit, or a value out of range.
    """
    if quality not in GATED:
        raise OptionError(f"quality {quality!r} has no gates; those with gates are {', '.join(GATED)}")
    unknown = sorted(set(limits) - set(LIMITS))
    if unknown:
        raise OptionError(f"no such limit: {', '.join(unknown)}; there are {', '.join(LIMITS)}")
    return replace(GATED[quality], **limits)  # type: ignore[arg-type]  # the check above


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSample:
    """What was measured on one input; plain JSON through ``wire.encode``, and what a run folder keeps.

    Attributes:
        label: the input.
        kl: KL of the candidate from stock at each position of stock's continuation, nats.
        is_agreed: whether stock's most likely token is the candidate's, position by position.
        stock_nll: mean negative log-likelihood of stock's own tokens under stock, nats a token.
        own_nll: the same of the tokens the candidate's loop emitted, under stock too; ``None`` when it
            emitted none, which fails.
    """

    label: str
    kl: tuple[float, ...]
    is_agreed: tuple[bool, ...]
    stock_nll: float
    own_nll: float | None

    def __post_init__(self) -> None:
        if not self.kl or len(self.kl) != len(self.is_agreed):
            raise EvidenceError(f"{self.label}: {len(self.kl)} KL values and {len(self.is_agreed)} flags")
        nlls = (self.stock_nll, 0.0 if self.own_nll is None else self.own_nll)
        if not all(math.isfinite(value) and value >= 0 for value in (*self.kl, *nlls)):
            raise EvidenceError(f"{self.label}: a KL or likelihood is negative or not a number")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRow:
    """One gate's verdict: ``value`` against ``limit``.

    ``label`` is ``all`` for a mean over inputs and the worst input's for ``worst_kl``. ``value`` is
    ``None`` when it does not exist because the candidate emitted nothing; the gate is not met then.
    """

    label: str
    gate: str
    value: float | None
    limit: float
    is_met: bool
    quality: str


def judge(samples: Sequence[GateSample], limits: Thresholds) -> tuple[GateRow, ...]:
    """The four gates over all inputs; the candidate passes when every row ``is_met``.

    Raises:
        EvidenceError: there are no samples, or two of one label.
    """
    if not samples or len({sample.label for sample in samples}) != len(samples):
        raise EvidenceError("a gate needs samples, one an input")
    worst = max(samples, key=lambda sample: fmean(sample.kl))
    increases = [s.own_nll - s.stock_nll for s in samples if s.own_nll is not None]
    increase = fmean(increases) if len(increases) == len(samples) else None

    def row(gate: str, value: float | None, limit: float, label: str = ALL) -> GateRow:
        is_met = value is not None and (value >= limit if gate == "top1" else value <= limit)
        return GateRow(
            label=label, gate=gate, value=value, limit=limit, is_met=is_met, quality=limits.quality
        )

    return (
        row("mean_kl", fmean(fmean(s.kl) for s in samples), limits.max_mean_kl),
        row("worst_kl", fmean(worst.kl), limits.max_worst_kl, worst.label),
        row("top1", fmean(fmean(s.is_agreed) for s in samples), limits.min_top1),
        row("nll_increase", increase, limits.max_nll_increase),
    )


def kl_divergence(reference: Sequence[float], candidate: Sequence[float]) -> float:
    """KL of ``candidate`` from ``reference`` in nats, from log-probabilities of the same few tokens.

    The tokens are the reference's most likely ones; all others are lumped into one bucket on either side,
    so this is a lower bound of the full divergence. Probabilities under 1e-12 count as 1e-12, and so does
    what is not a number; what rounding leaves below zero is 0.

    Raises:
        EvidenceError: other lengths, no tokens, or more than the whole probability.
    """
    if not reference or len(reference) != len(candidate):
        raise EvidenceError(f"{len(reference)} reference and {len(candidate)} candidate log-probabilities")
    log_p, log_q = _with_rest(reference), _with_rest(candidate)
    return max(0.0, math.fsum(math.exp(p) * (p - q) for p, q in zip(log_p, log_q, strict=True)))


def _with_rest(log_probs: Sequence[float]) -> list[float]:
    """``log_probs`` and that of all other tokens together, none below the floor."""
    # `x > floor` is false for NaN, where max() would depend on the order of its arguments.
    floored = [value if value > LOG_FLOOR else LOG_FLOOR for value in log_probs]
    mass = math.fsum(math.exp(min(value, 1.0)) for value in floored)
    if mass > 1 + _MASS_SLACK:
        raise EvidenceError(f"log-probabilities of {len(floored)} tokens sum to {mass:.6g}, over 1")
    return [*floored, math.log(max(1.0 - mass, _SMALLEST))]
