"""Modules import only what the tables in docs/architecture.md allow; the tables are read, not copied."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "draftproof"
TABLES = (ROOT / "docs" / "architecture.md").read_text()

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class Row:
    """One line of the band table; ``first`` is the place of its first file in the whole table."""

    band: str
    files: tuple[str, ...]
    may_import: tuple[str, ...]
    in_handlers: tuple[str, ...]
    exceptions: tuple[str, ...] | None  # importers, then the imported; None reads "earlier"
    first: int


@dataclass(frozen=True)
class Import:
    """``target`` is a path inside the package, or the top-level name of another one."""

    importer: str
    target: str
    line: int
    in_function: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.target}"


def table(text: str, heading: str) -> list[list[str]]:
    """The cells of the table under ``## heading``, without its head."""
    section = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(cell: str) -> tuple[str, ...]:
    """Band letters and quoted names of a cell."""
    return tuple(quoted or letter for quoted, letter in re.findall(r"`([^`]+)`|\b([A-Z])\b", cell))


def read_bands(text: str) -> list[Row]:
    rows: list[Row] = []
    first = 0
    for band, files, may_import, within in table(text, "Bands"):
        always, _, in_handlers = may_import.partition("handlers:")
        exceptions = None if within == "earlier" else names(within)
        rows.append(Row(band[0], names(files), names(always), names(in_handlers), exceptions, first))
        first += len(names(files))
    return rows


def modules(package: Path) -> dict[str, str]:
    """Dotted name to path inside the package."""
    found = {}
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        parts = path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts
        found[".".join(("draftproof", *parts))] = path.as_posix()
    return found


