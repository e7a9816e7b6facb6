"""Says in one line which share of a model's weights is prepared or converted, and what is left out and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from rooftile.nn.converted import Converted
from rooftile.qat.prepared.layers import Prepared, parameter_of
from rooftile.qat.prepared.tensors import NamedWeight, PreparedModule, places_in

# reasons that are named, before the rest is counted together
MOST = 4


@dataclass(frozen=True, slots=True)
class Coverage:
    """The weights of a model: tensors of two axes and more.

    Args:
        numbers: of all of them, each once.
        covered: of them, in layers that are prepared or converted.
        left: by the reason: the name of the first weight that is left out, how many weights, and their numbers.
        verb: what is done to the covered ones.
    """

    numbers: int
    covered: int
    left: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    verb: str = "prepared"

    def __str__(self) -> str:
        share = self.covered / self.numbers if self.numbers else 0.0
        line = f"{self.verb}: {self.covered:,} of {self.numbers:,} weights ({share:.1%})"
        largest = sorted(self.left.items(), key=lambda one: -one[1][2])
        shown = [
            f"{numbers:,} in {reason} ({name}{f' and {count - 1} more' if count > 1 else ''})"
            for reason, (name, count, numbers) in largest[:MOST]
        ]
        shown += [f"{sum(numbers for _, (_, _, numbers) in largest[MOST:]):,} in others"] * (len(largest) > MOST)
        return line + ("; left out: " + ", ".join(shown) if shown else "")


def coverage_of(model: nn.Module, verb: str = "prepared", layers: Iterable[nn.Module] | None = None) -> Coverage:
    """Returns what of a model is prepared or converted; or, of other `layers`, which share they have."""
    covered, seen = _covered(model) if layers is None else _held_by(layers)
    left: dict[str, tuple[str, int, int]] = {}
    places = places_in(model)
    for prefix, module in model.named_modules():
        for name, x in module._parameters.items():
            if x is None or x.ndim < 2 or id(x) in seen:
                continue
            seen.add(id(x))
            whole = f"{prefix}.{name}" if prefix else name
            reason = _reason(module, name, whole, places)
            first, count, numbers = left.get(reason, (whole, 0, 0))
            left[reason] = first, count + 1, numbers + x.numel()
    total = covered + sum(numbers for _, _, numbers in left.values())
    return Coverage(total, covered, left, verb)


def _covered(model: nn.Module) -> tuple[int, set[int]]:
    """The numbers of prepared and converted weights, and the ids of their parameters."""
    seen: set[int] = set()
    total = 0
    for module in model.modules():
        held: list[Tensor] = []
        if isinstance(module, Converted):
            total += module.in_features * module.out_features
        elif isinstance(module, Prepared):
            held = [module.parameter, *([] if module.scales is None else [module.scales])]
        elif isinstance(module, PreparedModule):
            held = [tensor.parameter for tensor in module.qat_tensors.values()]
        for n, x in enumerate(held):
            # learned scales are no weights
            is_scale = isinstance(module, Prepared) and n > 0
            total += 0 if is_scale or id(x) in seen else x.numel()
            seen.add(id(x))
    return total, seen


def _held_by(layers: Iterable[nn.Module]) -> tuple[int, set[int]]:
    weights = {id(x): x.numel() for x in (parameter_of(layer) for layer in layers)}
    return sum(weights.values()), set(weights)


def _reason(module: nn.Module, name: str, whole: str, places: Mapping[str, NamedWeight]) -> str:
    kind = type(module).__name__
    if isinstance(module, nn.Embedding):
        return "embeddings"
    place = places.get(whole) or places.get(whole.removesuffix(".weight"))
    if place is not None:
        return place.kind
    if type(module) is nn.Linear:
        return "linear layers that stay"
    if isinstance(module, nn.Linear):
        return f"{kind}, a subclass of nn.Linear"
    if isinstance(module, nn.modules.conv._ConvNd):
        return "convolutions"
    return f"{kind}.{name}"
