"""Templates escape what they are given, name what they lack, and write the package's files as they are."""

from __future__ import annotations

from importlib.resources import files

import pytest
from jinja2 import UndefinedError

from draftproof.report.assets import environment


def test_values_are_escaped_and_files_are_not() -> None:
    made = environment().from_string('{{ value }}|{{ raw("page.css") }}').render(value="<i>&")
    assert made.startswith("&lt;i&gt;&amp;|:root {")
    css = (files("draftproof.report") / "page.css").read_text(encoding="utf-8")
    assert made.partition("|")[2] == css


def test_a_name_that_is_missing_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="valeu"):
        environment().from_string("{{ valeu }}").render(value=1)
