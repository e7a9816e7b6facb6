"""The grammar of Python's literals, from a JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rooftile.engine.chat.tools.grammar import CallRules, written
from rooftile.engine.chat.tools.schema_types import constants_of, counted, resolved, types_of

# bounds that the grammar follows
BOUNDS = ("maxLength", "minLength", "maxItems", "minItems")


def _strings(times: str) -> str:
    """Returns the regular expressions of strings with a number of characters, in Lark's form."""
    # no halves of surrogate pairs
    code = r"u([0-9a-cefA-CEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})"
    escape = rf"\\([\x22'\\nrtbf]|x[0-9a-fA-F]{{2}}|{code})"
    return " | ".join(rf"/{quote}([^{quote}\\\x00-\x1f]|{escape}){times}{quote}/" for quote in (r"\x22", "'"))


_TERMINALS = {
    "PY_STRING": _strings("*"),
    "PY_INTEGER": r"/-?(0|[1-9][0-9]{0,17})/",
    "PY_NUMBER": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/",
}


class PythonRules:
    """Rules of literals, which are added to a grammar as they are needed.

    Args:
        rules: the grammar.
        root: the schema in which others are, for references.
    """

    def __init__(self, rules: CallRules, root: Mapping[str, Any]) -> None:
        self._rules, self._root = rules, root
        # the rules of schemas, which may have themselves in them
        self._made: dict[int, str] = {}

    def value(self, schema: Any) -> str:
        """Adds the rule of a schema's values; returns its name."""
        found = resolved(schema, self._root)
        if not types_of(found, self._root):
            return self._any()
        name = self._made.get(id(found))
        if name is None:
            name = self._made[id(found)] = self._rules.fresh_name()
            self._rules.rule(self._body(found), name=name)
        return name

    def _body(self, schema: Mapping[str, Any]) -> str:
        several = schema.get("anyOf") or schema.get("oneOf")
        constants = constants_of(schema)
        if constants:
            return " | ".join(self._constant(each) for each in constants)
        if isinstance(several, list) and "type" not in schema:
            return " | ".join(self.value(each) for each in several)
        return " | ".join(self._of_type(kind, schema) for kind in sorted(types_of(schema, self._root)))

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            least, most = (value if counted(value := schema.get(key)) else None for key in ("minLength", "maxLength"))
            if least is None and most is None:
                return self._terminal("PY_STRING")
            return _strings(f"{{{least or 0},{'' if most is None else most}}}")
        if kind in ("integer", "number"):
            return self._terminal(f"PY_{kind.upper()}")
        if kind == "boolean":
            return '"True" | "False"'
        if kind == "null":
            return '"None"'
        if kind == "array":
            item = self.value(schema.get("items", {}))
            least, most = (value if counted(value := schema.get(key)) else None for key in ("minItems", "maxItems"))
            more = f"{{{max(0, (least or 0) - 1)},{'' if most is None else max(0, most - 1)}}}"
            items = f'({item} (W? "," W? {item}){more}){"" if least else "?"} W?'
            return f'"[" W? {"" if most == 0 else items} "]"'
        properties, required = schema.get("properties"), schema.get("required")
        if kind != "object" or not isinstance(properties, Mapping) or not properties:
            entry = self._entry(None, {})
            return f'"{{" W? ({entry} (W? "," W? {entry})*)? W? "}}"'
        entries = [(self._entry(key, each), isinstance(required, list) and key in required) for key, each in properties.items()]
        return f'"{{" W? {self._rules.sequence(entries)} W? "}}"'

    def _entry(self, key: str | None, schema: Any) -> str:
        named = self._terminal("PY_STRING") if key is None else f"({self._constant(key)})"
        return self._rules.rule(f'{named} W? ":" W? {self.value(schema)}')

    def _any(self) -> str:
        """Returns the rule of any literal, which is added once."""
        if self._rules.has("py_any"):
            return "py_any"
        string, number = self._terminal("PY_STRING"), self._terminal("PY_NUMBER")
        comma = 'W? "," W?'
        entry = f'{string} W? ":" W? py_any'
        plain = f'{string} | {number} | "True" | "False" | "None"'
        lists = f'"[" W? (py_any ({comma} py_any)*)? W? "]" | "{{" W? ({entry} ({comma} {entry})*)? W? "}}"'
        return self._rules.rule(f"{plain} | {lists}", name="py_any")

    def _terminal(self, name: str) -> str:
        return name if self._rules.has(name) else self._rules.rule(_TERMINALS[name], name=name)

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            # in either kind of quotes
            return f"{written(json.dumps(value, ensure_ascii=False))} | {written(repr(value))}"
        return written(repr(value))
