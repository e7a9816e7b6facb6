"""Requests of all kinds for one server: good and bad, whole, streamed and broken off, with and without adapters."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import psutil
import transformers

from tests.engine.made_adapters import write_adapter
from tests.server.agents import THINKS
from tests.server.live import PATIENCE_S, ROOT, Server
from tests.server.scripting.counting import COUNTS, SIGNAL
from tests.server.small import KEY, LINE
from tests.server.tools import ADD, HERMES, WEATHER

AT_ONCE = 12


class MixedServer(Server):
    """A server with tools, thoughts, keys and the adapters "a" and, now and then, "b"; it tells how many objects it has."""

    def __init__(self, folder: Path, place: Path) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        for seed, name in enumerate("ab"):
            write_adapter(place / "adapters" / name, model, ("q_proj", "down_proj"), 4, seed=seed)
        (place / "keys").write_text(f"{LINE}\n")
        self._place = place
        path = f"{ROOT / 'tests/server/scripting'}{os.pathsep}{ROOT}"
        super().__init__(
            folder, "--chat-template", HERMES + THINKS, "--api-key-file", str(place / "keys"), "--max-adapters", "2",
            "--adapter", f"a={place / 'adapters' / 'a'}", "--adapter-folder", str(place / "adapters"),
            env={"PYTHONPATH": path, COUNTS: str(place)},
        )  # fmt: skip
        self.client.headers["Authorization"] = f"Bearer {KEY}"

    def processes(self) -> tuple[psutil.Process, psutil.Process]:
        """The process of HTTP, and the engine's."""
        return psutil.Process(self.process.pid), self.engine

    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """How many objects of each class both have."""
        found = []
        for process in self.processes():
            file = self._place / f"{process.pid}.json"
            file.unlink(missing_ok=True)
            process.send_signal(SIGNAL)
            until = time.monotonic() + PATIENCE_S
            while not file.exists():
                assert time.monotonic() < until, "no counts"
                # a process that waits for a message handles the signal when one comes
                self.client.get("/health")
                time.sleep(0.02)
            found.append(json.loads(file.read_text()))
        return found[0], found[1]


def a_request(rng: random.Random, kept: list[str]) -> tuple[str, str, dict[str, Any]]:
    """Returns a method, a path and a body."""
    text = rng.choice(["The roof", "A tile's edge", "Grüße " * rng.randrange(1, 20), f"{rng.random()}"])
    some = {"max_tokens": rng.randrange(1, 12), "temperature": rng.choice([0, 1])}
    chat = [{"role": "user", "content": text}]
    function = rng.choice([WEATHER, ADD])["function"]
    schema = {"type": "object", "properties": {f"n{rng.randrange(10**6)}": {"type": "boolean"}}, "additionalProperties": False}
    whole = {"max_output_tokens": some["max_tokens"]}
    before = {"previous_response_id": rng.choice(kept)} if kept and rng.random() < 0.5 else {}
    ways: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", "/v1/completions", some | {"prompt": [text] * rng.randrange(1, 4), "n": rng.randrange(1, 3)}),
        ("POST", "/v1/completions", some | {"prompt": text, "stop": ["e", "zz"], "logprobs": 2, "echo": rng.random() < 0.5}),
        ("POST", "/v1/completions", some | {"prompt": text, "cache_salt": str(rng.random()), "model": rng.choice("ab")}),
        ("POST", "/v1/completions", some | {"prompt": text, "structured_outputs": {"json": schema}}),
        ("POST", "/v1/completions", some | {"prompt": text, "structured_outputs": {"regex": f"[{rng.choice('abc')}]+"}}),
        ("POST", "/v1/completions", some | {"prompt": text, "beam_width": 2}),
        ("POST", "/v1/chat/completions", some | {"messages": chat, "tools": [WEATHER, ADD], "model": rng.choice(["a", "tiny"])}),
        ("POST", "/v1/chat/completions", some | {"messages": chat, "tools": [ADD], "tool_choice": "required"}),
        ("POST", "/v1/chat/completions", some | {"messages": chat, "enable_thinking": False, "thinking_token_budget": 3}),
        ("POST", "/v1/responses", whole | before | {"input": text, "store": rng.random() < 0.7}),
        ("POST", "/v1/responses", whole | {"input": text, "tools": [{"type": "function", **function}]}),
        ("POST", "/v1/messages", some | {"messages": chat, "system": "Be kind."}),
        ("POST", "/v1/messages", some | {"messages": chat, "tools": [
            {"name": function["name"], "input_schema": function["parameters"]}]}),
        ("POST", "/v1/messages/count_tokens", {"messages": chat}), ("POST", "/tokenize", {"prompt": text}),
        ("POST", "/v1/load_lora_adapter", {"lora_name": "b", "lora_path": "b"}),
        ("POST", "/v1/unload_lora_adapter", {"lora_name": "b"}),
        ("POST", "/v1/completions", {"prompt": rng.choice([5, [[]], None, "x" * 9000])}),
        ("POST", "/v1/responses", {"input": [{"type": "function_call"}], "tools": {}}), ("GET", "/v1/models", {}),
    ]  # fmt: skip
    if kept and rng.random() < 0.1:
        return "DELETE", f"/v1/responses/{kept.pop(rng.randrange(len(kept)))}", {}
    method, path, body = rng.choice(ways)
    return method, path, body | ({"stream": True} if rng.random() < 0.4 and "max" in " ".join(body) else {})


async def send(client: httpx.AsyncClient, rng: random.Random, kept: list[str]) -> int:
    """Sends one request, and reads its answer to the end or, of some streams, only a part; returns the status."""
    method, path, body = a_request(rng, kept)
    async with client.stream(method, path, json=body or None) as answer:
        if body.get("stream") and answer.status_code == 200 and rng.random() < 0.3:
            async for _ in answer.aiter_lines():
                break
            return 499
        data = await answer.aread()
        if path == "/v1/responses" and answer.status_code == 200 and not body.get("stream"):
            kept[:] = [*kept[-50:], json.loads(data)["id"]]
    return answer.status_code


async def send_mixed(server: Server, count: int, seed: int) -> Counter[int]:
    """Sends so many requests, some at a time; returns how often each status came."""
    kept: list[str] = []
    left = iter(range(count))
    seen: Counter[int] = Counter()

    async def some(n: int) -> None:
        rng = random.Random(1000 * seed + n)
        for _ in left:
            seen[await send(client, rng, kept)] += 1

    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=server.url, timeout=300, trust_env=False, headers=headers) as client:
        await asyncio.gather(*map(some, range(AT_ONCE)))
    return seen
