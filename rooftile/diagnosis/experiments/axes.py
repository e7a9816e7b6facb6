"""The axes along which a call can be made smaller: dimensions that several of its tensors share.

Products, convolutions, attention, recurrent layers and gathers have rules, because equal sizes may be a coincidence there, and
because a cut must leave every index inside of what it points into. The axes of all other operators are found by trying.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rooftile.diagnosis.compiled import Kernel
from rooftile.diagnosis.experiments.call import Call, held_bytes

Places = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Axis:
    """Dimensions that are one: (which tensor of the call, which of its dimensions), all of one size."""

    places: Places
    size: int

    def cut(self, call: Call, length: int) -> Call:
        """Returns the call on the first `length` of this axis."""
        tensors = list(call.tensors)
        for which, dim in self.places:
            tensors[which] = tensors[which].narrow(dim, 0, length)
        return call.on(tensors)


@dataclass(frozen=True, slots=True)
class Piece:
    """A smaller call, and the share of the whole one's work that it does."""

    call: Call
    share: float


def axes(call: Call) -> list[Axis]:
    """Returns the axes of a call, the ones to cut first at the front."""
    if isinstance(call.function, Kernel):
        # its sizes are compiled in: on smaller tensors it would read past their ends
        return []
    name = operator_name(call.function)
    if name in RULES:
        found = [_axis(call, places) for places in with_result(call, RULES[name](call.tensors))]
        return [axis for axis in found if axis is not None and axis.size > 1]
    if call.device.type == "cuda" and not _checks_sizes(call):
        return []
    return _found(call)


def with_result(call: Call, choices: Sequence[Places]) -> list[Places]:
    """Returns a rule's axes with those of the tensor in `out=`, if there is one; none where no rule has them."""
    if not isinstance(call.kwargs.get("out"), torch.Tensor):
        return list(choices)
    dims = RESULTS.get(operator_name(call.function), ())[-len(choices) :]
    last = len(call.tensors) - 1
    return [places if dim is None else (*places, (last, dim)) for places, dim in zip(choices, dims, strict=False)]


def operator_name(function: Callable[..., object]) -> str:
    """Returns "addmm" of torch.ops.aten.addmm.default; other functions have their own name."""
    packet = getattr(function, "overloadpacket", function)
    return str(getattr(packet, "__name__", type(packet).__name__))


def piece(call: Call, found: Sequence[Axis], share: float) -> Piece:
    """Returns the call cut to about a share of its work: the first axes as far as needed.

    The largest of a product's axes is halved in turns, so that all of its tensors shrink.
    """
    lengths = [axis.size for axis in found]
    is_product = operator_name(call.function) in PRODUCTS
    left = share
    while left < 1.0 and any(length > 1 for length in lengths):
        at = max(range(len(found)), key=lambda n: lengths[n]) if is_product else _first(lengths)
        wanted = max(left, 0.5) if is_product else left
        length = max(1, round(lengths[at] * wanted))
        length = length if length < lengths[at] else lengths[at] - 1
        left *= lengths[at] / length
        lengths[at] = length
        if left > 0.75:
            break
    done = 1.0
    for axis, length in zip(found, lengths, strict=True):
        if length < axis.size:
            call, done = axis.cut(call, length), done * length / axis.size
    return Piece(call, done)


def _first(lengths: Sequence[int]) -> int:
    return next(n for n, length in enumerate(lengths) if length > 1)


def _axis(call: Call, places: Places) -> Axis | None:
    """Dimensions of size 1 are broadcast along the axis and stay as they are."""
    sizes = {call.tensors[which].shape[dim] for which, dim in places} - {1}
    if len(sizes) != 1:
        return None
    (size,) = sizes
    return Axis(tuple((which, dim) for which, dim in places if call.tensors[which].shape[dim] == size), size)


