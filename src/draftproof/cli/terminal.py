"""What the commands share with the terminal: two consoles, a progress line, prompt reading."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from draftproof.errors import PromptError

_PIPE_WIDTH = 120

Report = Callable[[str, int, int], None]


def stdout() -> Console:
    """Results; in a file or a pipe, which have no width, tables get room."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPE_WIDTH
    return console


def stderr() -> Console:
    """Everything that is not a result."""
    return Console(stderr=True, highlight=False)


@contextmanager
def progress_line() -> Iterator[Report]:
    """A transient progress bar on stderr for (stage, done, total) reports."""
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=24),
        TextColumn("{task.fields[count]}", markup=False), TimeElapsedColumn(),
    )  # fmt: skip
    console = stderr()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("loading", total=None, count="")

        def report(stage: str, done: int, total: int) -> None:
            count = f"{done} of {total} done" if total else ""
            bar.update(task, description=stage, completed=done, total=total or None, count=count)

        yield report


def read_prompt(argument: str) -> str:
    """The prompt given, or standard input for ``-``; refuses what is not UTF-8 text."""
    try:
        if argument == "-":
            return sys.stdin.buffer.read().decode("utf-8")
        return argument.encode("utf-8").decode("utf-8")
    except UnicodeError as error:
        raise PromptError(f"the prompt is not UTF-8 text: {error}") from error


def quiet_transformers() -> None:
    """Silence the library's own progress bars and advice: results and errors are ours to print."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
