"""The grammar of Python's literals, from a JSON schema."""

from __future__ import annotations

import json
from typing import Any

from rooftile.engine.chat.tools.grammar import written
from rooftile.engine.chat.tools.syntaxes.literal_rules import LiteralRules


def _strings(times: str) -> str:
    """Returns the regular expressions of strings with a number of characters, in Lark's form."""
    # no halves of surrogate pairs
    code = r"u([0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})"
    escape = rf"\\([\x22'\\nrtbf]|x[0-9a-fA-F]{{2}}|{code})"
    return " | ".join(rf"/{quote}([^{quote}\\\x00-\x1f]|{escape}){times}{quote}/" for quote in (r"\x22", "'"))


class PythonRules(LiteralRules):
    """Rules of Python's literals."""

    BOUNDS = ("maxLength", "minLength", "maxItems", "minItems")
    BOOLEAN, NULL = '"True" | "False"', '"None"'

    def text(self, least: int | None, most: int | None) -> str:
        """Returns a string in either kind of quotes."""
        if least is None and most is None:
            return self.terminal("STRING", _strings("*"))
        return _strings(f"{{{least or 0},{'' if most is None else most}}}")

    def constant(self, value: Any) -> str:
        """Returns a literal."""
        if isinstance(value, str):
            # in either kind of quotes
            return f"{written(json.dumps(value, ensure_ascii=False))} | {written(repr(value))}"
        return written(repr(value))

    def key(self, name: str | None) -> str:
        """Returns a string."""
        return self.text(None, None) if name is None else self.constant(name)
