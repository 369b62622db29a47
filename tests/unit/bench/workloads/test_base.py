"""Outputs as plain values, comparisons to the end, counters that add up, the layer that is counted."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftproof.bench.workloads.base import (
    Comparison,
    Inputs,
    Output,
    Workload,
    as_output,
    compare_tokens,
    last_layer,
)
from draftproof.errors import UsageError
from draftproof.record import Counters

SOUND = Output(samples=struct.pack("<3f", 0.0, 0.5, -1.0), sample_rate=16000)


class Plain(Workload):
    """The least a workload can be."""

    def __init__(self, model: Any = None) -> None:
        super().__init__({"model": "none"})
        self.model = model

    def load(self) -> None: ...

    def make_inputs(self, **overrides: Any) -> Inputs:
        return Inputs(token_ids=(1,), max_new_tokens=2, **overrides)

    def run(self, inputs: Inputs) -> Any:
        return list(inputs.token_ids)

    def compare(self, expected: Output, actual: Output) -> Comparison:
        return compare_tokens(expected.token_ids, actual.token_ids)

    def diverse_inputs(self) -> dict[str, dict[str, Any]]:
        return {}

    def holdout_options(self) -> dict[str, Any]:
        return {}


@given(st.lists(st.integers(min_value=0, max_value=2**600)))
def test_tokens_survive_the_pipe(ids: list[int]) -> None:
    output = Output(token_ids=tuple(ids))
    assert Output.from_json(output.to_json()) == output
    assert output.size == len(ids)


def test_sound_survives_the_pipe() -> None:
    assert Output.from_json(SOUND.to_json()) == SOUND
    assert SOUND.size == 3
    assert SOUND.sha256 != Output(samples=SOUND.samples[:-4], sample_rate=16000).sha256  # type: ignore[index]


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"token_ids": None},
        {"token_ids": "12"},
        {"token_ids": [1, -1]},
        {"token_ids": [1.0]},
        {"token_ids": [True]},
        {"token_ids": [], "samples": "AAAA", "sample_rate": 16000},
        {"token_ids": [], "samples": "AAAAAA==", "sample_rate": 0},
        {"token_ids": [], "samples": "AAAAAA==", "sample_rate": None},
        {"token_ids": [], "samples": "no base64", "sample_rate": 16000},
    ],
)
def test_what_is_no_output_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="."):
        Output.from_json(value)


@pytest.mark.parametrize(
    "value",
    [[4, 5], (4, 5), torch.tensor([4, 5]), torch.tensor([[4, 5]]), np.array([4, 5]), [[4, 5]],
     Output(token_ids=(4, 5))],
)  # fmt: skip
def test_ids_in_any_plain_form_are_understood(value: Any) -> None:
    assert as_output(value) == Output(token_ids=(4, 5))


@pytest.mark.parametrize(
    "value", [None, "45", [4.0], [-4], [[4], [5]], torch.tensor([[4], [5]]), torch.tensor(4), {4: 5}, [None]]
)
def test_what_is_no_row_of_ids_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"run\(\) must return the new token ids"):
        as_output(value)


@pytest.mark.parametrize(
    ("actual", "index", "detail"),
    [
        ((1, 2, 3), None, ""),
        ((1, 9, 3), 1, "token 1 is 9, stock emits 2"),
        ((1, 2), 2, "2 tokens, stock emits 3"),
        ((1, 2, 3, 4), 3, "4 tokens, stock emits 3"),
        ((), 0, "0 tokens, stock emits 3"),
    ],
)
def test_every_token_is_compared(actual: tuple[int, ...], index: int | None, detail: str) -> None:
    found = compare_tokens((1, 2, 3), actual)
    assert found == Comparison(is_equal=index is None, first_difference=index, detail=detail)


def test_counters_add_up_and_start_again_when_taken() -> None:
    workload = Plain()
    assert workload.take_stats() is None
    workload.report_stats(steps=1, verifies=1, drafted=4, accepted=2, tokens=3)
    workload.report_stats(steps=1, tokens=1)
    assert workload.take_stats() == Counters(steps=2, verifies=1, drafted=4, accepted=2, tokens=4)
    assert workload.take_stats() is None


def test_a_report_of_nothing_is_a_report() -> None:
    workload = Plain()
    workload.report_stats()
    assert workload.take_stats() == Counters()


@pytest.mark.parametrize("scalar", [np.int64(3), torch.tensor(3), True])
def test_counters_may_be_scalars_of_any_library(scalar: Any) -> None:
    workload = Plain()
    workload.report_stats(tokens=scalar)
    assert workload.take_stats() == Counters(tokens=int(scalar))


@pytest.mark.parametrize(("value", "match"), [(-1, "0 or more"), (1.5, "whole number"), (None, "whole")])
def test_a_counter_is_a_whole_number(value: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Plain().report_stats(steps=value)


def test_unknown_counters_are_an_error() -> None:
    with pytest.raises(TypeError, match="speed"):
        Plain().report_stats(speed=9)  # type: ignore[call-arg]


def linear() -> torch.nn.Module:
    return torch.nn.Linear(1, 1)


def test_the_counted_layer_is_the_last_of_the_outermost_stack() -> None:
    layers = torch.nn.ModuleList([torch.nn.ModuleDict({"experts": torch.nn.ModuleList([linear()] * 9)})] * 2)
    short = torch.nn.ModuleList([linear()])
    model = torch.nn.ModuleDict({"heads": short, "layers": layers, "none": torch.nn.ModuleList()})
    assert last_layer(model) is layers[-1]
    assert Plain(model).counted_module() is layers[-1]


def test_a_model_without_a_stack_is_counted_whole() -> None:
    model = linear()
    assert last_layer(model) is None
    assert Plain(model).counted_module() is model
    assert Plain().counted_module() is None
