"""Shapes, rotary tables and the builder: nothing of the wrong size, nothing twice, nothing left over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from draftproof.errors import EvidenceError, ModelFileError
from draftproof.models.build import Builder, head_size_of, linear_specs, rotary_table
from draftproof.record import OpEvidence, Plan

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
}  # fmt: skip


class Tensors:
    """A source in memory that notes what became of every tensor."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.left = dict(tensors)
        self.forgotten: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self.left

    def peek(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self.left or tuple(self.left[name].shape) != shape:
            raise ModelFileError(f"{name} {shape}")
        return self.left[name]

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self.peek(name, shape)
        del self.left[name]
        return tensor

    def forget(self, name: str) -> None:
        self.forgotten.append(name)
        self.left.pop(name, None)

    def finish(self) -> None:
        if self.left:
            raise ModelFileError(f"left: {sorted(self.left)}")


def plan(max_rows: int = 8, fixed_rows: int | None = None, form: str = "plain") -> Plan:
    ops = tuple(
        OpEvidence(op=op, shape=(), form=form, max_rows=max_rows, is_exact=True, num_checked=1)
        for op in ("qkv", "out", "gate_up", "down", "head")
    )
    claim = "bitwise" if fixed_rows is None else "fixed"
    return Plan(
        claim=claim, dtype="float32", fingerprint="f", ops=ops, max_rows=max_rows, fixed_rows=fixed_rows
    )


def builder(tensors: dict[str, Tensor], made: Plan | None = None, hidden: int = 4) -> Builder:
    return Builder(Tensors(tensors), made or plan(), hidden=hidden, dtype=torch.float32, device=CPU)


def draw(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (LlamaConfig(hidden_size=96, num_attention_heads=4, head_dim=None), 24),
        (LlamaConfig(hidden_size=96, num_attention_heads=4, head_dim=40), 40),
        (Qwen3Config(hidden_size=96, num_attention_heads=4), 128),
        (Gemma3TextConfig(head_dim=320), 320),
    ],
)
def test_head_size(config: Any, size: int) -> None:
    assert head_size_of(config) == size


@pytest.mark.parametrize(
    ("config_class", "model_class"),
    [
        (LlamaConfig, LlamaForCausalLM),
        (Qwen3Config, Qwen3ForCausalLM),
        (Gemma3TextConfig, Gemma3ForCausalLM),
    ],
)
def test_specs_are_the_shapes_of_stocks_modules(
    config_class: Callable[..., Any], model_class: Callable[..., Any]
) -> None:
    config = config_class(**SMALL)
    with torch.device("meta"):
        module = model_class(config)
    layer, inner = module.model.layers[0].self_attn, module.model.layers[0].mlp
    stock = {
        "qkv": [layer.q_proj, layer.k_proj, layer.v_proj],
        "out": [layer.o_proj],
        "gate_up": [inner.gate_proj, inner.up_proj],
        "down": [inner.down_proj],
        "head": [module.lm_head],
    }
    specs = {spec.name: spec for spec in linear_specs(config)}
    assert list(specs) == list(stock)
    for name, linears in stock.items():
        assert {linear.in_features for linear in linears} == {specs[name].num_in}
        assert tuple(linear.out_features for linear in linears) == specs[name].parts


ROTARIES = {
    "llama": lambda size: LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=4 * size, num_attention_heads=4, head_dim=size)
    ),
    "llama3": lambda size: LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=4 * size, num_attention_heads=4, head_dim=size, rope_parameters={
                "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
        )
    ),
    "yarn": lambda size: LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=4 * size, num_attention_heads=4, head_dim=size, max_position_embeddings=512,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        )
    ),
    "gemma3-sliding": lambda size: _gemma(size, "sliding_attention"),
    "gemma3-full": lambda size: _gemma(size, "full_attention"),
}  # fmt: skip


def _gemma(size: int, kind: str) -> Callable[..., Any]:
    return partial(Gemma3RotaryEmbedding(Gemma3TextConfig(head_dim=size)), layer_type=kind)


