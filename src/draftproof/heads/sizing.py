"""What a shortlist's size costs in a draft step, and which size yields the most tokens a second.

The output layer is timed at every size on this machine, one row a call, all sizes in turn in an order drawn
anew each time, so that other load and caches meet all alike. The head's own layer is timed among them where
there is a head; else a layer's share of a one-row verification stands for it. How often the head is right is
an assumption given from outside: only ``head select`` measures it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from draftproof.clock import Clock
from draftproof.drafters.build import has_native_head
from draftproof.drafters.mtp import head_of
from draftproof.errors import OptionError
from draftproof.models.decoder import DecoderTarget
from draftproof.models.mtp import shortened
from draftproof.record import CostCurve

Report = Callable[[str, int, int], None]
BODY = 0  # stands among the sizes for the head's layer
_CONTEXT = 256
_REPEATS, _WARM = 200, 5
_BUDGET_NS = 20_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A chain of ``depth`` drafted tokens, each right with chance ``acceptance`` where its id is listed."""

    depth: int
    acceptance: float

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise OptionError(f"--depth must be 1 or more, got {self.depth}")
        if not 0 < self.acceptance <= 1:
            raise OptionError(f"--acceptance must be above 0 and at most 1, got {self.acceptance}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of one drafted token: medians, and what a round's verification adds.

    ``output`` goes by size, the whole vocabulary included; ``spread`` is half the distance between its
    quartiles; ``body`` is everything before the output layer, measured on a head or estimated.
    """

    output: dict[int, float]
    spread: dict[int, float]
    body: float
    is_body_measured: bool
    verification: float
    num_repeats: int


@torch.inference_mode()
def measure(
    target: DecoderTarget, curve: CostCurve, order: Sequence[int], sizes: Sequence[int], wish: Wish, *,
    clock: Clock, report: Report = lambda *_: None, seed: int = 0,
) -> StepCosts:  # fmt: skip
    """Time the target's output layer at ``sizes`` and over all ids, and a head's layer if it has one.

    Args:
        target: row-exact; its own output layer is timed as the drafter calls it.
        curve: seconds of a verification by rows.
        order: ids as lists take them.
        sizes: of the lists.
        wish: the draft's depth decides the rows of a verification.
        clock: the time.
        report: hears of (stage, done, total).
        seed: of the order of calls and of the row.
    """
    calls = _calls(target, order, sizes, seed)
    times = _interleaved(calls, clock, random.Random(seed), report)
    whole = target.vocab_size
    seconds = {key: median(ns) / 1e9 for key, ns in times.items()}
    has_body = BODY in seconds
    share = max(curve.at(1, _CONTEXT) - seconds[whole], 0.0) / target.num_layers
    return StepCosts(
        output={size: seconds[size] for size in (*sorted(set(sizes) - {whole}), whole)},
        spread={size: _half_quartiles(ns) for size, ns in times.items() if size != BODY},
        body=seconds[BODY] if has_body else share, is_body_measured=has_body,
        verification=curve.at(min(wish.depth, target.max_rows - 1) + 1, _CONTEXT),
        num_repeats=len(times[whole]),
    )  # fmt: skip


Call = Callable[[], None]


def _calls(target: DecoderTarget, order: Sequence[int], sizes: Sequence[int], seed: int) -> dict[int, Call]:
    """What is timed, by size."""
    parts = target.parts
    generator = torch.Generator().manual_seed(seed)
    row_1D = torch.randn(1, parts.embedding_VD.shape[1], generator=generator).to(parts.device, parts.dtype)

    def short(size: int) -> Call:
        ids_W = torch.tensor(sorted(order[:size]), device=parts.device)
        layer = shortened(parts.head, ids_W)

        def call() -> None:
            ids_W[layer.rows(row_1D).argmax(-1)].tolist()

        return call

    def whole() -> None:
        parts.head.rows(row_1D).argmax(-1).tolist()

    calls: dict[int, Call] = {size: short(size) for size in sizes if size < target.vocab_size}
    calls[target.vocab_size] = whole
    if has_native_head(target):
        calls[BODY] = _body(target, row_1D)
    return calls


def _body(target: DecoderTarget, row_1D: Tensor) -> Call:
    """One slot of the head over ``_CONTEXT`` cached ones."""
    context = min(_CONTEXT, target.max_context - 1)
    head = head_of(target)
    state = head.open(context + target.max_rows, target.max_rows, target.tables(context + target.max_rows))
    ids_T = torch.zeros(context, dtype=torch.long, device=row_1D.device)
    state.prefill(ids_T, row_1D.expand(context, -1))

    def step() -> None:
        head.readable(state.extend(ids_T[:1], row_1D)).sum().item()
        state.cache.commit(0)

    return step


def _interleaved(
    calls: Mapping[int, Call], clock: Clock, rng: random.Random, report: Report
) -> dict[int, list[int]]:
    """Nanoseconds of every call, in rounds of all, the first few rounds left out."""
    times: dict[int, list[int]] = {key: [] for key in calls}
    began = clock.now_ns()
    for done in range(_REPEATS + _WARM):
        report("timing the output layer", done, _REPEATS + _WARM)
        for key in rng.sample(sorted(calls), len(calls)):
            start = clock.now_ns()
            calls[key]()
            times[key].append(clock.now_ns() - start)
        if done > 2 * _WARM and clock.now_ns() - began > _BUDGET_NS:
            break
    return {key: values[_WARM:] for key, values in times.items()}


def _half_quartiles(values: Sequence[int]) -> float:
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return (ordered[-1 - quarter] - ordered[quarter]) / 2e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What a size is worth.

    Attributes:
        size: ids in the list.
        coverage: share of held-out tokens in it.
        output_ms: milliseconds of its output layer.
        saved_ms: of a drafted token against all ids.
        marginal: coverage gained over the next smaller size per millisecond of a drafted token; ``None`` for
            the smallest, and where the larger size did not take longer.
        tokens_per_second: emitted, as predicted.
    """

    size: int
    coverage: float
    output_ms: float
    saved_ms: float
    marginal: float | None
    tokens_per_second: float


def worths(shares: Mapping[int, float], costs: StepCosts, wish: Wish) -> list[Worth]:
    """Every size by what it is worth, the whole vocabulary (coverage 1) last.

    A round of depth d emits ``1 + p + ... + p ** d`` tokens, p the acceptance times the coverage, and takes a
    verification of d + 1 rows and d drafted tokens.
    """
    whole = max(costs.output)
    found: list[Worth] = []
    for size, seconds in costs.output.items():
        share = 1.0 if size == whole else shares[size]
        p = wish.acceptance * share
        emitted = sum(p**k for k in range(wish.depth + 1))
        round_seconds = costs.verification + wish.depth * (costs.body + seconds)
        more_ms = 1e3 * seconds - found[-1].output_ms if found else 0.0
        found.append(
            Worth(
                size=size, coverage=share, output_ms=1e3 * seconds,
                saved_ms=1e3 * (costs.output[whole] - seconds),
                marginal=(share - found[-1].coverage) / more_ms if more_ms > 0 else None,
                tokens_per_second=emitted / round_seconds,
            )
        )  # fmt: skip
    return found


def best(found: Sequence[Worth]) -> Worth:
    """The size to take: the most predicted tokens a second, of equals the smallest.

    Growing a list pays as long as the tokens it adds per millisecond are more than a round yields per
    millisecond, so this is where the marginal gain has fallen to the average.
    """
    return max(found, key=lambda worth: (worth.tokens_per_second, -worth.size))


def cost_summary(costs: StepCosts, found: Sequence[Worth], wish: Wish) -> dict[str, Any]:
    """As plain values; times in milliseconds."""
    return {
        "depth": wish.depth, "acceptance": wish.acceptance, "num_repeats": costs.num_repeats,
        "body_ms": 1e3 * costs.body, "is_body_measured": costs.is_body_measured,
        "verification_ms": 1e3 * costs.verification,
        "sizes": [
            {"size": w.size, "coverage": w.coverage, "output_ms": w.output_ms,
             "spread_ms": 1e3 * costs.spread[w.size], "saved_ms": w.saved_ms,
             "coverage_per_ms": w.marginal, "tokens_per_second": w.tokens_per_second}
            for w in found
        ],
    }  # fmt: skip
