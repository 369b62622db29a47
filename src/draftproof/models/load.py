"""From a name or path to a folder, and from a folder to a target: every key used, or a clear refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftproof.errors import ArchitectureError, DrafterError, ModelFileError, ModelNotFoundError
from draftproof.models import catalog, gemma3, glm4_moe, llama, qwen3, qwen3_5, qwen3_5_moe
from draftproof.models.build import Builder, WeightSource, linear_specs
from draftproof.models.decoder import DecoderParts, DecoderTarget
from draftproof.models.generic import GenericTarget
from draftproof.models.gguf import hub_folder
from draftproof.models.mtp import HeadMaker
from draftproof.models.weights import Weights
from draftproof.ops.linear import LinearSpec
from draftproof.record import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How one model type becomes a row-exact target, and which row operations of the probe it runs.

    ``renamed`` maps name prefixes of a multimodal checkpoint to those of its text model; a prefix mapped to
    ``None`` holds no text weights. Where it is empty, such a checkpoint is left to the generic target.
    """

    refusal: Callable[[Any], str | None]
    build: Callable[[Any, Builder], DecoderParts]
    row_ops: tuple[str, ...]
    linear_specs: Callable[[Any], tuple[LinearSpec, ...]] = linear_specs
    renamed: dict[str, str | None] = field(default_factory=dict)


# Stock keeps all positions where a window of 1 should keep none.
_SMALLEST_WINDOW = 2
_SILU = ("norm", "rotary", "silu_gate")
_GELU = ("norm_shifted", "rotary", "gelu_gate")
_DELTA = ("norm_shifted", "rotary", "silu_gate", "conv", "delta", "gates", "gated_norm")
_QWEN3_5_NAMES = {"model.language_model.": "model.", "model.visual.": None}
ARCHITECTURES = {
    "llama": Architecture(refusal=llama.refusal, build=llama.build, row_ops=_SILU),
    "qwen3": Architecture(refusal=qwen3.refusal, build=qwen3.build, row_ops=_SILU),
    "gemma3_text": Architecture(refusal=gemma3.refusal, build=gemma3.build, row_ops=_GELU),
    "glm4_moe": Architecture(
        refusal=glm4_moe.refusal, build=glm4_moe.build, row_ops=_SILU, linear_specs=glm4_moe.linear_specs
    ),
    "qwen3_5_text": Architecture(
        refusal=qwen3_5.refusal, build=qwen3_5.build, row_ops=_DELTA, linear_specs=qwen3_5.linear_specs,
        renamed=_QWEN3_5_NAMES,
    ),
    "qwen3_5_moe_text": Architecture(
        refusal=qwen3_5_moe.refusal, build=qwen3_5_moe.build, row_ops=_DELTA,
        linear_specs=qwen3_5_moe.linear_specs, renamed=_QWEN3_5_NAMES,
    ),
}  # fmt: skip

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve(name_or_path: str, dtype: str, progress: catalog.Progress | None = None) -> Path:
    """The hub folder of a packaged model, a local hub folder or a GGUF file.

    Raises:
        ModelNotFoundError: nothing of that name; the message suggests the nearest packaged names.
        ModelFileError: the file or folder is there but unusable.
    """
    packaged = catalog.find(name_or_path)
    path = _existing(name_or_path)
    if packaged is not None and path is None:
        return hub_folder(catalog.pull(packaged, progress=progress), dtype)
    if path is not None and path.is_dir():
        return path.resolve()
    if path is not None and path.is_file():
        if path.suffix != ".gguf":
            raise ModelFileError(f"{path} is neither a model folder nor a .gguf file")
        return hub_folder(path.resolve(), dtype)
    near = catalog.suggest(name_or_path)
    hint = f"did you mean {near[0]!r}?" if near else "see `draftproof models` for packaged models"
    raise ModelNotFoundError(f"no model {name_or_path!r}: no packaged model, folder or GGUF file; {hint}")


def local_folder(name: str) -> Path:
    """The folder at a path; nothing is fetched or converted.

    Raises:
        ModelNotFoundError: there is nothing of that name.
        ModelFileError: it is a file.
    """
    path = _existing(name)
    if path is None:
        hint = ": a packaged model, no folder" if catalog.find(name) is not None else ""
        raise ModelNotFoundError(f"no model folder {name!r}{hint}")
    if not path.is_dir():
        raise ModelFileError(f"{path} is not a model folder with a config.json and safetensors")
    return path.resolve()


