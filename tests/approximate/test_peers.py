"""Other implementations of the methods, where they compute the same: outputs and gradients under equal choices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import rooftile as rt
from rooftile import approximate as ap

T, HEADS, D = 128, 2, 16


def same(found: Tensor, due: Tensor, leaf: Tensor) -> None:
    torch.testing.assert_close(found, due, atol=2e-6, rtol=1e-5)
    do = torch.randn_like(due)
    grads = [torch.autograd.grad(o, leaf, do, retain_graph=True)[0] for o in (found, due)]
    torch.testing.assert_close(*grads, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("causal", [True, False])
def test_transformers_reformer_with_one_round(causal: bool) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    torch.manual_seed(0)
    config = transformers.ReformerConfig(
        hidden_size=HEADS * D, num_attention_heads=HEADS, attention_head_size=D, lsh_attn_chunk_length=16, num_hashes=1,
        num_buckets=8, is_decoder=causal, lsh_attention_probs_dropout_prob=0.0, hash_seed=3,
    )  # fmt: skip
    layer = LSHSelfAttention(config, layer_idx=0).eval()
    x = torch.randn(2, T, HEADS * D, requires_grad=True)
    due = layer(x)
    qk, v = (project(x).unflatten(-1, (HEADS, D)) for project in (layer.query_key, layer.value))
    hashes = due.buckets.permute(0, 3, 1, 2).int()  # (B, T, H, 1)
    found = ap.reformer(qk, v, rt.CAUSAL if causal else rt.FULL, hashes=hashes, chunk=16)
    same(found.flatten(2), due.hidden_states, x)


def test_the_package_linformer() -> None:
    linformer = pytest.importorskip("linformer", reason="pip install linformer")
    torch.manual_seed(0)
    layer = linformer.LinformerSelfAttention(dim=HEADS * D, seq_len=T, k=16, heads=HEADS)
    x = torch.randn(2, T, HEADS * D, requires_grad=True)
    q, k, v = (project(x).unflatten(-1, (HEADS, D)) for project in (layer.to_q, layer.to_k, layer.to_v))
    o = ap.linformer(q, k, v, layer.proj_k.T[None], layer.proj_v.T[None])
    same(layer.to_out(o.flatten(2)), layer(x), x)


def test_the_features_of_performer_pytorch_without_its_epsilon() -> None:
    module = pytest.importorskip("performer_pytorch.performer_pytorch", reason="pip install performer-pytorch")
    features = ap.Features.draw(D, 64, seed=0)
    x = torch.randn(2, HEADS, T, D, requires_grad=True)
    q, k = (
        module.softmax_kernel(x, projection_matrix=features.projection, is_query=is_query, eps=0.0) for is_query in (True, False)
    )
    y = x.transpose(1, 2)
    same(ap.performer(y, y, y, rt.FULL, features=features).transpose(1, 2), module.linear_attention(q, k, x), x)


# the package remarks that there is no GPU
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_selection_of_flash_linear_attention() -> None:
    naive = pytest.importorskip("fla.ops.nsa.naive", reason="pip install fla-core")
    x, k = torch.randn(1, T, 16, D, requires_grad=True), torch.randn(1, T, 1, D)
    chosen = ap.choose_blocks(x, ap.compress(k, length=8, stride=4), length=8, stride=4, block_size=16, count=5)
    same(
        ap.selected_attention(x, k, k, chosen, block_size=16), naive.naive_nsa_selection(x, k, k, chosen.long(), block_size=16), x
    )


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("normalise", [True, False])
def test_the_linear_attention_of_flash_linear_attention(normalise: bool) -> None:
    naive = pytest.importorskip("fla.ops.linear_attn.naive", reason="pip install fla-core")
    x = torch.rand(2, T, HEADS, D, requires_grad=True)
    due, _ = naive.naive_recurrent_linear_attn(x, x / T, x, scale=1.0, normalize=normalise)
    same(ap.linear(x, x / T, x, rt.CAUSAL, feature="identity", normalise=normalise), due, x)
