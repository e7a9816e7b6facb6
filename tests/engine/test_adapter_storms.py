"""Adapters come and go while requests run: each request ends with its own, and nothing is left over."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rooftile.engine import LLM, AsyncEngine
from rooftile.engine.adapters.adapters import LoadedAdapter
from rooftile.errors import InvalidInput
from tests.engine.asking import GREEDY, ROOM, assert_clean, prompts
from tests.engine.made_adapters import write_adapter

TARGETS, NAMES = ("q_proj", "o_proj", "down_proj"), ("a", "b", "c")


@pytest.fixture(scope="module")
def folders(peers, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        write_adapter(root / name, peers("llama").model, TARGETS, 4 * seed + 3, seed=seed)
    return {name: root / name for name in NAMES}


def answers(llm: LLM, asked: list[list[int]], adapter: str | None) -> list[list[int]]:
    outputs = llm.generate(asked, GREEDY, adapter=adapter)
    assert [output.error for output in outputs] == [None] * len(asked)
    return [output.outputs[0].token_ids for output in outputs]


def alive(kind: type) -> int:
    gc.collect()
    return sum(issubclass(type(each), kind) for each in gc.get_objects())


def test_threads_load_and_unload_while_others_ask(peers, folders: dict[str, Path]) -> None:
    """One name stands for several folders in turn: no answer may be half of one and half of another."""
    llm, asked = LLM(peers("llama").folder, max_adapters=2, max_adapter_rank=12, **ROOM), prompts(6)
    fixed = LLM(peers("llama").folder, adapters=folders, **ROOM)
    due = {name: answers(fixed, asked, name) for name in (None, *NAMES)}
    del fixed
    llm.load_adapter("a", folders["a"])
    assert answers(llm, asked, "a") == due["a"]
    llm.unload_adapter("a")
    before, over, seen = (alive(torch.Tensor), llm.engine.runner.adapters.nbytes), threading.Event(), Counter[str]()

    def change() -> None:
        rng = random.Random(1)
        for n in range(40):
            # some requests end between two changes
            while seen.total() < 2 * n and not any(each.done() for each in asking):
                time.sleep(0.001)
            name, folder = rng.choice(("x", "y")), rng.choice(NAMES)
            if name in llm.adapters:
                llm.unload_adapter(name)
            try:
                llm.load_adapter(name, folders[folder])
            except InvalidInput as error:
                seen[str(error)[:34]] += 1

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        while not over.is_set():
            name, place = rng.choice(("x", "y", None)), rng.randrange(len(asked))
            (output,) = llm.generate([asked[place]], GREEDY, adapter=name)
            if output.error is not None:
                assert output.error.startswith(f"the adapter is {name!r}; has ")
                seen["gone"] += 1
                continue
            found = [of for of in due if due[of][place] == output.outputs[0].token_ids]
            assert found, "an answer is of no adapter"
            assert (name is None) == (None in found)
            seen[f"of {found[0]}"] += 1

    with ThreadPoolExecutor(5) as pool:
        asking = [pool.submit(ask, seed) for seed in range(4)]
        changing = pool.submit(change)
        try:
            changing.result()
        finally:
            over.set()
        for each in asking:
            each.result()
    assert {f"of {name}" for name in (None, *NAMES)} <= set(seen)
    assert set(seen) <= {*(f"of {name}" for name in due), "gone", "all 2 slots for adapters are taken"}
    for name in llm.adapters:
        llm.unload_adapter(name)
    for name in ("a", "b"):
        # both slots are free again
        llm.load_adapter(name, folders[name])
        assert answers(llm, asked, name) == due[name]
        llm.unload_adapter(name)
    llm.load_adapter("a", folders["a"])
    assert_clean(llm)
    assert alive(LoadedAdapter) == 1
    assert alive(torch.Tensor) - before[0] < 20
    assert llm.engine.runner.adapters.nbytes == before[1]


def test_an_async_engine_loads_and_unloads(peers, folders: dict[str, Path]) -> None:
    llm, asked = LLM(peers("llama").folder, max_adapters=1, **ROOM), prompts(3)
    due = answers(LLM(peers("llama").folder, adapters=folders, **ROOM), asked, "b")

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            with pytest.raises(InvalidInput, match="the adapter is 'b'; has no adapter"):
                await engine.complete(asked[0], GREEDY, adapter="b")
            await engine.load_adapter("b", folders["b"])
            running = [asyncio.create_task(engine.complete(each, GREEDY, adapter="b")) for each in asked]
            while not engine.stats().running:
                await asyncio.sleep(0.001)
            await engine.unload_adapter("b")
            assert [(await each).outputs[0].token_ids for each in running] == due
            with pytest.raises(InvalidInput, match="the adapter is 'b'; has no adapter"):
                await engine.unload_adapter("b")
            with pytest.raises(InvalidInput, match="is not a folder; give one of an adapter"):
                await engine.load_adapter("b", folders["b"] / "none")
            await engine.load_adapter("c", folders["c"])
        with pytest.raises(RuntimeError, match="the engine is closed"):
            await engine.load_adapter("b", folders["b"])

    asyncio.run(asyncio.wait_for(main(), 300))
    assert [*llm.adapters] == ["c"]
    assert_clean(llm)


@contextmanager
def operators() -> Iterator[Counter[str]]:
    """Counts the operators of PyTorch that run."""
    found = Counter[str]()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found[str(func)] += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        yield found


def test_requests_without_adapters_run_no_operator_more(peers, folders: dict[str, Path]) -> None:
    """W1 has none: neither an engine with adapters nor one without computes anything for them."""
    counted = {}
    for how, settings in (("none", {}), ("loaded", {"adapters": folders})):
        llm = LLM(peers("llama").folder, **ROOM, **settings)
        answers(llm, prompts(5), None)
        llm.engine.pool.forget_prefixes()
        with operators() as counted[how]:
            answers(llm, prompts(5), None)
        llm.engine.pool.forget_prefixes()
        with operators() as counted[f"{how}, used"]:
            answers(llm, prompts(5), "a" if settings else None)
    assert counted["none"] == counted["none, used"] == counted["loaded"]
    assert counted["none"].total() > 1000
    assert counted["loaded, used"].total() > counted["loaded"].total()
