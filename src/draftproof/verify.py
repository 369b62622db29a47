"""The accept rule: walk a verification's rows in order, keep draft tokens while they equal the choice.

Pure: no torch, no time. The rule asks for each row's choice only when every earlier draft token was
accepted and the output has not ended, so stateful logits processors and stopping criteria see exactly the
calls that serial decoding would make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """What one verification emits.

    ``num_accepted`` draft tokens equal to their row's choice, ``emitted`` those and the bonus token;
    where the output ends inside the draft there is no bonus.
    """

    num_accepted: int
    emitted: tuple[int, ...]
    is_done: bool


def walk(draft_ids: Sequence[int], choose: Callable[[int], int], push: Callable[[int], bool]) -> Walk:
    """Apply the accept rule to one verification of ``len(draft_ids) + 1`` rows.

    Args:
        draft_ids: the verified draft.
        choose: the target's token after row ``j``; called for j = 0, 1, ... without gaps.
        push: commits an emitted token to the output and says whether the output is complete.
    """
    emitted: list[int] = []
    for row in range(len(draft_ids) + 1):
        token = choose(row)
        emitted.append(token)
        is_done = push(token)
        is_accepted = row < len(draft_ids) and token == draft_ids[row]
        if is_done or not is_accepted:
            return Walk(num_accepted=row + is_accepted, emitted=tuple(emitted), is_done=is_done)
    raise AssertionError("unreachable: the last row is never accepted")
