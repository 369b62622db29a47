"""A checkpoint folder as named tensors: every key used once, every weight set, or refuse.

Every tensor is a view of a mapping of its own, which goes away with it: packing a layer leaves nothing of
the file behind, so the process never holds the checkpoint and the packed weights together. The embedding
stays mapped: a decode touches a few of its rows, and only those become resident.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftproof.errors import ModelFileError

FLOATS = ("bfloat16", "float16", "float32")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Weights:
    """Tensors of a safetensors checkpoint, handed out once each.

    Args:
        folder: hub folder with ``model.safetensors`` or an index and its shards.
        dtype: what ``take`` converts to.
        device: where ``take`` puts tensors.
        renamed: name prefixes as stored, to those asked for; tensors under one mapped to ``None`` are none of
            this model's.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype, device: torch.device,
        renamed: Mapping[str, str | None] | None = None,
    ) -> None:  # fmt: skip
        self._dtype, self._device = dtype, device
        self._files: dict[str, Path] = {}
        self._stored: dict[str, str] = {}
        for stored, file in _index(folder).items():
            name = asked_name(stored, renamed or {})
            if name is not None:
                self._files[name], self._stored[name] = file, stored
        self._left = set(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def has_any(self, prefix: str) -> bool:
        """Whether a tensor under ``prefix`` is left."""
        return any(name.startswith(prefix) for name in self._left)

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor ``name``, checked against ``shape``, in this checkpoint's dtype and device.

        It stays in the mapped file where it already has the dtype and lives on the CPU.
        """
        tensor = self.peek(name, shape)
        self._left.discard(name)
        return tensor

    def forget(self, name: str) -> None:
        """Mark ``name`` as deliberately unused (a tied copy)."""
        self._left.discard(name)

    def finish(self) -> None:
        """Refuse a checkpoint with tensors nobody asked for."""
        if self._left:
            some = ", ".join(sorted(self._left)[:3])
            raise ModelFileError(
                f"the checkpoint holds {len(self._left)} tensors this architecture does not use: {some}"
            )

    def peek(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The same tensor through a mapping of its own, without counting it as used."""
        if name not in self._left:
            raise ModelFileError(f"the checkpoint lacks the tensor {name!r}")
        try:
            with safe_open(self._files[name], framework="pt") as file:
                tensor: Tensor = file.get_tensor(self._stored[name])
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"cannot read {self._files[name]}: {error}") from error
        why = misfit(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), shape)
        if why is not None:
            raise ModelFileError(why)
        return tensor.to(device=self._device, dtype=self._dtype)

    def repeats(self, name: str, original: Tensor) -> bool:
        """Whether the tensor ``name`` holds the numbers of ``original``, without counting as used."""
        return torch.equal(self.peek(name, tuple(original.shape)), original)


def misfit(name: str, found: tuple[int, ...], dtype: str, shape: tuple[int, ...]) -> str | None:
    """Why a stored tensor cannot be the weight of ``shape`` that is asked for, or ``None``."""
    if found != shape:
        return f"{name} is {found}, expected {shape}"
    if dtype not in FLOATS:
        return f"{name} is {dtype}, expected bfloat16, float16 or float32"
    return None


def asked_name(stored: str, renamed: Mapping[str, str | None]) -> str | None:
    """The name to ask for a stored tensor by, ``None`` when nobody should."""
    for prefix, instead in renamed.items():
        if stored.startswith(prefix):
            return None if instead is None else instead + stored.removeprefix(prefix)
    return stored


def identity(folder: Path) -> str:
    """The folder's name and a hash over its weight files' paths, sizes and times: what was measured once."""
    files = sorted(folder.glob("*.safetensors"))
    facts = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return f"{folder.name}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"


def weight_map(folder: Path) -> dict[str, Path] | None:
    """Tensor name to shard as the index has it, whether or not the shards are there; ``None`` without one."""
    file = folder / INDEX
    if not file.exists():
        return None
    try:
        named: dict[str, str] = json.loads(file.read_text())["weight_map"]
        return {name: folder / shard for name, shard in named.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"cannot read the weights in {folder}: {error}") from error


def single_file(folder: Path) -> Path:
    """The one file of a checkpoint without an index, which must be there."""
    file = folder / SINGLE
    if not file.exists():
        raise ModelFileError(f"{folder} has no model.safetensors and no index")
    return file


def _index(folder: Path) -> dict[str, Path]:
    """Tensor name to shard file; all of them there."""
    files = weight_map(folder)
    if files is not None:
        missing = sorted({file.name for file in files.values() if not file.exists()})
        if missing:
            raise ModelFileError(f"{folder} lacks the shards {', '.join(missing)}")
        return files
    single = single_file(folder)
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelFileError(f"cannot read the weights in {folder}: {error}") from error
