"""The sizes of feed-forwards with experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooftile.errors import InvalidInput
from rooftile.moe.activations import ACTIVATIONS, halves
from rooftile.moe.router import Router
from rooftile.runtime.arguments import check_choice, check_count, check_flag, shown
from rooftile.runtime.words import answers_words

# limits beyond what any model has: a downloaded file may ask for more than can be named
MOST_EXPERTS = 1 << 14


@answers_words
@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """The sizes of a model's feed-forwards with experts.

    Args:
        experts: routed experts of a layer.
        hidden: the hidden width of an expert.
        router: how a token's experts and gates are found: `rooftile.moe.Router`.
        shared: the hidden width of the network that all tokens share, 0 for no such network; several shared experts are one.
        shared_gate: whether a sigmoid of the token multiplies the shared network's output (Qwen 3 Next).
        activation: "silu" (SwiGLU), "clamped" (gpt-oss) or "relu2" (Nemotron-H, without a gate).
        biases: whether the experts have biases.
        router_bias: whether a bias is added to the router's logits.
        selection_bias: whether a bias is added to the scores in the choice, and not in the gates (DeepSeek-V3).
        ranks: the ranks among which whole experts are dealt out; 1 where each rank has all of them, or a slice of each.

    Raises:
        InvalidInput: the sizes do not go together.
    """

    experts: int
    hidden: int
    router: Router
    shared: int = 0
    shared_gate: bool = False
    activation: str = "silu"
    biases: bool = False
    router_bias: bool = False
    selection_bias: bool = False
    ranks: int = 1

    def __post_init__(self) -> None:
        for name in ("experts", "hidden"):
            check_count(name, getattr(self, name))
        check_count("shared", self.shared, least=0)
        check_count("ranks", self.ranks)
        if self.experts % self.ranks:
            raise InvalidInput(f"experts is {self.experts:,} and ranks {self.ranks}; must be a multiple of it")
        if self.experts > MOST_EXPERTS:
            raise InvalidInput(f"experts is {self.experts:,}; may be at most {MOST_EXPERTS:,}")
        check_choice("activation", self.activation, ACTIVATIONS)
        for name in ("shared_gate", "biases", "router_bias", "selection_bias"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.router, Router):
            raise InvalidInput(f"router is {shown(self.router)}; must be a rooftile.moe.Router")
        self.router.check_experts(self.experts)
        if self.shared_gate and not self.shared:
            raise InvalidInput("shared_gate is on and shared 0; a gate needs a shared network to multiply")

    @property
    def held(self) -> int:
        """The experts of a layer that this rank holds."""
        return self.experts // self.ranks

    @property
    def rows(self) -> int:
        """The rows of the first weight of an expert: of gate and up, or of up alone."""
        return halves(self.activation) * self.hidden

    @property
    def shared_rows(self) -> int:
        """The rows of the first weight of the shared network."""
        return halves(self.activation) * self.shared

    @property
    def projected(self) -> int:
        """The rows of all first weights of a layer."""
        return self.held * self.rows + self.shared_rows


def check_feed_forwards(feed_forwards: Sequence[str | None], layers: int, experts: ExpertSizes | None) -> None:
    """Checks what follows the mixing of tokens in each layer.

    Raises:
        InvalidInput: there is not one for each layer, one is unknown, or has no sizes.
    """
    if len(feed_forwards) != layers or any(each not in ("dense", "experts", None) for each in feed_forwards):
        raise InvalidInput(
            f"feed_forwards are {str(feed_forwards)[:60]}; must be 'dense', 'experts' or None for each of {layers} layers"
        )
    if "experts" in feed_forwards and experts is None:
        raise InvalidInput(f"layer {feed_forwards.index('experts')} has experts, and their sizes are None; must be ExpertSizes()")
