"""The draft head as a module that can be trained, and the frozen target it learns from.

The function is ``models.mtp.NativeHead``'s, made of transformers' own decoder layer and norms of the
family, so that gradients flow. Unrolled over several draft steps as the engine drafts: step ``k`` reads the
text's next token and the head's own row of step ``k - 1``, and attends to the slots of real hidden rows
before its draft began and to the guesses it stands on (EAGLE-3's training-time test, arXiv 2503.01840,
section 3.2). What the target computes is never stored and its weights take no gradient. Letters: B rows of
text, T slots of a row, D hidden, V vocabulary, K draft steps.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gemma3 import modeling_gemma3 as gemma3
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from draftproof.errors import ArchitectureError, OptionError
from draftproof.models.load import ARCHITECTURES, refusal
from draftproof.models.mtp import HEAD_STYLES, HeadStyle, trained_style
from draftproof.models.stock import StockModel
from draftproof.models.weights import Weights

_CPU = torch.device("cpu")
_FIRST_SCALE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """transformers' classes of one model type."""

    layer: Any
    norm: Any
    rotary: Any


FAMILIES = {
    "llama": Family(
        layer=llama.LlamaDecoderLayer, norm=llama.LlamaRMSNorm, rotary=llama.LlamaRotaryEmbedding
    ),
    "qwen3": Family(
        layer=qwen3.Qwen3DecoderLayer, norm=qwen3.Qwen3RMSNorm, rotary=qwen3.Qwen3RotaryEmbedding
    ),
    "gemma3_text": Family(
        layer=gemma3.Gemma3DecoderLayer, norm=gemma3.Gemma3RMSNorm, rotary=gemma3.Gemma3RotaryEmbedding
    ),
    "glm4_moe": Family(
        layer=glm4_moe.Glm4MoeDecoderLayer, norm=glm4_moe.Glm4MoeRMSNorm,
        rotary=glm4_moe.Glm4MoeRotaryEmbedding,
    ),
    "qwen3_5_text": Family(
        layer=qwen3_5.Qwen3_5DecoderLayer, norm=qwen3_5.Qwen3_5RMSNorm,
        rotary=qwen3_5.Qwen3_5TextRotaryEmbedding,
    ),
}  # fmt: skip


def check_target(config: Any) -> None:
    """Refuse a target no head can be trained for or attached to.

    Raises:
        ArchitectureError: the model type has no trainable head.
        OptionError: the engine could not attach one, as the model does not run row-exact.
    """
    if config.model_type not in FAMILIES:
        raise ArchitectureError(
            f"heads are trained for {', '.join(sorted(FAMILIES))}, not for model type {config.model_type!r}"
        )
    why = refusal(config)
    if why is not None:
        raise OptionError(f"no head can be attached to this model: {why}")


def style_of(config: Any) -> HeadStyle:
    """How the head of a configuration names its parts: the family's own style, or that of trained heads."""
    return HEAD_STYLES.get(config.model_type) or trained_style(config)


class FrozenTarget:
    """The stock model as teacher: hidden rows and output layer, nothing of it ever changed.

    Args:
        folder: hub folder.
        dtype: of its weights and arithmetic.
        device: where it runs.

    Attributes:
        embedding_VD: token embedding, as the head reads it (Gemma's scale is not applied).
        output_VD: weight of the output layer.
        final_norm: its last norm's weight as stored, ``[D]``.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._module = StockModel(folder, dtype, device).module
        self._module.requires_grad_(requires_grad=False)
        self._decoder = self._module.get_decoder()
        self.embedding_VD: Tensor = self._module.get_input_embeddings().weight
        self.output_VD: Tensor = self._module.get_output_embeddings().weight
        self.final_norm: Tensor = self._decoder.norm.weight
        self.device = device

    @torch.no_grad()
    def hidden(self, ids_BL: Tensor) -> Tensor:
        """Rows the output layer reads, ``[B, L, D]`` in the target's dtype.

        Rows are filled up on the right, so no mask is needed: every layer is causal.
        """
        hidden: Tensor = self._decoder(input_ids=ids_BL, use_cache=False).last_hidden_state
        return hidden

    def sha256(self) -> str:
        """Hash of every weight's name and bytes."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self._module.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()


class _Blocks:
    """What the layer takes for a cache: the keys and values of every draft step so far, one after another."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append one step's, return all, ``[B, G, steps * T, K]``."""
        self._keys.append(keys)
        self._values.append(values)
        return torch.cat(self._keys, 2), torch.cat(self._values, 2)


def unroll_mask(num_slots: int, step: int, device: torch.device) -> Tensor:
    """What a draft step's slots see of all steps' slots, ``[T, (step + 1) * T]``; steps count from 0.

    Slot ``q`` stands on a draft begun at slot ``q - step``: it sees real slots up to there, then one guess
    of each step after, itself the last.
    """
    q, k = torch.arange(num_slots, device=device)[:, None], torch.arange(num_slots, device=device)[None]
    guesses = [k == q - (step - earlier) for earlier in range(1, step + 1)]
    return torch.cat([k <= q - step, *guesses], 1)


