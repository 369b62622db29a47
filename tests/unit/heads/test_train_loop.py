"""The loop's own parts: shares of a batch add up, an interrupt ends a step, a lost loss stops."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from draftproof.errors import EvidenceError, OptionError
from draftproof.heads import train_loop
from draftproof.heads.train import train_head
from draftproof.heads.train_data import Batch, Example, collate
from draftproof.heads.train_loop import Unrolled, interrupt_noted
from draftproof.heads.train_model import FrozenTarget, TrainableHead
from draftproof.heads.train_settings import TrainSettings
from draftproof.models.load import read_config

CPU, FP32 = torch.device("cpu"), torch.float32


def test_shares_of_a_batch_add_up_to_the_whole(train_settings: Callable[..., TrainSettings]) -> None:
    """Also a share of nothing, which a process without a row takes."""
    settings = train_settings()
    folder = Path(settings.model)
    head, target = TrainableHead(read_config(folder)), FrozenTarget(folder, FP32, CPU)
    head.start_fresh(target, 1)
    unrolled = Unrolled(head, target, settings)
    examples = [Example(ids=tuple(range(40, 60 - i)), prompt_length=3, is_sampled=False) for i in (0, 2, 9)]
    places = torch.tensor([sum(e.num_places - k for e in examples) for k in range(2)])
    whole = unrolled(collate(examples, 2, CPU), places)
    whole.backward()
    want = torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])
    head.zero_grad()
    empty = collate(examples[:1], 2, CPU)
    empty = Batch(ids_BL=empty.ids_BL, is_place_KBT=torch.zeros_like(empty.is_place_KBT))
    parts = [unrolled(batch, places) for batch in (
        collate(examples[::2], 2, CPU), collate(examples[1::2], 2, CPU), empty
    )]  # fmt: skip
    assert parts[2].item() == 0
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-5)
    for part in parts:
        part.backward()
    got = torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])
    assert torch.allclose(got, want, rtol=1e-3, atol=1e-6)


def test_autocast_changes_the_arithmetic_and_not_the_weights(
    train_settings: Callable[..., TrainSettings],
) -> None:
    settings = train_settings(autocast=True)
    folder = Path(settings.model)
    head, target = TrainableHead(read_config(folder)), FrozenTarget(folder, FP32, CPU)
    head.start_fresh(target, 1)
    batch = collate([Example(ids=tuple(range(40, 60)), prompt_length=3, is_sampled=False)], 2, CPU)
    rough, _ = Unrolled(head, target, settings).rows(batch)
    exact, _ = Unrolled(head, target, train_settings()).rows(batch)
    assert not torch.equal(rough, exact)
    assert torch.allclose(rough.float(), exact, rtol=0.05, atol=0.05 * exact.abs().max().item())
    assert {p.dtype for p in head.parameters()} == {FP32}


class TestInterrupt:
    def test_the_first_is_noted_and_the_second_breaks_off(self) -> None:
        before = signal.getsignal(signal.SIGINT)
        with interrupt_noted() as is_interrupted:
            assert not is_interrupted()
            os.kill(os.getpid(), signal.SIGINT)
            assert is_interrupted()
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is before

    def test_other_threads_leave_signals_alone(self) -> None:
        found: list[bool] = []

        def run() -> None:
            with interrupt_noted() as is_interrupted:
                found.append(is_interrupted())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert found == [False]


def test_a_loss_that_is_no_number_stops_the_run(
    train_settings: Callable[..., TrainSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train_loop.distil
    monkeypatch.setattr(train_loop, "distil", lambda *a: (plain(*a)[0] * float("nan"), None))
    with pytest.raises(OptionError, match="the loss of step 1 is nan: train with a lower --lr"):
        train_head(train_settings(), tmp_path / "t", lambda *_: None, provenance={})


def test_a_target_that_changed_is_an_error_of_ours(
    train_settings: Callable[..., TrainSettings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train_loop.Run._step

    def meddling(self: train_loop.Run, step: int) -> float:
        with torch.no_grad():
            self._scene.target.final_norm[0] += 1e-3
        return plain(self, step)

    monkeypatch.setattr(train_loop.Run, "_step", meddling)
    with pytest.raises(EvidenceError, match="the target's weights changed during training"):
        train_head(train_settings(steps=1), tmp_path / "t", lambda *_: None, provenance={})
