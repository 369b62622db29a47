"""``model.generate(..., custom_generate=draftproof.custom_generate)``: speculation inside transformers.

The module's own weights are used, not copied: linears keep the checkpoint's layout, so the plan is probed
for that layout alone (a shape that is not row-invariant in it runs row by row). Everything ``generate``
prepares, logits processors and stopping criteria included, is applied as stock applies it.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria

from draftproof.clock import RealClock
from draftproof.decode import Decoding, speculate
from draftproof.depth import CostAwareDepth, DepthPolicy, FixedDepth
from draftproof.drafters.build import DrafterOptions, build_drafter
from draftproof.errors import DrafterError, OptionError, PromptError
from draftproof.models.base import Target
from draftproof.models.generic import GenericTarget
from draftproof.models.load import ModuleWeights, build_decoder, refusal
from draftproof.plans import PlanRequest, PlanStore, generic_plan, plan_key
from draftproof.record import CostCurve, Plan
from draftproof.rules import Rules, RuleSet


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """What is kept for a module: how it ran when it was measured, never its weights."""

    how: tuple[Any, ...]
    plan: Plan
    curve: CostCurve


_MEASURED: weakref.WeakKeyDictionary[Any, _Measured] = weakref.WeakKeyDictionary()


def custom_generate(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
    drafter: str = "auto", depth: int | str = "auto", streamer: Any = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Decode one sequence greedily and exactly.

    Args:
        model: the transformers model ``generate`` was called on.
        input_ids: ``[1, n]`` prompt ids.
        logits_processor: stock's prepared processors.
        stopping_criteria: stock's prepared criteria.
        generation_config: stock's prepared configuration.
        drafter: as in ``Engine.generate``; needs no model of its own.
        depth: as in ``Engine.generate``.
        streamer: gets the ids of every round.
        **kwargs: stock's model arguments; only their defaults are supported.

    Returns:
        ``[1, n + new]`` ids, as ``generate`` returns them.

    Raises:
        OptionError: sampling, beams, more than one sequence, or a padded prompt.
    """
    _refuse(input_ids, generation_config, kwargs)
    target, plan, curve = _prepare(model)
    policy: DepthPolicy = CostAwareDepth(curve) if depth == "auto" else FixedDepth(_number(depth))
    prompt_ids = input_ids[0].tolist()
    if generation_config.max_length > target.max_context:
        raise PromptError(
            f"{generation_config.max_length} positions asked for, the model has {target.max_context}"
        )
    max_new = generation_config.max_length - len(prompt_ids)
    rule_set = RuleSet(
        max_new_tokens=max_new, eos_ids=_eos(generation_config), processors=tuple(logits_processor),
        criteria=tuple(
            c for c in stopping_criteria if not isinstance(c, MaxLengthCriteria | EosTokenCriteria)
        ),
    )  # fmt: skip
    if plan.margin_bound is not None:
        rule_set.refuse_uncopyable()
    capacity = len(prompt_ids) + max_new + plan.max_rows
    open_session = cache(partial(target.open, capacity))
    options = DrafterOptions(target=target, policy=policy, capacity=capacity, open_session=open_session)
    made = build_drafter(drafter, options)
    run = Decoding(
        session=open_session(), rules=Rules(rule_set, prompt_ids, input_ids.device),
        clock=RealClock(), max_rows=plan.max_rows, margin_bound=plan.margin_bound,
    )  # fmt: skip
    emitted: list[int] = []
    for round_ in speculate(run, prompt_ids, made, policy):
        emitted.extend(round_.emitted)
        if streamer is not None:
            streamer.put(torch.tensor(round_.emitted))
    if streamer is not None:
        streamer.end()
    return torch.cat([input_ids, input_ids.new_tensor([emitted])], -1)


def _refuse(input_ids: Tensor, config: Any, kwargs: dict[str, Any]) -> None:
    if input_ids.shape[0] != 1:
        raise OptionError(f"draftproof decodes one sequence a call, got {input_ids.shape[0]}")
    if config.do_sample or config.num_beams != 1 or config.num_return_sequences not in (None, 1):
        raise OptionError("draftproof decodes greedily: no sampling, beams or several sequences")
    if config.return_dict_in_generate:
        raise OptionError("return_dict_in_generate is not supported; generate returns ids")
    if not config.use_cache:
        raise OptionError("draftproof decodes with a cache; use_cache=False is not supported")
    mask, positions, cache = (kwargs.get(name) for name in ("attention_mask", "position_ids", "cache"))
    if mask is not None and not bool((mask == 1).all()):
        raise OptionError("draftproof needs an unpadded prompt: the attention mask holds zeros")
    if positions is not None and positions.reshape(-1).tolist() != list(range(input_ids.shape[1])):
        raise OptionError("draftproof counts positions from 0; other position_ids are not supported")
    if cache is not None and cache.get_seq_length() > 0:
        raise OptionError("draftproof fills its own cache; a filled one is not supported")
    if kwargs.get("inputs_embeds") is not None:
        raise OptionError("draftproof needs token ids; inputs_embeds are not supported")


def _number(depth: int | str) -> int:
    if isinstance(depth, str):
        raise OptionError(f"depth must be a number or 'auto', got {depth!r}")
    return depth


def _eos(config: Any) -> frozenset[int]:
    tensor = getattr(config, "_eos_token_tensor", None)
    return frozenset() if tensor is None else frozenset(tensor.reshape(-1).tolist())


def _prepare(model: Any) -> tuple[Target, Plan, CostCurve]:
    """Target, plan and cost curve of a module.

    The target is made anew for every call, as it only refers to the module's tensors; plan and curve are
    kept as long as the module runs the same way.
    """
    config, dtype, device = model.config.get_text_config(), model.dtype, model.device
    attention = getattr(config, "_attn_implementation", "sdpa")
    store = PlanStore(device, RealClock())
    if attention == "sdpa" and refusal(config) is None:
        plan = store.plan(config, PlanRequest(dtype=dtype, device=device, share=True))
        target: Target = build_decoder(config, ModuleWeights(model), plan, dtype=dtype, device=device)
    else:
        generic = GenericTarget(model)
        why = generic.refuse_drafting()
        if why is not None:
            raise DrafterError(why)
        target, plan = generic, replace(generic_plan(dtype, store.fingerprint), claim="guarded")
    how = (config.model_type, config.hidden_size, config.num_hidden_layers, config.vocab_size, attention)
    known = _MEASURED.get(model)
    if known is None or known.how != (*how, plan.dtype):
        key = plan_key(" ".join(map(str, how)) + f" {type(target).__name__}", plan)
        if plan.claim == "guarded":
            plan = replace(plan, margin_bound=store.margin(target, key))
        known = _Measured(how=(*how, plan.dtype), plan=plan, curve=store.curve(target, key))
        _MEASURED[model] = known
    return target, known.plan, known.curve
