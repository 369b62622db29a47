"""Settings: defaults, what decides the weights, the schedule, and options that mean nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from draftproof.errors import OptionError
from draftproof.heads.train_settings import TrainSettings, rate_at

SETTINGS = TrainSettings(
    model="m", corpus="c", dtype="bfloat16", device="cpu", depth=3, epochs=None, steps=100, batch_tokens=64,
    loss="kl", step_decay=0.5, rate=None, warmup=0.1, weight_decay=0.01, clip=1.0, seed=0, start=None,
    checkpoint_every=None, sample_rows=4, autocast=None, threads=2,
)  # fmt: skip


def test_defaults_are_filled_in() -> None:
    request = SETTINGS.request("fresh")
    assert (request["rate"], request["start"], request["autocast"]) == (1e-3, "fresh", True)
    assert SETTINGS.request("native")["rate"] == SETTINGS.request("some/folder")["rate"] == 2e-4
    assert replace(SETTINGS, rate=0.3).request("native")["rate"] == 0.3
    assert replace(SETTINGS, dtype="float32").request("fresh")["autocast"] is False
    assert replace(SETTINGS, autocast=False).request("fresh")["autocast"] is False
    assert "threads" not in request


def test_weights_fall_and_sum_to_one() -> None:
    assert SETTINGS.weights() == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert replace(SETTINGS, step_decay=1.0).weights() == pytest.approx([1 / 3] * 3)


def test_checkpoints_are_a_tenth_apart() -> None:
    assert [SETTINGS.every(steps) for steps in (1, 10, 95, 100)] == [1, 1, 10, 10]
    assert replace(SETTINGS, checkpoint_every=7).every(100) == 7
    assert SETTINGS.most_checkpoints == 10
    assert replace(SETTINGS, checkpoint_every=7).most_checkpoints == 15


def test_the_rate_rises_and_falls_to_a_twentieth() -> None:
    rates = [rate_at(step, 100, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.525)
    assert rates[-1] == pytest.approx(0.05, abs=1e-3)
    assert rate_at(0, 1, 0.0) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 2}, "give either --epochs or --steps"),
        ({"steps": None}, "give either --epochs or --steps"),
        ({"steps": 0}, "--steps must be 1 or more, got 0"),
        ({"steps": None, "epochs": 0}, "--epochs must be 1 or more, got 0"),
        ({"depth": 0}, "--depth must be 1 or more, got 0"),
        ({"batch_tokens": 0}, "--batch-tokens must be 1 or more, got 0"),
        ({"checkpoint_every": 0}, "--checkpoint-every must be 1 or more, got 0"),
        ({"sample_rows": 0}, "--sample-rows must be 1 or more, got 0"),
        ({"threads": 0}, "--threads must be 1 or more, got 0"),
        ({"rate": 0.0}, "--lr must be above 0, got 0.0"),
        ({"rate": float("nan")}, "--lr must be above 0, got nan"),
        ({"clip": -1.0}, "--clip must be above 0, got -1.0"),
        ({"step_decay": 0.0}, "--step-decay must be above 0, got 0.0"),
        ({"warmup": 1.0}, "--warmup must be from 0 to less than 1, got 1.0"),
        ({"weight_decay": -0.1}, "--weight-decay must be from 0 to less than 1, got -0.1"),
        ({"loss": "mse"}, "unknown loss 'mse'; known: kl, tv, argmax"),
        ({"dtype": "float16"}, "heads are trained beside a bfloat16 or float32 target, not 'float16'"),
    ],
)
def test_options_that_mean_nothing(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        replace(SETTINGS, **changes)
    assert str(caught.value) == message
