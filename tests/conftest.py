"""Fixtures for every test file; nothing here is imported by name.

- ``scratch_cache``: ``DRAFTPROOF_CACHE`` points to a fresh folder for this test; the folder's path.
- ``tiny_folder(kind, dtype=torch.float32, **config)``: the hub folder of a tiny model with fixed random
  weights and a byte-level tokenizer of 288 tokens, made once a session; treat it as read-only. Kinds:
  ``llama``, ``qwen3``, ``gemma3_text``, ``glm4_moe`` (dense), ``glm4_moe_mtp`` (with a native head),
  ``qwen3_5_text``, ``qwen3_5_mtp`` (the same), ``qwen3_5_moe_text``, ``qwen3_5_moe_mtp`` (experts stored
  one by one), ``gpt2``, ``mistral``; ``config`` replaces fields of the configuration. No model has an end
  token unless ``config`` names one.
- ``tiny_target(kind, dtype, **config)``: that model as a row-exact target of claim ``bitwise``, made once a
  session; its kernels are probed here, in this process.

Torch runs on two threads, as bits may depend on their number. They sleep while they wait: where two runs
share the cores, spinning makes these small kernels several times slower.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is loaded

import safetensors.torch
import tokenizers
import torch
import transformers

from draftproof.clock import RealClock
from draftproof.models.decoder import DecoderTarget
from draftproof.models.load import load_decoder, read_config
from draftproof.plans import PlanRequest, PlanStore, ProbeShapes

VOCAB = 288
_COMMON = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_DECODER = {
    **_COMMON, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA = {**_DECODER, "sliding_window": 16, "layer_types": _MIXED, "tie_word_embeddings": True}
_QWEN3_5 = {
    **_DECODER, "num_hidden_layers": 5,
    "layer_types": [*["linear_attention", "full_attention"] * 2, "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "partial_rotary_factor": 0.5,
}  # fmt: skip
_QWEN3_5_MOE = {
    **{k: v for k, v in _QWEN3_5.items() if k != "intermediate_size"}, "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_experts": 6,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 48,
}  # fmt: skip
_GLM4 = {**_DECODER, "first_k_dense_replace": 9, "num_mtp_layers": 1, "use_qk_norm": True}
_GPT2 = {**_COMMON, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
_KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _DECODER),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _DECODER),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM", _GEMMA),
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _QWEN3_5),
    "qwen3_5_mtp": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**_QWEN3_5, "mtp_num_hidden_layers": 1}),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _QWEN3_5_MOE),
    "qwen3_5_moe_mtp": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", _QWEN3_5_MOE),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM", _GLM4),
    "glm4_moe_mtp": ("Glm4MoeConfig", "Glm4MoeForCausalLM", _GLM4),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_DECODER, "sliding_window": 16}),
}

# Of a native head: prefix, the same of its decoder layer, norms, projection, copies of the target's tensors.
_Head = tuple[str, str, tuple[str, ...], str, dict[str, str]]
_QWEN_HEAD: _Head = (
    "mtp.", "layers.0.", ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"), "fc", {},
)  # fmt: skip
_HEADS: dict[str, _Head] = {
    "qwen3_5_mtp": _QWEN_HEAD,
    "qwen3_5_moe_mtp": _QWEN_HEAD,
    "glm4_moe_mtp": (
        "model.layers.3.", "", ("shared_head.norm", "enorm", "hnorm"), "eh_proj",
        {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"},
    ),
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)


@pytest.fixture
def scratch_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(folder))
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def make(kind: str, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
        key = f"{kind} {dtype} {sorted(config.items())}"
        if key not in made:
            made[key] = _save(tmp_path_factory.mktemp(kind), kind, dtype, config)
        return made[key]

    return make


@pytest.fixture(scope="session")
def tiny_target(
    tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., DecoderTarget]:
    made: dict[str, DecoderTarget] = {}
    cache = tmp_path_factory.mktemp("findings")

    def make(kind: str, dtype: torch.dtype, **config: Any) -> DecoderTarget:
        key = f"{kind} {dtype} {sorted(config.items())}"
        if key not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("DRAFTPROOF_CACHE", str(cache))
                made[key] = _planned(tiny_folder(kind, dtype, **config), dtype)
        return made[key]

    return make


def _planned(folder: Path, dtype: torch.dtype) -> DecoderTarget:
    device = torch.device("cpu")
    config, request = read_config(folder), PlanRequest(claim="bitwise", dtype=dtype, device=device)
    store = PlanStore(device, RealClock())
    store.probe(ProbeShapes.of(config, request), lambda *_: None)
    return load_decoder(folder, config, store.plan(config, request), dtype=dtype, device=device)


def _save(folder: Path, kind: str, dtype: torch.dtype, changes: dict[str, Any]) -> Path:
    config_name, model_name, fields = _KINDS[kind]
    config = getattr(transformers, config_name)(**fields | changes)
    module = getattr(transformers, model_name)(config)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in module.named_parameters():
        parameter.data = _weight(kind, name, torch.randn(parameter.shape, generator=generator))
    module.to(dtype).save_pretrained(folder)
    if kind in _HEADS:
        _add_head(folder / "model.safetensors", kind, config, generator)
    if config.vocab_size == VOCAB:
        _tokenizer().save_pretrained(folder)
    return folder


def _weight(kind: str, name: str, noise: torch.Tensor) -> torch.Tensor:
    if noise.ndim > 1:
        return noise * 3 / noise.shape[-1] ** 0.5  # thrice the usual, so that text varies
    if name.endswith(("bias", "A_log")):
        return 0.2 * noise
    # Either sign in the last norm: tied to the embedding, every token would repeat itself.
    factor = noise if name == "model.norm.weight" else 1.0 + 0.2 * noise
    is_shifted = kind.startswith(("gemma3_text", "qwen3_5")) and "linear_attn" not in name
    return factor - 1.0 if is_shifted else factor


def _add_head(file: Path, kind: str, config: Any, generator: torch.Generator) -> None:
    """A native head beside the text model, as released checkpoints have it: transformers drops it on load."""
    tensors = safetensors.torch.load_file(file)
    prefix, block, norms, projection, copies = _HEADS[kind]
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    hidden, like = config.hidden_size, f"model.layers.{kinds.index('full_attention')}."
    shapes = {
        f"{prefix}{block}{k.removeprefix(like)}": v.shape for k, v in tensors.items() if k.startswith(like)
    }
    shapes |= {f"{prefix}{name}.weight": (hidden,) for name in norms}
    shapes[f"{prefix}{projection}.weight"] = (hidden, 2 * hidden)
    dtype = tensors["model.norm.weight"].dtype
    for name, shape in shapes.items():
        tensors[name] = _weight(kind, name, torch.randn(shape, generator=generator)).to(dtype)
    for name, original in copies.items():
        if f"{original}.weight" in tensors:
            tensors[f"{prefix}{name}.weight"] = tensors[f"{original}.weight"].clone()
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})


def _tokenizer() -> Any:
    """Every byte and 32 pairs of letters, so that any text is a prompt."""
    pairs = [(a, b) for a in "eta" for b in "hrsn"] + [(a, b) for a in "ABCDE" for b in "FGHI"]
    symbols = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in pairs)]
    model = tokenizers.models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=pairs)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
