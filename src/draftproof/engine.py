"""What users hold: ``load`` a model, then ``generate`` or ``stream`` what stock greedy decoding emits.

An engine knows how it is exact (``engine.plan.claim``) and what a verification costs here
(``engine.curve``). Requests share nothing but weights: every one gets a fresh cache, drafter and policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch

from draftproof.clock import Clock, RealClock
from draftproof.decode import Decoding, plain_decode, speculate
from draftproof.depth import MAX_DEPTH, CostAwareDepth, DepthPolicy, FixedDepth
from draftproof.drafters.build import DrafterOptions, build_drafter, has_native_head
from draftproof.drafters.shortlist import default_shortlist
from draftproof.errors import DrafterError, ModelError, OptionError, PromptError
from draftproof.models.base import Session, Target
from draftproof.models.catalog import DEFAULT_MODEL
from draftproof.models.decoder import DecoderTarget
from draftproof.models.generic import GenericTarget
from draftproof.models.load import (
    DTYPES,
    attach_head,
    load_decoder,
    load_generic,
    load_tokenizer,
    read_config,
    refusal,
    resolve,
)
from draftproof.models.stock import RuleFactory
from draftproof.models.weights import identity
from draftproof.plans import PlanRequest, PlanStore, generic_plan, plan_key
from draftproof.probe import ClaimRequest, Progress
from draftproof.record import CostCurve, Plan, Round, Trace
from draftproof.rules import Rules, RuleSet
from draftproof.stream import Generation, Stream

Prompt = str | Sequence[int] | Sequence[dict[str, str]]
Depth = int | Literal["auto"]
_FIRST_GUESS = 0.2  # a head step against a target step, until drafts have been timed


def load(
    name_or_path: str = DEFAULT_MODEL,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
    claim: ClaimRequest = "auto",
    head: str | None = None,
    threads: int | None = None,
    refresh: bool = False,
    progress: Progress | None = None,
) -> Engine:
    """Load a packaged model, a hub folder or a GGUF file as an exact engine.

    The first call on a machine probes its kernels and measures the cost curve; later calls read both back.

    Args:
        name_or_path: packaged name (``draftproof models``), folder with safetensors, or ``.gguf`` file.
        dtype: ``bfloat16``, ``float16`` or ``float32``, of weights and activations.
        device: a torch device.
        claim: ``auto``, ``bitwise``, ``guarded`` or ``fixed`` (see ``docs/exactness.md``).
        head: folder of a trained head, for drafters ``mtp`` and ``auto``; replaces the checkpoint's own. A
            ``shortlist.json`` in it is used by requests that name no shortlist.
        threads: torch threads; both arms of a comparison must use the same number.
        refresh: probe and measure again.
        progress: called with (stage, done, total) during long steps.

    Raises:
        ModelError: the model is unknown, broken or of an unsupported kind.
        OptionError: an unknown dtype or claim.
    """
    if dtype not in DTYPES:
        raise OptionError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if claim not in ("auto", "bitwise", "guarded", "fixed"):
        raise OptionError(f"unknown claim {claim!r}; known: auto, bitwise, guarded, fixed")
    place = _device(device)
    if threads is not None:
        if threads < 1:
            raise OptionError(f"threads must be 1 or more, got {threads}")
        torch.set_num_threads(threads)
    folder = resolve(name_or_path, dtype, progress)
    config = read_config(folder)
    store = PlanStore(place, RealClock(), refresh=refresh)
    request = PlanRequest(claim=claim, dtype=DTYPES[dtype], device=place)
    target, plan = _target(folder, config, store, request, progress)
    if head is not None:
        target = _with_head(target, head, plan)
    curve = store.curve(target, plan_key(identity(folder), plan), progress)
    return Engine(
        target, plan, curve, rule_factory=RuleFactory(folder, place), folder=folder, name=name_or_path,
    )  # fmt: skip


def load_target(
    name_or_path: str, *, dtype: str = "bfloat16", device: str = "cpu", like: Engine | None = None
) -> Target:
    """A model to draft with: row-exact where possible, without cost curve.

    Args:
        name_or_path: as in ``load``.
        dtype: as in ``load``.
        device: as in ``load``.
        like: the engine it will draft for; its vocabulary is compared token by token.

    Raises:
        DrafterError: the vocabularies differ.
    """
    place = _device(device)
    folder = resolve(name_or_path, dtype)
    if like is not None and load_tokenizer(folder).get_vocab() != like.tokenizer.get_vocab():
        raise DrafterError(
            f"{name_or_path} has another vocabulary than {like.name}; a draft model must share its tokenizer"
        )
    store = PlanStore(place, RealClock())
    request = PlanRequest(claim="auto", dtype=DTYPES[dtype], device=place)
    return _target(folder, read_config(folder), store, request, None)[0]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).tolist()
    except (RuntimeError, AssertionError) as error:
        raise OptionError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from error
    return device


def _target(
    folder: Path, config: Any, store: PlanStore, request: PlanRequest, progress: Progress | None
) -> tuple[Target, Plan]:
    """The best target for a folder, and its plan with a calibrated margin where it is guarded."""
    why = refusal(config)
    if why is None:
        plan = store.plan(config, request, progress)
        target: Target = load_decoder(folder, config, plan, dtype=request.dtype, device=request.device)
    else:
        if request.claim in ("bitwise", "fixed"):
            raise ModelError(f"the claim {request.claim!r} needs a row-exact target: {why}")
        generic = load_generic(folder, dtype=request.dtype, device=request.device)
        plan = generic_plan(request.dtype, store.fingerprint)
        if generic.refuse_drafting() is not None:
            return generic, plan
        target, plan = generic, replace(plan, claim="guarded")
    if plan.claim == "guarded":
        plan = replace(plan, margin_bound=store.margin(target, plan_key(identity(folder), plan)))
    return target, plan


def _with_head(target: Target, head: str, plan: Plan) -> Target:
    if not isinstance(target, DecoderTarget):
        raise DrafterError(f"a head needs a row-exact target; {target.name!r} runs through transformers")
    folder = Path(head).expanduser()
    if not folder.is_dir():
        raise DrafterError(f"no head folder {head!r}")
    return attach_head(target, folder, plan, default_shortlist(folder, target.vocab_size))


def _as_tuple(ids: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(ids)


class Engine:
    """A loaded model that decodes exactly; build it with ``load``."""

    def __init__(
        self, target: Target, plan: Plan, curve: CostCurve, *, rule_factory: RuleFactory, folder: Path,
        name: str, tokenizer: Any = None, clock: Clock | None = None,
    ) -> None:  # fmt: skip
        self.target, self.plan, self.curve = target, plan, curve
        self.folder, self.name = folder, name
        self._rules, self._clock, self._tokenizer = rule_factory, clock or RealClock(), tokenizer

    def with_head(self, head: str) -> Engine:
        """An engine with the head in the folder ``head``; weights, plan and cost curve are shared.

        Raises:
            UsageError: the folder holds no head of this model.
        """
        return Engine(
            _with_head(self.target, head, self.plan), self.plan, self.curve, rule_factory=self._rules,
            folder=self.folder, name=self.name, tokenizer=self._tokenizer, clock=self._clock,
        )  # fmt: skip

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, loaded when text is first needed; ids need none."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.folder)
        return self._tokenizer

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Token ids of a prompt.

        A string becomes a user turn where the tokenizer has a chat template, unless ``raw``; a list of
        messages uses the template; ids are taken as they are.

        Raises:
            PromptError: empty, no template for messages, or ids outside the vocabulary.
        """
        ids = list(self._encode(prompt, raw=raw))
        if not ids:
            raise PromptError("the prompt is empty")
        if min(ids) < 0 or max(ids) >= self.target.vocab_size:
            raise PromptError(f"prompt ids must lie in 0..{self.target.vocab_size - 1}")
        return ids

    def _encode(self, prompt: Prompt, *, raw: bool) -> Sequence[int]:
        if isinstance(prompt, str):
            if not prompt.strip():
                raise PromptError("the prompt is empty")
            if raw or not self._has_template:
                return list(self.tokenizer(prompt)["input_ids"])
            prompt = [{"role": "user", "content": prompt}]
        if prompt and isinstance(prompt[0], dict):
            if not self._has_template:
                raise PromptError("this tokenizer has no chat template; pass text instead of messages")
            return list(
                self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
            )
        return [int(i) for i in prompt]  # type: ignore[arg-type]

    @property
    def _has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def generate(
        self, prompt: Prompt, *, max_new_tokens: int = 256, drafter: str = "auto", depth: Depth = "auto",
        raw: bool = False, draft_model: Target | None = None, exit_layer: int | None = None,
        shortlist: Sequence[int] | None = None, **options: Any,
    ) -> Generation:  # fmt: skip
        """Decode greedily to the end; the tokens stock's ``generate(do_sample=False)`` emits.

        Args:
            prompt: text, messages or ids.
            max_new_tokens: most tokens to emit.
            drafter: ``auto``, ``lookup``, ``suffix``, ``draft_model``, ``early_exit``, ``mtp`` or ``none``.
            depth: tokens verified a round, or ``auto`` for the cost-aware choice.
            raw: do not apply the chat template to text.
            draft_model: the target to draft with (``load_target``).
            exit_layer: layers the early exit runs.
            shortlist: ids the native head may draft; by default those its folder names, else all.
            **options: ``generate``'s own, such as ``repetition_penalty``, ``stop_strings``,
                ``eos_token_id``, ``min_new_tokens``, ``bad_words_ids``, ``logits_processor``.

        Raises:
            UsageError: before the first token, when the request cannot be decoded exactly.
        """
        stream = self.stream(
            prompt, max_new_tokens=max_new_tokens, drafter=drafter, depth=depth, raw=raw,
            draft_model=draft_model, exit_layer=exit_layer, shortlist=shortlist, **options,
        )  # fmt: skip
        for _ in stream:
            pass
        return stream.result()

    def stream(
        self, prompt: Prompt, *, max_new_tokens: int = 256, drafter: str = "auto", depth: Depth = "auto",
        raw: bool = False, draft_model: Target | None = None, exit_layer: int | None = None,
        shortlist: Sequence[int] | None = None, **options: Any,
    ) -> Stream:  # fmt: skip
        """Like ``generate``, as an iterator of chunks; ``result()`` works at any point."""
        ids = self.encode(prompt, raw=raw)
        rounds, run = self._start(
            ids, max_new_tokens, drafter, depth, draft_model=draft_model, exit_layer=exit_layer,
            shortlist=shortlist, **options,
        )  # fmt: skip
        return Stream(rounds, run, ids, self.plan, self.tokenizer, self._clock)

    def decode(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int = 256, drafter: str = "auto",
        depth: Depth = "auto", draft_model: Target | None = None, exit_layer: int | None = None,
        shortlist: Sequence[int] | None = None, **options: Any,
    ) -> Trace:  # fmt: skip
        """Like ``generate`` from ids to ids: the trace alone, without touching a tokenizer."""
        ids = self.encode(prompt_ids)
        rounds, run = self._start(
            ids, max_new_tokens, drafter, depth, draft_model=draft_model, exit_layer=exit_layer,
            shortlist=shortlist, **options,
        )  # fmt: skip
        start = run.clock.now_ns()
        first = next(rounds)
        prefill_ns = run.clock.now_ns() - start
        return Trace(num_prompt=len(ids), prefill_ns=prefill_ns, rounds=(first, *rounds))

    def _start(
        self, ids: Sequence[int], max_new_tokens: int, drafter: str, depth: Depth, *,
        draft_model: Target | None, exit_layer: int | None, shortlist: Sequence[int] | None, **options: Any,
    ) -> tuple[Iterator[Round], Decoding]:  # fmt: skip
        """Check the request, then set up a fresh session, rules, drafter and policy for it."""
        self._check_length(ids, max_new_tokens)
        tokenizer = self.tokenizer if options.get("stop_strings") else None
        rule_set = self._rules.build(len(ids), max_new_tokens, tokenizer, **options)
        if self.plan.margin_bound is not None:
            rule_set.refuse_uncopyable()
        policy = self._policy(depth)
        capacity = len(ids) + max_new_tokens + self.target.max_rows
        open_session, made = cache(partial(self.target.open, capacity)), None
        if drafter != "none":
            self._check_can_draft()
            made = build_drafter(
                drafter,
                DrafterOptions(
                    target=self.target, policy=policy, capacity=capacity, draft_model=draft_model,
                    exit_layer=exit_layer, open_session=open_session, shortlist=_as_tuple(shortlist),
                ),
            )  # fmt: skip
        run = self._decoding(ids, rule_set, open_session())
        return (plain_decode(run, ids) if made is None else speculate(run, ids, made, policy)), run

    def _check_can_draft(self) -> None:
        if isinstance(self.target, GenericTarget):
            why = self.target.refuse_drafting()
            if why is not None:
                raise DrafterError(f"{why}; use drafter 'none'")

    def _check_length(self, ids: Sequence[int], max_new_tokens: int) -> None:
        if max_new_tokens < 1:
            raise OptionError(f"max_new_tokens must be 1 or more, got {max_new_tokens}")
        if len(ids) + max_new_tokens > self.target.max_context:
            raise PromptError(
                f"{len(ids)} prompt tokens and {max_new_tokens} new ones exceed the model's context of"
                f" {self.target.max_context}; shorten the prompt or lower max_new_tokens"
            )

    def _decoding(self, ids: Sequence[int], rule_set: RuleSet, session: Session) -> Decoding:
        device = self.target.parts.device if isinstance(self.target, DecoderTarget) else torch.device("cpu")
        return Decoding(
            session=session, rules=Rules(rule_set, ids, device), clock=self._clock,
            max_rows=self.plan.max_rows, margin_bound=self.plan.margin_bound,
        )  # fmt: skip

    def _policy(self, depth: Depth) -> DepthPolicy:
        if isinstance(depth, int):
            if depth > self.target.max_rows - 1:
                raise OptionError(f"depth can be at most {self.target.max_rows - 1} here, got {depth}")
            return FixedDepth(depth)
        if depth != "auto":
            raise OptionError(f"depth must be a number or 'auto', got {depth!r}")
        step = self.curve.at(1, self.curve.contexts[0])
        draft_seconds = {"draft_model": step / 2, "early_exit": step / 2}
        if has_native_head(self.target):
            draft_seconds["mtp"] = step * _FIRST_GUESS
        return CostAwareDepth(
            self.curve, max_depth=min(MAX_DEPTH, self.target.max_rows - 1), draft_seconds=draft_seconds
        )  # fmt: skip
