"""Exported heads: bit-equal there and back, the same function, and every kind of damage named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from draftproof.drafters.mtp import head_of
from draftproof.errors import ModelFileError, OptionError
from draftproof.heads import export as exports
from draftproof.heads.export import ExportSettings, export_head, import_head, read_export
from draftproof.models.decoder import DecoderTarget
from draftproof.models.load import attach_head
from draftproof.record import OpEvidence, Plan

KINDS = [("speculators", "qwen3"), ("speculators", "qwen3_5_mtp"), ("sglang", "qwen3_5_mtp")]
STOCK = {
    "qwen3": (Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding, 0),
    "qwen3_5_mtp": (Qwen3_5DecoderLayer, Qwen3_5RMSNorm, Qwen3_5TextRotaryEmbedding, 3),
}


def settings(layout: str, shortlist: tuple[int, ...] | None = None) -> ExportSettings:
    return ExportSettings(layout=layout, depth=3, shortlist=shortlist)


def loaded(folder: Path) -> dict[str, Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


@pytest.fixture
def exported(
    tiny_folder: Callable[..., Path], head_folder: Callable[..., Path], tmp_path: Path
) -> Callable[..., tuple[Path, Path, Path]]:
    """``exported(layout, kind, **fields)``: the model, the head's folder, the export's."""

    def make(layout: str, kind: str, shortlist: Any = None, **fields: Any) -> tuple[Path, Path, Path]:
        model, head, out = tiny_folder(kind), head_folder(kind, **fields), tmp_path / "deep" / layout
        export_head(head, model, out, settings(layout, shortlist), {"argv": ["x"]})
        return model, head, out

    return make


@pytest.mark.parametrize(("layout", "kind"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_and_back_every_bit_is_kept(
    exported: Callable[..., Any], tmp_path: Path, layout: str, kind: str, dtype: torch.dtype
) -> None:
    model, head, out = exported(layout, kind, dtype=dtype)
    made = import_head(out, model, tmp_path / "back", {"argv": ["y"]})
    want, got = loaded(head), loaded(tmp_path / "back")
    assert sorted(got) == sorted(want)
    assert all(got[name].dtype == dtype and torch.equal(got[name], want[name]) for name in want)
    assert (made["layout"], made["num_tensors"], made["num_ids"]) == (layout, len(want), None)
    assert not (tmp_path / "back" / "shortlist.json").exists()
    assert json.loads((tmp_path / "back" / "provenance.json").read_text())["run"] == {"argv": ["y"]}
    assert sorted(loaded(out)) != sorted(want) or layout == "sglang"
    assert not list(out.parent.glob(".*")), "nothing half-written is left"


def attached(target: DecoderTarget, folder: Path) -> DecoderTarget:
    ops = tuple(
        OpEvidence(op=op, shape=(), form="plain", max_rows=32, is_exact=True, num_checked=0)
        for op in ("qkv", "out", "gate_up", "down")
    )
    plan = Plan(claim="unproved", dtype="float32", fingerprint="", ops=ops, max_rows=32)
    return attach_head(target, folder, plan)


class LayoutHead:
    """The layouts' own arithmetic, from their tensors and transformers' layer."""

    def __init__(self, model: Path, tensors: dict[str, Tensor], kind: str, layout: str) -> None:
        layer_type, norm_type, rotary_type, index = STOCK[kind]
        config = AutoConfig.from_pretrained(model, attn_implementation="sdpa")
        names = {
            "speculators": ("mtp_layers.0.", "mtp_layers.0.", "token_layernorm", "hidden_layernorm",
                            "input_proj", "final_layernorm"),
            "sglang": ("mtp.", "mtp.layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
        }[layout]  # fmt: skip
        prefix, block, *parts = names
        self.rest = [tensors[f"{prefix}{name}.weight"] for name in parts]
        taken = {f"{prefix}{name}.weight" for name in parts}
        self.layer = layer_type(config, index)
        self.layer.load_state_dict(
            {k.removeprefix(block): v for k, v in tensors.items() if k not in taken}, assign=True
        )
        self.norm_type, self.eps, self.rotary = norm_type, config.rms_norm_eps, rotary_type(config)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        made = self.norm_type(len(weight), self.eps)
        made.load_state_dict({"weight": weight})
        return made(x)

    @torch.inference_mode()
    def __call__(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        embedding_norm, hidden_norm, projection, final_norm = self.rest
        halves = [self.norm(embedded, embedding_norm), self.norm(hidden, hidden_norm)]
        u = F.linear(torch.cat(halves, -1), projection)[None]
        places = torch.arange(len(embedded))[None]
        out = self.layer(u, position_embeddings=self.rotary(u, places), attention_mask=None)
        return self.norm(out[0] if isinstance(out, tuple) else out, final_norm).reshape(hidden.shape)


@pytest.mark.parametrize(("layout", "kind"), KINDS)
def test_the_layout_computes_what_the_head_does(
    exported: Callable[..., Any], tiny_target: Callable[..., Any], layout: str, kind: str
) -> None:
    """Two slots deep: the second reads the first's output, as every drafted token does."""
    model, folder, out = exported(layout, kind)
    headed = attached(tiny_target(kind, torch.float32), folder)
    head, stock = head_of(headed), LayoutHead(model, loaded(out), kind, layout)
    generator = torch.Generator().manual_seed(3)
    ids, hidden = torch.randint(0, 288, (20,), generator=generator), torch.randn(20, 64, generator=generator)
    embedded = F.embedding(ids, head.embedding_VD)
    for _ in range(2):
        got = head.open(64, 16, headed.tables(64)).prefill(ids, hidden)
        assert torch.equal(got, stock(embedded, hidden))
        hidden = got
    assert hidden.std() > 0.1


