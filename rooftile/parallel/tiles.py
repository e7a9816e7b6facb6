"""A function of single tokens, such as a feed-forward, in tiles of tokens: activations of one tile exist at a time.

The forward keeps its input alone. The backward runs each tile again. Gradients of the function's parameters are added up in fp32
(fp64 for fp64): each tile's is rounded once, by the function's own products, and the sum once, however many tiles there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import get_device_states, set_device_states

from rooftile.errors import InvalidInput, Unsupported
from rooftile.fused.differentiable import in_transform
from rooftile.runtime.arguments import shown, whole


@torch.compiler.disable
def tiled(function: Callable[[Tensor], Tensor], x: Tensor, *, tile: int, dim: int = 1) -> Tensor:
    """Applies a function of single tokens to tiles of tokens; activations inside of it exist for one tile at a time.

    Args:
        function: a module or any callable that takes tokens and returns as many, each computed from itself alone: a feed-forward,
            a norm, a router with its experts, and no attention. Its parameters, also those that it only closes over, get their
            gradients, which are summed in fp32 over the tiles.
        x: (B, T, D), or any tensor with tokens along `dim`.
        tile: tokens per tile; the last may have fewer.
        dim: the axis of tokens of x and of the result.

    Each tile's forward runs again in the backward, with the same random numbers and autocast: a third more work than without
    tiles, as with activation checkpointing. Wrap no module in a checkpoint as well. Compiled modules may be tiled.

    Raises:
        InvalidInput: the function returns no tensor of its tile's tokens, or of another width or dtype for another tile.
        Unsupported: it reads a tensor that requires a gradient and is no parameter, it changes its tile in place, or a second
            derivative or a transform of torch.func is asked for.

    Example:
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> tiled(mlp, torch.randn(2, 100, 8), tile=16).shape
        torch.Size([2, 100, 8])
    """
    if not callable(function):
        raise InvalidInput(f"function is {shown(function)}; must be a module or another callable that takes a tile of tokens")
    axis = whole(dim)
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_nested or axis is None or not -x.ndim <= axis < x.ndim:
        raise InvalidInput(f"x is {shown(x)} and dim {shown(dim)}; must be a dense tensor with that axis, its axis of tokens")
    size = whole(tile)
    if size is None or size < 1:
        raise InvalidInput(f"tile is {shown(tile)}; must be a number of tokens, at least 1")
    if in_transform():
        raise Unsupported("tiled under torch.func; has autograd: call backward(), or torch.autograd.grad")
    tiles = _Tiles(function, x.shape[axis], size, axis % x.ndim, x.device.type)
    y, leaves = tiles.forward(x)
    if not leaves and not (x.requires_grad and torch.is_grad_enabled()):
        return y
    found: Tensor = _Tiled.apply(tiles, y, x, *leaves)
    return found


class _Tiles:
    """The tiles of one call, and what each needs to run again as it ran."""

    def __init__(self, function: Callable[[Tensor], Tensor], tokens: int, tile: int, dim: int, device: str) -> None:
        self.function, self.tokens, self.tile, self.dim, self.device = function, tokens, tile, dim, device
        self.cast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in dict.fromkeys((device, "cpu"))
            if torch.amp.is_autocast_available(kind)
        ]
        self.states: list[tuple[Tensor, tuple[list[int], list[Tensor]]]] = []

    def of(self, x: Tensor) -> Iterator[Tensor]:
        """Yields the tiles of x; without tokens one that is empty, so that the result has its shape."""
        for start in range(0, max(self.tokens, 1), self.tile):
            yield x.narrow(self.dim, start, min(self.tile, self.tokens - start))

    def run(self, part: Tensor) -> Tensor:
        """Returns the function of a tile, under the autocast of the call."""
        with ExitStack() as stack:
            for kind, dtype, on in self.cast:
                # a cast that is cached outside would be a tensor of another graph
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=False))
            y = self.function(part)
        if not isinstance(y, Tensor) or y.ndim <= self.dim or y.shape[self.dim] != part.shape[self.dim]:
            raise InvalidInput(
                f"the function returned {shown(y)} for a tile {tuple(part.shape)}; must be a tensor with as many tokens along "
                f"dim {self.dim}"
            )
        return y

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Returns the result, and the leaves besides x that it has gradients to."""
        found, begin, start = None, 0, torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        leaves: dict[Tensor, None] = {}
        for part in self.of(x):
            if torch.is_grad_enabled():
                self.states.append((torch.get_rng_state(), get_device_states(part)))
            part = part.detach().requires_grad_(x.requires_grad)
            version = None if part.is_inference() else part._version
            y = self.run(part)
            if version is not None and torch.is_grad_enabled() and part._version != version:
                raise Unsupported(
                    "the tiled function changes its tile in place; it runs again in the backward: leave inplace=True"
                )
            leaves |= dict.fromkeys(_leaves_of(y, part, start))
            y = y.detach()
            if found is None:
                found = y.new_empty((*y.shape[: self.dim], self.tokens, *y.shape[self.dim + 1 :]))
            due = (*found.shape[: self.dim], y.shape[self.dim], *found.shape[self.dim + 1 :])
            if (tuple(y.shape), y.dtype) != (due, found.dtype):
                raise InvalidInput(
                    f"the function returned {tuple(y.shape)} in {y.dtype} for tokens from {begin} on; must be {due} in "
                    f"{found.dtype}, as for the first tile"
                )
            found.narrow(self.dim, begin, y.shape[self.dim]).copy_(y)
            begin += y.shape[self.dim]
        assert found is not None
        return found, list(leaves)

    def again(self, n: int, part: Tensor) -> Tensor:
        """Returns the function of tile n with the random numbers of the forward, which go on as if it had not run."""
        state, (devices, states) = self.states[n]
        with torch.random.fork_rng(devices, device_type="cuda"):
            torch.set_rng_state(state)
            set_device_states(devices, states, device_type=self.device)
            return self.run(part)


