"""A head in a folder of its own: the trained form for every family, and a native one replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import draftproof
from draftproof.decode import Decoding, plain_decode, speculate
from draftproof.depth import FixedDepth
from draftproof.drafters.mtp import MtpDrafter, head_of
from draftproof.errors import DrafterError, ModelFileError, OptionError
from draftproof.models.decoder import DecoderTarget
from draftproof.models.load import attach_head, read_config
from draftproof.models.mtp import HEAD_STYLES, trained_style
from draftproof.record import OpEvidence, Plan
from draftproof.rules import Rules, RuleSet
from draftproof.testing import FakeClock

KINDS = ("llama", "qwen3", "gemma3_text", "qwen3_5_mtp", "glm4_moe_mtp")
PROMPT = [5, 80, 33, 2, 140, 7, 9]


def plan_of(target: DecoderTarget) -> Plan:
    """All that is asked of a plan here: forms of the layer's linears."""
    names = ("qkv", "out", "gate_up", "down")
    ops = tuple(
        OpEvidence(op=op, shape=(), form="plain", max_rows=32, is_exact=True, num_checked=0) for op in names
    )
    return Plan(claim="unproved", dtype="float32", fingerprint="", ops=ops, max_rows=32)


def head_tensors(folder: Path, seed: int = 1) -> dict[str, Tensor]:
    """A head like the family's last full layer, with random weights."""
    config = read_config(folder)
    style = HEAD_STYLES.get(config.model_type) or trained_style(config)
    prefix, hidden = style.prefix_in(config), config.hidden_size
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    kinds = getattr(config, "layer_types", None) or []
    index = kinds.index("full_attention") if "full_attention" in kinds else 0
    like = f"model.layers.{index}."
    names = {k.removeprefix(like): v.shape for k, v in stored.items() if k.startswith(like)}
    shapes = {f"{prefix}{style.block}{name}": shape for name, shape in names.items()}
    norms = (style.embedding_norm, style.hidden_norm, style.final_norm)
    shapes |= {f"{prefix}{name}.weight": torch.Size([hidden]) for name in norms}
    shapes[f"{prefix}{style.projection}.weight"] = torch.Size([hidden, 2 * hidden])
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5 for name, shape in shapes.items()
    }


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., Path]:
    def save(tensors: dict[str, Tensor]) -> Path:
        folder = tmp_path / f"head{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        safetensors.torch.save_file(tensors, folder / "model.safetensors")
        return folder

    return save


def decoded(target: DecoderTarget, depth: int | None) -> tuple[list[int], int]:
    """Tokens, and how many were drafted."""
    rules = Rules(RuleSet(max_new_tokens=24), PROMPT, torch.device("cpu"))
    session = target.open(100)
    run = Decoding(session=session, rules=rules, clock=FakeClock(), max_rows=target.max_rows)
    if depth is None:
        rounds = list(plain_decode(run, PROMPT))
    else:
        rounds = list(speculate(run, PROMPT, MtpDrafter(target, session, 100), FixedDepth(depth)))
    return [t for r in rounds for t in r.emitted], sum(r.num_drafted for r in rounds)


@pytest.mark.parametrize("kind", KINDS)
def test_it_drafts_and_changes_no_token(
    kind: str, tiny_folder: Callable[..., Path], tiny_target: Callable[..., Any], saved: Callable[..., Path]
) -> None:
    target = tiny_target(kind, torch.float32)
    folder = saved(head_tensors(tiny_folder(kind, torch.float32)))
    headed = attach_head(target, folder, plan_of(target))
    want, _ = decoded(target, None)
    for depth in (1, 3):
        got, num_drafted = decoded(headed, depth)
        assert got == want
        assert num_drafted > 10
    assert head_of(headed) is not target.parts.native_head, "the target itself keeps what it had"


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_slot_reads_all_earlier_ones(
    kind: str, tiny_folder: Callable[..., Path], tiny_target: Callable[..., Any], saved: Callable[..., Path]
) -> None:
    """Step by step as all at once, and its attention has no window."""
    target = tiny_target(kind, torch.float32)
    headed = attach_head(target, saved(head_tensors(tiny_folder(kind, torch.float32))), plan_of(target))
    head, hidden = head_of(headed), target.parts.embedding_VD.shape[1]
    ids, rows = torch.arange(40) % 288, torch.randn(40, hidden, generator=torch.Generator().manual_seed(2))
    whole = head.open(64, 16, headed.tables(64)).prefill(ids, rows)
    session = head.open(64, 16, headed.tables(64))
    parts = [session.catch_up(ids[:3], rows[:3])]
    for t in range(3, 40):
        parts.append(session.catch_up(ids[t : t + 1], rows[t : t + 1]))
    assert torch.allclose(torch.cat(parts), whole[2:], atol=1e-4)
    other = rows.clone()
    other[0] += 1
    assert not torch.allclose(head.open(64, 16, headed.tables(64)).prefill(ids, other)[-1], whole[-1])


