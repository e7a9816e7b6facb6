"""A layer of the decoder to train, and the names that its tensors have in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.functional import silu

from rooftile.approximate.native_sparse.module import NativeSparse
from rooftile.errors import InvalidInput
from rooftile.exact.projections import Projections
from rooftile.exact.rotary_positions import RotaryPositions
from rooftile.models.checkpoints.experts import expert_tensors_of
from rooftile.models.config import ModelConfig
from rooftile.models.expert_modules import experts_of
from rooftile.models.mixing_modules import made
from rooftile.moe.routing import Routing

# the names of projections in a checkpoint of Llama; other tensors of a mixer keep theirs
_NAMES = {"q.": "q_proj.", "k.": "k_proj.", "v.": "v_proj.", "out.": "o_proj.", "gates.": "g_proj."}


class TrainableLayer(nn.Module):
    """A layer of Llama with any mixer and any feed-forward: each part reads the normalised stream and adds to it.

    Args:
        config: the sizes of the model.
        mixer, follower: a name and options; no feed-forward if None.
        positions: rotates queries and keys where the mixer has them.
    """

    def __init__(
        self, config: ModelConfig, mixer: Mapping[str, Any], follower: Mapping[str, Any] | None, positions: RotaryPositions
    ) -> None:
        super().__init__()
        self.config = config
        hidden, ffn = config.hidden, config.ffn
        self.attention_norm = nn.RMSNorm(hidden, eps=config.norm_eps)
        # a caller knows which module it is: nn.Module would hide its methods
        self.mixer: Any = made(mixer, config)
        if isinstance(self.mixer, Projections):
            self.mixer.positions = positions
        self.follows = None if follower is None else follower["name"]
        self.routing: Routing | None = None
        """How the last forward chose experts, with the graph of the scores; None where there are none."""
        if follower is None:
            return
        self.ffn_norm = nn.RMSNorm(hidden, eps=config.norm_eps)
        if self.follows == "experts":
            self.experts = experts_of(hidden, follower)
        else:
            self.gate, self.up, self.down = (
                nn.Linear(*sizes, bias=False) for sizes in ((hidden, ffn), (hidden, ffn), (ffn, hidden))
            )

    def forward(self, stream: Tensor) -> Tensor:
        """Adds what mixes tokens and the feed-forward to the residual stream (B, T, hidden)."""
        return self.feed_forward(stream + self.mixer(self.attention_norm(stream)))

    def feed_forward(self, stream: Tensor) -> Tensor:
        """Adds the feed-forward, if there is one, to the residual stream."""
        if self.follows is None:
            return stream
        x = self.ffn_norm(stream)
        if self.follows == "dense":
            return stream + self.down(silu(self.gate(x)) * self.up(x))
        self.routing = self.experts.route(x)
        return stream + self.experts(x, self.routing)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor by its name in the layer of a checkpoint."""
        folder = "self_attn" if isinstance(self.mixer, Projections) else "mamba"
        for name, tensor in self.mixer.state_dict(keep_vars=True).items():
            if name.endswith(".codes"):
                trained(self.mixer.get_submodule(name.removesuffix(".codes")))
            yield f"{folder}.{_stored_name(name, self.mixer)}", tensor
        if self.follows == "dense":
            yield from ((f"mlp.{name}_proj.weight", trained(getattr(self, name))) for name in ("gate", "up", "down"))
        elif self.follows == "experts":
            yield from expert_tensors_of(self.experts, self.config)
        yield "input_layernorm.weight", self.attention_norm.weight
        if self.follows is not None:
            yield "post_attention_layernorm.weight", self.ffn_norm.weight


def trained(layer: nn.Module) -> Tensor:
    """The weight of a layer as it is trained: one that is prepared for a format shows its rounded weight.

    Raises:
        InvalidInput: the layer is converted, so there is no such weight.
    """
    found = layer._parameters.get("weight")
    if found is None:
        raise InvalidInput(f"the model has a {type(layer).__name__}; call rooftile.qat.save(model, folder) before you convert it")
    return found


def _stored_name(name: str, mixer: nn.Module) -> str:
    """The name that a mixer's tensor has in a checkpoint."""
    if not isinstance(mixer, Projections):
        # recurrences have the names of checkpoints
        return name
    if isinstance(mixer, NativeSparse) and name == "places":
        return "compression.places"
    if isinstance(mixer, NativeSparse) and name.startswith("phi."):
        _, which, number, rest = name.split(".")
        # the last of a map's modules leads to the head dim
        part = "down" if int(number) == len(cast("nn.Sequential", mixer.phi[which])) - 1 else "up"
        return f"compression.{which}_{part}.{rest}"
    start = name[: name.index(".") + 1] if "." in name else ""
    return f"{_NAMES.get(start, start)}{name[len(start) :]}"
