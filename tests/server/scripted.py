"""A server whose model says what a script tells it to say.

    with ScriptedServer(folder, tmp_path) as server:
        server.say(("weather in Kiel", '<tool_call>{"name": ...'), ("", "Good day."))

The first rule whose text is in the prompt counts, as the model reads it, special tokens included; a request that no rule fits is
answered by the model. Special tokens in a text to say are special tokens. The rules may be changed while the server runs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.server.live import ROOT, Server
from tests.server.scripting.script import SCRIPT


class ScriptedServer(Server):
    """`rooftile serve` with a folder; the script is a file in another folder."""

    def __init__(self, folder: Path | str, place: Path, *options: str, env: dict[str, str] | None = None) -> None:
        self._script = place / "script.json"
        self.say()
        path = f"{ROOT / 'tests/server/scripting'}{os.pathsep}{ROOT}"
        super().__init__(folder, *options, env={"PYTHONPATH": path, SCRIPT: str(self._script)} | (env or {}))

    def say(self, *rules: tuple[str, str]) -> None:
        """Sets the rules: a text of the prompt, and what is answered."""
        written = self._script.with_suffix(".new")
        written.write_text(json.dumps(rules), encoding="utf-8")
        written.replace(self._script)
