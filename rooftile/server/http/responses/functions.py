"""The functions of a response's request: as a chat has them, and back to the names that the client knows."""

from __future__ import annotations

from typing import Any

from rooftile.server.refusals import Refusal


class Functions:
    """The functions that a model may call. A namespace is a list of functions, whose names a chat's model sees with its own.

    Args:
        given: the field `tools`.

    Raises:
        Refusal: it is no list of functions and of namespaces with functions.
    """

    def __init__(self, given: Any) -> None:
        self._places: dict[str, tuple[str, str]] = {}
        self.tools: list[dict[str, Any]] = []
        """The functions in a chat's words, where the schema is one level deeper."""
        for place, tool in enumerate(_objects(given, "tools")):
            where = f"tools[{place}]"
            if tool.get("type") != "namespace":
                self.tools.append(_function(tool, where, tool.get("name")))
                continue
            space = tool.get("name")
            if not isinstance(space, str):
                raise _bad(where, f"{where}.name is missing; a namespace must have a name and tools")
            for inner, function in enumerate(_objects(tool.get("tools"), f"{where}.tools")):
                name = function.get("name")
                # another type is refused with the other functions' names
                shown = joined(space, name) if isinstance(name, str) else name
                self.tools.append(_function(function, f"{where}.tools[{inner}]", shown))
                if isinstance(shown, str) and isinstance(name, str):
                    self._places[shown] = space, name

    def call(self, name: str) -> dict[str, str]:
        """Returns the name of a function that the model has called, and its namespace."""
        if name not in self._places:
            return {"name": name}
        space, inner = self._places[name]
        return {"name": inner, "namespace": space}


def joined(space: str, name: str) -> str:
    """Returns the name that a model sees; some clients end their namespaces with underscores."""
    return f"{space.rstrip('_')}__{name}"


def model_name(item: dict[str, Any]) -> str:
    """Returns the name by which the model has called the function of an item."""
    name: str = item["name"]
    return joined(item["namespace"], name) if item.get("namespace") else name


def tool_choice(given: Any) -> Any:
    """Returns `tool_choice` in a chat's words.

    Raises:
        Refusal: it is an object of another type.
    """
    if not isinstance(given, dict):
        return given
    if given.get("type") != "function":
        raise _bad("tool_choice", "tool_choice must be none, auto, required, or {type: function, name}")
    return {"type": "function", "function": {"name": given.get("name")}}


def _function(tool: dict[str, Any], where: str, name: Any) -> dict[str, Any]:
    if tool.get("type") != "function":
        why = f"{where} is of type {str(tool.get('type'))[:40]!r}; only functions are called here, by the client"
        raise Refusal("unsupported", why, param=where)
    return {"type": "function", "function": {each: tool[each] for each in tool if each != "type"} | {"name": name}}


def _objects(given: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise _bad(where.partition("[")[0], f"{where} must be a list of objects of type function")
    return given


def _bad(param: str, message: str) -> Refusal:
    return Refusal("invalid_value", message, param=param)
