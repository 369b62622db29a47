"""``main``: one line for every error, and the documented exit codes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from draftproof import cli, errors

Run = Callable[..., tuple[int, str, str]]


def leaves(base: type[Exception]) -> list[type[Exception]]:
    return [base, *(leaf for child in base.__subclasses__() for leaf in leaves(child))]


USAGE = [error for error in leaves(errors.UsageError) if error.__module__ == errors.__name__]
OTHERS = [errors.DraftproofError, errors.RollbackError, errors.EvidenceError]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """``main`` with ``action`` for the app, or with the real app and arguments."""

    def runner(action: Callable[[], Any] | None, *arguments: str) -> tuple[int, str, str]:
        if action is not None:

            def app(*, standalone_mode: bool) -> Any:
                assert not standalone_mode
                return action()

            monkeypatch.setattr(cli, "app", app)
        monkeypatch.setattr(sys, "argv", ["draftproof", *arguments])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        assert isinstance(stop.value.code, int)
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    return runner


def raising(error: BaseException) -> Callable[[], Any]:
    def action() -> Any:
        raise error

    return action


@pytest.mark.parametrize(("value", "code"), [(None, 0), (0, 0), (1, 1), (2, 2), (130, 130)])
def test_the_exit_code_is_the_apps(value: int | None, code: int, run: Run) -> None:
    assert run(lambda: value) == (code, "", "")


@pytest.mark.parametrize("error", USAGE, ids=lambda error: error.__name__)
def test_wrong_use_is_one_line_and_2(error: type[Exception], run: Run) -> None:
    assert run(raising(error("no such thing; try another"))) == (
        2, "", "draftproof: no such thing; try another\n",
    )  # fmt: skip


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: error.__name__)
def test_a_broken_promise_names_itself_and_is_1(error: type[Exception], run: Run) -> None:
    assert run(raising(error("rows overlap"))) == (1, "", f"draftproof: {error.__name__}: rows overlap\n")


def test_a_message_of_several_lines_becomes_one(run: Run) -> None:
    code, _, err = run(raising(errors.PromptError("first\n  second\r\n\tthird\n")))
    assert (code, err) == (2, "draftproof: first second third\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()], ids=repr)
def test_an_interrupt_is_130_and_silent(error: BaseException, run: Run) -> None:
    assert run(raising(error)) == (130, "", "")


def test_an_interrupt_that_a_library_made_another_error_is_130_and_silent(run: Run) -> None:
    def action() -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RecursionError("as numpy's import does") from None

    assert run(action) == (130, "", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_in_code_run_from_a_string_is_130_and_no_death_by_signal(tmp_path: Path) -> None:
    """As in a dataclass of a library that is being imported; only under ``-m`` does Python die of it."""
    (tmp_path / "interrupted.py").write_text(
        "from draftproof import cli\n"
        "cli.app = lambda **_: exec('import signal; signal.raise_signal(signal.SIGINT)')\n"
        "cli.main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "interrupted"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_closed_pipe_is_141_and_silent(run: Run) -> None:
    assert run(raising(BrokenPipeError())) == (141, "", "")


@pytest.mark.parametrize("error", [ValueError("a bug"), AssertionError("a bug"), ZeroDivisionError()])
def test_a_bug_keeps_its_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def app(*, standalone_mode: bool) -> Any:
        raise error

    monkeypatch.setattr(cli, "app", app)
    with pytest.raises(type(error)):
        cli.main()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["frobnicate"], "frobnicate"),
        (["generate", "hi", "--frobnicate"], "--frobnicate"),
        (["generate"], "prompt"),
        (["generate", "hi", "--max-new-tokens", "many"], "--max-new-tokens"),
        (["bench", "--pairs"], "--pairs"),
        (["models", "frobnicate"], "frobnicate"),
        (["models", "pull", "a", "b"], "b"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_typers_own_errors_are_one_line_and_2(arguments: list[str], told: str, run: Run) -> None:
    code, out, err = run(None, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("draftproof: ")
    assert err.count("\n") == 1
    assert told in err
    assert "--help" in err


def test_version_and_help_are_0(run: Run) -> None:
    for argument in ("--version", "--help"):
        code, out, err = run(None, argument)
        assert (code, err) == (0, "")
        assert "raftproof" in out


def test_what_the_command_line_offers() -> None:
    assert set(cli.__all__) == {"app", "main"}
