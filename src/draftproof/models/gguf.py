"""GGUF files become hub folders once: dequantised by transformers in a process of its own, then cached.

``python -m draftproof.models.gguf FILE DTYPE OUT`` does the conversion; ``hub_folder`` calls it when the
cache has no folder for this file's hash and dtype. The folder appears by one rename, so nothing
half-written is ever used. Both arms of a comparison load the same folder.
"""

from __future__ import annotations

import errno
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from draftproof.errors import ModelFileError, StorageError
from draftproof.models.catalog import cache_dir

_FORMAT = "v1"


def hub_folder(file: Path, dtype: str) -> Path:
    """The hub folder made from the GGUF ``file`` in ``dtype`` (``bfloat16``, ``float16``, ``float32``).

    Raises:
        ModelFileError: not a GGUF file, truncated, or of an architecture transformers cannot convert.
        StorageError: the cache folder cannot take it.
    """
    try:
        with file.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise ModelFileError(f"{file} is not a GGUF file")
        size = file.stat().st_size
        digest = _hash(file)
    except OSError as error:
        raise ModelFileError(f"cannot read {file}: {error.strerror}") from error
    try:
        folder = cache_dir() / "converted" / f"{file.stem}-{digest}-{dtype}-{_FORMAT}"
        if (folder / "config.json").exists():
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder.parent).free < 6 * size:
            raise StorageError(
                f"{folder.parent} has less than {6 * size >> 20} MiB free to convert {file.name}"
            )
        temporary = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    except OSError as error:
        raise _storage_error(error, cache_dir()) from error
    try:
        _convert_in_child(file, dtype, temporary)
        temporary.rename(folder)
    except OSError as error:
        if not (folder / "config.json").exists():  # else another process was faster: use its folder
            raise _storage_error(error, folder) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:16]


def _storage_error(error: OSError, path: Path) -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(f"no space left in {path}; free some or set DRAFTPROOF_CACHE")
    return StorageError(f"cannot write {error.filename or path}: {error.strerror}; set DRAFTPROOF_CACHE")


def _convert_in_child(file: Path, dtype: str, out: Path) -> None:
    command = [sys.executable, "-m", "draftproof.models.gguf", str(file), dtype, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reason = lines[-1] if lines else f"exit code {done.returncode}"
    if "No space left" in done.stderr:
        raise StorageError(f"no space left while converting {file.name}; free some or set DRAFTPROOF_CACHE")
    raise ModelFileError(f"cannot convert {file}: {reason}")


def _convert(file: Path, dtype: str, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
