"""``head train``: a draft head learnt from the frozen target's own distribution, resumable at any step.

The target runs over each batch once; the head is unrolled over the draft steps and compared with it
(``train_model``, ``train_loss``). At every checkpoint the head's acceptance on fixed train and held-out
rows is noted (``train_watch``), so that overfitting shows while it happens. Which rows a step reads is a
function of seed and step (``train_data``), and nothing else is drawn once training has begun: a run that
was stopped goes on to the weights of one that was not. This file opens what the loop needs; the steps are
``train_loop``'s.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from draftproof.errors import OptionError
from draftproof.heads.chat import Chat
from draftproof.heads.shards import read_manifest
from draftproof.heads.train_data import check_text, read_examples
from draftproof.heads.train_loop import Run, Scene
from draftproof.heads.train_model import FrozenTarget, TrainableHead, check_target, has_native
from draftproof.heads.train_settings import FRESH, NATIVE, TrainSettings
from draftproof.heads.train_state import TrainFolder
from draftproof.heads.train_team import Team, join, own_device
from draftproof.machine import describe
from draftproof.models.load import DTYPES, load_tokenizer, read_config, resolve
from draftproof.models.weights import identity
from draftproof.wire import canonical, encode

Report = Callable[[str, int, int], None]
_FP32_BYTES = 4
_STATE_COPIES = 6  # weights and two moments, and the file before it


def train_head(
    settings: TrainSettings, out: Path, report: Report, *, provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """Train or go on with the head in ``out``; its summary, with ``status``.

    Args:
        settings: what to train and how.
        out: folder of the training; see ``train_state``.
        report: hears of (stage, done, total).
        provenance: facts about this run, kept beside those of earlier ones.

    Raises:
        UsageError: the model, the corpus or the folder cannot be used; the message says why.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    team = join(own_device(settings.device))
    try:
        return _train(settings, out, report, provenance, team)
    finally:
        team.leave()


def _train(
    settings: TrainSettings, out: Path, report: Report, provenance: Mapping[str, Any], team: Team
) -> dict[str, Any]:
    folder = team.decide(lambda: resolve(settings.model, settings.dtype, progress=report))
    config, corpus, device = read_config(folder), Path(settings.corpus), own_device(settings.device)
    check_target(config)
    start = _start(settings.start, folder, config)
    head = TrainableHead(config)
    request = settings.request(start) | {"weights": identity(folder), "rows": _rows_sha256(corpus)}
    place = TrainFolder(out, request)
    run = {**provenance, "machine": encode(describe(device)), "num_processes": team.size}
    num_parameters = sum(p.numel() for p in head.parameters())
    num_bytes = num_parameters * _FP32_BYTES * (_STATE_COPIES + settings.most_checkpoints)
    earlier = team.decide(lambda: place.open(run, num_bytes))
    if earlier is not None and earlier["status"] == "complete":
        return {**earlier["summary"], "status": "complete"}
    report("reading the corpus", 0, 0)
    check_text(corpus, Chat(load_tokenizer(folder)).text)
    examples = {
        "train": read_examples(corpus, "train", config.vocab_size),
        "held_out": read_examples(corpus, "held-out", config.vocab_size),
    }
    report("loading the target", 0, 0)
    target = FrozenTarget(folder, DTYPES[settings.dtype], device)
    _begin(head, start, folder, config, target, settings.seed)
    facts = {
        "model": settings.model, "model_type": config.model_type, "weights": identity(folder),
        "dtype": settings.dtype, "start": start, "depth": settings.depth, "loss": settings.loss,
        "num_parameters": num_parameters, "target_sha256": target.sha256(),
    }  # fmt: skip
    scene = Scene(
        place=place, report=report, team=team, target=target, head=head.to(device), examples=examples,
        facts=facts,
    )  # fmt: skip
    return Run(settings, scene, settings.rate_from(start)).go(team.decide(place.read_state))


def _start(asked: str | None, folder: Path, config: Any) -> str:
    """What the head starts from: ``fresh``, ``native`` or the path of a head folder."""
    if asked is None:
        return NATIVE if has_native(folder, config) else FRESH
    if asked == NATIVE and not has_native(folder, config):
        raise OptionError(f"{folder} holds no head of its own: start with --init-from {FRESH}")
    if asked not in (FRESH, NATIVE) and not Path(asked).expanduser().is_dir():
        raise OptionError(f"--init-from is {FRESH}, {NATIVE} or a head folder, not {asked!r}")
    return asked


def _begin(
    head: TrainableHead, start: str, folder: Path, config: Any, target: FrozenTarget, seed: int
) -> None:  # fmt: skip
    if start == FRESH:
        head.start_fresh(target, seed)
    elif start == NATIVE:
        head.read_native(folder, config)
    else:
        head.read(Path(start).expanduser())


def _rows_sha256(corpus: Path) -> str:
    """Hash over the hashes of all shards and the rows left out: the same rows give the same."""
    manifest = read_manifest(corpus)
    kept = {"shards": manifest["shards"], "removed_rows": manifest["removed_rows"]}
    return hashlib.sha256(canonical(kept).encode()).hexdigest()