def walk(node: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        yield child, in_function
        yield from walk(child, in_function or isinstance(child, FUNCTIONS))


def imported_names(node: ast.AST, folder: tuple[str, ...], known: Mapping[str, str]) -> list[str]:
    """Dotted names a node imports; ``folder`` is where relative imports start."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = folder[: len(folder) - node.level + 1] if node.level else ()
        base = ".".join((*above, *([node.module] if node.module else [])))
        full = [f"{base}.{alias.name}" for alias in node.names]
        return [name if name in known else base for name in full]
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {
        "import_module",
        "__import__",
    }:
        return [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return []


def resolve(name: str, known: Mapping[str, str]) -> str:
    top = name.partition(".")[0]
    if top != "draftproof":
        return top
    while name not in known and "." in name:
        name = name.rpartition(".")[0]
    return known.get(name, "__init__.py")


def imports(package: Path) -> list[Import]:
    known = modules(package)
    found = []
    for path in known.values():
        folder = ("draftproof", *Path(path).parent.parts)
        for node, in_function in walk(ast.parse((package / path).read_text())):
            for name in imported_names(node, folder, known):
                line = getattr(node, "lineno", 0)
                found.append(Import(path, resolve(name, known), line, in_function))
    return found


def places(path: str, rows: list[Row]) -> list[tuple[Row, int]]:
    """Every row that lists ``path``, with the place of the entry in the whole table."""
    return [
        (row, row.first + i) for row in rows for i, entry in enumerate(row.files) if fnmatchcase(path, entry)
    ]


def is_allowed(item: Import, rows: list[Row]) -> bool:
    (row, place), (target_row, target_place) = places(item.importer, rows)[0], places(item.target, rows)[0]
    if row.band == target_row.band:
        if row.exceptions is None or place == target_place:
            return target_place <= place
        *importers, imported = row.exceptions
        is_named = any(fnmatchcase(item.importer, importer) for importer in importers)
        return is_named and fnmatchcase(item.target, imported)
    allowed = row.may_import + (row.in_handlers if item.in_function else ())
    return any(name == target_row.band or fnmatchcase(item.target, name) for name in allowed)


def misplaced(package: Path, rows: list[Row]) -> list[str]:
    found = {path: len(places(path, rows)) for path in modules(package).values()}
    return [
        f"{path} stands in {count} entries of the band table" for path, count in found.items() if count != 1
    ]


def forbidden(package: Path, rows: list[Row]) -> list[str]:
    inside = [item for item in imports(package) if places(item.target, rows) and places(item.importer, rows)]
    return [str(item) for item in inside if not is_allowed(item, rows)]


def never_imported(package: Path, text: str) -> list[str]:
    rows = read_bands(text)
    found = []
    for files, never, why in table(text, "Never imported"):
        for item in imports(package):
            bands = {row.band for row, _ in places(item.importer, rows)}
            is_covered = any(name in bands or fnmatchcase(item.importer, name) for name in names(files))
            if is_covered and item.target in names(never):
                found.append(f"{item}: {why}")
    return found


def cycle(package: Path) -> list[str]:
    """The modules of one import cycle, in order, or nothing."""
    edges: dict[str, set[str]] = {path: set() for path in modules(package).values()}
    for item in imports(package):
        if item.target in edges and item.target != item.importer:
            edges[item.importer].add(item.target)
    done: set[str] = set()

    def visit(path: str, trail: list[str]) -> list[str]:
        if path in trail:
            return [*trail[trail.index(path) :], path]
        if path in done:
            return []
        for target in sorted(edges[path]):
            if found := visit(target, [*trail, path]):
                return found
        done.add(path)
        return []

    return next((found for path in sorted(edges) if (found := visit(path, []))), [])


def problems(package: Path, text: str) -> list[str]:
    rows = read_bands(text)
    loop = [" → ".join(found)] if (found := cycle(package)) else []
    return misplaced(package, rows) + forbidden(package, rows) + never_imported(package, text) + loop


def test_the_tables_are_read() -> None:
    rows = read_bands(TABLES)
    assert sorted({row.band for row in rows}) == list("ABCDEF")
    entries = {entry for row in rows for entry in row.files}
    for files, never, _ in table(TABLES, "Never imported"):
        assert set(names(files)) <= entries | set("ABCDEF")
        assert names(never)


def test_every_module_has_one_band() -> None:
    assert misplaced(PACKAGE, read_bands(TABLES)) == []


def test_imports_follow_the_band_table() -> None:
    assert imports(PACKAGE), "no import found: the reader is broken"
    assert forbidden(PACKAGE, read_bands(TABLES)) == []


def test_nothing_imports_what_it_never_may() -> None:
    assert never_imported(PACKAGE, TABLES) == []


def test_no_import_cycle() -> None:
    assert cycle(PACKAGE) == []


def write_package(folder: Path, sources: Mapping[str, str]) -> Path:
    for path, source in {"__init__.py": "", **sources}.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(source)
    return folder


BROKEN = {
    "upward": {"wire.py": "", "record.py": "from draftproof.wire import dump"},
    "in a function": {"ops/linear.py": "", "stats.py": "def f():\n    import draftproof.ops.linear"},
    "type only": {
        "cache.py": "",
        "stats.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from draftproof import cache",
    },
    "relative": {"cache.py": "", "stats.py": "from .cache import Cache"},
    "relative, one folder up": {"engine.py": "", "ops/linear.py": "from ..engine import load"},
    "by string": {
        "engine.py": "",
        "stats.py": "import importlib\nimportlib.import_module('draftproof.engine')",
    },
    "later in the band": {"record.py": "", "errors.py": "import draftproof.record"},
    "one named file only": {"stats.py": "", "decode.py": "import draftproof.stats"},
    "product to product": {"engine.py": "", "audit.py": "from draftproof import engine"},
    "engine to bench": {"bench/pair.py": "", "engine.py": "from draftproof.bench.pair import compare"},
    "package root": {"wire.py": "from draftproof import __version__"},
    "shell": {"cli/main.py": "", "engine.py": "import draftproof.cli.main"},
    "heavy command line": {"engine.py": "", "cli/bench.py": "from draftproof.engine import load"},
    "torch in a policy": {"depth.py": "def f():\n    import torch"},
    "rich in a product": {"audit.py": "from rich.table import Table"},
    "clock in the verdict": {"clock.py": "", "verdict.py": "from draftproof.clock import Clock"},
    "cycle": {
        "ops/a.py": "import draftproof.ops.b",
        "ops/b.py": "def f():\n    from draftproof.ops import a",
    },
    "no band": {"misc.py": ""},
}

SOUND = {
    "handler": {"engine.py": "", "cli/bench.py": "def bench():\n    from draftproof.engine import load"},
    "bench to engine": {"engine.py": "", "bench/run.py": "from draftproof.engine import load"},
    "one named file": {"wire.py": "", "plans.py": "from draftproof import wire"},
    "same entry": {"models/zeta.py": "", "models/base.py": "from draftproof.models import zeta"},
    "earlier": {"errors.py": "", "record.py": "from draftproof.errors import EvidenceError"},
    "verdict": {"record.py": "", "verdict.py": "import math\nfrom draftproof.record import Leg"},
}


@pytest.mark.parametrize("sources", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_rule_is_seen(tmp_path: Path, sources: dict[str, str]) -> None:
    assert len(problems(write_package(tmp_path, sources), TABLES)) == 1


@pytest.mark.parametrize("sources", SOUND.values(), ids=SOUND.keys())
def test_a_sound_import_passes(tmp_path: Path, sources: dict[str, str]) -> None:
    assert problems(write_package(tmp_path, sources), TABLES) == []
