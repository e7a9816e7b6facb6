"""The call `experts`: from what a caller gives to checked rows, and back."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.moe.activations import ACTIVATIONS, halves
from rooftile.moe.operator import BACKENDS, run_experts
from rooftile.moe.problem import ELSEWHERE, Options, QuantisedWeights, Weights
from rooftile.moe.quantised import experts_in
from rooftile.moe.routing import Routing, is_deterministic
from rooftile.runtime.arguments import check_backend, check_choice, check_deterministic, check_flag, shown
from rooftile.runtime.operators import mapped
from rooftile.runtime.tensors import autocast
from rooftile.runtime.words import answers_foreign_words
from rooftile.weights import QuantisedWeight

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@answers_foreign_words
def experts(
    u: Tensor,  # (..., d)
    routing: Routing,
    up: Tensor | QuantisedWeight,  # (E, 2 h, d)
    down: Tensor | QuantisedWeight,  # (E, d, h)
    *,
    activation: str = "silu",
    backend: str | None = None,
    deterministic: bool | None = None,
    down_bias: Tensor | None = None,  # (E, d)
    shared_down: Tensor | QuantisedWeight | None = None,  # (d, s)
    shared_gate: Tensor | None = None,  # (d,)
    shared_up: Tensor | QuantisedWeight | None = None,  # (2 s, d)
    up_bias: Tensor | None = None,  # (E, 2 h)
    validate: bool = False,
) -> Tensor:
    """The sum over each token's experts of gate times down_i act(up_i u), plus a network that all tokens share.

    No token is dropped, whatever the load of an expert. Products are in the dtype of the tensors, under autocast in autocast's;
    activations, gates and the sum over experts are in fp32 (fp64 for fp64). Gradients flow to tokens, gates and weights. Nothing
    waits for a device to count tokens.

    Args:
        u: tokens (..., d), bfloat16, float16, float32 or float64, any strides.
        routing: of `route`, with the leading axes of u; or Routing(experts, gates).
        up: (E, 2 h, d), the rows of the gate first; (E, h, d) for "relu2". Or what `quantise_weight` makes of it as (E 2 h, d): a
            constant, which is dequantised to the dtype of u in the product; tokens stay in 16 bits in every format.
        down: (E, d, h), or quantised as (E d, h).
        activation: "silu" (SwiGLU), "clamped" (gpt-oss: (up + 1) gate sigmoid(1.702 gate), gate at most 7 and up from -7 to 7) or
            "relu2" (Nemotron-H: relu(up)^2, without a gate).
        backend: "triton" (kernels, on rows sorted by expert), "tiled" (the same in PyTorch's operations) or "eager" (the
            definition: every expert on all tokens, with derivatives of derivatives); None or "auto" takes the fastest that runs.
        deterministic: whether a token's output has the same bits whatever the other tokens are, and however many; None follows
            torch. From run to run results are the same bits either way.
        up_bias, down_bias: (E, 2 h) and (E, d), added to the products of each expert.
        shared_up, shared_down: (2 s, d) and (d, s), the network that every token goes through; several are stored as one. If they
            are quantised, `rooftile.linear` multiplies them.
        shared_gate: (d,): sigmoid(shared_gate . u) times the shared network (Qwen3-Next).
        validate: whether to check that experts and gates are in range on a GPU too, which waits for it. On a CPU experts always
            are checked, and gates if this is set.

    Returns:
        (..., d) in the dtype of u.

    Raises:
        InvalidInput: an argument is wrong; says what came and what is due.
        Unsupported: a derivative of a derivative is asked of a backend other than "eager", or "triton" is named and cannot run.

    Example:
        >>> u, up, down = torch.randn(5, 16), torch.randn(8, 2 * 12, 16), torch.randn(8, 16, 12)
        >>> experts(u, route(u, torch.randn(8, 16), active=2), up, down).shape
        torch.Size([5, 16])

    DeepSeekMoE, arXiv:2401.06066.
    """
    check_choice("activation", activation, ACTIVATIONS)
    way, validate = check_backend(backend, BACKENDS), check_flag("validate", validate)
    check_deterministic(deterministic)
    _check_tokens(u)
    each = (up, down, up_bias, down_bias, shared_up, shared_down, shared_gate)
    if not u.is_meta and torch.is_autocast_enabled(u.device.type):
        u, each = autocast(u), tuple(autocast(x) for x in each)
    weights: Weights | QuantisedWeights = QuantisedWeights(*each)
    if not any(isinstance(x, QuantisedWeight) for x in each):
        weights = Weights(*cast("Any", each))
    _check_weights(u, weights, activation)
    chosen, gates = _check_routing(u, routing, experts_in(weights), validate)
    options = Options(activation, is_deterministic(deterministic), way)
    y = run_experts(u.reshape(-1, u.shape[-1]), chosen, gates, weights, options)
    return y.view(u.shape)


def _check_tokens(u: Any) -> None:
    if not isinstance(u, Tensor) or u.dtype not in _FLOATS or not u.ndim:
        raise InvalidInput(f"u is {shown(u)}; must be a tensor (..., d) of bfloat16, float16, float32 or float64")


def _check_weights(u: Tensor, weights: Weights | QuantisedWeights, activation: str) -> None:
    if (weights.shared_up is None) != (weights.shared_down is None):
        given, missing = ("shared_up", "shared_down") if weights.shared_down is None else ("shared_down", "shared_up")
        raise InvalidInput(f"{given} came without {missing}; give both")
    if weights.shared_gate is not None and weights.shared_up is None:
        raise InvalidInput("shared_gate came without shared_up and shared_down; give all three")
    due = _shapes(u, weights, activation)
    for name, x in weights._asdict().items():
        if x is None:
            continue
        words, shape = due[name]
        if isinstance(x, QuantisedWeight):
            shape = shape if len(shape) < 3 else (shape[0] * shape[1], shape[2])
            _check_quantised(name, x, shape)
        elif not isinstance(x, Tensor) or tuple(x.shape) != shape:
            raise InvalidInput(f"{name} is {shown(x)}; must be {words} = {shape}, for activation {activation!r}")
        elif x.dtype != u.dtype:
            raise InvalidInput(f"{name} is {x.dtype} and u {u.dtype}; must be alike")
        if x.device != u.device:
            raise InvalidInput(f"{name} is on {x.device}; u is on {u.device}, and all inputs must be on one device")


def _check_quantised(name: str, x: QuantisedWeight, shape: tuple[int, ...]) -> None:
    if x.shape != shape or x.order is not None:
        what = "has sorted columns (act-order)" if x.order is not None else f"is {x.shape}"
        raise InvalidInput(f"{name} {what}; a quantised one must be {shape}, one expert below the other, its columns in order")
    if x.format == "fp8_tile" and not name.startswith("shared"):
        raise InvalidInput(f"{name} is in fp8_tile, whose tiles may lie across experts; must be in another format, such as fp8")


def _shapes(u: Tensor, weights: Weights | QuantisedWeights, activation: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The shape of each weight in words and numbers, from the axes of `down`, `shared_down` and u."""
    up, down, shared_down, n, d = weights.up, weights.down, weights.shared_down, halves(activation), u.shape[-1]
    if not isinstance(up, QuantisedWeight) and (not isinstance(up, Tensor) or up.ndim != 3):
        raise InvalidInput(f"up is {shown(up)}; must be a tensor (E, {'2 ' * (n == 2)}h, d)")
    if not isinstance(down, QuantisedWeight) and (not isinstance(down, Tensor) or down.ndim != 3):
        raise InvalidInput(f"down is {shown(down)}; must be a tensor (E, d, h)")
    is_plain = not isinstance(shared_down, QuantisedWeight)
    if shared_down is not None and is_plain and (not isinstance(shared_down, Tensor) or shared_down.ndim != 2):
        raise InvalidInput(f"shared_down is {shown(shared_down)}; must be a tensor (d, s)")
    s = 0 if shared_down is None else shared_down.shape[1]
    if isinstance(down, QuantisedWeight) and (not down.shape[0] or down.shape[0] % max(d, 1)):
        raise InvalidInput(f"down is {down.shape}; a quantised one must be (E d, h), d = {d}")
    E, h = up.shape[0] if isinstance(up, Tensor) else down.shape[0] // (1 if isinstance(down, Tensor) else d), down.shape[-1]
    if not E:
        raise InvalidInput(f"up is {tuple(up.shape)}; must have at least one expert")
    two = "2 " * (n == 2)
    return {
        "up": (f"(E, {two}h, d)", (E, n * h, d)), "down": ("(E, d, h)", (E, d, h)), "up_bias": (f"(E, {two}h)", (E, n * h)),
        "down_bias": ("(E, d)", (E, d)), "shared_up": (f"({two}s, d)", (n * s, d)), "shared_down": ("(d, s)", (d, s)),
        "shared_gate": ("(d,)", (d,)),
    }  # fmt: skip


