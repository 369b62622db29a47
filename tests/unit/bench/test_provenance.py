"""Where a run comes from: in a checkout, outside of one, and where git cannot be asked."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path
from typing import Any

import pytest

import draftproof
from draftproof.bench import provenance as module
from draftproof.bench.provenance import provenance
from draftproof.models.weights import identity


def git(folder: Path, *arguments: str) -> str:
    options = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(folder), *options, *arguments], capture_output=True, text=True, check=True  # noqa: S607
    )  # fmt: skip
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of one commit, in the place of draftproof's own."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "code.py").write_text("1\n")
    git(folder, "add", "code.py")
    git(folder, "commit", "-q", "-m", "one")
    monkeypatch.setattr(module, "_ROOT", folder)
    return folder


def test_says_what_was_run_and_on_which_weights(tiny_folder: Any) -> None:
    model = tiny_folder("llama")
    found = provenance(model, ["bench", "--suite", "my texts.jsonl"])
    assert found["argv"] == ["bench", "--suite", "my texts.jsonl"]
    assert found["command"] == "draftproof bench --suite 'my texts.jsonl'"
    assert found["weights"] == identity(model)
    assert found["model_folder"] == str(model)
    assert found["version"] == draftproof.__version__
    started = datetime.datetime.strptime(found["started"], "%Y-%m-%dT%H:%M:%S%z")
    assert abs(started - datetime.datetime.now(tz=datetime.UTC)) < datetime.timedelta(minutes=10)


def test_other_weights_have_another_identity(tiny_folder: Any) -> None:
    assert provenance(tiny_folder("llama"), [])["weights"] != provenance(tiny_folder("qwen3"), [])["weights"]


def test_the_root_is_where_the_package_came_from() -> None:
    assert (module._ROOT / "src" / "draftproof" / "__init__.py").is_file()


def test_a_clean_checkout_names_its_commit(checkout: Path, tiny_folder: Any) -> None:
    found = provenance(tiny_folder("llama"), [])
    assert found["commit"] == git(checkout, "rev-parse", "HEAD")
    assert len(found["commit"]) == 40
    assert found["tree"] == "clean"
    (checkout / "runs.txt").write_text("a run left this\n")
    assert provenance(tiny_folder("llama"), [])["tree"] == "clean", "untracked files change no code"


def test_a_change_that_is_not_committed_is_told(checkout: Path, tiny_folder: Any) -> None:
    (checkout / "code.py").write_text("2\n")
    found = provenance(tiny_folder("llama"), [])
    assert (found["commit"], found["tree"]) == (git(checkout, "rev-parse", "HEAD"), "dirty")


def test_outside_of_a_checkout_nothing_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_folder: Any
) -> None:
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    found = provenance(tiny_folder("llama"), [])
    assert (found["commit"], found["tree"]) == (None, "unknown")


def test_without_git_or_a_commit_nothing_is_guessed(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_folder: Any
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path / "empty"))
        assert provenance(tiny_folder("llama"), [])["tree"] == "unknown"
    git(checkout, "update-ref", "-d", "HEAD")
    found = provenance(tiny_folder("llama"), [])
    assert (found["commit"], found["tree"]) == (None, "unknown")
