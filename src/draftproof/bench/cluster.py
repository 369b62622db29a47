"""A bench over a Ray cluster: every node runs a whole station and takes the next pair when it is free.

A pair never splits between machines, so every ratio compares two legs of one machine; legs carry the name of
the node they ran on. A node that dies loses only the pair it was decoding, which goes to another node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from draftproof import nodes
from draftproof.bench.station import Station, StationSettings
from draftproof.errors import UsageError
from draftproof.folder import Decode

if TYPE_CHECKING:  # a node's own process stays without torch: it only passes on
    from draftproof.bench.run import Announce, Item


def named_station(settings: StationSettings, warm_ids: Sequence[int]) -> Station:
    """A station whose ``folder`` is a name or path that this node resolves in its own cache."""
    from draftproof.models.load import resolve

    folder = resolve(settings.base["folder"], settings.base["dtype"])
    return Station(replace(settings, base=settings.base | {"folder": str(folder)}), warm_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class OnRay:
    """A place to bench: one station on every node of a Ray cluster.

    Args:
        address: of the cluster's head, ``auto`` for the one this machine belongs to.
        model: name or path every node resolves for itself.
        station: what decodes on a node; its settings name the model as ``folder``.
    """

    address: str
    model: str
    station: Callable[[StationSettings, Sequence[int]], Station] = named_station

    def __call__(self, settings: StationSettings, warm_ids: Sequence[int]) -> Fleet:
        """Stations that are started when the fleet is entered."""
        return Fleet(self, settings, warm_ids)


class RemoteStation:
    """What runs on a node: a station whose legs carry the node's name."""

    def __init__(self, place: OnRay, settings: StationSettings, warm_ids: Sequence[int], host: str) -> None:
        mine = replace(settings, base=settings.base | {"folder": place.model})
        self._host = host
        self._station = place.station(mine, warm_ids).__enter__()

    def ready(self) -> str:
        """The node's name, once both processes are warm."""
        return self._host

    def pair(self, label: str, pair: int, prompt_ids: Sequence[int]) -> list[Decode]:
        """One pair, decoded here."""
        decodes = self._station.pair(label, pair, prompt_ids)
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
        ray = nodes.connect(self._place.address)
        made = (self._place, self._settings, list(self._warm))
        try:
            self._stations = [
                nodes.on_node(RemoteStation, node, *made) for node in ray.nodes() if node["Alive"]
            ]
            ray.get([station.ready.remote() for station in self._stations])
        except ray.exceptions.RayError as error:
            self._close()
            raise UsageError(f"a Ray node could not start its processes: {nodes.reason(error)}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        ray = nodes.import_ray()
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
        ray = nodes.import_ray()
        waiting, free = deque(items), list(self._stations)
        running: dict[Any, tuple[Item, Any]] = {}
        while waiting or running:
            while waiting and free:
                item, station = waiting.popleft(), free.pop()
                announce(item)
                running[station.pair.remote(item.label, item.pair, item.prompt_ids)] = (item, station)
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
                if not isinstance(error.cause, UsageError):
                    raise  # a bug keeps its traceback
                raise UsageError(f"{item.label}: {nodes.reason(error)}") from error
            free.append(station)
            yield item, decodes