def test_a_shortlist_becomes_sglangs_token_map(exported: Callable[..., Any], tmp_path: Path) -> None:
    model, _, out = exported("sglang", "qwen3_5_mtp", shortlist=(9, 3, 200, 3))
    assert torch.load(out / "hot_token_ids.pt", weights_only=True) == [3, 9, 200]
    options = json.loads((out / "sglang.yaml").read_text())
    assert options["speculative-token-map"] == str(out / "hot_token_ids.pt")
    assert options["speculative-draft-model-path"] == str(out)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    import_head(out, model, tmp_path / "back", {})
    assert json.loads((tmp_path / "back" / "shortlist.json").read_text()) == [3, 9, 200]


def test_the_heads_own_shortlist_goes_along_where_there_is_a_place(
    tiny_folder: Callable[..., Path], head_folder: Callable[..., Path], tmp_path: Path
) -> None:
    model, head = tiny_folder("qwen3_5_mtp"), head_folder("qwen3_5_mtp")
    (head / "shortlist.json").write_text("[4, 7]")
    made = export_head(head, model, tmp_path / "a", settings("sglang"), {})
    assert (made["num_ids"], made["shortlist_left_out"]) == (2, False)
    made = export_head(head, model, tmp_path / "b", settings("speculators"), {})
    assert (made["num_ids"], made["shortlist_left_out"]) == (None, True)
    with pytest.raises(OptionError, match="no place for --shortlist"):
        export_head(head, model, tmp_path / "c", settings("speculators", (1,)), {})
    for ids in ((), (288,)):
        with pytest.raises(OptionError, match=r"ids in 0\.\.287, at least one"):
            export_head(head, model, tmp_path / "c", settings("sglang", ids), {})
    assert not (tmp_path / "c").exists()


