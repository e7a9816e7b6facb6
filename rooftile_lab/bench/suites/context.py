"""Memory and time per token against the length of the context, of a small model with attention, a recurrence, or both.

    attention    attention in all layers
    hybrid       Mamba-2 in all layers but two, which attend
    mamba2       Mamba-2 in all layers

The three have equally many parameters, to a percent, and random weights; `rooftile.LLM` serves them one after another. In the
case `context-N` a batch of prompts of N tokens is read and then written on.

    read     the time of reading a prompt, without the first one, over its tokens: `read_us`
    write    the time of a step in which all write, over their number: `write_us`

`sequence_bytes` is what the caches hold for one sequence at this length: blocks of keys and values in use, and states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from time import perf_counter

import torch

from rooftile.cost.session import Session
from rooftile.engine.engine import Engine
from rooftile.engine.llm import LLM
from rooftile.engine.requests.request import Request
from rooftile.engine.sampling.params import SamplingParams
from rooftile.models import Decoder, Mamba2Sizes, ModelConfig
from rooftile.models.rotary import Rotary
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import figures, timed_row
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.works import tidy, words_of_error

MODELS = ("attention", "hybrid", "mamba2")
GPU, CPU, QUICK = MODELS, MODELS, MODELS
BLOCK = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The sizes of the models and of what they read and write."""

    layers: int
    hidden: int
    head_dim: int
    group: int  # query heads per key head
    ffn: int  # the width of the feed-forward beside attention
    state_size: int  # N of Mamba-2
    vocab_size: int
    contexts: tuple[int, ...]
    batch: int
    steps: int  # tokens that each answer is timed for

    @property
    def heads(self) -> int:
        return self.hidden // self.head_dim

    def answer(self, context: int) -> int:
        """The most tokens of an answer: the first answers go on while the last prompts are read, some thousands per step."""
        return self.steps + 32 + self.batch * (context // 4096)

    @property
    def longest(self) -> int:
        """The longest sequence in tokens, prompt and answer together."""
        return max(self.contexts) + self.answer(max(self.contexts))


PLANS = {
    "cuda": Plan(
        layers=12, hidden=1024, head_dim=64, group=4, ffn=3072, state_size=128, vocab_size=32_000,
        contexts=tuple(1024 * 2**n for n in range(8)), batch=4, steps=24,
    ),
    "cpu": Plan(
        layers=4, hidden=64, head_dim=16, group=2, ffn=192, state_size=32, vocab_size=256,
        contexts=(256, 512, 1024, 2048), batch=2, steps=8,
    ),
}  # fmt: skip


def measure(session: Session, names: Sequence[str], say: Progress, plan: Plan | None = None) -> Iterator[Row]:
    """Two rows for each model and length: of reading and of writing. By default the plan is the device's."""
    plan = plan or PLANS[session.device.type]
    for name in names:
        try:
            yield from _rows(session, name, plan, say)
        except Exception as error:
            # a model that fails should not end the study
            reason = f"failed: {words_of_error(error, 600)}"
            say(f"{name} {reason}")
            yield timed_row(session, [], suite="context", case="context", backend=name, phase="write", reason=reason)
        tidy(session.device)


def config_of(name: str, plan: Plan, dtype: torch.dtype = torch.float32) -> ModelConfig:
    """The configuration of a model; its feed-forward is as wide as leaves it the parameters of attention's model."""
    layers = plan.layers
    # attention in the middle of both halves
    attending = {"attention": range(layers), "hybrid": (layers // 4, layers - 1 - layers // 4), "mamba2": ()}[name]
    mixers = tuple("attention" if n in attending else "mamba2" for n in range(layers))
    config = ModelConfig(
        family="rooftile", vocab_size=plan.vocab_size, layers=layers, hidden=plan.hidden, heads=plan.heads,
        kv_heads=plan.heads // plan.group, head_dim=plan.head_dim, ffn=plan.ffn, max_len=plan.longest,
        scale=plan.head_dim**-0.5, windows=(None,) * layers, rotary=Rotary(dim=plan.head_dim), mixers=mixers,
        mamba2=Mamba2Sizes(heads=2 * plan.heads, head_dim=plan.head_dim, state=plan.state_size) if "mamba2" in mixers else None,
        dtype=dtype,
    )  # fmt: skip
    if name == "attention":
        return config
    surplus = parameters(config) - parameters(config_of("attention", plan))
    # tensor cores want widths that are multiples of many numbers
    step = max(plan.hidden // 16, 1)
    return replace(config, ffn=plan.ffn - step * round(surplus / (3 * plan.hidden * layers * step)))


def parameters(config: ModelConfig) -> int:
    """The number of a model's parameters."""
    return sum(x.numel() for x in Decoder(config, dtype=config.dtype, device="meta").parameters())


def _rows(session: Session, name: str, plan: Plan, say: Progress) -> Iterator[Row]:
    config = config_of(name, plan, torch.bfloat16 if session.device.type == "cuda" else torch.float32)
    say(f"{name}: starting an engine")
    llm = LLM(
        Decoder.random(config, config.dtype, session.device), max_model_len=plan.longest, max_num_seqs=plan.batch,
        num_blocks=(plan.batch + 1) * (plan.longest // BLOCK + 2), block_size=BLOCK, enable_prefix_caching=False, seed=0,
    )  # fmt: skip
    settings = {
        "parameters": parameters(config), "batch": plan.batch, "attending_layers": config.mixers.count("attention"),
        "cache": f"{llm.caches}",
    }  # fmt: skip
    problem = f"{plan.layers} layers of {plan.hidden}, {plan.heads} heads in groups of {plan.group}, batch {plan.batch}"
    for context in plan.contexts:
        say(f"{name}: a context of {context:,} tokens")
        read, written, nbytes = _timed(llm, plan, context)
        measures = {"context_tokens": context, "sequence_bytes": figures(nbytes)}
        for phase, samples, tokens in (("read", read, context), ("write", written, plan.batch)):
            more = {f"{phase}_us": figures(median(samples) / tokens)}
            yield timed_row(
                session, samples, dtype=session.dtype, suite="context", case=f"context-{context}", backend=name, phase=phase,
                problem=problem, measures=measures | more, settings=settings,
            )  # fmt: skip


def _timed(llm: LLM, plan: Plan, context: int) -> tuple[list[float], list[float], float]:
    """Microseconds of each prompt but the first, microseconds of each step of writing, and the bytes of a sequence."""
    engine, rng = llm.engine, Random(context)
    wanted = SamplingParams(max_tokens=plan.answer(context), temperature=0, ignore_eos=True)
    requests: list[Request] = []
    read, written = [], []
    try:
        for _ in range(plan.batch):
            prompt = [rng.randrange(plan.vocab_size) for _ in range(context)]
            began = perf_counter()
            requests.append(engine.add(prompt, wanted))
            while not requests[-1].answers[0].generated:
                engine.step()
            read.append(1e6 * (perf_counter() - began))
        for _ in range(4):
            engine.step()
        for _ in range(plan.steps):
            began = perf_counter()
            engine.step()
            written.append(1e6 * (perf_counter() - began))
        # an answer that has ended has given back what it held
        assert all(request.live for request in requests)
        nbytes = _sequence_bytes(llm, plan.batch)
    finally:
        _leave(engine, requests)
    # kernels of the first prompt may be compiled for its length
    return read[1:] or read, written, nbytes


def _leave(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.abort(request)
    while not engine.idle:
        engine.step()


def _sequence_bytes(llm: LLM, batch: int) -> float:
    pages, states = llm.pages, llm.caches.states
    blocks = llm.engine.pool.used_blocks / batch * pages.nbytes / llm.engine.pool.total
    return blocks + (0 if states is None else sum(x[:, :1].nbytes for x in states.memory.values()))
