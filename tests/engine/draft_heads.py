"""Models with random weights and what drafts for them, in folders as they are published, and their guesses by the formulas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import silu

from tests.models import experts, latent
from tests.models.checkpoints import CONFIGS, SMALL, THETA, VOCABULARY, made, saved
from tests.models.quantised import KINDS, Make

LAYERS, DRAFTED, HEADS, KEYS, DIM, HIDDEN = 6, 60, 4, 2, 10, 40
TAPS = (2, LAYERS // 2, LAYERS - 3)
MTP = {
    "mimo": CONFIGS["qwen2"], "deepseek_v3": latent.CONFIGS["deepseek_v3"],
    "glm4_moe": experts.CONFIGS["glm4_moe, norms, biases"], "glm4_moe_lite": latent.CONFIGS["glm4_moe_lite"],
}  # fmt: skip


class EaglePair:
    """A model of Transformers and a head of EAGLE-3 for it, with random weights, in folders."""

    def __init__(self, path: Path, **settings: Any) -> None:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SMALL | {"num_hidden_layers": LAYERS}, rope_parameters=THETA)
        self.model = transformers.AutoModelForCausalLM.from_config(config)
        self.folder, self.head = saved(self.model, path / "model"), path / "head"
        self.model = self.model.double()
        wide = {"q": HEADS * DIM, "k": KEYS * DIM, "v": KEYS * DIM}
        shapes = {
            "fc": (HIDDEN, 3 * HIDDEN), "norm": (HIDDEN,), "lm_head": (DRAFTED, HIDDEN), "midlayer.input_layernorm": (HIDDEN,),
            "midlayer.hidden_norm": (HIDDEN,), "midlayer.post_attention_layernorm": (HIDDEN,),
            **{f"midlayer.self_attn.{name}_proj": (rows, 2 * HIDDEN) for name, rows in wide.items()},
            "midlayer.self_attn.o_proj": (HIDDEN, HEADS * DIM), "midlayer.mlp.gate_proj": (48, HIDDEN),
            "midlayer.mlp.up_proj": (48, HIDDEN), "midlayer.mlp.down_proj": (HIDDEN, 48),
        }  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        self.weights = {f"{name}.weight": 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for name in self.weights:
            if "norm" in name:
                self.weights[name] += 1
        self.tokens = torch.randperm(VOCABULARY, generator=generator)[:DRAFTED].sort().values
        known = torch.zeros(VOCABULARY, dtype=torch.bool)
        known[self.tokens] = True
        self.head.mkdir()
        save_file(self.weights | {"d2t": self.tokens - torch.arange(DRAFTED), "t2d": known}, self.head / "model.safetensors")
        own = config.to_dict() | {
            "num_hidden_layers": 1,
            "draft_vocab_size": DRAFTED,
            "architectures": ["LlamaForCausalLMEagle3"],
        }
        # published heads have fewer positions than their models
        own |= {"max_position_embeddings": 32} | settings
        (self.head / "config.json").write_text(json.dumps(own))

    @property
    def asked(self) -> dict[str, Any]:
        return {"method": "eagle3", "model": self.head}

    @torch.no_grad()
    def guesses(self, ids: Sequence[int], count: int) -> list[int]:
        """The greedy guesses behind a sequence, in fp64 from the formula."""
        w = {name: weight.double() for name, weight in self.weights.items()}
        streams = self.model(torch.tensor([list(ids[:-1])]), output_hidden_states=True).hidden_states
        features = torch.cat([streams[n][0] for n in TAPS], 1) @ w["fc.weight"].T
        tokens, found = list(ids[1:]), list[int]()
        embedding = self.model.get_input_embeddings().weight
        for _ in range(count):
            e = normal(embedding[torch.tensor(tokens)], w["midlayer.input_layernorm.weight"])
            u = torch.cat((e, normal(features, w["midlayer.hidden_norm.weight"])), 1)
            q, k, v = (u @ w[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv")
            q, k, v = (turned(q, HEADS), turned(k, KEYS), v.unflatten(1, (KEYS, DIM)))
            k, v = (x.repeat_interleave(HEADS // KEYS, 1) for x in (k, v))
            scores = torch.einsum("ihd,jhd->hij", q, k) / DIM**0.5
            scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
            mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).flatten(1)
            g = features + mixed @ w["midlayer.self_attn.o_proj.weight"].T
            x = normal(g, w["midlayer.post_attention_layernorm.weight"])
            gated = silu(x @ w["midlayer.mlp.gate_proj.weight"].T) * (x @ w["midlayer.mlp.up_proj.weight"].T)
            g = g + gated @ w["midlayer.mlp.down_proj.weight"].T
            logits = normal(g[-1:], w["norm.weight"]) @ w["lm_head.weight"].T
            token = int(self.tokens[int(logits.argmax())])
            found.append(token)
            # the head's own numbers stand for the features of the token that it has guessed
            tokens.append(token)
            features = torch.cat((features, g[-1:]))
        return found


class MtpPair:
    """A model of Transformers whose folder has a layer of multi-token prediction, with random weights.

    Args:
        path: where the folder is made.
        name: a configuration of `MTP`.
        follows: whether each next token is a function of the last one alone, in the model and in the layer.
        kind: how the projections of the layer are quantised, as in `tests.models.quantised`; those of the model are not.
    """

    def __init__(self, path: Path, name: str, *, follows: bool = False, kind: str | None = None) -> None:
        config = MTP[name]()
        self.name, self.model, self.folder = name, made(config), path / "model"
        if follows:
            _forget(self.model.model.layers)
        saved(self.model, self.folder)
        self.model = self.model.double()
        body = self.model.model
        torch.manual_seed(5)
        self.layer = type(body.layers[-1])(self.model.config, len(body.layers) - 1)
        self.token_norm, self.hidden_norm, self.norm = (nn.RMSNorm(HIDDEN, 1e-6) for _ in range(3))
        self.join = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        for module in (self.layer, *self._parts.values()):
            for weight in [*module.parameters(), *module.buffers()]:
                nn.init.normal_(weight, 1.0 if weight.ndim == 1 and module in self._norms else 0.0, 0.3)
        eps = self.model.config.rms_norm_eps
        for norm in self._norms:
            norm.eps = eps
        if follows:
            _forget([self.layer])
            for norm in self._norms:
                nn.init.ones_(norm.weight)
            half = torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)
            self.join.weight.data = torch.cat(half[::-1] if name == "mimo" else half, 1)
            nn.init.ones_(body.norm.weight)
        self._write(follows=follows, kind=kind)
        self.layer = self.layer.double()
        for module in self._parts.values():
            module.double()

    @property
    def asked(self) -> dict[str, Any]:
        return {"method": "mtp"}

    @property
    def _norms(self) -> tuple[nn.RMSNorm, ...]:
        return self.token_norm, self.hidden_norm, self.norm

    @property
    def _parts(self) -> dict[str, nn.Module]:
        names = ("enorm", "hnorm", "shared_head.norm", "eh_proj")
        if self.name == "mimo":
            names = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_proj")
        return dict(zip(names, (*self._norms, self.join), strict=True))

    def _write(self, *, follows: bool, kind: str | None) -> None:
        """Adds the layer to the folder, with the names that checkpoints have."""
        quantised = {} if kind is None else self._quantise(KINDS[kind][1])
        mimo, file = self.name == "mimo", self.folder / "model.safetensors"
        prefix = "model.mtp_layers.0." if mimo else f"model.layers.{len(self.model.model.layers)}."
        stored = dict(self.layer.state_dict())
        for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            for e, one in enumerate(stored.pop(f"mlp.experts.{name}", ())):
                stored |= {f"mlp.experts.{e}.{part}.weight": x for part, x in zip(parts, one.chunk(len(parts)), strict=True)}
        stored |= {f"{name}.weight": module.weight for name, module in self._parts.items()}
        if not mimo:
            stored |= dict.fromkeys(("shared_head.head.weight", "embed_tokens.weight"), torch.zeros(VOCABULARY, HIDDEN))
        stored = {name: x for name, x in stored.items() if name not in quantised} | dict(
            item for parts in quantised.values() for item in parts.items()
        )
        more = {prefix + name: x.detach().contiguous().clone() for name, x in stored.items()}
        changed = {"model.norm.weight": torch.ones(HIDDEN)} if follows else {}
        save_file(load_file(file) | changed | more, file)
        settings = json.loads((self.folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
        if mimo:
            settings |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}
        if kind is not None:
            settings |= {"quantization_config": KINDS[kind][0] | {"ignore": ["lm_head", r"re:(model\.)?layers\..*"]}}
        (self.folder / "config.json").write_text(json.dumps(settings))

    @torch.no_grad()
    def _quantise(self, make: Make) -> dict[str, dict[str, Tensor]]:
        """Replaces projections by what quantised ones stand for; returns the tensors of each by the name of its weight."""
        found, generator = {}, torch.Generator().manual_seed(5)
        modules = {name: module for name, module in self.layer.named_modules() if isinstance(module, nn.Linear)}
        for name, module in (modules | {name: each for name, each in self._parts.items() if each is self.join}).items():
            parts, numbers = make(*module.weight.shape, generator)
            module.weight.copy_(numbers)
            found[f"{name}.weight"] = {f"{name}.{suffix}": x for suffix, x in parts.items()}
        return found

    @torch.no_grad()
    def guesses(self, ids: Sequence[int], count: int) -> list[int]:
        """The greedy guesses behind a sequence, in fp64 from the formula."""
        body, seen = self.model.model, list[Tensor]()
        hook = body.norm.register_forward_pre_hook(lambda _, given: seen.append(given[0][0]))
        body(torch.tensor([list(ids[:-1])]), use_cache=False)
        hook.remove()
        features = seen[0] if self.name == "mimo" else body.norm(seen[0])
        tokens, found = list(ids[1:]), list[int]()
        for _ in range(count):
            parts = [self.token_norm(body.embed_tokens.weight[torch.tensor(tokens)]), self.hidden_norm(features)]
            u = self.join(torch.cat(parts[::-1] if self.name == "mimo" else parts, 1))[None]
            places, size = torch.arange(len(tokens))[None], len(tokens)
            hidden = torch.full((1, 1, size, size), -torch.inf, dtype=torch.float64).triu(1)
            turned = body.rotary_emb(u, places)
            g = self.layer(u, attention_mask=hidden, position_ids=places, position_embeddings=turned)
            g = self.norm((g if isinstance(g, Tensor) else g[0])[0, -1:])
            token = int((g @ self.model.lm_head.weight.T).argmax())
            found.append(token)
            # the layer's own numbers stand for the features of the token that it has guessed
            tokens.append(token)
            features = torch.cat((features, g))
        return found


def _forget(layers: Any) -> None:
    """Makes layers add nothing to the stream."""
    with torch.no_grad():
        for layer in layers:
            for name, weight in layer.named_parameters():
                if name.endswith(("o_proj.weight", "o_proj.bias", "down_proj.weight", "experts.down_proj")):
                    weight.zero_()


def normal(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def turned(x: Tensor, heads: int) -> Tensor:
    x = x.unflatten(1, (heads, DIM))
    angles = torch.arange(len(x)).double()[:, None] / THETA["rope_theta"] ** (torch.arange(0, DIM, 2).double() / DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    one, two = x.chunk(2, -1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)
