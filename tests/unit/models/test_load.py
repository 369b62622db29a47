"""From a name to a folder and from a folder to a target, or one line that says what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftproof.clock import RealClock
from draftproof.errors import ArchitectureError, ModelError, ModelFileError, ModelNotFoundError
from draftproof.models import load
from draftproof.models.catalog import CATALOG, DEFAULT_MODEL
from draftproof.models.generic import GenericTarget
from draftproof.models.load import (
    ARCHITECTURES,
    DTYPES,
    ModuleWeights,
    build_decoder,
    load_generic,
    load_tokenizer,
    local_folder,
    read_config,
    refusal,
    resolve,
)
from draftproof.plans import PlanRequest, PlanStore, ProbeShapes

CPU = torch.device("cpu")


def refused(error: type[ModelError], call: Callable[[], object], *words: str) -> None:
    """Exactly this error, with a message of one line that holds ``words``."""
    with pytest.raises(error) as caught:
        call()
    assert type(caught.value) is error
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    assert [word for word in words if word not in message] == []


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Nothing is downloaded or converted: what would be is noted."""
    calls: list[Any] = []

    def pull(model: Any, *, progress: Any = None) -> Path:
        calls.append((model.name, progress))
        return Path("/pulled") / model.file_name

    monkeypatch.setattr(load.catalog, "pull", pull)
    monkeypatch.setattr(load, "hub_folder", lambda file, dtype: Path(f"/hub/{file.name}-{dtype}"))
    return calls


