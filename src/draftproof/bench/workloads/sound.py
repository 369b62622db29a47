"""Whether two sounds are nearly the same: a distance between their log-mel spectra, in dB.

It says nothing about how a sound is heard, and it compares frame with frame: a sound of another length, or
the same one a little later, is another sound. Needs torch alone.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from draftproof.bench.workloads.base import Comparison

_NUM_FFT, _HOP, _NUM_MELS = 1024, 256, 80
# Bands this far below the loudest one count as silent, and so does anything below the absolute power.
_RANGE_DB, _SILENCE = 80.0, 1e-10


def floats(samples: bytes) -> Tensor:
    """Little-endian float32 samples as a tensor, ``[n]``."""
    array = struct.unpack(f"<{len(samples) // 4}f", samples)
    return torch.tensor(array, dtype=torch.float64)


def compare_sounds(expected: bytes, actual: bytes, *, max_mean_db: float, max_frame_db: float) -> Comparison:
    """Whether ``actual`` has the length of ``expected`` and its spectrum within the limits, in dB."""
    want, got = floats(expected), floats(actual)
    for name, sound in (("stock's sound", want), ("the sound", got)):
        if not bool(sound.isfinite().all()):
            return Comparison(is_equal=False, detail=f"{name} holds values that are not numbers")
    if len(want) != len(got):
        return Comparison(is_equal=False, detail=f"{len(got)} samples, stock emits {len(want)}")
    frames = spectral_distance(want, got)
    mean, worst = float(frames.mean()), float(frames.max())
    # Of the two, the one that is closer to its limit, or further over it.
    is_worst_tighter = worst * max_mean_db > mean * max_frame_db
    distance, limit = (worst, max_frame_db) if is_worst_tighter else (mean, max_mean_db)
    return Comparison(
        is_equal=mean <= max_mean_db and worst <= max_frame_db, distance=distance, limit=limit,
        detail=f"log-mel distance {mean:.3g} dB on average, {worst:.3g} dB in the worst frame",
    )  # fmt: skip


def spectral_distance(expected: Tensor, actual: Tensor) -> Tensor:
    """Root mean square difference of log-mel bands in dB, frame by frame, of two sounds of one length.

    Bands more than 80 dB below the loudest of ``expected`` count as equally silent.
    """
    padding = max(0, _NUM_FFT - len(expected))
    bands = [mel_power(torch.nn.functional.pad(sound, (0, padding))) for sound in (expected, actual)]
    floor = max(float(bands[0].max()) * 10 ** (-_RANGE_DB / 10), _SILENCE)
    want, got = (10 * power.clamp(min=floor).log10() for power in bands)
    return (want - got).square().mean(dim=0).sqrt()


def mel_power(sound: Tensor) -> Tensor:
    """Power in 80 bands spaced evenly in mel up to the highest frequency, ``[bands, frames]``.

    The scale is that of 16 kHz whatever the sampling rate: both sounds are measured alike.
    """
    window = torch.hann_window(_NUM_FFT, dtype=sound.dtype)
    spectrum = torch.stft(sound, _NUM_FFT, _HOP, window=window, center=True, pad_mode="constant",
                          return_complex=True).abs().square()  # fmt: skip
    hertz = torch.linspace(0, 8000, spectrum.shape[0], dtype=sound.dtype)
    mel = 2595 * (1 + hertz / 700).log10()
    width = mel[-1] / (_NUM_MELS + 1)
    centres = width * torch.arange(1, _NUM_MELS + 1, dtype=sound.dtype)
    filters = (1 - (mel[None] - centres[:, None]).abs() / width).clamp(min=0)
    return filters @ spectrum
