"""``head corpus``: shards of the target's own answers until there are enough, resumable at any moment.

Finished shards are kept, whatever ended the run; what a new run finds broken it names and makes again. The
manifest says how the corpus was made and holds the hash of every file. Decoding is ``writer``'s, the format
``shards``', the counts ``tally``'s; this file decides which shard comes next and when to stop.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from draftproof.errors import OptionError, ShardError, StorageError
from draftproof.heads import shards as files
from draftproof.heads.shards import Shard
from draftproof.heads.tally import Tally
from draftproof.heads.writer import ShardWriter, WriterSettings
from draftproof.models.load import DTYPES, read_config, resolve
from draftproof.models.weights import identity

Report = Callable[[str, int, int], None]
_BATCHES_A_SHARD = 2
_PATIENCE = 4
# Ids, text, index and their like; measured at 10 to 14 bytes a token, prompts included.
_BYTES_A_TOKEN, _BYTES_MORE = 24, 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSettings:
    """What to make: ``tokens`` of kept answers, or answers to ``prompts``; the rest decides the texts."""

    tokens: int | None
    prompts: int | None
    writer: WriterSettings

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.prompts is None):
            raise OptionError("give either --tokens or --prompts")
        made = self.writer
        counts = {"tokens": self.tokens, "prompts": self.prompts, "batch": made.batch,
                  "max-new-tokens": made.max_new_tokens, "threads": made.threads}  # fmt: skip
        for name, value in counts.items():
            if value is not None and value < 1:
                raise OptionError(f"--{name} must be 1 or more, got {value}")
        if not 0 <= made.held_out_share < 1:
            raise OptionError(f"--held-out-share must be from 0 to less than 1, got {made.held_out_share}")
        if made.dtype not in DTYPES:
            raise OptionError(f"unknown dtype {made.dtype!r}; known: {', '.join(DTYPES)}")
        _ = made.shares  # refuses shares that are none

    @property
    def shard_size(self) -> int:
        """Prompts a shard."""
        return self.writer.batch * _BATCHES_A_SHARD


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A shard to make: its number, and which prompts it answers."""

    number: int
    first: int
    count: int


class Place(Protocol):
    """Where shards are made."""

    def __enter__(self) -> Self:
        """Load the target."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let it go."""

    def run(self, jobs: Iterable[Job], report: Report) -> Iterator[Shard]:
        """The shards, in the order they are finished."""


