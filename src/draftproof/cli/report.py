"""``draftproof report``: write a run's page again, into its folder or elsewhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.text import Text

from draftproof.cli.terminal import stderr, stdout
from draftproof.errors import EvidenceError, UsageError
from draftproof.folder import REPORT, SEAL, check_seal, read_json, seal


def run(folder: Path, out: Path | None, *, json_output: bool) -> int:
    """Write the page and print its path; 0 whatever the verdict is, which is the bench's to exit with.

    Without ``out`` it goes into the folder, which is sealed again: the hash of what was measured stays the
    same. A folder that is not as it was sealed is refused.
    """
    from draftproof.folder import read_run
    from draftproof.report.page import write_report

    if not folder.is_dir():
        raise UsageError(f"no run folder {folder}; give the folder that bench or evaluate wrote")
    _refuse_changes(folder)
    path = write_report(folder, out)
    if out is None:
        seal(folder)
    _, results = read_run(folder)
    outcome = results["verdict"]["outcome"]
    if json_output:
        document = {"report": str(path), "outcome": outcome, "seal": read_json(folder / SEAL)["hash"]}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        stdout().print(Text(str(path)), soft_wrap=True)
        stderr().print(Text("open it in any browser; it needs no network"), soft_wrap=True)
    return 0


def _refuse_changes(folder: Path) -> None:
    """Raise when anything but the page differs from the seal: sealing again would bless the change."""
    changed = [line for line in check_seal(folder) if not line.startswith(f"{REPORT} ")]
    if changed:
        more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
        raise EvidenceError(f"{folder} is not as it was sealed: {changed[0]}{more}; see draftproof audit")
