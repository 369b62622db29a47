"""`import draftproof` and `draftproof --help` stay light; public names load only when asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

HEAVY = {"accelerate", "gguf", "numpy", "safetensors", "scipy", "torch", "transformers"}

REPORT = """
import json, sys
def report(value=None):
    print("\\nREPORT", json.dumps({"modules": sorted(sys.modules), "value": value}))
"""

HELP = """
import runpy
sys.argv = ["draftproof", *{arguments!r}]
try:
    runpy.run_module("draftproof", run_name="__main__", alter_sys=True)
except SystemExit as stop:
    report(stop.code or 0)
"""


def fresh(code: str) -> tuple[set[str], Any]:
    """Run ``code``, which calls ``report``, in a new interpreter: its top-level modules and its value."""
    done = subprocess.run([sys.executable, "-c", REPORT + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.rpartition("REPORT ")[2])
    return {name.split(".")[0] for name in result["modules"]}, result["value"]


def is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def test_a_heavy_import_is_seen() -> None:
    loaded, _ = fresh("import numpy\nreport()")
    assert loaded & HEAVY == {"numpy"}


def test_import_is_light() -> None:
    loaded, _ = fresh("import draftproof\nreport()")
    assert loaded & (HEAVY | {"typer", "rich"}) == set()


def test_import_of_the_command_line_is_light() -> None:
    loaded, _ = fresh("import draftproof.cli\nreport()")
    assert loaded & HEAVY == set()


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["generate"],
        ["bench"],
        ["doctor"],
        ["models"],
        ["head", "corpus"],
        ["head", "shortlist"],
        ["head", "export"],
    ],
    ids=" ".join,
)
def test_help_is_light(command: list[str]) -> None:
    loaded, exit_code = fresh(HELP.format(arguments=[*command, "--help"]))
    assert exit_code == 0
    assert loaded & HEAVY == set()


def test_public_names_load_when_asked_for() -> None:
    _, value = fresh(
        "import draftproof\n"
        "before = set(vars(draftproof))\n"
        "objects = {name: type(getattr(draftproof, name)).__name__ for name in draftproof.__all__}\n"
        "report([list(draftproof.__all__), sorted(before), objects])"
    )
    public, before, objects = value
    assert public == sorted(set(public))
    assert set(objects) == set(public)
    assert "module" not in objects.values()
    assert not {name for name in public if not is_dunder(name)} & set(before)


@pytest.mark.parametrize("load", ["", "[getattr(draftproof, name) for name in draftproof.__all__]"])
def test_dir_is_the_public_names(load: str) -> None:
    _, (public, listed) = fresh(
        f"import draftproof\n{load}\nreport([list(draftproof.__all__), dir(draftproof)])"
    )
    assert {name for name in listed if not is_dunder(name)} == {
        name for name in public if not is_dunder(name)
    }
    assert {"__all__", "__doc__", "__name__", "__version__"} <= set(listed)


def test_star_import_gives_the_public_names() -> None:
    _, missing = fresh(
        "space = {}\n"
        "exec('from draftproof import *', space)\n"
        "import draftproof\n"
        "report(sorted(set(draftproof.__all__) - set(space)))"
    )
    assert missing == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    _, message = fresh(
        "import draftproof\n"
        "try:\n"
        "    draftproof.no_such_name\n"
        "except AttributeError as error:\n"
        "    report(str(error))"
    )
    assert "no_such_name" in message
