"""The steps of a training: forward, backward, checkpoints, and a stop between two steps.

Letters: B rows, L tokens, T slots, D hidden, K draft steps, N places.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn

from draftproof.clock import Clock, RealClock
from draftproof.errors import EvidenceError, OptionError
from draftproof.heads.train_data import Batch, Example, Order, collate, sample
from draftproof.heads.train_loss import Loss, distil
from draftproof.heads.train_model import FrozenTarget, TrainableHead
from draftproof.heads.train_settings import TrainSettings, rate_at
from draftproof.heads.train_state import State, TrainFolder, gather, restore
from draftproof.heads.train_team import Team
from draftproof.heads.train_watch import watch
from draftproof.models.load import DTYPES
from draftproof.report.training import render_training

Report = Callable[[str, int, int], None]
SPLITS = ("train", "held_out")
_BETAS = (0.9, 0.95)


class Unrolled(nn.Module):
    """The head and its loss in one call, as ``DistributedDataParallel`` asks; the target is no part of it."""

    def __init__(self, head: TrainableHead, target: FrozenTarget, settings: TrainSettings) -> None:
        super().__init__()
        self.head = head
        self._frozen, self._settings = (target,), settings
        self._weights_K = torch.tensor(settings.weights(), device=target.device)

    def rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The head's rows ``[K, B, T, D]`` and the target's hidden rows ``[B, L, D]``."""
        (target,) = self._frozen
        hidden_BLD = target.hidden(batch.ids_BL)
        embedded_BTD = nn.functional.embedding(batch.ids_BL[:, 1:], target.embedding_VD).float()
        with torch.autocast(target.device.type, torch.bfloat16, enabled=self._settings.has_autocast):
            rows_KBTD = self.head(embedded_BTD, hidden_BLD[:, :-1].float(), len(batch.is_place_KBT))
        return rows_KBTD, hidden_BLD

    def forward(self, batch: Batch, num_places_K: Tensor) -> Tensor:
        """The weighted loss: of every draft step the sum over the batch's places, over ``num_places_K``."""
        (target,) = self._frozen
        rows_KBTD, hidden_BLD = self.rows(batch)
        is_used_BT = batch.is_place_KBT.any(0)
        weight_K1 = (self._weights_K / num_places_K.clamp(min=1))[:, None]
        total, _ = distil(
            rows_KBTD[:, is_used_BT].float(), hidden_BLD[:, 1:][is_used_BT],
            batch.is_place_KBT[:, is_used_BT] * weight_K1, target.output_VD,
            cast("Loss", self._settings.loss),
        )  # fmt: skip
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What a run works with besides its settings.

    Attributes:
        place: its folder.
        report: hears of (stage, done, total).
        team: the processes.
        target: the frozen teacher.
        head: what is trained, on the target's device.
        examples: rows by split, ``train`` and ``held_out``.
        facts: of the head, kept with every checkpoint; ``target_sha256`` is compared again at the end.
    """

    place: TrainFolder
    report: Report
    team: Team
    target: FrozenTarget
    head: TrainableHead
    examples: Mapping[str, Sequence[Example]]
    facts: Mapping[str, Any]


class Run:
    """One run of a training, from a state or from the start.

    Args:
        settings: what to train and how.
        scene: what it works with.
        rate: highest learning rate.
        clock: what times it.
    """

    def __init__(
        self, settings: TrainSettings, scene: Scene, rate: float, clock: Clock | None = None
    ) -> None:
        self._settings, self._scene, self._rate = settings, scene, rate
        self._clock = clock or RealClock()
        self._unrolled = Unrolled(scene.head, scene.target, settings)
        self._wrapped = scene.team.wrap(self._unrolled)
        self._parts = scene.head.parts()
        parameters = list(self._parts.values())
        matrices = {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay}
        vectors = {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0}
        self._optimizer = torch.optim.AdamW([matrices, vectors], lr=rate, betas=_BETAS)
        examples = scene.examples["train"]
        self._order = Order([len(e.ids) for e in examples], settings.batch_tokens, settings.seed)
        self.num_steps = settings.steps or self._order.steps(settings.epochs or 0)
        self._samples = {
            name: sample(scene.examples[name], settings.sample_rows, settings.seed) for name in SPLITS
        }
        self._history: list[dict[str, Any]] = []
        self._tally = dict.fromkeys(("loss", "steps", "tokens", "seconds"), 0.0)

    def go(self, state: State | None) -> dict[str, Any]:
        """Train to the end or to Ctrl-C; the summary, with ``status``."""
        step = 0
        if state is not None:
            restore(state, self._parts, self._optimizer)
            step, self._history, self._tally = state.step, list(state.history), dict(state.tally)
        if self._scene.team.is_first:
            self._scene.place.drop_after(step)
            self._scene.place.write_manifest("partial", self._summary(step))
        if state is None:
            self._look(step)
        step, status = self._steps(step)
        if self._scene.target.sha256() != self._scene.facts["target_sha256"]:
            raise EvidenceError("the target's weights changed during training")
        summary = self._summary(step)
        if self._scene.team.is_first:
            self._scene.place.write_manifest(status, summary)
        return {**summary, "status": status}

    def _steps(self, step: int) -> tuple[int, str]:
        """Steps up to the end, or up to an interrupt, whose step is finished and kept."""
        every, team = self._settings.every(self.num_steps), self._scene.team
        with interrupt_noted() as is_interrupted:
            while step < self.num_steps:
                start = self._clock.now_ns()
                told = [self._step(step), float(is_interrupted())]
                loss, is_over = team.sums(told, self._scene.target.device)
                step += 1
                self._count(step, loss, start)
                if step % every == 0 or step == self.num_steps:
                    self._look(step)
                elif is_over:
                    self._save(step)
                if is_over and step < self.num_steps:
                    return step, "interrupted"
        return step, "complete"

    def _step(self, step: int) -> float:
        """One step of the optimiser; this process's part of the loss."""
        _, rows = self._order.at(step)
        team, device = self._scene.team, self._scene.target.device
        examples = [self._scene.examples["train"][row] for row in rows]
        depth = self._settings.depth
        places = [sum(max(e.num_places - k, 0) for e in examples) for k in range(depth)]
        self._tally["tokens"] += places[0]
        batch = collate(examples[team.rank :: team.size] or examples[:1], depth, device)
        if team.rank >= len(examples):  # nothing is left for this process, but all must take part
            batch = Batch(ids_BL=batch.ids_BL, is_place_KBT=torch.zeros_like(batch.is_place_KBT))
        share = rate_at(step, self.num_steps, self._settings.warmup)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * share
        total = self._wrapped(batch, torch.tensor(places, device=device))
        self._optimizer.zero_grad()
        (total * team.size).backward()  # gradients are averaged over the team
        nn.utils.clip_grad_norm_(list(self._parts.values()), self._settings.clip)
        self._optimizer.step()
        return float(total.item())

    def _count(self, step: int, loss: float, start_ns: int) -> None:
        if not math.isfinite(loss):
            raise OptionError(f"the loss of step {step} is {loss}: train with a lower --lr in another --out")
        self._tally["loss"] += loss
        self._tally["steps"] += 1
        self._tally["seconds"] += (self._clock.now_ns() - start_ns) / 1e9
        told = f"step {step} of {self.num_steps}: loss {loss:.3f}"
        if self._history:
            told += f", held-out length {self._history[-1]['held_out']['acceptance_length']:.2f}"
        self._scene.report(told, step, self.num_steps)

    def _look(self, step: int) -> None:
        """Note how good the head is, and keep it; the untrained one is only noted."""
        if not self._scene.team.is_first:
            return
        tally = self._tally
        row: dict[str, Any] = {
            "step": step, "epoch": self._order.at(step - 1)[0] if step else 0,
            "rate": self._rate * rate_at(max(step - 1, 0), self.num_steps, self._settings.warmup),
            "num_tokens": int(tally["tokens"]), "seconds": tally["seconds"],
            "training_loss": tally["loss"] / tally["steps"] if tally["steps"] else None,
        }  # fmt: skip
        for name, examples in self._samples.items():
            row[name] = watch(
                examples, self._rows, self._scene.target, num_steps=self._settings.depth,
                loss=cast("Loss", self._settings.loss), batch_tokens=self._settings.batch_tokens,
                report=lambda done, total, name=name: self._scene.report(  # type: ignore[misc]
                    f"step {step}: {name.replace('_', '-')} acceptance", done, total
                ),
            ).row()  # fmt: skip
        self._history.append(row)
        tally["loss"] = tally["steps"] = 0.0
        if step:
            dtype = DTYPES[self._settings.dtype]
            tensors = {name: p.detach().to(dtype).cpu() for name, p in self._parts.items()}
            self._scene.place.write_head(step, tensors, {**self._scene.facts, "measured": row})
        self._save(step)

    @torch.no_grad()
    def _rows(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._unrolled.rows(batch)

    def _save(self, step: int) -> None:
        if not self._scene.team.is_first:
            return
        self._scene.place.write_state(State(
            step=step, tensors=gather(self._parts, self._optimizer), history=self._history,
            tally=self._tally,
        ))  # fmt: skip
        self._scene.place.write_page(render_training(self._scene.facts, self._history))

    def _summary(self, step: int) -> dict[str, Any]:
        kept = [row for row in self._history if row["step"]]
        best = max(kept, key=lambda row: row["held_out"]["acceptance_length"], default=None)
        return {
            **self._scene.facts, "out": str(self._scene.place.out), "step": step, "num_steps": self.num_steps,
            "best_step": None if best is None else best["step"],
            "num_rows": {name: len(rows) for name, rows in self._scene.examples.items()},
            "num_sample_rows": {name: len(rows) for name, rows in self._samples.items()},
            "history": self._history,
        }  # fmt: skip


@contextmanager
def interrupt_noted() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: the step it falls into is finished; a second one breaks off at once."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # signals are the main thread's
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, before)
