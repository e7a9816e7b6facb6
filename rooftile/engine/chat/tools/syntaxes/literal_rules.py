"""The grammar of values that are no JSON, from a JSON schema; a dialect says how it writes texts, names and words."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from rooftile.engine.chat.tools.grammar import CallRules
from rooftile.engine.chat.tools.schema_types import constants_of, counted, resolved, types_of

_TERMINALS = {
    "INTEGER": r"/-?(0|[1-9][0-9]{0,17})/",
    "NUMBER": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/",
}


class LiteralRules(ABC):
    """Rules of values, which are added to a grammar as they are needed.

    Args:
        rules: the grammar.
        root: the schema in which others are, for references.
    """

    BOUNDS: tuple[str, ...] = ()
    """The bounds of a schema that the grammar follows."""
    BOOLEAN = ""
    """The two words for true and false, in Lark's form."""
    NULL = ""
    """The word for null, in Lark's form."""

    def __init__(self, rules: CallRules, root: Mapping[str, Any]) -> None:
        self._rules, self._root = rules, root
        # the rules of schemas, which may have themselves in them
        self._made: dict[int, str] = {}

    @abstractmethod
    def text(self, least: int | None, most: int | None) -> str:
        """Returns a text with at least and at most some characters."""

    @abstractmethod
    def constant(self, value: Any) -> str:
        """Returns a value that is the only one."""

    @abstractmethod
    def key(self, name: str | None) -> str:
        """Returns the name of an entry; any name for None."""

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

    def entry(self, name: str | None, schema: Any) -> str:
        """Adds the rule of a name and its value; returns its name."""
        return self._rules.rule(f'({self.key(name)}) W? ":" W? {self.value(schema)}')

    def terminal(self, name: str, body: str | None = None) -> str:
        """Adds a terminal, once; returns its name."""
        return name if self._rules.has(name) else self._rules.rule(body or _TERMINALS[name], name=name)

    def _body(self, schema: Mapping[str, Any]) -> str:
        several = schema.get("anyOf") or schema.get("oneOf")
        constants = constants_of(schema)
        if constants:
            return " | ".join(self.constant(each) for each in constants)
        if isinstance(several, list) and "type" not in schema:
            return " | ".join(self.value(each) for each in several)
        return " | ".join(self._of_type(kind, schema) for kind in sorted(types_of(schema, self._root)))

    def _of_type(self, kind: str, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            return self.text(*(value if counted(value := schema.get(key)) else None for key in ("minLength", "maxLength")))
        if kind in ("integer", "number"):
            return self.terminal(kind.upper())
        if kind == "boolean":
            return self.BOOLEAN
        if kind == "null":
            return self.NULL
        if kind == "array":
            item = self.value(schema.get("items", {}))
            least, most = (value if counted(value := schema.get(key)) else None for key in ("minItems", "maxItems"))
            more = f"{{{max(0, (least or 0) - 1)},{'' if most is None else max(0, most - 1)}}}"
            items = f'({item} (W? "," W? {item}){more}){"" if least else "?"} W?'
            return f'"[" W? {"" if most == 0 else items} "]"'
        return self.map(schema)

    def map(self, schema: Mapping[str, Any]) -> str:
        """Returns the entries of an object in braces."""
        properties, required = schema.get("properties"), schema.get("required")
        if not isinstance(properties, Mapping) or not properties:
            if schema.get("additionalProperties") is False:
                return '"{" W? "}"'
            entry = self.entry(None, {})
            return f'"{{" W? ({entry} (W? "," W? {entry})*)? W? "}}"'
        entries = [(self.entry(key, each), isinstance(required, list) and key in required) for key, each in properties.items()]
        return f'"{{" W? {self._rules.sequence(entries)} W? "}}"'

    def _any(self) -> str:
        """Returns the rule of any value, which is added once."""
        if self._rules.has("any_value"):
            return "any_value"
        comma = 'W? "," W?'
        entry = f'({self.key(None)}) W? ":" W? any_value'
        plain = f"{self.text(None, None)} | {self.terminal('NUMBER')} | {self.BOOLEAN} | {self.NULL}"
        lists = f'"[" W? (any_value ({comma} any_value)*)? W? "]" | "{{" W? ({entry} ({comma} {entry})*)? W? "}}"'
        return self._rules.rule(f"{plain} | {lists}", name="any_value")
