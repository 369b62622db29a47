"""Exact speculative decoding for PyTorch, proved. See README.md for a tour.

Importing this package imports nothing heavy; names are loaded when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftproof.engine import Engine, load, load_target
    from draftproof.errors import DraftproofError, UsageError
    from draftproof.hf_generate import custom_generate
    from draftproof.record import CostCurve, Plan, Round, Trace
    from draftproof.stream import Chunk, Generation, Stream

__version__ = "0.1.0"

_WHERE = {
    "Chunk": "stream", "CostCurve": "record", "DraftproofError": "errors", "Engine": "engine",
    "Generation": "stream", "Plan": "record", "Round": "record", "Stream": "stream", "Trace": "record",
    "UsageError": "errors", "custom_generate": "hf_generate", "load": "engine", "load_target": "engine",
}  # fmt: skip

__all__ = [
    "Chunk",
    "CostCurve",
    "DraftproofError",
    "Engine",
    "Generation",
    "Plan",
    "Round",
    "Stream",
    "Trace",
    "UsageError",
    "custom_generate",
    "load",
    "load_target",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'draftproof' has no attribute {name!r}")
    module = import_module(f"draftproof.{_WHERE[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