def _existing(name: str) -> Path | None:
    """The path ``name`` means, if there is anything; names that cannot be paths are none."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, RuntimeError, ValueError):
        return None


def read_config(folder: Path) -> Any:
    """The text configuration of a hub folder."""
    file = folder / "config.json"
    if not file.exists():
        raise ModelFileError(f"{folder} has no config.json: not a model folder")
    try:
        model_type = json.loads(file.read_text(encoding="utf-8")).get("model_type")
        whole = AutoConfig.from_pretrained(folder)
        text = whole.get_text_config()
        text.is_nested = text is not whole
        return text
    except (OSError, ValueError, KeyError, AttributeError, TypeError, StrictDataclassError) as error:
        if isinstance(error, ValueError) and "model type" in str(error):
            raise ArchitectureError(f"transformers does not know the model type {model_type!r}") from error
        raise ModelFileError(f"cannot read {file}: {str(error).splitlines()[0]}") from error


def refusal(config: Any) -> str | None:
    """Why this model cannot run row-exact and needs the generic target, or ``None``."""
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        return f"no row-exact target for model type {config.model_type!r}"
    if getattr(config, "is_nested", False) and not architecture.renamed:
        return "a text model inside a multimodal checkpoint"
    if (getattr(config, "sliding_window", None) or _SMALLEST_WINDOW) < _SMALLEST_WINDOW:
        return f"a sliding window of {config.sliding_window}"
    if getattr(config, "quantization_config", None):
        return "quantised weights"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {p.get("rope_type") for p in rope.values()} if _is_nested(rope) else {rope.get("rope_type")}
    if kinds & {"dynamic", "longrope"}:
        return "rotary embedding that depends on the sequence length"
    return architecture.refusal(config)


def _is_nested(rope: dict[str, Any]) -> bool:
    return bool(rope) and all(isinstance(value, dict) for value in rope.values())


def build_decoder(
    config: Any, source: WeightSource, plan: Plan, *, dtype: torch.dtype, device: torch.device
) -> DecoderTarget:
    """A row-exact target from named tensors; call ``refusal`` first."""
    builder = Builder(source, plan, hidden=config.hidden_size, dtype=dtype, device=device)
    parts = ARCHITECTURES[config.model_type].build(config, builder)
    return DecoderTarget(parts, plan.max_rows)


def load_decoder(
    folder: Path, config: Any, plan: Plan, *, dtype: torch.dtype, device: torch.device
) -> DecoderTarget:
    """A row-exact target from a hub folder."""
    renamed = ARCHITECTURES[config.model_type].renamed
    return build_decoder(config, Weights(folder, dtype, device, renamed), plan, dtype=dtype, device=device)


def attach_head(
    target: DecoderTarget, folder: Path, plan: Plan, shortlist: tuple[int, ...] | None = None
) -> DecoderTarget:
    """``target`` with the head in ``folder`` in place of its own; weights are shared.

    A folder with safetensors, named as the family names its native head's, or as ``models.mtp.TRAINED``
    says where it has none. ``shortlist`` are the ids the head drafts where a request names none.

    Raises:
        ModelFileError: a tensor is missing, extra, mis-shaped or of a wrong type; it is named.
    """
    parts = target.parts
    make_head = parts.make_head
    if not isinstance(make_head, HeadMaker):
        raise DrafterError(f"no head can be attached to {target.name!r}")
    weights = Weights(folder, parts.dtype, parts.device)
    build = Builder(
        weights, plan, hidden=parts.embedding_VD.shape[1], dtype=parts.dtype, device=parts.device,
        is_apart=True,
    )  # fmt: skip
    head = make_head(build, shortlist)
    weights.finish()
    return DecoderTarget(replace(parts, native_head=head), target.max_rows)


def load_generic(folder: Path, *, dtype: torch.dtype, device: torch.device) -> GenericTarget:
    """Any causal LM, through transformers' own forward."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelFileError(f"cannot load {folder}: {str(error).splitlines()[0]}") from error
    module, report = loaded
    for kind in ("missing_keys", "mismatched_keys"):
        if report.get(kind):
            some = ", ".join(sorted(map(str, report[kind]))[:3])
            raise ModelFileError(f"{folder}: {kind.replace('_', ' ')} in the checkpoint: {some}")
    return GenericTarget(module.to(device).eval())


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelFileError(f"no usable tokenizer in {folder}: {str(error).splitlines()[0]}") from error


class ModuleWeights:
    """A loaded module's own tensors, shared, as a ``WeightSource``."""

    def __init__(self, module: Any) -> None:
        self._tensors = dict(module.state_dict(keep_vars=False))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def has_any(self, prefix: str) -> bool:
        """Whether a tensor under ``prefix`` is left."""
        return any(name.startswith(prefix) for name in self._tensors)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The module's own tensor, not a copy."""
        tensor: torch.Tensor | None = self._tensors.pop(name, None)
        if tensor is None or tuple(tensor.shape) != shape:
            found = None if tensor is None else tuple(tensor.shape)
            raise ModelFileError(f"the module's {name!r} is {found}, expected {shape}")
        return tensor.detach()

    def peek(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The module's own tensor, without counting as handed out."""
        tensor = self.take(name, shape)
        self._tensors[name] = tensor
        return tensor

    def repeats(self, name: str, original: torch.Tensor) -> bool:
        """Whether ``name`` holds the numbers of ``original``."""
        return torch.equal(self.peek(name, tuple(original.shape)), original)

    def forget(self, name: str) -> None:
        """Drop a tied copy."""
        self._tensors.pop(name, None)

    def finish(self) -> None:
        """Refuse a module with tensors this architecture does not use."""
        if self._tensors:
            raise ModelFileError(f"the module holds unknown tensors: {', '.join(sorted(self._tensors)[:3])}")
