"""Every published figure of a run as a function of its raw rows: the bench publishes, the audit repeats.

Speeds are withheld (``None``) whenever the verdict does not allow them; the raw rows stay. The split is
always the same: ``serial_speedup`` is stock over the engine without drafts (a leaner forward),
``speculation_speedup`` the engine without drafts over the judged arm.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from draftproof import acceptance, costmodel, diversity, gate, stats, verdict
from draftproof.folder import SERIAL, STOCK, Decode, Evidence
from draftproof.record import Trace
from draftproof.wire import canonical, decode, encode

SOLO = "stock-solo"
_FEWEST_INPUTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class _Input:
    """One input, worked out once and used by every section."""

    label: str
    role: str
    stock: tuple[Decode, ...]
    arm: tuple[Decode, ...]
    whole: tuple[float, ...]
    leaner: tuple[float, ...]
    gain: tuple[float, ...]
    first: tuple[float, ...]
    repeats: tuple[float, ...]
    num_mismatched: int
    num_checked: int
    first_difference: int | None
    tokens_per_step: float | None

    @property
    def want(self) -> tuple[int, ...]:
        """Stock's first output."""
        return self.stock[0].token_ids if self.stock else ()


def compute(evidence: Evidence) -> dict[str, Any]:
    """The results document; plain JSON values only."""
    inputs = [_input(evidence, label) for label in evidence.labels]
    whole = _benchmark(evidence, inputs)
    ruling = verdict.judge(_case(evidence, inputs))
    is_shown = ruling.is_speed_shown
    document: dict[str, Any] = {
        "model": evidence.request.get("model"), "dtype": evidence.request.get("dtype"), "arm": evidence.arm,
        "claim": evidence.plan.claim if evidence.plan else None, "status": evidence.status,
        "quality": _quality(evidence),
        "verdict": {"outcome": ruling.outcome, "reasons": list(ruling.reasons), "notes": list(ruling.notes)},
        "flags": _flags(evidence, inputs, ruling),
        "num_checked_tokens": sum(item.num_checked for item in inputs),
        "num_mismatched_tokens": sum(item.num_mismatched for item in inputs),
        "inputs": [_input_row(evidence, item, is_shown) for item in inputs],
        "metrics": {"diverse": asdict(_diverse(evidence, inputs)) if is_shown else None},
        "metric_detail": {"decode_stats": _decode_stats(evidence, inputs)},
        "acceptance": acceptance.acceptance(_traces(inputs)),
        "cost": _cost(evidence, inputs) if is_shown else None,
        "gates": _gate_rows(evidence),
        **_peaks(evidence),
    }  # fmt: skip
    document |= _speeds(evidence, inputs, whole) if is_shown else dict.fromkeys(_SPEEDS)
    plain: dict[str, Any] = json.loads(canonical(document))  # as a file would hold it: lists, no tuples
    return plain


_SPEEDS = (
    "speedup", "serial_speedup", "speculation_speedup", "geometric_mean", "worst_input", "best_input",
    "first_seen_speedup", "repeat_speedup",
)  # fmt: skip


def _quality(evidence: Evidence) -> str:
    return str(evidence.request.get("quality", "exact"))


def _input(evidence: Evidence, label: str) -> _Input:
    legs = [d.leg for d in evidence.decodes]
    stock, arm = evidence.of(label, STOCK), evidence.of(label, evidence.arm)
    others = [d for d in evidence.of(label) if d.leg.arm != SOLO]
    want = stock[0].token_ids if stock else ()
    has_ids = any(d.token_ids for d in others)
    pairs = [(d, want) for d in others] if has_ids else []
    differences = [n for d, w in pairs if (n := stats.first_difference(w, d.token_ids)) is not None]
    firsts = {d.leg.pair for d in arm if d.leg.is_first_seen}
    by_pair = _ratio_by_pair(stock, arm)
    return _Input(
        label=label, role=evidence.roles[label], stock=tuple(stock), arm=tuple(arm),
        whole=tuple(stats.paired_ratios(legs, label, evidence.arm)),
        leaner=tuple(stats.paired_ratios(legs, label, SERIAL)),
        gain=tuple(stats.paired_ratios(legs, label, evidence.arm, base=SERIAL)),
        first=tuple(r for pair, r in by_pair.items() if pair in firsts),
        repeats=tuple(r for pair, r in by_pair.items() if pair not in firsts),
        num_mismatched=sum(stats.count_mismatches(w, d.token_ids) for d, w in pairs),
        num_checked=sum(len(d.token_ids) for d in others if d.leg.arm != STOCK),
        first_difference=min(differences, default=None), tokens_per_step=_tokens_per_step(arm),
    )  # fmt: skip


