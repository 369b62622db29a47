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

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


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
            name = _renamed(stored, renamed or {})
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
        if tuple(tensor.shape) != shape:
            raise ModelFileError(f"{name} is {tuple(tensor.shape)}, expected {shape}")
        if tensor.dtype not in _FLOATS:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ModelFileError(f"{name} is {kind}, expected bfloat16, float16 or float32")
        return tensor.to(device=self._device, dtype=self._dtype)


def _renamed(stored: str, renamed: Mapping[str, str | None]) -> str | None:
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


def _index(folder: Path) -> dict[str, Path]:
    """Tensor name to shard file."""
    index_file = folder / "model.safetensors.index.json"
    try:
        if index_file.exists():
            weight_map: dict[str, str] = json.loads(index_file.read_text())["weight_map"]
            files = {name: folder / shard for name, shard in weight_map.items()}
            missing = sorted({f.name for f in files.values() if not f.exists()})
            if missing:
                raise ModelFileError(f"{folder} lacks the shards {', '.join(missing)}")
            return files
        single = folder / "model.safetensors"
        if not single.exists():
            raise ModelFileError(f"{folder} has no model.safetensors and no index")
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"cannot read the weights in {folder}: {error}") from error
