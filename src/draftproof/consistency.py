"""Whether a run's raw rows can be true together, and whether its figures are theirs. Pure, one line a fault.

``record_problems`` knows the rules of a run: which legs there must be, that tokens, hashes and traces belong
together, and what the accept rule allows. ``differences`` compares documents leaf by leaf, and
``hand_problems`` works the ratios out once more in plain arithmetic that shares no code with ``results``.
None of them can tell a run from one that was forged throughout.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import Any

from draftproof.folder import SERIAL, STOCK, Decode, Evidence
from draftproof.record import Leg, Round, Trace
from draftproof.results import SOLO
from draftproof.wire import canonical, tokens_sha256

# Another machine's NumPy may round the last bits of a mean differently; nobody publishes ten digits.
_SAME = 1e-9
_NOTHING = object()
_WIDTH = 80


def record_problems(evidence: Evidence) -> Iterator[str]:
    """Everything in the raw rows that cannot be true together."""
    yield from _schedule_problems(evidence)
    for decode in evidence.decodes:
        name = f"{decode.leg.label}, {decode.leg.arm}, pair {decode.leg.pair}"
        yield from (f"{name}: {problem}" for problem in _leg_problems(evidence, decode))
    for arm in dict.fromkeys(d.leg.arm for d in evidence.decodes):
        mine = [d for d in evidence.decodes if d.leg.arm == arm]
        if len({d.trace is None for d in mine}) > 1:
            yield f"{arm}: some of its legs have a trace and some have none"


def _leg_problems(evidence: Evidence, decode: Decode) -> Iterator[str]:
    leg, ids = decode.leg, decode.token_ids
    prompt = evidence.prompts.get(leg.label)
    if leg.label not in evidence.roles:
        yield "an input the run does not list"
    if ids or emits_ids(evidence):
        if tokens_sha256(ids) != leg.tokens_sha256:
            yield "its tokens are not those its leg was timed with (tokens_sha256)"
        if len(ids) != leg.num_tokens:
            yield f"{len(ids)} tokens, its leg counted {leg.num_tokens}"
    if prompt is None and emits_ids(evidence):
        yield "its prompt is not in prompts.jsonl"
    if decode.trace is not None:
        yield from _trace_problems(decode, decode.trace, prompt)


def _trace_problems(decode: Decode, trace: Trace, prompt: tuple[int, ...] | None) -> Iterator[str]:
    if trace.token_ids != decode.token_ids:
        yield "its trace emits other tokens"
    if prompt is not None and trace.num_prompt != len(prompt):
        yield f"its trace starts after {trace.num_prompt} tokens, the prompt has {len(prompt)}"
    spent = trace.prefill_ns + sum(r.draft_ns + r.verify_ns + r.commit_ns for r in trace.rounds)
    if spent > decode.leg.duration_ns:
        yield f"its trace spends {spent} ns, the leg took {decode.leg.duration_ns} ns"
    for round_ in trace.rounds:
        problem = _round_problem(round_, is_last=round_ is trace.rounds[-1])
        if problem is not None:
            yield f"round {round_.index} {problem}"


def _round_problem(round_: Round, *, is_last: bool) -> str | None:
    """The accept rule, applied to what the round says it was offered and emitted."""
    emitted, accepted = round_.emitted, round_.num_accepted
    if round_.num_offered and not round_.offered:
        return "does not list what it was offered"
    if emitted[:accepted] != round_.offered[:accepted]:
        return "accepted a token it was not offered"
    if accepted < min(round_.num_drafted, len(emitted)) and emitted[accepted] == round_.offered[accepted]:
        return "emitted a token it was offered and does not count it as accepted"
    if len(emitted) == accepted and not is_last:
        return "has no bonus token, and the output goes on"
    return None


def emits_ids(evidence: Evidence) -> bool:
    """Whether the outputs must be ids: those of a language model."""
    return bool(evidence.request.get("workload", "llm") == "llm")


def _schedule_problems(evidence: Evidence) -> Iterator[str]:
    """Legs that are missing, repeated, out of order or at the same time."""
    legs = [d.leg for d in evidence.decodes]
    for index, leg in enumerate(legs):
        if leg.order != index:
            yield f"leg {index} says it is number {leg.order} of the run: legs are missing or out of order"
            break
    seen = Counter((leg.label, leg.arm, leg.pair) for leg in legs)
    yield from (
        f"{label}, {arm}, pair {pair}: timed twice" for (label, arm, pair), n in seen.items() if n > 1
    )
    yield from _pair_problems(evidence, [leg for leg in legs if leg.arm != SOLO])
    for host in dict.fromkeys(leg.host for leg in legs):
        yield from _overlaps([leg for leg in legs if leg.host == host])


def _overlaps(legs: Sequence[Leg]) -> Iterator[str]:
    """One machine times one leg after the other."""
    for before, after in pairwise(legs):
        if after.start_ns < before.start_ns + before.duration_ns:
            yield f"leg {after.order} starts before leg {before.order} of the same machine has ended"


def _pair_problems(evidence: Evidence, legs: Sequence[Leg]) -> Iterator[str]:
    """Every input has the pairs that were asked for, and every pair a leg of every arm.

    A bench records whole pairs only, and stops early only where it says so. An evaluation also stops an
    input at its first wrong output, and may lose a candidate in the middle of the input's last pair.
    """
    is_bench, is_complete = evidence.kind == "bench", evidence.status == "complete"
    arms = dict.fromkeys([STOCK, *(leg.arm for leg in legs), evidence.arm])
    asked = evidence.request.get("pairs")
    for label in evidence.roles if is_bench and is_complete else dict.fromkeys(leg.label for leg in legs):
        mine = {(leg.pair, leg.arm): leg for leg in legs if leg.label == label}
        pairs = sorted({pair for pair, _ in mine})
        for pair in pairs:
            missing = [arm for arm in arms if (pair, arm) not in mine]
            if missing and (is_bench or is_complete or pair != pairs[-1]):
                yield f"{label}, pair {pair}: no leg of {', '.join(missing)}"
        is_cut = not is_bench and bool(pairs) and _differ([mine.get((pairs[-1], arm)) for arm in arms])
        if pairs != list(range(len(pairs))) or (is_complete and not is_cut and len(pairs) != asked):
            yield f"{label}: its pairs are {pairs}, a run has {asked} an input"


def _differ(legs: Sequence[Leg | None]) -> bool:
    return len({leg.tokens_sha256 if leg else None for leg in legs}) > 1


def differences(published: Any, recomputed: Any, path: str) -> Iterator[str]:
    """Every leaf that is not the same in both, by its path."""
    if isinstance(published, dict) and isinstance(recomputed, dict):
        for key in sorted({*published, *recomputed}):
            yield from differences(
                published.get(key, _NOTHING), recomputed.get(key, _NOTHING), f"{path}.{key}"
            )
    elif isinstance(published, list) and isinstance(recomputed, list):
        pairs = zip_longest(published, recomputed, fillvalue=_NOTHING)
        for index, (mine, other) in enumerate(pairs):
            yield from differences(mine, other, f"{path}[{index}]")
    elif not _is_same(published, recomputed):
        yield f"{path}: published {_shown(published)}, recomputed {_shown(recomputed)}"


def _shown(value: Any) -> str:
    text = "nothing" if value is _NOTHING else canonical(value)
    return text if len(text) <= _WIDTH else text[:_WIDTH] + "..."


def _is_same(a: Any, b: Any) -> bool:
    numbers = (int, float)
    if isinstance(a, numbers) and isinstance(b, numbers) and float in (type(a), type(b)):
        return type(a) is not bool and type(b) is not bool and math.isclose(a, b, rel_tol=_SAME)
    return type(a) is type(b) and bool(a == b)


def num_leaves(value: Any) -> int:
    """Figures in a document."""
    if isinstance(value, dict | list):
        return sum(map(num_leaves, value.values() if isinstance(value, dict) else value))
    return 1


def hand_problems(evidence: Evidence, published: dict[str, Any]) -> Iterator[str]:
    """A second opinion on the ratios, in plain arithmetic from the legs: no code shared with ``results``.

    A figure that is withheld is no fault here; whether it had to be is the verdict's to say.
    """
    arm = evidence.arm
    yield from _ratio_problems(evidence, published, "speedup", STOCK, arm)
    yield from _ratio_problems(evidence, published, "serial_speedup", STOCK, SERIAL)
    yield from _ratio_problems(evidence, published, "speculation_speedup", SERIAL, arm)


def _ratio_problems(
    evidence: Evidence, published: dict[str, Any], name: str, base: str, arm: str
) -> Iterator[str]:
    times = {(d.leg.label, d.leg.pair, d.leg.arm): d.leg.duration_ns for d in evidence.decodes}
    middles: dict[str, float] = {}
    for index, label in enumerate(evidence.labels):
        mine = [(pair, ns) for (of, pair, by), ns in times.items() if (of, by) == (label, arm)]
        ratios = [times[label, pair, base] / ns for pair, ns in mine if (label, pair, base) in times]
        wanted: dict[str, float] = {"num_pairs": len(ratios)}
        if ratios:
            middles[label] = _middle(ratios)
            wanted |= {"median": middles[label], "low": min(ratios), "high": max(ratios)}
        yield from _unlike(f"{label}, {name}", _at(published, "inputs", index, name), wanted)
    quoted = list(middles.values())
    if name == "speedup":  # an evaluation is quoted by its main input
        quoted = [v for label, v in middles.items() if evidence.roles[label] == "main"][:1] or quoted
    if quoted:
        yield from _unlike(name, _at(published, name), {"median": _middle(quoted)})


def _at(document: Any, *path: Any) -> Any:
    """What stands at ``path``; ``None`` where nothing does."""
    for step in path:
        try:
            document = document[step]
        except (LookupError, TypeError):
            return None
    return document


def _middle(values: Iterable[float]) -> float:
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _unlike(where: str, shown: Any, wanted: dict[str, float]) -> Iterator[str]:
    """Figures that are shown and are not what they should be."""
    for name, value in wanted.items() if shown is not None else ():
        if not _is_same(_at(shown, name), value):
            yield f"by hand: {where}: {name} is {value}, published {_at(shown, name)}"
