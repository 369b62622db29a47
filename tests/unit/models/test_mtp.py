"""The native head against its layer in transformers, with and without a cache; refusals of its tensors."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from draftproof.errors import ModelFileError, RollbackError
from draftproof.models.load import load_decoder, read_config
from draftproof.models.mtp import HeadSession

CPU, BF16, FP32 = torch.device("cpu"), torch.bfloat16, torch.float32
NUM_TENSORS = 15


@pytest.fixture(params=[BF16, FP32], ids=["bf16", "fp32"])
def found(request: pytest.FixtureRequest, pair: Callable[..., Any]) -> Any:
    return pair("qwen3_5_mtp", request.param)


class StockHead:
    """The same head from transformers' own layer and norms; one call computes all rows given."""

    def __init__(self, found: Any) -> None:
        config = copy.deepcopy(found.stock.module.config)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        dtype = found.target.parts.dtype
        self.tensors = safetensors.torch.load_file(found.folder / "model.safetensors")
        self.layer = Qwen3_5DecoderLayer(config, 0).to(dtype)
        self.layer.load_state_dict(self._part("mtp.layers.0."), assign=True)  # in the mapped file, as ours
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        self.norms = [self._norm(f"mtp.{name}.weight", config) for name in names]
        self.rotary = Qwen3_5TextRotaryEmbedding(config)
        self.embedding = found.stock.module.model.embed_tokens
        self.config = config

    def _part(self, prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}

    def _norm(self, name: str, config: Any) -> Any:
        norm = Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps)
        norm.load_state_dict({"weight": self.tensors[name]}, assign=True)
        return norm

    @torch.inference_mode()
    def __call__(self, ids_T: Tensor, hidden_TD: Tensor, cache: DynamicCache) -> Tensor:
        start = cache.get_seq_length()
        embedded, hidden, out = self.norms
        joined = torch.cat([embedded(self.embedding(ids_T)), hidden(hidden_TD)], -1)[None]
        u = F.linear(joined, self.tensors["mtp.fc.weight"])
        places = torch.arange(start, start + len(ids_T))[None]
        u = self.layer(u, self.rotary(u, places), attention_mask=None, cache=cache)
        return out(u)[0]

    def cache(self) -> DynamicCache:
        return DynamicCache(config=self.config)