def _check_routing(u: Tensor, routing: Any, count: int, validate: bool) -> tuple[Tensor, Tensor]:
    """The experts (N, K) in int32 and the gates (N, K) in fp32 or fp64."""
    if not isinstance(routing, Routing):
        raise InvalidInput(f"routing is {shown(routing)}; must be the Routing that route returns, or Routing(experts, gates)")
    chosen, gates = routing.experts, routing.gates
    if not isinstance(chosen, Tensor) or chosen.dtype not in (torch.int32, torch.int64) or chosen.ndim != u.ndim:
        raise InvalidInput(f"routing.experts is {shown(chosen)}; must be an int32 tensor {(*u.shape[:-1], 'K')}")
    if chosen.shape[:-1] != u.shape[:-1] or not chosen.shape[-1]:
        raise InvalidInput(f"routing.experts is {tuple(chosen.shape)}; must be {(*u.shape[:-1], 'K')}, as u is {tuple(u.shape)}")
    if not isinstance(gates, Tensor) or not gates.is_floating_point() or gates.shape != chosen.shape:
        raise InvalidInput(f"routing.gates is {shown(gates)}; must be a floating-point tensor {tuple(chosen.shape)}")
    for name, x in (("routing.experts", chosen), ("routing.gates", gates)):
        if x.device != u.device:
            raise InvalidInput(f"{name} is on {x.device}; u is on {u.device}, and all inputs must be on one device")
    _check_values(chosen, gates, count, validate)
    K = chosen.shape[-1]
    wide = torch.promote_types(u.dtype, torch.float32)
    return chosen.to(torch.int32).reshape(-1, K), gates.to(wide).reshape(-1, K)


def _check_values(chosen: Tensor, gates: Tensor, count: int, validate: bool) -> None:
    """Checks what can be read: not in a compiler's trace, under a transform that maps it, or in a tensor without numbers."""
    is_plain = type(chosen) is Tensor and not chosen.is_meta and chosen.numel() > 0
    is_readable = is_plain and not torch.compiler.is_compiling() and not mapped(chosen, gates)
    if is_readable and (validate or chosen.device.type == "cpu"):
        low, high = int(chosen.min()), int(chosen.max())
        if (low < 0 and bool(((chosen < 0) & (chosen != ELSEWHERE)).any())) or high >= count:
            raise InvalidInput(f"routing.experts has values from {low} to {high}; must be from 0 to {count - 1}")
    if is_readable and validate and not bool(((gates >= 0) & gates.isfinite()).all()):
        raise InvalidInput("routing.gates has a number below 0, an infinity or NaN; must be finite and at least 0")
