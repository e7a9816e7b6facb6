"""A mask_mod that reads what was changed since: refused by name, wherever the function finds it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask

import rooftile as rt
from rooftile.integrations.flex_attention import flex_attention

N = 200
TABLE, WIDTH = torch.zeros(N, dtype=torch.long), 30


def reads_a_global(b: Any, h: Any, i: Any, j: Any) -> Tensor:
    return TABLE[i] == TABLE[j]


def reads_a_global_number(b: Any, h: Any, i: Any, j: Any) -> Tensor:
    return (i - j).abs() < WIDTH


def calls_another(b: Any, h: Any, i: Any, j: Any) -> Tensor:
    return reads_a_global(b, h, i, j) & (i >= j)


class Documents(nn.Module):
    """Has a table, a number, and weights that are trained meanwhile."""

    limit = 150

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.steps = 0
        self.register_buffer("table", torch.zeros(N, dtype=torch.long))
        self.settings = {"width": 30, "other": 1}

    def _same(self, i: Any, j: Any) -> Tensor:
        return self.table[i] == self.table[j]

    def mask(self, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return self._same(i, j) & (i - j < self.settings["width"]) & (j < Documents.limit)

    __call__ = mask


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def _fixture() -> dict[str, tuple[Callable[..., Tensor], dict[str, Callable[[], Any]], str]]:
    """By name: a function, changes of what it reads, and a part of the name in the sentence."""
    table, lengths, documents = torch.zeros(N, dtype=torch.long), [torch.tensor(150)], Documents()
    pair = Pair(torch.zeros(N, dtype=torch.long), torch.zeros(N, dtype=torch.long))
    bound = functools.partial(lambda limit, b, h, i, j: j < limit, torch.tensor(100))

    def nested(b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return (lambda: table[i] == table[j])()

    def method(b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return documents.mask(b, h, i, j)

    return {
        "a closure": (nested, lambda: table.add_(torch.arange(N) // 50), "table"),
        "a view": (nested, lambda: table[:10].fill_(3), "table"),
        "an element": (nested, lambda: table.__setitem__(7, 9), "table"),
        "a list": (lambda b, h, i, j: j < lengths[0], lambda: lengths.__setitem__(0, torch.tensor(7)), r"lengths\[0\]"),
        "a tuple": (lambda b, h, i, j: pair.first[i] == pair.second[j], lambda: pair.second.add_(1), "pair"),
        "a default": (lambda b, h, i, j, t=table: t[i] == t[j], lambda: table.mul_(2), "t"),
        "a partial function": (bound, lambda: bound.args[0].fill_(3), "argument 0"),
        "a global": (reads_a_global, lambda: TABLE.add_(1), "TABLE"),
        "a global of another function": (calls_another, lambda: TABLE.add_(1), "TABLE"),
        "two masks": (and_masks(calls_another, nested), lambda: table.add_(1), "table"),
        "a global that is replaced": (reads_a_global, lambda: globals().__setitem__("TABLE", TABLE.clone()), "TABLE"),
        "a global number": (reads_a_global_number, lambda: globals().__setitem__("WIDTH", WIDTH + 1), "WIDTH"),
        "a method": (method, lambda: documents.table.add_(1), "table"),
        "an object that is called": (documents, lambda: setattr(documents, "table", documents.table + 1), "table"),
        "an entry": (method, lambda: documents.settings.update(width=3), "width"),
        "an attribute of a class": (method, lambda: setattr(Documents, "limit", Documents.limit - 1), "limit"),
    }


@pytest.mark.parametrize("name", _fixture())
def test_a_change_is_refused_by_name(name: str) -> None:
    function, change, part = _fixture()[name]
    q, k, v = (torch.randn(1, 2, N, 32) for _ in range(3))
    mask = create_block_mask(function, None, None, N, N, device="cpu")
    for _ in range(2):
        o = flex_attention(q, k, v, block_mask=mask)
    change()
    for call in (lambda: flex_attention(q, k, v, block_mask=mask), lambda: rt.Blocks.from_block_mask(mask)):
        with pytest.raises(rt.InvalidInput, match=rf"mask_mod reads [^,]*{part}[^,]*, which was changed after .*create_bl"):
            call()
    # a new mask has the new answer
    new = create_block_mask(function, None, None, N, N, device="cpu")
    seen = create_mask(function, None, None, N, N, device="cpu")
    due = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).nan_to_num(0.0)
    torch.testing.assert_close(flex_attention(q, k, v, block_mask=new), due, atol=2e-5, rtol=2e-5)
    assert o.shape == due.shape


def test_what_it_does_not_read_may_change() -> None:
    """Weights of the model, its counters, entries that no code names, other variables."""
    documents, q = Documents(), torch.randn(1, 2, N, 32)
    mask = create_block_mask(lambda b, h, i, j: documents.mask(b, h, i, j), None, None, N, N, device="cpu")
    o = flex_attention(q, q, q, block_mask=mask)
    with torch.no_grad():
        documents.linear.weight.add_(1)
    documents.steps += 1
    documents.settings["other"] = 2
    assert torch.equal(flex_attention(q, q, q, block_mask=mask), o)


def test_tensors_of_inference_mode_are_compared() -> None:
    """They have no counter."""
    q = torch.randn(1, 2, N, 32)
    with torch.inference_mode():
        table = torch.zeros(N, dtype=torch.long)
        mask = create_block_mask(lambda b, h, i, j: table[i] == table[j], None, None, N, N, device="cpu")
        o = flex_attention(q, q, q, block_mask=mask)
        assert torch.equal(flex_attention(q, q, q, block_mask=mask), o)
        table[100:] = 1
        with pytest.raises(rt.InvalidInput, match="mask_mod reads table, which was changed"):
            flex_attention(q, q, q, block_mask=mask)


def test_a_tensor_that_takes_the_place_of_another() -> None:
    """A new tensor at the old one's address is another one."""
    held, q = {"t": torch.zeros(N, dtype=torch.long)}, torch.randn(1, 2, N, 32)
    mask = create_block_mask(lambda b, h, i, j: held["t"][i] == held["t"][j], None, None, N, N, device="cpu")
    flex_attention(q, q, q, block_mask=mask)
    del held["t"]
    held["t"] = torch.arange(N)
    with pytest.raises(rt.InvalidInput, match=r"mask_mod reads held\['t'\], which was changed"):
        flex_attention(q, q, q, block_mask=mask)


def test_numbers_of_numpy_and_a_compiled_call() -> None:
    width, q = np.int64(30), torch.randn(1, N, 2, 32)
    mask = create_block_mask(lambda b, h, i, j: (i - j).abs() < width, None, None, N, N, device="cpu")
    rt.Blocks.from_block_mask(mask)
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: rt.attention(q, q, q, mask), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), rt.attention(q, q, q, mask))
    width = np.int64(40)
    with pytest.raises(rt.InvalidInput, match="mask_mod reads width"):
        rt.attention(q, q, q, mask)