def _ratio_by_pair(stock: Sequence[Decode], arm: Sequence[Decode]) -> dict[int, float]:
    times = {d.leg.pair: d.leg.duration_ns for d in stock}
    return {d.leg.pair: times[d.leg.pair] / d.leg.duration_ns for d in arm if d.leg.pair in times}


def _tokens_per_step(arm: Sequence[Decode]) -> float | None:
    """Emitted after the prompt's own token per forward: counted, traced or reported, in that order."""
    for one in arm:
        steps = _steps(one)
        if steps:
            return (one.leg.num_tokens - 1) / steps
    return None


def _steps(one: Decode) -> int | None:
    if one.leg.num_forwards:
        return one.leg.num_forwards
    if one.trace is not None:
        return stats.decode_stats(one.trace).steps
    return one.leg.counters.steps if one.leg.counters else None


def _benchmark(evidence: Evidence, inputs: Sequence[_Input]) -> stats.RatioStats | None:
    """The number a run is quoted by: an evaluation's main input, a bench's median over inputs."""
    mains = [item for item in inputs if item.role == "main" and item.whole]
    if evidence.kind == "evaluate" and mains:
        return stats.summarise(mains[0].whole)
    medians = [median(item.whole) for item in inputs if item.whole]
    if len(medians) == 1:
        return stats.summarise(next(item.whole for item in inputs if item.whole))
    return stats.summarise(medians) if medians else None


def _case(evidence: Evidence, inputs: Sequence[_Input]) -> verdict.Case:
    speed, over = _judged_speed(evidence, inputs)
    traces = [d.trace for item in inputs for d in item.arm if d.trace is not None]
    counted = [stats.decode_stats(trace) for trace in traces]
    told = [d.leg.counters for item in inputs for d in item.arm if d.leg.counters and d.trace is None]
    expected = len(evidence.roles)
    return verdict.Case(
        inputs=tuple(_input_case(evidence, item) for item in inputs), num_expected_inputs=expected,
        is_exact_mode=_quality(evidence) == "exact", status=evidence.status,
        needs_all=evidence.kind == "evaluate",
        speedup=speed.value if speed else None, interval=speed.interval if speed else None, over=over,
        floor_seconds=evidence.floor.seconds if evidence.floor else None,
        rounds_drafted=sum(c.verifies for c in counted) + sum(c.verifies for c in told),
        tokens_drafted=sum(c.drafted for c in counted) + sum(c.drafted for c in told),
        tokens_accepted=sum(c.accepted for c in counted) + sum(c.accepted for c in told),
        unmet_gates=tuple(_gate_reason(row) for row in _gate_rows(evidence) if not row["is_met"]),
        notes=evidence.notes,
    )  # fmt: skip


def _judged_speed(evidence: Evidence, inputs: Sequence[_Input]) -> tuple[stats.MeanRatio | None, str]:
    """What the verdict rests on: pairs of the main input (or of the only one), else medians over inputs."""
    measured = [item for item in inputs if item.whole]
    mains = [item for item in measured if item.role == "main"]
    if mains or len(measured) == 1:
        chosen = (mains or measured)[0]
        return stats.mean_ratio(chosen.whole), f"{len(chosen.whole)} pairs of {chosen.label}"
    if not measured:
        return None, "inputs"
    return stats.mean_ratio([median(item.whole) for item in measured]), f"{len(measured)} inputs"


