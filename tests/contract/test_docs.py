"""The documents say what is so: blocks run, options exist, versions and line counts agree."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "draftproof"
README = ROOT / "README.md"
DOCUMENTS = {path.relative_to(ROOT).as_posix(): path for path in [README, *sorted(ROOT.glob("docs/**/*.md"))]}

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
RUN_MARK = "<!-- run: fake -->\n"
MAX_LINE_COUNT_ERROR = 0.1


def read(name: str) -> str:
    return DOCUMENTS[name].read_text() if DOCUMENTS[name].exists() else ""


def runnable_blocks(text: str) -> list[str]:
    """The Python block after each run mark; anything else after one is an error."""
    found = []
    for part in text.split(RUN_MARK)[1:]:
        fence = FENCE.match(part)
        assert fence, f"no code block after a run mark: {part[:60]!r}"
        assert fence[1] == "python", f"not a Python block after a run mark: {part[:60]!r}"
        found.append(fence[2])
    return found


def shell_lines(text: str) -> Iterator[str]:
    """Lines of shell blocks and inline code; in a console block only those after a ``$``."""
    for language, body in FENCE.findall(text):
        lines = body.replace("\\\n", " ").splitlines()
        if language == "console":
            yield from (line.removeprefix("$ ") for line in lines if line.startswith("$ "))
        elif language != "python":
            yield from lines
    yield from re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def command_lines(text: str) -> Iterator[list[str]]:
    """The arguments of every mention of ``draftproof ARGUMENTS``; BENCH_ARGS belong to ``bench``."""
    for line in shell_lines(text):
        for arguments in re.findall(r"""BENCH_ARGS=["']([^"']*)["']""", line):
            yield ["bench", *arguments.split()]
        prefix = r"^\s*(?:\$ )?(?:\w+=\S+ )*(?:\S*/)?(?:python3? -m )?draftproof +"
        command = re.sub(prefix, "", line)
        if command != line:
            yield split(command)


def split(command: str) -> list[str]:
    """Shell words up to a comment, a pipe or the next command; brackets of a synopsis removed."""
    words = shlex.split(re.sub(r"[\[\]]", " ", command), comments=True)
    stops = [i for i, word in enumerate(words) if word in {"|", "||", "&&", ";", ">", ">>", "<", "&"}]
    return words[: min(stops, default=len(words))]


def options(command: Any) -> set[str]:
    return {
        "--help",
        *(name for parameter in command.params for name in parameter.opts + parameter.secondary_opts),
    }


def unknown_words(arguments: list[str], command: Any) -> list[str]:
    """Sub-commands and options of one command line that ``command`` does not have."""
    unknown = []
    known = options(command)
    for word in arguments:
        commands = getattr(command, "commands", {})
        if word.startswith("--"):
            name = re.split(r"[=|,.]", word)[0]
            unknown += [] if name in known else [name]
        elif commands and re.fullmatch(r"[a-z][a-z-]+", word):
            if word not in commands:
                return [*unknown, word]
            command = commands[word]
            known |= options(command)
    return unknown


def reading_order(text: str) -> list[tuple[str, int]]:
    rows = re.findall(r"^\| *\[[^\]]+\]\((src/draftproof/[^)]+)\) *\| *(\d+) lines *\|", text, re.MULTILINE)
    return [(path, int(lines)) for path, lines in rows]


def newest_version(changelog: str) -> str:
    heading = re.search(r"^## \[?(\d+\.\d+\.\d+)\]?", changelog, re.MULTILINE)
    assert heading, "no version heading in CHANGELOG.md"
    return heading[1]


@pytest.fixture(scope="module")
def command_tree() -> Any:
    import typer.main  # noqa: PLC0415 - the other tests here need no command line

    from draftproof.cli import app  # noqa: PLC0415

    return typer.main.get_command(app)


BLOCKS = [
    pytest.param(block, id=f"{name}-{i}")
    for name in DOCUMENTS
    for i, block in enumerate(runnable_blocks(read(name)))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_block_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "<document>", "exec"), {"__name__": "__main__"})  # noqa: S102 - our own documents


def test_the_readme_has_a_block_that_runs() -> None:
    assert runnable_blocks(README.read_text())


@pytest.mark.parametrize("name", DOCUMENTS)
def test_commands_and_options_exist(name: str, command_tree: Any) -> None:
    unknown = {" ".join(words): unknown_words(words, command_tree) for words in command_lines(read(name))}
    assert {line: words for line, words in unknown.items() if words} == {}


def test_the_readme_shows_a_command() -> None:
    assert list(command_lines(README.read_text()))


def test_one_version_everywhere() -> None:
    import draftproof  # noqa: PLC0415 - a broken package must not hide the other tests

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == draftproof.__version__
    assert project["version"] == newest_version((ROOT / "CHANGELOG.md").read_text())


def test_the_reading_order_counts_lines_rightly() -> None:
    rows = reading_order(README.read_text())
    assert rows, "README.md has no reading order"
    counts = {path: (stated, len((ROOT / path).read_text().splitlines())) for path, stated in rows}
    wrong = {p: c for p, c in counts.items() if abs(c[0] - c[1]) > MAX_LINE_COUNT_ERROR * c[1]}
    assert wrong == {}, "path: (stated, counted)"


SAMPLE = """
Run `draftproof bench --pairs 2`, not `draftproof`; `import draftproof` is Python.

<!-- run: fake -->
```python
x = 1
```

```console
$ OMP_NUM_THREADS=2 .venv/bin/draftproof generate "two words" \\
    --depth 4 | head   # draftproof nothing
draftproof output --not-an-option
$ make bench BENCH_ARGS="--suite diverse"
```

```
draftproof doctor [--model M] [--json]     machine
```

| [record](src/draftproof/record.py) | 12 lines | what flows |
"""


def test_samples_are_read() -> None:
    assert runnable_blocks(SAMPLE) == ["x = 1\n"]
    assert reading_order(SAMPLE) == [("src/draftproof/record.py", 12)]
    assert newest_version("# Changes\n\n## [1.2.3] - Unreleased\n\n## [1.2.2]\n") == "1.2.3"
    assert list(command_lines(SAMPLE)) == [
        ["generate", "two words", "--depth", "4"],
        ["bench", "--suite", "diverse"],
        ["doctor", "--model", "M", "--json", "machine"],
        ["bench", "--pairs", "2"],
    ]


def test_a_run_mark_without_a_python_block_is_an_error() -> None:
    with pytest.raises(AssertionError, match="no code block"):
        runnable_blocks(RUN_MARK + "text")
    with pytest.raises(AssertionError, match="not a Python block"):
        runnable_blocks(RUN_MARK + "```console\n$ ls\n```\n")


@pytest.mark.parametrize(
    ("line", "unknown"),
    [
        ("bench --pairs 2", []),
        ("bench --pears 2", ["--pears"]),
        ("bunch --pairs 2", ["bunch"]),
        ("head train --steps 3 --help", []),
        ("head --steps", ["--steps"]),
        ("head rain", ["rain"]),
        ("--version", ["--version"]),
        ("bench corpus.txt --pairs=2", []),
        ("bench other", []),
    ],
)
def test_unknown_words_are_seen(line: str, unknown: list[str]) -> None:
    import typer  # noqa: PLC0415
    import typer.main  # noqa: PLC0415

    app, head = typer.Typer(), typer.Typer()
    app.add_typer(head, name="head")
    app.command("bench")(lambda *, pairs=1: None)
    head.command("train")(lambda *, steps=1: None)
    head.command("export")(lambda: None)
    assert unknown_words(line.split(), typer.main.get_command(app)) == unknown
