"""A server in this process, with its engine in another: what a test may stop, kill or let hang."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from rooftile.server.engine.remote import RemoteEngine
from rooftile.server.server_run import ServerRun, bind
from rooftile.server.settings import ServerSettings

ENGINE = {"device": "cpu", "num_blocks": 4096, "max_num_seqs": 64, "max_model_len": 8192}
PATIENCE_S = 240.0


class Living:
    """A running server and a client for it."""

    def __init__(self, run: ServerRun, life: asyncio.Task[int], client: httpx.AsyncClient) -> None:
        self.run = run
        self.service = run._service
        self.life = life
        self.client = client

    @property
    def engine(self) -> RemoteEngine | None:
        """The first engine, if there is one."""
        engines = self.service.engines
        return None if engines is None else engines.all[0].engine

    async def ready(self) -> None:
        """Returns when requests are answered."""
        async with asyncio.timeout(PATIENCE_S):
            while (await self.client.get("/health")).status_code != 200:
                assert not self.life.done(), await self.life
                await asyncio.sleep(0.05)

    async def stream(self, begun: asyncio.Event | None = None, **fields: Any) -> list[Any]:
        """Returns the events of a stream; sets `begun` at the first text."""
        found: list[Any] = []
        body = {"prompt": "The roof", "stream": True, "ignore_eos": True} | fields
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return [answer.json() | {"status": answer.status_code}]
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    found.append("[DONE]")
                elif line:
                    found.append(json.loads(line.removeprefix("data: ")))
                    if begun is not None:
                        begun.set()
        return found


@contextlib.asynccontextmanager
async def living(
    folder: Path, *, ready: bool = True, engine: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Living]:
    # for the engine's process: threads that wait for each other take a hundred times as long on a busy machine
    os.environ["OMP_NUM_THREADS"] = "1"
    listener = bind("127.0.0.1", 0)
    run = ServerRun(ServerSettings(model=str(folder), engine=ENGINE | (engine or {}), **settings), listener)
    life = asyncio.create_task(run.live())
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx.AsyncClient(
        base_url=url, timeout=PATIENCE_S, trust_env=False, limits=httpx.Limits(max_connections=200)
    ) as client:
        made = Living(run, life, client)
        try:
            if ready:
                await made.ready()
            yield made
        finally:
            run._stop.set()
            await asyncio.wait({life}, timeout=300)
            engines = [] if made.service.engines is None else [each.engine for each in made.service.engines.all]
            left = [engine for engine in engines if engine.process.poll() is None]
            for engine in left:
                engine.process.kill()
                engine.process.wait()
            assert not left, "an engine has outlived its server"