def test_a_head_of_another_target_is_refused(
    tiny_folder: Callable[..., Path], head_folder: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(
        ModelFileError, match=r"lacks the tensor 'head\.embedding_norm\.weight', and \d+ more"
    ):
        export_head(
            head_folder("qwen3_5_mtp"), tiny_folder("qwen3"), tmp_path / "o", settings("speculators"), {}
        )
    assert not (tmp_path / "o").exists()


def change_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        tensors = loaded(out)
        change(tensors)
        safetensors.torch.save_file(tensors, out / "model.safetensors")

    return damage


def change_json(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        document = json.loads((out / name).read_text())
        change(document)
        (out / name).write_text(json.dumps(document))

    return damage


def method(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["speculators_config"]["proposal_methods"][0]
    return found


NORM, UP = "mtp_layers.0.final_layernorm.weight", "mtp_layers.0.mlp.up_proj.weight"
DAMAGE = {
    "missing": (change_tensors(lambda t: t.pop(NORM)), f"lacks the tensor '{NORM}'"),
    "extra": (
        change_tensors(lambda t: t.update({"mtp_layers.1.x": t[NORM].clone()})),
        "does not use mtp_layers.1.x",
    ),
    "shape": (change_tensors(lambda t: t.update({UP: t[UP][1:].clone()})), f"{UP} is (159, 64), expected"),
    "type": (change_tensors(lambda t: t.update({UP: t[UP].to(torch.int8)})), f"{UP} is int8, expected"),
    "a bit": (change_tensors(lambda t: t[UP][0, 0].add_(1)), "model.safetensors was changed: its hash"),
    "d2t": (change_tensors(lambda t: t.update(d2t=torch.zeros(9).long())), "holds d2t or t2d: only heads"),
    "cut": (
        lambda out: (out / "model.safetensors").write_bytes((out / "model.safetensors").read_bytes()[:-8]),
        "lacks data of model.safetensors",
    ),
    "no weights": (lambda out: (out / "model.safetensors").unlink(), "no model.safetensors"),
    "no config": (lambda out: (out / "config.json").unlink(), "cannot read"),
    "broken config": (lambda out: (out / "config.json").write_text("{"), "config.json as JSON"),
    "eagle3": (
        change_json("config.json", lambda d: d.update(speculators_model_type="eagle3")),
        "a speculator of type 'eagle3'",
    ),
    "other heads": (
        change_json("config.json", lambda d: d["transformer_layer_config"].update(num_attention_heads=8)),
        "num_attention_heads is 8, the target's is 4",
    ),
    "accepts several": (
        change_json("config.json", lambda d: method(d).update(verifier_accept_k=2)),
        "speculators_config.proposal_methods[0].verifier_accept_k = 2 accepts tokens",
    ),
    "tolerance": (
        change_json("config.json", lambda d: method(d).update(accept_tolerance=0.1)),
        "accept_tolerance = 0.1 accepts tokens",
    ),
    "note": (change_json("draftproof.json", lambda d: d.update(num_tensors=1)), "its hash is another"),
}  # fmt: skip
SGLANG_DAMAGE = {
    "threshold": (
        change_json("sglang.yaml", lambda d: d.update({"speculative-accept-threshold-acc": 0.9})),
        "speculative-accept-threshold-acc = 0.9 accepts tokens",
    ),
    "map order": (lambda out: torch.save([9, 3], out / "hot_token_ids.pt"), "of ascending ids in 0..287"),
    "map range": (lambda out: torch.save([3, 288], out / "hot_token_ids.pt"), "ascending ids in 0..287"),
    "map type": (lambda out: torch.save({"a": 1}, out / "hot_token_ids.pt"), "ascending ids"),
    "map broken": (lambda out: (out / "hot_token_ids.pt").write_bytes(b"no"), "cannot read"),
    "other map": (lambda out: torch.save([3, 10], out / "hot_token_ids.pt"), "hot_token_ids.pt was changed"),
    "no map": (lambda out: (out / "hot_token_ids.pt").unlink(), "hot_token_ids.pt was removed"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_a_speculators_folder_is_named(exported: Callable[..., Any], damage: str) -> None:
    model, _, out = exported("speculators", "qwen3")
    change, told = DAMAGE[damage]
    change(out)
    with pytest.raises((ModelFileError, OptionError)) as caught:
        read_export(out, model)
    assert told in str(caught.value)


@pytest.mark.parametrize("damage", SGLANG_DAMAGE)
def test_damage_to_an_sglang_folder_is_named(exported: Callable[..., Any], damage: str) -> None:
    model, _, out = exported("sglang", "qwen3_5_mtp", shortlist=(3, 9))
    change, told = SGLANG_DAMAGE[damage]
    change(out)
    with pytest.raises((ModelFileError, OptionError)) as caught:
        read_export(out, model)
    assert told in str(caught.value)


def test_a_folder_of_others_needs_no_note(exported: Callable[..., Any], tmp_path: Path) -> None:
    model, head, out = exported("speculators", "qwen3")
    (out / "draftproof.json").unlink()
    _, found = read_export(out, model)
    want = loaded(head)
    assert all(torch.equal(found.tensors[name], want[name]) for name in want)
    with pytest.raises(ModelFileError, match="no exported folder"):
        read_export(tmp_path / "gone", model)


def test_only_a_new_folder_is_written(
    tiny_folder: Callable[..., Path], head_folder: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model, head, out = tiny_folder("qwen3"), head_folder("qwen3"), tmp_path / "out"
    out.mkdir()
    export_head(head, model, out, settings("speculators"), {})
    with pytest.raises(OptionError, match="is not an empty folder"):
        export_head(head, model, out, settings("speculators"), {})

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(exports, "write_atomic", stop)
    with pytest.raises(KeyboardInterrupt):
        export_head(head, model, tmp_path / "new", settings("speculators"), {})
    assert not [path for path in tmp_path.iterdir() if "new" in path.name]


def test_a_depth_that_is_none() -> None:
    with pytest.raises(OptionError, match="--depth must be 1 or more"):
        ExportSettings(layout="sglang", depth=0, shortlist=None)


@pytest.mark.filterwarnings("default")  # of another package's imports
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5_mtp"])
def test_speculators_itself_loads_it_and_drafts_the_same(
    exported: Callable[..., Any], tiny_target: Callable[..., Any], kind: str
) -> None:
    """Runs only where ``speculators`` is installed; it names an older transformers than draftproof's.

    Its mask takes another attention kernel: fp32 logits of size 1 within 1e-5, a hundred roundings.
    """
    pytest.importorskip("speculators")
    from speculators import SpeculatorModel  # noqa: PLC0415 - not a dependency

    _, folder, out = exported("speculators", kind)
    made = SpeculatorModel.from_pretrained(str(out))
    want, state = loaded(out), made.state_dict()
    assert type(made).__name__ == "MTPDraftModel"
    assert {name for name in state if name.startswith("mtp_layers.")} == set(want)
    assert all(torch.equal(state[name], want[name]) for name in want)
    generator = torch.Generator().manual_seed(3)
    ids, hidden = torch.randint(0, 288, (24,), generator=generator), torch.randn(24, 64, generator=generator)
    with torch.inference_mode():
        theirs, *_ = made(ids[None], hidden[None])
    headed = attached(tiny_target(kind, torch.float32), folder)
    head, num_slots = head_of(headed), 24 - 3 - 1
    assert len(theirs) == 3
    for step, logits in enumerate(theirs):
        ours = head.open(64, 16, headed.tables(64)).prefill(ids[step + 1 :][:num_slots], hidden[:num_slots])
        mine = head.output.rows(ours)
        assert mine.std() > 0.1
        assert (logits[0] - mine).abs().max() < 1e-5
        hidden = ours
