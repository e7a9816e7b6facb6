"""The grammar of calls, in Lark's form: in the model's own syntax, of the functions' schemas."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from rooftile.engine.chat.tools.schema_types import first_unknown
from rooftile.engine.chat.tools.tool import Tool
from rooftile.engine.chat.tools.use import ToolUse
from rooftile.engine.sampling.structural_tags import WHITESPACE
from rooftile.errors import InvalidInput

# white space between the parts of a call
SPACES = r"[ \t\r\n]{1,8}"
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


class CallForm(ABC):
    """How a model writes calls. A block is one call, or a list of calls, between the marks around it."""

    marks: tuple[str, ...] = ()
    """The marks of which one begins a block."""
    anchors: tuple[str, ...] = ()
    """Texts behind which an opening may stand, as at the beginning of an answer."""
    in_headers = False
    """Whether a mark begins a block in a message's header alone (see `HeaderWatch`)."""
    repeats = True
    """Whether an answer may have several blocks."""

    def openings(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Returns what begins an answer that is a call without a mark, written without white space."""
        return ()

    def before(self, rules: CallRules) -> str:
        """Returns the body of what stands before an answer that must be a call."""
        return ""

    @abstractmethod
    def block(self, rules: CallRules, tools: Sequence[Tool], *, several: bool) -> str:
        """Returns the body of the rule of a block.

        Args:
            rules: takes further rules.
            tools: the functions that may be called.
            several: whether a block may have several calls.
        """


class CallRules:
    """Rules of a grammar that are being written.

    Args:
        token_id: returns the added token that a text spells, if it does: models write marks with these.
        loose: whether arguments may be any objects.
    """

    space = "W?"
    """White space, or none; a bounded number, or a model might write it without an end."""

    def __init__(self, token_id: Callable[[str], int | None], *, loose: bool) -> None:
        self._token_id = token_id
        self._loose = loose
        self._named = 0
        # forced texts would be written in tokens of llguidance's choice, and not of the model's
        self._lines = ['%llguidance {"no_forcing": true}', f"W: /{SPACES}/"]

    def rule(self, body: str, *, name: str | None = None) -> str:
        """Adds a rule; returns its name."""
        name = name or self.fresh_name()
        self._lines.append(f"{name}: {body}")
        return name

    def fresh_name(self) -> str:
        """Returns a name for a rule that will be added."""
        self._named += 1
        return f"r{self._named}"

    def has(self, name: str) -> bool:
        """Tells whether there is a rule of a name."""
        return any(line.startswith(f"{name}: ") for line in self._lines)

    def sequence(self, parts: Sequence[tuple[str, bool]]) -> str:
        """Returns parts in their order with commas between them; each is a rule's name, and whether it must be there."""
        rest, starts = "", list[str]()
        for name, needed in reversed(parts):
            start = f"{name} {rest}".rstrip()
            # a part that must be there is the first at the latest
            starts = [start] if needed else [start, *starts]
            following = f'{self.space} "," {self.space} {name}'
            rest = self.rule(f"{following if needed else f'({following})?'} {rest}".rstrip())
        optional = "" if any(needed for _, needed in parts) else "?"
        return f"({' | '.join(starts)}){optional}" if starts else ""

    def mark(self, text: str) -> str:
        """Returns a mark: the token that it spells, or its text."""
        id = self._token_id(text)
        return written(text) if id is None else f"<[{id}]>"

    def schema(self, schema: Any, *, strict: bool = False) -> str:
        """Adds the rule of a JSON value; returns its name."""
        given = schema if isinstance(schema, Mapping) else {}
        # without `lenient` a schema is refused that says more than a grammar can
        options = {"whitespace_pattern": WHITESPACE} | ({} if strict else {"lenient": True, "coerce_one_of": True})
        return self.rule(f"%json {json.dumps({**given, 'x-guidance': options}, ensure_ascii=False)}")

    def arguments(self, tool: Tool) -> str:
        """Adds the rule of a function's arguments as a JSON object; returns its name."""
        return self.schema(ANY_OBJECT if self._loose else tool.parameters, strict=tool.strict)

    def parameters(self, tool: Tool) -> Mapping[str, Any]:
        """Returns the schema of a function's arguments."""
        return ANY_OBJECT if self._loose else tool.parameters

    def objects(
        self, tools: Sequence[Tool], *, name: str = "name", arguments: str = "arguments", first: str = "", more: str = ""
    ) -> str:  # fmt: skip
        """Adds the rule of a call that is an object with a name and arguments; returns its name.

        Args:
            tools: the functions.
            name, arguments: the keys of the name and of the arguments.
            first: what may stand before the name.
            more: what may follow the arguments.
        """
        colon, comma = f'{self.space} ":" {self.space}', f'{self.space} "," {self.space}'
        key = f"{comma} {written(json.dumps(arguments))} {colon}"
        alternatives = " | ".join(self.rule(f"{written(json.dumps(each.name))} {key} {self.arguments(each)}") for each in tools)
        first, more = (f"({part})?" if part else "" for part in (first, more))
        return self.rule(
            f'"{{" {self.space} {first} {written(json.dumps(name))} {colon} ({alternatives}) {self.space} {more} "}}"'
        )

    def listed(self, item: str, *, several: bool) -> str:
        """Returns a list of items in square brackets: one or more, or a single one."""
        more = f' ({self.space} "," {self.space} {item})*' if several else ""
        return f'"[" {self.space} {item}{more} {self.space} "]"'

    def up_to(self, end: str, most: int | None = None, *, own_lines: bool = False) -> str:
        """Adds the rule of a text up to its end, which is part of it; returns its name.

        Args:
            end: the mark that ends it.
            most: the most characters; None for any number.
            own_lines: whether a line break on both sides is no part of the text.
        """
        line = r"\n?" if own_lines else ""
        pattern = r"/(.|\n)*/" if most is None else rf"/{line}(.|\n){{0,{most}}}{line}/"
        text, mark = self.rule(pattern, name=self.fresh_name().upper()), self.mark(end)
        # no text has an added token in it; any other end is the first one
        lazy = "" if mark != written(end) else "[lazy]"
        return self.rule(f"{text} {mark}", name=self.fresh_name() + lazy).removesuffix(lazy)

    def check_strict(self, tool: Tool, schema: Any, known: Collection[str]) -> None:
        """Raises InvalidInput for a strict function with a schema that says more than this syntax's grammar follows.

        Args:
            tool: the function.
            schema: the schema of all of its arguments or of one.
            known: keys of schemas that the grammar follows, beside those that every grammar does.
        """
        unknown = first_unknown(schema, tool.parameters, known) if tool.strict else None
        if unknown is not None:
            why = f"arguments in this model's syntax of calls are held to no {unknown}"
            raise InvalidInput(f"the function {tool.name} is strict, and its schema has {unknown}: {why}")

    def text(self) -> str:
        """Returns the grammar."""
        return "\n".join(self._lines)


def call_grammar(form: CallForm, use: ToolUse, token_id: Callable[[str], int | None], *, loose: bool = False) -> str:
    """Returns a grammar in Lark's form: for an answer that must be calls, or for a block of calls that a model has begun."""
    rules = CallRules(token_id, loose=loose)
    several = use.several and use.named is None
    block = rules.rule(form.block(rules, use.allowed, several=several))
    repeats = use.required and several and form.repeats
    before = form.before(rules) if use.required else ""
    rules.rule(f"{block} ({rules.space} {block})* {rules.space}" if repeats else f"{before} {block}", name="start")
    return rules.text()


def written(text: str) -> str:
    """Returns a text in Lark's form."""
    return json.dumps(text, ensure_ascii=False)
