"""What a checkpoint folder says of its tensors, from the headers of its files: no tensor is read.

A safetensors file begins with the length of a JSON object and the object: dtype, shape and place of every
tensor. A file cut off after its header, or fetched no further, is described all the same and named in
``Described.cut``. It does not judge whether a tensor fits a model; ``models.inventory`` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from draftproof.errors import ModelFileError
from draftproof.models.weights import single_file, weight_map

_LENGTH_BYTES, _LONGEST_HEADER = 8, 100_000_000  # the second is safetensors' own limit
_DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "I64": ("int64", 8), "I32": ("int32", 4),
    "I16": ("int16", 2), "I8": ("int8", 1), "U8": ("uint8", 1), "BOOL": ("bool", 1),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One tensor as its file describes it; nothing is known of one that only an index names.

    ``dtype`` is torch's name of the type, the file's own where torch has none.
    """

    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    num_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """All tensors of a folder by stored name.

    ``absent`` are shards the index names that are not there; ``cut`` are files with less data than their
    header says.
    """

    tensors: dict[str, Stored]
    absent: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    tensors: dict[str, Stored] = field(default_factory=dict)
    is_cut: bool = False


def describe(folder: Path) -> Described:
    """The tensors the loader would find in ``folder``: those of the index, else those of the single file.

    Raises:
        ModelFileError: no weights, a broken index or a broken header.
    """
    named = weight_map(folder)
    if named is None:
        file = single_file(folder)
        header = read_header(file)
        return Described(tensors=header.tensors, cut=(file.name,) * header.is_cut)
    files = sorted(set(named.values()))
    headers = {file: read_header(file) for file in files if file.exists()}
    return Described(
        tensors=_tensors(named, headers),
        absent=tuple(file.name for file in files if file not in headers),
        cut=tuple(file.name for file, header in headers.items() if header.is_cut),
    )


def _tensors(named: Mapping[str, Path], headers: Mapping[Path, _Header]) -> dict[str, Stored]:
    """Those the index names; one that its shard, which is there, does not hold is left out."""
    found: dict[str, Stored] = {}
    for name, file in named.items():
        if file not in headers:
            found[name] = Stored()
        elif name in headers[file].tensors:
            found[name] = headers[file].tensors[name]
    return found


def read_header(file: Path) -> _Header:
    """The header of one safetensors file."""
    try:
        with file.open("rb") as stream:
            start = stream.read(_LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            if len(start) < _LENGTH_BYTES or length > _LONGEST_HEADER:
                raise ModelFileError(f"cannot read {file}: not a safetensors file")
            text = stream.read(length)
        if len(text) < length:
            raise ModelFileError(f"cannot read {file}: it ends inside its header")
        rows = {name: row for name, row in json.loads(text).items() if name != "__metadata__"}
        tensors = {name: _stored(row) for name, row in rows.items()}
        stop = max((row["data_offsets"][1] for row in rows.values()), default=0)
        is_cut = file.stat().st_size < _LENGTH_BYTES + length + stop
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise ModelFileError(f"cannot read {file}: broken header ({error})") from error
    return _Header(tensors=tensors, is_cut=is_cut)


def _stored(row: dict[str, Any]) -> Stored:
    """One entry of a header; raises ``ValueError`` where size and shape disagree."""
    start, stop = row["data_offsets"]
    dtype, itemsize = _DTYPES.get(row["dtype"], (str(row["dtype"]), None))
    shape = tuple(int(size) for size in row["shape"])
    if itemsize is not None and stop - start != prod(shape) * itemsize:
        raise ValueError(f"{stop - start} bytes for {row['dtype']} of shape {shape}")
    return Stored(shape=shape, dtype=dtype, num_bytes=stop - start)
