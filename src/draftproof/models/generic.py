"""Any other ``transformers`` causal LM: the module's own forward over all rows, its own cache cropped.

Verification runs other kernels than one-row decoding, so the claim is weaker: ``guarded`` once a margin
bound has been calibrated on this machine, ``unproved`` without one. Refuses, before the first token, to
draft on caches that cannot be cropped (recurrent state).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from draftproof.errors import DrafterError, RollbackError


class GenericTarget:
    """A loaded transformers module; implements ``models.base.Target``."""

    def __init__(self, module: Any, max_rows: int = 32) -> None:
        config = module.config.get_text_config()
        self.module = module
        self.name = str(config.model_type)
        self.vocab_size = int(config.vocab_size)
        self.max_context = int(getattr(config, "max_position_embeddings", None) or 1 << 20)
        self.max_rows = max_rows
        names = inspect.signature(module.forward).parameters
        self.cache_name = "cache" if "cache" in names else "past_key_values"

    @property
    def nbytes(self) -> int:
        """Bytes of parameters."""
        return sum(p.nbytes for p in self.module.parameters())

    def refuse_drafting(self) -> str | None:
        """Why a verification cannot be undone on this model, or ``None``."""
        cache = DynamicCache(config=self.module.config)
        for index, layer in enumerate(cache.layers):
            if not getattr(layer, "is_croppable", True):
                return f"layer {index} keeps a state that cannot be rolled back ({type(layer).__name__})"
        if getattr(self.module, "_is_stateful", False):
            return f"{type(self.module).__name__} keeps a state that cannot be rolled back"
        return None

    def open(self, capacity: int) -> GenericSession:
        """A session; ``capacity`` is only a limit, as the module's cache grows by itself."""
        return GenericSession(self, capacity)


class GenericSession:
    """One request on a ``GenericTarget``; implements ``models.base.Session``."""

    def __init__(self, target: GenericTarget, capacity: int) -> None:
        self._target, self._capacity = target, capacity
        self._can_crop = target.refuse_drafting() is None
        self._cache = DynamicCache(config=target.module.config)
        self._length = self._pending = 0

    @property
    def num_cached(self) -> int:
        """Committed positions."""
        return self._length

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int]) -> Tensor:
        """Run the prompt as stock does; returns the last position's logits, ``[V]``."""
        if self._length or self._pending:
            raise RollbackError("a prompt can only fill an empty cache")
        logits = self._forward(token_ids, last_only=True)
        self._length = len(token_ids)
        if self._can_crop and hasattr(self._cache, "activate_past_recording"):
            self._cache.activate_past_recording()
        return logits[-1]

    @torch.inference_mode()
    def verify(self, token_ids: Sequence[int]) -> Tensor:
        """Run ``token_ids`` after the rows already pending; returns logits ``[T, V]``."""
        if self._length + self._pending + len(token_ids) > self._capacity:
            raise RollbackError(f"cache full: capacity {self._capacity}")
        logits = self._forward(token_ids, last_only=False)
        self._pending += len(token_ids)
        return logits

    def commit(self, num_rows: int) -> None:
        """Keep the first ``num_rows`` pending rows, drop the rest."""
        if not 0 <= num_rows <= self._pending:
            raise RollbackError(f"cannot commit {num_rows} of {self._pending} pending rows")
        if not self._can_crop and num_rows < self._pending:
            raise DrafterError(self._target.refuse_drafting() or "the cache cannot be cropped")
        if self._can_crop:
            self._cache.crop(num_rows - self._pending)  # 0 drops nothing but what left a sliding window
        self._length += num_rows
        self._pending = 0

    def _forward(self, token_ids: Sequence[int], *, last_only: bool) -> Tensor:
        module = self._target.module
        ids = torch.tensor([list(token_ids)], dtype=torch.long, device=module.device)
        keep = {"logits_to_keep": 1} if last_only else {}
        out = module(input_ids=ids, use_cache=True, **{self._target.cache_name: self._cache}, **keep)
        logits: Tensor = out.logits[0]
        return logits
