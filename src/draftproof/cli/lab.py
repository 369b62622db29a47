"""Options of the head lab's steps after the corpus; what they do is in the files they call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftproof.cli.app import DEFAULT, Dtype, HeadFolder, Json, Model, Shortlist, Threads

CorpusFolder = Annotated[Path, typer.Option("--corpus", help="Folder that `head corpus` made.")]


def add_commands(head_app: typer.Typer) -> None:
    """Add them to the group ``head``."""
    head_app.command()(shortlist)
    head_app.command()(export)
    head_app.command("import")(import_)


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


def export(
    head: Annotated[Path, typer.Argument(metavar="HEAD_DIR", help="Folder of a trained head.")],
    out: Annotated[Path, typer.Option("--out", help="New or empty folder.")],
    to: Annotated[str, typer.Option("--to", help="speculators or sglang.")],
    model: Model = DEFAULT,
    depth: Annotated[int, typer.Option(help="Tokens drafted a round, for the layout's settings.")] = 3,
    shortlist: Shortlist = None,
    json_output: Json = False,
) -> None:
    """Write a head in the layout of another engine, where that layout computes the same."""
    from draftproof.cli import export as command

    ends = command.Ends(source=head, model=model, out=out, json_output=json_output)
    raise typer.Exit(command.export(ends, to, depth, shortlist))


def import_(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that `head export` made.")],
    out: Annotated[Path, typer.Option("--out", help="New or empty folder for the head.")],
    model: Model = DEFAULT,
    json_output: Json = False,
) -> None:
    """Read an exported head back bit for bit; refuse what does not fit or accepts inexactly."""
    from draftproof.cli import export as command

    ends = command.Ends(source=folder, model=model, out=out, json_output=json_output)
    raise typer.Exit(command.import_(ends))
