"""Options of the head lab's steps after the corpus; what they do is in the files they call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftproof.cli.app import DEFAULT, Dtype, HeadFolder, Json, Model, Threads

CorpusFolder = Annotated[Path, typer.Option("--corpus", help="Folder that `head corpus` made.")]


def add_commands(head_app: typer.Typer) -> None:
    """Add them to the group ``head``."""
    head_app.command()(shortlist)


def shortlist(
    corpus: CorpusFolder,
    model: Model = DEFAULT,
    size: Annotated[
        list[str] | None,
        typer.Option("--size", help="Ids in the list, repeat for several; auto: the best by --cost."),
    ] = None,
    cost: Annotated[
        bool, typer.Option("--cost", help="Time the output layer at every size, and predict speeds.")
    ] = False,
    depth: Annotated[int | None, typer.Option(help="With --cost: tokens drafted a round; default 3.")] = None,
    acceptance: Annotated[
        float | None,
        typer.Option(help="With --cost: assumed chance that a drafted token is right; default 0.5."),
    ] = None,
    head: HeadFolder = None,
    dtype: Dtype = "bfloat16",
    device: Annotated[str | None, typer.Option(help="With --cost: a torch device; default cpu.")] = None,
    threads: Threads = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the ids; with several sizes one each, named by size.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Choose the ids a head may draft by their frequency in a corpus, and show what each size covers."""
    from draftproof.cli import shortlist as command

    wishes = command.Wishes(
        corpus=corpus, model=model, dtype=dtype, sizes=tuple(size or ()), cost=cost, out=out,
        json_output=json_output,
        timing={"depth": depth, "acceptance": acceptance, "head": head, "device": device, "threads": threads},
    )  # fmt: skip
    raise typer.Exit(command.run(wishes))
