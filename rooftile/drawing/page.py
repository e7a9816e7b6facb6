"""Renders a page: one HTML file from a template, which loads nothing.

`page.css` is the style of all pages, and `figure.html` has what their templates share. Needs jinja2.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, NamedTuple

from rooftile.errors import InvalidInput


class Table(NamedTuple):
    """A table of words, with the names of its columns."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Chart(NamedTuple):
    """A picture with a title, a caption, and its numbers."""

    title: str
    picture: Any  # SVG, marked as safe
    note: str = ""
    table: Table | None = None


def check_ready() -> None:
    """Raises InvalidInput if jinja2 is not installed, before minutes of measuring."""
    if find_spec("jinja2") is None:
        raise InvalidInput("the page needs jinja2, which is not installed; pip install jinja2")


def safe(text: str) -> Any:
    """Marks HTML that this package wrote, so that it is not escaped."""
    from markupsafe import Markup

    return Markup(text)


def json_element(values: Any) -> Any:
    """Returns values as JSON that may stand in a script element."""
    # `<` would let a string in the data end the element
    return safe(json.dumps(values, allow_nan=False).replace("<", "\\u003c"))


def render(package: str, template: str, **values: Any) -> str:
    """Renders a template of a package, such as ("rooftile.report", "page.html"). All values are escaped but those marked safe.

    Raises InvalidInput if jinja2 is not installed.
    """
    check_ready()
    from jinja2 import DictLoader, Environment, StrictUndefined

    here = files("rooftile.drawing")
    shared = {"figure.html": (here / "figure.html").read_text()}
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=DictLoader(shared)
    )  # fmt: skip
    css = safe((here / "page.css").read_text())
    return environment.from_string((files(package) / template).read_text()).render(css=css, **values)
