"""Describes this machine and software, and hashes what can change the bits of a kernel."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
from pathlib import Path

import torch
import transformers

from draftproof.record import Machine

_ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
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
