"""Several processes training one head: who this one is, and what all of them must agree on.

``torchrun`` starts them and says so in the environment. Every process knows the whole batch of a step and
takes every so-many-th row of it, so the sum of what they learn is what one process learns. The first one
alone writes; what it decides, an error included, all of them hear.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from draftproof.errors import DraftproofError, OptionError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """``rank`` of this process among ``size``."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this one writes."""
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module with gradients averaged over the team; itself where there is none."""
        return DistributedDataParallel(module) if self.size > 1 else module

    def decide(self, make: Callable[[], T]) -> T:
        """What the first process made of it, or the error it met, in every process."""
        if self.size == 1:
            return make()
        box: list[Any] = [None, None]
        if self.is_first:
            try:
                box[0] = make()
            except DraftproofError as error:
                box[1] = error
        dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            dist.barrier()  # so that none is gone before all have heard
            raise box[1]
        made: T = box[0]
        return made

    def sums(self, values: list[float], device: torch.device) -> list[float]:
        """The sums over processes."""
        if self.size == 1:
            return values
        summed = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(summed)
        return [float(value) for value in summed.tolist()]

    def leave(self) -> None:
        """End the team."""
        if self.size > 1:
            dist.destroy_process_group()


def join(device: torch.device) -> Team:
    """The team that ``torchrun`` started, over NCCL on CUDA and gloo elsewhere; alone where none was.

    Raises:
        OptionError: the processes cannot find each other.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Team()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL sends objects from the current one
    try:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:
        raise OptionError(f"the {size} processes of torchrun do not meet: {error}") from error
    return Team(rank=dist.get_rank(), size=size)


def own_device(device: str) -> torch.device:
    """The device of this process: with ``cuda``, the GPU of its number on this machine.

    Raises:
        OptionError: there is no such device here.
    """
    try:
        if device == "cuda" and "LOCAL_RANK" in os.environ:
            return torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        made = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"unknown device {device!r}: try cpu or cuda") from error
    if made.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"no device {device!r}: torch sees no GPU here")
    return made
