"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Option("--model", "-m", help="Packaged name, model folder or .gguf file.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="A torch device.")]
Claim = Annotated[str, typer.Option(help="auto, bitwise, guarded or fixed.")]
Threads = Annotated[int | None, typer.Option(help="torch threads; default: OMP_NUM_THREADS or all cores.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
DrafterName = Annotated[str, typer.Option(help="auto, lookup, suffix, draft_model, early_exit, mtp or none.")]
Depth = Annotated[str, typer.Option(help="Tokens verified a round, or auto.")]
DraftModel = Annotated[str | None, typer.Option(help="Model to draft with (same vocabulary).")]
ExitLayer = Annotated[int | None, typer.Option(help="Layers the early exit runs.")]
HeadFolder = Annotated[
    str | None, typer.Option("--head", help="Folder of a trained head, for drafters mtp and auto.")
]
Shortlist = Annotated[
    Path | None, typer.Option(help="File of ids, JSON or one a line: all the native head may draft.")
]
MaxNew = Annotated[int, typer.Option(help="Most tokens to emit.")]
LedgerPath = Annotated[Path, typer.Option("--ledger", help="The ledger.")]
Out = Annotated[Path | None, typer.Option(help="Folder for the run; default: runs/<time>.")]

DEFAULT = "smollm2-135m-instruct"
LEDGER = Path("runs") / "ledger.jsonl"
