"""A small decoder to train, whose layers mix their tokens by any of the modules of `rooftile.nn`.

It is Llama's: RMS norms, rotary positions, gated feed-forward. So what it saves is a checkpoint of Llama where all its layers are
exact attention, and `rooftile.LLM` serves it. It lives among the models because they read what it writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from rooftile.approximate.native_sparse.module import NativeSparse
from rooftile.errors import InvalidInput
from rooftile.exact.projections import Projections
from rooftile.exact.rotary_positions import RotaryPositions
from rooftile.models.checkpoints import weights
from rooftile.models.config import ModelConfig
from rooftile.models.mixing_modules import Mixer, check_mixers, is_served, made, served_mixers
from rooftile.models.rotary import Rotary
from rooftile.runtime.words import answers_foreign_words
from rooftile.weights.files.folder import files_of
from rooftile.weights.files.settings import Settings, read_json

# the names of projections in a checkpoint of Llama; other tensors of a mixer keep theirs
_NAMES = {"q.": "q_proj.", "k.": "k_proj.", "v.": "v_proj.", "out.": "o_proj.", "gates.": "g_proj."}


class TrainableDecoder(nn.Module):
    """Token ids (B, T) in, logits (B, T, vocab_size) out, with gradients.

    Args:
        vocab_size: number of token ids.
        mixers: what mixes the tokens: a name of `rooftile.models.mixing_modules.MIXERS`, a dictionary of a name and the module's
            options, or one of these for each layer. All but "linformer", which has no causal form, are causal.
        ffn: width of the gated feed-forward; 8/3 hidden if None.
        heads, kv_heads: query heads, and key and value heads, a divisor of them; kv_heads is heads if None.
        hidden: width of the residual stream.
        layers: number of layers.
        max_len: the longest text.
        theta: base of the rotary wavelengths.

    Raises:
        InvalidInput: sizes do not match, or there is no such mixer or option.

    Example:
        >>> model = TrainableDecoder(256, hidden=64, heads=4, mixers={"name": "native_sparse", "window": 64})
        >>> model(torch.randint(256, (2, 100))).shape
        torch.Size([2, 100, 256])
    """

    @answers_foreign_words
    def __init__(
        self,
        vocab_size: int,
        *,
        ffn: int | None = None,
        heads: int = 4,
        hidden: int = 128,
        kv_heads: int | None = None,
        layers: int = 2,
        max_len: int = 2048,
        mixers: Mixer | Sequence[Mixer] = "attention",
        theta: float = 10_000.0,
    ) -> None:
        super().__init__()
        if heads < 1 or hidden % heads or hidden // heads % 2:
            raise InvalidInput(f"hidden is {hidden} and heads is {heads}; a head must have an even number, hidden / heads")
        dim = hidden // heads
        self.config = ModelConfig(
            family="llama", vocab_size=vocab_size, layers=layers, hidden=hidden, heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads, head_dim=dim, ffn=hidden * 8 // 3 if ffn is None else ffn,
            max_len=max_len, scale=dim**-0.5, windows=(None,) * layers, rotary=Rotary(dim=dim, theta=theta),
        )  # fmt: skip
        self.theta = theta
        self.mixers = check_mixers(mixers, layers)
        self.embedding = nn.Embedding(vocab_size, hidden)
        nn.init.normal_(self.embedding.weight, std=hidden**-0.5)
        positions = RotaryPositions(Rotary(dim=dim, theta=theta).table(max_len, dtype=torch.float32))
        # a ModuleList is a sequence of its modules, but torch's types do not say so
        made_layers = nn.ModuleList(TrainableLayer(self.config, made(mixer, self.config), positions) for mixer in self.mixers)
        self.layers = cast("Sequence[TrainableLayer]", made_layers)
        self.norm = nn.RMSNorm(hidden, eps=self.config.norm_eps)
        self.head = nn.Linear(hidden, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the token after each; of the token itself where the mixers are not causal."""
        stream = self.embedding(tokens)
        for layer in self.layers:
            stream = layer(stream)
        return self.head(self.norm(stream))

    def mixers_loss(self) -> Tensor | None:
        """The sum of what mixers want added to the model's loss after a forward (Routing's commitment); None if none does."""
        found = [loss for layer in self.layers if (loss := getattr(layer.mixer, "loss", None)) is not None]
        return torch.stack(found).sum() if found else None

    @property
    def parameter_count(self) -> int:
        """The number of trained numbers."""
        return sum(weight.numel() for weight in self.parameters() if weight.requires_grad)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor that is saved, by its name in the checkpoint, without prefix."""
        yield "embed_tokens.weight", _trained(self.embedding)
        for n, layer in enumerate(self.layers):
            yield from ((f"layers.{n}.{name}", tensor) for name, tensor in layer.tensors())
        yield "norm.weight", self.norm.weight
        yield "lm_head.weight", _trained(self.head)

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor that is saved, by its name in the checkpoint."""
        for name, tensor in self.tensors():
            yield name if name == "lm_head.weight" else f"model.{name}", tensor

    def settings(self) -> dict[str, Any]:
        """The contents of config.json."""
        one, served = self.config, is_served(self.mixers)
        return {
            # another name keeps programs that know nothing of mixers from reading it as a Llama
            "architectures": ["LlamaForCausalLM" if served else "RooftileForCausalLM"],
            "model_type": "llama" if served else "rooftile",
            "vocab_size": one.vocab_size, "hidden_size": one.hidden, "intermediate_size": one.ffn,
            "num_hidden_layers": one.layers, "num_attention_heads": one.heads, "num_key_value_heads": one.kv_heads,
            "head_dim": one.head_dim, "max_position_embeddings": one.max_len, "rms_norm_eps": one.norm_eps,
            "rope_theta": self.theta, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "float32",
            "bos_token_id": None, "eos_token_id": None, "mixers": list(self.mixers),
        } | (served_mixers(self.mixers) if served else {})  # fmt: skip

    @answers_foreign_words
    def save(self, folder: str | Path) -> None:
        """Writes config.json and model.safetensors, in fp32.

        `rooftile.LLM` reads them where all mixers are exact attention, or Native Sparse Attention with the same options.
        """
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.settings(), indent=2), encoding="utf-8")
        held = {name: tensor.detach().float().cpu().contiguous() for name, tensor in self.stored()}
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})

    @classmethod
    @answers_foreign_words
    def load(cls, folder: str | Path) -> TrainableDecoder:
        """Reads what `save` wrote, in fp32 and on the CPU.

        Raises:
            InvalidInput: the folder holds something else; the sentence says what.
        """
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise InvalidInput(f"{folder} has no config.json; give a folder that TrainableDecoder.save wrote")
        said = Settings(read_json(folder / "config.json"), str(folder))
        mixers = said.values.get("mixers")
        if not isinstance(mixers, list):
            raise said.refused("has no mixers; give a folder that TrainableDecoder.save wrote")
        sizes = {
            "ffn": "intermediate_size", "heads": "num_attention_heads", "hidden": "hidden_size", "layers": "num_hidden_layers",
            "kv_heads": "num_key_value_heads", "max_len": "max_position_embeddings",
        }  # fmt: skip
        found = {name: said.size(setting) for name, setting in sizes.items()}
        model = cls(said.size("vocab_size"), mixers=mixers, theta=said.positive("rope_theta", 10_000.0), **found)
        with torch.no_grad():
            weights.load(model.config, model.tensors(), files_of(folder))
        return model


