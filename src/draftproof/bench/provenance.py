"""Where a figure comes from: command, code version and weights, for whoever wants to repeat it."""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draftproof.models.weights import identity

_ROOT = Path(__file__).resolve().parents[3]


def provenance(model: Path, argv: Sequence[str]) -> dict[str, Any]:
    """Facts about this run: ``weights``, ``command``, ``started``, ``version``, ``commit``, ``tree``.

    ``tree`` is ``clean``, ``dirty`` or ``unknown`` (not a checkout, or git is missing).
    """
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no") if commit else None
    return {
        "weights": identity(model), "model_folder": str(model),
        "command": shlex.join(["draftproof", *argv]), "argv": list(argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "version": version("draftproof"), "commit": commit,
        "tree": "unknown" if changes is None else ("dirty" if changes else "clean"),
    }  # fmt: skip


def _git(*arguments: str) -> str | None:
    if not (_ROOT / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
