"""The programs: each is a function that runs one step. A GPU gets sizes of its own, a CPU smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rooftile.diagnosis.programs.decode_step import DecodeSizes, decoding
from rooftile.engine.settings.config import EngineConfig
from rooftile.engine.start.build import build_engine
from rooftile_lab.bench.models import decoder_named
from rooftile_lab.bench.needed import needed

Step = Callable[[], Any]
Program = Callable[[torch.device], AbstractContextManager[Step]]


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _llama(device: torch.device) -> Any:
    transformers, gpu = needed("diagnosis", "transformers"), _is_gpu(device)
    config = transformers.LlamaConfig(
        hidden_size=2048 if gpu else 256, num_hidden_layers=16 if gpu else 4, num_attention_heads=32 if gpu else 4,
        num_key_value_heads=8 if gpu else 2, intermediate_size=8192 if gpu else 688, vocab_size=32000 if gpu else 2000,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(device, torch.bfloat16 if gpu else torch.float32)


def _training(model: nn.Module, *inputs: Any, loss: Callable[[Any], Tensor], **named: Any) -> Step:
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        optimiser.zero_grad()
        loss(model(*inputs, **named)).backward()
        optimiser.step()

    return step


@contextmanager
def llama_training(device: torch.device) -> Iterator[Step]:
    """Llama, 8 x 2048 tokens in bf16 on a GPU; 2 x 256 in fp32 on a CPU."""
    batch, length = (8, 2048) if _is_gpu(device) else (2, 256)
    model = _llama(device)
    ids = torch.randint(model.config.vocab_size, (batch, length), device=device)
    yield _training(model, input_ids=ids, labels=ids, loss=lambda out: out.loss)


@contextmanager
def gpt2_training(device: torch.device) -> Iterator[Step]:
    """GPT-2 with one example: small, 1024 tokens on a GPU; four layers, 128 tokens on a CPU."""
    transformers = needed("diagnosis", "transformers")
    size: dict[str, int] = {} if _is_gpu(device) else {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 5000}
    config = transformers.GPT2Config(**size, bos_token_id=None, eos_token_id=None)
    model = transformers.GPT2LMHeadModel(config).to(device)
    ids = torch.randint(config.vocab_size, (1, 1024 if _is_gpu(device) else 128), device=device)
    yield _training(model, input_ids=ids, labels=ids, loss=lambda out: out.loss)


def _decoding(device: torch.device, batch: int) -> Step:
    model = _llama(device).eval()
    context = 1024 if _is_gpu(device) else 256
    ids = torch.randint(model.config.vocab_size, (batch, context), device=device)
    with torch.no_grad():
        read = model(input_ids=ids, use_cache=True)
    # Transformers 5.24 says `cache` for `past_key_values`
    word = "cache" if "cache" in read else "past_key_values"
    cache, token = read[word], ids[:, :1]

    @torch.no_grad()
    def step() -> None:
        model(input_ids=token, use_cache=True, **{word: cache})
        # the token that was added
        cache.crop(-1)

    return step


@contextmanager
def llama_decoding_1(device: torch.device) -> Iterator[Step]:
    """One token of one answer by Transformers."""
    yield _decoding(device, 1)


@contextmanager
def llama_decoding_64(device: torch.device) -> Iterator[Step]:
    """One token of each of 64 answers, 16 on a CPU."""
    yield _decoding(device, 64 if _is_gpu(device) else 16)


@contextmanager
def vit_inference(device: torch.device) -> Iterator[Step]:
    """ViT on 64 images, 4 on a CPU."""
    transformers = needed("diagnosis", "transformers")
    size: dict[str, int] = {} if _is_gpu(device) else {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3}
    if size:
        size["intermediate_size"] = 768
    model = transformers.ViTModel(transformers.ViTConfig(**size)).to(device).eval()
    images = torch.randn(64 if _is_gpu(device) else 4, 3, 224, 224, device=device)

    @torch.no_grad()
    def step() -> None:
        model(pixel_values=images)

    yield step


@contextmanager
def bert_ragged(device: torch.device) -> Iterator[Step]:
    """BERT on 64 texts of 8 to 512 tokens, 16 of up to 128 on a CPU, padded."""
    transformers = needed("diagnosis", "transformers")
    texts, longest = (64, 512) if _is_gpu(device) else (16, 128)
    size: dict[str, int] = {} if _is_gpu(device) else {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = transformers.BertModel(transformers.BertConfig(**size)).to(device).eval()
    lengths = torch.linspace(8, longest, texts, device=device).long()
    mask = (torch.arange(longest, device=device) < lengths[:, None]).long()
    ids = torch.randint(1, 30000, (texts, longest), device=device)

    @torch.no_grad()
    def step() -> None:
        model(input_ids=ids, attention_mask=mask)

    yield step


class _Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))


@contextmanager
def convnet_training(device: torch.device) -> Iterator[Step]:
    """A residual network on 128 images of 64 x 64, 8 of 32 x 32 on a CPU."""
    batch, side = (128, 64) if _is_gpu(device) else (8, 32)
    blocks = [_Block(64) for _ in range(4)]
    model = nn.Sequential(nn.Conv2d(3, 64, 7, padding=3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    images = torch.randn(batch, 3, side, side, device=device)
    yield _training(model.to(device), images, loss=lambda out: out.square().mean())


@contextmanager
def lstm_training(device: torch.device) -> Iterator[Step]:
    """A two-layer LSTM over 128 steps, 32 on a CPU."""
    size, length = (512, 128) if _is_gpu(device) else (128, 32)
    model = nn.LSTM(size, size, 2).to(device)
    yield _training(model, torch.randn(length, 32, size, device=device), loss=lambda out: out[0].square().mean())


@contextmanager
def adamw_of_small_tensors(device: torch.device) -> Iterator[Step]:
    """AdamW, a loop over 200 tensors of 64 x 64."""
    weights = [torch.randn(64, 64, device=device, requires_grad=True) for _ in range(200)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    yield torch.optim.AdamW(weights, foreach=False).step


@contextmanager
def loop_until_small(device: torch.device) -> Iterator[Step]:
    """A power iteration whose length depends on its data: the host reads a number in each round."""
    matrix = torch.randn(256, 256, device=device) / 16

    def step() -> None:
        x, before = torch.ones(256, device=device), 0.0
        for _ in range(200):
            x = matrix @ x
            size = x.norm().item()
            x = x / size
            if abs(size - before) < 1e-6:
                return
            before = size

    yield step


@contextmanager
def engine_decoding(device: torch.device) -> Iterator[Step]:
    """A decode step of Rooftile's engine: 64 answers of 1,024 tokens, 8 of 256 on a CPU."""
    batch, context = (64, 1024) if _is_gpu(device) else (8, 256)
    decoder = decoder_named("1b" if _is_gpu(device) else "tiny", device)
    steps = 400
    engine = build_engine(
        decoder,
        EngineConfig(
            device=str(device), max_model_len=context + steps, max_num_seqs=batch, enforce_eager=True,
            num_blocks=(batch + 1) * -(-(context + steps) // 16), enable_prefix_caching=False,
        ),
    )  # fmt: skip
    with torch.inference_mode(), decoding(engine, DecodeSizes(batch, context, 1)):
        yield engine.step


PROGRAMS: dict[str, Program] = {
    "llama-training": llama_training,
    "gpt2-training": gpt2_training,
    "llama-decoding-1": llama_decoding_1,
    "llama-decoding-64": llama_decoding_64,
    "vit": vit_inference,
    "bert-ragged": bert_ragged,
    "convnet": convnet_training,
    "lstm": lstm_training,
    "adamw-200": adamw_of_small_tensors,
    "loop": loop_until_small,
    "engine-decoding": engine_decoding,
}