class TrainableLayer(nn.Module):
    """A layer of Llama with any mixer: each part reads the normalised stream and adds to it."""

    def __init__(self, config: ModelConfig, mixer: Projections, positions: RotaryPositions) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mixer = mixer
        self.mixer.positions = positions
        self.ffn_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.gate = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        """Adds attention and feed-forward to the residual stream (B, T, hidden)."""
        return self.feed_forward(stream + self.mixer(self.attention_norm(stream)))

    def feed_forward(self, stream: Tensor) -> Tensor:
        """Adds the feed-forward to the residual stream."""
        x = self.ffn_norm(stream)
        return stream + self.down(silu(self.gate(x)) * self.up(x))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor by its name in the layer of a checkpoint."""
        for name, tensor in self.mixer.state_dict(keep_vars=True).items():
            if name.endswith(".codes"):
                _trained(self.mixer.get_submodule(name.removesuffix(".codes")))
            yield f"self_attn.{_stored_name(name, self.mixer)}", tensor
        yield from ((f"mlp.{name}_proj.weight", _trained(getattr(self, name))) for name in ("gate", "up", "down"))
        yield "input_layernorm.weight", self.attention_norm.weight
        yield "post_attention_layernorm.weight", self.ffn_norm.weight


def _trained(layer: nn.Module) -> Tensor:
    """The weight of a layer as it is trained: one that is prepared for a format shows its rounded weight.

    Raises:
        InvalidInput: the layer is converted, so there is no such weight.
    """
    found = layer._parameters.get("weight")
    if found is None:
        raise InvalidInput(f"the model has a {type(layer).__name__}; call rooftile.qat.save(model, folder) before you convert it")
    return found


def _stored_name(name: str, mixer: Projections) -> str:
    """The name that a mixer's tensor has in a checkpoint."""
    if isinstance(mixer, NativeSparse) and name == "places":
        return "compression.places"
    if isinstance(mixer, NativeSparse) and name.startswith("phi."):
        _, which, number, rest = name.split(".")
        # the last of a map's modules leads to the head dim
        part = "down" if int(number) == len(cast("nn.Sequential", mixer.phi[which])) - 1 else "up"
        return f"compression.{which}_{part}.{rest}"
    start = name[: name.index(".") + 1] if "." in name else ""
    return f"{_NAMES.get(start, start)}{name[len(start) :]}"
