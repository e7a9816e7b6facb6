"""The trained Llama serves: the same requests in the same memory, from pages and with whole reservations.

The model comes from the folder that the training left, as a user's would: `LLM(folder)`. Prompts are pieces of the text that it
was trained on. In every step the block tables are written down; all that the page says of blocks is counted from them, or is
what the pool itself said in that step. What the answers are worth is said by Transformers, which reads them without a cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, Literal, cast

import torch

from rooftile.bench.workloads import Ask
from rooftile.report.block_tables import BLOCK, Frame, Recorder, Samples
from rooftile.report.plan import ServingPlan
from rooftile.report.training import corpus, quiet
from rooftile.serve.llm import LLM
from rooftile.serve.output import RequestOutput
from rooftile.serve.runner import Runner
from rooftile.serve.sampling.params import SamplingParams

# answers' lengths are drawn from a log-normal distribution of this spread: most are short, a few long
SPREAD = 0.8
# so many changes of an answer are a turn of one of the two: some ten steps
TURN = 64
# fp32 scores that differ by less are the same but for the order of their sums
ROUNDING = 1e-3


@dataclass(frozen=True, kw_only=True)
class Served:
    """All requests answered with one allocator. Averages are over steps."""

    allocator: str
    frames: tuple[Frame, ...]  # one a step
    seconds: float
    output_tokens: int
    preemptions: int  # requests that had to give their blocks up, and were computed again

    @property
    def steps(self) -> int:
        return len(self.frames)

    @property
    def tokens_s(self) -> float:
        return self.output_tokens / self.seconds

    @cached_property
    def waste(self) -> float:
        """The share of the slots of used blocks that hold no token."""
        return mean(frame.waste for frame in self.frames)

    @cached_property
    def saved(self) -> float:
        """The share of all tables' blocks that sharing saves."""
        return mean(frame.saved for frame in self.frames)

    @cached_property
    def running(self) -> float:
        """Answers that run at once."""
        return mean(len(frame.tables) for frame in self.frames)

    def json(self) -> dict[str, Any]:
        """The numbers, without the tables."""
        return {
            "allocator": self.allocator, "steps": self.steps, "seconds": self.seconds, "output_tokens": self.output_tokens,
            "tokens_s": self.tokens_s, "waste": self.waste, "saved": self.saved, "running": self.running,
            "preemptions": self.preemptions,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What Transformers says to the greedy answers from pages, each byte given all before it."""

    answers: int
    tokens: int
    agreeing: int  # tokens that are its own choice
    behind: float  # how far the score of any other lies below its best


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Both allocators on the same requests."""

    plan: ServingPlan
    lengths: tuple[int, ...]  # of each request: prompt and one answer
    contiguous: Served
    paged: Served
    samples: Samples
    check: Check

    def json(self) -> dict[str, Any]:
        """The numbers, without the tables of every step."""
        return {
            "lengths": self.lengths, "block_size": BLOCK, "contiguous": self.contiguous.json(), "paged": self.paged.json(),
            "samples": self.samples.json(),
            "check": asdict(self.check),
        }  # fmt: skip


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch on one core of the CPU. Its products here are too small for two.

    On cores that others use as well, threads that wait for each other take many times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def serve(plan: ServingPlan, folder: Path, device: str, on_step: Callable[[float, str], None]) -> Serving:
    """Serves the checkpoint in a folder, a model of bytes, with both allocators, and checks the answers. Needs transformers.

    The two take turns, so that whatever else the machine does meets both. Raises ArithmeticError where the answers from pages are
    not those of Transformers.
    """
    on_step(0.0, "loading the trained Llama twice")
    asks = requests(plan, bytes(corpus().tolist()))
    contiguous, paged = Side(plan, folder, device, asks, "contiguous"), Side(plan, folder, device, asks, "paged")
    while (done := min(contiguous.done, paged.done)) < 1:
        on_step(0.9 * done, f"answering {len(asks)} requests, from pages and with room reserved")
        contiguous.turn()
        paged.turn()
    on_step(0.9, "Transformers reads the answers")
    outputs = paged.outputs
    return Serving(
        plan=plan,
        lengths=tuple(len(ask.prompt) + (ask.params.max_tokens or 0) for ask in asks),
        contiguous=contiguous.served(),
        paged=paged.served(),
        samples=samples_of(paged.frames, outputs),
        check=check(folder, [output for ask, output in zip(asks, outputs, strict=True) if ask.params.greedy], device),
    )


def requests(plan: ServingPlan, text: bytes) -> list[Ask]:
    """Pieces of the text to go on from, each from the beginning of a word; the same ones each time.

    The model knows no end of a text, so how long an answer gets is drawn beforehand. The allocators are not told.
    """
    rng = Random(0)
    asks = []
    for n in range(plan.requests):
        start = text.index(b" ", rng.randrange(len(text) - 2 * plan.reserve)) + 1
        prompt = list(text[start : start + rng.randint(*plan.prompt)])
        length = min(max(round(rng.lognormvariate(math.log(plan.answer), SPREAD)), 2), plan.reserve - len(prompt))
        is_sampled = n % plan.sampled == plan.sampled // 2
        wanted = {"n": plan.samples, "temperature": 0.7, "top_k": 20, "seed": n} if is_sampled else {"temperature": 0.0}
        asks.append(Ask(prompt, SamplingParams(max_tokens=length, **wanted)))
    return asks


class Side:
    """One allocator on its way: its engine, the answers so far, and what was measured."""

    def __init__(
        self, plan: ServingPlan, folder: Path, device: str, asks: Sequence[Ask], allocator: Literal["paged", "contiguous"]
    ) -> None:
        self.allocator = allocator
        llm = LLM(
            folder, torch.float32, device, max_model_len=plan.reserve, block_size=BLOCK, num_blocks=plan.blocks,
            allocator=allocator, max_num_seqs=plan.requests * plan.samples,
        )  # fmt: skip
        prompts, params = [ask.prompt for ask in asks], [ask.params for ask in asks]
        self._device = torch.device(device)
        if self._device.type == "cuda":
            # kernels are compiled for lengths as they come: that is no part of serving
            llm.generate(prompts, params)
            llm.engine.pool.forget_prefixes()
        self._engine = llm.engine
        self._preempted = self._engine.scheduler.preemptions
        self._recorder = Recorder(self._engine)
        self._engine.runner = cast(Runner, self._recorder)
        self._stream = llm.stream(prompts, params)
        self._outputs: dict[int, RequestOutput] = {}
        self._asked = len(asks)
        self._seconds = 0.0

    @property
    def done(self) -> float:
        """The share of the requests that are answered."""
        return sum(output.finished for output in self._outputs.values()) / self._asked

    @property
    def outputs(self) -> list[RequestOutput]:
        """The answers to each request."""
        return [self._outputs[n] for n in range(self._asked)]

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The block tables of each step so far."""
        return tuple(self._recorder.frames)

    def turn(self) -> None:
        """Some steps, timed."""
        began = time.perf_counter()
        self._outputs.update(islice(self._stream, TURN))
        if self._device.type == "cuda":
            # a step that is under way would be on the other's time
            torch.cuda.synchronize(self._device)
        self._seconds += time.perf_counter() - began

    def served(self) -> Served:
        """What was measured."""
        refused = [output.error for output in self.outputs if output.error]
        assert not refused, f"the plan asks for what cannot be answered: {refused[0]}"
        return Served(
            allocator=self.allocator,
            frames=self.frames,
            seconds=self._seconds,
            output_tokens=sum(len(one.token_ids) for output in self.outputs for one in output.outputs),
            preemptions=self._engine.scheduler.preemptions - self._preempted,
        )


def samples_of(frames: Sequence[Frame], outputs: Sequence[RequestOutput]) -> Samples:
    """Of the requests with several answers, the one with the longest prompt."""
    several = [n for n, output in enumerate(outputs) if len(output.outputs) > 1]
    chosen = max(several, key=lambda n: len(outputs[n].prompt_token_ids))
    found = outputs[chosen]
    seen = ([table for table in frame.tables if table.request == chosen] for frame in reversed(frames))
    return Samples(
        prompt=_text(found.prompt_token_ids),
        answers=tuple(_text(one.token_ids) for one in found.outputs),
        tables=next(tuple(tables) for tables in seen if len(tables) == len(found.outputs)),
    )


def check(folder: Path, outputs: Sequence[RequestOutput], device: str) -> Check:
    """Has Transformers, with eager attention, read each greedy answer in one go and say which tokens it would have chosen.

    Where all agree, its own greedy generation would write the same. Raises ArithmeticError where one does not, by more than
    rounding.
    """
    from transformers import AutoModelForCausalLM

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model = model.to(device).eval()
    tokens = agreeing = 0
    behind = 0.0
    for output in outputs:
        (one,) = output.outputs
        ids = torch.tensor([output.prompt_token_ids + one.token_ids], device=device)
        with torch.no_grad():
            # the score of a token stands in the place of the one before it
            scores = model(input_ids=ids, use_cache=False).logits[0, -len(one.token_ids) - 1 : -1]
        chosen = scores.gather(1, ids[0, -len(one.token_ids) :, None])[:, 0]
        below = scores.amax(1) - chosen
        tokens += len(below)
        agreeing += int((below == 0).sum())
        behind = max(behind, below.max().item())
    if not behind <= ROUNDING:
        raise ArithmeticError(
            f"of {tokens:,} greedy bytes from pages {tokens - agreeing:,} are not the choice of Transformers, whose best score "
            f"is ahead by up to {behind:.3g}"
        )
    return Check(answers=len(outputs), tokens=tokens, agreeing=agreeing, behind=behind)


def _text(ids: Sequence[int]) -> str:
    """Bytes as text; the ends may have cut a letter in two."""
    return bytes(ids).decode(errors="replace")
