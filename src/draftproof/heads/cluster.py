"""Shards over a Ray cluster: every node holds the target and makes the next shard when it is free.

Shards come back as records and are written here, so nodes need no common disk. A node that dies loses only
the shard it was making, which goes to another node. Nodes of different processors give texts that may differ
at a near-tie; every shard names its machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Self

from draftproof import nodes
from draftproof.errors import UsageError
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


class OnRay:
    """A place to make shards: the nodes of the cluster at ``address``; use as a context manager."""

    def __init__(self, address: str, settings: WriterSettings, writer: type[Any] = RemoteWriter) -> None:
        self._address, self._settings, self._writer = address, settings, writer
        self._nodes: list[Any] = []

    def __enter__(self) -> Self:
        ray = nodes.connect(self._address)
        try:
            alive = [node for node in ray.nodes() if node["Alive"]]
            self._nodes = [nodes.on_node(self._writer, node, self._settings) for node in alive]
            ray.get([node.ready.remote() for node in self._nodes])
        except ray.exceptions.RayError as error:
            self._close()
            raise UsageError(f"a Ray node could not load the model: {nodes.reason(error)}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        ray = nodes.import_ray()
        for node in self._nodes:
            ray.kill(node)
        self._nodes = []
        ray.shutdown()

    def run(self, jobs: Iterable[Job], report: Report) -> Iterator[Shard]:
        """Every shard once, as nodes finish them; jobs are taken only when a node is free.

        Raises:
            UsageError: a shard was refused, or no node is left.
        """
        ray = nodes.import_ray()
        coming, again, free = iter(jobs), deque[Job](), list(self._nodes)
        running: dict[Any, tuple[Job, Any]] = {}
        while True:
            while free and (job := again.popleft() if again else next(coming, None)) is not None:
                node = free.pop()
                running[node.make.remote(job)] = (job, node)
            if not running:
                if again:
                    raise UsageError("every Ray node is gone: run the same command again to go on")
                return
            report(f"{len(running)} shards on {len(self._nodes)} nodes", 0, 0)
            (done,), _ = ray.wait(list(running), num_returns=1)
            job, node = running.pop(done)
            try:
                shard = ray.get(done)
            except ray.exceptions.RayActorError:
                again.append(job)
                self._nodes.remove(node)
                continue
            except ray.exceptions.RayTaskError as error:
                if not isinstance(error.cause, UsageError):
                    raise  # a bug keeps its traceback
                raise UsageError(f"shard {job.number}: {nodes.reason(error)}") from error
            free.append(node)
            yield shard