def test_a_packaged_name_is_pulled_and_converted(
    pulled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = CATALOG[DEFAULT_MODEL]
    for name in (model.name, *model.aliases, model.name.upper()):
        assert resolve(name, "float32") == Path(f"/hub/{model.file_name}-float32")
    resolve(model.name, "bfloat16", print)
    assert pulled[-1] == (model.name, print)
    assert len(pulled) == len(model.aliases) + 3


def test_a_folder_of_a_packaged_name_wins(
    pulled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / DEFAULT_MODEL).mkdir()
    assert resolve(DEFAULT_MODEL, "bfloat16") == tmp_path / DEFAULT_MODEL
    assert pulled == []


def test_folders_and_gguf_files(pulled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    file = tmp_path / "models" / "tiny.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "models")
    assert resolve(str(tmp_path / "models"), "bfloat16") == tmp_path / "models"
    assert resolve("~/models", "bfloat16") == tmp_path / "models"
    assert resolve("..", "bfloat16") == tmp_path
    assert resolve(str(file), "bfloat16") == Path("/hub/tiny.gguf-bfloat16")
    assert resolve("tiny.gguf", "float16") == Path("/hub/tiny.gguf-float16")


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    refused(
        ModelFileError,
        lambda: resolve(str(file), "bfloat16"),
        str(file),
        "neither a model folder nor a .gguf",
    )


def test_unknown_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("smolm2-135m", "gemma3-27m"):
        expected = load.catalog.suggest(name)[0]
        refused(
            ModelNotFoundError,
            lambda n=name: resolve(n, "bfloat16"),
            repr(name),
            f"did you mean {expected!r}?",
        )
    refused(ModelNotFoundError, lambda: resolve("xyzzy", "bfloat16"), "'xyzzy'", "see `draftproof models`")
    refused(ModelNotFoundError, lambda: resolve(str(tmp_path / "gone.gguf"), "bfloat16"), "gone.gguf")


def test_a_local_folder_is_never_fetched_or_converted(
    pulled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(
        ModelNotFoundError, lambda: local_folder(DEFAULT_MODEL), DEFAULT_MODEL, "a packaged model, no folder"
    )
    refused(ModelNotFoundError, lambda: local_folder("xyzzy"), "no model folder 'xyzzy'")
    (tmp_path / DEFAULT_MODEL).mkdir()
    assert local_folder(DEFAULT_MODEL) == tmp_path / DEFAULT_MODEL
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    refused(ModelFileError, lambda: local_folder("tiny.gguf"), "tiny.gguf", "not a model folder")
    assert pulled == []


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text"])
def test_configurations_that_run_row_exact(kind: str, tiny_folder: Callable[..., Path]) -> None:
    config = read_config(tiny_folder(kind))
    assert config.model_type == kind
    assert refusal(config) is None
    assert kind in ARCHITECTURES


@pytest.mark.parametrize("kind", ["gpt2", "mistral"])
def test_other_architectures_take_the_generic_target(kind: str, tiny_folder: Callable[..., Path]) -> None:
    assert refusal(read_config(tiny_folder(kind))) == f"no row-exact target for model type {kind!r}"
    target = load_generic(tiny_folder(kind), dtype=torch.bfloat16, device=CPU)
    assert isinstance(target, GenericTarget)
    assert target.name == kind
    assert {p.dtype for p in target.module.parameters()} == {torch.bfloat16}
    assert not target.module.training


@pytest.fixture
def changed(tiny_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A Llama folder whose ``config.json`` is replaced or has some fields changed."""

    def make(text: str | None = None, **fields: Any) -> Path:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tiny_folder("llama"), folder)
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields) if text is None else text)
        return folder

    return make


ROPE = {"rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised weights"),
        (
            {"rope_parameters": ROPE | {"rope_type": "dynamic"}},
            "rotary embedding that depends on the sequence",
        ),
        ({"attention_bias": True}, "biases in linear layers"),
        ({"rope_parameters": ROPE | {"rope_type": "linear"}}, None),
    ],
)
def test_refusals_before_any_weight_is_read(
    fields: dict[str, Any], reason: str | None, changed: Callable[..., Path]
) -> None:
    found = refusal(read_config(changed(**fields)))
    assert found is None if reason is None else reason in str(found)


def test_any_layer_kind_with_a_length_dependent_rotary_refuses() -> None:
    def config(*kinds: str) -> Any:
        rope = {f"layer{i}": {"rope_type": kind} for i, kind in enumerate(kinds)}
        return SimpleNamespace(
            model_type="gemma3_text", rope_parameters=rope, attention_bias=False, attn_logit_softcapping=None,
            hidden_activation="gelu_pytorch_tanh", final_logit_softcapping=None,
            use_bidirectional_attention=False,
        )  # fmt: skip

    assert refusal(config("default", "linear")) is None
    for bad in ("dynamic", "longrope"):
        assert refusal(config("default", bad)) == "rotary embedding that depends on the sequence length"


def test_a_folder_without_configuration(tmp_path: Path) -> None:
    refused(
        ModelFileError, lambda: read_config(tmp_path), str(tmp_path), "no config.json: not a model folder"
    )


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '"llama"', '{"model_type": "llama", "head_dim": "x"}']
)
def test_a_broken_configuration(text: str, changed: Callable[..., Path]) -> None:
    refused(ModelFileError, lambda: read_config(changed(text)), "config.json")


def test_a_configuration_that_is_not_text(changed: Callable[..., Path]) -> None:
    folder = changed()
    (folder / "config.json").write_bytes(b"\xff\xfe\x00{}")
    refused(ModelFileError, lambda: read_config(folder), "config.json")


def test_a_model_type_transformers_does_not_know(changed: Callable[..., Path]) -> None:
    refused(
        ArchitectureError,
        lambda: read_config(changed(model_type="hal9000")),
        "model type 'hal9000'",
        "transformers",
    )


def test_no_model_type(changed: Callable[..., Path]) -> None:
    refused(ModelFileError, lambda: read_config(changed('{"hidden_size": 8}')), "model_type", "config.json")


def _without_last_bytes(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _without_a_tensor(file: Path) -> None:
    """Stock fills the gap with random numbers, other ones at every start."""
    tensors = load_file(file)
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("damage", [_without_last_bytes, _without_a_tensor, Path.unlink])
def test_a_generic_model_with_broken_weights(
    damage: Callable[[Path], None], tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(tiny_folder("gpt2"), folder)
    damage(folder / "model.safetensors")
    refused(ModelFileError, lambda: load_generic(folder, dtype=torch.float32, device=CPU), str(folder))


def test_tokenizers(tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    assert load_tokenizer(tiny_folder("llama"))("Hello").input_ids
    refused(ModelFileError, lambda: load_tokenizer(tmp_path), f"no usable tokenizer in {tmp_path}")
    (tmp_path / "tokenizer.json").write_text("{")
    refused(ModelFileError, lambda: load_tokenizer(tmp_path), f"no usable tokenizer in {tmp_path}")


def test_known_dtypes() -> None:
    assert {name: str(dtype) for name, dtype in DTYPES.items()} == {name: f"torch.{name}" for name in DTYPES}


def test_a_loaded_modules_tensors_are_shared(tiny_folder: Callable[..., Path], scratch_cache: Path) -> None:
    """``custom_generate`` decodes with them: no copy of a weight, same bits as the module's own steps."""
    module = AutoModelForCausalLM.from_pretrained(tiny_folder("gemma3_text"), dtype=torch.bfloat16).eval()
    config, request = (
        module.config,
        PlanRequest(claim="bitwise", dtype=torch.bfloat16, device=CPU, share=True),
    )
    store = PlanStore(CPU, RealClock())
    store.probe(ProbeShapes.of(config, request), lambda *_: None)
    plan = store.plan(config, request)
    assert {e.form for e in plan.ops} <= {"plain", "batched", "row by row"}
    source = ModuleWeights(module)
    target = build_decoder(config, source, plan, dtype=torch.bfloat16, device=CPU)
    own = {p.data_ptr() for p in module.parameters()}
    held = {w.data_ptr() for op in target.parts.linears for w in op._weights.held}
    assert held <= own
    assert len(held) == 7 * 3 + 1
    assert target.parts.embedding_VD.data_ptr() == module.model.embed_tokens.weight.data_ptr()
    session = target.open(30)
    session.prefill([3, 4, 5])
    with torch.inference_mode():
        want = module(torch.tensor([[3, 4, 5]]), logits_to_keep=1).logits[0, -1]
    assert torch.equal(target.open(30).prefill([3, 4, 5]), want)


def test_a_module_of_another_shape_is_refused() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(4, 2, bias=False))
    source = ModuleWeights(module)
    assert "0.weight" in source
    refused(ModelFileError, lambda: source.take("2.weight", (1,)), "'2.weight' is None, expected (1,)")
    refused(ModelFileError, lambda: source.peek("0.weight", (3, 4)), "'0.weight' is (4, 3), expected (3, 4)")
    source = ModuleWeights(module)
    assert source.peek("0.weight", (4, 3)).data_ptr() == module[0].weight.data_ptr()
    assert source.take("0.weight", (4, 3)).data_ptr() == module[0].weight.data_ptr()
    assert "0.weight" not in source
    refused(ModelFileError, source.finish, "unknown tensors: 1.weight")
    source.forget("1.weight")
    source.finish()
