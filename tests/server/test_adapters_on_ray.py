"""The adapters of a cluster's replicas, without Ray: each follows its ingress, also one that comes later or hears old words."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rooftile import __version__
from rooftile.server.engine.calls import EngineDown, EngineRefused
from rooftile.server.engine.messages import Add
from rooftile.server.on_ray.adapters import FollowedAdapters, WantedAdapters
from rooftile.server.on_ray.engine import Engine, read
from rooftile.server.on_ray.engines import RayEngines
from tests.engine.made_adapters import write_adapter
from tests.server.living import ENGINE

STARTED = {"a": "/adapters/a"}


class Replica:
    """Adapters of an engine with two slots, which refuses folders that it has not."""

    def __init__(self, lacks: str = "") -> None:
        self.has, self.loads, self.lacks = {"a": "/adapters/a"}, 0, lacks
        self.adapters = FollowedAdapters(STARTED, self.change)

    async def change(self, name: str, path: str | None) -> None:
        await asyncio.sleep(0)
        if path is None:
            del self.has[name]
        elif path == self.lacks:
            raise EngineRefused(f"{path} is not a folder")
        elif len(self.has) == 2:
            raise EngineRefused("all 2 slots for adapters are taken")
        else:
            assert name not in self.has
            self.has[name] = path
            self.loads += 1


class Handle:
    """A handle of Ray Serve's, as far as words to all replicas go."""

    def __init__(self, *replicas: Any) -> None:
        self.replicas = [*replicas]

    def options(self, **_: Any) -> Handle:
        return self

    def broadcast(self, method: str, *given: Any) -> Any:
        class Told:
            async def results_async(told, timeout_s: float, return_exceptions: bool) -> list[Any]:
                found = (
                    each.adapters.follow(msgspec.msgpack.decode(msgspec.msgpack.encode(given[-1]))) for each in self.replicas
                )
                return await asyncio.gather(*found, return_exceptions=return_exceptions)

        return Told() if method == "change_adapters" else None


def engines(*replicas: Any) -> RayEngines:
    made = RayEngines.__new__(RayEngines)
    made._handle, made._adapters = Handle(*replicas), WantedAdapters(STARTED)
    return made


def test_all_replicas_follow_or_none() -> None:
    async def test() -> None:
        first, second = Replica(), Replica(lacks="/adapters/c")
        all_of_them = engines(first, second)
        await all_of_them.change_adapter("b", "/adapters/b")
        assert first.has == second.has == STARTED | {"b": "/adapters/b"}
        for name, path, sentence in (
            ("c", "/adapters/d", "all 2 slots"), ("b", "/adapters/c", "an adapter 'b' is loaded already"),
            ("d", None, "there is no adapter 'd'"),
        ):  # fmt: skip
            with pytest.raises(EngineRefused, match=sentence):
                await all_of_them.change_adapter(name, path)
        assert first.has == second.has == STARTED | {"b": "/adapters/b"}
        await all_of_them.change_adapter("b", None)
        # the first has loaded it when the second refuses it
        with pytest.raises(EngineRefused, match="/adapters/c is not a folder"):
            await all_of_them.change_adapter("c", "/adapters/c")
        assert first.has == second.has == STARTED
        # one that is started later follows with the first word, and loads nothing twice
        await all_of_them.change_adapter("b", "/adapters/b")
        third, word = Replica(), all_of_them._adapters.now
        old, loads = word, first.loads
        for _ in range(3):
            assert [await each.adapters.follow(word) for each in (first, third)] == ["", ""]
        assert third.has == first.has
        assert (first.loads, third.loads) == (loads, 1)
        # the same name and folder again is another adapter; an older word that comes late changes nothing
        await all_of_them.change_adapter("b", None)
        await all_of_them.change_adapter("b", "/adapters/b")
        await third.adapters.follow(all_of_them._adapters.now)
        assert (first.loads, third.loads) == (loads + 1, 2)
        await third.adapters.follow(old)
        assert third.loads == 2
        # an ingress that begins anew knows what engines are started with
        await first.adapters.follow(engines()._adapters.now)
        assert first.has == STARTED
        with pytest.raises(EngineDown):
            await engines().change_adapter("b", "/adapters/b")
        old_ray = engines()
        old_ray._handle = object()
        with pytest.raises(EngineRefused, match="with this Ray adapters are those of --adapter"):
            await old_ray.change_adapter("b", "/adapters/b")

    asyncio.run(test())


def test_a_deployment_s_engine_has_an_adapter_before_it_answers(folder: Path, tmp_path: Path) -> None:
    import transformers

    write_adapter(tmp_path / "b", transformers.AutoModelForCausalLM.from_pretrained(folder), ("q_proj",), 4)

    async def asked(engine: Engine, adapters: Any) -> list[Any]:
        order = msgspec.msgpack.encode(Add(0, [5, 6, 7], {"max_tokens": 3, "ignore_eos": True}, adapter="b"))
        found = engine.answer(order, "a", kept=False, blocks=[], size=16, load=0, adapters=adapters)
        return [read(data) async for data in found]

    async def test() -> None:
        engine: Any = Engine.__new__(Engine)
        await engine.__init__({"model": str(folder), "max_adapters": 1} | ENGINE, 9.0, __version__)
        try:
            wanted = WantedAdapters(None)
            (refused,) = await asked(engine, wanted.now)
            assert refused.refused[0].reason == "the adapter is 'b'; has no adapter"
            wanted.change("b", str(tmp_path / "b"))
            assert (await asked(engine, wanted.now))[-1].news[0].finished
            wanted.change("b", None)
            await engine.keep([], wanted.now)
            await engine._following
            (refused,) = await asked(engine, None)
            assert refused.refused[0].reason == "the adapter is 'b'; has no adapter"
            wanted.change("b", str(tmp_path / "none"))
            assert "is not a folder" in await engine.change_adapters(wanted.now)
        finally:
            for task in engine._tasks:
                task.cancel()
            await engine._engine.close()

    asyncio.run(asyncio.wait_for(test(), 300))
