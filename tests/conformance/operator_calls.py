"""A call of every operator, with its work counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate, fused, moe, qat
from rooftile import weights as matmul
from rooftile.approximate import gathered
from rooftile.approximate.loki.decoding import choose, page_scores
from rooftile.approximate.native_sparse import decoding as native_sparse
from rooftile.approximate.native_sparse.selected.gated_sum import gated_sum
from rooftile.cost.counts import Work
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.sampling.sampler import SamplingState, features_of, sample
from rooftile.fused import gated, linear
from rooftile.fused.norm import Weights, add_norm, normalise
from rooftile.fused.rope import Rotation, rotate
from rooftile.kvcache import Copy, Pages
from rooftile.numerics import quantise_rows
from rooftile.optim import AdamW
from rooftile.recommend import RelativeBias, hstu_attention, hstu_attention_paged, target_attention
from tests.conformance.sparse_calls import SPARSE_CALLS
from tests.conformance.state_calls import STATE_CALLS
from tests.engine.sampling import assign


def _norm(device: torch.device) -> Weights:
    return Weights(torch.randn(8, device=device), torch.randn(8, device=device), 1e-5, False)


def _normalise(device: torch.device) -> Work:
    normalise(torch.randn(5, 8, device=device), _norm(device))
    return Work(0, 5 * 32 + 64, 5 * 32)


def _add_norm(device: torch.device) -> Work:
    add_norm(*torch.randn(2, 5, 8, device=device), _norm(device), Weights(torch.randn(8, device=device), None, 1e-5, True))
    return Work(0, 2 * 5 * 32 + 3 * 32, 2 * 5 * 32)


# codes (5, 8) and their scales take 60 bytes
def _normalise_quantised(device: torch.device) -> Work:
    normalise(torch.randn(5, 8, device=device), _norm(device), "fp8")
    return Work(0, 5 * 32 + 64, 60)


def _add_norm_quantised(device: torch.device) -> Work:
    add_norm(*torch.randn(2, 5, 8, device=device), _norm(device), out="int8")
    return Work(0, 2 * 5 * 32 + 64, 5 * 32 + 60)


def _sum_norm_quantised(device: torch.device) -> Work:
    fused.add_rms_norm_quantised(*torch.randn(2, 5, 8, device=device), torch.randn(8, device=device))
    return Work(0, 2 * 5 * 32 + 32, 5 * 32 + 60)


def _gate_quantised(device: torch.device) -> Work:
    fused.swiglu_quantised(*torch.randn(2, 5, 8, device=device), format="int8")
    return Work(0, 2 * 5 * 32, 60)


def _gated(device: torch.device) -> Work:
    _backward(gated(_leaf(5, 8, device=device), "silu"))
    return Work(0, 5 * 32, 5 * 16)


def _gated_backward(device: torch.device) -> Work:
    _gated(device)
    return Work(0, 5 * 16 + 5 * 32, 5 * 32)


def _linear(device: torch.device) -> Work:
    linear(torch.randn(5, 8, device=device), torch.randn(3, 8, device=device), torch.randn(3, device=device))
    return Work(2 * 5 * 8 * 3, 5 * 32 + 3 * 32 + 12, 5 * 12)


def _leaf(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, device=device, requires_grad=True)


def _backward(*results: Tensor) -> None:
    torch.autograd.backward(results, [torch.ones_like(y) for y in results])


# rows (5, 8) in fp32 take 160 bytes, a row of weights 32
def _norm_of(device: torch.device) -> Work:
    _backward(fused.layer_norm(*(_leaf(*shape, device=device) for shape in ((5, 8), (8,), (8,)))))
    return Work(0, 160 + 64, 160)


def _norm_backward(device: torch.device) -> Work:
    _norm_of(device)
    return Work(0, 2 * 160 + 64, 160 + 64)


def _sum_norm(device: torch.device) -> Work:
    _backward(*fused.add_layer_norm(*(_leaf(*shape, device=device) for shape in ((5, 8), (5, 8), (8,), (8,)))))
    return Work(0, 2 * 160 + 64, 2 * 160)


def _sum_norm_backward(device: torch.device) -> Work:
    _sum_norm(device)
    return Work(0, 3 * 160 + 64, 160 + 64)


def _gated_norm(device: torch.device) -> Work:
    _backward(fused.rms_norm_gated(*(_leaf(*shape, device=device) for shape in ((5, 8), (5, 8), (8,))), groups=2))
    return Work(0, 2 * 160 + 32, 160)


def _gated_norm_backward(device: torch.device) -> Work:
    _gated_norm(device)
    return Work(0, 3 * 160 + 32, 2 * 160 + 32)


def _gate_up(device: torch.device) -> Work:
    _backward(fused.swiglu(_leaf(5, 8, device=device), _leaf(5, 8, device=device)))
    return Work(0, 2 * 160, 160)


def _gate_up_backward(device: torch.device) -> Work:
    _gate_up(device)
    return Work(0, 3 * 160, 2 * 160)


def _rotary(device: torch.device) -> Work:
    # each of q and k is a call of its own: of one head, they are alike
    q = _leaf(1, 5, 1, 8, device=device)
    rotated = fused.rotary(q, q.detach()[:, :, :0], torch.rand(5, 3, device=device), torch.rand(5, 3, device=device))
    _backward(rotated[0])
    return Work(0, 160 + 2 * 60, 160)


def _softmax(device: torch.device) -> Work:
    _backward(fused.softmax(_leaf(5, 8, device=device)))
    return Work(0, 160, 160)


def _softmax_backward(device: torch.device) -> Work:
    _softmax(device)
    return Work(0, 2 * 160, 160)


def _cross_entropy(device: torch.device) -> Work:
    _backward(fused.cross_entropy(_leaf(5, 8, device=device), torch.arange(5, device=device)))
    return Work(0, 160 + 40, 3 * 20)


def _cross_entropy_backward(device: torch.device) -> Work:
    _cross_entropy(device)
    return Work(0, 3 * 20 + 160 + 40, 160)


def _linear_cross_entropy(device: torch.device, reduction: str = "none") -> Work:
    x, w = _leaf(5, 8, device=device), _leaf(7, 8, device=device)
    words = {"linear_bias": _leaf(7, device=device), "reduction": reduction}
    _backward(fused.linear_cross_entropy(x, w, torch.arange(5, device=device), **words))
    return Work(2 * 5 * 8 * 7, 160 + 7 * 32 + 28 + 40, 3 * 20)


def _linear_cross_entropy_backward(device: torch.device) -> Work:
    _linear_cross_entropy(device)
    return Work(6 * 5 * 8 * 7, 3 * 20 + 160 + 7 * 32 + 28 + 40, 160 + 7 * 32 + 28)


def _linear_cross_entropy_reduced(device: torch.device) -> Work:
    _linear_cross_entropy(device, "mean")
    gradients = 160 + 7 * 32 + 28
    return Work(6 * 5 * 8 * 7, gradients + 40 + 8, 4 + gradients)


def _linear_cross_entropy_reduced_backward(device: torch.device) -> Work:
    _linear_cross_entropy(device, "sum")
    return Work(0, 4 + 160 + 7 * 32 + 28, 160 + 7 * 32 + 28)


def _weight(device: torch.device) -> rt.QuantisedWeight:
    return rt.quantise_weight(torch.randn(3, 64, device=device), "int4", group=32, zero_points=True)


def _quantise_rows(device: torch.device) -> Work:
    quantise_rows(torch.randn(5, 64, device=device), "int8")
    return Work(0, 5 * 256, 5 * (64 + 4))


def _linear_quantised(device: torch.device) -> Work:
    rt.linear(torch.randn(5, 64, device=device), _weight(device), torch.randn(3, device=device))
    # half a byte per weight, and two groups per row with a scale of 16 bits and a zero point of 8
    return Work(2 * 5 * 64 * 3, 5 * 256 + 3 * (32 + 4 + 2) + 12, 5 * 12)


def _linear_gated(device: torch.device) -> Work:
    weight = rt.quantise_weight(torch.randn(64, 64), "w8").to(device)
    matmul.multiply_gated(torch.randn(5, 64, device=device).bfloat16(), weight, None, "silu")
    return Work(2 * 5 * 64 * 64, 5 * 128 + 64 * (64 + 2), 5 * 64)


def _linear_gated_rows(device: torch.device) -> Work:
    weight, scale = rt.quantise_weight(torch.randn(64, 64), "fp8").to(device), torch.tensor(0.1, device=device)
    rows = quantise_rows(torch.randn(5, 64, device=device).bfloat16())
    matmul.multiply_gated_rows(rows, weight, None, "silu", scale)
    return Work(2 * 5 * 64 * 64, 5 * (64 + 4) + 64 * (64 + 4) + 4, 5 * (32 + 4))


def _linear_rounded(device: torch.device) -> Work:
    model = _prepared(device)
    with torch.no_grad():
        model(torch.randn(5, 64, device=device))
    return Work(2 * 5 * 64 * 3, 5 * 256 + 3 * 256 + 12, 5 * 12)


def _linear_rounded_backward(device: torch.device) -> Work:
    x = torch.randn(5, 64, device=device, requires_grad=True)
    _prepared(device)(x).sum().backward()
    # two products
    return Work(2 * 2 * 5 * 64 * 3, 5 * 12 + 5 * 256 + 3 * 256, 5 * 256 + 3 * 256)


def _weight_rounded(device: torch.device) -> Work:
    model = _prepared(device)
    with torch.no_grad():
        model[0].weight.sum()
    return Work(0, 3 * 256, 3 * 256)


def _weight_rounded_backward(device: torch.device) -> Work:
    _prepared(device)[0].weight.sum().backward()
    return Work(0, 2 * 3 * 256, 3 * 256)


def _prepared(device: torch.device) -> torch.nn.Module:
    return qat.prepare(torch.nn.Sequential(torch.nn.Linear(64, 3)).to(device), "int4:32", estimator="clip")


def _dequantise_weight(device: torch.device) -> Work:
    matmul.dequantise(_weight(device), torch.bfloat16)
    return Work(0, 3 * (32 + 4 + 2), 3 * 64 * 2)


def _rotation(device: torch.device) -> Rotation:
    return Rotation(*torch.rand(2, 5, 3, device=device))


def _rotate(device: torch.device) -> Work:
    rotate(torch.randn(5, 2, 8, device=device), _rotation(device))
    return Work(0, 5 * 64 + 2 * 5 * 12, 5 * 64)


def _pages(device: torch.device, dtype: torch.dtype = torch.float32) -> Pages:
    pages = Pages(4, layers=1, heads=2, dim=8, block_size=4, dtype=dtype, device=device)
    pages.storage.view(torch.uint8).zero_()
    if pages.scales is not None:
        pages.scales.fill_(0.5)
    return pages


def _written(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    k, v = torch.randn(2, 5, 2, 8, device=device)
    return k, v, torch.tensor([3, -1, 7, 8, 9], device=device)


def _write(device: torch.device) -> Work:
    _pages(device, torch.float8_e4m3fn).write(0, *_written(device))
    # four tokens of five have a slot; a token's key is 16 numbers, with 2 scales
    return Work(0, 4 * 2 * 64 + 5 * 8, 4 * 2 * (16 + 8))


def _write_and_rotate(device: torch.device) -> Work:
    _pages(device).write_and_rotate(0, torch.randn(5, 4, 8, device=device), *_written(device), _rotation(device))
    return Work(0, 5 * 128 + 4 * 2 * 64 + 5 * 2 * 12 + 5 * 8, 5 * 128 + 4 * 2 * 64)


def _table(device: torch.device) -> tuple[Tensor, Tensor]:
    table = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32, device=device)
    return table, torch.tensor([5, 2], dtype=torch.int32, device=device)


def _gather(device: torch.device) -> Work:
    _pages(device, torch.float8_e4m3fn).view(0, *_table(device)).gathered_with_room(torch.bfloat16)
    # seven tokens in three blocks
    return Work(0, 7 * 2 * (16 + 8) + 3 * 4 + 2 * 4, 7 * 2 * 32 + 3 * 4)


def _page_scores(device: torch.device) -> Work:
    leading = torch.randn(4, 4, 2, 3, device=device)
    page_scores(torch.randn(2, 4, 8, device=device), leading, *_table(device), scale=0.5, softcap=None)
    # the leading three dims of seven keys, two heads each, and of eight queries
    return Work(2 * 7 * 4 * 3, (7 * 2 + 8) * 12 + 3 * 4 + 2 * 4, 2 * 2 * 2 * 4)


def _choose_pages(device: torch.device) -> Work:
    lengths = torch.tensor([40, 17], dtype=torch.int32, device=device)
    choose(torch.rand(2, 3, 4, device=device), lengths, size=16, keep=0.5)
    # the scores of five pages for three heads, two numbers per sequence, and two places per sequence and head
    return Work(0, 5 * 3 * 4 + 2 * 2 * 4, 2 * 3 * 2 * 4)


def _native_sparse_decode(device: torch.device) -> Work:
    sizes = {"length": 4, "stride": 2, "block_size": 4, "count": 1, "first": 0, "local": 1, "window": 3}
    pairs = [tuple(torch.randn(4, rows, 2, 8, device=device) for _ in range(2)) for rows in (2, 4, 4)]
    q, gates = torch.randn(2, 4, 8, device=device), torch.rand(2, 4, 3, device=device)
    table, lengths = _table(device)
    native_sparse.decode(q, gates, *pairs, table, table, lengths, scale=0.5, **sizes)
    # a text of 5 tokens: one compressed key is complete, the own block has a token and the window 3; one of 2 tokens: none, 2, 2
    seen = (1 + 1 + 3) + (2 + 2)
    read = seen * 2 * 16 * 4 + (q.numel() + gates.numel()) * 4
    return Work(2 * 16 * 4 * seen, read + (2 + 1 + 2 + 1) * 4 + 2 * 4, q.numel() * 4)


def _copy(device: torch.device) -> Work:
    _pages(device).copy([Copy(0, 2), Copy(1, 3)])
    block = 2 * 4 * 2 * 8 * 4
    return Work(0, 2 * block + 2 * 16, 2 * block)


def _sample(device: torch.device) -> Work:
    params = SamplingParams(temperature=1.0, top_k=5, presence_penalty=0.5, logit_bias={3: 1.0})
    plain = SamplingParams(structured={"choice": ["a"]})
    state = SamplingState(3, 50, device)
    assign(state, [0, 2], [params, plain], [1, 2], [[1], [2]], [[], []])
    slots, positions = torch.tensor([[0, 2], [5, 6]], device=device)
    sample(torch.randn(2, 50, device=device), slots, positions, state, features_of(params) | features_of(plain))
    tables = 50 * (4 + 1 + 4) + 2 * 4
    return Work(0, 2 * 200 + 4 * 8 + 2 * (28 + 4 + 8) + 2 * tables, 2 * 8 + 2 * 8 + 2 * 4)


def _tensors(device: torch.device, requires_grad: bool = False) -> list[Tensor]:
    return [torch.randn(1, 4, 2, 64, device=device, dtype=torch.bfloat16, requires_grad=requires_grad) for _ in range(3)]


# pairs of a causal 4 x 4, and bytes of a tensor (1, 4, 2, 64) of bf16
_PAIRS, _SIZE = 10, 4 * 2 * 64 * 2
# bytes of the state of a recurrence over them
_STATE = 2 * (64 * 64 + 64 + 1) * 4


def _attention(device: torch.device) -> Work:
    rt.attention(*_tensors(device), rt.CAUSAL, sinks=torch.randn(2, device=device), backend=_backend(device))
    return Work(4 * 64 * _PAIRS * 2, 3 * _SIZE + 8, _SIZE + 4 * 2 * 4)


def _attention_backward(device: torch.device) -> Work:
    o = rt.attention(*_tensors(device, True), rt.CAUSAL, backend=_backend(device))
    o.backward(torch.ones_like(o))
    # reads q, k, v, o, do, lse and delta; writes dq, dk, dv and delta
    return Work(10 * 64 * _PAIRS * 2, 5 * _SIZE + 2 * 4 * 2 * 4, 3 * _SIZE + 4 * 2 * 4)


def _attention_paged(device: torch.device) -> Work:
    cache = _pages(device).view(0, *_table(device))
    with torch.no_grad():
        rt.attention_paged(torch.randn(2, 1, 4, 8, device=device), cache, rt.CAUSAL)
    return Work(4 * 8 * 7 * 4, 2 * 128 + 7 * 128 + 3 * 4 + 2 * 4, 2 * 128 + 2 * 4 * 4)


def _quantise(device: torch.device) -> Work:
    rt.quantise_qkv(*_tensors(device), rt.Precision(qk="int8", incoherent=False, smooth_k=False), backend="eager")
    return Work(0, 3 * _SIZE, 3 * _SIZE // 2 + 3 * 2 * 4)


def _attention_quantised(device: torch.device) -> Work:
    recipe = rt.Precision(qk="int8", pv="native", incoherent=False, smooth_k=False)
    rt.attention_quantised(rt.quantise_qkv(*_tensors(device), recipe, backend="eager"), rt.CAUSAL)
    return Work(4 * 64 * _PAIRS * 2, 2 * _SIZE // 2 + _SIZE + 2 * 2 * 4, _SIZE + 4 * 2 * 4)


def _recurrence(device: torch.device) -> Work:
    approximate.linear(*_tensors(device), rt.CAUSAL)
    # two heads: the state is 64 x 64, its sum of keys 64, and the largest one number, and the sums of weights 4
    return Work(2 * 64 * 64 * 2 * 4 * 2, 3 * _SIZE + _STATE, _SIZE + _STATE + 4 * 2 * 4)


def _recurrence_backward(device: torch.device) -> Work:
    o = approximate.linear(*_tensors(device, True), rt.CAUSAL)
    o.backward(torch.ones_like(o))
    # the gradient of the state that comes in has no largest
    return Work(2 * 64 * 64 * 5 * 4 * 2, 5 * _SIZE + _STATE + 4 * 2 * 4, 3 * _SIZE + _STATE - 2 * 4)


def _selected(device: torch.device) -> Work:
    tensors, chosen = _tensors(device), torch.tensor([[0, -1], [0, -1], [0, -1], [-1, 0]], dtype=torch.int32, device=device)
    approximate.selected_attention(*tensors, chosen[None, :, None].expand(1, 4, 2, 2), block_size=16)
    # 1 + 2 + 3 + 4 tokens up to each position, two heads; a list is 64 bytes, offsets 16, lse 32
    return Work(2 * 128 * 10 * 2, 3 * _SIZE + 64 + 16, _SIZE + 32)


def _selected_backward(device: torch.device) -> Work:
    chosen = torch.zeros(1, 4, 2, 2, dtype=torch.int32, device=device)
    chosen[..., 1] = -1
    o = approximate.selected_attention(*_tensors(device, True), chosen, block_size=16)
    o.backward(torch.ones_like(o))
    return Work(2 * 128 * 10 * 2 * 5 // 2, 5 * _SIZE + 2 * 32 + 64 + 16, 3 * _SIZE)


def _gated_sum(device: torch.device) -> Work:
    branches, gates = _branches(device)
    gated_sum(branches, gates)
    return Work(0, 3 * _SIZE + 3 * 8 * 4, _SIZE)


def _gated_sum_backward(device: torch.device) -> Work:
    branches, gates = _branches(device, True)
    o = gated_sum(branches, gates)
    o.backward(torch.ones_like(o))
    return Work(0, 4 * _SIZE + 3 * 8 * 4, 3 * _SIZE + 3 * 8 * 4)


def _branches(device: torch.device, requires_grad: bool = False) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Three tensors with as many numbers as those of attention, and a gate for each of 8 rows."""
    a, b, c = _tensors(device, requires_grad)
    return (a, b, c), torch.rand(1, 4, 2, 3, device=device, requires_grad=requires_grad)


