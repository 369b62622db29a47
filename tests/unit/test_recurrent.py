"""States and windows of linear attention: selection on commit, the tape, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftproof.errors import RollbackError
from draftproof.recurrent import RecurrentCache, RecurrentRows, RecurrentShape

SHAPE = RecurrentShape(num_heads=2, key_size=3, value_size=2, conv_channels=5, conv_width=4)
CPU = torch.device("cpu")


def cache(num_layers: int = 2, max_rows: int = 4) -> RecurrentCache:
    return RecurrentCache([SHAPE] * num_layers, max_rows=max_rows, dtype=torch.bfloat16, device=CPU)


def columns(*values: float) -> Tensor:
    return torch.tensor(values)[:, None].expand(-1, 5).to(torch.bfloat16)


def fill(rows: RecurrentRows, *values: float, num_layers: int = 2) -> None:
    """State and column of every row are its value, plus ten a layer."""
    for layer in range(num_layers):
        rows.windows(layer, columns(*values) + 10 * layer)
        for slot, value in zip(rows.after(layer), values, strict=True):
            slot.fill_(value + 10 * layer)


def held(cached: RecurrentCache, layer: int) -> tuple[float, list[float]]:
    state, window = cached.snapshot(layer)
    assert torch.equal(state, state.flatten()[0].expand_as(state))
    assert torch.equal(window, window[:1].expand_as(window))
    return float(state.flatten()[0]), window[0].tolist()


def test_a_commit_selects_the_state_and_window_of_its_last_row() -> None:
    for keep in range(5):
        cached = cache()
        fill(cached.begin(4), 1.0, 2.0, 3.0, 4.0)
        cached.commit(keep)
        assert held(cached, 0) == (float(keep), [0.0] * (4 - keep) + [float(i + 1) for i in range(keep)])
        assert held(cached, 1)[0] == (10.0 + keep if keep else 0.0)
        assert (cached.length, cached.num_pending) == (keep, 0)


def test_a_commit_copies_nothing_and_slots_are_used_again() -> None:
    cached = cache()
    for _ in range(5):
        rows = cached.begin(4)
        fill(rows, 1.0, 2.0, 3.0, 4.0)
        places = [slot.data_ptr() for slot in rows.after(0)]
        cached.commit(3)
        assert cached.begin(1).before(0).data_ptr() == places[2]
        cached.rollback(cached.length)
    bytes_of_state = 2 * 2 * 3 * 2 * 4
    assert cached.nbytes == 5 * bytes_of_state + 2 * 5 * (4 + 5 * 4) * 2


def test_rows_see_the_columns_before_them_across_calls() -> None:
    cached = cache()
    first = cached.begin(2).windows(0, columns(1.0, 2.0))
    assert first[:, 0].tolist() == [[0, 0, 0, 0, 1], [0, 0, 0, 1, 2]]
    second = cached.begin(2).windows(0, columns(3.0, 4.0))
    assert second[:, 3].tolist() == [[0, 0, 1, 2, 3], [0, 1, 2, 3, 4]]
    cached.commit(3)
    third = cached.begin(1).windows(0, columns(9.0))
    assert third[:, 0].tolist() == [[0, 1, 2, 3, 9]]


def test_a_second_verification_starts_from_the_last_pending_state() -> None:
    cached = cache()
    fill(cached.begin(2), 1.0, 2.0)
    rows = cached.begin(1)
    assert float(rows.before(0).flatten()[0]) == 2.0
    assert len(rows.after(0)) == 1


def test_the_tape_is_wound_back_and_keeps_the_window() -> None:
    """Longer than the tape several times over, with dropped rows between."""
    cached, sent = cache(max_rows=3), [0.0] * 4
    for step in range(40):
        rows = cached.begin(3)
        values = [float(step * 3 % 97), float(step * 5 % 89), -1.0]
        fill(rows, *values)
        cached.commit(step % 3)
        sent += values[: step % 3]
        assert held(cached, 0)[1] == sent[-4:]
        assert held(cached, 1)[1] == (
            [10.0 + v for v in sent[4:]][-4:] if len(sent) > 8 else held(cached, 1)[1]
        )


def test_a_prompt_leaves_its_last_columns_padded_and_its_state() -> None:
    for length in (1, 3, 4, 9):
        cached = cache(num_layers=1)
        cached.write_columns(0, columns(*range(1, length + 1)))
        cached.write_state(0, torch.full((2, 3, 2), 7.0))
        assert cached.length == 0
        cached.finish_prompt(length)
        assert held(cached, 0) == (7.0, ([0.0] * 4 + [float(i + 1) for i in range(length)])[-4:])
        assert cached.length == length


def test_rollback_to_a_mark_drops_only_later_rows() -> None:
    cached = cache()
    fill(cached.begin(1), 1.0)
    mark = cached.mark()
    fill(cached.begin(2), 2.0, 3.0)
    cached.rollback(mark)
    assert cached.num_pending == 1
    cached.commit(1)
    assert held(cached, 0) == (1.0, [0.0, 0.0, 0.0, 1.0])


def test_a_snapshot_is_a_copy() -> None:
    cached = cache()
    fill(cached.begin(1), 1.0)
    cached.commit(1)
    state, window = cached.snapshot(0)
    state.fill_(5.0)
    window.fill_(5.0)
    assert held(cached, 0) == (1.0, [0.0, 0.0, 0.0, 1.0])


def test_what_is_refused() -> None:
    cached = cache()
    with pytest.raises(RollbackError, match="0 rows pending and 5 more: at most 4"):
        cached.begin(5)
    with pytest.raises(RollbackError, match="0 rows pending and 0 more"):
        cached.begin(0)
    fill(cached.begin(2), 1.0, 2.0)
    with pytest.raises(RollbackError, match="cannot commit 3 of 2"):
        cached.commit(3)
    with pytest.raises(RollbackError, match="cannot commit -1 of 2"):
        cached.commit(-1)
    with pytest.raises(RollbackError, match="only fill an empty cache"):
        cached.finish_prompt(3)
    cached.commit(1)
    for mark in (0, 2):
        with pytest.raises(RollbackError, match=f"cannot roll back to {mark}: 1 positions are committed"):
            cached.rollback(mark)
    other = RecurrentShape(num_heads=1, key_size=3, value_size=2, conv_channels=5, conv_width=4)
    with pytest.raises(RollbackError, match="must have one shape, got 2"):
        RecurrentCache([SHAPE, other], max_rows=4, dtype=torch.float32, device=CPU)
