"""W9: twice what a server can do, with clients that vanish and requests that are nonsense."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter

import httpx
import psutil
import pytest

from rooftile.engine import SamplingParams
from tests.server.live import PATIENCE_S
from tests.server.small import KEY

# the server has places for five: two that run and three that wait
CLIENTS = 10
SHORT = {"temperature": 0, "max_tokens": 6}


class Crowd:
    """W9: twice as many clients as there are places; a fifth vanish, and one in a hundred asks for nonsense.

    Args:
        client: sends their requests.
        due: the answer to each prompt.
    """

    def __init__(self, client: httpx.AsyncClient, due: dict[str, str]) -> None:
        self.client = client
        self.due = due
        self.ends: Counter[str] = Counter()
        self._rng = random.Random(0)

    async def come(self, seconds: float) -> None:
        """Lets all clients ask again and again, for so long."""
        until = time.monotonic() + seconds

        async def one() -> None:
            while time.monotonic() < until:
                patience = self._rng.random() * 0.1 if self._rng.random() < 0.2 else None
                bad = {"n": 17} if self._rng.random() < 0.01 else {}
                self.ends[await self._ask(self._rng.choice(list(self.due)), bad, patience)] += 1
                await asyncio.sleep(self._rng.random() * 0.04)

        await asyncio.wait_for(asyncio.gather(*(one() for _ in range(CLIENTS))), seconds + PATIENCE_S)

    async def _ask(self, prompt: str, bad: dict, patience: float | None) -> str:
        streams = self._rng.random() < 0.5
        try:
            async with asyncio.timeout(patience):
                answer = await self.client.post("/v1/completions", json={"prompt": prompt, "stream": streams} | SHORT | bad)
        except TimeoutError:
            return "gone"
        if answer.status_code != 200:
            return str(answer.status_code)
        if streams:
            *events, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            assert last == "[DONE]"
            text = "".join(json.loads(each)["choices"][0]["text"] for each in events)
        else:
            text = answer.json()["choices"][0]["text"]
        assert not bad
        assert text == self.due[prompt]
        return "answered"


# a few seconds bring thousands of requests, and each of their ends hundreds of times; a minute would show a slow leak
@pytest.mark.parametrize("seconds", [5.0, pytest.param(60.0, marks=pytest.mark.sweep)])
def test_twice_what_can_be_answered(small, llm, seconds: float) -> None:
    """No hang; the excess has 429; all others have the library's answers; and afterwards all is as before."""
    prompts = [f"The roof {n}" for n in range(40)]
    outputs = llm.generate(prompts, SamplingParams(**SHORT))
    due = {prompt: output.outputs[0].text for prompt, output in zip(prompts, outputs, strict=True)}
    processes = [psutil.Process(small.process.pid), small.engine]
    before: list = []

    async def test() -> Counter[str]:
        headers = {"Authorization": f"Bearer {KEY}"}
        bounds = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=small.url, limits=bounds, timeout=300, trust_env=False, headers=headers) as client:
            crowd = Crowd(client, due)
            await crowd.come(2)
            # threads that were started for the first ones stay
            before.extend((each.num_threads(), each.memory_info().rss) for each in processes)
            await crowd.come(seconds)
            return crowd.ends

    small.wait_until_idle()
    files = [each.num_fds() for each in processes]
    ends = asyncio.run(test())
    small.wait_until_idle()
    assert set(ends) == {"answered", "429", "400", "gone"}, ends
    assert ends["429"] > 0.05 * ends.total()
    assert ends["answered"] > 0.05 * ends.total()
    until = time.monotonic() + PATIENCE_S
    while [each.num_fds() for each in processes] > files and time.monotonic() < until:
        time.sleep(0.05)
    assert [each.num_fds() for each in processes] <= files
    for process, (threads, memory) in zip(processes, before, strict=True):
        assert process.num_threads() <= threads + 4
        assert process.memory_info().rss - memory < 50e6
    # an idle engine checks its books after a second, and would have died of a leak
    time.sleep(1.2)
    assert small.complete(max_tokens=1)["choices"]
