"""Published layouts that hold a head of ours exactly, and settings that would make a draft lossy.

A head of ours is ``layer(projection([norm(embedding); norm(hidden)]))``, a final norm, the target's output
layer, the normed row fed back. Of the layouts of speculators 0.9.0 and SGLang 0.5.23, as their sources read,
two compute that: speculators' ``mtp`` for Qwen3 and Qwen3.5, and SGLang's native Qwen3.5 head. EAGLE-3
attends over [embedding; hidden] of twice the width and adds the hidden state instead of the projection;
EAGLE (1) norms neither half and skips the layer's first norm; MiMo's head zeroes the first slot's embedding.
No weights turn one into another, so those are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from draftproof.errors import OptionError
from draftproof.models.mtp import HEAD_STYLES, HeadStyle, trained_style

SPECULATORS, SGLANG = "speculators", "sglang"
SPECULATORS_VERSION = "0.9.0"
_SGLANG_ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")
_EAGLE3 = (
    "EAGLE-3 attends over [embedding; hidden] and adds the hidden state, where this head projects both first,"
    " so no EAGLE-3 weights compute the same"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a package names the parts of a head, and for which model types that is the same function."""

    name: str
    model_types: tuple[str, ...]
    prefix: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    block: str
    final_norm: str

    def renamed(self, config: Any) -> Callable[[str], str]:
        """From our tensor names to the layout's, for this target; others stay as they are."""
        return _renaming(
            _names(style_of(config), style_of(config).prefix_in(config)), _names(self, self.prefix)
        )

    def restored(self, config: Any) -> Callable[[str], str]:
        """From the layout's tensor names to ours; others stay as they are."""
        return _renaming(
            _names(self, self.prefix), _names(style_of(config), style_of(config).prefix_in(config))
        )


_PARTS = ("embedding_norm", "hidden_norm", "projection", "final_norm")


def _names(style: Layout | HeadStyle, prefix: str) -> tuple[list[str], str]:
    """Names of the parts outside the decoder layer, and the prefix of those inside."""
    return [f"{prefix}{getattr(style, part)}.weight" for part in _PARTS], prefix + style.block


def _renaming(before: tuple[list[str], str], after: tuple[list[str], str]) -> Callable[[str], str]:
    parts, (inside, instead) = dict(zip(before[0], after[0], strict=True)), (before[1], after[1])

    def name(stored: str) -> str:
        if stored in parts:
            return parts[stored]
        return instead + stored.removeprefix(inside) if stored.startswith(inside) else stored

    return name


LAYOUTS = {
    SPECULATORS: Layout(
        name=SPECULATORS, model_types=("qwen3", "qwen3_5_text"), prefix="mtp_layers.0.",
        embedding_norm="token_layernorm", hidden_norm="hidden_layernorm", projection="input_proj", block="",
        final_norm="final_layernorm",
    ),
    SGLANG: Layout(
        name=SGLANG, model_types=("qwen3_5_text",), prefix="mtp.", embedding_norm="pre_fc_norm_embedding",
        hidden_norm="pre_fc_norm_hidden", projection="fc", block="layers.0.", final_norm="norm",
    ),
}  # fmt: skip


def style_of(config: Any) -> HeadStyle:
    """How heads of this target are stored in a folder of ours."""
    return HEAD_STYLES.get(config.model_type) or trained_style(config)


def choose(name: str, config: Any) -> Layout:
    """The layout called ``name``; one line of why where it cannot hold this target's heads.

    Raises:
        OptionError: unknown, or not the same function.
    """
    if name not in LAYOUTS:
        raise OptionError(f"--to must be {' or '.join(LAYOUTS)}, got {name!r}")
    layout, kind = LAYOUTS[name], config.model_type
    if kind not in layout.model_types:
        known = ", ".join(layout.model_types)
        raise OptionError(f"{name} has no layout for a head of {kind!r} (for {known} it has): {_EAGLE3}")
    if kind == "qwen3" and (config.layer_types or ["full_attention"])[0] != "full_attention":
        raise OptionError(f"{name} would give the head the window of the target's first layer; it has none")
    return layout


