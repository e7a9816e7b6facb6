"""Renders a page: one HTML file from a template, which loads nothing.

`page.css` is the style of all pages, `picture.css` of pictures there and in notebooks, and `figure.html` has what the templates
share. Needs jinja2, except for `safe` and what is shown in a notebook.

Colours have one meaning each: blue (`ours`) is what this library did, green (`other`) what that is compared with, orange
(`standard`) the plain way, which stores all scores or rounds all numbers at once. What bounds an operator has colours of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
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


class Safe(str):
    """HTML that this package wrote, which templates do not escape."""

    def __html__(self) -> str:
        return str(self)


def safe(text: str) -> Safe:
    """Marks HTML that this package wrote, so that it is not escaped."""
    return Safe(text)


def in_notebook(chart: Chart | None) -> str:
    """Returns a chart with its title and caption for a notebook, on a paper of its own: a style that other cells do not see."""
    if chart is None:
        return ""
    style = (files("rooftile.drawing") / "picture.css").read_text().replace(":root", "&")
    frame = "background:var(--card);color:var(--ink);padding:10px 14px;max-width:620px;margin:0 0 8px"
    note = f'<figcaption style="font-size:0.85em">{escape(chart.note)}</figcaption>' if chart.note else ""
    return (
        f'<style>.rooftile-picture {{ {style} }}</style><figure class="rooftile-picture" style="{frame}">'
        f"<b>{escape(chart.title)}</b>{chart.picture}{note}</figure>"
    )


def json_element(values: Any) -> Any:
    """Returns values as JSON that may stand in a script element."""
    # `<` would let a string in the data end the element
    return safe(json.dumps(values, allow_nan=False).replace("<", "\\u003c"))


def render(package: str, template: str, **values: Any) -> str:
    """Renders a template of a package, such as ("package.pages", "page.html"). All values are escaped but those marked safe.

    Raises InvalidInput if jinja2 is not installed.
    """
    check_ready()
    from jinja2 import DictLoader, Environment, StrictUndefined

    here = files("rooftile.drawing")
    shared = {"figure.html": (here / "figure.html").read_text()}
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=DictLoader(shared)
    )  # fmt: skip
    css = safe("\n".join((here / name).read_text() for name in ("picture.css", "page.css")))
    return environment.from_string((files(package) / template).read_text()).render(css=css, **values)