class TrainableHead(nn.Module):
    """One decoder layer over [embedding of the next token; hidden row], in fp32, with gradients.

    Args:
        config: the target's configuration; see ``check_target``.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        family, self.style = FAMILIES[config.model_type], style_of(config)
        kinds = getattr(config, "layer_types", None) or []
        kind = max(kinds, key=lambda name: name == "full_attention") if kinds else None
        alone = copy.deepcopy(config)
        alone.num_hidden_layers, alone.attention_dropout = 1, 0.0
        if kinds:
            alone.layer_types = [kind]
        alone._attn_implementation = "sdpa"  # noqa: SLF001  the one way to set it on a bare layer
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embedding_norm, self.hidden_norm, self.norm = (family.norm(hidden, eps) for _ in range(3))
        self.projection = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = family.layer(alone, 0)
        self._rotary = family.rotary(config)
        self._rotary_kind = {"layer_type": kind} if config.model_type == "gemma3_text" else {}
        names = inspect.signature(self.layer.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # the two it has had
        self._prefix, self._std = self.style.prefix_in(config), config.initializer_range
        self.float()

    def forward(self, embedded_BTD: Tensor, hidden_BTD: Tensor, num_steps: int) -> Tensor:
        """What the output layer reads after every draft step, ``[K, B, T, D]``.

        Args:
            embedded_BTD: embeddings of the tokens the slots hold: slot ``p`` has token ``p + 1`` of the text.
            hidden_BTD: the target's hidden rows, slot ``p`` that of token ``p``.
            num_steps: draft steps ``K``.

        Row ``q`` of step ``k`` (from 0) predicts token ``q + 2`` in a draft begun at slot ``q - k``; rows
        with ``q < k`` stand on no draft and mean nothing.
        """
        num_slots, device = embedded_BTD.shape[1], embedded_BTD.device
        places = torch.arange(num_slots, device=device)[None]
        rotary = self._rotary(embedded_BTD, places, **self._rotary_kind)
        blocks, fed_BTD, outputs = _Blocks(), hidden_BTD, []
        embedded_BTD = self.embedding_norm(embedded_BTD)
        for step in range(num_steps):
            halves = [embedded_BTD, self.hidden_norm(fed_BTD)]
            u_BTD = self.projection(torch.cat(halves[::-1] if self.style.is_hidden_first else halves, -1))
            mask = unroll_mask(num_slots, step, device)[None, None] if step else None
            y_BTD = self.layer(
                u_BTD, position_embeddings=rotary, attention_mask=mask, **{self._cache_name: blocks}
            )
            outputs.append(self.norm(y_BTD))
            back_BTD = outputs[-1] if self.style.is_normed_fed_back else y_BTD
            fed_BTD = F.pad(back_BTD[:, :-1], (0, 0, 1, 0))
        return torch.stack(outputs)

    def parts(self) -> dict[str, nn.Parameter]:
        """Parameters by checkpoint name, as ``NativeHead`` asks for them."""
        style, prefix = self.style, self._prefix
        named = {
            f"{prefix}{style.embedding_norm}.weight": self.embedding_norm.weight,
            f"{prefix}{style.hidden_norm}.weight": self.hidden_norm.weight,
            f"{prefix}{style.final_norm}.weight": self.norm.weight,
            f"{prefix}{style.projection}.weight": self.projection.weight,
        }
        return named | {f"{prefix}{style.block}{k}": v for k, v in self.layer.named_parameters()}

    @torch.no_grad()
    def start_fresh(self, target: FrozenTarget, seed: int) -> None:
        """Draw the matrices as the family draws its own; the final norm is the target's, scaled down.

        So the first guesses are near uniform. With the whole norm they are sure and wrong: on
        SmolLM2-135M the first step's KL divergence was 20.9 nats instead of 9.6, and after 25 steps 7.2
        instead of 5.0.
        """
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parts().values():
            if parameter.ndim > 1:
                drawn = torch.empty(parameter.shape).normal_(0.0, self._std, generator=generator)
                parameter.copy_(drawn)
        shift = 1.0 if self.style.is_norm_shifted else 0.0
        self.norm.weight.copy_(_FIRST_SCALE * (target.final_norm.float() + shift) - shift)

    @torch.no_grad()
    def copy_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over tensors by checkpoint name, all of them."""
        for name, parameter in self.parts().items():
            parameter.copy_(tensors[name])

    def read(self, folder: Path) -> None:
        """Take over the head in a folder of its own.

        Raises:
            ModelFileError: a tensor is missing, extra, mis-shaped or of a wrong type; it is named.
        """
        self._take(weights := Weights(folder, torch.float32, _CPU))
        weights.finish()

    def read_native(self, folder: Path, config: Any) -> None:
        """Take over the head in the target's own checkpoint; see ``has_native``."""
        self._take(_checkpoint(folder, config))

    def _take(self, weights: Weights) -> None:
        self.copy_from({name: weights.take(name, tuple(p.shape)) for name, p in self.parts().items()})


def _checkpoint(folder: Path, config: Any) -> Weights:
    return Weights(folder, torch.float32, _CPU, ARCHITECTURES[config.model_type].renamed)


def has_native(folder: Path, config: Any) -> bool:
    """Whether the target's checkpoint holds a head, by its tensors: configurations claim too much."""
    style = HEAD_STYLES.get(config.model_type)
    return style is not None and _checkpoint(folder, config).has_any(style.prefix_in(config))
