"""Every option reaches its handler under its name, and the handlers' exit codes come back."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import draftproof
from draftproof.cli import bench, doctor, generate, models, plan_only
from draftproof.ledger import DEFAULT_PLACE
from draftproof.models.catalog import DEFAULT_MODEL

app_module = importlib.import_module("draftproof.cli.app")
LOAD = {"name_or_path": DEFAULT_MODEL, "dtype": "bfloat16", "device": "cpu", "claim": "auto", "threads": None}
LOAD_ARGUMENTS = [
    "--model",
    "m",
    "--dtype",
    "float32",
    "--device",
    "meta",
    "--claim",
    "fixed",
    "--threads",
    "3",
]
LOAD_CHANGED = {"name_or_path": "m", "dtype": "float32", "device": "meta", "claim": "fixed", "threads": 3}
Invoke = Callable[..., tuple[int, str]]


@pytest.fixture
def invoke() -> Invoke:
    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app_module.app, arguments, catch_exceptions=False)
        return done.exit_code, done.output

    return run


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the handlers were called with; ``code`` is what they return."""
    calls: dict[str, Any] = {"code": 0}

    def record(name: str) -> Callable[..., Any]:
        def handler(*args: Any, **kwargs: Any) -> int:
            calls[name] = (args, kwargs)
            return int(calls["code"])

        return handler

    for module, functions in ((generate, ["run"]), (doctor, ["run"]), (plan_only, ["run"]), (bench, ["run"]),
                              (models, ["list_models", "pull_model"])):  # fmt: skip
        for function in functions:
            name = f"{module.__name__.rpartition('.')[2]}.{function}"
            monkeypatch.setattr(module, function, record(name))
    return calls


def test_the_default_model_is_the_catalogs() -> None:
    assert app_module.DEFAULT == DEFAULT_MODEL


def test_version(invoke: Invoke) -> None:
    assert invoke("--version") == (0, f"draftproof {draftproof.__version__}\n")


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_names_every_command(arguments: tuple[str, ...], invoke: Invoke) -> None:
    code, output = invoke(*arguments)
    assert code == 0
    for command in ("generate", "doctor", "bench", "models"):
        assert command in output


class TestGenerate:
    def test_defaults(self, invoke: Invoke, seen: dict[str, Any]) -> None:
        assert invoke("generate", "hi") == (0, "")
        request = {
            "drafter": "auto",
            "depth": "auto",
            "max_new_tokens": 256,
            "raw": False,
            "exit_layer": None,
            "shortlist": None,
        }
        assert seen["generate.run"] == (
            ("hi", LOAD | {"head": None}, request, None),
            {"stats": False, "color": False, "json_output": False},
        )

    def test_every_option(self, invoke: Invoke, seen: dict[str, Any]) -> None:
        invoke(
            "generate", "hi", *LOAD_ARGUMENTS, "--drafter", "early_exit", "--depth", "3", "--max-new-tokens",
            "7", "--min-new-tokens", "2", "--stop", "a", "--stop", "b c", "--repetition-penalty", "1.5",
            "--no-repeat-ngram-size", "4", "--raw", "--draft-model", "d", "--exit-layer", "5", "--stats",
            "--color", "--json",
        )  # fmt: skip
        request = {
            "drafter": "early_exit", "depth": "3", "max_new_tokens": 7, "raw": True, "exit_layer": 5,
            "shortlist": None,
            "min_new_tokens": 2, "stop_strings": ["a", "b c"], "repetition_penalty": 1.5,
            "no_repeat_ngram_size": 4,
        }  # fmt: skip
        assert seen["generate.run"] == (
            ("hi", LOAD_CHANGED | {"head": None}, request, "d"),
            {"stats": True, "color": True, "json_output": True},
        )

    @pytest.mark.parametrize(
        ("flag", "name"), [("--stats", "stats"), ("--color", "color"), ("--json", "json_output")]
    )
    def test_every_flag_alone(self, flag: str, name: str, invoke: Invoke, seen: dict[str, Any]) -> None:
        invoke("generate", "hi", flag)
        flags = {"stats": False, "color": False, "json_output": False}
        assert seen["generate.run"][1] == {**flags, name: True}

    def test_zeros_are_not_taken_for_absent(self, invoke: Invoke, seen: dict[str, Any]) -> None:
        invoke("generate", "hi", "--repetition-penalty", "0", "--min-new-tokens", "0", "--exit-layer", "0")
        request = seen["generate.run"][0][2]
        assert (request["repetition_penalty"], request["min_new_tokens"], request["exit_layer"]) == (0, 0, 0)

    @pytest.mark.parametrize("code", [0, 130])
    def test_the_exit_code_is_the_handlers(self, code: int, invoke: Invoke, seen: dict[str, Any]) -> None:
        seen["code"] = code
        assert invoke("generate", "hi")[0] == code

    def test_a_prompt_is_needed(self, invoke: Invoke, seen: dict[str, Any]) -> None:
        code, output = invoke("generate")
        assert code == 2
        assert "prompt" in output
        assert "generate.run" not in seen

    def test_a_prompt_may_start_with_a_dash(self, invoke: Invoke, seen: dict[str, Any]) -> None:
        invoke("generate", "--", "-1 + 1 =")
        assert seen["generate.run"][0][0] == "-1 + 1 ="
        invoke("generate", "-")
        assert seen["generate.run"][0][0] == "-"