def _leaves_of(y: Tensor, x: Tensor, start: int) -> list[Tensor]:
    """Returns the leaves behind y other than x; all other nodes must be younger than `start`."""
    found: list[Tensor] = []
    seen, left = set(), [y.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            if node.variable is not x:  # type: ignore[attr-defined]
                found.append(node.variable)  # type: ignore[attr-defined]
        elif node._sequence_nr() < start:
            raise Unsupported(
                f"the tiled function reads the result of {node.name()}, which requires a gradient and is no parameter; "
                "make it part of x, or compute it inside of the function"
            )
        left += [before for before, _ in node.next_functions]
    return found


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, y: Tensor, x: Tensor, *leaves: Tensor) -> Tensor:
        ctx.tiles = tiles
        ctx.save_for_backward(x, *leaves)
        return y.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise Unsupported("a second derivative of a tiled function; has first ones: leave out create_graph")
        tiles, (x, *leaves) = ctx.tiles, ctx.saved_tensors
        wants_dx, *wanted = ctx.needs_input_grad[2:]
        dx = torch.empty_like(x) if wants_dx else None
        sums: list[Tensor | None] = [None] * len(leaves)
        needed = [leaf for leaf, wants in zip(leaves, wanted, strict=True) if wants]
        for n, (part, dy) in enumerate(zip(tiles.of(x), tiles.of(grad), strict=True)):
            with torch.enable_grad():
                one = part.detach().requires_grad_(wants_dx)
                y = tiles.again(n, one)
            inputs = [*([one] if wants_dx else []), *needed]
            # a tile may have no gradient at all, as where no token goes to an expert
            with _without_hooks(needed):
                given = torch.autograd.grad(y, inputs, dy, allow_unused=True) if y.requires_grad else (None,) * len(inputs)
            if dx is not None:
                own = dx.narrow(tiles.dim, n * tiles.tile, part.shape[tiles.dim])
                own.zero_() if given[0] is None else own.copy_(given[0])
            _add(sums, [i for i, wants in enumerate(wanted) if wants], given[wants_dx:])
        return None, None, dx, *(None if g is None else g.to(leaf.dtype) for g, leaf in zip(sums, leaves, strict=True))


@contextmanager
def _without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Keeps hooks of parameters from a tile's part of a gradient: they see the sum once, as without tiles."""
    hooks = [x._backward_hooks for x in leaves if x._backward_hooks]
    kept = [dict(its) for its in hooks]
    for its in hooks:
        its.clear()
    try:
        yield
    finally:
        for its, before in zip(hooks, kept, strict=True):
            its.update(before)


def _add(sums: list[Tensor | None], places: list[int], found: Sequence[Tensor | None]) -> None:
    for place, g in zip(places, found, strict=True):
        before = sums[place]
        if g is not None and before is None:
            sums[place] = g.to(torch.promote_types(g.dtype, torch.float32), copy=True)
        elif g is not None and before is not None:
            before += g
