"""Several processes: two gloo workers train what one trains, and hear the first one's errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from draftproof.errors import OptionError
from draftproof.heads.train import train_head
from draftproof.heads.train_settings import TrainSettings
from draftproof.heads.train_team import Team, join, own_device

CPU = torch.device("cpu")


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    team, module = join(CPU), torch.nn.Linear(2, 2)
    assert team == Team()
    assert team.is_first
    assert team.wrap(module) is module
    assert team.decide(lambda: 3) == 3
    assert team.sums([1.0, 2.0], CPU) == [1.0, 2.0]
    team.leave()


def test_processes_that_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OptionError, match="the 2 processes of torchrun do not meet: "):
        join(CPU)


def test_every_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert own_device("cuda") == torch.device("cuda", 3)
    assert own_device("cuda:1") == torch.device("cuda", 1)
    assert own_device("cpu") == CPU
    monkeypatch.delenv("LOCAL_RANK")
    assert own_device("cuda") == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(OptionError, match="no device 'cuda': torch sees no GPU here"):
        own_device("cuda")
    with pytest.raises(OptionError, match="unknown device 'gpu': try cpu or cuda"):
        own_device("gpu")


CHILD = """
import json, os, sys
from pathlib import Path
import torch
from draftproof.errors import OptionError
from draftproof.heads.train import train_head
from draftproof.heads.train_settings import TrainSettings
torch.set_num_threads(1)
settings, out = TrainSettings(**json.loads(sys.argv[1])), Path(sys.argv[2])
rank = os.environ["RANK"]
try:
    told = train_head(settings, out, lambda *_: None, provenance={"rank": rank})
except OptionError as error:
    told = str(error)
(Path(sys.argv[3]) / f"told-{rank}.json").write_text(json.dumps(told))
"""


def two_workers(settings: TrainSettings, out: Path, folder: Path) -> list[Any]:
    """What each process was told."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0",
               "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(folder / "child.py"),
               json.dumps(asdict(settings)), str(out), str(folder)]  # fmt: skip
    (folder / "child.py").write_text(CHILD)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.slow
def test_two_workers_train_what_one_trains(
    train_settings: Callable[..., TrainSettings], tmp_path: Path
) -> None:
    """Same batches, so the same head but for the order of sums: about 1e-7 a step at a rate of 1e-2.

    AdamW divides by the gradient's size, so an element whose gradient is all rounding may go another way by
    up to a rate a step: few may.
    """
    settings = replace(train_settings(), steps=4, checkpoint_every=2)
    alone = train_head(settings, tmp_path / "one", lambda *_: None, provenance={})
    summaries = two_workers(settings, tmp_path / "two", tmp_path)
    assert summaries[0]["history"][-1]["training_loss"] == pytest.approx(
        alone["history"][-1]["training_loss"], rel=1e-4
    )
    assert summaries[0]["history"][-1]["num_tokens"] == alone["history"][-1]["num_tokens"]
    runs = json.loads((tmp_path / "two" / "train.json").read_text())["runs"]
    assert [(run["rank"], run["num_processes"]) for run in runs] == [("0", 2)], "the first one alone writes"
    one, two = (
        safetensors.torch.load_file(tmp_path / name / "step-000004" / "model.safetensors")
        for name in ("one", "two")
    )
    assert set(one) == set(two)
    for name, tensor in one.items():
        apart = (tensor - two[name]).abs()
        assert apart.median() < 1e-5, name
        assert apart.max() < 4e-2, name


@pytest.mark.slow
def test_all_hear_the_first_ones_error(train_settings: Callable[..., TrainSettings], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    told = two_workers(train_settings(), tmp_path / "notes.txt", tmp_path)
    assert told == [f"{tmp_path / 'notes.txt'} is a file: name a folder with --out"] * 2
