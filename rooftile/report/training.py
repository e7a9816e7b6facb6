"""A real model, unchanged: a small Llama of Transformers, trained on the text that every Python carries.

It is trained twice from the same weights on the same batches; only the word in `attn_implementation` differs. The text is
Python's own language reference (`pydoc_data.topics`), one token a byte.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftile.bench.clock import clock_for
from rooftile.report.plan import ModelPlan
from rooftile.spec import DTYPES

BYTES = 256
# the first steps pay for warming up, and one of them for the record of memory
WARM_UP = 3
PROMPT = "The "


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run."""

    attention: str  # what attn_implementation said
    losses: tuple[float, ...]  # nats a byte, one a step
    step_ms: float  # the median step
    seconds: float  # all steps
    peak_bytes: int  # of one step, beyond what was live before it


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Both runs, and what the second model then writes."""

    parameters: int
    text_bytes: int
    runs: tuple[Run, Run]  # eager, rooftile
    prompt: str
    written: str

    @property
    def furthest_apart(self) -> float:
        """The largest difference between the two losses at one step."""
        return max(abs(a - b) for a, b in zip(*(run.losses for run in self.runs), strict=True))


def corpus() -> Tensor:
    """The text as byte values, one long row of int64."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name].strip() for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def train_twice(plan: ModelPlan, device: str, on_step: Callable[[float, str], None]) -> Training:
    """Trains with eager attention, then with Rooftile's, then lets the second model write.

    on_step is called with the share done and what comes next. Needs transformers.
    """
    import rooftile

    text = corpus().to(device)
    rooftile.enable()
    try:
        eager, _ = _train(plan, "eager", text, device, lambda n: on_step(0.5 * n / plan.steps, f"eager Llama, step {n}"))
        ours, model = _train(
            plan, "rooftile", text, device, lambda n: on_step(0.5 + 0.45 * n / plan.steps, f"Rooftile's Llama, step {n}")
        )
        on_step(0.95, "the Llama writes")
        written = write(model, PROMPT, plan.written, device)
    finally:
        rooftile.disable()
    parameters = sum(p.numel() for p in model.parameters())
    return Training(
        parameters=parameters, text_bytes=len(text), runs=(eager, ours), prompt=PROMPT, written=written
    )  # fmt: skip


def llama(plan: ModelPlan, attention: str) -> Any:
    """A Llama with random weights, the same ones each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BYTES,
            hidden_size=plan.hidden,
            intermediate_size=plan.width,
            num_hidden_layers=plan.layers,
            num_attention_heads=plan.heads,
            num_key_value_heads=max(plan.heads // 2, 1),
            max_position_embeddings=4 * plan.length,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation=attention,
        )
    )


def _train(
    plan: ModelPlan, attention: str, text: Tensor, device: str, on_step: Callable[[int], None]
) -> tuple[Run, Any]:
    model = llama(plan, attention).to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, plan.learning_rate, total_steps=plan.steps, pct_start=0.1
    )
    losses: list[Tensor] = []

    def step(batch: Tensor) -> None:
        with _autocast(plan, device):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()
        losses.append(loss.detach())

    taken, most = [], 0
    began = time.perf_counter()
    for n, batch in enumerate(batches(plan, text)):
        start = time.perf_counter()
        if n == WARM_UP - 1:
            most = clock_for(torch.device(device)).peak_bytes(lambda batch=batch: step(batch))
        else:
            step(batch)
        if device != "cpu":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
        on_step(n + 1)
    run = Run(
        attention=attention,
        losses=tuple(loss.item() for loss in losses),
        step_ms=statistics.median(taken[WARM_UP:]) * 1e3,
        seconds=time.perf_counter() - began,
        peak_bytes=most,
    )
    return run, model


def batches(plan: ModelPlan, text: Tensor) -> Iterator[Tensor]:
    """Random stretches of the text (batch, length): the same ones each time."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(plan.steps):
        starts = torch.randint(len(text) - plan.length, (plan.batch,), generator=generator)
        yield torch.stack([text[start : start + plan.length] for start in starts.tolist()])


def write(model: Any, prompt: str, count: int, device: str) -> str:
    """`count` bytes sampled after a prompt, by the model's own generate, as text."""
    ids = torch.tensor([list(prompt.encode())], device=device)
    torch.manual_seed(2)
    with torch.no_grad():
        out = model.eval().generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=True, temperature=0.7, top_k=20, pad_token_id=0
        )  # fmt: skip
    return bytes(out[0].tolist()).decode(errors="replace")[len(prompt) :]


def _autocast(plan: ModelPlan, device: str) -> contextlib.AbstractContextManager[Any]:
    if plan.dtype == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, DTYPES[plan.dtype])
