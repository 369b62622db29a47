"""Bytes of a decode from shapes: the 9B's published figures, windows, tied layers, shortlists."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftproof.cache import LayerShape
from draftproof.models import sizes
from draftproof.models.sizes import Sizes
from draftproof.recurrent import RecurrentShape

# Qwen3.5-9B, reference/qwen35-mtp.md: parameters (1.2), bytes a token (1.3).
FULL = LayerShape(num_groups=4, head_size=256)
DELTA = RecurrentShape(num_heads=32, key_size=128, value_size=128, conv_channels=8192, conv_width=4)
NINE = Sizes(
    num_params={
        sizes.EMBEDDING: 1_017_118_720, sizes.ATTENTION: 469_766_144, sizes.DELTA: 1_617_695_232,
        sizes.MLPS: 4_831_838_208, sizes.NORMS: 266_240, sizes.OUTPUT: 1_017_118_720,
        sizes.HEAD: 243_290_624,
    },
    vocab_size=248_320, hidden=4096, itemsize=2, is_tied=False, attention=(FULL,) * 8,
    recurrent=(DELTA,) * 24, head=FULL,
)  # fmt: skip
WEIGHTS = (sizes.EMBEDDING, sizes.ATTENTION, sizes.DELTA, sizes.MLPS, sizes.NORMS, sizes.OUTPUT)


def test_parameters_of_the_target() -> None:
    assert NINE.num_target_params == 8_953_803_264


def test_weights_a_token() -> None:
    read = NINE.token_bytes(0)
    assert read[sizes.EMBEDDING] == 8192
    assert round(sum(read[part] for part in WEIGHTS) / 1e9, 3) == 15.873
    assert sizes.HEAD not in read
    assert sizes.KEYS not in read
    assert list(NINE.token_bytes(1)) == [*WEIGHTS, sizes.KEYS, sizes.STATE]


def test_state_and_windows() -> None:
    assert NINE.state_bytes == 48 << 20
    assert NINE.window_bytes == 24 * 8192 * 4 * 2
    assert NINE.token_bytes(0)[sizes.STATE] == 2 * NINE.state_bytes + NINE.window_bytes
    wide = replace(NINE, itemsize=4)
    assert (wide.state_bytes, wide.window_bytes) == (NINE.state_bytes, 2 * NINE.window_bytes)


def test_keys_and_values() -> None:
    assert (NINE.position_bytes, NINE.head_position_bytes) == (32 << 10, 4 << 10)
    assert NINE.token_bytes(100)[sizes.KEYS] == 100 * NINE.position_bytes


def test_a_window_ends_what_is_read() -> None:
    sliding = replace(NINE, attention=(replace(FULL, window=16), FULL))
    one = 2 * 4 * 256 * 2
    assert sliding.token_bytes(10)[sizes.KEYS] == 20 * one
    assert sliding.token_bytes(100)[sizes.KEYS] == 116 * one


def test_a_further_row_reads_no_weights() -> None:
    read = NINE.token_bytes(100)
    assert NINE.row_bytes(100) == 8192 + read[sizes.KEYS] + read[sizes.STATE]


@pytest.mark.parametrize(("num_outputs", "share"), [(248_320, 0.159), (32_768, 0.048), (10**9, 0.159)])
def test_a_draft_step(num_outputs: int, share: float) -> None:
    weights = sum(NINE.token_bytes(0)[part] for part in WEIGHTS)
    assert round(NINE.draft_bytes(0, num_outputs) / weights, 3) == share
    assert NINE.draft_bytes(7, num_outputs) - NINE.draft_bytes(0, num_outputs) == 7 * 4096


def test_a_tied_output_layer_is_read_and_not_counted() -> None:
    params = {part: count for part, count in NINE.num_params.items() if part != sizes.OUTPUT}
    tied = replace(NINE, num_params=params, is_tied=True)
    assert tied.num_target_params == NINE.num_target_params - 1_017_118_720
    assert tied.token_bytes(5) == NINE.token_bytes(5)


def test_a_model_without_head_or_state() -> None:
    plain = replace(NINE, head=None, recurrent=())
    assert plain.head_position_bytes == plain.state_bytes == plain.window_bytes == 0
    assert sizes.STATE not in plain.token_bytes(3)
