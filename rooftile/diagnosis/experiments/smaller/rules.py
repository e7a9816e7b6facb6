"""The axes of operators for which they cannot be found by trying.

Equal sizes may be a coincidence in products, convolutions, attention and recurrent layers, and a cut must leave every index
inside of what it points into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Places = tuple[tuple[int, int], ...]


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
    # with groups, the weight has fewer input channels than the image
    return [((0, 0),), outputs] if t[0].shape[1] == t[1].shape[1] else [((0, 0),)]


def _attention(t: Sequence[torch.Tensor]) -> list[Places]:
    """Sequences and heads; also the keys of a single query. A bias has four dimensions, too."""
    if len(t) not in (3, 4) or any(x.dim() != 4 for x in t):
        return []
    found: list[Places] = [tuple((n, dim) for n in range(len(t))) for dim in (0, 1)]
    keys: Places = ((1, 2), (2, 2), (3, 3))[: len(t) - 1]
    return [*found, keys] if t[0].shape[2] == 1 else found


def _attention_backward(t: Sequence[torch.Tensor]) -> list[Places]:
    """Gradient, queries, keys, values, output and LSE; only without a bias among them, which would come before the output."""
    is_plain = len(t) > 5 and t[4].shape == t[0].shape and t[5].numel() < t[0].numel()
    return [tuple((n, dim) for n in range(6)) for dim in (0, 1)] if is_plain else []


def _ours(*which: int, tensors: int = 0) -> Callable[[Sequence[torch.Tensor]], list[Places]]:
    """Tokens or sequences, the first dimension of these tensors, of a call with this many tensors (0: any number)."""
    return lambda t: [tuple((n, 0) for n in which)] if tensors in (0, len(t)) else []


def _recurrent(t: Sequence[torch.Tensor]) -> list[Places]:
    """The time and the batch of (T, B, C) and (B, C). The library trusts these sizes; its weights and workspace stay whole."""
    kept = [n for n, x in enumerate(t) if n not in range(1, 5) and x.is_floating_point()]
    return [tuple((n, 0) for n in kept if t[n].dim() == 3), tuple((n, t[n].dim() - 2) for n in kept)]


def _cudnn_recurrent(t: Sequence[torch.Tensor]) -> list[Places]:
    """The time and the batch of (T, B, C) and (L, B, C): the input, and the states behind the weights. cuDNN checks them."""
    states = [n for n, x in enumerate(t) if n and x.dim() == 3]
    if t[0].dim() != 3 or not states or any(t[n].shape[1] != t[0].shape[1] for n in states):
        return []
    return [((0, 0),), ((0, 1), *((n, 1) for n in states))]


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
    "normalise_quantised": _ours(0),
    "add_norm_quantised": _ours(0, 1),
    "gated": _ours(0),
    "gate_quantised": _ours(0, 1),
    "rotate": _ours(0, 1, 2),
    "write_kv": _ours(0, 1, 4, tensors=5),
    "write_kv_and_rotate": _ours(0, 1, 2, 5, 6, 7, tensors=8),
    # the weight may have as many channels as there are images
    "convolution_backward": _ours(0, 1),
    "native_group_norm": _ours(0),
    "native_group_norm_backward": _ours(0, 1, 2, 3),
    "avg_pool2d": lambda t: [((0, 0),), ((0, 1),)],
    "avg_pool2d_backward": _pairs(0, 1),
    "upsample_nearest2d": lambda t: [((0, 0),), ((0, 1),)],
    "native_batch_norm": _ours(0),
    "cudnn_batch_norm": _ours(0),
    "native_batch_norm_backward": _ours(0, 1),
    "cudnn_batch_norm_backward": _ours(0, 1),
    "max_pool2d_with_indices_backward": lambda t: [tuple((n, dim) for n in range(3)) for dim in (0, 1)],
    "_cudnn_rnn": _cudnn_recurrent,
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
# the dimension of a product's result for each of its axes; None for the inner axis, which the result lacks
RESULTS: dict[str, tuple[int | None, ...]] = {"mm": (0, 1, None), "addmm": (0, 1, None), "bmm": (0, 1, 2, None)}
PRODUCTS = frozenset({"mm", "addmm", "bmm", "linear"})
# GPU operators that compare the sizes of their tensors, besides operators that PyTorch tags as pointwise and as reductions
CHECK_SIZES = frozenset(
    {
        "_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "native_layer_norm",
        "native_layer_norm_backward", "_fused_rms_norm", "_to_copy", "copy_", "cat", "native_dropout",
        "cumsum", "tril", "triu", "max_pool2d_with_indices", "upsample_nearest2d",
    }
)  # fmt: skip
# they read only the rows that their indices name
GATHERS = frozenset({"embedding", "index_select", "index", "gather"})
