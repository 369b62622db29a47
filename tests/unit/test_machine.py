"""The fingerprint changes with whatever may change a kernel's bits, and with nothing else."""

from __future__ import annotations

import platform
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import transformers

from draftproof import machine
from draftproof.machine import describe, fingerprint, memory_floor, peak_bytes, peak_cuda_bytes, reset_peaks
from draftproof.record import Machine, MemoryFloor
from draftproof.testing import FakeClock

CPU = torch.device("cpu")
RECORD = Machine(
    cpu="c", isa="i", num_threads=2, device="d", os="o", python="p", torch="t", transformers="f",
    environment=("A=1",),
)  # fmt: skip


def test_describes_this_machine() -> None:
    found = describe(CPU)
    assert found.num_threads == torch.get_num_threads() == 2
    assert found.device == "cpu"
    assert found.os == f"{platform.system()} {platform.machine()}"
    assert (found.python, found.torch) == (platform.python_version(), torch.__version__)
    assert found.transformers == transformers.__version__
    assert found.cpu
    assert describe(CPU) == found


def test_threads_are_those_in_use() -> None:
    torch.set_num_threads(1)
    try:
        assert describe(CPU).num_threads == 1
    finally:
        torch.set_num_threads(2)


def test_variables_that_steer_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    steering = {
        "ONEDNN_MAX_CPU_ISA": "AVX2", "DNNL_VERBOSE": "0", "OMP_NUM_THREADS": "3", "MKL_CBWR": "AVX2",
        "KMP_AFFINITY": "x", "GOMP_CPU_AFFINITY": "0", "ATEN_CPU_CAPABILITY": "avx2",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVIDIA_TF32_OVERRIDE": "0",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "TRANSFORMERS_SDPA_FORCE_GQA": "1",
    }  # fmt: skip
    for item in describe(CPU).environment:
        monkeypatch.delenv(item.partition("=")[0])
    assert describe(CPU).environment == ()
    for name, value in (steering | {"HOME_OMP_X": "1", "PYTHONHASHSEED": "7"}).items():
        monkeypatch.setenv(name, value)
    assert describe(CPU).environment == tuple(sorted(f"{k}={v}" for k, v in steering.items()))


PROCESSORS = {
    "x86": (
        "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n"
        "model name\t: AMD EPYC\nstepping\t: 1\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_bf16x\n\n"
        "processor\t: 1\nmodel name\t: Other\nflags\t\t: sse amx_bf16\n",
        "AMD EPYC cpu family 26 model 2 stepping 1",
        "avx2 avx512f avx512_bf16",
    ),
    "arm": (
        "processor\t: 0\nBogoMIPS\t: 100.00\nFeatures\t: fp asimd sve bf16\nCPU implementer\t: 0x41\n",
        platform.machine(),
        "asimd bf16 sve",
    ),
    "strange": ("no colon here\n: no key\n", platform.machine(), ""),
}  # fmt: skip


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_processor_is_read_from_the_kernel(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, cpu, isa = PROCESSORS[name]
    (tmp_path / "cpuinfo").write_text(text)
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / Path(path).name)
    found = describe(CPU)
    assert (found.cpu, found.isa) == (cpu, isa)


def test_the_processor_without_a_kernel_that_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / "nothing")
    found = describe(CPU)
    assert found.cpu == (platform.processor() or platform.machine())


def test_a_fingerprint_is_sixteen_hexadecimal_digits() -> None:
    found = fingerprint(describe(CPU))
    assert len(found) == 16
    assert int(found, 16) >= 0


@pytest.mark.parametrize("field", [f.name for f in fields(Machine)])
def test_what_a_fingerprint_depends_on(field: str) -> None:
    """Python runs no kernel: a newer one keeps its plans."""
    changed: dict[str, object] = {"num_threads": 3, "environment": ("A=1", "B=2")}
    other = replace(RECORD, **{field: changed.get(field, "x")})
    assert (fingerprint(other) == fingerprint(RECORD)) == (field == "python")


CHILD = """
import pathlib
import torch
from draftproof.machine import describe, fingerprint, peak_bytes
torch.set_num_threads(2)
before = peak_bytes()
held = torch.ones(100 << 20, dtype=torch.uint8)
during = peak_bytes()
del held
print(fingerprint(describe(torch.device("cpu"))), before, during, peak_bytes())
status = pathlib.Path("/proc/self/status")
print(*(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM")))
"""


