"""The trainable head is ``NativeHead``'s function, and its draft steps are the engine's drafter's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from draftproof.drafters.mtp import head_of
from draftproof.errors import ArchitectureError, ModelFileError, OptionError
from draftproof.heads.train_model import (
    FAMILIES,
    FrozenTarget,
    TrainableHead,
    check_target,
    has_native,
    unroll_mask,
)
from draftproof.models.decoder import DecoderTarget
from draftproof.models.load import attach_head, read_config
from draftproof.record import OpEvidence, Plan

CPU, FP32 = torch.device("cpu"), torch.float32
KINDS = ("llama", "qwen3", "gemma3_text", "qwen3_5_mtp", "glm4_moe_mtp")
IDS = torch.tensor([(5 * i * i + 3 * i + 7) % 288 for i in range(30)])
NUM_STEPS = 4
# Both sides compute in fp32 and in another order: rows are of size 1 to 10 after a few hundred roundings.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def plan_of() -> Plan:
    """Forms of the layer's linears, all that is asked of a plan here."""
    ops = tuple(
        OpEvidence(op=op, shape=(), form="plain", max_rows=32, is_exact=True, num_checked=0)
        for op in ("qkv", "out", "gate_up", "down")
    )
    return Plan(claim="unproved", dtype="float32", fingerprint="", ops=ops, max_rows=32)


def lively(head: TrainableHead, seed: int = 3) -> TrainableHead:
    """Weights of a size at which attention matters, norms uneven."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(2 * noise / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.3 * noise)
    return head


def saved(head: TrainableHead, folder: Path) -> Path:
    folder.mkdir()
    tensors = {name: parameter.detach().clone() for name, parameter in head.parts().items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(params=KINDS)
def made(
    request: pytest.FixtureRequest, tiny_folder: Callable[..., Path], tiny_target: Callable[..., Any],
    tmp_path: Path,
) -> tuple[TrainableHead, FrozenTarget, DecoderTarget]:  # fmt: skip
    """A head, its frozen target, and the engine's target with the head attached from its folder."""
    folder = tiny_folder(request.param, FP32)
    head = lively(TrainableHead(read_config(folder)))
    headed = attach_head(tiny_target(request.param, FP32), saved(head, tmp_path / "head"), plan_of())
    return head, FrozenTarget(folder, FP32, CPU), headed


def unrolled(head: TrainableHead, target: FrozenTarget, num_steps: int) -> tuple[Tensor, Tensor]:
    """Rows ``[K, T, D]`` along ``IDS`` and the target's hidden rows ``[L, D]``."""
    hidden = target.hidden(IDS[None])
    embedded = torch.nn.functional.embedding(IDS[None, 1:], target.embedding_VD)
    with torch.no_grad():
        return head(embedded, hidden[:, :-1], num_steps)[:, 0], hidden[0]


def test_it_computes_what_the_engines_head_computes(
    made: tuple[TrainableHead, FrozenTarget, DecoderTarget],
) -> None:
    head, target, headed = made
    rows, hidden = unrolled(head, target, 1)
    engine = head_of(headed)
    out = engine.open(64, 16, headed.tables(64)).prefill(IDS[1:], hidden[:-1])
    assert torch.allclose(rows[0], engine.readable(out), **CLOSE)
    assert rows[0].std() > 0.1
    session = headed.open(64)
    session.hidden.keep()
    session.prefill(IDS.tolist())
    assert torch.allclose(session.hidden.take(), hidden, **CLOSE), "the rows it reads are the engine's"


def test_every_draft_step_is_the_drafters(made: tuple[TrainableHead, FrozenTarget, DecoderTarget]) -> None:
    """The engine's session, fed the text's tokens where the drafter feeds its own choice."""
    head, target, headed = made
    rows, hidden = unrolled(head, target, NUM_STEPS)
    engine = head_of(headed)
    trained = rows @ target.output_VD.T
    for start in (0, 1, 7, 20, len(IDS) - 2 - NUM_STEPS):
        session = engine.open(64, 16, headed.tables(64))
        out = session.catch_up(IDS[1 : start + 2], hidden[: start + 1])
        for step in range(NUM_STEPS):
            logits = engine.output.rows(engine.readable(out))[0]
            assert torch.allclose(trained[step, start + step], logits, rtol=1e-4, atol=1e-3)
            out = session.extend(IDS[start + step + 2 : start + step + 3], out)
        session.cache.commit(0)
    apart = (trained[0, 1:] - trained[1, 1:]).abs().max()
    assert apart > 0.1, "steps that read a guess must differ from those that read the real row"


