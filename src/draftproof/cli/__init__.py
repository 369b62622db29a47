"""The command line: Typer commands, one line for every error, exit codes 0 good, 1 bad verdict, 2 wrong use.

Products are imported inside the handlers, so ``draftproof --help`` loads no torch.
"""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import typer

from draftproof.cli.app import app
from draftproof.errors import DraftproofError, UsageError

__all__ = ["app", "main"]

# Typer carries its own copy of click; this is the base of all its usage errors.
_CLICK_ERROR: type[Any] = next(b for b in typer.BadParameter.__mro__ if b.__name__ == "ClickException")


def main() -> None:
    """Run the command line and exit."""
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        code = _fail(str(error), 2)
    except _CLICK_ERROR as error:
        code = _fail(f"{error.format_message()} (see --help)", 2)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except DraftproofError as error:
        code = _fail(f"{type(error).__name__}: {error}", 1)
    except BrokenPipeError:
        code = 141
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        code = _fail("No space left on the device that standard output goes to", 2)
        os._exit(code)  # what is still buffered cannot be written at exit either
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    """Print one line on stderr."""
    text = " ".join(message.split())
    sys.stderr.write(f"draftproof: {text}\n")
    return code