def _expert_tensors(device: torch.device, requires_grad: bool = False) -> dict[str, Tensor]:
    """5 tokens of 8 numbers, 4 experts of 6, and a shared expert of 3, in fp32."""
    shapes = {
        "u": (5, 8), "up": (4, 12, 8), "down": (4, 8, 6), "up_bias": (4, 12), "shared_up": (6, 8), "shared_down": (8, 3),
        "shared_gate": (8,),
    }  # fmt: skip
    return {name: torch.randn(shape, device=device, requires_grad=requires_grad) for name, shape in shapes.items()}


def _experts(device: torch.device) -> Work:
    # two of the four experts are used
    routing = moe.Routing(torch.tensor([[0, 3]], device=device).expand(5, 2), torch.rand(5, 2, device=device))
    moe.experts(routing=routing, **_expert_tensors(device))
    read = 5 * 8 * 4 + 2 * 5 * 2 * 4 + 2 * (96 + 48 + 12) * 4 + (48 + 24 + 8) * 4
    return Work(2 * (10 * 144 + 5 * 80), read, 5 * 8 * 4)


def _experts_backward(device: torch.device) -> Work:
    tensors = _expert_tensors(device, True)
    gates = torch.rand(5, 2, device=device, requires_grad=True)
    routing = moe.Routing(torch.tensor([[0, 3]], device=device).expand(5, 2), gates)
    y = moe.experts(routing=routing, **tensors)
    y.backward(torch.ones_like(y))
    # tokens, the gradient that comes, and the products before the activation of 10 rows and of 5
    read = 2 * 5 * 8 * 4 + (10 * 12 + 5 * 6) * 4 + 2 * 5 * 2 * 4 + 2 * (96 + 48 + 12) * 4 + (48 + 24 + 8) * 4
    written = sum(x.numel() for x in (gates, *tensors.values())) * 4
    return Work(4 * (10 * 144 + 5 * 80), read, written)


