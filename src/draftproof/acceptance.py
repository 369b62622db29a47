"""What drafts were accepted: by position, by input, by offset in the output, by source.

Both conventions and both averages are always given, as either alone misleads: acceptance length with and
without the bonus token, pooled over rounds (``token_weighted``) and as the mean of the inputs' own values
(``per_prompt``). Positions count from 1. The prompt's own round is no part of anything here.

Where the output ends inside a draft, the last round has no bonus token: it counts with what it emitted,
and the draft tokens behind the end, never judged, are neither right nor wrong at their positions
(``num_unjudged``). ``acceptance_rate`` is accepted over all drafted, as in ``stats.decode_stats``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from draftproof.record import Round, Trace

OFFSET_BIN = 32


def acceptance(traces: Mapping[str, Sequence[Trace]]) -> dict[str, Any] | None:
    """The published ``acceptance`` document of the judged arm's traces by input label.

    Plain JSON values; histograms have their numbers as strings. ``None`` when no round drafted.
    """
    by_label = {label: [r for t in of for r in t.rounds[1:]] for label, of in traces.items()}
    every = [round_ for rounds in by_label.values() for round_ in rounds]
    drafted = [round_ for round_ in every if round_.num_drafted]
    if not drafted:
        return None
    return {
        "positions": _positions(drafted),
        "num_rounds": len(drafted),
        "num_unjudged": sum(r.num_drafted - _num_judged(r) for r in drafted),
        "acceptance_length": _lengths(by_label.values(), drafted),
        "acceptance_rate": _rate(drafted),
        "by_input": {label: _input(rounds) for label, rounds in by_label.items()},
        "offsets": _offsets(trace for of in traces.values() for trace in of),
        "sources": _sources(drafted),
        "depths": _histogram(r.num_drafted for r in every),
    }


def _num_judged(round_: Round) -> int:
    """Draft tokens the accept rule decided on: all, or those accepted where the output ended there."""
    is_cut = len(round_.emitted) == round_.num_accepted
    return round_.num_accepted if is_cut else round_.num_drafted


def _positions(drafted: Sequence[Round]) -> list[dict[str, Any]]:
    """Per position: accepted given that all before were (``conditional``), and together (``joint``)."""
    out = []
    for position in range(1, max(map(_num_judged, drafted)) + 1):
        judged = [r.num_accepted for r in drafted if _num_judged(r) >= position]
        num_trials = sum(accepted >= position - 1 for accepted in judged)
        num_right = sum(accepted >= position for accepted in judged)
        out.append({
            "position": position, "conditional": num_right / num_trials if num_trials else None,
            "joint": num_right / len(judged), "num_trials": num_trials, "num_rounds": len(judged),
        })  # fmt: skip
    return out


def _lengths(by_input: Iterable[Sequence[Round]], drafted: Sequence[Round]) -> dict[str, Any]:
    inputs = [with_drafts for rounds in by_input if (with_drafts := [r for r in rounds if r.num_drafted])]
    return {
        "with_bonus": {
            "token_weighted": _with_bonus(drafted), "per_prompt": fmean(map(_with_bonus, inputs)),
        },
        "without_bonus": {
            "token_weighted": _without_bonus(drafted), "per_prompt": fmean(map(_without_bonus, inputs)),
        },
    }  # fmt: skip


def _with_bonus(drafted: Sequence[Round]) -> float:
    return sum(len(r.emitted) for r in drafted) / len(drafted)


def _without_bonus(drafted: Sequence[Round]) -> float:
    return sum(r.num_accepted for r in drafted) / len(drafted)


def _rate(drafted: Sequence[Round]) -> float:
    return sum(r.num_accepted for r in drafted) / sum(r.num_drafted for r in drafted)


def _input(rounds: Sequence[Round]) -> dict[str, Any]:
    """One input's figures; depths over all its rounds, the rest over its rounds with a draft."""
    drafted = [r for r in rounds if r.num_drafted]
    return {
        "with_bonus": _with_bonus(drafted) if drafted else None,
        "without_bonus": _without_bonus(drafted) if drafted else None,
        "acceptance_rate": _rate(drafted) if drafted else None,
        "num_rounds": len(drafted),
        "depth_histogram": _histogram(r.num_drafted for r in rounds),
        "accepted_histogram": _histogram(r.num_accepted for r in drafted),
    }


def _offsets(traces: Iterable[Trace]) -> list[dict[str, Any]]:
    """Tokens per forward by bins of the output; a round belongs to the bin of its first token.

    Rounds without a draft count too. The prompt's token is at offset 0; ``end`` is exclusive.
    """
    bins: dict[int, list[Round]] = {}
    for trace in traces:
        for round_ in trace.rounds[1:]:
            bins.setdefault((round_.position - trace.num_prompt) // OFFSET_BIN, []).append(round_)
    out = []
    for index, rounds in sorted(bins.items()):
        emitted, forwards = sum(len(r.emitted) for r in rounds), sum(r.num_forwards for r in rounds)
        out.append({
            "start": index * OFFSET_BIN, "end": (index + 1) * OFFSET_BIN, "num_rounds": len(rounds),
            "tokens_per_forward": emitted / forwards if forwards else None,
        })  # fmt: skip
    return out


def _sources(drafted: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """By the drafter that proposed, also inside a cascade."""
    by_source: dict[str, list[Round]] = {}
    for round_ in drafted:
        by_source.setdefault(round_.source, []).append(round_)
    return {
        source: {
            "rounds": len(rounds), "drafted": sum(r.num_drafted for r in rounds),
            "accepted": sum(r.num_accepted for r in rounds), "acceptance_rate": _rate(rounds),
        }
        for source, rounds in sorted(by_source.items())
    }  # fmt: skip


def _histogram(numbers: Iterable[int]) -> dict[str, int]:
    return {str(number): count for number, count in sorted(Counter(numbers).items())}