def layer_config(document: Mapping[str, Any]) -> dict[str, Any]:
    """The text model's part of a ``config.json``."""
    return dict(document.get("text_config") or document)


def speculators_config(document: Mapping[str, Any], verifier: str, depth: int) -> dict[str, Any]:
    """``config.json`` of speculators' ``mtp``, greedy and lossless.

    Args:
        document: the target's ``config.json``.
        verifier: where the target is.
        depth: tokens drafted a round.
    """
    method = {
        "proposal_type": "greedy", "speculative_tokens": depth, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    return {
        "architectures": ["MTPDraftModel"], "speculators_model_type": "mtp",
        "speculators_version": SPECULATORS_VERSION, "num_nextn_predict_layers": 1,
        "transformer_layer_config": layer_config(document),
        "speculators_config": {
            "algorithm": "mtp", "proposal_methods": [method], "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": document.get("architectures") or []},
        },
    }  # fmt: skip


def sglang_config(document: Mapping[str, Any], *, has_map: bool) -> dict[str, Any]:
    """``config.json`` of SGLang's Qwen3.5 draft: the target's, one head layer.

    With a token map the output layer must not be tied: SGLang cuts the target's own only where it is apart.

    Raises:
        OptionError: SGLang would not take this architecture for a draft.
    """
    named = document.get("architectures") or [None]
    if named[0] not in _SGLANG_ARCHITECTURES:
        raise OptionError(
            f"SGLang drafts for {' and '.join(_SGLANG_ARCHITECTURES)}; this model says {named[0]!r}"
        )
    changes: dict[str, Any] = {"mtp_num_hidden_layers": 1}
    if has_map:
        changes["tie_word_embeddings"] = False
    if "text_config" in document:
        outer = {k: v for k, v in changes.items() if k in document}
        return {**document, **outer, "text_config": {**document["text_config"], **changes}}
    return {**document, **changes}


def sglang_options(draft: str, depth: int, token_map: str | None) -> dict[str, Any]:
    """Launch options for ``sglang --config``: a chain, and acceptance that is exact."""
    options = {
        "speculative-algorithm": "EAGLE", "speculative-draft-model-path": draft,
        "speculative-num-steps": depth, "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": depth + 1, "speculative-accept-threshold-single": 1.0,
        "speculative-accept-threshold-acc": 1.0,
    }  # fmt: skip
    return options if token_map is None else {**options, "speculative-token-map": token_map}


# Settings of speculators, vLLM and SGLang under which a draft token is kept that the target would not emit.
_EXACT: dict[str, Callable[[Any], bool]] = {
    "verifier_accept_k": lambda value: value == 1,
    "accept_tolerance": lambda value: value == 0,
    "proposal_type": lambda value: value == "greedy",
    "speculative_accept_threshold_single": lambda value: value == 1,
    "speculative_accept_threshold_acc": lambda value: value == 1,
    "rejection_sample_method": lambda value: value in ("standard", "block"),
    "spec_decoding_acceptance_method": lambda value: value == "rejection_sampler",
    "acceptance_method": lambda value: value == "rejection_sampler",
    "synthetic_acceptance_rates": lambda value: value is None,
    "synthetic_acceptance_length": lambda value: value is None,
    "posterior_threshold": lambda value: value is None,
    "posterior_alpha": lambda value: value is None,
    "typical_acceptance_sampler_posterior_threshold": lambda value: value is None,
    "typical_acceptance_sampler_posterior_alpha": lambda value: value is None,
}


def lossy(document: Any, where: str = "") -> Iterator[str]:
    """Every setting, at any depth, that accepts what the target would not say, as ``place = value``."""
    if isinstance(document, dict):
        for key, value in document.items():
            place = f"{where}.{key}" if where else str(key)
            is_exact = _EXACT.get(str(key).replace("-", "_"))
            if is_exact is not None and not is_exact(value):
                yield f"{place} = {value!r}"
            yield from lossy(value, place)
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from lossy(value, f"{where}[{index}]")
