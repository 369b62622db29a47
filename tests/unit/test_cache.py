"""The cache's limits, layouts and refusals one by one; every order of operations is a property test."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftproof.cache import CacheRows, KVCache, LayerShape
from draftproof.errors import RollbackError

CPU = torch.device("cpu")
FULL = LayerShape(num_groups=2, head_size=3)
SLIDING = LayerShape(num_groups=2, head_size=3, window=4)


def fresh(layers: list[LayerShape], capacity: int = 20, max_rows: int = 5) -> KVCache:
    """Poisoned, so that a slot read before it was written shows."""
    cache = KVCache(layers, capacity=capacity, max_rows=max_rows, dtype=torch.float32, device=CPU)
    for group in cache._groups:
        group.keys_LGSK.fill_(torch.nan)
        group.values_LGSK.fill_(torch.nan)
    return cache


def row(number: int, layer: int, shape: LayerShape) -> Tensor:
    """``[1, G, K]``, different for every position, layer, key head and component."""
    size = shape.num_groups * shape.head_size
    return (1000.0 * number + 100 * layer + torch.arange(size)).view(1, shape.num_groups, shape.head_size)


def append(cache: KVCache, layers: list[LayerShape], numbers: list[int]) -> CacheRows:
    rows = cache.begin(len(numbers))
    for layer, shape in enumerate(layers):
        k_TGK = torch.cat([row(n, layer, shape) for n in numbers])
        rows.write(layer, k_TGK, -k_TGK)
    return rows


def fill_prompt(cache: KVCache, layers: list[LayerShape], num_rows: int) -> None:
    for layer, shape in enumerate(layers):
        k_TGK = torch.cat([row(n, layer, shape) for n in range(num_rows)])
        cache.write_prompt(layer, k_TGK, -k_TGK)
    cache.finish_prompt(num_rows)


def expect(seen: tuple[Tensor, Tensor], numbers: list[int], layer: int, shape: LayerShape) -> None:
    want = torch.cat([row(n, layer, shape) for n in numbers]).transpose(0, 1)
    assert torch.equal(seen[0], want)
    assert torch.equal(seen[1], -want)


def test_a_row_sees_itself_and_what_its_window_holds() -> None:
    layers = [FULL, SLIDING, FULL]
    cache = fresh(layers)
    rows = append(cache, layers, [0, 1, 2, 3, 4])
    for t in range(5):
        expect(rows.visible(0, t), list(range(t + 1)), 0, FULL)
        expect(rows.visible(1, t), list(range(max(0, t - 3), t + 1)), 1, SLIDING)
        expect(rows.visible(2, t), list(range(t + 1)), 2, FULL)
    assert [rows.is_masked(1, t) for t in range(5)] == [False, False, False, True, True]
    assert not any(rows.is_masked(layer, t) for layer in (0, 2) for t in range(5))


def test_masks_follow_positions_not_rows() -> None:
    cache = fresh([SLIDING])
    append(cache, [SLIDING], [0, 1])
    cache.commit(2)
    rows = append(cache, [SLIDING], [2, 3, 4])
    assert [rows.is_masked(0, t) for t in range(3)] == [False, True, True]


def test_layers_of_one_shape_keep_their_order() -> None:
    narrow = LayerShape(num_groups=1, head_size=2)
    layers = [SLIDING, narrow, FULL, SLIDING, narrow, FULL]
    cache = fresh(layers)
    append(cache, layers, [7, 8])
    cache.commit(2)
    for layer, shape in enumerate(layers):
        expect(cache.snapshot(layer), [7, 8], layer, shape)


@pytest.mark.parametrize("num_prompt", [1, 2, 3, 4, 5, 13, 14, 19])
def test_a_prompt_of_any_length(num_prompt: int) -> None:
    """Shorter than the window, longer than a sliding layer's whole store."""
    layers = [FULL, SLIDING]
    cache = fresh(layers, capacity=24)
    fill_prompt(cache, layers, num_prompt)
    assert (cache.length, cache.num_pending, cache.mark()) == (num_prompt, 0, num_prompt)
    expect(cache.snapshot(0), list(range(num_prompt)), 0, FULL)
    expect(cache.snapshot(1), list(range(max(0, num_prompt - 3), num_prompt)), 1, SLIDING)
    rows = append(cache, layers, [num_prompt, num_prompt + 1])
    expect(rows.visible(0, 1), list(range(num_prompt + 2)), 0, FULL)
    expect(rows.visible(1, 1), list(range(max(0, num_prompt - 2), num_prompt + 2)), 1, SLIDING)


def test_a_long_text_moves_through_a_small_store() -> None:
    layers = [SLIDING]
    cache = fresh(layers, capacity=1000, max_rows=3)
    assert cache._groups[0].keys_LGSK.shape[2] == 2 * 4 + 3
    for position in range(200):
        rows = append(cache, layers, [position, 9999, 9999])
        expect(rows.visible(0, 0), list(range(max(0, position - 3), position + 1)), 0, SLIDING)
        cache.commit(1)
    expect(cache.snapshot(0), [197, 198, 199], 0, SLIDING)


