"""`import flash_attn` of other libraries: the package, its padding and its rotation."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import rooftile as rt
from rooftile.integrations.flash_attn_padding import index_first_axis, index_put_first_axis, pad_input, unpad_input
from rooftile.integrations.flash_attn_rotary import apply_rotary_emb

PROGRAM = """
import importlib.metadata, sys
from rooftile.integrations import flash_attn as ours
try:
    import flash_attn
except ModuleNotFoundError:
    pass
else:
    raise AssertionError("a flash_attn is installed here")
ours.install()
ours.install()
import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, flash_attn_qkvpacked_func
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.cute import flash_attn_func as fourth
from flash_attn.flash_attn_interface import flash_attn_func as same
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn_interface import flash_attn_func as third
from rooftile.integrations import flash_attn_3, flash_attn_4
assert flash_attn_func is same is ours.flash_attn_func
assert fourth is flash_attn_4.flash_attn_func and third is flash_attn_3.flash_attn_func
assert importlib.metadata.version("flash-attn") == importlib.metadata.version("flash_attn") == flash_attn.__version__
assert "flash-attn" in importlib.metadata.packages_distributions()["flash_attn"]
try:
    import flash_attn.losses
except ModuleNotFoundError as error:
    assert "flash_attn.losses is not in the flash_attn that Rooftile installed" in str(error), error
else:
    raise AssertionError("flash_attn.losses")
ours.uninstall()
ours.uninstall()
assert "flash_attn" not in sys.modules
try:
    import flash_attn
except ModuleNotFoundError as error:
    assert "Rooftile" not in str(error)
else:
    raise AssertionError("flash_attn is still there")
import torch
assert flash_attn_func(*(torch.randn(1, 4, 2, 16) for _ in range(3))).shape == (1, 4, 2, 16)
print("done")
"""


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_other_libraries_find_the_package_while_it_is_installed() -> None:
    assert run(PROGRAM) == "done\n"


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_transformers_sees_the_package(first: bool) -> None:
    """Transformers keeps its answer for a process, and asks for a GPU as well, which is pretended here."""
    install = "from rooftile.integrations import flash_attn as ours; ours.install()\n"
    look = "from transformers.utils import import_utils; import_utils.is_torch_cuda_available = lambda: True\n"
    asked = "before = import_utils.is_flash_attn_2_available()\n"
    ask = "print(import_utils.is_flash_attn_2_available()); ours.uninstall(); print(import_utils.is_flash_attn_2_available())"
    program = install + look + ask if first else look + asked + install + "assert not before\n" + ask
    assert run(program).split() == ["True", "False"]


def test_a_flash_attn_that_was_imported_before_is_left_alone() -> None:
    program = (
        "import sys, types; sys.modules['flash_attn'] = types.ModuleType('flash_attn')\n"
        "from rooftile.integrations import flash_attn as ours\n"
        "try:\n    ours.install()\nexcept Exception as error:\n    print(type(error).__name__, error)"
    )
    assert run(program).startswith("Unsupported flash_attn has been imported already; call install() before")


def test_padding_goes_and_comes_back() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]])
    x = torch.randn(3, 4, 5, requires_grad=True)
    rows, indices, offsets, longest, used = unpad_input(x, mask)
    assert (indices.tolist(), offsets.tolist(), longest, used.tolist()) == ([0, 1, 8, 10, 11], [0, 2, 2, 5], 3, [2, 0, 3])
    assert (offsets.dtype, used.dtype) == (torch.int32, torch.int32)
    back = pad_input(rows, indices, 3, 4)
    assert torch.equal(back, x * mask[..., None])
    (grad,) = torch.autograd.grad(back.sum(), x)
    assert torch.equal(grad, mask[..., None].expand_as(x).float())
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 1], [0, 1, 0, 0]])
    _, indices, offsets, longest, used = unpad_input(x, mask.bool(), unused.bool())
    assert (indices.tolist(), offsets.tolist()) == ([0, 1, 2, 7, 8, 9, 10, 11], [0, 3, 4, 8])
    assert (longest, used.tolist()) == (4, [2, 0, 3])
    with pytest.raises(rt.InvalidInput, match=r"attention_mask is .*; must be \(B, S\)"):
        unpad_input(x, mask[:, :3])


def test_rows_are_picked_and_put() -> None:
    x = torch.randn(6, 2, 3, requires_grad=True)
    twice = torch.tensor([4, 0, 4])
    found = index_first_axis(x, twice)
    assert torch.equal(found, x[twice])
    (grad,) = torch.autograd.grad(found.sum(), x)
    assert grad[4].eq(2).all()
    put = index_put_first_axis(found[:2], twice[:2], 6)
    assert torch.equal(put[[0, 4]], x[[0, 4]])
    assert not put[[1, 2, 3, 5]].any()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offsets", [0, 3, torch.tensor([2, 0])], ids=["0", "3", "each"])
def test_rotation_multiplies_complex_numbers(interleaved: bool, offsets) -> None:
    angles = torch.arange(12.0, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    x = torch.randn(2, 7, 3, 8, dtype=torch.float64)
    first, second = (x[..., 0:6:2], x[..., 1:6:2]) if interleaved else (x[..., :3], x[..., 3:6])
    start = offsets if isinstance(offsets, torch.Tensor) else torch.tensor([offsets, offsets])
    phases = torch.polar(torch.ones(()).double(), angles[start[:, None] + torch.arange(7)])
    turned = torch.complex(first, second) * phases[:, :, None]
    parts = (turned.real, turned.imag)
    due = torch.cat((torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1), x[..., 6:]), -1)
    given = {"interleaved": interleaved, "seqlen_offsets": offsets}
    torch.testing.assert_close(apply_rotary_emb(x, cos, sin, **given), due, atol=1e-6, rtol=1e-6)
    packed = torch.cat((x[0, :5], x[1]))
    cu = torch.tensor([0, 5, 12], dtype=torch.int32)
    found = apply_rotary_emb(packed, cos, sin, cu_seqlens=cu, **given)
    torch.testing.assert_close(found, torch.cat((due[0, :5], due[1])), atol=1e-6, rtol=1e-6)
    assert apply_rotary_emb(packed, cos, sin, cu_seqlens=cu, inplace=True, **given) is packed
    assert torch.equal(packed, found)


def test_a_rotation_past_its_angles_is_refused() -> None:
    cos = torch.ones(4, 2)
    with pytest.raises(rt.InvalidInput, match="the last position is 5; cos and sin have angles for 4 positions"):
        apply_rotary_emb(torch.randn(1, 4, 2, 8), cos, cos, seqlen_offsets=2)
    with pytest.raises(rt.InvalidInput, match=r"x is .*; must be \(total, H, D\): cu_seqlens was given"):
        apply_rotary_emb(torch.randn(1, 4, 2, 8), cos, cos, cu_seqlens=torch.tensor([0, 4]))
