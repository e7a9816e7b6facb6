"""Whole training steps of a Llama of Transformers that is prepared for a format, beside the same in 16 bits and torchao's.

    bf16                    the model that all others are compared with, in the session's dtype
    int4, fp8, 2:4, ...     `rooftile.qat.prepare`
    torchao-...             torchao's QATConfig, eager and compiled: INT4 weights in groups of 32; FP8 weights and activations
                            with a scale per row; INT8 weights with a scale per row, and activations with a scale and a zero
                            point per row

All of them have our attention, `rt.fuse` and `rooftile.optim.AdamW`, the same first weights and the same tokens. A step is
forward, backward and AdamW. The model in 16 bits stays, and each contestant takes turns with it alone, because not all find
room together.

    step_ratio     the median step over the step of 16 bits in the same turns: below 1 is faster
    memory_ratio   the most memory of a step, weights and states included, over 16 bits'
    tok_s          tokens per second
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from rooftile import qat
from rooftile.cost.session import Session
from rooftile.weights.two_four import Recipe as Sparsity
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import figures, timed_row
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.suites.training import PHASES, Student
from rooftile_lab.bench.training_models import RECIPES, Recipe, batch_of
from rooftile_lab.bench.works import tidy

GPU = ("llama-1b-8x4k",)
CPU = ("tiny-llama-2x64",)
QUICK = GPU
BASE = "bf16"
# the arguments of `rooftile.qat.prepare`
PREPARED: Mapping[str, Mapping[str, Any]] = {
    "int4": {"format": "int4:32"}, "int4-clip": {"format": "int4:32", "estimator": "clip"}, "int8": {"format": "int8"},
    "fp8": {"format": "fp8"}, "mxfp4": {"format": "mxfp4"}, "2:4": {"format": None, "sparsity": Sparsity()},
    "2:4-transposable": {"format": None, "sparsity": Sparsity(transposable=True)},
    "int4-2:4": {"format": "int4:32", "sparsity": Sparsity()},
}  # fmt: skip
TORCHAO = ("int4", "int8", "fp8")
CONTESTANTS = (*PREPARED, *(f"torchao-{format}{how}" for format in TORCHAO for how in ("", "-compiled")))


class Trainee(Student):
    """A model with our attention and fused operations, prepared for a format, and the memory that it holds and needs."""

    def __init__(self, name: str, recipe: Recipe, session: Session, batch: dict[str, Tensor]) -> None:
        before = _allocated(session.device)
        super().__init__("fused", recipe, session, batch)
        prepare(self.model, name)
        self.train(3)
        self.forget()
        self.held_bytes = _allocated(session.device) - before

    @property
    def most_bytes(self) -> int | None:
        """The most memory of a step, with weights and states; None on a CPU."""
        return None if self.peak_bytes is None else self.held_bytes + self.peak_bytes


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """Rows for each case, contestant and phase."""
    for name in names:
        yield from _case(session, name, RECIPES[name], say)


def _case(session: Session, name: str, recipe: Recipe, say: Progress) -> Iterator[Row]:
    batch = batch_of(recipe, session.device)
    say(f"{name}: {BASE}, the first steps")
    base = Trainee(BASE, recipe, session, batch)
    base.train(recipe.steps)
    yield from _rows(session, name, recipe, BASE, base, base)
    for contestant in CONTESTANTS:
        reason, trainee = lack_of(contestant), None
        if not reason:
            try:
                trainee = Trainee(contestant, recipe, session, batch)
                say(f"{name}: {contestant}, {recipe.rounds} rounds")
                _take_turns(base, trainee, recipe)
            except RuntimeError as error:
                # a peer that fails, also in its compiler, says so in its row; of ours only memory may run out
                if not contestant.startswith("torchao") and not isinstance(error, torch.OutOfMemoryError):
                    raise
                reason, trainee = f"refused: {type(error).__name__} ({str(error).splitlines()[0][:120]})", None
        yield from _rows(session, name, recipe, contestant, trainee, base, reason)
        trainee = None
        tidy(session.device)


def _take_turns(base: Trainee, trainee: Trainee, recipe: Recipe) -> None:
    base.forget()
    for turn in range(recipe.rounds):
        # back and forth: a chip clocks lower after a busy neighbour
        for one in (base, trainee)[:: -1 if turn % 2 else 1]:
            one.train(recipe.steps)


def _rows(
    session: Session, case: str, recipe: Recipe, name: str, trainee: Trainee | None, base: Trainee, reason: str = ""
) -> Iterator[Row]:  # fmt: skip
    tokens = recipe.batch * recipe.length
    for phase in PHASES:
        taken = [] if trainee is None else trainee.taken[phase]
        measures: dict[str, float] = {}
        if taken:
            ratio = median(taken) / median(base.taken[phase])
            measures = {"step_ratio": figures(ratio), "tok_s": figures(tokens / median(taken) * 1e6)}
        most = None if trainee is None else trainee.most_bytes
        if most is not None and base.most_bytes:
            measures["memory_ratio"] = figures(most / base.most_bytes)
        yield timed_row(
            session, taken, dtype=session.dtype, suite="prepared", case=case, backend=name, phase=phase,
            problem=f"{recipe.family}, batch {recipe.batch} x {recipe.length}", measures=measures, peak_bytes=most,
            reason=reason, settings={"tokens": tokens, "dropout": 0.0},
        )  # fmt: skip


def lack_of(contestant: str) -> str:
    """Says why a contestant is not run; nothing if it is."""
    if not contestant.startswith("torchao"):
        return ""
    if find_spec("torchao") is None:
        return "refused: torchao is not installed"
    try:
        import_module("torchao.quantization.qat")
    # whatever stops the library is the reason: it may be for another PyTorch
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"refused: torchao does not load ({str(error).splitlines()[0][:120]})"
    return ""


def prepare(model: nn.Module, contestant: str) -> None:
    """Prepares the linear layers of a model but its head."""
    if contestant in PREPARED:
        qat.prepare(model, **PREPARED[contestant], verbose=False)
    elif contestant != BASE:
        _, format, *compiled = contestant.split("-")
        _prepare_by_torchao(model, format)
        if compiled:
            model.compile()


def _prepare_by_torchao(model: nn.Module, format: str) -> None:
    """Prepares a model by torchao 0.18. It has no symmetric scales per row of INT8 activations."""
    ao, its = import_module("torchao.quantization"), import_module("torchao.quantization.qat")
    if format == "int4":
        config = its.QATConfig(
            # PyTorch's types do not name it
            weight_config=its.IntxFakeQuantizeConfig(getattr(torch, "int4"), group_size=32, is_symmetric=True), step="prepare",  # noqa: B009
        )  # fmt: skip
    elif format == "int8":
        config = its.QATConfig(
            activation_config=its.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False),
            weight_config=its.IntxFakeQuantizeConfig(torch.int8, "per_channel", is_symmetric=True), step="prepare",
        )  # fmt: skip
    else:
        both = its.Float8FakeQuantizeConfig()
        config = its.QATConfig(activation_config=both, weight_config=both, step="prepare")
    ao.quantize_(model, config, filter_fn=lambda layer, name: type(layer) is nn.Linear and "lm_head" not in name)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
