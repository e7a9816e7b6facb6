"""`rooftile mask`: draws a mask, one row per query."""

from __future__ import annotations

import ast
from typing import Annotated, Any

import typer

from rooftile.cli.output import JsonOption, print_json
from rooftile.errors import InvalidInput
from rooftile.exact import masks
from rooftile.exact.masks import CAUSAL, FULL, Chunk, Mask, Prefix, Targets, Window

NAMES = {"FULL": FULL, "CAUSAL": CAUSAL, "Window": Window, "Prefix": Prefix, "Chunk": Chunk, "Targets": Targets}


def mask(
    expression: Annotated[
        str, typer.Argument(help="FULL, CAUSAL, Window(n), Window(n, m), Prefix(n), Chunk(n) or Targets(n), by &.")
    ],
    queries: Annotated[int, typer.Option("--queries", min=1, max=1000, help="Rows of the picture.")] = 16,
    keys: Annotated[int, typer.Option("--keys", min=1, max=1000, help="Columns of the picture.")] = 16,
    json: JsonOption = False,
) -> None:
    """Draws the keys that each query sees under a mask: # is visible, . is hidden.

    Example: rooftile mask "CAUSAL & Window(4)" --queries 8 --keys 12
    """
    drawn = parse(expression)
    rows = masks.draw(drawn, queries, keys)
    visible = masks.pairs(drawn, queries, keys)
    if json:
        print_json({"mask": repr(drawn), "queries": queries, "keys": keys, "pairs": visible, "rows": rows.splitlines()})
    else:
        print(f"{drawn!r}: {visible:,} of {queries * keys:,} pairs are visible\n{rows}")


def parse(expression: str) -> Mask:
    """Returns the mask of an expression such as "CAUSAL & Window(4)". Nothing else is evaluated."""
    try:
        found = _value(ast.parse(expression.strip(), mode="eval").body)
    except InvalidInput:
        # a number that its condition refuses
        raise
    except (SyntaxError, ValueError, TypeError):
        found = None
    if not isinstance(found, Mask):
        raise InvalidInput(
            f"the mask is {expression!r}; must be FULL, CAUSAL, Window(n), Prefix(n), Chunk(n) or Targets(n), joined by &"
        )
    return found


def _value(node: ast.expr) -> Any:
    match node:
        case ast.BinOp(left, ast.BitAnd(), right):
            return _value(left) & _value(right)
        case ast.Call(ast.Name(name), arguments, []) if callable(NAMES.get(name)):
            return NAMES[name](*map(ast.literal_eval, arguments))  # type: ignore[operator]
        case ast.Name(name) if isinstance(NAMES.get(name), Mask):
            return NAMES[name]
    raise ValueError(ast.dump(node))