class Here:
    """One shard after another in this process."""

    def __init__(self, settings: WriterSettings, folder: Path) -> None:
        self._settings, self._folder = settings, folder

    def __enter__(self) -> Self:
        self._writer = ShardWriter(self._settings, self._folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._writer

    def run(self, jobs: Iterable[Job], report: Report) -> Iterator[Shard]:
        """The shards in order."""
        for job in jobs:
            told = partial(report, f"shard {job.number}")
            yield self._writer.make(job.number, job.first, job.count, told)


def make_corpus(
    settings: CorpusSettings, out: Path, report: Report, *, provenance: Mapping[str, Any],
    place: Place | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Make or go on with the corpus in ``out``; its summary, with ``status`` and what was made again.

    Args:
        settings: what to make.
        out: folder of the corpus.
        report: hears of (stage, done, total).
        provenance: facts about this run, kept in the manifest beside those of earlier runs.
        place: where shards are made; here if none is given.

    Raises:
        OptionError: ``out`` holds something else, or a corpus made with other settings.
        StorageError: there is no room for it.
    """
    folder = resolve(settings.writer.model, settings.writer.dtype, progress=report)
    read_config(folder)
    corpus = _Corpus(settings, out, identity(folder), provenance)
    corpus.open(report)
    if corpus.is_complete():
        corpus.finish("complete")
        return corpus.summary()
    with place or Here(settings.writer, folder) as maker:
        corpus.go_on(maker, report)
    return corpus.summary()


class _Corpus:
    """The state of one run: which shards there are, what they hold, what is missing."""

    def __init__(
        self, settings: CorpusSettings, out: Path, weights: str, provenance: Mapping[str, Any]
    ) -> None:
        self._settings, self._out = settings, out
        self._request = {**settings.writer.request(), "weights": weights}
        self._runs: list[dict[str, Any]] = [dict(provenance)]
        self._entries: dict[int, dict[str, Any]] = {}
        self._pending: dict[int, Shard] = {}
        self._next = 0
        self._tally, self._redone = Tally(), list[str]()
        self._status = "partial"

    def open(self, report: Report) -> None:
        """Read what an earlier run left, and note what must be made again."""
        manifest = self._earlier()
        self._check_room()
        self._out.mkdir(parents=True, exist_ok=True)
        for leftover in self._out.glob(".shard-*"):
            leftover.unlink(missing_ok=True)  # of a run that was killed while writing
        known = {entry["shard"]: entry["files"] for entry in manifest["shards"]} if manifest else {}
        numbers = sorted({*known, *files.finished_shards(self._out)})
        for done, number in enumerate(numbers):
            report("reading earlier shards", done, len(numbers))
            try:
                shard = files.read_shard(self._out, number, known.get(number))
                self._check_job(shard)
            except ShardError as error:
                self._redone.append(str(error))
            else:
                self._take(shard, files.hashes(self._out, number))

    def _earlier(self) -> dict[str, Any] | None:
        """The manifest of an earlier run with the same settings, if there is one."""
        if not (self._out / files.MANIFEST).exists():
            strange = [path.name for path in self._out.glob("*")] if self._out.is_dir() else []
            if [name for name in strange if not name.startswith(("shard-", ".shard-"))]:
                raise OptionError(f"{self._out} holds other files: name an empty folder with --out")
            if self._out.exists() and not self._out.is_dir():
                raise OptionError(f"{self._out} is a file: name a folder with --out")
            return None
        manifest = files.read_manifest(self._out)
        for name, value in manifest["request"].items():
            if self._request.get(name) != value:
                mine = self._request.get(name)
                raise OptionError(
                    f"{self._out} was made with {name}={value}, not {mine}: name another folder with --out"
                )
        self._runs = [*manifest["runs"], *self._runs]
        return manifest

    def _check_room(self) -> None:
        settings = self._settings
        num_tokens = settings.tokens or (settings.prompts or 0) * settings.writer.max_new_tokens
        need = num_tokens * _BYTES_A_TOKEN + _BYTES_MORE
        parent = next((p for p in (self._out, *self._out.absolute().parents) if p.is_dir()), Path("/"))
        free = shutil.disk_usage(parent).free
        if free < need:
            raise StorageError(
                f"no room for the corpus in {self._out}: it may need {need >> 20} MiB, {free >> 20} are free"
            )

    def _check_job(self, shard: Shard) -> None:
        job = self._job(shard.number)
        if job and shard.facts.get("count") != job.count:
            index = files.names(shard.number)[1]
            raise ShardError(f"{self._out / index} answers {shard.facts.get('count')} of {job.count} prompts")
        mine = {"weights": self._request["weights"], "request": self._settings.writer.fingerprint()}
        if {name: shard.facts.get(name) for name in mine} != mine:
            raise ShardError(f"shard {shard.number} was made with other settings or weights")

    def _job(self, number: int) -> Job | None:
        size, most = self._settings.shard_size, self._settings.prompts
        count = size if most is None else min(size, most - number * size)
        return Job(number=number, first=number * size, count=count) if count > 0 else None

    def _jobs(self) -> Iterator[Job]:
        """Shards still to make, until there is enough."""
        number = 0
        while not self._is_enough() and (job := self._job(number)):
            if number not in self._entries:
                yield job
            number += 1

    def _is_enough(self) -> bool:
        return self._settings.tokens is not None and self._tally.num_tokens >= self._settings.tokens

    def is_complete(self) -> bool:
        """Whether no shard is left to make."""
        return next(self._jobs(), None) is None

    def go_on(self, maker: Place, report: Report) -> None:
        """Make what is missing; Ctrl-C ends it with all finished shards kept."""
        try:
            for shard in maker.run(self._jobs(), self._scaled(report)):
                if shard.facts["weights"] != self._request["weights"]:
                    raise OptionError(f"{shard.facts['host']} holds other weights of this model")
                self._take(shard, files.write_shard(self._out, shard))
                self.finish("partial")
                if self._next >= _PATIENCE and not self._tally.num_tokens:
                    raise OptionError(f"no answer of {self._next} shards could be kept: see {self._out}")
        except KeyboardInterrupt:
            self.finish("interrupted")
        else:
            self.finish("complete")

    def _scaled(self, report: Report) -> Report:
        """Progress over the whole corpus."""
        settings = self._settings

        def told(stage: str, done: int, total: int) -> None:
            if settings.tokens is not None:
                held = f"{self._tally.num_tokens} of {settings.tokens} tokens"
                report(f"{stage}: {done} of {total} rows; {held}", self._tally.num_tokens, settings.tokens)
            else:
                report(
                    f"{stage}: {done} of {total} rows", self._tally.num_prompts + done, settings.prompts or 0
                )

        return told

    def _take(self, shard: Shard, digests: dict[str, str]) -> None:
        """Enter a shard; it is counted when all before it are."""
        self._entries[shard.number] = {"shard": shard.number, "files": digests, "num_rows": len(shard.rows)}
        self._pending[shard.number] = shard
        while self._next in self._pending:
            self._tally.add(self._pending.pop(self._next))
            self._next += 1

    def finish(self, status: str) -> None:
        """Write the manifest; shards behind a gap stay on disk and are entered when it is filled."""
        self._status = status
        counted = [self._entries[number] for number in range(self._next)]
        files.write_manifest(
            self._out,
            {"status": self._status, "request": self._request, "runs": self._runs, "shards": counted,
             "removed_rows": self._tally.removed_rows, "summary": self._tally.summary()},
        )  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """Counts and figures of the corpus as it stands."""
        return {"status": self._status, "out": str(self._out), "model": self._settings.writer.model,
                "num_shards": self._next, "redone": self._redone, **self._tally.summary()}  # fmt: skip
