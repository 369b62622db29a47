"""What every judged run leaves behind: its page, the seal over all of it, and a row in the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal


def publish(
    results: dict[str, Any], folder: Path, ledger: Path, *, name: str, kind: Literal["bench", "evaluate"]
) -> None:
    """Write the report, seal the folder, and enter the run unless it was interrupted."""
    from draftproof.folder import read_run, seal
    from draftproof.ledger import Ledger, row_from_results
    from draftproof.report.page import write_report

    write_report(folder)
    sealed = seal(folder)
    if results["status"] == "interrupted":
        return
    facts = read_run(folder)[0].provenance
    Ledger(ledger).append(
        row_from_results(
            results, name=name, kind=kind, run=str(folder), seal=sealed, time=facts["started"],
            argv=tuple(facts["argv"]),
        )
    )  # fmt: skip
