"""Ray clusters as this package uses them: an actor on every node, every job once on whichever is free.

Knows nothing of what runs on a node. Ray is an extra and imported when first needed.
"""

from __future__ import annotations

import os
import re
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from draftproof.errors import OptionError, UsageError

_CONNECT_SECONDS = 5.0
_CLOSE_SECONDS = 10
Job = TypeVar("Job")


class NoNodeLeftError(UsageError):
    """Every node died while jobs were left."""


class Pool:
    """One actor on every node of a cluster; use as a context manager.

    A node that dies loses only the job it was at, which another one takes.

    Args:
        address: the cluster's.
        actor: has ``ready()``, which returns when it can work, and ``close()``; made with ``arguments`` and
            then the node's name.
        cannot: what a node fails to do when an actor cannot be made, for the refusal.
    """

    def __init__(self, address: str, actor: type[Any], *arguments: Any, cannot: str) -> None:
        self._address, self._actor, self._arguments, self._cannot = address, actor, arguments, cannot
        self.actors: list[Any] = []

    def __enter__(self) -> Self:
        ray = connect(self._address)
        try:
            alive = [node for node in ray.nodes() if node["Alive"]]
            self.actors = [on_node(self._actor, node, *self._arguments) for node in alive]
            ray.get([actor.ready.remote() for actor in self.actors])
        except ray.exceptions.RayError as error:
            self._close()
            raise UsageError(f"a Ray node could not {self._cannot}: {reason(error)}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        ray = import_ray()
        closing = {actor.close.remote(): actor for actor in self.actors}
        if closing:
            _, busy = ray.wait(list(closing), num_returns=len(closing), timeout=_CLOSE_SECONDS)
            for one in busy:
                ray.kill(closing[one])
        self.actors = []
        ray.shutdown()

    def run(
        self, jobs: Iterable[Job], ask: Callable[[Any, Job], Any], name: Callable[[Job], str]
    ) -> Iterator[tuple[Job, Any]]:
        """Every job once with what it gave, as nodes finish; jobs are taken only when a node is free.

        Args:
            jobs: what to do, in order.
            ask: starts a job on an actor; the reference to its result.
            name: of a job, for the refusal.

        Raises:
            NoNodeLeftError: no node is left.
            UsageError: a job was refused.
        """
        ray = import_ray()
        coming, again, free = iter(jobs), deque[Job](), list(self.actors)
        running: dict[Any, tuple[Job, Any]] = {}
        while True:
            while free and (job := again.popleft() if again else next(coming, None)) is not None:
                actor = free.pop()
                running[ask(actor, job)] = (job, actor)
            if not running:
                if again:
                    raise NoNodeLeftError("every Ray node is gone: run the same command again to go on")
                return
            (done,), _ = ray.wait(list(running), num_returns=1)
            job, actor = running.pop(done)
            try:
                made = ray.get(done)
            except ray.exceptions.RayActorError:
                again.append(job)
                self.actors.remove(actor)
                continue
            except ray.exceptions.RayTaskError as error:
                if not isinstance(error.cause, UsageError):
                    raise  # a bug keeps its traceback
                raise UsageError(f"{name(job)}: {reason(error)}") from error
            free.append(actor)
            yield job, made


def connect(address: str) -> Any:
    """Join the cluster at ``address``; the ``ray`` module.

    Raises:
        OptionError: Ray is not installed.
        UsageError: there is no cluster.
    """
    ray = import_ray()
    _check_reachable(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise UsageError(f"no Ray cluster at {address!r}: {first}") from error
    return ray


def import_ray() -> Any:
    """The ``ray`` module."""
    try:
        import ray
    except ImportError as error:
        raise OptionError("--ray needs Ray: pip install 'draftproof[ray]'") from error
    return ray


def on_node(actor: type[Any], node: dict[str, Any], *arguments: Any) -> Any:
    """An actor that holds all of a node's processors and GPUs, so that nothing shares them.

    It is made with ``arguments`` and then the node's name.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    resources = node["Resources"]
    options = {
        "num_cpus": resources.get("CPU", 1), "num_gpus": resources.get("GPU", 0),
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False),
    }  # fmt: skip
    host = f"{node['NodeManagerHostname']}:{node['NodeID'][:6]}"
    return import_ray().remote(actor).options(**options).remote(*arguments, host)


def reason(error: Exception) -> str:
    """The node's own message in one line."""
    cause = getattr(error, "cause", None) or error
    return re.sub(r"^draftproof\.errors\.\w+: ", "", str(cause).strip().splitlines()[-1])


def _check_reachable(address: str) -> None:
    """Refuse a host and port where nothing listens: Ray itself would try again for minutes."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or "://" in address:
        return  # ``auto`` and other forms Ray resolves or refuses at once
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UsageError(f"no Ray cluster at {address!r}: {error}") from error
