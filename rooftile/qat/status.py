"""`status`: what each prepared layer rounds to or keeps, and what that changes now."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from rooftile.drawing import notebook as shown
from rooftile.qat.coverage import Coverage, coverage_of
from rooftile.qat.prepared.described import described
from rooftile.qat.prepared.found import prepared_layers
from rooftile.qat.prepared.rounded import Rounded
from rooftile.qat.rounding.codes import inside
from rooftile.qat.sharded import whole
from rooftile.runtime.words import answers_foreign_words
from rooftile.weights.two_four import compress
from rooftile.weights.weight import dequantised


@dataclass(frozen=True, slots=True)
class LayerStatus:
    """One layer: its name, format, numbers, bytes when served, relative error by rounding and masking, share that is clipped,
    steps, and for 2:4 the share of places that changed when the mask was last chosen anew."""

    name: str
    format: str
    numbers: int
    nbytes: int
    error: float
    clipped: float
    steps: int
    flips: float | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """The prepared layers of a model, and which share of its weights they have; `print` it for a table."""

    layers: tuple[LayerStatus, ...]
    coverage: Coverage

    def __repr__(self) -> str:
        formats = ", ".join(dict.fromkeys(one.format for one in self.layers))
        numbers, nbytes = (sum(getattr(one, name) for one in self.layers) for name in ("numbers", "nbytes"))
        return f"Status({shown.counted(len(self.layers), 'layer')} in {formats}: {numbers:,} numbers, {nbytes:,} bytes)"

    def _repr_html_(self) -> str:
        rows = (
            (
                one.name, one.format, f"{one.numbers:,}", f"{one.nbytes:,}", f"{one.error:.2%}", f"{one.clipped:.2%}",
                f"{one.steps:,}", "-" if one.flips is None else f"{one.flips:.2%}",
            )
            for one in self.layers
        )  # fmt: skip
        head = ("layer", "format", "numbers", "bytes", "error", "clipped", "steps", "flips")
        return shown.card(shown.table(head, rows, words=(0, 1)))

    def __str__(self) -> str:
        width = max(len("layer"), *(len(one.name) for one in self.layers))
        words = max(9, *(len(one.format) for one in self.layers))
        heads = f"{'error':>8} {'clipped':>8} {'steps':>6} {'flips':>8}"
        lines = [f"{'layer':{width}}  {'format':{words}} {'numbers':>12} {'bytes':>12} {heads}"]
        for one in self.layers:
            flips = "-" if one.flips is None else f"{one.flips:.2%}"
            sizes = f"{one.numbers:12,} {one.nbytes:12,} {one.error:8.2%} {one.clipped:8.2%} {one.steps:6,} {flips:>8}"
            lines.append(f"{one.name:{width}}  {one.format:{words}} {sizes}")
        return "\n".join((*lines, str(self.coverage)))


@answers_foreign_words
def status(model: nn.Module) -> Status:
    """Returns what each prepared layer rounds to or keeps, and what that changes now.

    The error is the norm of what rounding and masking change over the norm of the weight; "clipped" is the share of weights that
    lie more than half a code beyond the format's numbers.

    Raises:
        InvalidInput: the model is not prepared.
    """
    return Status(tuple(_status(name, layer) for name, layer in prepared_layers(model)), coverage_of(model))


def _status(name: str, layer: Rounded) -> LayerStatus:
    w, kept = (layer.as_rows(x).detach() for x in (whole(layer.parameter).float(), layer.kept_weight()))
    clipped, masking = 0.0, layer.qat.masking
    if layer.qat.rounding is None:
        assert layer.held_mask is not None, "a weight that is not rounded is 2:4"
        nbytes, rounded = compress(kept, layer.held_mask).nbytes, kept.float()
    else:
        codes = layer.codes()
        nbytes, rounded = codes.nbytes, dequantised(codes.parts, codes.format, codes.group, codes.shape, w.dtype)
        clipped = 1.0 - inside(kept, codes).float().mean().item()
    size = w.norm().item()
    error = (rounded - w).norm().item() / size if size else 0.0
    flips = None if masking is None else 0.0 if masking.flips is None else masking.flips.item()
    return LayerStatus(name, described(layer.qat), w.numel(), nbytes, error, clipped, layer.qat.steps, flips)
