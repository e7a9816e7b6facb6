"""A small decoder to train, whose layers mix their tokens by any of the modules of `rooftile.nn`.

It is Llama's: RMS norms, rotary positions, gated feed-forward. So what it saves is a checkpoint of Llama where all its layers are
exact attention, and of our own family (`hybrid`) where they have other mixers, experts or no feed-forward: `rooftile.LLM` serves
both. It lives among the models because they read what it writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from rooftile import moe
from rooftile.errors import InvalidInput
from rooftile.exact.rotary_positions import RotaryPositions
from rooftile.models.checkpoints import weights
from rooftile.models.config import ModelConfig
from rooftile.models.expert_modules import Follower, changed, check_followers, section_of, sizes_of
from rooftile.models.hybrid import SECTIONS
from rooftile.models.mixing_modules import Mixer, check_mixers
from rooftile.models.rotary import Rotary
from rooftile.models.trainable_layer import TrainableLayer, trained
from rooftile.models.trained_sizes import kinds_of
from rooftile.moe.routing import Routing
from rooftile.runtime.words import answers_foreign_words
from rooftile.weights.files.folder import files_of
from rooftile.weights.files.settings import Settings, read_json

# mixers that a checkpoint of Llama may have
_OF_LLAMA = {"attention", "native_sparse"}


class TrainableDecoder(nn.Module):
    """Token ids (B, T) in, logits (B, T, vocab_size) out, with gradients.

    Args:
        vocab_size: number of token ids.
        mixers: what mixes the tokens: a name of `rooftile.models.mixing_modules.MIXERS`, a dictionary of a name and the module's
            options, or one of these for each layer. All but "linformer", which has no causal form, are causal.
        feed_forwards: what follows: "dense", None for nothing, {"name": "experts", ...} with the options of
            `rooftile.nn.DeepSeekMoE` and `rooftile.moe.Router`, or one of these for each layer. Experts are alike in all layers.
        ffn: width of the dense feed-forward, which has a gate; 8/3 hidden if None.
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
        feed_forwards: Follower | Sequence[Follower] = "dense",
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
        config = ModelConfig(
            family="rooftile", vocab_size=vocab_size, layers=layers, hidden=hidden, heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads, head_dim=dim, ffn=hidden * 8 // 3 if ffn is None else ffn,
            max_len=max_len, scale=dim**-0.5, windows=(None,) * layers, rotary=Rotary(dim=dim, theta=theta),
        )  # fmt: skip
        self.theta = theta
        self.mixers, self.feed_forwards = check_mixers(mixers, layers), check_followers(feed_forwards, layers)
        self.embedding = nn.Embedding(vocab_size, hidden)
        nn.init.normal_(self.embedding.weight, std=hidden**-0.5)
        positions = RotaryPositions(Rotary(dim=dim, theta=theta).table(max_len, dtype=torch.float32))
        # a ModuleList is a sequence of its modules, but torch's types do not say so
        made = nn.ModuleList(
            TrainableLayer(config, mixer, follower, positions)
            for mixer, follower in zip(self.mixers, self.feed_forwards, strict=True)
        )
        self.layers = cast("Sequence[TrainableLayer]", made)
        self.config, self.is_served = self._described(config)
        self.norm = nn.RMSNorm(hidden, eps=config.norm_eps)
        self.head = nn.Linear(hidden, vocab_size, bias=False)

    def _described(self, config: ModelConfig) -> tuple[ModelConfig, bool]:
        """The configuration with the kinds and sizes of all parts, and whether the inference decoder computes them all."""
        kinds, served = kinds_of(self.mixers, [layer.mixer for layer in self.layers])
        follows = tuple(layer.follows for layer in self.layers)
        experts = next((sizes_of(layer.experts) for layer in self.layers if layer.follows == "experts"), None)
        plain = served and _OF_LLAMA.issuperset(kinds["mixers"]) and set(follows) == {"dense"}
        family = "llama" if plain else config.family
        return replace(config, family=family, feed_forwards=follows, experts=experts, **kinds), served

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
    def routings(self) -> list[Routing]:
        """The choices of the last forward in each layer with experts, (B, T, active), with the graph of the scores."""
        return [layer.routing for layer in self.layers if layer.routing is not None]

    def balance_loss(self, alpha: float = 0.001) -> Tensor | None:
        """The sum of `rooftile.moe.balance_loss` over layers after a forward, to add to the loss; None without experts."""
        found = [moe.balance_loss(routing, alpha=alpha) for routing in self.routings]
        return torch.stack(found).sum() if found else None

    @property
    def parameter_count(self) -> int:
        """The number of trained numbers."""
        return sum(weight.numel() for weight in self.parameters() if weight.requires_grad)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor that is saved, by its name in the checkpoint, without prefix."""
        yield "embed_tokens.weight", trained(self.embedding)
        for n, layer in enumerate(self.layers):
            yield from ((f"layers.{n}.{name}", tensor) for name, tensor in layer.tensors())
        yield "norm.weight", self.norm.weight
        yield "lm_head.weight", trained(self.head)

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor that is saved, by its name in the checkpoint."""
        for name, tensor in self.tensors():
            yield name if name == "lm_head.weight" else f"model.{name}", tensor

    def settings(self) -> dict[str, Any]:
        """The contents of config.json."""
        one = self.config
        found = {
            # another name keeps programs that know nothing of mixers from reading it as a Llama
            "architectures": ["LlamaForCausalLM" if one.family == "llama" else "RooftileForCausalLM"],
            "model_type": one.family,
            "vocab_size": one.vocab_size, "hidden_size": one.hidden, "intermediate_size": one.ffn,
            "num_hidden_layers": one.layers, "num_attention_heads": one.heads, "num_key_value_heads": one.kv_heads,
            "head_dim": one.head_dim, "max_position_embeddings": one.max_len, "rms_norm_eps": one.norm_eps,
            "rope_theta": self.theta, "hidden_act": "silu", "tie_word_embeddings": False, "dtype": "float32",
            "bos_token_id": None, "eos_token_id": None, "mixers": list(self.mixers), "feed_forwards": list(self.feed_forwards),
        }  # fmt: skip
        return found | self._served_parts() if self.is_served else found

    def _served_parts(self) -> dict[str, Any]:
        """The words of config.json for what is not Llama's, as `rooftile.models.hybrid` reads them."""
        one, found = self.config, dict[str, Any]()
        if set(one.mixers) != {"attention"} or one.family != "llama":
            found["layer_mixers"] = list(one.mixers)
        for name, kind in SECTIONS.items():
            if (sizes := getattr(one, name)) is not None:
                found[name] = changed(asdict(sizes), kind)
        if one.family != "llama":
            found["layer_feed_forwards"] = list(one.feed_forwards)
        return found if one.experts is None else found | {"experts": section_of(one.experts)}

    @answers_foreign_words
    def save(self, folder: str | Path) -> None:
        """Writes config.json and model.safetensors, in fp32.

        `rooftile.LLM` reads them unless a mixer is one of an approximate method without a cache ("reformer" and the like), or has
        other options in one layer than in another.
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
        followers = said.values.get("feed_forwards", "dense")
        theta = said.positive("rope_theta", 10_000.0)
        model = cls(said.size("vocab_size"), mixers=mixers, feed_forwards=followers, theta=theta, **found)
        with torch.no_grad():
            weights.load(model.config, model.tensors(), files_of(folder))
        return model
