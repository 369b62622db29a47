"""Every drafter by its name, clear refusals, and drafters of other packages by entry point."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof.cache import LayerShape
from draftproof.depth import FixedDepth
from draftproof.drafters.base import Drafter
from draftproof.drafters.build import DRAFTERS, DrafterOptions, build_drafter
from draftproof.drafters.cascade import Cascade
from draftproof.drafters.lookup import PromptLookup
from draftproof.drafters.model import ModelDrafter
from draftproof.drafters.suffix import SuffixAutomatonDrafter
from draftproof.errors import DrafterError, OptionError
from draftproof.models.base import Target
from draftproof.models.decoder import DecoderParts, DecoderTarget
from draftproof.ops.linear import PlainLinear, RowLinear
from draftproof.testing import TableTarget

NUM_LAYERS, WIDTH = 7, 16


def decoder(num_layers: int = NUM_LAYERS) -> DecoderTarget:
    """A target whose layer ``i`` turns the next token into another one; no attention."""
    weights = torch.randn(num_layers, WIDTH, WIDTH, generator=torch.Generator().manual_seed(2))
    head = RowLinear(PlainLinear([torch.eye(WIDTH)]), max_rows=9)
    return DecoderTarget(
        DecoderParts(
            name="toy",
            vocab_size=WIDTH,
            max_context=64,
            dtype=torch.float32,
            device=torch.device("cpu"),
            embedding_VD=torch.eye(WIDTH),
            embed_scale=None,
            layers=tuple(lambda h_TD, step, w=w: h_TD @ w for w in weights),
            shapes=(LayerShape(num_groups=1, head_size=2),) * num_layers,
            final_norm=lambda h_TD: h_TD,
            head=head,
            make_rotary=lambda n: {"full": (torch.ones(n, 2), torch.zeros(n, 2))},
            linears=(head,),
        ),
        max_rows=9,
    )


def options(target: Target | None = None, **given: Any) -> DrafterOptions:
    return DrafterOptions(target=target or TableTarget(8), policy=FixedDepth(4), capacity=50, **given)


def proposal(drafter: Drafter, num_tokens: int = 3) -> tuple[int, ...]:
    drafter.reset([1, 2, 3, 1])
    drafter.observe([2])
    return drafter.propose(num_tokens).ids


def test_the_table_names_every_drafter() -> None:
    assert sorted(DRAFTERS) == ["auto", "draft_model", "early_exit", "lookup", "mtp", "suffix"]
    for name in set(DRAFTERS) - {"mtp"}:  # which needs a checkpoint with a head: test_mtp.py
        given = options(decoder(), draft_model=TableTarget(WIDTH) if name == "draft_model" else None)
        made = build_drafter(name, given)
        assert isinstance(made, Drafter)
        assert made.name == name
        assert build_drafter(name, given) is not made, "a drafter is state of one request"


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        (
            "lookup",
            {"shortlist": (1, 2)},
            "--shortlist does nothing with drafter 'lookup'; it is for mtp and auto",
        ),
        (
            "suffix",
            {"exit_layer": 3},
            "--exit-layer does nothing with drafter 'suffix'; it is for early_exit",
        ),
        ("early_exit", {"draft_model": TableTarget(WIDTH)}, "--draft-model does nothing with .*early_exit"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(name: str, given: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        build_drafter(name, options(decoder(), **given))


def test_a_shortlist_without_a_head_is_refused() -> None:
    with pytest.raises(DrafterError, match="needs a native head"):
        build_drafter("auto", options(decoder(), shortlist=(1, 2)))


def test_retrieval_drafters_need_nothing() -> None:
    for name, kind in (("lookup", PromptLookup), ("suffix", SuffixAutomatonDrafter)):
        made = build_drafter(name, options())
        assert type(made) is kind
        assert proposal(made) == (3, 1, 2)


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    known = "none, auto, draft_model, early_exit, lookup, mtp, suffix"
    with pytest.raises(OptionError, match=f"unknown drafter 'medusa'; known: {known}"):
        build_drafter("medusa", options())


# --- draft model ---------------------------------------------------------------------------------------


def test_a_draft_model_drafts_within_the_capacity() -> None:
    model = TableTarget(8, seed=4)
    made = build_drafter("draft_model", options(draft_model=model))
    assert isinstance(made, ModelDrafter)
    assert proposal(made, 1) == (int(model.logits([1, 2, 3, 1, 2]).argmax()),)
    made.reset([1] * 50)
    made.observe([2])
    assert made.propose(1).ids == ()


def test_a_missing_draft_model_is_asked_for() -> None:
    with pytest.raises(DrafterError, match="needs --draft-model"):
        build_drafter("draft_model", options())


@pytest.mark.parametrize("name", ["draft_model", "auto"])
def test_a_draft_model_with_another_vocabulary_is_refused(name: str) -> None:
    with pytest.raises(DrafterError, match="vocabulary has 9 entries, the target's 8"):
        build_drafter(name, options(draft_model=TableTarget(9)))


# --- early exit ----------------------------------------------------------------------------------------


def chain(target: DecoderTarget, num_layers: int, token: int, num_tokens: int) -> tuple[int, ...]:
    """The greedy continuation of ``token`` by the first ``num_layers`` layers, by hand."""
    out = []
    for _ in range(num_tokens):
        h_TD = torch.eye(WIDTH)[token : token + 1]
        for layer in target.parts.layers[:num_layers]:
            h_TD = layer(h_TD, None)  # type: ignore[arg-type]
        token = int(h_TD[0].argmax())
        out.append(token)
    return tuple(out)


@pytest.mark.parametrize(("exit_layer", "num_layers"), [(None, 2), (1, 1), (2, 2), (5, 5), (6, 6)])
def test_an_early_exit_runs_the_first_layers(exit_layer: int | None, num_layers: int) -> None:
    """A third of seven layers is two."""
    target = decoder()
    by_layers = [chain(target, n, 2, 5) for n in range(1, NUM_LAYERS + 1)]
    others = [ids for n, ids in enumerate(by_layers, start=1) if n != num_layers]
    assert by_layers[num_layers - 1] not in others, "the toy must tell the layers apart"
    made = build_drafter("early_exit", options(target, exit_layer=exit_layer))
    assert made.name == "early_exit"
    assert proposal(made, 5) == by_layers[num_layers - 1]
    assert target.num_layers == NUM_LAYERS


def test_a_two_layer_target_exits_after_one() -> None:
    target = decoder(2)
    assert proposal(build_drafter("early_exit", options(target)), 5) == chain(target, 1, 2, 5)


@pytest.mark.parametrize("exit_layer", [-1, NUM_LAYERS, NUM_LAYERS + 1])
def test_an_exit_outside_the_target_is_refused(exit_layer: int) -> None:
    with pytest.raises(DrafterError, match=f"must be 1 to {NUM_LAYERS - 1}, got {exit_layer}"):
        build_drafter("early_exit", options(decoder(), exit_layer=exit_layer))


def test_an_early_exit_needs_a_row_exact_target() -> None:
    with pytest.raises(DrafterError, match="needs a row-exact target; 'table' runs through transformers"):
        build_drafter("early_exit", options())


# --- auto ----------------------------------------------------------------------------------------------


def test_auto_is_retrieval_and_the_draft_model_where_there_is_one() -> None:
    made = build_drafter("auto", options())
    assert isinstance(made, Cascade)
    assert proposal(made) == (3, 1, 2)
    made.reset([1, 2, 3])
    made.observe([4])
    assert made.propose(3).ids == (), "nothing repeats and no model is there"
    model = TableTarget(8, seed=4)
    made = build_drafter("auto", options(draft_model=model))
    made.reset([1, 2, 3])
    made.observe([4])
    draft = made.propose(1)
    assert (draft.ids, draft.source) == ((int(model.logits([1, 2, 3, 4]).argmax()),), "draft_model")


# --- entry points --------------------------------------------------------------------------------------


MODULE = """
class Echo:
    def __init__(self, options):
        self.name, self.options = "echo", options
def make(options):
    return Echo(options)
"""


def install(folder: Path, name: str, entries: str) -> None:
    """A distribution as a wheel would leave it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entries)


def test_a_drafter_of_another_package_is_loaded_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken one beside it is never imported: entry points are not searched."""
    (tmp_path / "draftproof_test_echo.py").write_text(MODULE)
    (tmp_path / "draftproof_test_broken.py").write_text("raise SystemExit('imported')")
    install(
        tmp_path, "draftproof_test_broken", "[draftproof.drafters]\nbroken = draftproof_test_broken:make\n"
    )
    install(
        tmp_path,
        "draftproof_test_echo",
        "[draftproof.drafters]\necho = draftproof_test_echo:make\nlookup = draftproof_test_broken:make\n"
        "[another.group]\nother = draftproof_test_echo:make\n",
    )
    monkeypatch.syspath_prepend(tmp_path)
    given = options()
    made: Any = build_drafter("echo", given)
    assert made.name == "echo"
    assert made.options is given
    assert isinstance(build_drafter("lookup", given), PromptLookup), "a known name cannot be replaced"
    with pytest.raises(OptionError, match="unknown drafter 'other'"):
        build_drafter("other", given)
