"""The files of this package that are written into pages, and the templates' environment."""

from __future__ import annotations

from importlib.resources import files

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup


def environment() -> Environment:
    """Templates of this package; everything that is put into them is escaped."""
    made = Environment(
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    made.globals["raw"] = lambda name: Markup(_asset(name))  # noqa: S704  a file of this package
    return made


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")
