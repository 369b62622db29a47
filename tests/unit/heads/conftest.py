"""``train_settings(kind, **changes)``: settings of a short training with a small corpus of its own."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof.heads.chat import Chat
from draftproof.heads.shards import Row, Shard, write_manifest, write_shard
from draftproof.heads.train_settings import TrainSettings
from draftproof.models.load import load_tokenizer

NUM_ROWS = 16


def write_corpus(model: Path, folder: Path) -> Path:
    """Rows of letters, three in sixteen held out."""
    text_of, rng = Chat(load_tokenizer(model)).text, random.Random(4)
    rows = []
    for index in range(NUM_ROWS):
        ids = tuple(rng.choices(range(40, 72), k=8 + index))
        rows.append(Row(
            index=index, category="news", language="en", origin="template",
            split="held-out" if index % 5 == 2 else "train", is_raw=True, is_sampled=index % 7 == 0,
            finished=True, messages=(("text", f"q{index}"),), text=text_of(ids[3:]), ids=ids,
            prompt_length=3,
        ))  # fmt: skip
    digests = write_shard(folder, Shard(number=0, rows=tuple(rows), facts={}))
    shards = [{"shard": 0, "files": digests, "num_rows": len(rows)}]
    write_manifest(folder, {"shards": shards, "removed_rows": []})
    return folder


@pytest.fixture
def corpus_of(tmp_path: Path) -> Callable[[Path], Path]:
    """``corpus_of(model)``: the folder of such a corpus."""
    return lambda model: write_corpus(model, tmp_path / "corpus")


@pytest.fixture
def train_settings(tiny_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., TrainSettings]:
    """``train_settings(kind="llama", **changes)`` with a corpus of its own."""

    def make(kind: str = "llama", **changes: Any) -> TrainSettings:
        model = tiny_folder(kind, max_position_embeddings=2048)
        corpus = write_corpus(model, tmp_path / f"corpus-{kind}")
        settled: dict[str, Any] = {
            "model": str(model), "corpus": str(corpus), "dtype": "float32", "device": "cpu", "depth": 2,
            "epochs": None, "steps": 6, "batch_tokens": 80, "loss": "kl", "step_decay": 0.8, "rate": 1e-2,
            "warmup": 0.2, "weight_decay": 0.01, "clip": 1.0, "seed": 1, "start": None,
            "checkpoint_every": 3, "sample_rows": 8, "autocast": None,
        }  # fmt: skip
        return TrainSettings(**settled | changes)

    return make
