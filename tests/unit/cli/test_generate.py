"""``draftproof generate`` on an engine without weights: what goes to stdout, what to stderr, when it ends."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof import engine as engines
from draftproof.cli import generate as command
from draftproof.engine import Engine
from draftproof.errors import OptionError, PromptError
from draftproof.record import CostCurve, Plan, Trace
from draftproof.rules import RuleSet
from draftproof.stats import decode_stats
from draftproof.testing import TableTarget
from draftproof.wire import decode

PLAN = Plan(claim="guarded", dtype="float32", fingerprint="0" * 16, ops=(), max_rows=32, margin_bound=0.25)
CURVE = CostCurve(rows=(1, 2), contexts=(64,), seconds=((1e-6, 1.01e-6),))
LOAD = {"name_or_path": "m", "dtype": "float32", "device": "cpu", "claim": "auto", "threads": None}
NUM_NEW = 40
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
TRICKY = "a [b]\\[/b] :smile: [/red]\ttab\\ 1.5 'q' {x}\n\n  über 🙂 [[ok]] \\[x]\r\nhttp://x.y end"


class ByteTokenizer:
    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


class FakeRules:
    def build(self, num_prompt: int, max_new_tokens: int, tokenizer: Any, **options: Any) -> RuleSet:
        eos = options.pop("eos_token_id", ())
        if options:
            raise OptionError(f"generate() has no option {sorted(options)}")
        return RuleSet(max_new_tokens=max_new_tokens, eos_ids=frozenset(eos))


class Spelling(TableTarget):
    """Emits ``text`` over and over after a prompt of one byte; may be interrupted after some rows."""

    def __init__(self, text: str, interrupt_after: int | None = None) -> None:
        super().__init__(256)
        self._bytes, self._left = text.encode(), interrupt_after

    def logits(self, prefix: Sequence[int]) -> torch.Tensor:
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise KeyboardInterrupt
        out = torch.zeros(256)
        out[self._bytes[(len(prefix) - 1) % len(self._bytes)]] = 1.0
        return out


@dataclass
class Loading:
    """Stands in for ``draftproof.engine``'s loaders; ``target`` is what the next load gives."""

    target: Any = field(default_factory=lambda: Spelling("the cat, "))
    loads: list[dict[str, Any]] = field(default_factory=list)
    drafts: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def load(self, *, progress: Any = None, **options: Any) -> Engine:
        self.loads.append(options)
        if progress is not None:
            progress("probing", 1, 2)
        rules: Any = FakeRules()
        return Engine(
            self.target,
            PLAN,
            CURVE,
            tokenizer=ByteTokenizer(),
            rule_factory=rules,
            folder=Path("x"),
            name="x",
        )

    def load_target(self, name: str, **options: Any) -> Any:
        self.drafts.append((name, options))
        return self.target


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Loading:
    made = Loading()
    monkeypatch.setattr(engines, "load", made.load)
    monkeypatch.setattr(engines, "load_target", made.load_target)
    return made


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(loading: Loading, capsys: pytest.CaptureFixture[str]) -> Run:
    def runner(
        prompt: str = "x", *, draft_model: str | None = None, stats: bool = False, color: bool = False,
        json_output: bool = False, **changes: Any,
    ) -> tuple[int, str, str]:  # fmt: skip
        request = {"drafter": "auto", "depth": "auto", "max_new_tokens": NUM_NEW, "raw": True, **changes}
        code = command.run(
            prompt, dict(LOAD), request, draft_model, stats=stats, color=color, json_output=json_output
        )
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return runner


def spelled(text: str, num_bytes: int) -> str:
    return (text.encode() * num_bytes)[:num_bytes].decode(errors="replace")


