"""Any order of begin, mark, commit and rollback against two oracles that share no code with the cache.

Oracle one is a byte copy taken at each mark. Oracle two is a list of the committed rows and a cache that
was only ever fed those, one row at a time: it never drafted. After every step both must agree with what the
next row would see. Buffers start as NaN, so a slot that is read before it was written shows.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from draftproof.cache import CacheRows, KVCache, LayerShape
from draftproof.errors import RollbackError

Row = tuple[Tensor, Tensor]
SHAPES = (
    LayerShape(num_groups=1, head_size=2),
    LayerShape(num_groups=1, head_size=2, window=1),
    LayerShape(num_groups=1, head_size=2, window=3),
    LayerShape(num_groups=2, head_size=1, window=3),
    LayerShape(num_groups=2, head_size=2, window=5),
)
_CPU = torch.device("cpu")


def _poisoned(layers: list[LayerShape], capacity: int, max_rows: int) -> KVCache:
    cache = KVCache(layers, capacity=capacity, max_rows=max_rows, dtype=torch.float32, device=_CPU)
    for group in cache._groups:
        group.keys_LGSK.fill_(torch.nan)
        group.values_LGSK.fill_(torch.nan)
    return cache


def _bytes(cache: KVCache) -> list[object]:
    """Everything the cache holds; integers, as NaN is not equal to itself."""
    stores = [(g.base, g.keys_LGSK.view(torch.int32), g.values_LGSK.view(torch.int32)) for g in cache._groups]
    held = [(base, keys.tolist(), values.tolist()) for base, keys, values in stores]
    return [cache.length, cache.num_pending, cache.capacity, cache.max_rows, held]


def _positions(cache: KVCache, stop: int) -> dict[tuple[int, int], tuple[list[float], list[float]]]:
    """Contents by (group, position) up to ``stop``, of all positions still held."""
    return {
        (index, position): (
            group.keys_LGSK[:, :, position - group.base].tolist(),
            group.values_LGSK[:, :, position - group.base].tolist(),
        )
        for index, group in enumerate(cache._groups)
        for position in range(max(group.base, group.first_visible(stop)), stop)
    }


class CacheMachine(RuleBasedStateMachine):
    """``committed`` and ``pending`` hold, a row, what every layer was given."""

    def __init__(self) -> None:
        super().__init__()
        self.committed: list[list[Row]] = []
        self.pending: list[list[Row]] = []
        self.marks: list[tuple[int, KVCache]] = []
        self.open_rows: list[tuple[int, CacheRows, int]] = []
        self.num_made = 0

    def make_row(self) -> list[Row]:
        """Values no other row has, a pair a layer."""
        self.num_made += 1
        rows = []
        for layer, shape in enumerate(self.layers):
            size = shape.num_groups * shape.head_size
            keys = 100.0 * self.num_made + 10 * layer + torch.arange(size)
            rows.append((keys.view(shape.num_groups, shape.head_size), -keys.view(shape.num_groups, -1)))
        return rows

    def write(self, cache: KVCache, rows: list[list[Row]]) -> CacheRows:
        place = cache.begin(len(rows))
        for layer in range(len(self.layers)):
            keys, values = (torch.stack([row[layer][i] for row in rows]) for i in range(2))
            place.write(layer, keys, values)
        return place

    def check_visible(self, place: CacheRows, index: int, past: list[list[Row]]) -> None:
        """Row ``index`` of ``place`` sees the last rows of ``past``, itself included."""
        for layer, shape in enumerate(self.layers):
            seen = past if shape.window is None else past[-shape.window :]
            for got, i in zip(place.visible(layer, index), range(2), strict=True):
                assert torch.equal(got, torch.stack([row[layer][i] for row in seen], 1))
            assert place.is_masked(layer, index) == (shape.window is not None and len(past) >= shape.window)

    @initialize(
        layers=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4),
        capacity=st.integers(1, 40),
        max_rows=st.integers(1, 6),
        num_prompt=st.integers(0, 25),
    )
    def start(self, layers: list[LayerShape], capacity: int, max_rows: int, num_prompt: int) -> None:
        self.layers, self.capacity, self.max_rows = layers, capacity, max_rows
        self.cache = _poisoned(layers, capacity, max_rows)
        self.committed = [self.make_row() for _ in range(min(num_prompt, capacity))]
        if self.committed:
            for layer in range(len(layers)):
                keys, values = (torch.stack([row[layer][i] for row in self.committed]) for i in range(2))
                self.cache.write_prompt(layer, keys, values)
            self.cache.finish_prompt(len(self.committed))

    @property
    def num_free(self) -> int:
        """Rows that ``begin`` must still accept."""
        in_store = self.capacity - len(self.committed) - len(self.pending)
        return min(in_store, self.max_rows - len(self.pending))

    @precondition(lambda self: self.num_free > 0)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """Append rows; those appended before in the same verification keep their views."""
        rows = [self.make_row() for _ in range(data.draw(st.integers(1, self.num_free), label="rows"))]
        first = len(self.pending)
        place = self.write(self.cache, rows)
        self.pending += rows
        self.open_rows.append((first, place, len(rows)))
        for start, earlier, count in self.open_rows:
            for index in range(count):
                past = self.committed + self.pending[: start + index + 1]
                self.check_visible(earlier, index, past)

    @rule()
    def mark(self) -> None:
        mark = self.cache.mark()
        assert mark == len(self.committed) + len(self.pending)
        self.marks.append((mark, copy.deepcopy(self.cache)))

    @precondition(lambda self: self.marks)
    @rule(data=st.data())
    def rollback(self, data: st.DataObject) -> None:
        """To any mark since the last commit that has not been rolled back behind."""
        index = data.draw(st.integers(0, len(self.marks) - 1), label="mark")
        mark, then = self.marks[index]
        self.cache.rollback(mark)
        del self.marks[index + 1 :]
        del self.pending[mark - len(self.committed) :]
        self.open_rows = [row for row in self.open_rows if row[0] + row[2] <= len(self.pending)]
        assert (self.cache.length, self.cache.num_pending) == (then.length, then.num_pending)
        before, now = _positions(then, mark), _positions(self.cache, mark)
        assert now == before

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.pending)), label="kept")
        self.cache.commit(count)
        self.committed += self.pending[:count]
        self.pending, self.marks, self.open_rows = [], [], []

    @precondition(lambda self: not self.pending)
    @rule(steps=st.integers(1, 12))
    def decode_serially(self, steps: int) -> None:
        """One row and its commit at a time, so that texts grow long."""
        for _ in range(min(steps, self.num_free and self.capacity - len(self.committed))):
            row = self.make_row()
            self.check_visible(self.write(self.cache, [row]), 0, [*self.committed, row])
            self.cache.commit(1)
            self.committed.append(row)
        self.marks, self.open_rows = [], []

    @rule(data=st.data(), kind=st.sampled_from(["commit", "rollback", "begin", "prompt"]))
    def misuse(self, data: st.DataObject, kind: str) -> None:
        """Refused, and nothing has changed."""
        before = _bytes(self.cache)
        low, high = len(self.committed), len(self.committed) + len(self.pending)
        call, values = {
            "commit": (self.cache.commit, st.integers(-3, -1) | st.integers(high - low + 1, high - low + 5)),
            "rollback": (self.cache.rollback, st.integers(-2, low - 1) | st.integers(high + 1, high + 5)),
            "begin": (self.cache.begin, st.integers(self.num_free + 1, self.num_free + 5)),
            "prompt": (self.cache.finish_prompt if high else self.cache.commit, st.just(1)),
        }[kind]
        value = data.draw(values, label="argument")
        with pytest.raises(RollbackError):
            call(value)
        assert _bytes(self.cache) == before

    @invariant()
    def counts_agree(self) -> None:
        assert self.cache.length == len(self.committed)
        assert self.cache.num_pending == len(self.pending)
        assert self.cache.mark() == len(self.committed) + len(self.pending)

    @invariant()
    def nothing_tells_that_it_drafted(self) -> None:
        """On a copy: drop what is pending, then append one row here and in a cache that never drafted."""
        drafted, serial = copy.deepcopy(self.cache), _poisoned(self.layers, self.capacity, self.max_rows)
        for row in self.committed:
            self.write(serial, [row])
            serial.commit(1)
        for layer, shape in enumerate(self.layers):
            first = 0 if shape.window is None else max(len(self.committed) - shape.window + 1, 0)
            for got, want, i in zip(drafted.snapshot(layer), serial.snapshot(layer), range(2), strict=True):
                assert torch.equal(got, want)
                held = [row[layer][i] for row in self.committed[first:]]
                expected = torch.stack(held, 1) if held else got[:, :0]
                assert torch.equal(got, expected)
        drafted.commit(0)
        if len(self.committed) < self.capacity:
            row = self.make_row()
            for cache in (drafted, serial):
                self.check_visible(self.write(cache, [row]), 0, [*self.committed, row])


CacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestCacheMachine = CacheMachine.TestCase
