"""The table of head styles: every row loads all its tensors and refuses any other; what each field does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from draftproof.errors import ModelFileError
from draftproof.models.build import Builder
from draftproof.models.decoder import DecoderTarget
from draftproof.models.load import ARCHITECTURES, load_decoder, read_config
from draftproof.models.mtp import GLM4_MOE, HEAD_STYLES, QWEN3_5, HeadStyle, NativeHead
from draftproof.ops.gated_delta import FORMS
from draftproof.ops.norm import rms_norm_reference, rms_norm_shifted_reference
from draftproof.probe import make_plan
from draftproof.record import OpEvidence

CPU, FP32 = torch.device("cpu"), torch.float32
KINDS = {
    "qwen3_5_text": "qwen3_5_mtp", "qwen3_5_moe_text": "qwen3_5_moe_mtp", "glm4_moe": "glm4_moe_mtp",
}  # fmt: skip
PREFIXES = {"qwen3_5_text": "mtp.", "qwen3_5_moe_text": "mtp.", "glm4_moe": "model.layers.3."}
NUM_TENSORS = {"qwen3_5_text": 15, "qwen3_5_moe_text": 12 + 3 * 6 + 5, "glm4_moe": 17}
STYLE = pytest.mark.parametrize("model_type", KINDS)


def plan(config: Any) -> Any:
    """Everything row by row in stock's layout."""
    specs = [(spec.name, "plain") for spec in ARCHITECTURES[config.model_type].linear_specs(config)]
    forms = [*specs, *((op, "row by row") for op in FORMS)]
    ops = [
        OpEvidence(op=op, shape=(1,), form=form, max_rows=1, is_exact=True, num_checked=1)
        for op, form in forms
    ]
    return make_plan(ops, request="bitwise", dtype=FP32, fingerprint="f")


def load(folder: Path) -> DecoderTarget:
    config = read_config(folder)
    return load_decoder(folder, config, plan(config), dtype=FP32, device=CPU)


@pytest.fixture
def edited(tiny_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """``edited(model_type, change)``: a copy whose tensors ``change`` has been at."""

    def make(model_type: str, change: Callable[[dict[str, Tensor]], object], **config: Any) -> Path:
        folder = tmp_path / "edited"
        shutil.copytree(tiny_folder(KINDS[model_type], FP32, **config), folder)
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        change(tensors)
        safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make


def names_of(folder: Path, model_type: str) -> list[str]:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    return [name for name in tensors if name.startswith(PREFIXES[model_type])]


def test_the_table_has_a_row_for_every_architecture_with_a_head() -> None:
    assert set(HEAD_STYLES) == set(KINDS)
    assert {style.prefix_in(SimpleNamespace(num_hidden_layers=3)) for style in HEAD_STYLES.values()} == set(
        PREFIXES.values()
    )
    assert GLM4_MOE.prefix_in(SimpleNamespace(num_hidden_layers=46)) == "model.layers.46."


@STYLE
def test_every_tensor_of_a_row_is_loaded(tiny_folder: Callable[..., Path], model_type: str) -> None:
    folder = tiny_folder(KINDS[model_type], FP32)
    assert len(names_of(folder, model_type)) == NUM_TENSORS[model_type]
    head = load(folder).parts.native_head
    assert isinstance(head, NativeHead)
    assert head.style is HEAD_STYLES[model_type]
    feed_forward = 3 * 160
    if model_type == "qwen3_5_moe_text":
        feed_forward = 3 * 48 + 2 * 3 * 24 + 6 + 1
    queries = 64 if model_type == "glm4_moe" else 2 * 64
    assert head.nbytes == 4 * 64 * (2 * 64 + queries + 2 * 32 + 64 + feed_forward)


@STYLE
def test_a_target_without_a_head_has_none(edited: Callable[..., Path], model_type: str) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.startswith(PREFIXES[model_type])]:
            del tensors[name]

    assert load(edited(model_type, drop)).parts.native_head is None


NEEDED = {
    "qwen3_5_text": [
        "fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "layers.0.self_attn.q_norm",
        "layers.0.self_attn.k_proj", "layers.0.mlp.down_proj", "layers.0.input_layernorm",
    ],
    "qwen3_5_moe_text": [
        "fc", "layers.0.mlp.gate", "layers.0.mlp.shared_expert_gate", "layers.0.mlp.shared_expert.up_proj",
        "layers.0.mlp.experts.3.up_proj", "layers.0.mlp.experts.0.gate_proj",
    ],
    "glm4_moe": [
        "eh_proj", "shared_head.norm", "enorm", "hnorm", "self_attn.q_norm", "self_attn.k_proj",
        "mlp.down_proj", "input_layernorm",
    ],
}  # fmt: skip
PARTS = pytest.mark.parametrize(
    ("model_type", "part"), [(kind, part) for kind, parts in NEEDED.items() for part in parts]
)


def refused(folder: Path) -> str:
    with pytest.raises(ModelFileError) as error:
        load(folder)
    return str(error.value)


@PARTS
def test_a_missing_tensor_is_refused_by_name(edited: Callable[..., Path], model_type: str, part: str) -> None:
    name = f"{PREFIXES[model_type]}{part}.weight"
    folder = edited(model_type, lambda tensors: tensors.pop(name))
    assert refused(folder) == f"the checkpoint lacks the tensor {name!r}"


