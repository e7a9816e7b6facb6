"""One place knows what a device runs: without Triton, or with one that is too old, every function says the same sentence once."""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate, fused, numerics
from rooftile.exact import dispatch
from rooftile.exact.ops import attention
from rooftile.exact.spec import Spec
from rooftile.kvcache import PagedKV, Pages
from rooftile.runtime import devices
from rooftile.runtime.launch import BoundedCache

PACKAGE = Path(rt.__file__).parent
MISSING = "Triton is not installed; needs 3.6 or newer"
OLD = "Triton 3.5.1; needs 3.6 or newer"


@pytest.fixture(params=["missing", "old"])
def lack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Hides Triton, or makes it old, and returns the sentence that is due."""
    find, version = util.find_spec, metadata.version
    if request.param == "missing":
        monkeypatch.setattr(devices.util, "find_spec", lambda name, *rest: None if name == "triton" else find(name, *rest))
    else:
        spec = SimpleNamespace(origin="/triton/__init__.py")
        monkeypatch.setattr(devices.util, "find_spec", lambda name, *rest: spec if name == "triton" else find(name, *rest))
        monkeypatch.setattr(devices.metadata, "version", lambda name: "3.5.1" if name == "triton" else version(name))
    for function in (devices.lack_of_triton, devices.lack_of_gluon, devices._warn_once):
        function.cache_clear()
    dispatch.choose.cache_clear()
    yield MISSING if request.param == "missing" else OLD
    monkeypatch.undo()
    for function in (devices.lack_of_triton, devices.lack_of_gluon, devices._warn_once):
        function.cache_clear()
    dispatch.choose.cache_clear()


def test_only_one_file_asks_for_triton_or_a_capability() -> None:
    """Looked up in the syntax tree: a comment may name it."""
    asks = {"find_spec", "get_device_capability"}
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            words = {value.value for value in node.args if isinstance(value, ast.Constant)}
            if name in asks and (name != "find_spec" or any(str(word).startswith("triton") for word in words)):
                found.add(str(path.relative_to(PACKAGE)))
    assert found == {"runtime/devices.py"}


@pytest.mark.parametrize("word", ["sm80", "sm90", "sm120", "gfx942"])
def test_both_kernel_backends_of_attention_refuse_with_the_sentence(lack: str, word: str) -> None:
    spec = Spec(dtype=torch.bfloat16, dim=64, dim_v=64, scale=0.125, device=word)
    verdicts = dispatch.verdicts(spec)
    assert verdicts["triton"] == (lack,)
    assert (verdicts["hopper"][0] == lack) == (word == "sm90")


def test_an_older_gpu_is_named_before_triton(lack: str) -> None:
    assert devices.lack_of_kernels("sm75") == "tensors are on sm75; needs a CUDA GPU of sm80 (Ampere) or newer"


def test_this_triton_is_new_enough() -> None:
    pytest.importorskip("triton", reason="Triton is not installed on this platform")
    assert devices.lack_of_triton() == devices.lack_of_gluon() == ""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tensors of this CPU say that they are on a Hopper GPU: where Triton is missing, PyTorch's operations run on them."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True), raising=False)
    monkeypatch.setitem(devices._KNOWN, torch.device("cpu"), "sm90")
    # calls that are prepared here must not be found by other tests
    monkeypatch.setattr(attention, "_PREPARED", BoundedCache())
    for module in [module for name, module in sys.modules.items() if name.startswith("rooftile.")]:
        if hasattr(module, "is_capturing"):
            monkeypatch.setattr(module, "is_capturing", lambda: False)


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def qkv(T: int = 64, H: int = 2, D: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    return some(1, T, H, D), some(1, T + 1, H, D)[:, :T], some(1, T + 2, H, D)[:, :T]


def packed() -> tuple[Tensor, ...]:
    cu = torch.tensor([0, 30, 64], dtype=torch.int32)
    return (*(x[0] for x in qkv()), cu, cu)


def paged() -> tuple[Tensor, PagedKV]:
    table, lengths = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    return some(1, 1, 2, 16), PagedKV(some(3, 16, 2, 16), some(3, 16, 2, 16), table, lengths)


def product(name: str) -> Tensor:
    return rt.linear(some(3, 128), rt.quantise_weight(some(64, 128), name))


def sparse_product() -> Tensor:
    w = some(64, 128)
    return rt.linear(some(3, 128), rt.sparsity.compress(w, rt.sparsity.two_four(w)))


def step() -> Tensor:
    weight = torch.nn.Parameter(some(8, 8))
    optimiser = rt.optim.AdamW([weight])
    weight.square().sum().backward()
    optimiser.step()
    return weight.detach()


def written() -> Tensor:
    pages = Pages(2, 1, 2, 16, block_size=16, dtype=torch.float32, device="cpu")
    pages.write(0, some(3, 2, 16), some(3, 2, 16), torch.arange(3))
    return pages.storage[:1, :, :, :3]


def natively_sparse() -> Any:
    q, k, v = qkv()
    compressed, gates = (some(1, 4, 2, 16), some(1, 4, 2, 16)), some(1, 64, 2, 3).sigmoid()
    return approximate.native_sparse(
        q, compressed, (k, v), (k, v), gates, length=16, stride=16, block_size=16, count=2, local=1, window=16
    )


def clustered() -> Any:
    q, k, v = qkv()
    return approximate.routing(q, k, v, some(2, 4, 16), width=8)


CALLS: dict[str, Callable[[], Any]] = {
    "attention": lambda: rt.attention(*qkv(), rt.CAUSAL),
    "attention_packed": lambda: rt.attention_packed(*packed(), rt.CAUSAL),
    "attention_paged": lambda: rt.attention_paged(*paged()),
    "attention in 8 bits": lambda: rt.attention(*qkv(), precision="int8"),
    "rms_norm": lambda: fused.rms_norm(some(3, 64), some(64)),
    "layer_norm": lambda: fused.layer_norm(some(3, 64), some(64), some(64)),
    "swiglu": lambda: fused.swiglu(some(3, 64), some(3, 64)),
    "softmax": lambda: fused.softmax(some(3, 64)),
    "cross_entropy": lambda: fused.cross_entropy(some(3, 64), torch.tensor([1, 2, 3])),
    "quantise_rows": lambda: numerics.quantise_rows(some(3, 64), "int8").codes,
    "quantise_weight": lambda: rt.quantise_weight(some(64, 128), "w8").codes,
    "linear, w8": lambda: product("w8"),
    "linear, int8": lambda: product("int8"),
    "linear, int4": lambda: product("int4"),
    "2:4 mask": lambda: rt.sparsity.two_four(some(8, 16)),
    "linear, 2:4": sparse_product,
    "recurrence": lambda: approximate.linear(*qkv(), rt.CAUSAL),
    "performer": lambda: approximate.performer(*qkv(), features=approximate.Features.draw(16, 8, seed=0)),
    "reformer": lambda: approximate.reformer(*qkv()[1:], buckets=4, chunk=16),
    "routing": clustered,
    "native sparse": natively_sparse,
    "AdamW": step,
    "a paged cache": written,
}


@pytest.mark.parametrize("name", CALLS)
def test_every_operation_runs_without_triton_and_says_the_sentence_once(name: str, lack: str, gpu: None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = CALLS[name]()
        CALLS[name]()
    assert [str(one.message).partition(":")[0] for one in caught] == [lack]
    assert not isinstance(found, Tensor) or not found.is_floating_point() or found.isfinite().all()


@pytest.mark.parametrize(
    "call",
    [
        lambda: rt.attention(*qkv(), backend="triton"),
        lambda: rt.attention(*qkv(), backend="hopper"),
        lambda: rt.linear(some(3, 128), rt.quantise_weight(some(64, 128), "w8"), backend="triton"),
        lambda: rt.linear(some(3, 128), rt.quantise_weight(some(64, 128), "w8"), backend="hopper"),
        lambda: rt.linear(
            some(3, 128), rt.sparsity.compress(some(64, 128), rt.sparsity.two_four(some(64, 128))), backend="triton"
        ),
        lambda: approximate.linear(*qkv(), rt.CAUSAL, backend="triton"),
    ],
    ids=["attention, triton", "attention, hopper", "linear, triton", "linear, hopper", "2:4", "recurrence"],
)
@pytest.mark.filterwarnings("ignore:Triton")
def test_a_named_backend_refuses_with_the_sentence(call: Callable[[], Any], lack: str, gpu: None) -> None:
    with pytest.raises(rt.Unsupported, match=re.escape(lack)):
        call()
