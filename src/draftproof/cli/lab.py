"""Commands of the head lab and their options; what they do is in the other files of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftproof.cli.options import DEFAULT, Device, Dtype, Json, Model, Threads


def train(
    corpus: Annotated[Path, typer.Option(help="Folder that head corpus made.")] = Path("runs/corpus"),
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