@pytest.fixture
def rows(found: Any) -> tuple[Tensor, Tensor]:
    """Ids and hidden rows of 40 slots; any numbers serve."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(0, found.target.vocab_size, (40,), generator=generator)
    size = found.target.parts.embedding_VD.shape[1]
    return ids, torch.randn(40, size, generator=generator).to(found.target.parts.dtype)


def opened(found: Any) -> HeadSession:
    session: HeadSession = found.target.parts.native_head.open(64, 16, found.target.tables(64))
    return session


@pytest.mark.parametrize("num_prompt", [1, 2, 7, 20])
@pytest.mark.parametrize("step", [1, 2, 5, 16])
def test_slots_have_the_bits_of_the_stock_layers_steps(
    found: Any, rows: tuple[Tensor, Tensor], num_prompt: int, step: int
) -> None:
    """A prompt in one call, then any number of slots a call: stock runs them one at a time."""
    (ids, hidden), stock, session = rows, StockHead(found), opened(found)
    cache = stock.cache()
    want = [stock(ids[:num_prompt], hidden[:num_prompt], cache)]
    want += [stock(ids[t : t + 1], hidden[t : t + 1], cache) for t in range(num_prompt, 40)]
    got = [session.prefill(ids[:num_prompt], hidden[:num_prompt])]
    for start in range(num_prompt, 40, step):
        got.append(session.extend(ids[start : start + step], hidden[start : start + step]))
        session.cache.commit(len(got[-1]))
    assert torch.equal(torch.cat(got), torch.cat(want))


def test_a_slot_equals_recomputing_the_head_over_the_whole_sequence(
    found: Any, rows: tuple[Tensor, Tensor]
) -> None:
    """Without a cache all rows go through one call, whose kernels round otherwise: fp32 within 2e-5."""
    (ids, hidden), stock, session = rows, StockHead(found), opened(found)
    got = [session.prefill(ids[:6], hidden[:6])]
    for start in range(6, 40, 3):
        got.append(session.extend(ids[start : start + 3], hidden[start : start + 3]))
        session.cache.commit(len(got[-1]))
    whole = stock(ids, hidden, stock.cache())
    bound = 2e-5 if got[0].dtype == FP32 else 0.1
    assert whole.abs().max() > 1
    assert (torch.cat(got) - whole).abs().max() < bound
    again = opened(found).prefill(ids, hidden)
    assert torch.equal(again, whole)


def test_dropped_slots_leave_no_trace(found: Any, rows: tuple[Tensor, Tensor]) -> None:
    ids, hidden = rows
    plain, drafting = opened(found), opened(found)
    want = [plain.catch_up(ids[:5], hidden[:5])]
    got = [drafting.catch_up(ids[:5], hidden[:5])]
    for start in range(5, 35, 5):
        drafting.extend(ids[:3] + 1, hidden[:3] * 2)
        drafting.extend(ids[:1], hidden[:1])
        drafting.cache.commit(0)
        want.append(plain.catch_up(ids[start : start + 5], hidden[start : start + 5]))
        got.append(drafting.catch_up(ids[start : start + 5], hidden[start : start + 5]))
    assert torch.equal(torch.cat(got), torch.cat(want))
    assert all(
        torch.equal(*both) for both in zip(plain.cache.snapshot(0), drafting.cache.snapshot(0), strict=True)
    )


def test_catching_up_takes_any_number_of_slots(found: Any, rows: tuple[Tensor, Tensor]) -> None:
    ids, hidden = rows
    session, stock = opened(found), StockHead(found)
    cache = stock.cache()
    stock(ids[:2], hidden[:2], cache)
    want = [stock(ids[t : t + 1], hidden[t : t + 1], cache) for t in range(2, 40)][-1]
    session.catch_up(ids[:2], hidden[:2])
    assert torch.equal(session.catch_up(ids[2:], hidden[2:]), want)
    assert session.cache.length == 40


def test_a_prompt_can_only_come_first(found: Any, rows: tuple[Tensor, Tensor]) -> None:
    ids, hidden = rows
    session = opened(found)
    session.prefill(ids[:3], hidden[:3])
    with pytest.raises(RollbackError, match="only fill an empty cache"):
        session.prefill(ids[:3], hidden[:3])


def test_a_failing_slot_leaves_the_cache_as_it_was(
    found: Any, rows: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, hidden = rows
    session = opened(found)
    session.prefill(ids[:3], hidden[:3])
    head = found.target.parts.native_head
    with monkeypatch.context() as patch:
        patch.setattr(head, "finish", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            session.extend(ids[3:5], hidden[3:5])
    assert session.cache.mark() == session.cache.length == 3
    other = opened(found)
    other.prefill(ids[:3], hidden[:3])
    assert torch.equal(session.extend(ids[3:5], hidden[3:5]), other.extend(ids[3:5], hidden[3:5]))


def test_a_shortlist_scores_its_ids_as_the_whole_output_layer_does(
    found: Any, rows: tuple[Tensor, Tensor]
) -> None:
    head, (_, hidden) = found.target.parts.native_head, rows
    chosen = torch.tensor([3, 7, 200, 287])
    short = head.shortlist(chosen)
    whole = head.output.rows(hidden[:4]).float()
    assert torch.allclose(short.rows(hidden[:4]).float(), whole[:, chosen], rtol=2e-2, atol=2e-2)
    assert head.shortlist(chosen) is short, "copied once"
    assert head.shortlist(chosen[:2]) is not short


@pytest.fixture
def broken(
    tiny_folder: Callable[..., Path], tmp_path: Path, found: Any
) -> Callable[[Callable[[dict[str, Tensor]], object]], None]:
    """``broken(change)``: load a copy of the checkpoint whose tensors ``change`` edited in place."""

    def load(change: Callable[[dict[str, Tensor]], object]) -> None:
        folder = tmp_path / f"copy{len(list(tmp_path.iterdir()))}"
        shutil.copytree(found.folder, folder)
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        change(tensors)
        safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = read_config(folder)
        load_decoder(folder, config, found.plan, dtype=found.target.parts.dtype, device=CPU)

    return load


def head_names(found: Any) -> list[str]:
    names = safetensors.torch.load_file(found.folder / "model.safetensors")
    return sorted(name for name in names if name.startswith("mtp."))


def test_a_dense_head_has_fifteen_tensors(found: Any) -> None:
    assert len(head_names(found)) == NUM_TENSORS
    assert found.target.parts.native_head.nbytes > 0


def test_every_missing_tensor_is_named(found: Any, broken: Callable[..., None]) -> None:
    for name in head_names(found):
        with pytest.raises(ModelFileError, match=f"lacks the tensor '{name}'"):
            broken(lambda tensors, name=name: tensors.pop(name))


def test_every_misshaped_tensor_is_named(found: Any, broken: Callable[..., None]) -> None:
    for name in head_names(found):
        with pytest.raises(ModelFileError, match=f"{name} is .*, expected"):
            broken(lambda tensors, name=name: tensors.update({name: tensors[name][:-1].clone()}))


def test_every_wrongly_typed_tensor_is_named(found: Any, broken: Callable[..., None]) -> None:
    for name in head_names(found):
        with pytest.raises(ModelFileError, match=f"{name} is int8, expected"):
            broken(lambda tensors, name=name: tensors.update({name: tensors[name].to(torch.int8)}))


def test_an_extra_tensor_is_named(found: Any, broken: Callable[..., None]) -> None:
    with pytest.raises(ModelFileError, match=r"does not use: mtp\.layers\.1\.norm\.weight"):
        broken(lambda tensors: tensors.update({"mtp.layers.1.norm.weight": torch.ones(64)}))


def test_a_checkpoint_without_a_head_loads_without_one(found: Any, broken: Callable[..., None]) -> None:
    """It is no error: transformers itself saves none."""
    broken(lambda tensors: [tensors.pop(name) for name in head_names(found)])


def test_a_head_with_an_embedding_of_its_own_is_refused(found: Any, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    shutil.copytree(found.folder, folder)
    fields = json.loads((folder / "config.json").read_text()) | {"mtp_use_dedicated_embeddings": True}
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelFileError, match="embedding of its own"):
        load_decoder(folder, read_config(folder), found.plan, dtype=found.target.parts.dtype, device=CPU)


def test_the_halves_are_joined_in_the_order_of_the_style(found: Any, rows: tuple[Tensor, Tensor]) -> None:
    """The other order gives other rows: the style is read."""
    head, (ids, hidden) = found.target.parts.native_head, rows
    other = copy.copy(head)
    other.style = replace(head.style, is_hidden_first=True)
    one, two = opened(found), HeadSession(other, 64, 16, found.target.tables(64))
    assert not torch.equal(one.prefill(ids, hidden), two.prefill(ids, hidden))