@PARTS
def test_a_misshaped_tensor_is_refused_by_name(
    edited: Callable[..., Path], model_type: str, part: str
) -> None:
    name = f"{PREFIXES[model_type]}{part}.weight"

    def grow(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.cat([tensors[name], tensors[name][:1]])

    message = refused(edited(model_type, grow))
    assert message.startswith(f"{name} is (")
    assert ", expected (" in message


@PARTS
def test_an_integer_tensor_is_refused_by_name(
    edited: Callable[..., Path], model_type: str, part: str
) -> None:
    name = f"{PREFIXES[model_type]}{part}.weight"
    folder = edited(model_type, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    assert refused(folder) == f"{name} is int8, expected bfloat16, float16 or float32"


@STYLE
@pytest.mark.parametrize(
    "extra", ["self_attn.q_proj.bias", "mlp.experts.6.down_proj.weight", "second.weight"]
)
def test_an_extra_tensor_is_refused_by_name(edited: Callable[..., Path], model_type: str, extra: str) -> None:
    name = PREFIXES[model_type] + extra
    folder = edited(model_type, lambda tensors: tensors.update({name: torch.zeros(64)}))
    assert refused(folder).endswith(f"holds 1 tensors this architecture does not use: {name}")


COPIES = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}


class TestCopies:
    @pytest.mark.parametrize("copy", COPIES)
    @pytest.mark.parametrize("is_tied", [False, True])
    def test_a_copy_that_differs_is_refused(
        self, edited: Callable[..., Path], copy: str, is_tied: bool
    ) -> None:
        name = f"model.layers.3.{copy}.weight"

        def change(tensors: dict[str, Tensor]) -> None:
            tensors[name] = tensors["model.embed_tokens.weight" if is_tied else f"{COPIES[copy]}.weight"] * 1
            tensors[name][-1, -1] += 1e-3

        folder = edited("glm4_moe", change, tie_word_embeddings=is_tied)
        assert refused(folder) == f"{name} differs from the target's own, which it should repeat"

    @pytest.mark.parametrize("copy", COPIES)
    def test_a_copy_of_another_shape_is_refused(self, edited: Callable[..., Path], copy: str) -> None:
        name = f"model.layers.3.{copy}.weight"
        folder = edited("glm4_moe", lambda tensors: tensors.update({name: torch.zeros(287, 64)}))
        assert refused(folder) == f"{name} is (287, 64), expected (288, 64)"

    @pytest.mark.parametrize("kept", [(), ("embed_tokens",), ("shared_head.head",)])
    def test_copies_may_be_left_out(self, edited: Callable[..., Path], kept: tuple[str, ...]) -> None:
        def drop(tensors: dict[str, Tensor]) -> None:
            for copy in set(COPIES) - set(kept):
                del tensors[f"model.layers.3.{copy}.weight"]

        assert load(edited("glm4_moe", drop)).parts.native_head is not None


class Named:
    """A source in memory that draws any tensor asked for."""

    def __init__(self) -> None:
        self.made: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return False

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(len(self.made))
        self.made[name] = torch.randn(shape, generator=generator)
        return self.made[name]


def made(style: HeadStyle) -> tuple[NativeHead, dict[str, Tensor]]:
    """A head over 6 ids and 4 hidden values whose decoder layer doubles its input."""
    source, config = Named(), SimpleNamespace(rms_norm_eps=1e-3, hidden_size=4)
    evidence = OpEvidence(op="mtp_in", shape=(1,), form="plain", max_rows=8, is_exact=True, num_checked=1)
    build = Builder(
        source, make_plan([evidence], request="bitwise", dtype=FP32, fingerprint="f"), hidden=4,
        dtype=FP32, device=CPU,
    )  # fmt: skip
    embedding = torch.randn(6, 4, generator=torch.Generator().manual_seed(9))
    head = NativeHead(
        style, config, build, make_layer=lambda prefix: lambda u_TD, step: 2 * u_TD, shape=None,
        embedding_VD=embedding, output=None,
    )  # fmt: skip
    return head, source.made


FIELDS = HeadStyle(
    prefix="p.", embedding_norm="e", hidden_norm="h", projection="j", block="b.", final_norm="f"
)


@pytest.mark.parametrize("is_norm_shifted", [False, True])
@pytest.mark.parametrize("is_hidden_first", [False, True])
@pytest.mark.parametrize("is_normed_fed_back", [False, True])
def test_a_slot_as_the_papers_formula_has_it(
    is_norm_shifted: bool, is_hidden_first: bool, is_normed_fed_back: bool
) -> None:
    style = replace(
        FIELDS, is_norm_shifted=is_norm_shifted, is_hidden_first=is_hidden_first,
        is_normed_fed_back=is_normed_fed_back,
    )  # fmt: skip
    head, weights = made(style)
    norm = rms_norm_shifted_reference if is_norm_shifted else rms_norm_reference
    ids, hidden = torch.tensor([5, 0]), torch.arange(8.0).view(2, 4)
    halves = [
        norm(head.embedding_VD[ids], weights["p.e.weight"], 1e-3), norm(hidden, weights["p.h.weight"], 1e-3)
    ]  # fmt: skip
    u = torch.cat(halves[::-1] if is_hidden_first else halves, -1) @ weights["p.j.weight"].T
    rows = SimpleNamespace(linear=lambda op, x_TK: op.rows(x_TK))
    joined = head.join(ids, hidden, rows)
    assert torch.allclose(joined, u, rtol=0, atol=1e-5)  # a sum of 8 products of about 1
    out, read = head.finish(joined, None), norm(2 * joined, weights["p.f.weight"], 1e-3)
    assert torch.equal(out, read if is_normed_fed_back else 2 * joined)
    assert torch.equal(head.readable(out), read)


def test_the_rows_of_the_table() -> None:
    """Qwen's norms are shifted; both feed back what the output layer reads, as transformers and vLLM do."""
    assert QWEN3_5.is_norm_shifted
    assert not GLM4_MOE.is_norm_shifted
    assert all(s.is_normed_fed_back and not s.is_hidden_first for s in HEAD_STYLES.values())
    assert QWEN3_5.embedding_copy is QWEN3_5.output_copy is None
