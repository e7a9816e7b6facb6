"""Reads what a caller says about tools: which there are, whether one must be called, and whether several may be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rooftile.engine.chat.tools.tool import NAME, NO_PARAMETERS, Tool
from rooftile.errors import InvalidInput

# what a prompt and a grammar are made of; the time for both grows with these
MOST_TOOLS = 128
MOST_BYTES = 256 * 2**10
MOST_LEVELS = 32
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request.

    Args:
        tools: the functions; at least one.
        required: whether the answer must be a call.
        named: the one function that may be called; None if all may.
        several: whether an answer may have more calls than one.
    """

    tools: tuple[Tool, ...]
    required: bool = False
    named: str | None = None
    several: bool = True

    @property
    def allowed(self) -> tuple[Tool, ...]:
        """The functions that may be called."""
        return tuple(tool for tool in self.tools if self.named in (None, tool.name))


def read_use(tools: Any, choice: Any = None, several: Any = None) -> ToolUse | None:
    """Returns the tools of a request in OpenAI's form; None if it has no tools, or forbids calls.

    Args:
        tools: a list of {"type": "function", "function": {"name", "description", "parameters", "strict"}}, or None.
        choice: "none", "auto", "required", or {"type": "function", "function": {"name"}}; None means "auto".
        several: whether an answer may have several calls, `parallel_tool_calls`; None means that it may.

    Raises:
        InvalidInput: they are none of this, or too many or too large.
    """
    found = _read_tools(tools)
    if several is not None and not isinstance(several, bool):
        raise InvalidInput(f"parallel_tool_calls is {repr(several)[:40]}; must be true or false")
    named = _name_of(choice)
    wanted = choice in ("required",) or named is not None
    if wanted and not found:
        raise InvalidInput("tool_choice asks for a call, and there are no tools; give tools")
    if named is not None and named not in {tool.name for tool in found}:
        raise InvalidInput(
            f"tool_choice names {named[:64]!r}, which is none of tools; has {', '.join(t.name for t in found[:8])}"
        )
    if not found or choice == "none":
        return None
    return ToolUse(found, wanted, named, several is not False)


def _name_of(choice: Any) -> str | None:
    """Returns the function that a choice names."""
    if choice is None or (isinstance(choice, str) and choice in CHOICES):
        return None
    function = choice.get("function") if isinstance(choice, Mapping) and choice.keys() == {"type", "function"} else None
    if not isinstance(function, Mapping) or choice["type"] != "function" or function.keys() != {"name"}:
        due = '{"type": "function", "function": {"name": ...}}'
        raise InvalidInput(f"tool_choice is {repr(choice)[:60]}; must be {', '.join(CHOICES)}, or {due}")
    name = function["name"]
    if not isinstance(name, str):
        raise InvalidInput(f"tool_choice.function.name is {repr(name)[:40]}; must be the name of one of tools")
    return name


def _read_tools(given: Any) -> tuple[Tool, ...]:
    if given is None:
        return ()
    if not isinstance(given, list | tuple):
        raise InvalidInput(f"tools is of type {type(given).__name__}; must be a list of functions")
    if len(given) > MOST_TOOLS:
        raise InvalidInput(f"tools has {len(given):,} functions; may have at most {MOST_TOOLS}")
    found = tuple(_read_tool(each, f"tools[{place}]") for place, each in enumerate(given))
    names = [tool.name for tool in found]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise InvalidInput(f"tools has two functions of the name {twice}; a name must stand for one")
    size = sum(len(json.dumps(tool.given, ensure_ascii=False).encode(errors="replace")) for tool in found)
    if size > MOST_BYTES:
        raise InvalidInput(f"tools has {size:,} bytes; may have at most {MOST_BYTES:,}")
    return found


def _read_tool(given: Any, where: str) -> Tool:
    if not isinstance(given, Mapping) or given.get("type", "function") != "function":
        raise InvalidInput(f'{where} is {repr(given)[:60]}; must be {{"type": "function", "function": {{"name": ...}}}}')
    function = given.get("function")
    if not isinstance(function, Mapping):
        raise InvalidInput(f"{where} has no function; must be an object with a name")
    unknown = [name for name in function if name not in FUNCTION_FIELDS]
    if unknown:
        raise InvalidInput(f"{where}.function has {str(unknown[0])[:64]!r}; has {', '.join(FUNCTION_FIELDS)}")
    name, description, strict = function.get("name"), function.get("description"), function.get("strict")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        due = "must be 1 to 64 letters, digits, underscores and hyphens"
        raise InvalidInput(f"{where}.function.name is {repr(name)[:70]}; {due}")
    if description is not None and not isinstance(description, str):
        raise InvalidInput(f"{where}.function.description is {repr(description)[:40]}; must be a text")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidInput(f"{where}.function.strict is {repr(strict)[:40]}; must be true or false")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidInput(f"{where}.function.parameters is {repr(parameters)[:40]}; must be a JSON schema, an object")
    if parameters and parameters.get("type", "object") != "object":
        raise InvalidInput(f"{where}.function.parameters.type is {repr(parameters['type'])[:40]}; must be object")
    if _levels(parameters) > MOST_LEVELS:
        raise InvalidInput(f"{where}.function.parameters is nested deeper than {MOST_LEVELS} levels")
    # templates read these three whether they are given or not
    shown = {"name": name, "description": description or "", "parameters": parameters or dict(NO_PARAMETERS)}
    return Tool(name, {"type": "object"} | dict(shown["parameters"]), bool(strict), {"type": "function", "function": shown})


def _levels(value: Any) -> int:
    """Returns how deep a value is nested, up to one level more than it may be."""
    level, depth = [value], 0
    while level and depth <= MOST_LEVELS:
        level = [
            inner for each in level if isinstance(each, Mapping | list)
            for inner in (each.values() if isinstance(each, Mapping) else each)
        ]  # fmt: skip
        depth += bool(level)
    return depth