def test_a_row_knows_nothing_of_later_tokens_or_other_rows(tiny_folder: Callable[..., Path]) -> None:
    head = lively(TrainableHead(read_config(tiny_folder("llama", FP32))))
    generator = torch.Generator().manual_seed(1)
    embedded, hidden = (torch.randn(2, 12, 64, generator=generator) for _ in range(2))
    with torch.no_grad():
        whole = head(embedded, hidden, 3)
        cut = head(embedded[:1, :9], hidden[:1, :9], 3)
    assert torch.allclose(whole[:, :1, :9], cut, **CLOSE)


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_the_mask_is_the_drafters_cache(num_slots: int) -> None:
    """Real slots up to where the draft began, then one guess a step: read off a list of what is cached."""
    for step in range(1, 4):
        mask = unroll_mask(num_slots, step, CPU)
        assert mask.shape == (num_slots, (step + 1) * num_slots)
        for q in range(num_slots):
            real = [k for k in range(num_slots) if k <= q - step]
            guesses = [
                earlier * num_slots + q - step + earlier
                for earlier in range(1, step + 1)
                if q - step + earlier >= 0
            ]
            assert mask[q].nonzero().flatten().tolist() == real + guesses


def test_gradients_reach_every_parameter_and_none_of_the_target(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder("qwen3_5_mtp", FP32)
    head, target = TrainableHead(read_config(folder)), FrozenTarget(folder, FP32, CPU)
    hidden = target.hidden(IDS[None])
    head(torch.randn(1, 29, 64), hidden[:, :-1], 2).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert not target.output_VD.requires_grad
    assert not target.embedding_VD.requires_grad
    assert len(list(head.parameters())) == len(head.parts())


class TestStart:
    def test_native_is_the_checkpoints_own_head(self, tiny_folder: Callable[..., Path]) -> None:
        folder = tiny_folder("qwen3_5_mtp", FP32)
        config = read_config(folder)
        assert has_native(folder, config)
        head = TrainableHead(config)
        head.read_native(folder, config)
        stored = safetensors.torch.load_file(folder / "model.safetensors")
        own = {name for name in stored if name.startswith("mtp.")}
        assert set(head.parts()) == own
        assert all(torch.equal(head.parts()[name], stored[name]) for name in own)

    def test_a_checkpoint_without_one_has_none(self, tiny_folder: Callable[..., Path]) -> None:
        for kind in ("llama", "qwen3_5_text"):
            folder = tiny_folder(kind, FP32)
            assert not has_native(folder, read_config(folder))

    def test_fresh_depends_on_the_seed_alone(self, tiny_folder: Callable[..., Path]) -> None:
        folder = tiny_folder("gemma3_text", FP32)
        target, config = FrozenTarget(folder, FP32, CPU), read_config(folder)
        heads = [TrainableHead(config) for _ in range(3)]
        for head, seed in zip(heads, (1, 1, 2), strict=True):
            head.start_fresh(target, seed)
        first, again, other = (torch.cat([p.flatten() for p in h.parts().values()]) for h in heads)
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert torch.allclose(1 + heads[0].norm.weight, 0.2 * (1 + target.final_norm), atol=1e-6)
        assert heads[0].projection.weight.std().item() == pytest.approx(config.initializer_range, rel=0.1)

    def test_a_plain_norm_is_scaled_as_it_is(self, tiny_folder: Callable[..., Path]) -> None:
        folder = tiny_folder("llama", FP32)
        head, target = TrainableHead(read_config(folder)), FrozenTarget(folder, FP32, CPU)
        head.start_fresh(target, 1)
        assert torch.allclose(head.norm.weight, 0.2 * target.final_norm)

    def test_a_head_folder_is_read_back_or_refused_by_name(
        self, tiny_folder: Callable[..., Path], tmp_path: Path
    ) -> None:
        config = read_config(tiny_folder("llama", FP32))
        head, other = lively(TrainableHead(config)), TrainableHead(config)
        folder = saved(head, tmp_path / "head")
        other.read(folder)
        assert all(torch.equal(other.parts()[name], p) for name, p in head.parts().items())
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        del tensors["head.projection.weight"]
        safetensors.torch.save_file(tensors, folder / "model.safetensors")
        with pytest.raises(ModelFileError, match=r"lacks the tensor 'head\.projection\.weight'"):
            other.read(folder)


class TestCheck:
    def test_the_families(self, tiny_folder: Callable[..., Path]) -> None:
        for kind in KINDS:
            check_target(read_config(tiny_folder(kind, FP32)))
        assert set(FAMILIES) == {"llama", "qwen3", "gemma3_text", "glm4_moe", "qwen3_5_text"}

    def test_other_models_are_refused(self, tiny_folder: Callable[..., Path]) -> None:
        with pytest.raises(
            ArchitectureError, match=r"heads are trained for .*llama.*, not for model type 'gpt2'"
        ):
            check_target(read_config(tiny_folder("gpt2", FP32)))
        biased = tiny_folder("llama", FP32, attention_bias=True)
        with pytest.raises(
            OptionError, match="no head can be attached to this model: biases in linear layers"
        ):
            check_target(read_config(biased))


def test_the_targets_hash_sees_one_changed_weight(tiny_folder: Callable[..., Path]) -> None:
    target = FrozenTarget(tiny_folder("llama", FP32), FP32, CPU)
    before = target.sha256()
    assert target.sha256() == before
    with torch.no_grad():
        target.final_norm[3] += 1e-3
    assert target.sha256() != before