def _gate_reason(row: dict[str, Any]) -> str:
    value = "unknown" if row["value"] is None else f"{row['value']:.4g}"
    return f"{row['label']}: {row['gate']} is {value}, the {row['quality']} limit {row['limit']:.4g}"


def _gate_rows(evidence: Evidence) -> list[dict[str, Any]]:
    """Judged gates: those the run judged input by input, and the quality gates judged from their samples."""
    judged = [dict(row) for row in evidence.gates if "kl" not in row]
    samples = [decode(gate.GateSample, row) for row in evidence.gates if "kl" in row]
    if samples:
        limits = gate.thresholds(_quality(evidence), **evidence.request.get("limits", {}))
        judged += [encode(row) for row in gate.judge(samples, limits)]
    return judged


def _input_case(evidence: Evidence, item: _Input) -> verdict.InputCase:
    gain = stats.summarise(item.gain) if item.gain else None
    around = (gain.interval or (gain.low, gain.high)) if gain else None
    legs = [
        verdict.LegCase(
            seconds=d.leg.duration_ns / 1e9, num_tokens=d.leg.num_tokens, num_forwards=d.leg.num_forwards,
            counters=d.leg.counters,
        )
        for d in item.arm
    ]  # fmt: skip
    solo = evidence.of(item.label, SOLO)
    return verdict.InputCase(
        label=item.label, num_expected=item.stock[0].leg.num_tokens if item.stock else 0,
        num_emitted=tuple(d.leg.num_tokens for d in evidence.of(item.label) if d.leg.arm != SOLO),
        num_mismatched=item.num_mismatched, first_difference=item.first_difference, speedups=item.whole,
        noise=stats.pair_noise(item.whole), speculation=around, tokens_per_step=item.tokens_per_step,
        first_seen=median(item.first) if item.first else None, repeats=item.repeats,
        stock_seconds=tuple(d.leg.duration_ns / 1e9 for d in item.stock),
        solo_seconds=tuple(d.leg.duration_ns / 1e9 for d in solo), legs=tuple(legs),
    )  # fmt: skip


def _flags(evidence: Evidence, inputs: Sequence[_Input], ruling: verdict.Verdict) -> list[str]:
    is_dependent = ruling.is_speed_shown and _diverse(evidence, inputs).data_dependent
    unverified = [] if ruling.is_counted else ["counters_unverified"]
    return [*(["data_dependent"] if is_dependent else []), *unverified]


def _diverse(evidence: Evidence, inputs: Sequence[_Input]) -> diversity.Diverse:
    """Spread over the diverse inputs only: the main one is the benchmark number beside it."""
    exact = _quality(evidence) == "exact"
    rows = [
        diversity.InputRow(
            label=item.label, ratios=item.whole,
            steps_per_token=1 / item.tokens_per_step if item.tokens_per_step else None,
            is_judged_good=item.first_difference is None or not exact,
        )
        for item in inputs
        if item.role == "diverse" and item.whole
    ]  # fmt: skip
    return diversity.diverse(rows)


def _traces(inputs: Sequence[_Input]) -> dict[str, list[Trace]]:
    found = {item.label: [d.trace for d in item.arm if d.trace is not None] for item in inputs}
    return {label: traces for label, traces in found.items() if traces}


def _decode_stats(evidence: Evidence, inputs: Sequence[_Input]) -> dict[str, Any] | None:
    """Medians over the legs of the benchmark's input (of all inputs in a bench)."""
    chosen = [item for item in inputs if item.role == "main"] or inputs
    rows = [row for item in chosen for d in item.arm if (row := _leg_stats(d)) is not None]
    return stats.median_stats(rows) if rows else None


def _leg_stats(one: Decode) -> stats.DecodeStats | None:
    if one.trace is not None:
        return stats.decode_stats(one.trace)
    return stats.counter_stats(one.leg.counters) if one.leg.counters else None


def _cost(evidence: Evidence, inputs: Sequence[_Input]) -> dict[str, Any] | None:
    traces = {item.label: item.arm[0].trace for item in inputs if item.gain and item.arm[0].trace is not None}
    if evidence.curve is None or not traces:
        return None
    measured = {item.label: median(item.gain) for item in inputs if item.label in traces}
    return costmodel.cost_model({k: t for k, t in traces.items() if t}, evidence.curve, measured)


