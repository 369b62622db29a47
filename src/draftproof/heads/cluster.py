"""Shards over a Ray cluster: every node holds the target and makes the next shard when it is free.

Shards come back as records and are written here, so nodes need no common disk. A node that dies loses only
the shard it was making, which goes to another node. Nodes of different processors give texts that may differ
at a near-tie; every shard names its machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

from draftproof import nodes
from draftproof.heads.corpus import Job, Report
from draftproof.heads.shards import Shard
from draftproof.heads.writer import ShardWriter, WriterSettings
from draftproof.models.load import resolve


class RemoteWriter:
    """What runs on a node; ``settings.model`` is a name or path this node resolves for itself."""

    def __init__(self, settings: WriterSettings, host: str) -> None:
        self._host = host
        self._writer = ShardWriter(settings, resolve(settings.model, settings.dtype))

    def ready(self) -> str:
        """The node's name, once the target is loaded."""
        return self._host

    def make(self, job: Job) -> Shard:
        """One shard, whose facts name this node."""
        shard = self._writer.make(job.number, job.first, job.count)
        return Shard(number=shard.number, rows=shard.rows, facts={**shard.facts, "host": self._host})

    def close(self) -> None:
        """Nothing to end: the target goes with the process."""


class OnRay:
    """A place to make shards: the nodes of the cluster at ``address``; use as a context manager."""

    def __init__(self, address: str, settings: WriterSettings, writer: type[Any] = RemoteWriter) -> None:
        self._pool = nodes.Pool(address, writer, settings, cannot="load the model")

    def __enter__(self) -> Self:
        self._pool.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.__exit__(kind, error, trace)

    def run(self, jobs: Iterable[Job], report: Report) -> Iterator[Shard]:
        """Every shard once, as nodes finish them; jobs are taken only when a node is free.

        Raises:
            UsageError: a shard was refused, or no node is left.
        """

        def ask(writer: Any, job: Job) -> Any:
            report(f"shard {job.number} on one of {len(self._pool.actors)} nodes", 0, 0)
            return writer.make.remote(job)

        for _, shard in self._pool.run(jobs, ask, lambda job: f"shard {job.number}"):
            yield shard
