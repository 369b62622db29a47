"""``head export`` and ``head import``: a head's folder to a published layout and back, bit for bit.

Tensors are renamed, never converted. What is read is checked against the target's own architecture (names,
shapes, types), against the layout's settings (acceptance must be exact) and against the hash noted when it
was written. A folder appears whole or not at all. Which layouts there are, and why not others, is
``layouts``'.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from draftproof.drafters.shortlist import DEFAULT_FILE, default_shortlist
from draftproof.errors import ModelFileError, OptionError, StorageError
from draftproof.heads import layouts
from draftproof.heads.layouts import SGLANG, SPECULATORS, Layout
from draftproof.models.header import describe
from draftproof.models.inventory import map_head
from draftproof.models.load import read_config
from draftproof.models.weights import single_file, weight_map
from draftproof.wire import FORMAT_VERSION, canonical, tokens_sha256, write_atomic

WEIGHTS, CONFIG, OPTIONS, NOTE = "model.safetensors", "config.json", "sglang.yaml", "draftproof.json"
HOT_IDS = "hot_token_ids.pt"
# Of a layer's configuration, what decides the function; the rest is dropout, initial ranges and the like.
_DECISIVE = (
    "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "rope_theta", "rope_scaling", "vocab_size",
    "attention_bias", "sliding_window", "layer_types", "partial_rotary_factor",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A head's tensors by our names, in the types they are stored in, and the ids it drafts by default."""

    tensors: dict[str, Tensor]
    shortlist: tuple[int, ...] | None


def read_head(folder: Path, config: Any) -> Head:
    """A head's folder, checked against its target.

    Raises:
        UsageError: a tensor is missing, extra, mis-shaped or of a wrong type, or the shortlist is damaged.
    """
    _check_tensors(folder, config)
    return Head(tensors=_load(folder), shortlist=default_shortlist(folder, config.vocab_size))


def _load(folder: Path) -> dict[str, Tensor]:
    """What the folder's index names, else what its one file holds."""
    named = weight_map(folder)
    files = [single_file(folder)] if named is None else sorted(set(named.values()))
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= safetensors.torch.load_file(file)
        except (SafetensorError, OSError) as error:
            raise ModelFileError(f"cannot read {file}: {error}") from error
    return tensors if named is None else {name: tensors[name] for name in named}


