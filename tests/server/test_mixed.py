"""Hundreds of mixed requests leave nothing behind in either process, and ten thousand leave memory flat."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import pytest

from rooftile.engine.sampling.grammar import KEPT
from tests.server.mixed import MixedServer, send_mixed


@pytest.fixture
def mixed(folder: Path, tmp_path: Path):
    with MixedServer(folder, tmp_path) as made:
        yield made


def send_and_rest(server: MixedServer, count: int, seed: int) -> None:
    seen = asyncio.run(send_mixed(server, count, seed))
    assert seen.total() == count
    assert not [status for status in seen if status >= 500], seen
    assert seen[200] > count / 2, seen
    server.post("/v1/unload_lora_adapter", lora_name="b")
    server.wait_until_idle()


# what is kept for later, up to a bound: grammars, the contents of free blocks (`SETTINGS` of the server), and timers that were
# cancelled, of which asyncio's heap has at most a hundred, or as many as others
BOUNDS = {
    "rooftile.engine.sampling.grammar.Matcher": KEPT, "rooftile.kvcache.blocks._Contents": 600, "asyncio.events.TimerHandle": 200,
}  # fmt: skip


def grown_since(before: dict[str, int], now: dict[str, int]) -> dict[str, tuple[int, int]]:
    """The classes of which there are more objects than before, and than are kept."""
    return {kind: (before.get(kind, 0), n) for kind, n in now.items() if n > max(before.get(kind, 0), BOUNDS.get(kind, 0))}


def test_every_count_returns_to_its_start(mixed) -> None:
    """A first batch makes what is made once: threads, pools, kept grammars."""
    send_and_rest(mixed, 150, 1)
    before = mixed.counts()
    send_and_rest(mixed, 300, 2)
    until = time.monotonic() + 300
    # connections that were broken off linger a little
    while any(grown := [grown_since(*each) for each in zip(before, mixed.counts(), strict=True)]):
        assert time.monotonic() < until, grown
        time.sleep(0.3)


@pytest.mark.sweep
def test_memory_is_flat_over_ten_thousand_requests(mixed) -> None:
    """Both processes, at each thousand; what responses keep has a bound of its own, and is counted as it grows."""
    sizes = []
    for thousand in range(10):
        send_and_rest(mixed, 1000, 10 + thousand)
        sizes.append([process.memory_info().rss / 2**20 for process in mixed.processes()])
        sys.stdout.write(f"{thousand + 1},000 requests: HTTP {sizes[-1][0]:.1f} MiB, engine {sizes[-1][1]:.1f} MiB\n")
    for start, end in zip(sizes[2], sizes[-1], strict=True):
        assert end < 1.05 * start + 10, sizes
