"""Functions that each rank runs in the tests of `parallel.context`: models and calls that know nothing of it."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

import rooftile as rt
from rooftile.approximate import reformer, routing
from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact.masks import CAUSAL
from rooftile.integrations.flash_attn import flash_attn_func
from rooftile.integrations.flex_attention import flex_attention
from rooftile.parallel import checkpoint_contexts, context, positions, shard, unshard
from rooftile.parallel.context import split_off

T = 30


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, attn_implementation="rooftile").train()


def loss_of(model: Any, x: Tensor, y: Tensor, at: Tensor) -> Tensor:
    logits = model(x, position_ids=at, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / T


def trained(rank: int, method: str, packed: bool, checkpointed: bool) -> tuple[float, float, float]:
    """Returns one process's loss, the ranks' together, and the worst difference of a gradient."""
    model, ids = llama(), torch.randint(97, (1, T + 1))
    x, y = ids[:, :-1], ids[:, 1:]
    cu = torch.tensor([0, 1, 12, 30]) if packed else None
    whole = torch.cat([torch.arange(n) for n in cu.diff()]) if packed else torch.arange(T)
    alone = loss_of(model, x, y, whole[None])
    alone.backward()
    due = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    if checkpointed:
        options = {"use_reentrant": False, "context_fn": checkpoint_contexts}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    with context(None, method=method, cu=cu):
        loss = loss_of(model, shard(x), shard(y), positions(T, cu=cu)[None])
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    worst = 0.0
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad)
        worst = max(worst, float((p.grad - due[name]).abs().max()))
    return float(alone), float(total), worst


def refused_checkpoints(rank: int) -> list[str]:
    """Returns the errors of checkpoints that lose the context: by rooftile.attention and by PyTorch's, reentrant and not."""
    q = torch.randn(1, 6, 2, 8)

    def ours(x: Tensor) -> Tensor:
        return rt.attention(x, x, x, CAUSAL)

    def of_torch(x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    found = []
    for block in (ours, of_torch):
        for reentrant in (False, True):
            x = q.clone().requires_grad_()
            try:
                with context(None):
                    o = checkpoint(block, x, use_reentrant=reentrant)
                o.sum().backward()
                found.append("")
            except (Unsupported, torch.utils.checkpoint.CheckpointError) as error:
                found.append(str(error))
    return found


def calls(rank: int) -> dict[str, Any]:
    """Returns what the context does to calls: of PyTorch, nested, in threads, behind an error, and what it refuses."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 12, heads, 8) for heads in (4, 2, 2))
    own = [shard(x) for x in (q, k, v)]
    due, due_lse = rt.attention_with_lse(q, k, v, CAUSAL)
    found: dict[str, Any] = {}

    def close(o: Tensor) -> bool:
        return torch.allclose(o, shard(due), atol=1e-6)

    layer, x = torch.nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 6, 32)
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 12, 12, device="cpu")
    with context(None):
        heads_first = [x.transpose(1, 2) for x in own]
        found["torch"] = close(F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2))
        found["plain"] = close(rt.attention(*own, CAUSAL))
        o, lse = rt.attention_with_lse(*own, CAUSAL)
        found["lse"] = close(o) and torch.allclose(unshard(lse, dim=2), due_lse, atol=1e-5)
        with context(None, method="ulysses"):
            found["nested"] = close(rt.attention(*own, CAUSAL))
            found["explained"] = is_explained(own, rank)
        found["dropout"] = dropout_is_one_device_s(q, k, v, own)
        # another thread is in no context
        in_thread: list[Tensor] = []
        thread = threading.Thread(target=lambda: in_thread.append(rt.attention(q, k, v, CAUSAL)))
        thread.start()
        thread.join()
        found["thread"] = torch.equal(in_thread[0], due)
        found["refused"] = [
            sentence(lambda: rt.attention(own[0], k, v)),
            sentence(lambda: rt.attention_packed(own[0][0], own[1][0], own[2][0], torch.tensor([0, 6]), torch.tensor([0, 6]))),
            sentence(lambda: rt.attention(*own, CAUSAL, precision="fp8")),
            sentence(lambda: rt.attention(*own, CAUSAL & rt.Targets(2))),
            sentence(lambda: F.scaled_dot_product_attention(*heads_first, attn_mask=torch.ones(6, 6, dtype=torch.bool))),
            sentence(lambda: flash_attn_func(*own, dropout_p=0.4, return_attn_probs=True)),
            sentence(lambda: rt.attention(*own, key_padding_mask=torch.zeros(2, 6, dtype=torch.bool))),
            sentence(lambda: rt.attention(*own, blocks=rt.Blocks.from_dense(torch.ones(1, 1, 1, 1, dtype=torch.bool)))),
            sentence(lambda: flex_attention(*heads_first, block_mask=block_mask, enable_gqa=True)),
            sentence(lambda: layer(x, x, x)),
            sentence(lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*[heads_first[0]] * 3)),
            sentence(lambda: reformer(own[0], own[0], CAUSAL)),
            sentence(lambda: routing(*[own[0]] * 3, torch.randn(4, 2, 8), width=2)),
        ]
    try:
        with context(None):
            raise KeyError
    except KeyError:
        found["left"] = torch.equal(rt.attention(q, k, v, CAUSAL), due)
    # compiled before, inside and outside again: the graph must not keep what it saw first
    compiled = torch.compile(lambda q, k, v: rt.attention(q, k, v, CAUSAL) * 1.0)
    outside = compiled(q, k, v)
    with context(None):
        inside = compiled(*own)
    found["compiled"] = close(inside) and torch.allclose(outside, due) and torch.allclose(compiled(q, k, v), due)
    return found


def is_explained(own: list[Tensor], rank: int) -> bool:
    """Whether `explain` tells of the ranks in a context by heads, with a bias' columns as they are, and of none outside of it."""
    head = f"ranks    2, of which rank {rank} has 6 of 12 tokens (zigzag)"
    inside = str(rt.explain(*own, CAUSAL))
    with context(None, method="ring"):
        biased = str(rt.explain(*own, bias=torch.randn(4, 6, 12)))
    with split_off():
        outside = str(rt.explain(*own, CAUSAL))
    with context(None, cu=torch.tensor([0, 8, 9, 10, 11, 12])):
        packed = str(rt.explain(*[x[:1] for x in own], CAUSAL))
    advised = "rank 1 has 1.55 times its share of the documents' pairs, with layout='balanced'" in packed
    return f"{head}: ulysses" in inside and f"{head}: ring" in biased and head not in outside and advised


def dropout_is_one_device_s(q: Tensor, k: Tensor, v: Tensor, own: list[Tensor]) -> bool:
    """Whether calls inside the context drop one device's weights: by a seed, by the generator, in a checkpoint, and otherwise."""
    options: dict[str, Any] = {"alibi": torch.rand(4), "dropout": 0.4, "seed": 7}
    with split_off():
        due = rt.attention(q, k, v, **options)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        torch.manual_seed(3)
        [grad] = torch.autograd.grad(rt.attention(*leaves, CAUSAL, dropout=0.4).square().sum(), leaves[:1])
        torch.manual_seed(3)
        of_torch = rt.attention(q, k, v, CAUSAL, dropout=0.4)
    found = [torch.allclose(rt.attention(*own, **options), shard(due), atol=1e-6)]
    with torch.inference_mode():
        found.append(torch.allclose(rt.attention(*own, **options), shard(due), atol=1e-6))
    with torch.autocast("cpu", torch.bfloat16):
        found.append(torch.allclose(rt.attention(*own, **options).float(), shard(due), atol=0.05))
    compiled = torch.compile(lambda *x: rt.attention(*x, **options) * 1.0, backend="eager")
    found.append(torch.allclose(compiled(*own), shard(due), atol=1e-6))
    heads_first = [x.transpose(1, 2) for x in own]
    torch.manual_seed(3)
    o = F.scaled_dot_product_attention(*heads_first, is_causal=True, dropout_p=0.4, enable_gqa=True)
    found.append(torch.allclose(o.transpose(1, 2), shard(of_torch), atol=1e-6))
    torch.manual_seed(3)
    o = flash_attn_func(*own, dropout_p=0.4, causal=True)
    found.append(torch.allclose(o, shard(of_torch), atol=1e-6))
    leaves = [x.clone().requires_grad_() for x in own]
    torch.manual_seed(3)
    o = checkpoint(lambda *x: rt.attention(*x, CAUSAL, dropout=0.4), *leaves, use_reentrant=False, context_fn=checkpoint_contexts)
    [own_grad] = torch.autograd.grad(o.square().sum(), leaves[:1])
    found.append(torch.allclose(own_grad, shard(grad), atol=1e-5))
    return all(found)


def sentence(call: Any) -> str:
    try:
        call()
    except (InvalidInput, Unsupported) as error:
        return str(error)
    return ""
