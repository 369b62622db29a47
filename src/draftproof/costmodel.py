"""What the measured cost curve and the trace predict, beside what was measured, and what is left over.

**Prediction.** Speculation speedup of an input = (prefill + one-row cost of every token) / (prefill + cost
of every round's verification), costs from the curve at the position where they fell, prefill as the trace
holds it. Curve times acceptance, nothing else.

**Residual.** ``residual`` is measured / predicted - 1, and its parts add up to it. Writing ``T`` for the time
the trace accounts for (prefill, drafting, verification, commit), each part is a share of ``T``, negative
where it costs speed: ``drafting``; ``committing``; ``redeciding``, what verifications with near-ties decided
again took beyond the curve; ``verifying``, what the others took beyond it. ``rest`` is what no trace
explains: a serial arm off its own curve, time outside the rounds, noise.

**Regret.** What another choice of depth would have given on the same curve, verification only: drafting comes
before the choice and is left out. The ids offered each round are compared with the tokens that followed, so
the outcome of every depth is known *at the rounds the policy visited*; another depth would have visited other
ones. A rate, total tokens over total seconds of those rounds, is therefore a renewal estimate and not a
replay. A depth beyond what was offered counts as all of it, also where the policy asked for few. The
per-round oracle knows the future: it is a ceiling, not a policy.

**Break-even.** The tokens a verification must emit to pay, by depth, at the median position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from statistics import fmean, median, median_low
from typing import Any

from draftproof.record import CostCurve, Round, Trace

PARTS = ("drafting", "committing", "redeciding", "verifying", "rest")
_FEWEST_ROUNDS = 5


def cost_model(
    traces: Mapping[str, Trace], curve: CostCurve, measured: Mapping[str, float]
) -> dict[str, Any]:
    """The published ``cost`` document; plain JSON values, rates in tokens per second.

    Args:
        traces: one trace of the judged arm by input label.
        curve: the curve measured before the run.
        measured: median of own serial time over the arm's time by label; an input without one gets a
            prediction and no residual.
    """
    visits = {label: _visits(trace, curve) for label, trace in traces.items()}
    inputs = [
        {"label": label, **_forecast(trace, curve, measured.get(label)), "regret": _regret(visits[label])}
        for label, trace in traces.items()
    ]
    known = [found for found in visits.values() if found is not None]
    pooled = [visit for found in known for visit in found] if len(known) == len(visits) else None
    rounds = [round_ for trace in traces.values() for round_ in trace.rounds[1:]]
    return {
        **_over_inputs(inputs), "inputs": inputs, "regret": _regret(pooled),
        "break_even": _break_even(rounds, pooled, curve) if rounds else None, "curve": _export(curve),
    }  # fmt: skip


def _forecast(trace: Trace, curve: CostCurve, measured: float | None) -> dict[str, Any]:
    rounds, prefill = trace.rounds[1:], trace.prefill_ns / 1e9
    figures: dict[str, Any] = {"predicted": None, "measured": measured, "residual": None, "parts": None}
    if not rounds:
        return figures
    serial = sum(curve.at(1, r.position + i) for r in rounds for i in range(len(r.emitted)))
    costs = [curve.at(r.num_drafted + 1, r.position) for r in rounds]
    planned = prefill + sum(costs)
    predicted = (prefill + serial) / planned
    figures["predicted"] = predicted
    if measured is None:
        return figures
    figures["residual"] = measured / predicted - 1
    spent = {
        "drafting": sum(r.draft_ns for r in rounds) / 1e9,
        "committing": sum(r.commit_ns for r in rounds) / 1e9,
        "redeciding": _beyond(rounds, costs, is_redecided=True),
        "verifying": _beyond(rounds, costs, is_redecided=False),
    }
    accounted = (trace.prefill_ns + sum(r.draft_ns + r.verify_ns + r.commit_ns for r in rounds)) / 1e9
    if accounted > 0:  # a trace without times explains nothing
        rest = measured / predicted - planned / accounted
        figures["parts"] = {name: -seconds / accounted for name, seconds in spent.items()} | {"rest": rest}
    return figures


def _beyond(rounds: Sequence[Round], costs: Sequence[float], *, is_redecided: bool) -> float:
    """Seconds the verifications of one kind took more (or, negative, less) than the curve says."""
    return sum(
        r.verify_ns / 1e9 - cost
        for r, cost in zip(rounds, costs, strict=True) if bool(r.num_redecided) == is_redecided
    )  # fmt: skip


def _over_inputs(inputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the speedups; means of residual and parts, so that they still add up.

    Each over the inputs that have it.
    """

    def known(name: str) -> list[Any]:
        return [row[name] for row in inputs if row[name] is not None]

    explained = [row for row in inputs if row["parts"] is not None]
    return {
        "predicted": median(known("predicted")) if known("predicted") else None,
        "measured": median(known("measured")) if known("measured") else None,
        "residual": fmean(row["residual"] for row in explained) if explained else None,
        "parts": {name: fmean(row["parts"][name] for row in explained) for name in PARTS}
        if explained else None,
    }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Visit:
    """One round seen in hindsight.

    ``num_right`` offered ids equal the tokens that followed, ``num_left`` tokens of the output were left,
    and ``seconds[d]`` is the curve's cost of verifying ``d`` ids, from 0 to all that were offered.
    """

    num_drafted: int
    num_right: int
    num_left: int
    seconds: tuple[float, ...]

    @property
    def num_offered(self) -> int:
        return len(self.seconds) - 1

    def tokens(self, depth: int) -> int:
        """Tokens a verification of ``depth`` ids would have emitted."""
        return min(min(self.num_right, depth) + 1, self.num_left)


