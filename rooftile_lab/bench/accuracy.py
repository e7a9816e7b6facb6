"""Errors and times of each FP8 and INT8 recipe, against the exact result, on tensors that are hard to round."""

from __future__ import annotations

import pickle
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.exact import api, dispatch, validate
from rooftile.exact.masks import Mask
from rooftile.exact.spec import CallSettings, Options, decode
from rooftile.hardware.clock import clock_for
from rooftile.numerics.precision import PRESETS, Precision

# from the plainest to the most careful
RECIPES: dict[str, str | Precision] = {
    "native": "native",
    "fp8, a scale per tensor": Precision(granularity="tensor", incoherent=False, smooth_k=False),
    "fp8, a scale per block": Precision(incoherent=False, smooth_k=False),
    "fp8, rotated": Precision(smooth_k=False),
    "fp8": PRESETS["fp8"],
    "fp8, a scale per row": Precision(granularity="row"),
    "int8, not rotated": Precision(qk="int8", incoherent=False),
    "int8": PRESETS["int8"],
    "int8, a scale per row": Precision(qk="int8", granularity="row"),
}
# the recipe that the others are compared with
PLAINEST = "fp8, a scale per tensor"

QKV = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The errors of one recipe, means over the draws: root mean square and largest of o - exact, and the cosine of the two."""

    recipe: str
    precision: str
    rmse: float
    largest: float
    cosine: float
    better: float  # the plainest recipe's rmse over this one's, mean over the draws
    lse: float  # the largest error of lse
    time_us: float
    ran: str  # the backend


def outliers(shape: tuple[int, ...], generator: torch.Generator) -> QKV:
    """N(0, 1), with N(0, 100) added to one entry in a thousand: the test in FlashAttention-3's paper."""

    def draw() -> Tensor:
        rare = torch.rand(shape, generator=generator) < 1e-3
        return torch.randn(shape, generator=generator) + 10 * torch.randn(shape, generator=generator) * rare

    return draw(), draw(), draw()


def gaussian(shape: tuple[int, ...], generator: torch.Generator) -> QKV:
    """N(0, 1)."""
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    return q, k, v


def sink(shape: tuple[int, ...], generator: torch.Generator) -> QKV:
    """Queries that all attend to the first key: its score is about 10 above the others, and its value is nearly zero.

    It takes most of each row's weight, so the output depends on the small weights of the other keys.
    """
    q, k, v = gaussian(shape, generator)
    towards = torch.randn(shape[-1], generator=generator)
    towards = towards / towards.norm() * shape[-1] ** 0.5
    q = q + towards
    k[:, 0] = towards * 10 / shape[-1] ** 0.5
    v[:, 0] *= 0.01
    return q, k, v


DISTRIBUTIONS: dict[str, Callable[[tuple[int, ...], torch.Generator], QKV]] = {
    "outliers": outliers,
    "gaussian": gaussian,
    "sink": sink,
}


def draws(distribution: str, shape: tuple[int, ...], count: int, dtype: torch.dtype, device: torch.device) -> Iterator[QKV]:
    """The first `count` draws of a distribution, the same on every machine."""
    if distribution not in DISTRIBUTIONS:
        raise InvalidInput(f"distribution is {distribution!r}; has {', '.join(DISTRIBUTIONS)}")
    for seed in range(count):
        q, k, v = DISTRIBUTIONS[distribution](shape, torch.Generator().manual_seed(seed))
        yield q.to(device, dtype), k.to(device, dtype), v.to(device, dtype)


