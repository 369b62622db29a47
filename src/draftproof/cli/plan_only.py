"""``draftproof doctor --plan-only``: what a folder holds and what it would cost, from its headers alone.

``inventory`` and ``sizes`` are those of ``models.inventory`` and ``models.sizes``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from draftproof.cli.terminal import quiet_transformers, stdout
from draftproof.errors import OptionError
from draftproof.forecast import best_depth, break_even, gain

DEFAULT_CONTEXT = 1024
_DEPTHS, _MAX_DEPTH = (1, 2, 3, 4), 8
_ACCEPTANCES = (0.5, 0.7, 0.8, 0.9)
_SHORTLISTS = (32768, 8192)
_MOST_SHOWN = 20
_WORD = (
    "Predicted from bytes, as if nothing but memory cost time and every draft token were right by the same"
    " chance; not measured."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """One way to draft: what a draft token reads, what it costs in target passes, and when it pays.

    ``extra`` is ``ratio`` and the token's own row in the verification. ``break_even`` is by depth,
    ``best`` by acceptance.
    """

    name: str
    step_bytes: int
    ratio: float
    extra: float
    break_even: dict[int, float | None]
    best: dict[float, tuple[int, float]]


def run(model: str, dtype: str | None, context: int | None, *, json_output: bool) -> None:
    """Print the inventory and the forecast; raise one line where the folder does not map."""
    from draftproof.models.inventory import take_inventory
    from draftproof.models.load import DTYPES, local_folder

    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if context is not None and context < 0:
        raise OptionError(f"context must be 0 or more, got {context}")
    quiet_transformers()
    inventory = take_inventory(local_folder(model), dtype)
    positions = DEFAULT_CONTEXT if context is None else context
    if json_output:
        sys.stdout.write(json.dumps(document(inventory, positions)) + "\n")
    else:
        stdout().print(Group(*_blocks(inventory, positions)))
    inventory.refuse_problems()


def draftings(sizes: Any, context: int) -> list[Drafting]:
    """Drafts that cost nothing, then the native head with all ids and with shortlists of them."""
    total, row = sum(sizes.token_bytes(context).values()), sizes.row_bytes(context)
    ways = {"no bytes (lookup)": 0}
    if sizes.head is not None:
        ways["native head, all ids"] = sizes.draft_bytes(context, sizes.vocab_size)
        ways |= {f"native head, {n} ids": sizes.draft_bytes(context, n)
                 for n in _SHORTLISTS if n < sizes.vocab_size}  # fmt: skip
    found = []
    for name, size in ways.items():
        extra = (size + row) / total
        best = {a: best_depth(a, extra, _MAX_DEPTH) for a in _ACCEPTANCES}
        found.append(Drafting(
            name=name, step_bytes=size, ratio=size / total, extra=extra,
            break_even={depth: break_even(depth, extra) for depth in _DEPTHS},
            best={a: (depth, gain(a, depth, extra)) for a, depth in best.items()},
        ))  # fmt: skip
    return found


def document(inventory: Any, context: int) -> dict[str, Any]:
    """Everything as plain JSON values; ``sizes`` and ``draftings`` are ``None`` where nothing maps."""
    sizes = inventory.sizes
    return {
        "folder": str(inventory.folder), "model_type": inventory.model_type, "dtype": inventory.dtype,
        "stored": inventory.stored, "stored_bytes": inventory.stored_bytes,
        "has_head": inventory.has_head, "context": context,
        "sizes": None if sizes is None else _size_document(sizes, context),
        "draftings": None if sizes is None else [_drafting_document(d) for d in draftings(sizes, context)],
        "problems": [asdict(problem) for problem in inventory.problems], "notes": list(inventory.notes),
    }  # fmt: skip


def _size_document(sizes: Any, context: int) -> dict[str, Any]:
    read = sizes.token_bytes(context)
    return {
        "num_params": sizes.num_params, "num_target_params": sizes.num_target_params,
        "is_tied": sizes.is_tied, "token_bytes": read, "total_token_bytes": sum(read.values()),
        "row_bytes": sizes.row_bytes(context), "state_bytes": sizes.state_bytes,
        "window_bytes": sizes.window_bytes, "position_bytes": sizes.position_bytes,
        "head_position_bytes": sizes.head_position_bytes,
    }  # fmt: skip


def _drafting_document(drafting: Drafting) -> dict[str, Any]:
    """Lists of rows, as JSON has no numbers for keys."""
    return {
        "name": drafting.name, "step_bytes": drafting.step_bytes, "ratio": drafting.ratio,
        "extra": drafting.extra,
        "break_even": [{"depth": d, "acceptance": a} for d, a in drafting.break_even.items()],
        "best": [{"acceptance": a, "depth": d, "gain": g} for a, (d, g) in drafting.best.items()],
    }  # fmt: skip


def _blocks(inventory: Any, context: int) -> list[RenderableType]:
    blocks: list[RenderableType] = [_head_line(inventory)]
    if inventory.sizes is not None:
        found = draftings(inventory.sizes, context)
        blocks += [_part_table(inventory.sizes, context), _state_lines(inventory.sizes)]
        blocks += [_draft_table(found), _depth_table(found), _WORD]
    if inventory.problems:
        blocks.append(_problem_table(inventory))
    return [*blocks, *(f"Note: {note}." for note in inventory.notes)]


def _head_line(inventory: Any) -> str:
    head = "with a native head" if inventory.has_head else "without a native head"
    stored = ", ".join(f"{count} {dtype}" for dtype, count in sorted(inventory.stored.items()))
    size = "" if inventory.stored_bytes is None else f", {inventory.stored_bytes / 1e9:.3f} GB"
    return (
        f"{inventory.folder}\n[bold]{inventory.model_type}[/bold] {head}\n"
        f"stored tensors: {stored}{size}; figures at {inventory.dtype}"
    )


def _part_table(sizes: Any, context: int) -> Table:
    read, params = sizes.token_bytes(context), sizes.num_params
    total = sum(read.values())
    table = Table(title=f"One decoded token at {context} positions", title_justify="left")
    table.add_column("part")
    for column in ("parameters", "MB read", "share"):
        table.add_column(column, justify="right")
    for part in dict.fromkeys((*read, *params)):
        count = f"{params[part]:,}" if part in params else "tied" if part == "output layer" else ""
        size = read.get(part)
        cells = ("", "") if size is None else (f"{size / 1e6:,.2f}", f"{size / total:.1%}")
        table.add_row(part, count, *cells)
    table.add_section()
    table.add_row("target", f"{sizes.num_target_params:,}", f"{total / 1e6:,.2f}", "100.0%")
    return table


def _state_lines(sizes: Any) -> str:
    lines = f"keys and values: {sizes.position_bytes / 1024:.1f} KiB a position"
    if sizes.head is not None:
        lines += f", the head's {sizes.head_position_bytes / 1024:.1f} KiB"
    if sizes.recurrent:
        lines += (
            f"\nrecurrent state: {sizes.state_bytes / 2**20:.2f} MiB fp32, and a snapshot of that size a"
            f" pending row; convolution windows {sizes.window_bytes / 2**20:.2f} MiB"
        )
    return lines


def _draft_table(found: list[Drafting]) -> Table:
    table = Table(title="Acceptance from which drafting pays", title_justify="left")
    table.add_column("drafts from")
    for column in ("MB a step", "of a pass", *(f"depth {depth}" for depth in _DEPTHS)):
        table.add_column(column, justify="right")
    for way in found:
        needs = ["never" if a is None else f"{a:.3f}" for a in way.break_even.values()]
        table.add_row(way.name, f"{way.step_bytes / 1e6:,.2f}", f"{way.ratio:.3f}", *needs)
    return table


def _depth_table(found: list[Drafting]) -> Table:
    title = f"Best depth up to {_MAX_DEPTH}, and times serial speed"
    table = Table(title=title, title_justify="left")
    table.add_column("drafts from")
    for acceptance in _ACCEPTANCES:
        table.add_column(f"acceptance {acceptance}", justify="right")
    for way in found:
        table.add_row(way.name, *(f"{depth} ({speed:.2f}x)" for depth, speed in way.best.values()))
    return table


def _problem_table(inventory: Any) -> Table:
    table = Table(title=f"{len(inventory.problems)} problems", title_justify="left")
    for column in ("kind", "tensor", "what"):
        table.add_column(column, overflow="fold")
    for problem in inventory.problems[:_MOST_SHOWN]:
        table.add_row(problem.kind, problem.name, problem.text)
    left = len(inventory.problems) - _MOST_SHOWN
    if left > 0:
        table.add_row("", f"and {left} more", "")
    return table
