"""Products with quantised weights on a GPU: every kernel by the rule of two, exact sums, places past 2^31, CUDA graphs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import rooftile as rt
from rooftile.numerics import quantise_rows, row_kernels
from rooftile.numerics.activations import gated_halves
from rooftile.numerics.quantised_rows import rows_as_codes
from rooftile.runtime import launch
from rooftile.runtime.early_weights import weights_stay
from rooftile.weights import dequantise, multiply_gated, multiply_gated_rows
from rooftile.weights import dispatch as backends
from rooftile.weights.gated import takes, takes_rows
from tests.weights.cases import FORMATS, QUANTISES_X, assert_product, defined, ordered, weight_of

pytestmark = pytest.mark.gpu

# N x K: the projections of an 8B model with an eighth of their rows, and sizes that no tile divides
SIZES = [(768, 4096), (3584, 4096), (512, 14336), (77, 384), (4099, 1024)]
ROWS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 255, 256, 257, 512, 1024, 1300)
# our kernels; those for Hopper refuse elsewhere, and a part of the formats
OURS = ("hopper", "triton")
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ON_HOPPER = ("fp8", "fp8_tile", "int8", "int4", "int4, 32, zeros", "int4, 64")
# ... and those whose weights become numbers of bf16, or of fp16, in its registers
WIDENED = ("w8", "mxfp8", "mxfp4", "nvfp4")


def skip_refused(way: str, name: str) -> None:
    """Skips where the kernels for Hopper do not run, and only there."""
    if way == "hopper" and not (IS_HOPPER and name in ON_HOPPER):
        pytest.skip("refused")


def skip_elsewhere(way: str) -> None:
    """Skips the kernels for Hopper on other chips; of x in bf16 they take every format."""
    if way == "hopper" and not IS_HOPPER:
        pytest.skip("refused")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_dequantised_bits(name: str, N: int, K: int, dtype: torch.dtype) -> None:
    weight = weight_of(name, N, K, "cuda")
    assert torch.equal(dequantise(weight, dtype), weight.dequantise(dtype))


@pytest.mark.parametrize("way", [*OURS, "library"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_products(name: str, N: int, K: int, way: str) -> None:
    skip_elsewhere(way)
    weight, bias = weight_of(name, N, K, "cuda"), torch.randn(N, device="cuda").bfloat16()
    many = torch.randn(max(ROWS), K, device="cuda").bfloat16()
    for M in ROWS:
        x = many[:M]
        try:
            found = rt.linear(x, weight, bias, backend=way)
        except rt.Unsupported:
            assert way == "library" or (way == "hopper" and M > 2048)
            continue
        assert_product(found, x, weight, bias)


@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_dtypes_and_strides(name: str, dtype: torch.dtype, way: str) -> None:
    skip_refused(way, name)
    weight = weight_of(name, 512, 1024, "cuda")
    if way == "hopper" and weight.format == "int4":
        if dtype == torch.float32:
            pytest.skip("has 16 bits")
        weight = replace(weight, scales=weight.scales.to(dtype))
    x = torch.randn(3, 40, 1100, device="cuda").to(dtype)[:, ::2, :1024]
    for out_dtype in (None, torch.float32):
        found = rt.linear(x, weight, out_dtype=out_dtype, backend=way)
        # the FP8 units keep 13 bits behind the leading one of a sum (DeepSeek-V3, arXiv:2412.19437, section 3.3.2)
        sums = 2**-13 if weight.format.startswith("fp8") else 0.0
        assert_product(found.flatten(0, 1).to(dtype), x.reshape(-1, 1024), weight, sums=sums)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("w8", torch.float16), ("nvfp4", torch.float16), *((name, torch.bfloat16) for name in WIDENED)],
    ids=str,
)
def test_widened_dtypes_and_strides(name: str, dtype: torch.dtype) -> None:
    skip_elsewhere("hopper")
    weight = weight_of(name, 512, 1024, "cuda")
    if name == "w8":
        weight = replace(weight, scales=weight.scales.to(dtype))
    x = torch.randn(3, 40, 1100, device="cuda").to(dtype)[:, ::2, :1024]
    for out_dtype in (None, torch.float32):
        found = rt.linear(x, weight, out_dtype=out_dtype, backend="hopper")
        assert_product(found.flatten(0, 1).to(dtype), x.reshape(-1, 1024), weight)
    with pytest.raises(rt.Unsupported, match=r"x in torch\.float32"):
        rt.linear(x.float(), weight, backend="hopper")


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("name", ["w8", "int4", "int4, 32, zeros", "mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize(("F", "K"), [(14336, 4096), (304, 640), (4112, 1024)])
def test_gates_leave_their_product(name: str, F: int, K: int, activation: str) -> None:
    """One kernel says what the product and the gate say one after the other, but for the order of sums; also in a graph."""
    skip_elsewhere("hopper")
    weight, bias = weight_of(name, 2 * F, K, "cuda"), torch.randn(2 * F, device="cuda").bfloat16()
    for M in (1, 17, 64, 65, 257, 512, 1300):
        x = torch.randn(M, K, device="cuda").bfloat16()
        assert takes(x, weight, bias)
        found = multiply_gated(x, weight, bias, activation)
        due = gated_halves(rt.linear(x, weight, bias, backend="hopper", out_dtype=torch.float32), activation)
        assert (found.float() - due).abs().mean() <= 2**-8 * due.abs().mean()
        torch.testing.assert_close(found.float(), due, rtol=3e-2, atol=3e-2 * float(due.abs().max()))
        for _ in range(5):
            assert torch.equal(multiply_gated(x, weight, bias, activation), found)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        y = multiply_gated(x, weight, bias, activation)
    graph.replay()
    assert torch.equal(y, found)
    assert not takes(x.repeat(2, 1), weight, bias)


@pytest.mark.parametrize("M", [1, 40, 300])
def test_an_outer_scale_per_row(M: int) -> None:
    """Parts of one product, as q, k and v, have outer scales of their own."""
    skip_elsewhere("hopper")
    weight = weight_of("nvfp4", 768, 1024, "cuda")
    weight = replace(weight, outer=weight.outer * torch.linspace(0.5, 2, 768, device="cuda")[:, None])
    x = torch.randn(M, 1024, device="cuda").bfloat16()
    assert_product(rt.linear(x, weight, backend="hopper"), x, weight)


@pytest.mark.parametrize("name", ["int4", "int4, 32, zeros", "w8", "mxfp8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("N", "K"), [(256, 384), (4096, 4096), (77, 1024)])
def test_widened_weights_are_those_of_the_definition(name: str, dtype: torch.dtype, N: int, K: int) -> None:
    """Rows of the identity show each weight as the kernel multiplies it: in order, and with all its bits."""
    skip_elsewhere("hopper")
    if name.startswith("mx") and dtype == torch.float16:
        pytest.skip("has bfloat16")
    weight = weight_of(name, N, K, "cuda")
    if name in ("w8", "int4", "int4, 32, zeros"):
        weight = replace(weight, scales=weight.scales.to(dtype))
    due = weight.dequantise(dtype).T
    for rows in (8, 64, 128):
        for start in range(0, K, rows):
            x = torch.zeros(rows, K, dtype=dtype, device="cuda")
            x[torch.arange(rows), torch.arange(start, start + rows)] = 1.0
            assert torch.equal(rt.linear(x, weight, backend="hopper"), due[start : start + rows]), (rows, start)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("N", "K"), [(6144, 4096), (4096, 14336), (4099, 1024)])
def test_programs_that_share_tiles_agree_with_themselves(name: str, N: int, K: int) -> None:
    """Whoever finishes last adds a tile in the same order: fifty runs have the same bits, with memory full of NaN before."""
    skip_elsewhere("hopper")
    weight = weight_of(name, N, K, "cuda")
    for M in (1, 16, 24, 64, 200, 700):
        x = torch.randn(M, K, device="cuda").bfloat16()
        due = rt.linear(x, weight, backend="hopper")
        for _ in range(50):
            lost = torch.full((1 << 24,), torch.nan, device="cuda")
            del lost
            assert torch.equal(rt.linear(x, weight, backend="hopper"), due)


@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("name", ["fp8", "fp8_tile"])
def test_long_rows_of_one_sign(name: str, way: str) -> None:
    """Sums of 13 bits would be off by more than 2^-10 of the sum of |x w|."""
    skip_elsewhere(way)
    w = torch.rand(4096, 14336, device="cuda") + 0.1
    weight = rt.quantise_weight(w, name)
    for M in (1, 64, 256, *[2048] * (way == "triton")):
        x = (torch.rand(M, 14336, device="cuda") + 0.1).bfloat16()
        found = rt.linear(x, weight, out_dtype=torch.float32, backend=way).double()
        exact = defined(x, weight, exact=True)
        assert ((found - exact).abs() <= 2.0**-10 * exact.abs()).all(), ((found - exact).abs() / exact.abs()).max()


@pytest.mark.parametrize("way", [*OURS, "library"])
def test_int8_is_exact(way: str) -> None:
    skip_elsewhere(way)
    weight, x = weight_of("int8", 1024, 14336, "cuda"), torch.randn(64, 14336, device="cuda")
    rows = quantise_rows(x, "int8")
    sums = (rows.codes.double() @ weight.codes.double().T).float()
    due = sums * rows.scales * weight.scales.T
    assert torch.equal(rt.linear(rows, weight, out_dtype=torch.float32, backend=way), due)


@pytest.mark.parametrize("name", QUANTISES_X)
@pytest.mark.parametrize("K", [128, 131, 4096, 14336, 65536])
def test_rows_are_quantised_as_defined(name: str, K: int) -> None:
    x = torch.randn(37, K, device="cuda") * torch.logspace(-40, 30, 37, device="cuda")[:, None]
    x[3, 5], x[4, K - 1], x[5] = torch.nan, torch.inf, 0.0
    for rows in (x, x.bfloat16(), x[:, ::2]):
        found, due = row_kernels.quantise(rows, name, None), rows_as_codes(rows, name)
        torch.testing.assert_close(found[1], due[1], rtol=0, atol=0, equal_nan=True)
        kept = rows.isfinite()
        assert torch.equal(found[0].float()[kept], due[0].float()[kept])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("N", "K"), [(1024, 4096), (4096, 14336)])
def test_a_row_does_not_know_its_batch(N: int, K: int, name: str) -> None:
    weight, x = weight_of(name, N, K, "cuda"), torch.randn(256, K, device="cuda").bfloat16()
    together = rt.linear(x, weight, deterministic=True)
    # more rows than one launch has
    assert torch.equal(rt.linear(x.repeat(3, 1), weight, deterministic=True)[:256], together)
    # 17 rows are put in order before a product of many steps, and within one of few
    for first, rows in ((0, 1), (255, 1), (100, 17), (0, 64), (0, 128)):
        some = slice(first, first + rows)
        assert torch.equal(rt.linear(x[some].clone(), weight, deterministic=True), together[some])


@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("name", FORMATS)
def test_nan_stays_in_its_row(name: str, way: str) -> None:
    skip_elsewhere(way)
    weight, x = weight_of(name, 512, 1024, "cuda"), torch.randn(70, 1024, device="cuda").bfloat16()
    due = rt.linear(x, weight, backend=way)
    x[33, 7] = torch.nan
    found = rt.linear(x, weight, backend=way)
    assert found[33].isnan().all()
    kept = torch.arange(70, device="cuda") != 33
    assert torch.equal(found[kept], due[kept])


@pytest.mark.parametrize("way", OURS)
def test_columns_in_another_order(way: str) -> None:
    skip_elsewhere(way)
    weight, x = ordered(weight_of("int4", 512, 1024, "cuda")), torch.randn(5, 1024, device="cuda").bfloat16()
    assert_product(rt.linear(x, weight, backend=way), x, weight)


@pytest.mark.parametrize("name", FORMATS)
def test_gradients(name: str) -> None:
    weight = weight_of(name, 512, 1024, "cuda")
    x = torch.randn(70, 1024, device="cuda", requires_grad=True)
    dy = torch.randn(70, 512, device="cuda")
    rt.linear(x, weight).backward(dy)
    torch.testing.assert_close(x.grad.double(), dy.double() @ weight.dequantise().double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
@pytest.mark.parametrize("way", OURS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("M", [1, 256])
def test_a_graph_says_the_same(name: str, M: int, way: str, early: bool) -> None:
    skip_elsewhere(way)
    weight, x = weight_of(name, 1024, 4096, "cuda"), torch.randn(M, 4096, device="cuda").bfloat16()
    with torch.inference_mode():
        rt.linear(x, weight, backend=way)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with weights_stay() if early else nullcontext(), torch.cuda.graph(graph):
            y = rt.linear(x, weight, backend=way)
        for _ in range(2):
            x.copy_(torch.randn_like(x))
            graph.replay()
            assert torch.equal(y, rt.linear(x, weight, backend=way))


@pytest.mark.parametrize("name", FORMATS)
def test_a_graph_may_write_a_weight_before_its_product(name: str) -> None:
    """The product waits for the kernel in front of it, which takes long: it writes the whole weight."""
    skip_elsewhere("hopper")
    N, K = 28672, 4096
    first, second = (weight_of(name, N, K, "cuda", seed=seed) for seed in (0, 1))
    weight = replace(first, codes=first.codes.clone())
    x = torch.randn(8, K, device="cuda").bfloat16()
    with torch.inference_mode():
        due = rt.linear(x, replace(first, codes=second.codes), backend="hopper")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            weight.codes.copy_(second.codes)
            y = rt.linear(x, weight, backend="hopper")
        for _ in range(20):
            weight.codes.copy_(first.codes)
            graph.replay()
            assert torch.equal(y, due)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize(("F", "K"), [(14336, 4096), (304, 640), (4112, 1024)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_leave_their_product_in_codes(dtype: torch.dtype, F: int, K: int, activation: str) -> None:
    """One kernel writes the codes of a product, a gate and `quantise_rows`, but for the order of sums; also in a graph."""
    skip_elsewhere("hopper")
    weight, bias = weight_of("fp8", 2 * F, K, "cuda"), torch.randn(2 * F, device="cuda").bfloat16()
    scale = torch.tensor([0.02], device="cuda")
    for M in (1, 8, 17, 32, 64, 130, 256):
        x = torch.randn(M, K, device="cuda").to(dtype)
        x[M // 2, 3] = torch.nan if M > 1 else 0.0
        rows = quantise_rows(x)
        assert takes_rows(rows, weight, bias)
        found = multiply_gated_rows(rows, weight, bias, activation, scale)
        due = quantise_rows(gated_halves(rt.linear(rows, weight, bias, backend="hopper"), activation), scale=scale)
        assert torch.equal(found.scales, due.scales)
        assert torch.equal(found.dequantise().isnan(), due.dequantise().isnan())
        kept = ~due.dequantise().isnan()
        torch.testing.assert_close(found.dequantise()[kept], due.dequantise()[kept], rtol=0.13, atol=0.01)
        for _ in range(5):
            assert torch.equal(multiply_gated_rows(rows, weight, bias, activation, scale).codes.view(torch.uint8),
                               found.codes.view(torch.uint8))  # fmt: skip
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), weights_stay(), torch.cuda.graph(graph):
        y = multiply_gated_rows(rows, weight, bias, activation, scale)
    graph.replay()
    assert torch.equal(y.codes.view(torch.uint8), found.codes.view(torch.uint8))
    assert not takes_rows(quantise_rows(x.repeat(2, 1)), weight, bias)


@pytest.mark.parametrize("name", FORMATS)
def test_graphs_and_streams_at_once(name: str) -> None:
    """Graphs that are replayed beside each other, and calls on another stream, share no counters."""
    skip_elsewhere("hopper")
    weight, x = weight_of(name, 4096, 4096, "cuda"), torch.randn(3, 16, 4096, device="cuda").bfloat16()
    with torch.inference_mode():
        due = [rt.linear(rows, weight, backend="hopper") for rows in x]
        graphs, found = [torch.cuda.CUDAGraph() for _ in range(2)], []
        for graph, rows in zip(graphs, x, strict=False):
            with torch.cuda.graph(graph):
                found.append([rt.linear(rows, weight, backend="hopper") for _ in range(8)])
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        for _ in range(20):
            for graph, stream in zip(graphs, streams, strict=False):
                with torch.cuda.stream(stream):
                    graph.replay()
            with torch.cuda.stream(streams[2]):
                eager = [rt.linear(x[2], weight, backend="hopper") for _ in range(8)]
        torch.cuda.synchronize()
        for each, expected in zip((*found, eager), due, strict=True):
            assert all(torch.equal(y, expected) for y in each)


@pytest.mark.parametrize("name", FORMATS)
def test_compiled(name: str) -> None:
    skip_elsewhere("hopper")
    weight, x = weight_of(name, 1024, 4096, "cuda"), torch.randn(7, 4096, device="cuda").bfloat16()
    torch._dynamo.reset()  # one compilation for each format is more than Dynamo keeps for one line of code
    run = torch.compile(lambda x: rt.linear(x, weight, backend="hopper"), fullgraph=True)
    assert torch.equal(run(x), rt.linear(x, weight, backend="hopper"))


@pytest.mark.parametrize("name", FORMATS)
def test_few_rows_go_to_the_kernels_for_hopper(name: str) -> None:
    skip_elsewhere("hopper")
    weight = weight_of(name, 4096, 4096, "cuda")
    most, many = backends.last_on_hopper(weight.format), {"fp8_tile": "triton", "int8": "hopper"}.get(name, "library")
    last = 2048 if name in ("fp8_tile", "int8") else int(most)
    for M, way in ((1, "hopper"), (last, "hopper"), (last + 1, many), (4096, many)):
        x = torch.zeros(M, 4096, dtype=torch.bfloat16, device="cuda")
        assert rt.explain(x, weight).splitlines()[-1].replace(";", " ").replace(",", " ").split()[:2] == [way, "runs"]


@pytest.mark.parametrize("name", ["fp8", "int4", "w8"])
def test_results_and_codes_past_2_to_the_31_on_hopper(name: str) -> None:
    skip_elsewhere("hopper")
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB")
    # o has more than 2^31 numbers, and so has the weight
    N, K, M = 4_200_000, 512, 512
    codes = torch.randint(0, 256, (N, K // 2 if name == "int4" else K), dtype=torch.uint8, device="cuda")
    if name == "fp8":
        # no code of NaN
        codes = (codes & 0xF7).view(torch.float8_e4m3fn)
    codes = codes.view(torch.int8) if name == "w8" else codes
    scales = torch.rand(N, K // 128 if name == "int4" else 1, device="cuda") * 0.01 + 0.01
    scales = scales if name == "fp8" else scales.bfloat16()
    weight = rt.QuantisedWeight(codes, scales, None, None, name, 128 if name == "int4" else K, (N, K))
    x = torch.randn(M, K, device="cuda").bfloat16()
    found = rt.linear(x, weight, backend="hopper")
    last = rt.QuantisedWeight(codes[-256:], scales[-256:], None, None, name, weight.group, (256, K))
    assert_product(found[-2:, -256:], x[-2:], last)


@pytest.mark.parametrize(("name", "way"), [("w8", "triton"), ("int8", "triton"), ("int4", "triton"), ("int8", "hopper")])
def test_places_past_2_to_the_31(name: str, way: str) -> None:
    skip_elsewhere(way)
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB")
    N, K, M = 32768, 256, 66_000
    weight = weight_of(name, N, K, "cuda")
    x = torch.randn(M, K, device="cuda").bfloat16()
    found = rt.linear(x, weight, backend=way)
    assert torch.equal(found[-2:], rt.linear(x[-2:].clone(), weight, backend="triton")) or name != "int8"
    assert_product(found[-2:], x[-2:], weight)


def test_kernels_run() -> None:
    """A call that names no backend runs kernels."""
    for name in FORMATS:
        weight = weight_of(name, 512, 1024, "cuda")
        for M in (1, 64, 4096):
            seen: list[str] = []
            with launch.observe(seen.append):
                rt.linear(torch.randn(M, 1024, device="cuda").bfloat16(), weight)
            assert seen or backends.last_on_hopper(weight.format) < M, (name, M)
