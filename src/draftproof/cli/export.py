"""``draftproof head export`` and ``head import``: what was written or read, in a few lines."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from draftproof.cli.head import provenance_of
from draftproof.cli.terminal import progress_line, quiet_transformers, stdout

_ADVICE = {
    "speculators": "a head for speculators (SpeculatorModel.from_pretrained); vLLM 0.33 serves no mtp"
    " speculator from its own folder: `speculators stitch-mtp` puts it into the target's checkpoint",
    "sglang": "serve with `--config {out}/sglang.yaml` beside the target's own options",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """From where, for which model, to where."""

    source: Path
    model: str
    out: Path
    json_output: bool


def export(ends: Ends, layout: str, depth: int, shortlist: Path | None) -> int:
    """0 when the folder was written."""
    from draftproof.drafters.shortlist import read_shortlist
    from draftproof.errors import DrafterError
    from draftproof.heads.export import ExportSettings, check_new, export_head

    quiet_transformers()
    ids = None if shortlist is None else read_shortlist(shortlist)
    settings = ExportSettings(layout=layout, depth=depth, shortlist=ids)
    if not ends.source.is_dir():
        raise DrafterError(f"no head folder {str(ends.source)!r}")
    check_new(ends.out)
    facts = _facts(ends)
    made = export_head(ends.source, Path(facts["model_folder"]), ends.out, settings, facts)
    told = [f"{made['num_tensors']} tensors to {ends.out} in the layout of {layout}", _ids(made["num_ids"])]
    if made["shortlist_left_out"]:
        told.append("the head's shortlist.json has no place in this layout and was left out")
    _tell(made, [*told, _ADVICE[layout].format(out=ends.out)], json_output=ends.json_output)
    return 0


def import_(ends: Ends) -> int:
    """0 when the folder was read back and every check held."""
    from draftproof.heads.export import check_new, import_head

    quiet_transformers()
    check_new(ends.out)
    facts = _facts(ends)
    made = import_head(ends.source, Path(facts["model_folder"]), ends.out, facts)
    told = [
        f"{made['num_tensors']} tensors from the layout of {made['layout']}, all of them this model's",
        _ids(made["num_ids"]), f"head: {ends.out}",
    ]  # fmt: skip
    _tell(made, told, json_output=ends.json_output)
    return 0


def _facts(ends: Ends) -> dict[str, Any]:
    with progress_line() as report:
        return provenance_of({"model": ends.model, "dtype": "bfloat16"}, report)


def _ids(num_ids: int | None) -> str:
    return "drafts over all ids" if num_ids is None else f"drafts over a shortlist of {num_ids} ids"


def _tell(made: dict[str, Any], told: list[str], *, json_output: bool) -> None:
    if json_output:
        sys.stdout.write(json.dumps(made) + "\n")
    else:
        stdout().print(Text("\n".join(told)), soft_wrap=True)