def saved(path: Path, device: torch.device) -> QKV:
    """Tensors q, k and v from a user's file: .safetensors, or .pt with a dictionary of tensors and nothing else."""
    if not path.is_file():
        raise InvalidInput(f"--tensors is {path}, which is no file")
    if path.suffix == ".safetensors":
        try:
            from safetensors.torch import load_file
        except ImportError:
            raise InvalidInput("reading .safetensors needs the package safetensors; pip install safetensors") from None
        found = load_file(path)
    else:
        # unpickling can run any code: only tensors are read
        try:
            found = torch.load(path, weights_only=True, map_location="cpu")
        except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError):
            raise InvalidInput(f"{path} is no file of tensors; save a dictionary of q, k and v with torch.save") from None
    missing = [name for name in ("q", "k", "v") if not isinstance(found, dict) or not isinstance(found.get(name), Tensor)]
    if missing:
        raise InvalidInput(f"{path} has no tensor {missing[0]!r}; it must hold q (B, T, H, D), k and v (B, S, Hk, D)")
    return found["q"].to(device), found["k"].to(device), found["v"].to(device)


def losses(
    inputs: Iterator[QKV], mask: Mask, say: Callable[[str], None], recipes: dict[str, str | Precision] | None = None
) -> list[Loss]:
    """The errors of each recipe on these tensors, and its time on the last of them."""
    recipes = RECIPES if recipes is None else recipes
    errors: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in recipes}
    tensors: QKV | None = None
    for number, tensors in enumerate(inputs, 1):
        q, k, v = tensors
        say(f"tensors {number}: exact")
        exact, exact_lse = _exact(q, k, v, mask)
        for name, precision in recipes.items():
            say(f"tensors {number}: {name}")
            o, lse = api.attention_with_lse(q, k, v, mask, precision=precision)
            error = o.double() - exact
            cosine = torch.nn.functional.cosine_similarity(o.double().flatten(), exact.flatten(), dim=0)
            # a row that sees nothing has -inf in both
            off = (lse - exact_lse).abs().masked_fill(exact_lse == -torch.inf, 0.0).max()
            errors[name].append((error.square().mean().sqrt().item(), error.abs().max().item(), cosine.item(), off.item()))
    if tensors is None:
        return []
    found = []
    for name, precision in recipes.items():
        say(f"time: {name}")
        rmse, largest, cosines, off_lse = (list(column) for column in zip(*errors[name], strict=True))
        plainest = [row[0] for row in errors.get(PLAINEST, errors[name])]
        time_us, ran = _time(*tensors, mask, precision)
        found.append(
            Loss(
                recipe=name,
                precision=precision if isinstance(precision, str) else precision.code,
                rmse=statistics.mean(rmse),
                largest=statistics.mean(largest),
                cosine=statistics.mean(cosines),
                better=statistics.mean(a / b if b else 1.0 for a, b in zip(plainest, rmse, strict=True)),
                lse=statistics.mean(off_lse),
                time_us=time_us,
                ran=ran,
            )
        )
    return found


# a finer recipe is named where it halves the error
WORTH_NAMING = 2.0


def advice(found: Sequence[Loss]) -> list[str]:
    """Returns a sentence for each of FP8 and INT8 whose error a scale per row makes much smaller."""
    errors = {loss.recipe: loss.rmse for loss in found}
    lines = []
    for name in ("fp8", "int8"):
        block, row = errors.get(name), errors.get(f"{name}, a scale per row")
        if block is not None and row is not None and block > WORTH_NAMING * row:
            precision = RECIPES[f"{name}, a scale per row"]
            lines.append(
                f"{name} with a scale per row has {row / block:.2g} of the error here: outliers share a block with other rows. "
                f"Write precision=rooftile.{precision!r}"
            )
    return lines


def _exact(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    return api.attention_with_lse(q.double(), k.double(), v.double(), mask)


def _time(q: Tensor, k: Tensor, v: Tensor, mask: Mask, precision: str | Precision) -> tuple[float, str]:
    """The median time of a forward in µs, and the backend that ran it."""

    def work() -> Tensor:
        return api.attention(q, k, v, mask, precision=precision)

    work()
    code = validate.spec_code(q, k, v, mask, Options(), CallSettings(deterministic=False, precision=precision))
    return statistics.median(clock_for(q.device).samples(work)), str(dispatch.select(decode(code)).NAME)
