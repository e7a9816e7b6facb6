"""How a result shows itself at the end of a notebook's cell: HTML that needs no package, in which every word is escaped.

A result has a `__repr__` of one line, and a `_repr_html_` that is made of these parts. Styles stand in the elements, because
notebooks and the sites that show them leave style sheets out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

# letters of a text within a line
LETTERS = 40
_CELL = "padding:3px 12px 3px 0;vertical-align:top;font-weight:normal;"
_WORDS, _NUMBERS = "text-align:left;white-space:normal;", "text-align:right;white-space:nowrap;"


def card(*parts: str) -> str:
    """Joins parts, each of them HTML, into what a `_repr_html_` returns."""
    return f'<div class="rooftile" style="max-width:100%;overflow-x:auto">{"".join(parts)}</div>'


def sentence(words: str) -> str:
    """Returns a line of text."""
    return f'<p style="margin:0 0 8px">{escape(words)}</p>'


def preformatted(words: str) -> str:
    """Returns text in which columns stand below each other."""
    return f'<pre style="margin:0 0 8px;white-space:pre;line-height:1.35">{escape(words)}</pre>'


def table(head: Sequence[object], rows: Iterable[Sequence[object]], words: Sequence[int] = (0,)) -> str:
    """Returns a table.

    head: the names of the columns; none for a table of names and values.
    words: the columns that hold words, which are flushed left; the others hold numbers.
    """

    def line(cells: Sequence[object], tag: str) -> str:
        styles = (_CELL + (_WORDS if n in words else _NUMBERS) for n in range(len(cells)))
        return "".join(f'<{tag} style="{style}">{escape(str(cell))}</{tag}>' for style, cell in zip(styles, cells, strict=True))

    above = f"<thead><tr>{line(head, 'th')}</tr></thead>" if head else ""
    body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in rows)
    return f'<table style="border-collapse:collapse;margin:0 0 8px">{above}<tbody>{body}</tbody></table>'


def facts(values: Iterable[tuple[str, object]]) -> str:
    """Returns a table of names and values."""
    return table((), values, words=(0, 1))


def spans(rows: Sequence[Sequence[tuple[float, float]]], side: int = 192, height: int | None = None) -> str:
    """Draws one line per row: what lies within its spans, each from a start to a stop between 0 and 1, is filled."""
    tall = side if height is None else height
    line = tall / max(len(rows), 1)
    filled = "".join(
        f'<rect x="{start * side:.2f}" y="{n * line:.2f}" width="{(stop - start) * side:.2f}" height="{line:.2f}"/>'
        for n, its in enumerate(rows)
        for start, stop in its
        if stop > start
    )
    frame = f'<rect width="{side}" height="{tall}" fill="none" stroke="#8a93a0"/>'
    size = f'width="{side}" height="{tall}" viewBox="0 0 {side} {tall}"'
    return f'<svg {size} role="img"><g fill="#0a64ad">{filled}</g>{frame}</svg>'


def short(words: str | None, most: int = LETTERS) -> str:
    """Returns the `repr` of a text, of a long one its beginning.

    >>> short("a" * 50, 5)
    "'aaaaa…'"
    """
    if words is None or len(words) <= most:
        return repr(words)
    return repr(words[:most] + "…")


def counted(n: int, one: str, many: str | None = None) -> str:
    """Returns a number with its noun.

    >>> counted(1, "layer"), counted(3200, "layer"), counted(2, "query", "queries")
    ('1 layer', '3,200 layers', '2 queries')
    """
    return f"{n:,} {one if n == 1 else many or f'{one}s'}"
