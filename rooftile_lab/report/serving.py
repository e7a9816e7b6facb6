"""Serves the trained Llama: the same requests in the same memory, with a paged and a contiguous KV cache.

The model is loaded from the folder that the training wrote, as a user would do: `LLM(folder)`. Prompts are pieces of its training
text. The block tables are recorded in every step; all numbers about blocks on the page are counted from them or come from the
pool. Transformers checks the answers, without a cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any, Literal, cast

import torch

from rooftile.engine.llm import LLM
from rooftile.engine.requests.output import RequestOutput
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.steps.runner import Runner
from rooftile_lab.bench.threads import one_thread
from rooftile_lab.bench.workloads import WorkloadRequest
from rooftile_lab.report.block_tables import BLOCK, Frame, Recorder, Samples
from rooftile_lab.report.plan import ServingPlan
from rooftile_lab.report.spread import spread_of
from rooftile_lab.report.training import corpus, quiet

# the spread of the log-normal distribution of answer lengths: most are short, a few long
SPREAD = 0.8
# changed answers per turn of an allocator: some ten steps
TURN = 64
# fp32 scores that differ by less differ only in the order of their sums
ROUNDING = 1e-3


@dataclass(frozen=True, kw_only=True)
class Served:
    """The results of one allocator. Averages are over steps."""

    allocator: str
    frames: tuple[Frame, ...]  # one per step
    seconds: float
    output_tokens: int
    preemptions: int  # requests that lost their blocks and were recomputed
    pace_spread: float = 0.0  # how far the turns lie apart, as in `rooftile_lab.report.spread`

    @property
    def steps(self) -> int:
        return len(self.frames)

    @property
    def tokens_s(self) -> float:
        return self.output_tokens / self.seconds

    @cached_property
    def waste(self) -> float:
        """The fraction of the slots of used blocks that hold no token."""
        return mean(frame.waste for frame in self.frames)

    @cached_property
    def saved(self) -> float:
        """The fraction of all tables' blocks that sharing saves."""
        return mean(frame.saved for frame in self.frames)

    @cached_property
    def running(self) -> float:
        """The number of answers that run at once."""
        return mean(len(frame.tables) for frame in self.frames)

    def json(self) -> dict[str, Any]:
        """Returns the numbers, without the tables."""
        return {
            "allocator": self.allocator, "steps": self.steps, "seconds": self.seconds, "output_tokens": self.output_tokens,
            "tokens_s": self.tokens_s, "waste": self.waste, "saved": self.saved, "running": self.running,
            "preemptions": self.preemptions, "pace_spread": self.pace_spread,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Agreement of Transformers with the greedy answers of the paged cache, byte by byte."""

    answers: int
    tokens: int
    agreeing: int  # tokens that Transformers would choose too
    behind: float  # the largest gap of another token's score to the best score


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """Both allocators on the same requests."""

    plan: ServingPlan
    lengths: tuple[int, ...]  # per request: prompt and one answer
    contiguous: Served
    paged: Served
    samples: Samples
    check: Check

    def json(self) -> dict[str, Any]:
        """Returns the numbers, without the tables of every step."""
        return {
            "lengths": self.lengths, "block_size": BLOCK, "contiguous": self.contiguous.json(), "paged": self.paged.json(),
            "samples": self.samples.json(),
            "check": asdict(self.check),
        }  # fmt: skip


# the matrix products here are too small for two cores
@one_thread(torch.device("cpu"))
def serve(plan: ServingPlan, folder: Path, device: str, on_step: Callable[[float, str], None]) -> Serving:
    """Serves the checkpoint in a folder, a model of bytes, with both allocators, and checks the answers. Needs transformers.

    The two take turns, so that other load on the machine affects both. Raises ArithmeticError if the answers of the paged cache
    differ from Transformers'.
    """
    on_step(0.0, "loading the trained Llama twice")
    asks = requests(plan, bytes(corpus().tolist()))
    contiguous, paged = Side(plan, folder, device, asks, "contiguous"), Side(plan, folder, device, asks, "paged")
    while (done := min(contiguous.done, paged.done)) < 1:
        on_step(0.9 * done, f"answering {len(asks)} requests, with a paged and a contiguous KV cache")
        contiguous.turn()
        paged.turn()
    on_step(0.9, "Transformers checks the answers")
    outputs = paged.outputs
    return Serving(
        plan=plan,
        lengths=tuple(len(ask.prompt) + (ask.params.max_tokens or 0) for ask in asks),
        contiguous=contiguous.served(),
        paged=paged.served(),
        samples=samples_of(paged.frames, outputs),
        check=check(folder, [output for ask, output in zip(asks, outputs, strict=True) if ask.params.greedy], device),
    )


def requests(plan: ServingPlan, text: bytes) -> list[WorkloadRequest]:
    """Returns pieces of the text as prompts, each from the beginning of a word; the same ones each time.

    The model has no end-of-text token, so the length of each answer is drawn beforehand. The allocators do not know it.
    """
    rng = Random(0)
    asks = []
    for n in range(plan.requests):
        start = text.index(b" ", rng.randrange(len(text) - 2 * plan.reserve)) + 1
        prompt = list(text[start : start + rng.randint(*plan.prompt)])
        length = min(max(round(rng.lognormvariate(math.log(plan.answer), SPREAD)), 2), plan.reserve - len(prompt))
        is_sampled = n % plan.sampled == plan.sampled // 2
        wanted = {"n": plan.samples, "temperature": 0.7, "top_k": 20, "seed": n} if is_sampled else {"temperature": 0.0}
        asks.append(WorkloadRequest(prompt, SamplingParams(max_tokens=length, **wanted)))
    return asks


class Side:
    """A run of one allocator: its engine, the answers so far, and the measurements."""

    def __init__(
        self,
        plan: ServingPlan,
        folder: Path,
        device: str,
        asks: Sequence[WorkloadRequest],
        allocator: Literal["paged", "contiguous"],
    ) -> None:
        self.allocator = allocator
        llm = LLM(
            folder, torch.float32, device, max_model_len=plan.reserve, block_size=BLOCK, num_blocks=plan.blocks,
            allocator=allocator, max_num_seqs=plan.requests * plan.samples,
        )  # fmt: skip
        prompts, params = [ask.prompt for ask in asks], [ask.params for ask in asks]
        self._device = torch.device(device)
        if self._device.type == "cuda":
            # kernels compile for new lengths, which is not part of serving
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
        self._turns_s: list[float] = []

    @property
    def done(self) -> float:
        """The fraction of the requests that are answered."""
        return sum(output.finished for output in self._outputs.values()) / self._asked

    @property
    def outputs(self) -> list[RequestOutput]:
        """Returns the answers to each request."""
        return [self._outputs[n] for n in range(self._asked)]

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Returns the block tables of each step so far."""
        return tuple(self._recorder.frames)

    def turn(self) -> None:
        """Some steps, timed."""
        began = time.perf_counter()
        self._outputs.update(islice(self._stream, TURN))
        if self._device.type == "cuda":
            # a step in flight would count towards the other's time
            torch.cuda.synchronize(self._device)
        self._turns_s.append(time.perf_counter() - began)
        self._seconds += self._turns_s[-1]

    def served(self) -> Served:
        """Returns the measurements."""
        refused = [output.error for output in self.outputs if output.error]
        assert not refused, f"the plan has a request that was refused: {refused[0]}"
        return Served(
            allocator=self.allocator,
            frames=self.frames,
            seconds=self._seconds,
            output_tokens=sum(len(one.token_ids) for output in self.outputs for one in output.outputs),
            preemptions=self._engine.scheduler.preemptions - self._preempted,
            pace_spread=spread_of(self._turns_s),
        )


def samples_of(frames: Sequence[Frame], outputs: Sequence[RequestOutput]) -> Samples:
    """Returns the request with several answers that has the longest prompt."""
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
    """Runs Transformers, with eager attention, over each greedy answer at once, and compares its choice of each token.

    If all agree, its own greedy generation would write the same. Raises ArithmeticError if a token differs by more than
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
            # a token's score is at the position before it
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
    """Decodes bytes to text; a letter may be cut at either end."""
    return bytes(ids).decode(errors="replace")
