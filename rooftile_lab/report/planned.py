"""The plan of the report's Llama: a format for each of its products while 1, 16 and 256 answers decode at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooftile.models import Decoder
from rooftile.planning import plan
from rooftile.planning.records import KEPT_NAMES, PlannedLayer

ROWS = (1, 16, 256)
FORMATS = ("bf16", "fp8", "int8", "int4:32", "2:4")
# nats per byte that all formats together may lose
MOST_LOSS = 0.01

Say = Callable[[float, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product of the model's layers, alike in all of them.

    Args:
        name: what it computes.
        rows: answers that decode at once.
        flops, nbytes: of one call, as it is.
        time_us: measured, as it is.
        chosen: the format that each layer gives it.
        chosen_us: measured in them, as a mean.
        chosen_bytes: through memory in them, as a mean.
    """

    name: str
    rows: int
    flops: float
    nbytes: float
    time_us: float
    chosen: tuple[str, ...]
    chosen_us: float
    chosen_bytes: float

    @property
    def changes(self) -> bool:
        """Whether a layer gives it another format than its own."""
        return any(word not in KEPT_NAMES for word in self.chosen)

    @property
    def words(self) -> str:
        """The formats, each once."""
        return " or ".join(dict.fromkeys(self.chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The plans for all numbers of rows.

    Args:
        dtype: of the model as it is.
        on_gpu: whether the device is a GPU.
        ceilings: of the device, as in `rooftile.hardware.ceilings.Ceilings`.
        most_loss: that was allowed.
        products: of all plans.
        losses: of the whole model with all its formats, measured, for each number of rows.
    """

    dtype: str
    on_gpu: bool
    ceilings: dict[str, Any]
    most_loss: float
    products: tuple[Product, ...]
    losses: tuple[float, ...]


def measure(folder: Path, texts: Tensor, device: str, say: Say) -> Planned:
    """Plans the decoder of a checkpoint whose losses are those on texts (n, tokens)."""
    on_gpu = torch.device(device).type == "cuda"
    decoder = Decoder.from_folder(folder, dtype=torch.bfloat16 if on_gpu else torch.float32, device=device)
    products: list[Product] = []
    losses = []
    for n, rows in enumerate(ROWS):
        say(n / len(ROWS), f"a format for each layer at {rows} rows")
        found = plan(decoder, rows={"decode": rows}, context=texts.shape[1], data=texts, formats=FORMATS, max_loss=MOST_LOSS)
        products += products_of(found.layers, rows)
        losses.append(found.total.measured_loss)
    return Planned(
        dtype=found.layers[-1].chosen, on_gpu=on_gpu, ceilings=found.ceilings, most_loss=MOST_LOSS, products=tuple(products),
        losses=tuple(losses),
    )  # fmt: skip


def products_of(layers: Sequence[PlannedLayer], rows: int) -> list[Product]:
    """Joins the products that all layers have."""
    alike: dict[str, list[PlannedLayer]] = {}
    for layer in layers:
        alike.setdefault(_name(layer), []).append(layer)
    return [_product(name, its, rows) for name, its in alike.items()]


def _name(layer: PlannedLayer) -> str:
    """Names a product after the projections that it computes, as "q, k, v"."""
    return ", ".join(part.name.rpartition(".")[2].removesuffix("_proj").removeprefix("lm_") for part in layer.parts)


def _product(name: str, layers: Sequence[PlannedLayer], rows: int) -> Product:
    first, count = layers[0], len(layers)
    kept = first.options[0]
    return Product(
        name=name, rows=rows, flops=first.flops, nbytes=first.nbytes, time_us=kept.us, chosen=tuple(layer.chosen for layer in layers),
        chosen_us=sum(layer.choice.us for layer in layers) / count,
        chosen_bytes=first.nbytes + sum(layer.choice.nbytes for layer in layers) / count - kept.nbytes,
    )  # fmt: skip
