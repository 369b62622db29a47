"""What a head is trained on and how, checked before anything is loaded; and the schedule of its rate."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from draftproof.errors import OptionError
from draftproof.heads.train_loss import LOSSES

_LAST_RATE = 0.05
_FRESH_RATE, _TUNE_RATE = 1e-3, 2e-4
_CHECKPOINTS = 10
FRESH, NATIVE = "fresh", "native"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """What to train and how; ``steps`` or ``epochs``, and all but ``threads`` decides the weights.

    Attributes:
        depth: draft steps unrolled.
        batch_tokens: most tokens of a step, over all processes.
        loss: as in ``train_loss.divergence``.
        step_decay: the loss of draft step ``k`` weighs ``step_decay ** (k - 1)``, the weights summing to 1.
        rate: highest learning rate; ``None``: 1e-3 for a fresh head, else 2e-4.
        warmup: share of the steps over which the rate rises.
        clip: largest norm of the gradient.
        start: ``fresh``, ``native`` (the checkpoint's own head), or a head's folder; ``None``: native where
            there is one.
        checkpoint_every: steps between checkpoints; ``None``: a tenth of all.
        sample_rows: rows of each split that acceptance is measured on.
        autocast: bf16 arithmetic in the head; its weights are fp32. ``None``: where the target is bf16.
    """

    model: str
    corpus: str
    dtype: str
    device: str
    depth: int
    epochs: int | None
    steps: int | None
    batch_tokens: int
    loss: str
    step_decay: float
    rate: float | None
    warmup: float
    weight_decay: float
    clip: float
    seed: int
    start: str | None
    checkpoint_every: int | None
    sample_rows: int
    autocast: bool | None
    threads: int | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise OptionError("give either --epochs or --steps")
        counts = {"epochs": self.epochs, "steps": self.steps, "depth": self.depth,
                  "batch-tokens": self.batch_tokens, "checkpoint-every": self.checkpoint_every,
                  "sample-rows": self.sample_rows, "threads": self.threads}  # fmt: skip
        for name, count in counts.items():
            if count is not None and count < 1:
                raise OptionError(f"--{name} must be 1 or more, got {count}")
        for name, value in {"lr": self.rate, "clip": self.clip, "step-decay": self.step_decay}.items():
            if value is not None and not 0 < value < math.inf:
                raise OptionError(f"--{name} must be above 0, got {value}")
        for name, share in {"warmup": self.warmup, "weight-decay": self.weight_decay}.items():
            if not 0 <= share < 1:
                raise OptionError(f"--{name} must be from 0 to less than 1, got {share}")
        if self.loss not in LOSSES:
            raise OptionError(f"unknown loss {self.loss!r}; known: {', '.join(LOSSES)}")
        if self.dtype not in ("bfloat16", "float32"):
            raise OptionError(f"heads are trained beside a bfloat16 or float32 target, not {self.dtype!r}")

    @property
    def has_autocast(self) -> bool:
        """Whether the head computes in bf16."""
        return self.dtype == "bfloat16" if self.autocast is None else self.autocast

    def request(self, start: str) -> dict[str, Any]:
        """What decides the weights, defaults filled in; threads and processes change no more than rounding.

        Args:
            start: what the head starts from, known once the checkpoint was looked at.
        """
        made = asdict(self) | {"start": start, "rate": self.rate_from(start), "autocast": self.has_autocast}
        del made["threads"]
        return made

    def rate_from(self, start: str) -> float:
        """The highest learning rate of a head that starts so."""
        return self.rate or (_FRESH_RATE if start == FRESH else _TUNE_RATE)

    @property
    def most_checkpoints(self) -> int:
        """How many are reckoned with when room is looked for."""
        if self.checkpoint_every is None or self.steps is None:
            return _CHECKPOINTS
        return math.ceil(self.steps / self.checkpoint_every)

    def every(self, num_steps: int) -> int:
        """Steps between checkpoints."""
        return self.checkpoint_every or max(math.ceil(num_steps / _CHECKPOINTS), 1)

    def weights(self) -> list[float]:
        """Of every draft step's loss; they sum to 1."""
        raw = [self.step_decay**step for step in range(self.depth)]
        return [weight / sum(raw) for weight in raw]


def rate_at(step: int, num_steps: int, warmup: float) -> float:
    """Share of the highest rate at ``step``, from 0: a linear rise, then half a cosine to a twentieth."""
    rise = max(round(warmup * num_steps), 1)
    if step < rise:
        return (step + 1) / rise
    through = (step - rise) / max(num_steps - rise, 1)
    return _LAST_RATE + (1 - _LAST_RATE) * 0.5 * (1 + math.cos(math.pi * through))