def test_in_another_process() -> None:
    """The same fingerprint; and in a process of its own, peak memory that grows and does not fall."""
    run = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    first, second = run.stdout.splitlines()
    found, *sizes = first.split()
    assert found == fingerprint(describe(CPU))
    before, during, after = map(int, sizes)
    assert 10 << 20 < before < 4 << 30
    # The kernel counts pages in batches per processor.
    assert during - before == pytest.approx(100 << 20, rel=0.1)
    assert after == pytest.approx(during, rel=0.02)
    assert after == pytest.approx(int(second) * 1024, rel=0.01)


def test_peak_memory_without_a_kernel_that_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``ru_maxrss``: kilobytes on Linux, bytes on macOS."""
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / "nothing")
    kilobytes = machine.resource.getrusage(machine.resource.RUSAGE_SELF).ru_maxrss
    monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
    assert peak_bytes() == pytest.approx(kilobytes * 1024, rel=0.05)
    monkeypatch.setattr(machine.platform, "system", lambda: "Darwin")
    assert peak_bytes() == pytest.approx(kilobytes, rel=0.05)


RESET = """
import torch
from draftproof.machine import peak_bytes, peak_cuda_bytes, reset_peaks
cpu = torch.device("cpu")
held = torch.ones(100 << 20, dtype=torch.uint8)
high = peak_bytes()
del held
reset_peaks(cpu)
low = peak_bytes()
held = torch.ones(30 << 20, dtype=torch.uint8)
print(high, low, peak_bytes(), peak_cuda_bytes(cpu))
"""


@pytest.mark.skipif(platform.system() != "Linux", reason="only Linux resets the resident peak")
def test_a_reset_starts_a_new_peak() -> None:
    run = subprocess.run([sys.executable, "-c", RESET], capture_output=True, text=True, check=True)
    *sizes, cuda = run.stdout.split()
    high, low, again = map(int, sizes)
    assert high - low == pytest.approx(100 << 20, rel=0.1)
    assert again - low == pytest.approx(30 << 20, rel=0.1)
    assert cuda == "None"


def test_where_the_peak_cannot_be_reset_it_counts_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / "no" / "such" / "folder")
    reset_peaks(CPU)


def test_on_cuda_the_peak_is_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda d: calls.append(("reset", str(d))))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda d: calls.append(("read", str(d))) or 77)
    reset_peaks(CPU)
    assert peak_cuda_bytes(CPU) is None
    assert calls == []
    device = torch.device("cuda:1")
    reset_peaks(device)
    assert peak_cuda_bytes(device) == 77
    assert calls == [("reset", "cuda:1"), ("read", "cuda:1")]


class Ticks:
    """A clock whose readings are given."""

    def __init__(self, *readings: int) -> None:
        self._readings = list(readings)

    def now_ns(self) -> int:
        return self._readings.pop(0)


def test_the_memory_floor_is_the_fastest_of_the_reads() -> None:
    """Ten reads of 4000 bytes; the seventh took 500 ns, the others 1000 and more."""
    took = [1000, 3000, 1000, 2000, 4000, 1000, 500, 1000, 2000, 1000]
    readings = [t for i, ns in enumerate(took) for t in (i * 10_000, i * 10_000 + ns)]
    found = memory_floor(4000, CPU, Ticks(*readings))
    assert found == MemoryFloor(num_bytes=4000, bytes_per_second=4000 / 500e-9)
    assert found.seconds == pytest.approx(500e-9, rel=1e-12)


def test_the_memory_floor_of_huge_weights_is_extrapolated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a part is read; the rate is that part's, the floor that of all the bytes."""
    monkeypatch.setattr(machine, "_MOST_BYTES", 400)
    found = memory_floor(4000, CPU, FakeClock(tick_ns=100))
    assert found == MemoryFloor(num_bytes=4000, bytes_per_second=400 / 100e-9)
    assert found.seconds == pytest.approx(1000e-9, rel=1e-12)


@pytest.mark.parametrize("num_bytes", [0, 3])
def test_the_memory_floor_of_next_to_nothing_exists(num_bytes: int) -> None:
    assert memory_floor(num_bytes, CPU, FakeClock()).bytes_per_second > 0