def _gathered(device: torch.device) -> Work:
    q, k, v = _tensors(device)
    hashes = torch.zeros(1, 4, 2, 2, dtype=torch.int32, device=device)
    gathered.attend(q, k, v, gathered.from_hashes(hashes, 2, True, False, True), scale=1.0)
    # two rounds of two heads: each of 4 tokens has its chunk of 2 and the other one; places are there once, chunks for each round
    return Work(2 * 128 * 16 * 4, 3 * _SIZE + 4 * 16 + 4 * 32, _SIZE + 64)


def _gathered_backward(device: torch.device) -> Work:
    members = torch.tensor([[0, 1], [1, 3], [2, 3]], dtype=torch.int32, device=device).expand(1, 2, 3, 2)
    o = gathered.attend(*_tensors(device, True), gathered.from_members(members, members, True), scale=1.0)
    o.backward(torch.ones_like(o))
    # 3 groups of 2 rows and 2 keys, and the outputs and lse of 6 positions in place of 4
    return Work(2 * 128 * 12 * 2 * 5 // 2, 4 * _SIZE + _SIZE * 6 // 4 + 96 + 2 * 48, 3 * _SIZE)


def _users(device: torch.device, requires_grad: bool = False) -> Tensor:
    """Users of five rows and of none: a contextual row, two events, two targets."""
    q, v = (torch.randn(5, 2, dim, device=device, requires_grad=requires_grad) for dim in (8, 4))
    table = torch.randn(3, device=device, requires_grad=requires_grad)
    cu, targets = torch.tensor([0, 5, 5], device=device), torch.tensor([2, 0], device=device)
    return hstu_attention(q, q, v, cu, alpha=0.5, bias=RelativeBias(table), contextual=1, targets=targets)


# the contextual row sees 3 rows, events 2 and 3, targets 4 each: two products of each pair and head; q stands for k, too
_USERS_PAIRS = 3 + 2 + 3 + 4 + 4


def _hstu(device: torch.device) -> Work:
    _users(device)
    return Work(2 * _USERS_PAIRS * 2 * (8 + 4), 5 * 2 * (8 + 4) * 4 + 3 * 4 + 5 * 8, 5 * 2 * 4 * 4)


def _hstu_backward(device: torch.device) -> Work:
    y = _users(device, True)
    y.backward(torch.ones_like(y))
    read = 5 * 2 * (8 + 4 + 4) * 4 + 3 * 4 + 5 * 8
    return Work(2 * _USERS_PAIRS * 2 * (8 + 4) * 5 // 2, read, 5 * 2 * (8 + 8 + 4) * 4 + 3 * 4)


def _candidates(device: torch.device, requires_grad: bool = False, **more: int) -> Tensor:
    """Three candidates of a user with five events, two of a user without."""
    q, keys = (torch.randn(n, heads, 8, device=device, requires_grad=requires_grad) for n, heads in ((5, 2), (5, 1)))
    bias = torch.randn(5, device=device, requires_grad=requires_grad)
    cu_q, cu = torch.tensor([0, 3, 5], device=device), torch.tensor([0, 5, 5], device=device)
    return target_attention(q, keys, cu, cu_q=cu_q, bias=bias, weights="silu", short="all" if more else None, **more)


# q, keys, which are the values too, the bias and the offsets
_CANDIDATES_READ = (5 * 2 * 8 + 5 * 8 + 5) * 4 + 2 * 3 * 8


def _target(device: torch.device) -> Work:
    _candidates(device)
    return Work(2 * 15 * 2 * 16, _CANDIDATES_READ, 5 * 2 * 8 * 4)


def _target_backward(device: torch.device) -> Work:
    o = _candidates(device, True)
    o.backward(torch.ones_like(o))
    # without softmax there is no lse
    return Work(2 * 15 * 2 * 16 * 5 // 2, 2 * 5 * 2 * 8 * 4 + _CANDIDATES_READ, (5 * 2 * 8 + 2 * 5 * 8 + 5) * 4)


def _target_search(device: torch.device) -> Work:
    _candidates(device, top_k=2)
    return Work(2 * 15 * 2 * 8, _CANDIDATES_READ, 5 * 2 * 2 * 4)


def _hstu_paged(device: torch.device) -> Work:
    table, lengths = _table(device)
    cache = _pages(device, torch.float8_e4m3fn).view(0, table, lengths, torch.tensor([0, 2, 3], dtype=torch.int32, device=device))
    q, k, v = torch.randn(3, 3, 2, 8, device=device)
    hstu_attention_paged(q, cache, alpha=0.5, scale=0.1, bias=RelativeBias(torch.zeros(5, device=device)), candidates=(k, v))
    # two candidates see 5 events and themselves, one sees 2; seven tokens in three blocks, a token 32 numbers and 4 scales
    read = 7 * 2 * (16 + 8) + 3 * 4 + 2 * 4 + 3 * 4 + 3 * 3 * 64 + 5 * 4
    return Work(2 * (2 * 6 + 3) * 2 * 16, read, 3 * 64)


def _adamw(device: torch.device) -> Work:
    w = torch.nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16, device=device))
    w.grad = torch.ones_like(w)
    AdamW([w], clip_norm=1.0, master="split").step()
    # weight, rest, two moments in fp32 and a sum are read and written, the gradient and its factor only read
    return Work(0, 15 * (2 + 2 + 8 + 2) + 4 + 4, 15 * (2 + 2 + 8) + 4)


def _backend(device: torch.device) -> str | None:
    # on a CPU the definition runs outside its operator, and the interpreter is slow
    return "tiled" if device.type == "cpu" else None


# each makes a call of the operator on a device, by way of the function that people call, and returns its work
CALLS: dict[str, Callable[[torch.device], Work]] = {
    "attention": _attention,
    "attention_backward": _attention_backward,
    "attention_paged": _attention_paged,
    "quantise_qkv": _quantise,
    "attention_quantised": _attention_quantised,
    "normalise": _normalise,
    "add_norm": _add_norm,
    "normalise_quantised": _normalise_quantised,
    "add_norm_quantised": _add_norm_quantised,
    "sum_norm_quantised": _sum_norm_quantised,
    "gated": _gated,
    "gated_backward": _gated_backward,
    "gate_quantised": _gate_quantised,
    "adamw": _adamw,
    "linear": _linear,
    "norm": _norm_of,
    "norm_backward": _norm_backward,
    "sum_norm": _sum_norm,
    "sum_norm_backward": _sum_norm_backward,
    "gated_norm": _gated_norm,
    "gated_norm_backward": _gated_norm_backward,
    "gate_up": _gate_up,
    "gate_up_backward": _gate_up_backward,
    "rotary": _rotary,
    "rotary_backward": _rotary,
    "softmax": _softmax,
    "softmax_backward": _softmax_backward,
    "cross_entropy": _cross_entropy,
    "cross_entropy_backward": _cross_entropy_backward,
    "linear_cross_entropy": _linear_cross_entropy,
    "linear_cross_entropy_backward": _linear_cross_entropy_backward,
    "linear_cross_entropy_reduced": _linear_cross_entropy_reduced,
    "linear_cross_entropy_reduced_backward": _linear_cross_entropy_reduced_backward,
    "quantise_rows": _quantise_rows,
    "linear_quantised": _linear_quantised,
    "linear_gated": _linear_gated,
    "linear_gated_rows": _linear_gated_rows,
    "linear_rounded": _linear_rounded,
    "linear_rounded_backward": _linear_rounded_backward,
    "weight_rounded": _weight_rounded,
    "weight_rounded_backward": _weight_rounded_backward,
    "dequantise_weight": _dequantise_weight,
    "rotate": _rotate,
    "write_kv": _write,
    "write_kv_and_rotate": _write_and_rotate,
    "gather_kv": _gather,
    "copy_blocks": _copy,
    "choose_pages": _choose_pages,
    "page_scores": _page_scores,
    **SPARSE_CALLS,
    **STATE_CALLS,
    "native_sparse_decode": _native_sparse_decode,
    "sample": _sample,
    "chunked_recurrence": _recurrence,
    "chunked_recurrence_backward": _recurrence_backward,
    "experts": _experts,
    "experts_backward": _experts_backward,
    "selected_attention": _selected,
    "selected_attention_backward": _selected_backward,
    "gated_sum": _gated_sum,
    "gated_sum_backward": _gated_sum_backward,
    "gathered_attention": _gathered,
    "hstu_attention": _hstu,
    "hstu_attention_backward": _hstu_backward,
    "target_attention": _target,
    "target_attention_backward": _target_backward,
    "target_search": _target_search,
    "hstu_attention_paged": _hstu_paged,
    "gathered_attention_backward": _gathered_backward,
}
