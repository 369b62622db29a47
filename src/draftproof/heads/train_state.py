"""A training folder: the state a run goes on from, checkpoints that are head folders, and the history.

``train.json`` says what is trained and by which runs, and holds a hash of itself. ``step-000200/`` is a head:
``model.safetensors`` as ``--head`` reads it, ``head.json`` and ``provenance.json``. ``state.safetensors`` is
written last: weights in fp32, AdamW's moments, and the history so far. A kill in between leaves work of steps
after that state, which the next run does again, to the same bits. No pickle is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftproof.errors import EvidenceError, OptionError, StorageError
from draftproof.wire import FORMAT_VERSION, canonical, check_version, write_atomic, write_lines

MANIFEST, STATE, HISTORY, PAGE = "train.json", "state.safetensors", "history.jsonl", "training.html"
HEAD, HEAD_FACTS, PROVENANCE = "model.safetensors", "head.json", "provenance.json"
_OURS = ("step-", ".step-", f".{MANIFEST}", f".{STATE}", f".{HISTORY}", f".{PAGE}")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_MORE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Where a run stands.

    Attributes:
        step: optimiser steps done.
        tensors: parameters by checkpoint name; ``name:exp_avg`` and ``name:exp_avg_sq`` are their moments.
        history: one row a look, oldest first.
        tally: sums since the last look, and what was counted since the start.
    """

    step: int
    tensors: dict[str, Tensor]
    history: list[dict[str, Any]] = field(default_factory=list)
    tally: dict[str, float] = field(default_factory=dict)


def step_name(step: int) -> str:
    """Name of a checkpoint's folder."""
    return f"step-{step:06d}"


