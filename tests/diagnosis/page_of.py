"""Reads a diagnosis's page as a browser would, and fails where its elements are not closed in order."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any, NamedTuple

VOID = {"meta", "link", "br", "img", "hr", "input", "source", "path", "rect", "circle", "polyline"}


class Element(NamedTuple):
    tag: str
    attributes: dict[str, str]
    inside: tuple[str, ...]  # the tags around it


class Page(HTMLParser):
    """The elements of a page, and its words by element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self.words = ""
        self.scripts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append(Element(tag, {name: value or "" for name, value in attrs}, tuple(self._open)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append(Element(tag, {name: value or "" for name, value in attrs}, tuple(self._open)))

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag, f"</{tag}> closes another element, near line {self.getpos()[0]}"

    def handle_data(self, data):
        if "script" in self._open:
            self.scripts[-1] += data
        elif "style" not in self._open:
            self.words += data

    @property
    def record(self) -> Any:
        """The JSON that the page carries."""
        return json.loads(self.scripts[0])

    def named(self, tag: str, kind: str = "") -> list[Element]:
        """Returns the elements of a tag that have a class."""
        return [e for e in self.elements if e.tag == tag and (not kind or kind in e.attributes.get("class", "").split())]