@pytest.mark.parametrize("name", ROTARIES)
@pytest.mark.parametrize("head_size", [16, 24, 64, 80, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_table_has_the_bits_of_one_position_and_of_a_prompt(
    name: str, head_size: int, dtype: torch.dtype
) -> None:
    rotary, x = ROTARIES[name](head_size), torch.empty(0, dtype=dtype)
    cos, sin = rotary_table(partial(rotary, x), 300, CPU)
    assert cos.shape == sin.shape == (300, head_size)
    assert cos.dtype == dtype
    for position in (*range(20), 63, 64, 127, 128, 255, 299):
        one = rotary(x, torch.tensor([[position]]))
        assert torch.equal(cos[position], one[0][0, 0])
        assert torch.equal(sin[position], one[1][0, 0])
    for length in (1, 5, 77):
        prompt = rotary(x, torch.arange(length)[None])
        assert torch.equal(cos[:length], prompt[0][0])
        assert torch.equal(sin[:length], prompt[1][0])


def test_linears_are_taken_by_name_and_shape() -> None:
    made = builder(
        {"a.q_proj.weight": draw(6, 4), "a.k_proj.weight": draw(2, 4), "a.v_proj.weight": draw(2, 4)}
    )
    weights = [made._source.left[f"a.{p}_proj.weight"] for p in "qkv"]
    linear = made.qkv("a.", num_heads=3, num_groups=1, head_size=2)
    x_TK = draw(2, 4)
    assert torch.equal(linear.prompt(x_TK), torch.cat([x_TK @ w.T for w in weights], -1))
    assert not made._source.left
    with pytest.raises(ModelFileError, match=r"a\.q_proj\.weight"):
        made.qkv("a.", num_heads=3, num_groups=1, head_size=2)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("m.gate_proj.weight", lambda b: b.gate_up("m.", 5)),
        ("m.up_proj.weight", lambda b: b.gate_up("m.", 5)),
        ("m.down_proj.weight", lambda b: b.linear("down", ["m.down_proj"], 5)),
        ("norm.weight", lambda b: b.vector("norm.weight")),
        ("norm.weight", lambda b: b.gamma("norm.weight", 4)),
    ],
)
def test_a_wrong_shape_is_refused(name: str, call: Callable[[Builder], object]) -> None:
    tensors = {"m.gate_proj.weight": draw(5, 4), "m.up_proj.weight": draw(5, 4)}
    tensors |= {"m.down_proj.weight": draw(4, 5), "norm.weight": draw(4)}
    call(builder(tensors))
    tensors[name] = draw(7, 7) if tensors[name].ndim == 2 else draw(7)
    with pytest.raises(ModelFileError, match=name):
        call(builder(tensors))


def test_an_operation_the_plan_does_not_know_is_refused() -> None:
    with pytest.raises(EvidenceError, match="the plan has no entry for 'router'"):
        builder({"r.weight": draw(4, 4)}).linear("router", ["r"], 4)


@pytest.mark.parametrize(("fixed_rows", "calls"), [(None, [3, 3, 1]), (5, [5, 5])])
def test_the_plan_decides_the_rows_of_a_call(
    fixed_rows: int | None, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = builder({"o.weight": draw(4, 4)}, plan(max_rows=3, fixed_rows=fixed_rows))
    linear = made.linear("out", ["o"], 4)
    seen: list[int] = []
    inner = linear._weights
    monkeypatch.setattr(linear, "_weights", lambda x: (seen.append(len(x)), inner(x))[1])
    assert linear.rows(draw(7, 4)).shape == (7, 4)
    assert seen == calls


def test_gamma_is_one_more_in_fp32() -> None:
    stored = draw(4).bfloat16()
    got = builder({"n": stored}).gamma("n")
    assert got.dtype == torch.float32
    assert torch.equal(got, 1.0 + stored.float())


def test_norm_weights_are_copies() -> None:
    """A view would keep the whole mapped file in memory."""
    stored = draw(4)
    assert builder({"n": stored}).vector("n").data_ptr() != stored.data_ptr()


CONFIG = LlamaConfig(**SMALL | {"hidden_size": 4})


def test_tied_embedding_and_head() -> None:
    config = LlamaConfig(**SMALL | {"hidden_size": 4, "tie_word_embeddings": True})
    weight = draw(50, 4)
    made = builder({"model.embed_tokens.weight": weight})
    embedding, head = made.embedding_and_head(config)
    assert torch.equal(embedding, weight)
    assert torch.equal(head.prompt(draw(3, 4)), draw(3, 4) @ weight.T)
    assert not made._source.left


def test_untied_embedding_and_head() -> None:
    tensors = {"model.embed_tokens.weight": draw(50, 4), "lm_head.weight": 2 * draw(50, 4)}
    made = builder(tensors)
    embedding, head = made.embedding_and_head(CONFIG)
    assert torch.equal(embedding, tensors["model.embed_tokens.weight"])
    assert torch.equal(head.prompt(draw(3, 4)), draw(3, 4) @ tensors["lm_head.weight"].T)
    assert not made._source.left


def test_an_untied_model_needs_its_head() -> None:
    with pytest.raises(ModelFileError, match=r"lm_head\.weight"):
        builder({"model.embed_tokens.weight": draw(50, 4)}).embedding_and_head(CONFIG)


class NoHead:
    """Of a family without one."""

    def __call__(self, build: Builder) -> object:
        raise AssertionError("no head to build")

    def beside(self, build: Builder) -> None:
        return None


def test_left_over_tensors_are_refused() -> None:
    made = builder({"model.embed_tokens.weight": draw(50, 4), "lm_head.weight": draw(50, 4), "odd": draw(1)})
    embedding, head = made.embedding_and_head(CONFIG)
    with pytest.raises(ModelFileError, match="odd"):
        made.parts(CONFIG, embedding=embedding, head=head, make_head=NoHead())
