"""A bench over a Ray cluster: every node runs a whole station and takes the next pair when it is free.

A pair never splits between machines, so every ratio compares two legs of one machine; legs carry the name of
the node they ran on. A node that dies loses only the pair it was decoding, which goes to another node.
"""

from __future__ import annotations

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
        self._pool = nodes.Pool(
            place.address, RemoteStation, place, settings, list(warm_ids), cannot="start its processes"
        )

    def __enter__(self) -> Self:
        self._pool.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.__exit__(kind, error, trace)

    def run(self, items: Sequence[Item], announce: Announce) -> Iterator[tuple[Item, list[Decode]]]:
        """Every item once, as nodes finish them.

        Raises:
            UsageError: a decode was refused, or no node is left.
        """

        def ask(station: Any, item: Item) -> Any:
            announce(item)
            return station.pair.remote(item.label, item.pair, item.prompt_ids)

        num_done = 0
        try:
            for done in self._pool.run(items, ask, lambda item: item.label):
                num_done += 1
                yield done
        except nodes.NoNodeLeftError as error:
            left = len(items) - num_done
            raise UsageError(f"every Ray node is gone; {left} pairs are left: resume the run") from error