def gather(
    parts: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:  # fmt: skip
    """Parameters and moments as ``State.tensors`` has them, copied to the CPU."""
    made: dict[str, Tensor] = {}
    for name, parameter in parts.items():
        made[name] = parameter.detach().cpu().clone()
        for moment in _MOMENTS:
            if moment in optimizer.state[parameter]:
                made[f"{name}:{moment}"] = optimizer.state[parameter][moment].detach().cpu().clone()
    return made


@torch.no_grad()
def restore(state: State, parts: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Put a state back into parameters and optimiser."""
    for name, parameter in parts.items():
        parameter.copy_(state.tensors[name])
        if f"{name}:{_MOMENTS[0]}" in state.tensors:
            moments = {m: state.tensors[f"{name}:{m}"].to(parameter.device, copy=True) for m in _MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(state.step)), **moments}


class TrainFolder:
    """The folder of one training.

    Args:
        out: the folder.
        request: what decides the weights; a folder with another one is refused.
    """

    def __init__(self, out: Path, request: Mapping[str, Any]) -> None:
        self.out, self._request = out, dict(request)
        self._runs: list[dict[str, Any]] = []

    def open(self, run: Mapping[str, Any], num_bytes: int) -> dict[str, Any] | None:
        """The manifest of an earlier run with the same settings, if there is one.

        Args:
            run: facts of this run, kept beside those of earlier ones.
            num_bytes: what may be written.

        Raises:
            OptionError: the folder holds something else, or a training with other settings, or is damaged.
            StorageError: there is no room.
        """
        manifest = self._earlier()
        self._runs = [*(manifest["runs"] if manifest else []), dict(run)]
        if manifest is None or manifest["status"] != "complete":
            self._check_room(num_bytes)
        return manifest

    def _earlier(self) -> dict[str, Any] | None:
        if self.out.exists() and not self.out.is_dir():
            raise OptionError(f"{self.out} is a file: name a folder with --out")
        path = self.out / MANIFEST
        if not path.exists():
            strange = [p.name for p in self.out.glob("*")] if self.out.is_dir() else []
            if [name for name in strange if not name.startswith(_OURS)]:
                raise OptionError(f"{self.out} holds other files: name an empty folder with --out")
            return None
        manifest = read_manifest(self.out)
        for name, value in manifest["request"].items():
            if self._request.get(name) != value:
                mine = self._request.get(name)
                raise OptionError(
                    f"{self.out} was trained with {name}={value}, not {mine}: name another folder with --out"
                )
        return manifest

    def _check_room(self, num_bytes: int) -> None:
        need = num_bytes + _MORE_BYTES
        parent = next((p for p in (self.out, *self.out.absolute().parents) if p.is_dir()), Path("/"))
        free = shutil.disk_usage(parent).free
        if free < need:
            raise StorageError(f"no room for {self.out}: it may need {need >> 20} MiB, {free >> 20} are free")

    def read_state(self) -> State | None:
        """The state to go on from; ``None`` where no run came so far.

        Raises:
            OptionError: the file is damaged.
        """
        path = self.out / STATE
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                facts = json.loads(file.metadata()["facts"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
            if _digest(tensors) != facts["sha256"]:
                raise EvidenceError("its hash is another")
            return State(step=facts["step"], tensors=tensors, history=facts["history"], tally=facts["tally"])
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, EvidenceError) as error:
            raise OptionError(f"{path} is damaged: {error}; name another folder with --out") from error

    def drop_after(self, step: int) -> None:
        """Remove what a killed run left half written, and checkpoints of steps that will be done again."""
        for path in self.out.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.out.glob("step-[0-9]*"):
            if int(path.name.partition("-")[2]) > step:
                shutil.rmtree(path)

    def write_state(self, state: State) -> None:
        """Replace the state, whole or not at all, and write the history it holds."""
        write_lines(self.out / HISTORY, state.history)
        facts = {"step": state.step, "history": state.history, "tally": state.tally,
                 "sha256": _digest(state.tensors)}  # fmt: skip
        part = self.out / f".{STATE}-part"
        try:
            safetensors.torch.save_file(state.tensors, part, metadata={"facts": canonical(facts)})
            _flush(part)
            part.replace(self.out / STATE)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"cannot write {self.out / STATE}: {error}") from error
        finally:
            part.unlink(missing_ok=True)

    def write_head(self, step: int, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
        """A checkpoint as a head folder that appears whole or not at all; its path.

        Args:
            step: after which it was taken.
            tensors: by checkpoint name, in the dtype to store.
            facts: of the head, for ``head.json``.
        """
        whole = self.out / step_name(step)
        part = self.out / f".{step_name(step)}"
        try:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            stored = {name: tensor.contiguous() for name, tensor in tensors.items()}
            safetensors.torch.save_file(stored, part / HEAD, metadata={"format": "pt"})
            _flush(part / HEAD)
            digest = hashlib.sha256((part / HEAD).read_bytes()).hexdigest()
            about = {
                "format_version": FORMAT_VERSION,
                "kind": "head",
                "step": step,
                **facts,
                "sha256": digest,
            }
            write_atomic(part / HEAD_FACTS, _pretty(about))
            write_atomic(part / PROVENANCE, _pretty({"request": self._request, "runs": self._runs}))
            shutil.rmtree(whole, ignore_errors=True)
            part.replace(whole)
        except (OSError, SafetensorError) as error:
            raise StorageError(f"cannot write {whole}: {error}") from error
        return whole

    def write_manifest(self, status: str, summary: Mapping[str, Any]) -> None:
        """Write what is trained, by which runs, how far, and what came of it."""
        body = {"format_version": FORMAT_VERSION, "kind": "head training", "status": status,
                "request": self._request, "runs": self._runs, "summary": dict(summary)}  # fmt: skip
        digest = hashlib.sha256(canonical(body).encode()).hexdigest()
        write_atomic(self.out / MANIFEST, _pretty({**body, "hash": digest}))

    def write_page(self, page: str) -> None:
        """Write the plots."""
        write_atomic(self.out / PAGE, page)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a training folder, its hash checked.

    Raises:
        OptionError: it is damaged.
    """
    path = folder / MANIFEST
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        digest = document.pop("hash")
        check_version(document)
        if hashlib.sha256(canonical(document).encode()).hexdigest() != digest:
            raise EvidenceError("its hash is another")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EvidenceError) as error:
        raise OptionError(f"{path} is damaged: {error}; name another folder with --out") from error
    return document


def checkpoints(folder: Path) -> Sequence[Path]:
    """The head folders of a training, in the order of their steps."""
    return sorted(folder.glob("step-[0-9]*"))


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _flush(path: Path) -> None:
    """Onto the disk, and readable as other files are: safetensors writes for the owner alone."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.fchmod(stream.fileno(), 0o644)


def _pretty(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
