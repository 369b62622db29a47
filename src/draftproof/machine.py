"""Describes this machine and software, and hashes what can change the bits of a kernel."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import platform
import resource
from pathlib import Path

import torch
import transformers

from draftproof.clock import Clock
from draftproof.record import Machine, MemoryFloor

_ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
_MOST_BYTES, _READS = 2**30, 5
_ENVIRONMENT = ("MKL_", "ONEDNN_", "DNNL_", "OMP_", "KMP_", "GOMP_", "ATEN_CPU_CAPABILITY", "CUBLAS_",
                "NVIDIA_TF32", "TORCH_ALLOW", "TRANSFORMERS_SDPA")  # fmt: skip


def describe(device: torch.device) -> Machine:
    """This machine as a record; equal records mean comparable bits and times."""
    cpu, flags = _cpu()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Machine(
        cpu=cpu,
        isa=" ".join(flag for flag in _ISA_FLAGS if flag in flags),
        num_threads=torch.get_num_threads(),
        device=name,
        os=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        environment=tuple(sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(_ENVIRONMENT))),
    )


def fingerprint(machine: Machine) -> str:
    """16 hex digits over everything in ``machine`` that can change a kernel's bits."""
    parts = (machine.cpu, machine.isa, str(machine.num_threads), machine.device, machine.os, machine.torch,
             machine.transformers, *machine.environment)  # fmt: skip
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _cpu() -> tuple[str, set[str]]:
    """Model name and feature flags, from the kernel where it tells them."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine(), {torch.backends.cpu.get_cpu_capability()}
    fields: dict[str, str] = {}
    for line in info.read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    name = fields.get("model name", platform.machine())
    codes = [f"{k} {fields[k]}" for k in ("cpu family", "model", "stepping") if k in fields]
    return " ".join([name, *codes]), flags


def peak_bytes() -> int:
    """Peak resident memory of this process in bytes (``VmHWM``; ``ru_maxrss`` elsewhere)."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def reset_peaks(device: torch.device) -> None:
    """Start new peaks: CUDA's always, the resident one where Linux allows it (else it counts on)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_cuda_bytes(device: torch.device) -> int | None:
    """Peak memory torch has allocated on ``device`` since ``reset_peaks``; ``None`` off CUDA."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def memory_floor(num_bytes: int, device: torch.device, clock: Clock) -> MemoryFloor:
    """Measure how fast ``num_bytes`` of weights can be read once with the current threads.

    The fastest of several sums and dot products over one buffer, at most ``_MOST_BYTES`` of it; a buffer
    that fits a cache is read as fast as weights of that size would be.
    """
    count = max(min(num_bytes, _MOST_BYTES) // 4, 1)
    buffer = torch.ones(count, dtype=torch.float32, device=device)
    best = math.inf
    for _ in range(_READS):
        for read in (torch.sum, lambda b: torch.dot(b, b)):
            start = clock.now_ns()
            read(buffer).item()  # waits for the device
            best = min(best, (clock.now_ns() - start) / 1e9)
    return MemoryFloor(num_bytes=num_bytes, bytes_per_second=count * 4 / best)
