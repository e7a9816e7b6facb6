"""The names of experts in a checkpoint, and the views of stacked parameters that tensors fill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.models.checkpoints.stored import StackedPart, StoredTensor
from rooftile.models.config import ModelConfig
from rooftile.models.experts.feed_forward import QUANTISED, ExpertFeedForward
from rooftile.moe.module import DeepSeekMoE


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """The names of a layer's experts and of what is beside them; the defaults are the most usual ones.

    Args:
        router, experts: modules of a layer.
        stacked: whether one tensor has all experts; otherwise they are numbered.
        parts: gate, up and down of an expert, or of the shared network; gate and up in one where there are two names.
        shared, shared_gate: the network that all tokens share, and what multiplies it.
        selection_bias: the bias of the choice.
        weight, bias: end the names of an expert's tensors.
    """

    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    stacked: bool = False
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"
    selection_bias: str = "mlp.gate.e_score_correction_bias"
    weight: str = ".weight"
    bias: str = ".bias"


_QWEN = ExpertNames(shared="mlp.shared_expert")
_FAMILIES = {
    "qwen3_next": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "mixtral": ExpertNames(
        router="block_sparse_moe.gate", experts="block_sparse_moe.experts", parts=("w1", "w3", "w2")
    ),
    "jamba": ExpertNames(router="feed_forward.router", experts="feed_forward.experts"),
    "nemotron_h": ExpertNames(parts=("up_proj", "down_proj")),
    "granitemoehybrid": ExpertNames(
        router="block_sparse_moe.router.layer", experts="block_sparse_moe", stacked=True, parts=("input_linear", "output_linear"),
        shared="shared_mlp",
    ),
    "gpt_oss": ExpertNames(
        router="mlp.router", stacked=True, parts=("gate_up_proj", "down_proj"), weight="", bias="_bias"
    ),
}  # fmt: skip


def expert_names_of(config: ModelConfig) -> ExpertNames:
    """Returns the names that a model's family has."""
    return _FAMILIES.get(config.family, ExpertNames())


def expert_tensors_of(layer: ExpertFeedForward | DeepSeekMoE, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields the names of a layer's experts, served or trained, and the views of parameters that tensors fill."""
    names = expert_names_of(config)
    yield f"{names.router}.weight", layer.centroids
    # a trained layer has no biases beside the choice's, and no gate of what is shared
    served = layer if isinstance(layer, ExpertFeedForward) else None
    if served is not None and served.router_bias is not None:
        yield f"{names.router}.bias", served.router_bias
    if layer.selection_bias is not None:
        yield names.selection_bias, layer.selection_bias
    plain = {name: getattr(layer, name) for name in QUANTISED if isinstance(getattr(layer, name), Tensor)}
    for name, weight in plain.items():
        if not name.startswith("shared") and not names.stacked:
            for e, one in enumerate(weight, served.first if served is not None else 0):
                yield from _parts(f"{names.experts}.{e}", names, names.weight, one, is_up=name == "up")
        else:
            module, end = (names.shared, ".weight") if name.startswith("shared") else (names.experts, names.weight)
            yield from _parts(module, names, end, weight, is_up=name.endswith("up"))
    if served is not None and served.up_bias is not None and served.down_bias is not None:
        yield from _biases(served.up_bias, served.down_bias, names)
    if served is not None and served.shared_gate is not None:
        yield f"{names.shared_gate}.weight", served.shared_gate[None]


def by_expert(found: dict[str, StoredTensor], config: ModelConfig) -> dict[str, StoredTensor]:
    """Returns stored tensors with each expert's parts as tensors of their own, where files stack all experts in one tensor.

    Transformers has (E, 2 h, d), gate rows first, and (E, d, h); Qwen3-VL's own files are transposed.

    Raises:
        InvalidInput: such a tensor has another shape.
    """
    names = expert_names_of(config)
    if config.experts is None or names.stacked or len(names.parts) < 3:
        return found
    sizes, kept, (*first, last) = config.experts, dict(found), names.parts
    for end, parts, due in (
        ("gate_up_proj", first, (sizes.experts, sizes.rows, config.hidden)),
        ("down_proj", [last], (sizes.experts, config.hidden, sizes.hidden)),
    ):
        for name in [name for name in found if name.endswith(f".{names.experts}.{end}")]:
            whole, module = kept.pop(name), name.removesuffix(f".{end}")
            shape, turned = whole.shape(), (due[0], due[2], due[1])
            if shape not in (due, turned):
                raise InvalidInput(f"{whole.name} is {shape}; due are all experts, {due} or {turned}")
            size = due[1] // len(parts)
            kept |= {
                f"{module}.{e}.{part}{names.weight}": StackedPart(
                    whole, e, slice(n * size, (n + 1) * size), transposed=shape != due
                )
                for e in range(sizes.experts)
                for n, part in enumerate(parts)
            }
    return kept


def _parts(module: str, names: ExpertNames, end: str, weight: Tensor, *, is_up: bool) -> Iterator[tuple[str, Tensor]]:
    """Yields the parts of a feed-forward's weight, or of all of them stacked."""
    parts = names.parts[:-1] if is_up else names.parts[-1:]
    for part, place in zip(parts, weight.chunk(len(parts), -2), strict=True):
        yield f"{module}.{part}{end}", place


def _biases(up: Tensor, down: Tensor, names: ExpertNames) -> Iterator[tuple[str, Tensor]]:
    """Yields the biases of experts, (E, out); every family that has some has them stacked, as its weights."""
    assert names.stacked
    *first, last = names.parts
    for part, place in zip(first, up.chunk(len(first), -1), strict=True):
        yield f"{names.experts}.{part}{names.bias}", place
    yield f"{names.experts}.{last}{names.bias}", down
