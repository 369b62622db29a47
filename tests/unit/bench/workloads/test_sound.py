"""The spectral distance on sounds whose difference is known."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from draftproof.bench.workloads.base import Comparison
from draftproof.bench.workloads.sound import compare_sounds, floats, mel_power, spectral_distance


def noise(size: int = 8000, seed: int = 1) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def raw(sound: torch.Tensor) -> bytes:
    return struct.pack(f"<{len(sound)}f", *sound.tolist())


def compare(
    expected: torch.Tensor, actual: torch.Tensor, mean: float = 1.0, frame: float = 4.0
) -> Comparison:
    return compare_sounds(raw(expected), raw(actual), max_mean_db=mean, max_frame_db=frame)


def test_samples_are_little_endian_floats() -> None:
    assert floats(b"\x00\x00\x00\x3f\x00\x00\x80\xbf").tolist() == [0.5, -1.0]


def test_a_sound_is_itself() -> None:
    found = compare(noise(), noise())
    assert (found.is_equal, found.distance, found.limit) == (True, 0.0, 1.0)


@pytest.mark.parametrize(("gain_db", "is_equal"), [(0.9, True), (-0.9, True), (1.1, False), (-1.1, False)])
def test_a_gain_is_its_own_distance(gain_db: float, is_equal: bool) -> None:
    found = compare(noise(), noise() * 10 ** (gain_db / 20))
    assert found.distance == pytest.approx(abs(gain_db), abs=1e-4)
    assert found.is_equal is is_equal


def test_one_bad_frame_is_not_diluted() -> None:
    """An eighth of a second in four, 10 dB too loud: little on average, too much where it is."""
    actual = noise(64_000)
    actual[16_000:18_000] *= 10 ** (10 / 20)
    found = compare(noise(64_000), actual)
    assert not found.is_equal
    assert found.limit == 4.0
    assert found.distance == pytest.approx(10, abs=0.5)
    assert compare(noise(64_000), actual, frame=11).is_equal


def test_the_distance_is_the_one_nearest_its_limit() -> None:
    found = compare(noise(), noise() * 2, mean=0.5, frame=100)
    assert found.limit == 0.5
    assert found.distance == pytest.approx(20 * math.log10(2), abs=1e-4)


def test_two_silences_are_equal_and_one_is_not() -> None:
    silence = torch.zeros(8000, dtype=torch.float64)
    assert compare(silence, silence).distance == 0.0
    assert compare(silence, 1e-9 * noise()).is_equal
    for expected, actual in ((noise(), silence), (silence, noise())):
        found = compare(expected, actual)
        assert not found.is_equal
        assert found.distance is not None
        assert found.distance > 50


def test_noise_far_below_the_sound_does_not_count() -> None:
    tone = torch.sin(torch.arange(8000, dtype=torch.float64) * 0.3)
    assert compare(tone, tone + 1e-6 * noise()).is_equal
    assert not compare(tone, tone + 1e-2 * noise()).is_equal


@pytest.mark.parametrize("size", [1, 5, 1023, 1024, 1025])
def test_short_sounds_are_compared(size: int) -> None:
    assert compare(noise(size), noise(size)).is_equal
    assert not compare(noise(size), 2 * noise(size)).is_equal


def test_two_empty_sounds_are_equal() -> None:
    assert compare(noise(0), noise(0)).is_equal


def test_another_length_is_another_sound() -> None:
    found = compare(noise(8000), noise(7999))
    assert (found.is_equal, found.distance) == (False, None)
    assert found.detail == "7999 samples, stock emits 8000"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_not_equal_even_to_itself(value: float) -> None:
    broken = noise()
    broken[7] = value
    assert compare(noise(), broken).detail == "the sound holds values that are not numbers"
    assert not compare(broken, broken).is_equal
    assert compare(broken, noise()).detail == "stock's sound holds values that are not numbers"


def test_a_frame_every_256_samples() -> None:
    assert spectral_distance(noise(), noise()).shape == (8000 // 256 + 1,)


def test_bands_are_where_the_tone_is() -> None:
    """Band centres are evenly spaced in mel from 0 to 8 kHz, which a sound's highest frequency stands for."""
    num_bands, hertz = 80, 1000.0
    tone = torch.sin(torch.arange(16_000, dtype=torch.float64) * 2 * math.pi * hertz / 16_000)
    power = mel_power(tone).mean(dim=1)
    top = 2595 * math.log10(1 + 8000 / 700)
    centre = 2595 * math.log10(1 + hertz / 700) / top * (num_bands + 1) - 1
    assert power.shape == (num_bands,)
    assert abs(int(power.argmax()) - centre) <= 1