def _checks_sizes(call: Call) -> bool:
    """Returns whether a GPU operator refuses tensors that do not fit each other.

    Others would read past an end, which takes the GPU away from this process for good. So does an index that is too large.
    """
    if any(x.dtype in (torch.int32, torch.int64) for x in call.tensors):
        return False
    tags = getattr(call.function, "tags", ())
    return torch.Tag.pointwise in tags or torch.Tag.reduction in tags or operator_name(call.function) in CHECK_SIZES


def _found(call: Call) -> list[Axis]:
    """Tries each dimension of the largest tensor, from the one with the largest stride."""
    if not call.tensors:
        return []
    main = max(call.tensors, key=held_bytes)
    order = sorted(range(main.dim()), key=main.stride, reverse=True)
    kept: list[Axis] = []
    for dim in order:
        for places in (_aligned(call.tensors, main, dim), _aligned(call.tensors, main, dim - main.dim())):
            axis = _axis(call, places) if main.shape[dim] > 1 else None
            if axis is not None and _runs(call, [*kept, axis]):
                kept.append(axis)
                break
    return kept


def _aligned(tensors: Sequence[torch.Tensor], main: torch.Tensor, dim: int) -> Places:
    """The same dimension, counted from the front or from the back, of every tensor that has its size there."""
    size = main.shape[dim]
    return tuple(
        (n, dim) for n, x in enumerate(tensors) if -x.dim() <= dim < x.dim() and x.shape[dim] == size
    )  # fmt: skip


def _runs(call: Call, found: Sequence[Axis]) -> bool:
    """A cut is an axis if the operator accepts it; the smallest call is tried, because it is short."""
    for axis in found:
        call = axis.cut(call, 1)
    try:
        call.restore()
        call.run()
    except (RuntimeError, IndexError, ValueError, TypeError):
        # this refusal is the answer: the dimension is not one that can be cut
        return False
    return True


def _all_dims(which: int) -> Callable[[Sequence[torch.Tensor]], list[Places]]:
    return lambda t: [((which, dim),) for dim in range(t[which].dim())]


def _pairs(a: int, b: int) -> Callable[[Sequence[torch.Tensor]], list[Places]]:
    """Two tensors of one shape, such as indices and the numbers that go there."""
    return lambda t: [((a, dim), (b, dim)) for dim in range(min(t[a].dim(), t[b].dim()))] if len(t) > b else []


def _addmm(t: Sequence[torch.Tensor]) -> list[Places]:
    columns: Places = ((0, t[0].dim() - 1), (2, 1)) if t[0].dim() else ((2, 1),)
    return [((0, 0), (1, 0)) if t[0].dim() == 2 else ((1, 0),), columns, ((1, 1), (2, 0))]


def _convolution(t: Sequence[torch.Tensor]) -> list[Places]:
    outputs: Places = ((1, 0), (2, 0)) if len(t) > 2 else ((1, 0),)
    # with groups, the inputs of the weight are fewer than those of the image
    return [((0, 0),), outputs] if t[0].shape[1] == t[1].shape[1] else [((0, 0),)]


def _attention(t: Sequence[torch.Tensor]) -> list[Places]:
    return [((0, 0), (1, 0), (2, 0)), ((0, 1), (1, 1), (2, 1))] if len(t) == 3 else []


def _attention_backward(t: Sequence[torch.Tensor]) -> list[Places]:
    """Gradient, queries, keys, values, output and LSE; only without a bias among them, which would come before the output."""
    is_plain = len(t) > 5 and t[4].shape == t[0].shape and t[5].numel() < t[0].numel()
    return [tuple((n, dim) for n in range(6)) for dim in (0, 1)] if is_plain else []


def _ours(*which: int, tensors: int = 0) -> Callable[[Sequence[torch.Tensor]], list[Places]]:
    """Tokens or sequences, the first dimension of these tensors, of a call with so many tensors (0: any number)."""
    return lambda t: [tuple((n, 0) for n in which)] if tensors in (0, len(t)) else []


