"""The command line: Typer commands, one line for every error, exit codes 0 good, 1 bad verdict, 2 wrong use.

Products are imported inside the handlers, so ``draftproof --help`` loads no torch.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer

from draftproof.cli.app import app, head_app
from draftproof.cli.lab import add_commands
from draftproof.errors import DraftproofError, UsageError

__all__ = ["app", "main"]

add_commands(head_app)

# Typer carries its own copy of click; this is the base of all its usage errors.
_CLICK_ERROR: type[Any] = next(b for b in typer.BadParameter.__mro__ if b.__name__ == "ClickException")


def main() -> None:
    """Run the command line and exit."""
    with _interrupts_noted() as interrupts:
        try:
            code = _run()
        except KeyboardInterrupt:
            code = 130
        except Exception:
            if not interrupts:
                raise
            code = 130
    # Python dies of SIGINT at exit where one broke off code run from a string (as dataclasses do while a
    # library is imported), though it was handled since. Running any other such code makes it forget that.
    exec("")  # noqa: S102
    sys.exit(code)


@contextmanager
def _interrupts_noted() -> Iterator[list[int]]:
    """The interrupts so far: libraries that are being imported turn the exception into other errors."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        signal.default_int_handler(number, frame)

    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, before)


def _run() -> int:
    """Run the app; its exit code, or that of its error, told in one line."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        return _fail(str(error), 2)
    except _CLICK_ERROR as error:
        return _fail(f"{error.format_message()} (see --help)", 2)
    except typer.Abort:
        return 130
    except DraftproofError as error:
        return _fail(f"{type(error).__name__}: {error}", 1)
    except BrokenPipeError:
        return 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        code = _fail("No space left on the device that standard output goes to", 2)
        os._exit(code)  # what is still buffered cannot be written at exit either
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    """Print one line on stderr."""
    text = " ".join(message.split())
    sys.stderr.write(f"draftproof: {text}\n")
    return code