def _input_row(evidence: Evidence, item: _Input, is_shown: bool) -> dict[str, Any]:
    ratios = {
        "speedup": item.whole, "serial_speedup": item.leaner, "speculation_speedup": item.gain,
        "first_seen_speedup": item.first, "repeat_speedup": item.repeats,
    }  # fmt: skip
    counted = [row for d in item.arm if (row := _leg_stats(d)) is not None]
    arms = dict.fromkeys(d.leg.arm for d in evidence.of(item.label))
    return {
        "label": item.label, "role": item.role, "num_prompt": len(evidence.prompts.get(item.label, ())),
        "num_tokens": item.stock[0].leg.num_tokens if item.stock else 0,
        "num_checked_tokens": item.num_checked,
        "num_mismatched_tokens": item.num_mismatched, "first_difference": item.first_difference,
        "noise": stats.pair_noise(item.whole) if is_shown else None,
        "decode_stats": stats.median_stats(counted) if counted else None,
        "tokens_per_step": item.tokens_per_step,
        "num_forwards": item.arm[0].leg.num_forwards if item.arm else None,
        "reconciled": _reconciled(item),
        "peak_bytes": {arm: max(d.leg.peak_bytes for d in evidence.of(item.label, arm)) for arm in arms},
        **{k: asdict(stats.summarise(v)) if v and is_shown else None for k, v in ratios.items()},
    }  # fmt: skip


def _reconciled(item: _Input) -> bool | None:
    """Whether every reported counter agrees with the harness's count; ``None`` where nothing can be said."""
    legs = [d.leg for d in item.arm if d.leg.counters is not None and d.leg.num_forwards]
    if not legs:
        return None
    cases = [
        verdict.LegCase(seconds=leg.duration_ns / 1e9, num_tokens=leg.num_tokens,
                        num_forwards=leg.num_forwards, counters=leg.counters)
        for leg in legs
    ]  # fmt: skip
    return all(verdict.contradiction(case) is None for case in cases)


def _speeds(evidence: Evidence, inputs: Sequence[_Input], whole: stats.RatioStats | None) -> dict[str, Any]:
    """Figures over inputs; an evaluation is quoted by its main input."""
    medians = {item.label: median(item.whole) for item in inputs if item.whole}
    if whole is None or not medians:
        return dict.fromkeys(_SPEEDS)

    def over(values: list[float]) -> dict[str, Any] | None:
        return asdict(stats.summarise(values)) if values else None

    return {
        "speedup": asdict(whole),
        "serial_speedup": over([median(item.leaner) for item in inputs if item.leaner]),
        "speculation_speedup": over([median(item.gain) for item in inputs if item.gain]),
        "geometric_mean": asdict(stats.geometric_mean(list(medians.values()))),
        "worst_input": min(medians, key=medians.__getitem__),
        "best_input": max(medians, key=medians.__getitem__),
        "first_seen_speedup": over([median(item.first) for item in inputs if item.first]),
        "repeat_speedup": over([median(item.repeats) for item in inputs if item.repeats]),
    }


def _peaks(evidence: Evidence) -> dict[str, Any]:
    """Peak memory by side; ``drafter`` is the judged arm's peak over the same engine's without drafts."""
    legs = [d.leg for d in evidence.decodes]

    def most(arms: Sequence[str], name: str) -> int | None:
        values = [getattr(leg, name) for leg in legs if leg.arm in arms and getattr(leg, name) is not None]
        return max(values, default=None)

    def side(name: str) -> dict[str, int | None]:
        own, arm = most([SERIAL], name), most([evidence.arm], name)
        return {
            "stock": most([STOCK], name), "engine": most([SERIAL, evidence.arm], name),
            "drafter": arm - own if own is not None and arm is not None else None,
        }  # fmt: skip

    cuda = side("peak_cuda_bytes")
    return {"peak_bytes": side("peak_bytes"), "peak_cuda_bytes": None if cuda["engine"] is None else cuda}
