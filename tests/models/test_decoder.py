"""The decoder by itself: what it hands to attention, random weights, and that nothing in it depends on data."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rooftile.fused import gated
from rooftile.fused.norm import add_norm, normalise
from rooftile.fused.rope import Rotation, rotate
from rooftile.models import Decoder, ModelConfig
from rooftile.models.config import config_of
from rooftile.models.projection import Norm
from tests.models.checkpoints import CONFIGS, logits_of_ours, prompts


def config(name: str) -> ModelConfig:
    return config_of(CONFIGS[name]().to_dict(), "here")


def turned(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
    """In place of attention."""
    return q if rotation is None else rotate(q, rotation)


@pytest.mark.parametrize("name", CONFIGS)
def test_attention_gets_every_layer_in_order_with_queries_turned(name: str) -> None:
    decoder = Decoder.random(config(name), torch.float32)
    H, Hk, D = decoder.config.heads, decoder.config.kv_heads, decoder.config.head_dim
    seen = []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
        assert (rotation is None) == (decoder.rotary is None or layer in decoder.config.unrotated)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        assert (q.shape, k.shape, v.shape) == ((3, H, D), (3, Hk, D), (3, Hk, D))
        if layer == 0 and rotation is not None:
            # the same token at two positions: a turn keeps its length, and v does not turn
            torch.testing.assert_close(k[0].norm(dim=-1), k[1].norm(dim=-1))
            assert not torch.allclose(k[0], k[1])
            assert torch.equal(v[0], v[1])
        seen.append(layer)
        return q

    hidden = decoder(torch.tensor([5, 5, 6]), torch.tensor([0, 9, 2]), attend)
    assert hidden.shape == (3, decoder.config.hidden)
    assert decoder.logits(hidden[:2]).shape == (2, decoder.config.vocab_size)
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("name", ["llama, biases", "gemma2", "gpt2"])
def test_random_weights(name: str) -> None:
    decoder = Decoder.random(config(name), torch.bfloat16, seed=3)
    for part in decoder.modules():
        if isinstance(part, Norm):
            due = 0 if decoder.config.norm_plus_one else 1
            assert torch.equal(part.weight, torch.full_like(part.weight, due))
    assert decoder.embedding.float().std().item() == pytest.approx(0.02, rel=0.05)
    assert decoder.layers[0].qkv.weight.float().std().item() == pytest.approx(0.02, rel=0.05)
    again, other = (Decoder.random(decoder.config, torch.bfloat16, seed=seed) for seed in (3, 4))
    assert all(map(torch.equal, decoder.parameters(), again.parameters()))
    assert not torch.equal(decoder.embedding, other.embedding)
    assert logits_of_ours(decoder, prompts()).isfinite().all()


def test_no_weight_asks_for_gradients_and_a_tied_head_is_the_embedding() -> None:
    tied, untied = Decoder.random(config("llama, tied")), Decoder.random(config("llama"))
    assert not any(weight.requires_grad for weight in tied.parameters())
    assert tied.head is tied.embedding
    assert untied.head is not untied.embedding
    assert sum(weight.numel() for weight in untied.parameters()) - sum(weight.numel() for weight in tied.parameters()) == 97 * 40


class Operations(TorchDispatchMode):
    """The names of operations, and the shapes of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen.append((str(func), tuple(result.shape) if isinstance(result, Tensor) else ()))
        return result


@pytest.mark.parametrize("name", ["llama, yarn in full", "qwen3", "gemma2", "gpt2"])
def test_operations_do_not_depend_on_data_and_none_waits_for_it(name: str) -> None:
    decoder = Decoder.random(config(name), torch.float32)
    runs = []
    for start in (0, 40):
        tokens, positions = torch.arange(start, start + 9), torch.arange(start, start + 9)
        with torch.inference_mode(), Operations() as operations:
            decoder.logits(decoder(tokens, positions, turned))
        runs.append(operations.seen)
    assert all(first == second for first, second in pairwise(runs))
    names = {name for name, _ in runs[0]}
    assert "aten.index_select.default" in names
    assert not any(word in name for name in names for word in ("item", "local_scalar", "nonzero", "aten.index.Tensor", "_to_cpu"))


@pytest.mark.parametrize("name", CONFIGS)
def test_shapes_follow_without_data(name: str) -> None:
    decoder = Decoder(config(name), dtype=torch.bfloat16, device="meta")
    tokens = torch.empty(9, dtype=torch.int64, device="meta")
    hidden = decoder(tokens, tokens, turned)
    assert hidden.shape == (9, decoder.config.hidden)
    assert decoder.logits(hidden).dtype == (torch.bfloat16 if decoder.config.logit_softcap is None else torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama, llama3", "qwen3", "gemma2", "gpt2"])
def test_a_cuda_graph_takes_it_in(name: str) -> None:
    decoder = Decoder.random(config(name), torch.float32, "cuda")
    tokens, positions = torch.arange(9, device="cuda"), torch.arange(9, device="cuda")

    def run() -> Tensor:
        return decoder.logits(decoder(tokens, positions, turned))

    # cuBLAS takes its workspace on the first call, which a graph must not see
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        logits = run()
    tokens.add_(20)
    positions.add_(30)
    graph.replay()
    with torch.inference_mode():
        torch.testing.assert_close(logits, run())


def test_embeddings_are_scaled_by_a_rounded_number() -> None:
    # sqrt(40) is 6.3246; numbers of bfloat16 lie 1 / 32 apart there
    assert Decoder.random(config("gemma2"), torch.bfloat16).embedding_scale == 6.3125
    assert Decoder.random(config("gemma2"), torch.float32).embedding_scale == pytest.approx(40**0.5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo2", "olmo3"])
def test_norms_round_where_transformers_rounds(name: str) -> None:
    decoder = Decoder.random(config(name), torch.bfloat16)
    norm = decoder.norm
    norm.weight.copy_(torch.randn(40))
    module = {
        "llama": transformers.models.llama.modeling_llama.LlamaRMSNorm,
        "gemma2": transformers.models.gemma2.modeling_gemma2.Gemma2RMSNorm,
        "olmo2": transformers.models.olmo2.modeling_olmo2.Olmo2RMSNorm,
        "olmo3": transformers.models.olmo3.modeling_olmo3.Olmo3RMSNorm,
    }[name](40, eps=norm.eps)
    module = module.to(torch.bfloat16)
    module.weight.data.copy_(norm.weight)
    x, residual = torch.randn(2, 500, 40).bfloat16()
    assert torch.equal(normalise(x, norm), module(x))
    normed, stream = add_norm(x, residual.clone(), norm)
    assert torch.equal(stream, residual + x)
    assert torch.equal(normed, module(residual + x))


def test_gates_and_turns() -> None:
    x = torch.randn(5, 12)
    torch.testing.assert_close(gated(x, "silu"), torch.nn.functional.silu(x[:, :6]) * x[:, 6:])
    angles = torch.rand(5, 4)
    q = torch.randn(5, 3, 8)
    turned = torch.complex(q[..., :4], q[..., 4:]) * torch.polar(torch.ones(5, 1, 4), angles[:, None])
    torch.testing.assert_close(rotate(q, Rotation(angles.cos(), angles.sin())), torch.cat((turned.real, turned.imag), dim=-1))


def test_neither_rooftile_nor_its_models_import_transformers() -> None:
    program = (
        "import sys, rooftile; print('rooftile.models' in sys.modules); "
        "import rooftile.models; print('transformers' in sys.modules, 'safetensors' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"] * 3
