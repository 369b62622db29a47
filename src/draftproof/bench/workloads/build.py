"""Workload names to workloads, in one explicit table; each is imported when it is asked for."""

from __future__ import annotations

from typing import Any

from draftproof.bench.workloads.base import Workload
from draftproof.errors import OptionError

KNOWN = ("llm", "tts")


def build_workload(name: str, options: dict[str, Any]) -> Workload:
    """The workload called ``name`` with its options as keyword arguments; nothing is loaded yet.

    Raises:
        OptionError: an unknown name or option.
    """
    if name not in KNOWN:
        raise OptionError(f"unknown workload {name!r}; known: {', '.join(KNOWN)}")
    try:
        made: Workload = _class(name)(**options)
    except TypeError as error:
        raise OptionError(f"workload {name!r}: {error}") from error
    return made


def _class(name: str) -> Any:
    if name == "tts":
        from draftproof.bench.workloads.tts import TTSWorkload  # noqa: PLC0415 - imports audio models

        return TTSWorkload
    from draftproof.bench.workloads.llm import LLMWorkload  # noqa: PLC0415

    return LLMWorkload