class TestDoctor:
    def test_defaults(self, invoke: Invoke, seen: dict[str, Any]) -> None:
        assert invoke("doctor") == (0, "")
        assert seen["doctor.run"] == (({**LOAD, "refresh": False},), {"json_output": False})

    def test_every_option(self, invoke: Invoke, seen: dict[str, Any]) -> None:
        invoke("doctor", *LOAD_ARGUMENTS, "--refresh", "--json")
        assert seen["doctor.run"] == (({**LOAD_CHANGED, "refresh": True},), {"json_output": True})

    def test_plan_only(self, invoke: Invoke, seen: dict[str, Any]) -> None:
        assert invoke("doctor", "--plan-only") == (0, "")
        assert seen["plan_only.run"] == ((DEFAULT_MODEL, None, None), {"json_output": False})
        invoke("doctor", "--model", "m", "--dtype", "float32", "--plan-only", "--context", "0", "--json")
        assert seen["plan_only.run"] == (("m", "float32", 0), {"json_output": True})
        assert "doctor.run" not in seen

    @pytest.mark.parametrize(
        "option", [("--refresh",), ("--device", "cuda"), ("--claim", "guarded"), ("--threads", "2")]
    )
    def test_plan_only_refuses_what_it_has_no_use_for(
        self, option: tuple[str, ...], invoke: Invoke, seen: dict[str, Any]
    ) -> None:
        code, output = invoke("doctor", "--plan-only", *option)
        assert code == 2
        assert option[0] in output
        assert seen == {"code": 0}

    def test_a_context_goes_with_plan_only(self, invoke: Invoke, seen: dict[str, Any]) -> None:
        code, output = invoke("doctor", "--context", "0")
        assert code == 2
        assert "--plan-only" in output
        assert seen == {"code": 0}


class TestBench:
    def test_defaults(self, invoke: Invoke, seen: dict[str, Any]) -> None:
        assert invoke("bench") == (0, "")
        settings = {
            "model": DEFAULT_MODEL, "drafter": "auto", "depth": "auto", "suite": "diverse", "labels": (),
            "pairs": 6, "max_new_tokens": 256, "prompt_len": 512, "stop": "natural", "chat": None,
            "dtype": "bfloat16", "device": "cpu", "claim": "auto", "threads": None, "draft_model": None,
            "exit_layer": None, "head": None, "shortlist": None,
        }  # fmt: skip
        wishes = bench.Wishes(
            out=None, resume=False, audit=True, ray=None, ledger=DEFAULT_PLACE, json_output=False
        )
        assert seen["bench.run"] == ((settings, wishes), {})

    def test_every_option(self, invoke: Invoke, seen: dict[str, Any]) -> None:
        invoke(
            "bench", *LOAD_ARGUMENTS, "--drafter", "lookup", "--depth", "4", "--suite", "s.jsonl", "--labels",
            "a", "--labels", "b", "--pairs", "9", "--max-new-tokens", "8", "--prompt-len", "77",
            "--draft-model", "d", "--exit-layer", "2", "--out", "runs/x", "--json", "--stop", "fixed",
            "--raw", "--resume", "--no-audit", "--ray", "auto", "--ledger", "l.jsonl",
        )  # fmt: skip
        settings = {
            "model": "m", "drafter": "lookup", "depth": "4", "suite": "s.jsonl", "labels": ("a", "b"),
            "pairs": 9, "max_new_tokens": 8, "prompt_len": 77, "stop": "fixed", "chat": False,
            "dtype": "float32", "device": "meta", "claim": "fixed", "threads": 3, "draft_model": "d",
            "exit_layer": 2, "head": None, "shortlist": None,
        }  # fmt: skip
        wishes = bench.Wishes(
            out=Path("runs/x"), resume=True, audit=False, ray="auto", ledger=Path("l.jsonl"), json_output=True
        )
        assert seen["bench.run"] == ((settings, wishes), {})

    def test_the_chat_template_can_be_asked_for(self, invoke: Invoke, seen: dict[str, Any]) -> None:
        invoke("bench", "--chat")
        assert seen["bench.run"][0][0]["chat"] is True

    @pytest.mark.parametrize("code", [0, 1, 130])
    def test_the_exit_code_is_the_handlers(self, code: int, invoke: Invoke, seen: dict[str, Any]) -> None:
        seen["code"] = code
        assert invoke("bench")[0] == code


class TestModels:
    def test_list(self, invoke: Invoke, seen: dict[str, Any]) -> None:
        assert invoke("models") == (0, "")
        assert seen["models.list_models"] == ((), {"json_output": False})
        invoke("models", "--json")
        assert seen["models.list_models"] == ((), {"json_output": True})
        assert "models.pull_model" not in seen

    def test_pull(self, invoke: Invoke, seen: dict[str, Any]) -> None:
        assert invoke("models", "pull") == (0, "")
        assert seen["models.pull_model"] == ((DEFAULT_MODEL,), {"force": False})
        invoke("models", "pull", "gemma-3-270m", "--force")
        assert seen["models.pull_model"] == (("gemma-3-270m",), {"force": True})
        assert "models.list_models" not in seen


@pytest.mark.parametrize(
    "arguments",
    [
        ("frobnicate",),
        ("generate", "hi", "--frobnicate"),
        ("generate", "hi", "there"),
        ("generate", "hi", "--max-new-tokens", "many"),
        ("generate", "hi", "--exit-layer", "1.5"),
        ("bench", "--pairs", "two"),
        ("bench", "--out"),
        ("models", "frobnicate"),
    ],
    ids=" ".join,
)
def test_wrong_use_is_refused_before_a_handler_runs(
    arguments: tuple[str, ...], invoke: Invoke, seen: dict[str, Any]
) -> None:
    assert invoke(*arguments)[0] == 2
    assert list(seen) == ["code"]


def test_the_app_is_typers() -> None:
    assert isinstance(app_module.app, typer.Typer)