class TestText:
    def test_is_streamed_to_stdout_and_ends_the_line(self, run: Run) -> None:
        code, out, err = run()
        assert (code, out) == (0, spelled("the cat, ", NUM_NEW) + "\n")
        assert err.strip() == ""

    def test_is_shown_as_it_comes(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        flushed: list[str] = []

        class Watched(io.StringIO):
            def flush(self) -> None:
                flushed.append(self.getvalue())

        out = Watched()
        monkeypatch.setattr(sys, "stdout", out)
        run()
        assert flushed == sorted(flushed, key=len)
        assert len(set(flushed)) > 5
        assert flushed[0] == "t"

    def test_tricky_text_is_not_changed(self, run: Run, loading: Loading) -> None:
        loading.target = Spelling(TRICKY)
        num_bytes = len(TRICKY.encode())
        _, out, _ = run(max_new_tokens=num_bytes)
        assert out == TRICKY + "\n"

    @pytest.mark.parametrize("depth", ["auto", "0", "3"])
    @pytest.mark.parametrize("is_terminal", [False, True])
    def test_colour_changes_nothing_but_colour(
        self, is_terminal: bool, depth: str, run: Run, loading: Loading, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And not even that where nobody would see it."""
        if is_terminal:
            monkeypatch.setenv("FORCE_COLOR", "1")
        else:
            monkeypatch.delenv("FORCE_COLOR", raising=False)
        loading.target = Spelling(TRICKY)
        _, out, _ = run(max_new_tokens=3 * len(TRICKY.encode()), color=True, depth=depth)
        assert COLOURS.sub("", out) == TRICKY * 3 + "\n"
        assert (out != COLOURS.sub("", out)) == (is_terminal and depth != "0")

    def test_colour_marks_what_was_drafted_and_accepted(
        self, run: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")
        _, out, _ = run(color=True, depth="2", drafter="draft_model", draft_model="itself", max_new_tokens=7)
        # The first token comes from the prompt, then two drafted and one own, twice.
        assert out == "t\x1b[32mhe\x1b[0m \x1b[32mca\x1b[0mt\n"
        assert run(max_new_tokens=7)[1] == "the cat\n"

    def test_long_lines_are_not_broken(self, run: Run, loading: Loading) -> None:
        loading.target = Spelling("word " * 60)
        for color in (False, True):
            _, out, _ = run(max_new_tokens=300, color=color)
            assert COLOURS.sub("", out) == "word " * 60 + "\n"


class TestJson:
    def test_is_one_document_and_nothing_else(self, run: Run) -> None:
        code, out, err = run(json_output=True)
        assert code == 0
        assert out.count("\n") == 1
        document = json.loads(out)
        assert document["text"] == spelled("the cat, ", NUM_NEW)
        assert document["token_ids"] == list(spelled("the cat, ", NUM_NEW).encode())
        assert document["num_prompt"] == 1
        assert document["finish_reason"] == "length"
        assert (document["claim"], document["margin_bound"]) == ("guarded", 0.25)
        trace = decode(Trace, document["trace"])
        assert list(trace.token_ids) == document["token_ids"]
        stats = decode_stats(trace)
        assert document["decode_stats"]["accepted"] == stats.accepted > 0
        assert document["decode_stats"]["tokens"] == NUM_NEW
        assert err.strip() == ""

    def test_keeps_text_readable(self, run: Run, loading: Loading) -> None:
        loading.target = Spelling("über 🙂")
        _, out, _ = run(json_output=True, max_new_tokens=len("über 🙂".encode()))
        assert '"über 🙂"' in out

    def test_with_statistics_and_colour_is_still_one_document(self, run: Run) -> None:
        code, out, err = run(json_output=True, stats=True, color=True)
        assert code == 0
        assert out.count("\n") == 1
        assert json.loads(out)["finish_reason"] == "length"
        assert "tokens per verification" in err

    def test_an_end_token_is_a_stop(self, run: Run) -> None:
        _, out, _ = run(json_output=True, eos_token_id=[ord("c")])
        document = json.loads(out)
        assert (document["text"], document["finish_reason"]) == ("the c", "stop")


class TestStatistics:
    def test_go_to_stderr(self, run: Run) -> None:
        _, out, err = run(stats=True, depth="4")
        assert out == spelled("the cat, ", NUM_NEW) + "\n"
        trace = decode(Trace, json.loads(run(json_output=True, depth="4")[1])["trace"])
        stats = decode_stats(trace)
        assert "claim: guarded · finished: length" in err
        assert f"{NUM_NEW} after 1 prompt tokens" in err
        assert f"{stats.steps}, of which {stats.verifies} verified a draft" in err
        assert f"{stats.drafted} verified, {stats.accepted} accepted" in err
        assert f"{stats.tokens_per_verify:.2f} (bonus included)" in err

    def test_of_serial_decoding_have_no_acceptance(self, run: Run) -> None:
        _, _, err = run(stats=True, drafter="none")
        assert "0 verified, 0 accepted (none drafted)" in err
        assert "none (bonus included)" in err

    def test_of_one_token(self, run: Run) -> None:
        code, out, err = run(stats=True, max_new_tokens=1)
        assert (code, out) == (0, "t\n")
        assert "1 after 1 prompt tokens" in err


class TestInterrupt:
    def test_keeps_the_text_so_far(self, run: Run, loading: Loading) -> None:
        loading.target = Spelling("the cat, ", interrupt_after=6)
        code, out, err = run(drafter="none", stats=True)
        assert (code, out) == (130, "the ca\n")
        assert "finished: interrupted" in err

    def test_json_is_still_a_document(self, run: Run, loading: Loading) -> None:
        loading.target = Spelling("the cat, ", interrupt_after=6)
        code, out, _ = run(drafter="none", json_output=True)
        assert code == 130
        document = json.loads(out)
        assert (document["text"], document["finish_reason"]) == ("the ca", "interrupted")

    def test_before_the_first_token(self, run: Run, loading: Loading) -> None:
        loading.target = Spelling("the cat, ", interrupt_after=0)
        code, out, _ = run(json_output=True)
        assert code == 130
        assert json.loads(out)["token_ids"] == []
        loading.target = Spelling("the cat, ", interrupt_after=0)
        assert run(stats=True)[0] == 130


class TestRequest:
    def test_the_model_is_loaded_as_asked(self, run: Run, loading: Loading) -> None:
        run()
        assert loading.loads == [LOAD]
        assert loading.drafts == []

    def test_a_draft_model_is_loaded_like_the_target(self, run: Run, loading: Loading) -> None:
        code, out, err = run(drafter="draft_model", draft_model="small", depth="4", stats=True)
        assert (code, out) == (0, spelled("the cat, ", NUM_NEW) + "\n")
        ((name, options),) = loading.drafts
        assert name == "small"
        assert isinstance(options.pop("like"), Engine)
        assert options == {"dtype": "float32", "device": "cpu"}
        assert "(100%)" in err

    @pytest.mark.parametrize(
        ("text", "depth"), [("3", 3), ("-1", -1), ("auto", "auto"), ("x", "x"), ("", "")]
    )
    def test_depth_is_a_number_where_it_is_one(self, text: str, depth: Any) -> None:
        assert command.parse_depth(text) == depth

    @pytest.mark.parametrize("depth", ["-1", "32", "deep", "1.5", ""])
    def test_a_bad_depth_prints_nothing(
        self, depth: str, run: Run, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(OptionError, match="depth"):
            run(depth=depth)
        assert capsys.readouterr().out == ""

    def test_a_bad_prompt_is_refused_before_the_model_is_loaded(
        self, run: Run, loading: Loading, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
        with pytest.raises(PromptError, match="UTF-8"):
            run("-")
        assert loading.loads == []

    def test_dash_reads_standard_input(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("ü!".encode())))
        assert json.loads(run("-", json_output=True)[1])["num_prompt"] == 3
