"""position_bias of Transformers' models with padding, on the interpreted Triton kernels: values and every gradient."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from transformers import masking_utils

from rooftile.exact import api
from rooftile.integrations import transformers as integration
from rooftile.integrations import transformers_mask, transformers_packing


class Triton:
    """`rooftile.exact.api` on the Triton backend."""

    attention = staticmethod(partial(api.attention, backend="triton"))


# numpy warns of the rows that see nothing
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", ["causal", "bidirectional"])
def test_bias_with_padding(name, monkeypatch):
    for module in (integration, transformers_packing):
        monkeypatch.setattr(module, "api", Triton)
    T = 70
    there = torch.ones(2, T, dtype=torch.bool)
    there[0, :66] = there[1, 64:] = False
    function = getattr(masking_utils, f"{name}_mask_function")
    sizes = {"batch_size": 2, "q_length": T, "kv_length": T, "mask_function": function, "attention_mask": there}
    seen = masking_utils.sdpa_mask(**sizes, allow_is_causal_skip=False)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, T, 16, requires_grad=True) for _ in range(3))
    bias = torch.randn(1, 2, T, T, requires_grad=True)
    do = torch.randn(2, T, 2, 16) * there[:, :, None, None]
    found, _ = integration.attention(torch.nn.Module(), q, k, v, transformers_mask.mask(**sizes), position_bias=bias)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, bias)]
    scores = (wide[0] @ wide[1].mT / 4 + wide[3]).masked_fill(~seen, float("-inf"))
    empty = ~seen.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0), dim=-1).masked_fill(empty, 0)
    due = (weights @ wide[2]).transpose(1, 2)
    torch.testing.assert_close(found[there], due[there].float(), atol=2e-5, rtol=1e-4)
    grads = torch.autograd.grad(found, (q, k, v, bias), do)
    for x, y in zip(grads, torch.autograd.grad(due, wide, do.double()), strict=True):
        torch.testing.assert_close(x, y.float(), atol=1e-4, rtol=1e-4)
