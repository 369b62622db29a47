"""Records to canonical JSON and back, hash chains, and files that appear whole or not at all.

Canonical means: sorted keys, no spaces, ASCII, no NaN. A chained row carries the hash of the row before it,
so a row edited, moved or cut out is found; rows cut from the end are not: keep the last hash elsewhere.
Readers refuse a format version newer than their own.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from draftproof.errors import EvidenceError, StorageError

FORMAT_VERSION = 2
_START = "0" * 64

T = TypeVar("T")
_ADAPTERS: dict[type[Any], TypeAdapter[Any]] = {}


def canonical(value: Any) -> str:
    """One line of JSON that depends on the value alone; raises ``EvidenceError`` on NaN or infinity."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        raise EvidenceError(f"a record cannot hold NaN or infinity: {error}") from error


def _adapter(record_type: type[Any]) -> TypeAdapter[Any]:
    """Kept, as making one takes longer than reading a hundred rows with it."""
    if record_type not in _ADAPTERS:
        _ADAPTERS[record_type] = TypeAdapter(record_type)
    return _ADAPTERS[record_type]


def encode(record: Any) -> dict[str, Any]:
    """A record as plain JSON values."""
    out: dict[str, Any] = _adapter(type(record)).dump_python(record, mode="json")
    return out


def decode(record_type: type[T], value: Any) -> T:
    """The record back from plain JSON values; its own invariants are checked again."""
    try:
        record: T = _adapter(record_type).validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise EvidenceError(f"not a {record_type.__name__}: {where}: {first['msg']}") from error
    return record


def check_version(document: dict[str, Any]) -> None:
    """Refuse a document without a format version or with a newer one."""
    version = document.get("format_version")
    if type(version) is not int or version < 1:
        raise EvidenceError("no format_version: not written by draftproof")
    if version > FORMAT_VERSION:
        raise EvidenceError(f"format version {version} is newer than {FORMAT_VERSION}; update draftproof")


def chain(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with ``previous`` and ``hash`` added."""
    previous, out = _START, []
    for row in rows:
        if "hash" in row:
            raise EvidenceError("a row with a hash of its own cannot be chained")
        linked = {**row, "previous": previous}
        previous = hashlib.sha256(canonical(linked).encode()).hexdigest()
        out.append({**linked, "hash": previous})
    return out


def check_chain(rows: Sequence[dict[str, Any]]) -> None:
    """Raise ``EvidenceError`` at the first row that was edited, moved, or follows one cut out."""
    previous = _START
    for index, row in enumerate(rows):
        body = {key: value for key, value in row.items() if key != "hash"}
        expected = hashlib.sha256(canonical(body).encode()).hexdigest()
        if row.get("previous") != previous or row.get("hash") != expected:
            raise EvidenceError(f"the hash chain breaks at row {index}")
        previous = expected


def tokens_sha256(token_ids: Iterable[int]) -> str:
    """Hash of token ids joined by commas."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write so that ``path`` holds the old content or all of the new one; text as UTF-8."""
    raw = content.encode("utf-8") if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    except OSError as error:
        raise _storage_error(error, path) from error
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(raw)
            stream.flush()
            os.fsync(stream.fileno())
            os.fchmod(stream.fileno(), 0o644)
        temporary.replace(path)
    except OSError as error:
        raise _storage_error(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One canonical row a line, atomically."""
    write_atomic(path, "".join(canonical(row) + "\n" for row in rows))


def _storage_error(error: OSError, path: Path) -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"no space left to write {path}; free some and run again")
    return StorageError(f"cannot write {path}: {error.strerror}")
