"""A bench over a Ray cluster: every node runs a whole station and takes the next pair when it is free.

A pair never splits between machines, so every ratio compares two legs of one machine; legs carry the name of
the node they ran on. A node that dies loses only the pair it was decoding, which goes to another node.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from draftproof.bench.run import Announce, Item
from draftproof.bench.station import Station, StationSettings
from draftproof.errors import OptionError, UsageError
from draftproof.folder import Decode
from draftproof.models.load import resolve


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRay:
    """A place to bench: one station on every node of a Ray cluster.

    Args:
        address: of the cluster's head, ``auto`` for the one this machine belongs to.
        model: name or path every node resolves for itself.
        dtype: of the weights.
        station: what decodes on a node.
    """

    address: str
    model: str
    dtype: str
    station: Callable[[StationSettings, Sequence[int]], Station] = Station

    def __call__(self, settings: StationSettings, warm_ids: Sequence[int]) -> Fleet:
        """Stations that are started when the fleet is entered."""
        return Fleet(self, settings, warm_ids)


class RemoteStation:
    """What runs on a node: a station whose legs carry the node's name."""

    def __init__(self, place: OnRay, settings: StationSettings, warm_ids: Sequence[int], host: str) -> None:
        folder: Path = resolve(place.model, place.dtype)  # every node has a cache of its own
        mine = replace(settings, base=settings.base | {"folder": str(folder)})
        self._host = host
        self._station = place.station(mine, warm_ids).__enter__()

    def ready(self) -> str:
        """The node's name, once both processes are warm."""
        return self._host

    def pair(self, item: Item) -> list[Decode]:
        """One pair, decoded here."""
        decodes = self._station.pair(item.label, item.pair, item.prompt_ids)
        return [replace(d, leg=replace(d.leg, host=self._host)) for d in decodes]

    def close(self) -> None:
        """End both processes."""
        self._station.__exit__(None, None, None)


class Fleet:
    """The stations of a cluster; use as a context manager."""

    def __init__(self, place: OnRay, settings: StationSettings, warm_ids: Sequence[int]) -> None:
        self._place, self._settings, self._warm = place, settings, warm_ids
        self._stations: list[Any] = []

    def __enter__(self) -> Self:
        ray = _ray()
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(address=self._place.address, logging_level="ERROR", log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            first = str(error).strip().splitlines()[0]
            raise UsageError(f"no Ray cluster at {self._place.address!r}: {first}") from error
        try:
            self._stations = [self._start(node) for node in ray.nodes() if node["Alive"]]
            ray.get([station.ready.remote() for station in self._stations])
        except ray.exceptions.RayError as error:
            self._close()
            raise UsageError(f"a Ray node could not start its processes: {_reason(error)}") from error
        return self

    def _start(self, node: dict[str, Any]) -> Any:
        """An actor that holds all of a node's processors and GPUs, so that no pair shares them."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy = NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        resources = node["Resources"]
        actor = _ray().remote(RemoteStation).options(
            num_cpus=resources.get("CPU", 1), num_gpus=resources.get("GPU", 0), scheduling_strategy=strategy,
        )  # fmt: skip
        host = f"{node['NodeManagerHostname']}:{node['NodeID'][:6]}"
        return actor.remote(self._place, self._settings, list(self._warm), host)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        ray = _ray()
        for station in self._stations:
            try:
                ray.get(station.close.remote(), timeout=10)
            except ray.exceptions.RayError:
                ray.kill(station)
        self._stations = []
        ray.shutdown()

    def run(self, items: Sequence[Item], announce: Announce) -> Iterator[tuple[Item, list[Decode]]]:
        """Every item once, as nodes finish them.

        Raises:
            UsageError: a decode was refused, or no node is left.
        """
        ray = _ray()
        waiting, free = deque(items), list(self._stations)
        running: dict[Any, tuple[Item, Any]] = {}
        while waiting or running:
            while waiting and free:
                item, station = waiting.popleft(), free.pop()
                announce(item)
                running[station.pair.remote(item)] = (item, station)
            if not running:
                raise UsageError(f"every Ray node is gone; {len(waiting)} pairs are left: resume the run")
            (done,), _ = ray.wait(list(running), num_returns=1)
            item, station = running.pop(done)
            try:
                decodes = ray.get(done)
            except ray.exceptions.RayActorError:
                waiting.appendleft(item)
                self._stations.remove(station)
                continue
            except ray.exceptions.RayTaskError as error:
                raise UsageError(f"{item.label}: {_reason(error)}") from error
            free.append(station)
            yield item, decodes


def _reason(error: Exception) -> str:
    """The node's own message in one line."""
    cause = getattr(error, "cause", None) or error
    return str(cause).strip().splitlines()[-1]


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise OptionError("--ray needs Ray: pip install 'draftproof[ray]'") from error
    return ray
