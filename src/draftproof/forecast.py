"""What speculation would give if nothing but bytes cost time: break-even acceptance and best depth.

With a chance ``acceptance`` for every draft token, each for itself, a verification of ``depth`` of them emits
``(1 - a**(depth + 1)) / (1 - a)`` tokens on average, the target's own included (Leviathan et al. 2022,
arXiv 2211.17192). It costs one target pass and, a draft token, ``extra`` of one: the draft step and the
row's own share. Real acceptance falls with depth, and a real verification costs more than its bytes: this is
a bound to plan with, no measurement (``costmodel`` has those).
"""

from __future__ import annotations

_HALVINGS = 40


def expected_tokens(acceptance: float, depth: int) -> float:
    """Tokens a verification of ``depth`` draft tokens emits on average."""
    return sum(acceptance**i for i in range(depth + 1))


def gain(acceptance: float, depth: int, extra: float) -> float:
    """Speedup over depth 0; ``extra`` is what a draft token costs, in target passes."""
    return expected_tokens(acceptance, depth) / (1 + depth * extra)


def break_even(depth: int, extra: float) -> float | None:
    """The acceptance from which ``depth`` beats depth 0; ``None`` where even right drafts never pay."""
    if gain(1.0, depth, extra) <= 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle, depth, extra) > 1 else (middle, high)
    return high


def best_depth(acceptance: float, extra: float, max_depth: int) -> int:
    """The depth of the highest gain, the smallest of equals; 0 where none pays."""
    return max(range(max_depth + 1), key=lambda depth: gain(acceptance, depth, extra))
