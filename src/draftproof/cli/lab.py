"""Commands of the head lab after the corpus and their options; what they do is in the files they call."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftproof.cli.options import DEFAULT, Device, Dtype, HeadFolder, Json, MaxNew, Model, Shortlist, Threads

CorpusFolder = Annotated[Path, typer.Option("--corpus", help="Folder that `head corpus` made.")]


def add_commands(head_app: typer.Typer) -> None:
    """Add them to the group ``head``."""
    for command in (train, shortlist, select, export):
        head_app.command()(command)
    head_app.command("import")(import_)


def train(
    corpus: CorpusFolder = Path("runs/corpus"),
    out: Annotated[
        Path, typer.Option(help="Folder of the training; one that exists is gone on with.")
    ] = Path("runs/train"),
    model: Model = DEFAULT,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    depth: Annotated[int, typer.Option(help="Draft steps the head is unrolled over.")] = 3,
    epochs: Annotated[int | None, typer.Option(help="Times every row is read.")] = None,
    steps: Annotated[int | None, typer.Option(help="Instead of --epochs: steps of the optimiser.")] = None,
    batch_tokens: Annotated[int, typer.Option(help="Most tokens a step, over all processes.")] = 4096,
    lr: Annotated[
        float | None, typer.Option(help="Highest learning rate; default 1e-3 for a fresh head, else 2e-4.")
    ] = None,
    warmup: Annotated[float, typer.Option(help="Share of the steps over which the rate rises.")] = 0.05,
    weight_decay: Annotated[float, typer.Option(help="AdamW's, of the matrices.")] = 0.01,
    clip: Annotated[float, typer.Option(help="Largest norm of the gradient.")] = 1.0,
    loss: Annotated[
        str, typer.Option(help="Distance from the target: kl, tv (total variation) or argmax (its choice).")
    ] = "kl",
    step_decay: Annotated[
        float, typer.Option(help="A draft step's loss weighs this times the one before it.")
    ] = 0.8,
    init_from: Annotated[
        str | None,
        typer.Option(help="fresh, native or a head folder; default: native where the checkpoint has a head."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of a fresh head and the order of rows.")] = 0,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints; default a tenth of all.")
    ] = None,
    sample_rows: Annotated[int, typer.Option(help="Rows of each split that acceptance is measured on.")] = 64,
    autocast: Annotated[
        bool | None,
        typer.Option("--autocast/--no-autocast", help="bf16 arithmetic in the head; default: with bfloat16."),
    ] = None,
    threads: Threads = None,
    json_output: Json = False,
) -> None:
    """Train a draft head on the target's own answers, watching its acceptance; torchrun runs several."""
    from draftproof.cli import head_train as command

    settings = {
        "model": model, "corpus": str(corpus), "dtype": dtype, "device": device, "depth": depth,
        "epochs": epochs, "steps": steps, "batch_tokens": batch_tokens, "rate": lr, "warmup": warmup,
        "weight_decay": weight_decay, "clip": clip, "loss": loss, "step_decay": step_decay,
        "start": init_from, "seed": seed, "checkpoint_every": checkpoint_every, "sample_rows": sample_rows,
        "autocast": autocast, "threads": threads,
    }  # fmt: skip
    raise typer.Exit(command.run(settings, out, json_output=json_output))


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


def select(
    heads: Annotated[
        list[str],
        typer.Argument(metavar="HEAD...", help="Head folders, or folders of head train: all checkpoints."),
    ],
    corpus: CorpusFolder = Path("runs/corpus"),
    out: Annotated[
        Path, typer.Option(help="Folder of the selection; one that exists is gone on with.")
    ] = Path("runs/select"),
    model: Model = DEFAULT,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    depth: Annotated[str, typer.Option(help="Tokens drafted a round, or auto.")] = "3",
    prompts: Annotated[int, typer.Option(help="Held-out prompts that rank.")] = 36,
    dev_prompts: Annotated[int, typer.Option(help="Further ones the winner must decode as stock does.")] = 12,
    max_new_tokens: MaxNew = 96,
    seed: Annotated[int, typer.Option(help="Of the prompts chosen and the order of decodes.")] = 0,
    threads: Threads = None,
    json_output: Json = False,
) -> None:
    """Rank heads by acceptance and speed in the engine on held-out prompts; the winner must be exact."""
    from draftproof.cli import head_select as command

    settings = {
        "model": model, "corpus": str(corpus), "heads": tuple(heads), "dtype": dtype, "device": device,
        "depth": int(depth) if depth.isdigit() else depth, "prompts": prompts, "dev_prompts": dev_prompts,
        "max_new_tokens": max_new_tokens, "seed": seed, "threads": threads,
    }  # fmt: skip
    raise typer.Exit(command.run(settings, out, json_output=json_output))


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
