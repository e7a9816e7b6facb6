"""Work that one client can make long has a lower priority than the answers of others."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path

import pytest

from rooftile.engine.loop import pauses
from rooftile.server.http.texts import Texts
from tests.server.live import Server

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a priority per thread")


def priorities(pid: int | str) -> dict[int, int]:
    """Returns the nice value of each thread of a process."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        found[int(folder.name)] = int(fields[16])
    return found


def test_only_the_thread_that_asks_gives_way() -> None:
    seen = {}

    def work() -> None:
        pauses.give_way()
        seen.update(priorities_of_this_process())

    def priorities_of_this_process() -> dict[int, int]:
        found = priorities("self")
        return {"here": found[threading.get_native_id()], "main": found[threading.main_thread().native_id]}

    before = priorities_of_this_process()["main"]
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == {"here": pauses.NICE, "main": before}


def test_long_texts_and_grammars_give_way_to_answers(server: Server) -> None:
    server.complete(max_tokens=2, structured_outputs={"regex": "[ab]{2}"})
    assert server.post("/tokenize", prompt="a " * 20_000).json()["count"] >= 20_000
    api, engine = server.process.pid, server.engine.pid
    for pid in (api, engine):
        found = priorities(pid)
        assert found.pop(pid) == os.nice(0), "the thread that answers has lost its priority"
        assert pauses.NICE in found.values()


def test_the_tokenizer_is_loaded_in_a_thread_that_ends(folder) -> None:
    texts = asyncio.run(Texts.load(str(folder)))
    try:
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("loader")] == []
        assert asyncio.run(texts.encode("a b"))
    finally:
        texts.close()
