"""``benchmarks/gpu_hybrid.py`` runs end to end without a GPU, at a small size, and says what it found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_hybrid.py"


@pytest.mark.slow
def test_end_to_end_on_a_cpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--size", "tiny", "--device", "cpu", "--dtype", "float32",
         "--new-tokens", "12", "--repeats", "2", "--pairs", "1", "--prompt-len", "9",
         "--out", str(tmp_path / "found.json")],
        capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "DRAFTPROOF_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "0 tokens differ from stock's" in done.stdout
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["claim"] in ("bitwise", "guarded")
    assert found["bits"]["1"] == 0
    names = set(found["seconds"])
    assert names >= {"stock token", *(f"verify {n}" for n in range(1, 9)), "head step", "head step, 128 ids"}
    assert all(times and min(times) > 0 for times in found["seconds"].values())
    assert {(row["rate"], row["depth"]) for row in found["speedups"]} >= {(0.0, 0), (0.5, 1), (1.0, 4)}
    assert found["graphs"] == {}