def _visits(trace: Trace, curve: CostCurve) -> list[_Visit] | None:
    """Every round after the prompt's; ``None`` when the trace does not hold the ids that were offered."""
    if any(r.num_offered and not r.offered for r in trace.rounds[1:]):
        return None
    ids = trace.token_ids
    out = []
    for round_ in trace.rounds[1:]:
        follows = ids[round_.position - trace.num_prompt :]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(round_.offered, follows, strict=False))
        seconds = [curve.at(depth + 1, round_.position) for depth in range(len(round_.offered) + 1)]
        out.append(_Visit(
            num_drafted=round_.num_drafted, num_right=sum(1 for _ in same), num_left=len(follows),
            seconds=tuple(seconds),
        ))  # fmt: skip
    return out


def _rate(visits: Sequence[_Visit], depths: Sequence[int]) -> float:
    """Total tokens over total seconds with ``depths[i]`` at ``visits[i]``, cut to what was offered."""
    chosen = [(visit, min(depth, visit.num_offered)) for visit, depth in zip(visits, depths, strict=True)]
    tokens = sum(visit.tokens(depth) for visit, depth in chosen)
    return tokens / sum(visit.seconds[depth] for visit, depth in chosen)


def _regret(visits: Sequence[_Visit] | None) -> dict[str, Any] | None:
    """The policy's rate against every fixed depth's and the oracle's; ``None`` where it is not known."""
    if not visits:
        return None
    most = max(visit.num_offered for visit in visits)
    fixed = [_rate(visits, [depth] * len(visits)) for depth in range(most + 1)]
    best = max(range(most + 1), key=fixed.__getitem__)
    policy = _rate(visits, [visit.num_drafted for visit in visits])
    oracle = _oracle_rate(visits, start=max(policy, fixed[best]))
    return {
        "num_rounds": len(visits), "policy_rate": policy, "oracle_rate": oracle,
        "best_fixed": {"depth": best, "rate": fixed[best]},
        "fixed": [{"depth": depth, "rate": rate} for depth, rate in enumerate(fixed)],
        "regret_fixed": 1 - policy / fixed[best], "regret_oracle": 1 - policy / oracle,
    }  # fmt: skip


def _oracle_rate(visits: Sequence[_Visit], start: float) -> float:
    """The highest rate any choice of depths reaches, by Dinkelbach's iteration from an achieved one.

    At a price of ``rate`` tokens a second every round has its own best depth; the rate those reach is the
    next price. It rises until no choice beats it, which proves it the highest.
    """
    rate = start
    while True:
        better = _rate(visits, [_best_depth(visit, rate) for visit in visits])
        if better <= rate:
            return rate
        rate = better


def _best_depth(visit: _Visit, rate: float) -> int:
    depths = range(visit.num_offered + 1)
    return max(depths, key=lambda depth: visit.tokens(depth) - rate * visit.seconds[depth])


def _break_even(rounds: Sequence[Round], visits: Sequence[_Visit] | None, curve: CostCurve) -> dict[str, Any]:
    """By depth: tokens a verification must emit to pay, and what it emits where as many were offered.

    ``needed`` is the curve alone, ``needed_with_drafting`` adds the measured drafting time, spread evenly
    over the ids offered. ``paying_depths`` emit more than the latter, over at least five rounds.
    """
    context = median_low(r.position for r in rounds)
    most = max(curve.rows[-1] - 1, *(r.num_offered for r in rounds))
    num_offered = sum(r.num_offered for r in rounds)
    each = sum(r.draft_ns for r in rounds) / 1e9 / num_offered if num_offered else 0.0
    one = curve.at(1, context)
    rows: list[dict[str, Any]] = []
    for depth in range(1, most + 1):
        seen = [v.tokens(depth) for v in visits or () if v.num_offered >= depth]
        needed = curve.at(depth + 1, context) / one
        rows.append({
            "depth": depth, "needed": needed, "needed_with_drafting": needed + depth * each / one,
            "acceptance_length": fmean(seen) if seen else None, "num_rounds": len(seen),
        })  # fmt: skip
    judged = [row for row in rows if row["num_rounds"] >= _FEWEST_ROUNDS]
    paying = [row for row in judged if row["acceptance_length"] > row["needed_with_drafting"]]
    return {
        "context": context, "depths": rows, "paying_depths": [row["depth"] for row in paying],
        "advice": _advice(judged, paying, is_known=visits is not None),
    }  # fmt: skip


def _advice(judged: Sequence[dict[str, Any]], paying: Sequence[dict[str, Any]], *, is_known: bool) -> str:
    if not is_known:
        return "The trace does not hold what was offered, so nothing can be said about other depths."
    if not judged:
        return f"No depth was offered in {_FEWEST_ROUNDS} rounds or more: too few drafts to advise on."
    best = max(paying or judged, key=lambda row: row["acceptance_length"] / row["needed_with_drafting"])
    bar = (
        f"depth {best['depth']}, where a verification and its draft cost {best['needed_with_drafting']:.2f} "
        f"plain steps and emit {best['acceptance_length']:.2f} tokens"
    )
    if not paying:
        return f"Drafting does not pay at any depth; it comes closest at {bar}."
    return f"Drafting pays at depth {_ranges([row['depth'] for row in paying])}, most at {bar}."


def _ranges(numbers: Sequence[int]) -> str:
    """``1-3, 5`` for 1, 2, 3 and 5."""
    runs = [[numbers[0]]]
    for before, number in pairwise(numbers):
        if number == before + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _export(curve: CostCurve) -> dict[str, Any]:
    """The curve as it was measured: one line a context, and each figure over its line's one-row figure."""
    return {
        "rows": list(curve.rows), "contexts": list(curve.contexts),
        "seconds": [list(line) for line in curve.seconds],
        "ratios": [[seconds / line[0] for seconds in line] for line in curve.seconds],
    }  # fmt: skip
