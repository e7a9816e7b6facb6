"""Ways to ask an engine that several tests share."""

from __future__ import annotations

import asyncio
import time

from rooftile.engine import LLM, AsyncEngine, RequestOutput, SamplingParams

LONG = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
# seconds: no test waits longer
SOON = 120.0


def run(main) -> None:
    """Runs a coroutine in an event loop of its own; one that hangs fails."""
    asyncio.run(asyncio.wait_for(main, SOON))


async def read(engine: AsyncEngine, prompt, params: SamplingParams) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params)]


async def at_rest(engine: AsyncEngine) -> None:
    """Waits until there is nothing to do."""
    while not engine.llm.engine.idle or engine._callers._orders:
        await asyncio.sleep(0.001)


def slowed(llm: LLM, seconds: float = 0.005) -> None:
    """Makes steps take long enough to do something meanwhile."""
    step = llm.engine.step

    def slow():
        time.sleep(seconds)
        return step()

    llm.engine.step = slow
