"""Sizes, names, the mirror of unit tests and the exception tree of src/draftproof."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "draftproof"
UNIT = ROOT / "tests" / "unit"

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
SHORT_FUNCTION_LINES = 35
MIN_SHARE_OF_SHORT = 0.9
VAGUE_NAMES = {"utils", "util", "common", "helpers", "helper", "misc"}

# Modules with logic and no twin under tests/unit: path inside the package -> what tests it instead.
WITHOUT_TWIN: dict[str, str] = {
    "__init__.py": "tests/contract/test_light_start.py resolves every public name",
}

FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}

AnyFunction = ast.FunctionDef | ast.AsyncFunctionDef


def functions(source: str) -> Iterator[AnyFunction]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, AnyFunction))


def length(function: AnyFunction) -> int:
    """Lines from ``def`` to the last one, docstring included, decorators not."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def has_logic(source: str) -> bool:
    """Whether any function does more than declare a protocol method."""

    def is_empty(statement: ast.stmt) -> bool:
        is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        return is_constant or isinstance(statement, ast.Pass)

    return any(not all(map(is_empty, function.body)) for function in functions(source))


def twin(path: str) -> Path:
    """Where the unit tests of a module are: ``ops/linear.py`` -> ``tests/unit/ops/test_linear.py``."""
    inside = Path(path)
    return UNIT / inside.parent / f"test_{inside.stem.strip('_')}.py"


def raised_or_subclassed(source: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            made = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            found.add(ast.unparse(made).split(".")[-1])
        elif isinstance(node, ast.ClassDef):
            found.update(ast.unparse(base).split(".")[-1] for base in node.bases)
    return found


def error_classes() -> list[str]:
    tree = ast.parse((PACKAGE / "errors.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("path", FILES)
def test_file_is_short(path: str) -> None:
    assert len(FILES[path].read_text().splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", FILES)
def test_functions_are_short(path: str) -> None:
    lengths = {function.name: length(function) for function in functions(FILES[path].read_text())}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_most_functions_are_shorter_still() -> None:
    lengths = [length(function) for path in FILES.values() for function in functions(path.read_text())]
    assert lengths
    assert sum(lines <= SHORT_FUNCTION_LINES for lines in lengths) >= MIN_SHARE_OF_SHORT * len(lengths)


def test_names_say_what_is_inside() -> None:
    assert [path for path in FILES if VAGUE_NAMES & set(Path(path).with_suffix("").parts)] == []


@pytest.mark.parametrize("path", [path for path in FILES if path not in WITHOUT_TWIN])
def test_module_with_logic_has_a_twin(path: str) -> None:
    if has_logic(FILES[path].read_text()):
        expected = twin(path)
        assert expected.is_file(), f"write {expected.relative_to(ROOT)} or give a reason in WITHOUT_TWIN"
        tests = [function.name for function in functions(expected.read_text())]
        # A rule-based state machine is a class, run as `TestX = X.TestCase`.
        assert any(name.startswith("test_") for name in tests) or "TestCase" in expected.read_text()


@pytest.mark.parametrize("path", WITHOUT_TWIN)
def test_an_exception_from_the_mirror_still_holds(path: str) -> None:
    assert path in FILES, "no such module"
    assert has_logic(FILES[path].read_text()), "has no logic: needs no entry"
    assert not twin(path).exists(), "has a twin now: drop the entry"
    assert WITHOUT_TWIN[path].strip(), "give the reason"


@pytest.mark.parametrize("name", error_classes())
def test_every_error_is_raised_or_subclassed(name: str) -> None:
    assert any(name in raised_or_subclassed(path.read_text()) for path in FILES.values())


def test_the_drawn_error_tree_is_complete() -> None:
    drawn = ast.get_docstring(ast.parse((PACKAGE / "errors.py").read_text())) or ""
    assert re.findall(r"^[\s│├└─]*(\w+Error)\b", drawn, re.MULTILINE) == error_classes()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(): return 1", True),
        ("class A:\n    def f(self):\n        'doc'\n        return 1", True),
        ("class P:\n    def f(self):\n        'doc'\n    def g(self): ...\n    def h(self): pass", False),
        ("X = 1", False),
    ],
)
def test_logic_is_told_from_declarations(source: str, expected: bool) -> None:
    assert has_logic(source) is expected


def test_the_measures_see_what_they_should() -> None:
    assert [length(f) for f in functions("@d\ndef f():\n    def g():\n        pass\n    return g")] == [4, 2]
    assert raised_or_subclassed("raise errors.A('x') from None\nclass C(B): pass\nraise D\nE('unused')") == {
        "A",
        "B",
        "D",
    }
    assert twin("ops/linear.py") == UNIT / "ops" / "test_linear.py"
    assert twin("report/__init__.py") == UNIT / "report" / "test_init.py"
