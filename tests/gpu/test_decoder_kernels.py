"""The decoder's kernels on a GPU: what the plain operations do there, and decoders that say what they say on a CPU."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor

from rooftile import fused
from rooftile.fused import ACTIVATIONS
from rooftile.fused.norm import add_norm, added_as_defined, normalise, normalised_as_defined
from rooftile.fused.rope import Rotation, rotate
from rooftile.models import Decoder
from rooftile.models.config import config_of
from rooftile.numerics import quantise_rows
from rooftile.numerics.activations import gated_halves
from tests.models.checkpoints import CONFIGS
from tests.models.norms import KINDS, assert_within_an_ulp, norm_of

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("total", "size"), [(1, 4096), (256, 896), (16384, 40), (8192, 2048), (7, 16384), (5, 41), (1, 1)])
def test_norms(total: int, size: int, kind: str, dtype: torch.dtype) -> None:
    norm = norm_of(kind, size, dtype, "cuda")
    x, residual = (2 * torch.randn(2, total, size, device="cuda")).to(dtype)
    assert_within_an_ulp(normalise(x, norm), normalised_as_defined(x, norm))
    due, due_stream = added_as_defined(x, residual, norm)
    found, stream = add_norm(x, residual, norm)
    assert torch.equal(stream, due_stream)
    assert_within_an_ulp(found, due)


@pytest.mark.parametrize("given", [False, True], ids=["own-scales", "given-scale"])
@pytest.mark.parametrize("out", ["fp8", "int8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("total", "size"), [(1, 4096), (256, 4096), (4096, 896), (300, 5120), (16384, 40), (5, 41)])
def test_quantised_as_they_are_rounded(total: int, size: int, kind: str, dtype: torch.dtype, out: str, given: bool) -> None:
    """One kernel gives the bits of two."""
    if given and out == "int8":
        pytest.skip("INT8 finds its scales")
    norm, scale = norm_of(kind, size, dtype, "cuda"), torch.tensor([0.01], device="cuda") if given else None
    x, residual = (2 * torch.randn(2, total, size, device="cuda")).to(dtype)
    due_added, due_stream = add_norm(x, residual.clone(), norm, norm)
    added, stream = add_norm(x, residual, norm, norm, out, scale)
    assert torch.equal(stream, due_stream)
    pairs = [(added, due_added), (normalise(x, norm, out, scale), normalise(x, norm))]
    if size % 2 == 0:
        pairs += [(fused.gated(x, name, out, scale), fused.gated(x, name)) for name in ACTIVATIONS]
    for found, y in pairs:
        due = quantise_rows(y, out, scale=scale)
        assert torch.equal(found.codes.float(), due.codes.float())
        assert torch.equal(found.scales, due.scales)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("total", "size"), [(1, 2304), (300, 3584), (3, 16384), (70, 40)])
def test_what_is_added_is_normalised_first(total: int, size: int, kind: str, dtype: torch.dtype) -> None:
    norm, post = (norm_of(kind, size, dtype, "cuda", eps=eps) for eps in (1e-2, 0.3))
    x, residual = (2 * torch.randn(2, total, size, device="cuda")).to(dtype)
    _, due_stream = added_as_defined(x, residual, norm, post)
    added = normalised_as_defined(x, post).double().abs()
    found, stream = add_norm(x, residual, norm, post)
    # an ulp of what is added may be many of a sum near zero
    assert_within_an_ulp(stream, due_stream, also=(8 if dtype == torch.float32 else 1) * torch.finfo(dtype).eps * added)
    # the norm that a family has after its projections (Gemma 2)
    if dtype != torch.float32 and kind == "plus one":
        assert (stream != due_stream).float().mean() < 0.01
    assert_within_an_ulp(found, normalised_as_defined(stream, norm))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("total", "heads", "size"), [(1, 32, 128), (1000, 8, 128), (37, 3, 24), (3, 7, 80), (5, 1, 256)])
def test_heads_of_a_projection(total: int, heads: int, size: int, kind: str, dtype: torch.dtype) -> None:
    norm = norm_of(kind, size, dtype, "cuda")
    qkv = torch.randn(total, 3 * heads * size, device="cuda").to(dtype).unflatten(-1, (3 * heads, size))
    for x in (*qkv.split(heads, dim=1), qkv.transpose(0, 1), qkv[:, ::2]):
        assert_within_an_ulp(normalise(x, norm), normalised_as_defined(x, norm))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("total", "ffn"), [(1, 14336), (256, 4864), (4096, 48), (33, 7)])
def test_gates(total: int, ffn: int, activation: str, dtype: torch.dtype) -> None:
    x = (4 * torch.randn(total, 2 * ffn, device="cuda")).to(dtype)
    tail = 1e-6 * x.chunk(2, dim=-1)[1].double().abs() if activation.startswith("gelu") else None
    assert_within_an_ulp(fused.gated(x, activation), gated_halves(x, activation), of=2.0, also=tail)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [40, 128, 2048, 4096])
def test_a_row_does_not_know_its_neighbours(size: int, kind: str) -> None:
    norm = norm_of(kind, size, torch.bfloat16, "cuda")
    x, residual = torch.randn(2, 1000, size, device="cuda").bfloat16()
    together, stream = add_norm(x, residual.clone(), norm)
    gates = fused.gated(x, "silu")
    for first, rows in ((0, 1), (999, 1), (40, 17), (0, 512)):
        some = slice(first, first + rows)
        found, part = add_norm(x[some].clone(), residual[some].clone(), norm)
        assert torch.equal(part, stream[some])
        assert torch.equal(found, together[some])
        assert torch.equal(normalise(part, norm), together[some])
        assert torch.equal(fused.gated(x[some].clone(), "silu"), gates[some])


def test_places_past_2_to_the_31() -> None:
    total, ffn = 75_000, 14336
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB")
    x = torch.zeros(total, 2 * ffn, device="cuda", dtype=torch.bfloat16)
    x[-2:].normal_()
    assert torch.equal(fused.gated(x, "relu")[-2:], gated_halves(x[-2:], "relu"))
    norm = norm_of("rms", 2 * ffn, torch.bfloat16, "cuda")
    assert torch.equal(normalise(x, norm)[-2:], normalise(x[-2:].clone(), norm))


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
    """One sequence, in plain operations."""
    if rotation is not None:
        q, k = rotate(q, rotation), rotate(k, rotation)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[2] ** -0.5
    hidden = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def decoder_of(name: str, dtype: torch.dtype) -> Decoder:
    """A decoder whose every weight matters."""
    decoder = Decoder.random(config_of(CONFIGS[name]().to_dict(), "here"), torch.float32)
    for weight in decoder.parameters():
        weight.copy_(weight + 0.3 * torch.randn_like(weight) if weight.dim() == 1 else 10 * weight)
    return decoder.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_decoders_say_what_they_say_on_a_cpu(name: str, dtype: torch.dtype) -> None:
    decoder = decoder_of(name, dtype)
    tokens, positions = torch.randint(97, (41,)), torch.arange(41)
    there = deepcopy(decoder).cuda()
    with torch.inference_mode():
        due = decoder.logits(decoder(tokens, positions, attend))
        found = there.logits(there(tokens.cuda(), positions.cuda(), attend)).cpu()
    assert (found - due).abs().max() <= 1e-4 * due.abs().max()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gpt2"])
def test_a_graph_says_the_same(name: str) -> None:
    decoder = decoder_of(name, torch.bfloat16).cuda()
    tokens, positions = torch.randint(97, (9,), device="cuda"), torch.arange(9, device="cuda")
    # cuBLAS takes its workspace, and Triton compiles, on the first call, which a graph must not see
    torch.cuda.synchronize()
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        decoder(tokens, positions, attend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        hidden = decoder(tokens, positions, attend)
    for step in (5, 20):
        tokens.copy_((tokens + step) % 97)
        positions.add_(step)
        graph.replay()
        with torch.inference_mode():
            torch.testing.assert_close(hidden, decoder(tokens, positions, attend))
        assert hidden.isfinite().all()
