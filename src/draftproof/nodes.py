"""Ray clusters as this package uses them: connect or say in one line why not, and name what failed.

Knows nothing of what runs on a node. Ray is an extra and imported when first needed.
"""

from __future__ import annotations

import os
import re
import socket
from typing import Any

from draftproof.errors import OptionError, UsageError

_CONNECT_SECONDS = 5.0


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