def _recurrent(t: Sequence[torch.Tensor]) -> list[Places]:
    """The time and the batch of (T, B, C) and (B, C). The library trusts these sizes; its weights and workspace stay whole."""
    kept = [n for n, x in enumerate(t) if n not in range(1, 5) and x.is_floating_point()]
    return [tuple((n, 0) for n in kept if t[n].dim() == 3), tuple((n, t[n].dim() - 2) for n in kept)]


def _index(t: Sequence[torch.Tensor]) -> list[Places]:
    return [tuple((n, dim) for n in range(1, len(t))) for dim in range(min((x.dim() for x in t[1:]), default=0))]


RULES: dict[str, Callable[[Sequence[torch.Tensor]], list[Places]]] = {
    "mm": lambda t: [((0, 0),), ((1, 1),), ((0, 1), (1, 0))],
    "addmm": _addmm,
    "bmm": lambda t: [((0, 0), (1, 0)), ((0, 1),), ((1, 2),), ((0, 2), (1, 1))],
    "linear": lambda t: [((0, 0),), ((1, 0), (2, 0)) if len(t) > 2 else ((1, 0),), ((0, t[0].dim() - 1), (1, 1))],
    "convolution": _convolution,
    "conv2d": _convolution,
    "scaled_dot_product_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention": _attention,
    "_scaled_dot_product_efficient_attention": _attention,
    "_scaled_dot_product_cudnn_attention": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_flash_attention_backward": _attention_backward,
    "_scaled_dot_product_efficient_attention_backward": _attention_backward,
    "_scaled_dot_product_cudnn_attention_backward": _attention_backward,
    # dense attention of this package is (B, T, H, D), and has more tensors with options and for packed sequences
    "attention": _ours(0, 1, 2, tensors=3),
    # queries, table and lengths of sequences with one new token each
    "attention_paged": _ours(0, 3, 4, tensors=5),
    "normalise": _ours(0),
    "add_norm": _ours(0, 1),
    "gated": _ours(0),
    "rotate": _ours(0, 1, 2),
    "write_kv": _ours(0, 1, 4, tensors=5),
    "write_kv_and_rotate": _ours(0, 1, 2, 5, 6, 7, tensors=8),
    # the weight may have as many channels as there are images
    "convolution_backward": _ours(0, 1),
    "native_batch_norm": _ours(0),
    "cudnn_batch_norm": _ours(0),
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": _recurrent,
    "embedding": _all_dims(1),
    "index_select": _all_dims(1),
    "index": _index,
    "gather": _all_dims(1),
    "embedding_dense_backward": _pairs(0, 1),
    "index_put": _pairs(1, 2),
    "index_put_": _pairs(1, 2),
    "scatter": _pairs(1, 2),
    "scatter_": _pairs(1, 2),
    "scatter_add": _pairs(1, 2),
    "scatter_add_": _pairs(1, 2),
    "nll_loss_forward": lambda t: [((0, 0), (1, 0))],
}
# the dimension of a product's result that each of its axes is; the inner one is in none
RESULTS: dict[str, tuple[int | None, ...]] = {"mm": (0, 1, None), "addmm": (0, 1, None), "bmm": (0, 1, 2, None)}
PRODUCTS = frozenset({"mm", "addmm", "bmm", "linear"})
# GPU operators that compare the sizes of their tensors, besides those that PyTorch tags as pointwise and as reductions
CHECK_SIZES = frozenset(
    {
        "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm",
        "native_layer_norm_backward", "_fused_rms_norm", "native_group_norm", "_to_copy", "copy_", "cat", "native_dropout",
        "cumsum", "tril", "triu", "max_pool2d_with_indices", "upsample_nearest2d",
    }
)  # fmt: skip
# they read only the rows that their indices name
GATHERS = frozenset({"embedding", "index_select", "index", "gather"})
