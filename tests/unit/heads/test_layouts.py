"""Layouts: names there and back, whom they cannot hold and why, and settings that are lossy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftproof.errors import OptionError
from draftproof.heads import layouts
from draftproof.models.load import read_config

QWEN3 = SimpleNamespace(model_type="qwen3", layer_types=["full_attention"] * 3, num_hidden_layers=3)
QWEN3_5 = SimpleNamespace(model_type="qwen3_5_text", num_hidden_layers=3)

NAMES = {
    ("speculators", "qwen3"): {
        "head.embedding_norm.weight": "mtp_layers.0.token_layernorm.weight",
        "head.hidden_norm.weight": "mtp_layers.0.hidden_layernorm.weight",
        "head.projection.weight": "mtp_layers.0.input_proj.weight",
        "head.norm.weight": "mtp_layers.0.final_layernorm.weight",
        "head.layer.self_attn.q_norm.weight": "mtp_layers.0.self_attn.q_norm.weight",
        "head.extra": "head.extra",
    },
    ("speculators", "qwen3_5"): {
        "mtp.pre_fc_norm_embedding.weight": "mtp_layers.0.token_layernorm.weight",
        "mtp.pre_fc_norm_hidden.weight": "mtp_layers.0.hidden_layernorm.weight",
        "mtp.fc.weight": "mtp_layers.0.input_proj.weight",
        "mtp.norm.weight": "mtp_layers.0.final_layernorm.weight",
        "mtp.layers.0.mlp.up_proj.weight": "mtp_layers.0.mlp.up_proj.weight",
    },
    ("sglang", "qwen3_5"): {
        "mtp.fc.weight": "mtp.fc.weight",
        "mtp.norm.weight": "mtp.norm.weight",
        "mtp.layers.0.mlp.up_proj.weight": "mtp.layers.0.mlp.up_proj.weight",
    },
}
CONFIGS = {"qwen3": QWEN3, "qwen3_5": QWEN3_5}


@pytest.mark.parametrize(("name", "kind"), NAMES)
def test_names_there_and_back(name: str, kind: str) -> None:
    layout, config, names = layouts.choose(name, CONFIGS[kind]), CONFIGS[kind], NAMES[name, kind]
    assert {ours: layout.renamed(config)(ours) for ours in names} == names
    assert {layout.restored(config)(theirs): theirs for theirs in names.values()} == names


@pytest.mark.parametrize(
    ("name", "kind"), [("speculators", "llama"), ("sglang", "qwen3"), ("sglang", "gemma3_text"),
                       ("speculators", "glm4_moe"), ("speculators", "qwen3_5_moe_text")],
)  # fmt: skip
def test_targets_whose_head_it_would_change_are_refused_with_the_reason(
    name: str, kind: str, tiny_folder: Callable[..., Path]
) -> None:
    with pytest.raises(OptionError, match=f"{name} has no layout for a head of '{kind}'.*EAGLE-3 attends"):
        layouts.choose(name, read_config(tiny_folder(kind)))


def test_unknown_names_and_windows_are_refused() -> None:
    with pytest.raises(OptionError, match="--to must be speculators or sglang, got 'vllm'"):
        layouts.choose("vllm", QWEN3)
    sliding = SimpleNamespace(model_type="qwen3", layer_types=["sliding_attention"])
    with pytest.raises(OptionError, match="window of the target's first layer"):
        layouts.choose("speculators", sliding)


@pytest.mark.parametrize(
    "setting",
    [
        {"verifier_accept_k": 3}, {"accept_tolerance": 0.5}, {"proposal_type": "sample"},
        {"speculative-accept-threshold-single": 0.9}, {"speculative_accept_threshold_acc": 0.99},
        {"rejection_sample_method": "fly"}, {"rejection_sample_method": "synthetic"},
        {"spec_decoding_acceptance_method": "typical_acceptance_sampler"}, {"posterior_alpha": 0.3},
        {"synthetic_acceptance_length": 2.0},
    ],
    ids=str,
)  # fmt: skip
def test_lossy_settings_are_found_wherever_they_stand(setting: dict[str, Any]) -> None:
    ((key, value),) = setting.items()
    assert list(layouts.lossy({"a": [{"b": 1}, {"c": setting}]})) == [f"a[1].c.{key} = {value!r}"]


def test_what_is_written_is_exact() -> None:
    target = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 8}
    made = layouts.speculators_config(target, "some/model", 4)
    (method,) = made["speculators_config"]["proposal_methods"]
    assert (method["speculative_tokens"], method["verifier_accept_k"]) == (4, 1)
    assert made["speculators_config"]["verifier"] == {
        "name_or_path": "some/model", "architectures": ["Qwen3_5ForCausalLM"]
    }  # fmt: skip
    assert made["transformer_layer_config"] == target
    options = layouts.sglang_options("/d", 4, None)
    assert (options["speculative-num-steps"], options["speculative-num-draft-tokens"]) == (4, 5)
    assert "speculative-token-map" not in options
    assert layouts.sglang_options("/d", 4, "/m")["speculative-token-map"] == "/m"
    for document in (made, options):
        assert list(layouts.lossy(document)) == []


def test_sglangs_configuration() -> None:
    target = {"architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": True, "hidden_size": 8}
    plain = layouts.sglang_config(target, has_map=False)
    assert plain == {**target, "mtp_num_hidden_layers": 1}
    assert layouts.sglang_config(target, has_map=True)["tie_word_embeddings"] is False
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "tie_word_embeddings": True,
        "text_config": {"tie_word_embeddings": True, "hidden_size": 8},
    }  # fmt: skip
    nested = layouts.sglang_config(whole, has_map=True)
    assert nested["text_config"] == {
        "tie_word_embeddings": False, "hidden_size": 8, "mtp_num_hidden_layers": 1
    }  # fmt: skip
    assert nested["tie_word_embeddings"] is False
    assert layouts.layer_config(nested)["hidden_size"] == 8
    with pytest.raises(OptionError, match="this model says 'Other'"):
        layouts.sglang_config({"architectures": ["Other"]}, has_map=False)
