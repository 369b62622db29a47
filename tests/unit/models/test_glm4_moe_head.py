"""GLM-4.5's dense head against transformers' own ``MtpModel`` and ``generate(use_mtp=True)``.

transformers builds every such head with experts, and looks for it behind the layers of released models only:
``lifted`` lifts both. It runs the head's slots one position later than the target's rows, which rotates
queries and keys alike; bits are compared at our positions, drafts at its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM
from transformers.cache_utils import MtpCache
from transformers.generation.candidate_generator import MTPCandidateGenerator
from transformers.modeling_layers import MtpModel

import draftproof
from draftproof.clock import RealClock
from draftproof.decode import Decoding, speculate
from draftproof.depth import FixedDepth
from draftproof.drafters.mtp import MtpDrafter, head_of
from draftproof.models.mtp import HeadSession
from draftproof.rules import Rules, RuleSet

BF16, FP32 = torch.bfloat16, torch.float32
KIND = "glm4_moe_mtp"


@pytest.fixture
def lifted(pair: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.dtype], Any]:
    """``lifted(dtype)``: the pair, whose stock module finds and builds its dense head."""
    make = Glm4MoeConfig.get_mtp_config

    def dense(self: Any) -> Any:
        config = make(self)
        config.first_k_dense_replace = self.first_k_dense_replace
        return config

    monkeypatch.setattr(Glm4MoeConfig, "get_mtp_config", dense)

    def found(dtype: torch.dtype) -> Any:
        models = pair(KIND, dtype, "bitwise")
        ignored = [r"model\.layers\.3\..*"]  # loaded models hold a list of their own
        monkeypatch.setattr(models.stock.module, "_keys_to_ignore_on_load_unexpected", ignored)
        return models

    return found


class StockSlots:
    """transformers' layer and cache, one pass a call, at the positions given."""

    def __init__(self, model: MtpModel, start: int = 0) -> None:
        self._model, self._position = model, start
        self._cache = MtpCache(config=model.config)

    @torch.inference_mode()
    def __call__(self, ids_T: Tensor, hidden_TD: Tensor) -> Tensor:
        positions = torch.arange(len(ids_T))[None] + self._position
        self._position += len(ids_T)
        rows: Tensor = self._model.forward_layer(
            0, hidden_TD[None], positions, self._cache, input_ids=ids_T[None]
        )
        return rows[0]


def opened(found: Any, ids: list[int]) -> tuple[MtpModel, HeadSession, Tensor]:
    """transformers' head, ours, and the rows the target computed for ``ids``, which are stock's."""
    session = found.target.open(64)
    session.hidden.keep()
    session.prefill(ids)
    hidden_TD = session.hidden.take()
    with torch.inference_mode():
        stock = found.stock.module(torch.tensor([ids]), output_hidden_states=-1).hidden_states[-1]
    assert torch.equal(hidden_TD, stock[0]), "rows after the final norm"
    own = head_of(found.target).open(64, found.target.max_rows, found.target.tables(64))
    return MtpModel.from_pretrained(found.stock.module).eval(), own, hidden_TD


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
def test_every_slot_has_the_bits_of_transformers_head(lifted: Callable[..., Any], dtype: torch.dtype) -> None:
    """Slots one by one and several a call, then four tokens drafted from the head's own rows."""
    found = lifted(dtype)
    ids = found.prompt(17)
    model, own, hidden_TD = opened(found, ids)
    stock, next_ids = StockSlots(model), torch.tensor(ids[1:])
    want = torch.cat([stock(next_ids[p : p + 1], hidden_TD[p : p + 1]) for p in range(16)])
    got = [own.prefill(next_ids[:1], hidden_TD[:1])]
    for start, end in ((1, 2), (2, 3), (3, 7), (7, 16)):
        got.append(own.extend(next_ids[start:end], hidden_TD[start:end]))
        own.cache.commit(end - start)
    assert torch.equal(torch.cat(got), want)
    assert want.std() > 0.1
    row, fed_back = want[-1:], got[-1][-1:]
    head = head_of(found.target)
    for _ in range(4):
        with torch.inference_mode():
            logits = model.shared_head(row)
            mine = head.output.rows(head.readable(fed_back))
        assert torch.equal(mine, logits)
        row, fed_back = stock(logits.argmax(-1), row), own.extend(mine.argmax(-1), fed_back)
        assert torch.equal(row, fed_back)


def test_a_prompts_slots_are_transformers_at_its_own_positions(lifted: Callable[..., Any]) -> None:
    """Up to fp32's rounding of some hundred products a sum and of the rotated angle: far under 1e-4."""
    found = lifted(FP32)
    ids = found.prompt(33)
    model, own, hidden_TD = opened(found, ids)
    next_ids = torch.tensor(ids[1:])
    want = StockSlots(model, start=1)(next_ids, hidden_TD[:-1])
    assert torch.allclose(own.prefill(next_ids, hidden_TD[:-1]), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("length", [2, 9, 33])
def test_drafts_are_those_of_generate(
    lifted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Round by round: the context a token was drafted for, and the token."""
    found, want = lifted(FP32), []
    get = MTPCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        drafted = get(self, input_ids, *args, **options)
        context = input_ids.shape[1]
        if drafted[0].shape[1] > context:
            want.append((context, tuple(drafted[0][0, context:].tolist())))
        return drafted

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", noted)
    prompt = found.prompt(length)
    module = found.stock.module
    text = module.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, use_mtp=True)
    rounds = drafting(found, prompt, 24, FixedDepth(1))
    assert [i for r in rounds for i in r.emitted] == text[0, length:].tolist()
    got = [(r.position, r.offered) for r in rounds if r.offered]
    assert len(got) >= 12
    assert got == want[: len(got)]


def drafting(found: Any, prompt: list[int], num_tokens: int, policy: FixedDepth) -> list[Any]:
    session = found.target.open(len(prompt) + num_tokens + 8)
    drafter = MtpDrafter(found.target, session, len(prompt) + num_tokens + 8)
    rules = Rules(RuleSet(max_new_tokens=num_tokens), prompt, torch.device("cpu"))
    run = Decoding(session=session, rules=rules, clock=RealClock(), max_rows=found.target.max_rows)
    return list(speculate(run, prompt, drafter, policy))


@pytest.mark.usefixtures("scratch_cache")
def test_the_engine_emits_stocks_text(pair: Callable[..., Any]) -> None:
    found = pair(KIND, BF16, "bitwise")
    engine = draftproof.load(str(found.folder), dtype="bfloat16", claim="bitwise")
    for length in (1, 5, 40):
        prompt = found.prompt(length)
        want = found.stock.run(prompt, 30).token_ids
        for depth in range(5):
            got = engine.generate(prompt, drafter="mtp", depth=depth, max_new_tokens=30)
            assert list(got.token_ids) == list(want), (length, depth)
            assert (got.trace.rounds[-2].source == "mtp") == (depth > 0)


def test_a_loaded_module_brings_no_head(tiny_folder: Callable[..., Path]) -> None:
    module = Glm4MoeForCausalLM.from_pretrained(tiny_folder(KIND, BF16), dtype=BF16)
    assert not any("layers.3." in name for name in module.state_dict())
