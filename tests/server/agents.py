"""A conversation of two calls for agents: what the model is asked, says and is told, whichever client runs the loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from tests.engine.made_adapters import write_adapter
from tests.server.scripted import ScriptedServer
from tests.server.small import KEY, LINE
from tests.server.tools import HERMES, hermes_call, tools_server

QUESTION = "How warm is it in Kiel in three days?"
SAID = "Ten degrees."
CALLED = [("weather", {"city": "Kiel"}), ("add", {"a": 7, "b": 3})]
# the calls that were made are in the prompts of later turns, so the newest result comes first
TURNS = (
    ("sum=10", SAID), ("Kiel: 7 degrees", hermes_call("add", a=7, b=3)), (QUESTION, hermes_call("weather", city="Kiel")),
)  # fmt: skip
# by these words a template tells that its model marks its thoughts
THINKS = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"


class Tools:
    """Two functions, which note how they were called."""

    def __init__(self) -> None:
        self.called: list[tuple[str, dict[str, Any]]] = []

    def weather(self, city: str) -> str:
        """The weather of a city."""
        self.called.append(("weather", {"city": city}))
        return f"{city}: 7 degrees"

    def add(self, a: int, b: int) -> str:
        """The sum of two numbers."""
        self.called.append(("add", {"a": a, "b": b}))
        return f"sum={a + b}"

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Calls one of them."""
        result: str = getattr(self, name)(**arguments)
        return result


def agents_server(folder: Path, place: Path) -> ScriptedServer:
    """A server with room for long schemas, thoughts, keys, and the adapter "a"; "b" may be loaded, and "none" is no folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for seed, name in enumerate("ab"):
        write_adapter(place / "adapters" / name, model, ("q_proj", "down_proj"), 4, seed=seed)
    (place / "keys").write_text(f"{LINE}\n")
    made = tools_server(
        folder, place, HERMES + THINKS, "--max-model-len", "8192", "--num-blocks", "2000", "--api-key-file", str(place / "keys"),
        "--adapter", f"a={place / 'adapters' / 'a'}", "--max-adapters", "2", "--adapter-folder", str(place / "adapters"),
    )  # fmt: skip
    made.client.headers["Authorization"] = f"Bearer {KEY}"
    return made
