"""Results go to stdout, everything else to stderr; prompts are text."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
from transformers.utils import logging

from draftproof.cli.terminal import progress_line, quiet_transformers, read_prompt, stderr, stdout
from draftproof.errors import PromptError


def test_results_and_the_rest_are_kept_apart(capsys: pytest.CaptureFixture[str]) -> None:
    stdout().print("result 1.25x 'quoted'")
    stderr().print("note 17")
    captured = capsys.readouterr()
    assert captured.out == "result 1.25x 'quoted'\n"
    assert captured.err == "note 17\n"


def test_the_streams_are_those_of_now(capsys: pytest.CaptureFixture[str]) -> None:
    """Not those of import time, which a test runner or a redirection has replaced since."""
    old = sys.stdout
    sys.stdout = io.StringIO()
    try:
        stdout().print("here")
        assert sys.stdout.getvalue() == "here\n"
    finally:
        sys.stdout = old
    assert capsys.readouterr().out == ""


def test_progress_leaves_no_trace_on_stdout_and_none_where_nobody_watches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress_line() as report:
        report("fetching", 0, 0)
        report("probing 576x576", 3, 10)
        report("done", 10, 10)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == ""


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("stage", ["news, pair 1 of 3", "[/bold] label", "[red]x[/red]", "a\\"])
def test_progress_shows_any_stage_as_it_is(
    stage: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A label of a user's own suite ends up in the stage."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_line() as report:
        report(stage, 1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (stage in captured.err) == is_terminal
    assert ("1 of 2 done" in captured.err) == is_terminal


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()], ids=repr)
def test_progress_lets_errors_and_interrupts_through(error: BaseException) -> None:
    def work() -> None:
        with progress_line() as report:
            report("working", 1, 2)
            raise error

    with pytest.raises(type(error)):
        work()


class TestPrompt:
    @pytest.mark.parametrize("text", ["hello", "Grüße 🙂", " spaces stay ", "", "--", "line\nbreak"])
    def test_is_taken_as_it_is(self, text: str) -> None:
        assert read_prompt(text) == text

    def feed(self, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
        stream: Any = io.TextIOWrapper(io.BytesIO(data), encoding="latin-1")
        monkeypatch.setattr(sys, "stdin", stream)

    @pytest.mark.parametrize("text", ["hello\n", "Grüße 🙂\n\nzwei", ""])
    def test_dash_is_standard_input_whatever_its_encoding(
        self, text: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.feed(monkeypatch, text.encode())
        assert read_prompt("-") == text

    @pytest.mark.parametrize("data", [b"\xff", b"fine then \xc3", "Grüße".encode("latin-1"), b"\xed\xa0\x80"])
    def test_bytes_that_are_not_utf_8_are_refused(self, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        self.feed(monkeypatch, data)
        with pytest.raises(PromptError, match="not UTF-8"):
            read_prompt("-")

    def test_an_argument_that_is_not_utf_8_is_refused(self) -> None:
        with pytest.raises(PromptError, match="not UTF-8"):
            read_prompt(b"caf\xe9".decode("utf-8", errors="surrogateescape"))


def test_transformers_is_silenced() -> None:
    verbosity, is_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        logging.set_verbosity_info()
        logging.enable_progress_bar()
        quiet_transformers()
        assert logging.get_verbosity() == logging.ERROR
        assert not logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity(verbosity)
        if is_bar:
            logging.enable_progress_bar()
        else:
            logging.disable_progress_bar()
