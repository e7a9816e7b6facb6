"""Experts with their router as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftile.errors import InvalidInput
from rooftile.moe.activations import ACTIVATIONS, halves
from rooftile.moe.feed_forward import experts as run_experts
from rooftile.moe.operator import BACKENDS
from rooftile.moe.router import Router
from rooftile.moe.routing import Routing, as_router, route
from rooftile.runtime.arguments import check_backend, check_choice, check_count, check_deterministic, check_flag
from rooftile.runtime.words import answers_with

_WIDTH = "write width="
_ROUTER = "write router=rooftile.moe.Router(active=..., {})"
_ROUTING = "call routing = layer.route(x), and layer(x, routing)"


class DeepSeekMoE(torch.nn.Module):
    """Shared and routed experts in place of a feed-forward network: (..., width) in and out. The residual is the caller's.

    Args:
        width: of the input and the output.
        experts: routed experts.
        active: routed experts that each token uses; left out if a router is given.
        shared: experts that every token uses; they are stored as one of shared times the hidden width.
        hidden: width of an expert.
        activation, backend, deterministic: as in `rooftile.moe.experts`.
        device, dtype: of the parameters.
        router: the options of the router; by default a softmax whose gates are not renormalised.
        selection_bias: whether there is a buffer `selection_bias` (experts,), in fp32, for `rooftile.moe.update_bias`.

    The parameters are `centroids` (experts, width), `up`, `down`, `shared_up` and `shared_down`, gate rows first.

    Raises:
        InvalidInput: sizes do not match.

    Example:
        >>> layer = DeepSeekMoE(64, experts=8, active=2, shared=1, hidden=48)
        >>> x = torch.randn(2, 10, 64)
        >>> routing = layer.route(x)
        >>> y, loss = layer(x, routing), rooftile.moe.balance_loss(routing)
        >>> y.shape, loss.shape
        (torch.Size([2, 10, 64]), torch.Size([]))

    DeepSeekMoE, arXiv:2401.06066.
    """

    selection_bias: Tensor | None

    @answers_with({
        **dict.fromkeys(("hidden_size", "d_model", "dim", "embed_dim"), _WIDTH),
        **dict.fromkeys(("norm_topk_prob", "normalise"), _ROUTER.format("normalise=True")),
        **dict.fromkeys(("scoring_func", "score"), _ROUTER.format("score='sigmoid'")),
        **dict.fromkeys(("routed_scaling_factor", "scale"), _ROUTER.format("scale=...")),
        **dict.fromkeys(("n_group", "topk_group", "groups"), _ROUTER.format("groups=..., active_groups=...")),
    })  # fmt: skip
    def __init__(
        self, width: int, experts: int, active: int | None = None, shared: int = 0, hidden: int | None = None, *,
        activation: str = "silu", backend: str | None = None, deterministic: bool | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None, router: Router | None = None,
        selection_bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.width, self.experts, self.shared = check_count("width", width), check_count("experts", experts), shared
        self.hidden, self.shared = check_count("hidden", hidden), check_count("shared", shared, least=0)
        if router is not None and active not in (None, getattr(router, "active", active)):
            raise InvalidInput(f"active is {active} and router has active={router.active}; leave one out")
        self.router = as_router(router, {"active": active})
        self.router.check_experts(self.experts)
        self.activation = check_choice("activation", activation, ACTIVATIONS)
        check_deterministic(deterministic)
        self.backend, self.deterministic = check_backend(backend, BACKENDS), deterministic
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        n = halves(activation)
        self.centroids = torch.nn.Parameter(torch.empty((self.experts, self.width), **made))
        self.up = torch.nn.Parameter(torch.empty((self.experts, n * self.hidden, self.width), **made))
        self.down = torch.nn.Parameter(torch.empty((self.experts, self.width, self.hidden), **made))
        s = self.shared * self.hidden
        self.shared_up = torch.nn.Parameter(torch.empty((n * s, self.width), **made)) if s else None
        self.shared_down = torch.nn.Parameter(torch.empty((self.width, s), **made)) if s else None
        bias = torch.zeros(self.experts, device=device) if check_flag("selection_bias", selection_bias) else None
        self.register_buffer("selection_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the parameters as `torch.nn.Linear` does: uniform, by the width that each product sums over."""
        for x in self.parameters():
            torch.nn.init.uniform_(x, -(x.shape[-1] ** -0.5), x.shape[-1] ** -0.5)

    def route(self, x: Tensor) -> Routing:
        """Chooses the experts of each token. The routing has the graph of the scores, for `rooftile.moe.balance_loss`."""
        return route(x, self.centroids, self.router, bias=self.selection_bias, deterministic=self.deterministic)

    @answers_with({"return_routing": _ROUTING, "output_router_logits": _ROUTING})
    def forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        """Computes the experts of x (..., width).

        routing: of `layer.route(x)`, or of another run; by default the layer routes here.
        """
        return run_experts(
            x, self.route(x) if routing is None else routing, self.up, self.down, activation=self.activation,
            backend=self.backend, deterministic=self.deterministic, shared_down=self.shared_down, shared_up=self.shared_up,
        )  # fmt: skip

    def extra_repr(self) -> str:
        words = [f"width={self.width}, experts={self.experts}, shared={self.shared}, hidden={self.hidden}"]
        words += [f"activation={self.activation!r}"] * (self.activation != "silu") + [f"router={self.router}"]
        return ", ".join(words)