def _check_tensors(folder: Path, config: Any, layout: Layout | None = None) -> None:
    """Refuse tensors that are not a head of this target, by the names they have in ``folder``."""
    described = describe(folder)
    if described.absent or described.cut:
        raise ModelFileError(f"{folder} lacks data of {', '.join((*described.absent, *described.cut))}")
    ours = layout.restored(config) if layout is not None else str
    theirs = layout.renamed(config) if layout is not None else str
    problems = map_head(config, {ours(name): value for name, value in described.tensors.items()})
    if problems:
        first = problems[0]
        text = first.text.replace(first.name, theirs(first.name))
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise ModelFileError(f"{folder} holds no head of this {config.model_type}: {text}{more}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """What to write: the layout's name, tokens drafted a round, and the ids drafted if named."""

    layout: str
    depth: int
    shortlist: tuple[int, ...] | None

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise OptionError(f"--depth must be 1 or more, got {self.depth}")


def export_head(
    head: Path, model: Path, out: Path, settings: ExportSettings, provenance: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the head in ``head`` for the target in ``model`` to ``out``; what was written.

    Args:
        head: a head's folder.
        model: the hub folder of its target.
        out: a new or empty folder.
        settings: layout and depth.
        provenance: facts about this run.

    Raises:
        OptionError: no such layout for this target, or a shortlist it cannot hold.
        UsageError: the head does not fit the target, or ``out`` cannot be written.
    """
    config = read_config(model)
    layout = layouts.choose(settings.layout, config)
    found = read_head(head, config)
    ids = _map_ids(settings, found, config.vocab_size)
    document = _json(model / CONFIG)
    rename = layout.renamed(config)
    weights = safetensors.torch.save(
        {rename(name): tensor for name, tensor in found.tensors.items()}, metadata={"format": "pt"}
    )
    files: dict[str, bytes] = {WEIGHTS: weights}
    if layout.name == SPECULATORS:
        made = layouts.speculators_config(document, str(model), settings.depth)
    else:
        made = layouts.sglang_config(document, has_map=ids is not None)
        token_map = None if ids is None else str(out.absolute() / HOT_IDS)
        options = layouts.sglang_options(str(out.absolute()), settings.depth, token_map)
        files[OPTIONS] = _pretty(options)  # JSON is YAML
        if ids is not None:
            files[HOT_IDS] = _saved(ids)
    files[CONFIG] = _pretty(made)
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    body = {
        "format_version": FORMAT_VERSION, "kind": "export", "layout": layout.name, "head": str(head),
        "num_tensors": len(found.tensors), "num_ids": None if ids is None else len(ids),
        "ids_sha256": None if ids is None else tokens_sha256(ids), "files": hashes, "run": dict(provenance),
    }  # fmt: skip
    files[NOTE] = _noted(body)
    _write_folder(out, files)
    is_left_out = ids is None and found.shortlist is not None
    return {**body, "out": str(out), "shortlist_left_out": is_left_out}


def _map_ids(settings: ExportSettings, found: Head, vocab_size: int) -> tuple[int, ...] | None:
    """The ids of SGLang's token map, ascending; refuses a named list that the layout has no place for."""
    if settings.layout == SPECULATORS:
        if settings.shortlist is not None:
            raise OptionError("speculators' mtp drafts over all ids: it has no place for --shortlist")
        return None
    named = settings.shortlist if settings.shortlist is not None else found.shortlist
    if named is None:
        return None
    ids = tuple(sorted(set(named)))
    if not ids or ids[0] < 0 or ids[-1] >= vocab_size:
        raise OptionError(f"a shortlist holds ids in 0..{vocab_size - 1}, at least one")
    return ids


def _saved(ids: Sequence[int]) -> bytes:
    """As SGLang's ``load_token_map`` reads it: a pickled list of plain numbers."""
    stream = io.BytesIO()
    torch.save(list(ids), stream)
    return stream.getvalue()


def import_head(folder: Path, model: Path, out: Path, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Read an exported folder back into a head's folder ``out``; what was read.

    Raises:
        UsageError: the folder is no exact head of this target; the message names what is wrong.
    """
    layout, head = read_export(folder, model)
    weights = safetensors.torch.save(head.tensors, metadata={"format": "pt"})
    files = {WEIGHTS: weights}
    if head.shortlist is not None:
        files[DEFAULT_FILE] = (json.dumps(list(head.shortlist)) + "\n").encode()
    body = {
        "format_version": FORMAT_VERSION, "kind": "import", "layout": layout.name, "from": str(folder),
        "num_tensors": len(head.tensors), "num_ids": None if head.shortlist is None else len(head.shortlist),
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
        "run": dict(provenance),
    }  # fmt: skip
    files["provenance.json"] = _noted(body)
    _write_folder(out, files)
    return {**body, "out": str(out)}


def read_export(folder: Path, model: Path) -> tuple[Layout, Head]:
    """The head in an exported folder, by our names, every bit as it was stored.

    Raises:
        ModelFileError: not one of our layouts, tensors that are missing, extra, mis-shaped or of a wrong
            type, a layer configuration other than the target's, a damaged token map, or a changed file.
        OptionError: settings that accept tokens the target would not emit.
    """
    if not folder.is_dir():
        raise ModelFileError(f"no exported folder {folder}")
    config, document = read_config(model), _json(folder / CONFIG)
    _refuse_lossy(folder, document)
    layout = _layout_of(folder, document, config)
    _check_tensors(folder, config, layout)
    _check_config(folder, document, model)
    ids = _read_map(folder, config.vocab_size) if layout.name == SGLANG else None
    _check_hashes(folder)
    back = layout.restored(config)
    tensors = {back(name): tensor for name, tensor in _load(folder).items()}
    return layout, Head(tensors=tensors, shortlist=ids)


def _refuse_lossy(folder: Path, document: Mapping[str, Any]) -> None:
    documents = {CONFIG: document}
    if (folder / OPTIONS).exists():
        documents[OPTIONS] = _json(folder / OPTIONS)
    for name, held in documents.items():
        found = next(layouts.lossy(held), None)
        if found is not None:
            raise OptionError(
                f"{folder / name}: {found} accepts tokens the target would not emit; set it to be exact"
            )


def _layout_of(folder: Path, document: Mapping[str, Any], config: Any) -> Layout:
    kind = document.get("speculators_model_type")
    described = describe(folder)
    if kind not in (None, "mtp") or {"d2t", "t2d"} & set(described.tensors):
        what = f"a speculator of type {kind!r}" if kind not in (None, "mtp") else "d2t or t2d"
        raise ModelFileError(
            f"{folder} holds {what}: only heads that project [embedding; hidden] before their layer can be"
            " read, and EAGLE-3 does not"
        )
    return layouts.choose(SPECULATORS if kind == "mtp" else SGLANG, config)


def _check_config(folder: Path, document: Mapping[str, Any], model: Path) -> None:
    """Refuse a layer that is configured other than the target's."""
    mine = layouts.layer_config(_json(model / CONFIG))
    theirs = layouts.layer_config(document.get("transformer_layer_config") or document)
    for name in _DECISIVE:
        if theirs.get(name) != mine.get(name):
            raise ModelFileError(
                f"{folder / CONFIG}: {name} is {theirs.get(name)!r}, the target's is {mine.get(name)!r}"
            )


def _read_map(folder: Path, vocab_size: int) -> tuple[int, ...] | None:
    path = folder / HOT_IDS
    if not path.exists():
        return None
    try:
        ids = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, EOFError, ValueError, UnpicklingError) as error:
        raise ModelFileError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    is_list = isinstance(ids, list) and all(type(i) is int for i in ids)
    if not is_list or not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ModelFileError(f"{path} must hold a list of ascending ids in 0..{vocab_size - 1}")
    return tuple(ids)


def _check_hashes(folder: Path) -> None:
    """Refuse files other than those written; a folder without our note was written by others."""
    if not (folder / NOTE).exists():
        return
    note = _json(folder / NOTE)
    digest = note.pop("hash", None)
    if hashlib.sha256(canonical(note).encode()).hexdigest() != digest:
        raise ModelFileError(f"{folder / NOTE} was changed: its hash is another")
    for name in (WEIGHTS, HOT_IDS):
        expected = note["files"].get(name)
        if (folder / name).exists() != (expected is not None):
            raise ModelFileError(f"{folder / name} was {'added' if expected is None else 'removed'}")
        if expected and hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected:
            raise ModelFileError(f"{folder / name} was changed: its hash is not that of {NOTE}")


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot read {path} as JSON: {error}") from error
    if not isinstance(document, dict):
        raise ModelFileError(f"{path} holds no JSON object")
    return document


def _pretty(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def _noted(body: Mapping[str, Any]) -> bytes:
    return _pretty({**body, "hash": hashlib.sha256(canonical(body).encode()).hexdigest()})


def check_new(out: Path) -> None:
    """Refuse a place that is a file or holds something."""
    if out.exists() and (not out.is_dir() or next(out.iterdir(), None) is not None):
        raise OptionError(f"{out} is not an empty folder: name another with --out")


def _write_folder(out: Path, files: Mapping[str, bytes]) -> None:
    """All files, or no folder."""
    check_new(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror}") from error
    try:
        for name, content in files.items():
            write_atomic(made / name, content)
        made.chmod(0o755)
        made.replace(out)
    except OSError as error:
        raise StorageError(f"cannot write {out}: {error.strerror}") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)
