"""The experiment on training for a format: a small Llama, rounded after training and trained with rounded weights.

A model learns Python's own documentation in full precision. Copies of it then take the same further steps on the same batches: one in
full precision, which is rounded after them, and one for each format with rounded weights. All losses are on held-out text. The models of
one format are also written as checkpoints and read by `rooftile.LLM`, whose own loss is measured. The model in full precision is planned.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from rooftile import qat
from rooftile.engine import LLM, SamplingParams
from rooftile.models import TrainableDecoder
from rooftile_lab.bench.learning.english import English
from rooftile_lab.bench.learning.formats import Plan as Study
from rooftile_lab.bench.learning.formats import decoder_of, take_steps
from rooftile_lab.bench.learning.study import loss_of
from rooftile_lab.bench.learning.training import autocast
from rooftile_lab.bench.threads import one_thread
from rooftile_lab.report import planned
from rooftile_lab.report.plan import Plan

# the format whose curves are drawn and whose models are served, and all formats
PICTURED = "int4:row"
FORMATS = ("int8", "fp8", "int4:32", PICTURED, "mxfp4", "nvfp4")
# texts whose losses are measured for each layer in each format
PLANNED_ON = 8
# losses of a curve
READINGS = 8

FULL = Study(
    hidden=128, heads=4, layers=2, ffn=384, length=128, batch=8, steps=320, rate=3e-3, further_steps=64, further_rate=1e-3, tests=24,
)  # fmt: skip
SMALL = Study(
    hidden=32, heads=2, layers=1, ffn=64, length=24, batch=2, steps=8, rate=3e-3, further_steps=8, further_rate=1e-3, tests=2,
)  # fmt: skip

Losses = tuple[tuple[int, float], ...]  # steps, nats per byte
Say = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One format: the bytes of the model, and its loss rounded and trained."""

    format: str
    nbytes: int
    rounded: float
    trained: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Losses in nats per byte of held-out text."""

    parameters: int
    nbytes: int  # bytes of the model in full precision
    steps: int  # before the copies part
    full: Losses  # the model that goes on in full precision
    rounded: Losses  # the same, rounded to `pictured` at each reading
    trained: Losses  # the model that is trained with rounded weights
    pictured: str
    served_rounded: float  # by `rooftile.LLM`, from the checkpoint of the rounded model
    served_trained: float
    costs: tuple[Cost, ...]
    planned: planned.Planned  # the model in full precision

    @property
    def continued(self) -> float:
        """The loss in full precision at the end."""
        return self.full[-1][1]


def measure(plan: Plan, device: str, say: Say) -> Formats:
    """Trains and rounds the models."""
    target = torch.device(device)
    with one_thread(target):
        return _Experiment(SMALL if plan.is_quick else FULL, target, say).run()


class _Experiment:
    def __init__(self, study: Study, device: torch.device, say: Say) -> None:
        self.study, self.device, self.say = study, device, say
        self.text = English.read(device)

    def run(self) -> Formats:
        study = self.study
        torch.manual_seed(0)
        # a prompt of the engine is a piece and the token after it
        base = decoder_of(study, study.length + 2, self.device)
        self.say(0.0, f"a Llama learns, {study.steps} steps")
        take_steps(base, study.steps, study.rate, study, self.text, 1, self.device)
        continued = copy.deepcopy(base)
        full, rounded = [(0, self.loss(base))], [(0, self.rounded(base, PICTURED))]
        self.say(0.3, f"{study.further_steps} further steps in full precision")

        def read(steps: int) -> None:
            full.append((steps, self.loss(continued)))
            rounded.append((steps, self.rounded(continued, PICTURED)))

        self._go_on(continued, read)
        served_rounded = self.served(qat.prepare(continued, PICTURED, skip=("head",), verbose=False))
        qat.restore(continued)
        costs, trained, served_trained = [], [(0, rounded[0][1])], 0.0
        for n, format in enumerate(FORMATS):
            self.say(0.4 + 0.5 * n / len(FORMATS), f"{study.further_steps} further steps in {format}")
            model = qat.prepare(copy.deepcopy(base), format, skip=("head",), verbose=False)
            self._go_on(model, self._readings(model, trained) if format == PICTURED else lambda steps: None)
            if format == PICTURED:
                served_trained = self.served(model)
            rounded_loss, trained_loss = self.rounded(continued, format), self.loss(model)
            costs.append(Cost(format=format, nbytes=bytes_of(model), rounded=rounded_loss, trained=trained_loss))
        return Formats(
            parameters=sum(p.numel() for p in base.parameters()), nbytes=sum(p.nbytes for p in base.parameters()),
            steps=study.steps, full=self._after(full), rounded=self._after(rounded), trained=self._after(trained), pictured=PICTURED,
            served_rounded=served_rounded, served_trained=served_trained, costs=tuple(costs),
            planned=self.planned(continued),
        )  # fmt: skip

    def _readings(self, model: TrainableDecoder, curve: list[tuple[int, float]]) -> Callable[[int], None]:
        return lambda steps: curve.append((steps, self.loss(model)))

    def _after(self, curve: Sequence[tuple[int, float]]) -> Losses:
        """Counts the steps from the beginning."""
        return tuple((self.study.steps + steps, loss) for steps, loss in curve)

    def _go_on(self, model: TrainableDecoder, read: Callable[[int], None]) -> None:
        """Takes the further steps, with readings in between and at the end."""
        every = max(self.study.further_steps // READINGS, 1)

        def after(steps: int) -> None:
            if steps % every == 0 or steps == self.study.further_steps:
                read(steps)

        study = self.study
        take_steps(model, study.further_steps, study.further_rate, study, self.text, 2, self.device, after)

    def loss(self, model: TrainableDecoder) -> float:
        """Returns the loss on held-out text, as the model is now."""
        tokens, targets = self.text.tests(self.study.tests, self.study.length)
        with torch.no_grad(), autocast(self.device):
            return loss_of(model(tokens), targets)

    def rounded(self, model: TrainableDecoder, format: str) -> float:
        """Returns the loss on held-out text with rounded weights."""
        qat.prepare(model, format, skip=("head",), verbose=False)
        try:
            return self.loss(model)
        finally:
            qat.restore(model)

    def planned(self, model: TrainableDecoder) -> planned.Planned:
        """Plans the model, with its losses on some of the held-out text."""
        tokens, targets = self.text.tests(min(PLANNED_ON, self.study.tests), self.study.length)
        with TemporaryDirectory() as name:
            model.save(name)
            texts = torch.cat([tokens, targets[:, -1:]], 1)
            return planned.measure(Path(name), texts, str(self.device), lambda share, words: self.say(0.9 + 0.1 * share, words))

    def served(self, model: TrainableDecoder) -> float:
        """Returns the loss that the engine has on the same text, from the checkpoint that is written."""
        tokens, targets = self.text.tests(self.study.tests, self.study.length)
        with TemporaryDirectory() as name:
            folder = Path(name) / "model"
            qat.save(model, folder)
            return served_loss(folder, tokens, targets, self.device)


def served_loss(folder: Path, tokens: Tensor, targets: Tensor, device: torch.device) -> float:
    """Returns the mean loss of `targets` (n, length) after `tokens`, from the log probabilities that an engine gives of its prompts."""
    prompts = torch.cat([tokens, targets[:, -1:]], 1).tolist()
    llm = LLM(folder, device=str(device), num_blocks=16 * len(prompts), max_num_seqs=len(prompts))
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    total = 0.0
    for output in llm.generate(prompts, params):
        assert output.prompt_logprobs is not None
        for token, found in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            assert found is not None
            total -= found[token].logprob
    # the engine's memory is free for the next one
    del llm
    gc.collect()
    return total / targets.numel()


def bytes_of(model: TrainableDecoder) -> int:
    """Returns the bytes of a prepared model as it is stored."""
    saved = {one.name: one.nbytes for one in qat.status(model).layers}
    return sum(saved.values()) + sum(
        p.nbytes for name, p in model.named_parameters() if name.removesuffix(".weight") not in saved
    )