@pytest.mark.parametrize("window", [1, 2, 4])
def test_verifications_append_to_each_other_at_every_length(window: int) -> None:
    """Room for all rows that may become pending is made before the first of them."""
    layers = [LayerShape(num_groups=1, head_size=2, window=window)]
    cache = fresh(layers, capacity=100, max_rows=5)
    for length in range(40):
        for number, count in ((length, 1), (length + 1, 4)):
            rows = append(cache, layers, list(range(number, number + count)))
            for t in range(count):
                first = max(0, number + t + 1 - window)
                expect(rows.visible(0, t), list(range(first, number + t + 1)), 0, layers[0])
        cache.commit(1)


def test_a_window_of_one_sees_only_itself() -> None:
    layers = [LayerShape(num_groups=1, head_size=2, window=1)]
    cache = fresh(layers, capacity=9, max_rows=2)
    for position in range(4):
        rows = append(cache, layers, [position, 50])
        expect(rows.visible(0, 0), [position], 0, layers[0])
        expect(rows.visible(0, 1), [50], 0, layers[0])
        assert rows.is_masked(0, 0)
        cache.commit(1)
        assert cache.snapshot(0)[0].shape == (1, 0, 2)


def test_the_last_position_can_be_used() -> None:
    layers = [FULL, SLIDING]
    cache = fresh(layers, capacity=7, max_rows=5)
    append(cache, layers, [0, 1, 2, 3])
    cache.commit(4)
    rows = append(cache, layers, [4, 5, 6])
    expect(rows.visible(0, 2), list(range(7)), 0, FULL)
    expect(rows.visible(1, 2), [3, 4, 5, 6], 1, SLIDING)
    with pytest.raises(RollbackError, match="cache full: 7 positions and 1 more rows, capacity 7, at most 5"):
        cache.begin(1)


def test_pending_rows_are_limited() -> None:
    cache = fresh([FULL], max_rows=5)
    append(cache, [FULL], [0, 1, 2])
    with pytest.raises(RollbackError, match="3 positions and 3 more rows"):
        cache.begin(3)
    assert cache.num_pending == 3
    append(cache, [FULL], [3, 4])
    assert (cache.length, cache.num_pending, cache.mark()) == (0, 5, 5)


def test_commit_keeps_the_first_rows() -> None:
    cache = fresh([FULL])
    append(cache, [FULL], [0, 1])
    append(cache, [FULL], [2, 3])
    cache.commit(3)
    assert (cache.length, cache.num_pending) == (3, 0)
    expect(cache.snapshot(0), [0, 1, 2], 0, FULL)
    append(cache, [FULL], [13])
    cache.commit(0)
    expect(cache.snapshot(0), [0, 1, 2], 0, FULL)


@pytest.mark.parametrize("num_rows", [-1, 3, 100])
def test_a_wrong_commit_is_refused(num_rows: int) -> None:
    cache = fresh([FULL])
    append(cache, [FULL], [0, 1])
    with pytest.raises(RollbackError, match=f"cannot commit {num_rows} of 2 pending rows"):
        cache.commit(num_rows)
    assert (cache.length, cache.num_pending) == (0, 2)


def test_rollback_reaches_back_to_the_last_commit() -> None:
    cache = fresh([FULL])
    append(cache, [FULL], [0, 1])
    cache.commit(2)
    append(cache, [FULL], [2, 3, 4])
    cache.rollback(3)
    assert (cache.length, cache.num_pending) == (2, 1)
    for mark in (1, 4, -1):
        with pytest.raises(RollbackError, match=f"cannot roll back to {mark}: 2 positions are committed"):
            cache.rollback(mark)
    assert (cache.length, cache.num_pending) == (2, 1)
    rows = append(cache, [FULL], [13])
    expect(rows.visible(0, 0), [0, 1, 2, 13], 0, FULL)


def test_a_second_prompt_is_refused() -> None:
    cache = fresh([FULL])
    fill_prompt(cache, [FULL], 2)
    with pytest.raises(RollbackError, match="a prompt can only fill an empty cache"):
        cache.finish_prompt(2)
    pending = fresh([FULL])
    append(pending, [FULL], [0])
    with pytest.raises(RollbackError, match="a prompt can only fill an empty cache"):
        pending.finish_prompt(2)


def test_a_snapshot_is_a_copy() -> None:
    cache = fresh([FULL])
    append(cache, [FULL], [0])
    cache.commit(1)
    cache.snapshot(0)[0].fill_(5.0)
    expect(cache.snapshot(0), [0], 0, FULL)


def test_bytes_allocated() -> None:
    """Keys and values, fp32: a full layer holds the capacity, a sliding one two windows and the rows."""
    cache = fresh([FULL, SLIDING, SLIDING], capacity=100, max_rows=5)
    assert cache.nbytes == 2 * 4 * 2 * 3 * (100 + 2 * (2 * 4 + 5))
    assert fresh([SLIDING], capacity=6).nbytes == 2 * 4 * 2 * 3 * 6