def test_what_does_not_fit_is_named(
    tiny_folder: Callable[..., Path], tiny_target: Callable[..., Any], saved: Callable[..., Path]
) -> None:
    target, tensors = tiny_target("llama", torch.float32), head_tensors(tiny_folder("llama", torch.float32))
    name = "head.layer.mlp.up_proj.weight"
    for changed, told in (
        ({k: v for k, v in tensors.items() if k != name}, f"lacks the tensor '{name}'"),
        (tensors | {name: tensors[name][1:].clone()}, f"{name} is .*, expected"),
        (tensors | {name: tensors[name].to(torch.int8)}, f"{name} is int8, expected"),
        (tensors | {"head.extra": torch.ones(2)}, r"does not use: head\.extra"),
    ):
        with pytest.raises(ModelFileError, match=told):
            attach_head(target, saved(changed), plan_of(target))


def test_a_folder_without_tensors(tiny_target: Callable[..., Any], tmp_path: Path) -> None:
    target = tiny_target("llama", torch.float32)
    with pytest.raises(ModelFileError, match=r"no model\.safetensors"):
        attach_head(target, tmp_path, plan_of(target))


def test_a_target_that_builds_no_heads(tiny_target: Callable[..., Any], tmp_path: Path) -> None:
    target = tiny_target("llama", torch.float32)
    bare = DecoderTarget(replace(target.parts, make_head=None), 8)
    with pytest.raises(DrafterError, match="no head can be attached to 'llama'"):
        attach_head(bare, tmp_path, plan_of(target))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_engine_loads_it_from_its_folder(
    kind: str, tiny_folder: Callable[..., Path], saved: Callable[..., Path]
) -> None:
    model = tiny_folder(kind, torch.float32)
    folder = saved(head_tensors(model))
    load = partial(draftproof.load, str(model), dtype="float32")
    engine = load(head=str(folder))
    plain = engine.decode(PROMPT, max_new_tokens=16, drafter="none")
    trace = engine.decode(PROMPT, max_new_tokens=16, drafter="mtp", depth=2)
    assert trace.token_ids == plain.token_ids
    assert sum(r.num_drafted for r in trace.rounds) > 10
    with pytest.raises(DrafterError, match="no head folder"):
        load(head=str(folder / "gone"))


def test_the_shortlist_in_its_folder_is_used_where_a_request_names_none(
    tiny_folder: Callable[..., Path], saved: Callable[..., Path]
) -> None:
    """Only its ids are drafted, and the tokens are those without it."""
    model = tiny_folder("llama", torch.float32)
    folder, few, others = saved(head_tensors(model)), (3, 40, 41, 200), (5, 6)
    load = partial(draftproof.load, str(model), dtype="float32", head=str(folder))

    def decode(engine: Any, drafter: str = "mtp", **options: Any) -> tuple[list[int], set[int]]:
        trace = engine.decode(PROMPT, max_new_tokens=16, drafter=drafter, **options)
        return list(trace.token_ids), {i for r in trace.rounds for i in r.offered}

    tokens, drafted = decode(load(), depth=2)
    assert len(drafted) > len(few)
    (folder / "shortlist.json").write_text(str(list(few)))
    engine = load()
    assert decode(engine, "none")[0] == tokens
    with_default, ids = decode(engine, depth=2)
    assert with_default == tokens
    assert ids
    assert ids <= set(few)
    named, ids = decode(engine, depth=2, shortlist=others)
    assert named == tokens
    assert ids <= set(others)
    (folder / "shortlist.json").write_text("[288]")
    with pytest.raises(OptionError, match="holds the id 288, but the model has 288"):
        load()
