"""Trains an unmodified model: a small Llama of Transformers, on a text that is part of every Python.

It is trained twice from the same weights on the same batches, with the default of Transformers, PyTorch's SDPA; in the second run
`rooftile.enable()` puts Rooftile behind it. The text is
Python's own language reference (`pydoc_data.topics`), one token per byte.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooftile.exact.spec import DTYPES
from rooftile.hardware.clock import clock_for
from rooftile_lab.bench.learning.english import BYTES
from rooftile_lab.bench.learning.english import corpus as corpus
from rooftile_lab.report.plan import ModelPlan
from rooftile_lab.report.spread import spread_of

# the first steps warm up, and one of them measures memory
WARM_UP = 3
PROMPT = "The "


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run."""

    attention: str  # "sdpa" or "rooftile"
    losses: tuple[float, ...]  # nats per byte, one per step
    step_ms: float  # the median step
    peak_bytes: int  # during one step, beyond the memory in use before it
    step_spread: float = 0.0  # as in `rooftile_lab.report.spread`


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Both runs, and a text written by the second model."""

    parameters: int
    text_bytes: int
    runs: tuple[Run, Run]  # sdpa, rooftile
    prompt: str
    written: str


def train_twice(plan: ModelPlan, device: str, folder: Path, on_step: Callable[[float, str], None]) -> Training:
    """Trains both models in turns, step by step, so that other load affects both; then the second writes.

    The second is saved in the folder as a checkpoint. The training stops early if the plan's time limit is reached. on_step is
    called with the fraction done and the next step. Needs transformers.
    """
    text = corpus().to(device)
    began = time.monotonic()
    students = [Student(plan, attention, device) for attention in ("sdpa", "rooftile")]
    for n, batch in enumerate(batches(plan, text)):
        if n > WARM_UP + 1 and time.monotonic() - began > plan.patience:
            break
        on_step(0.95 * n / plan.steps, f"training two Llamas, step {n + 1} of {plan.steps}")
        students[0].learn(batch)
        with in_force(device):
            students[1].learn(batch)
    on_step(0.95, "the Llama writes")
    with in_force(device):
        written = write(students[1].model, PROMPT, plan.written, device)
    with quiet():
        students[1].model.save_pretrained(folder)
    return Training(
        parameters=sum(p.numel() for p in students[0].model.parameters()),
        text_bytes=len(text),
        runs=(students[0].run(), students[1].run()),
        prompt=PROMPT,
        written=written,
    )


@contextmanager
def in_force(device: str) -> Iterator[None]:
    """Puts Rooftile behind SDPA, for one model's turn.

    On a CPU its tiles are named, because the automatic choice there may be PyTorch's own kernel.
    """
    import rooftile

    rooftile.enable(backend="tiled" if device == "cpu" else None)
    try:
        yield
    finally:
        rooftile.disable()


@contextmanager
def quiet() -> Iterator[None]:
    """Hides the progress bars of Transformers, because the report has its own progress line."""
    from transformers.utils import logging

    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if had_bars:
            logging.enable_progress_bar()


def llama(plan: ModelPlan) -> Any:
    """Builds a Llama with random weights, the same ones each time."""
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
            # a small model learns faster from weights of about 1 / sqrt(hidden)
            initializer_range=plan.hidden**-0.5,
            bos_token_id=None,
            eos_token_id=None,
            attn_implementation="sdpa",
        )
    )


class Student:
    """A model in training: its weights, its optimiser, and the measurements."""

    def __init__(self, plan: ModelPlan, attention: str, device: str) -> None:
        self.attention = attention
        self.device = torch.device(device)
        self.dtype = DTYPES[plan.dtype]
        self.model = llama(plan).to(device)
        rate = plan.learning_rate
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimiser, rate, total_steps=plan.steps, pct_start=0.1)
        self.losses: list[Tensor] = []
        self.taken_ms: list[float] = []
        self.peak_bytes = 0

    def learn(self, batch: Tensor) -> None:
        """Runs one measured step: its time, or in one early step its peak memory."""
        if len(self.losses) == WARM_UP - 1:
            self.peak_bytes = clock_for(self.device).peak_bytes(lambda: self._step(batch))
            return
        start = time.perf_counter()
        self._step(batch)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if len(self.losses) > WARM_UP:
            self.taken_ms.append((time.perf_counter() - start) * 1e3)

    def _step(self, batch: Tensor) -> None:
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.schedule.step()
        self.optimiser.zero_grad()
        self.losses.append(loss.detach())

    def run(self) -> Run:
        """Returns the measurements. Raises ArithmeticError if the loss is not finite."""
        losses = tuple(loss.item() for loss in self.losses)
        if not all(map(math.isfinite, losses)):
            raise ArithmeticError(f"the loss with {self.attention} attention is not finite after {len(losses)} steps")
        return Run(
            attention=self.attention,
            losses=losses,
            step_ms=statistics.median(self.taken_ms),
            peak_bytes=self.peak_bytes,
            step_spread=spread_of(self.taken_ms),
        )


def batches(plan: ModelPlan, text: Tensor) -> Iterator[Tensor]:
    """Yields random pieces of the text (batch, length), the same ones each time."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(plan.steps):
        starts = torch.randint(len(text) - plan.length, (plan.batch,), generator=generator)
        yield torch.stack([text[start : start + plan.length] for start in starts.tolist()])


def write(model: Any, prompt: str, count: int, device: str) -> str:
    """Samples `count` bytes after a prompt with the model's own generate, and returns them as text."""
    ids = torch.tensor([list(prompt.encode())], device=device)
    torch.manual_seed(2)
    with torch.no_grad():
        out = model.eval().generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=True, temperature=0.7, top_k=20, pad_token_id=0
        )  # fmt: skip
    # the last letter may be incomplete
    return bytes(out[0].tolist()).decode(errors="replace")[len(prompt) :].rstrip("\N{REPLACEMENT CHARACTER}")
