"""``draftproof head corpus`` on the packaged model, in fp32, which any processor runs quickly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftproof.heads.shards import read_corpus

pytestmark = [pytest.mark.model, pytest.mark.slow]


def test_a_small_corpus_of_the_real_model(model_folder: Path, tmp_path: Path) -> None:
    """Greedy rows of this model are stock's at this length on every machine met so far; a loss is a find."""
    out = tmp_path / "corpus"
    arguments = ["head", "corpus", "--model", str(model_folder), "--dtype", "float32", "--prompts", "16",
                 "--batch", "8", "--max-new-tokens", "16", "--sampled-share", "0.25", "--seed", "2",
                 "--out", str(out), "--json"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "draftproof", *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    summary = json.loads(done.stdout)
    rows = list(read_corpus(out))
    assert (summary["status"], summary["num_prompts"], summary["num_rows"]) == ("complete", 16, len(rows))
    assert len(rows) >= 8
    assert len({row.language for row in rows}) >= 4
    assert len({row.category for row in rows}) >= 4
    assert all(row.text for row in rows)
    stock = summary["stock"]
    assert (stock["num_rows"], stock["num_equal"]) == (2, 2)
    assert summary["ratio"] > 1
