"""Twenty steps of training on meshes (dp, cp) = (2, 2) and (1, 2), beside one process's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rooftile import fused, parallel
from tests.parallel.context_model_cases import llama

T, STEPS = 30, 20


class Kind(NamedTuple):
    """How a model is trained."""

    dp: int
    packed: bool = False
    checkpointed: bool = False
    offloaded: bool = False
    compiled: bool = False
    tiled: bool = False
    micro_steps: int = 1


KINDS = (
    Kind(2, packed=True, checkpointed=True, offloaded=True, tiled=True),
    Kind(1, compiled=True, micro_steps=2),
)


class LanguageModel(nn.Module):
    """A Llama whose forward returns its loss over the ranks of a group, or over its own tokens."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.llama, self.group = llama(), group

    def forward(self, tokens: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        hidden = self.llama.model(tokens, position_ids=positions, use_cache=False).last_hidden_state
        split: dict[str, Any] = {} if self.group is None else {"group": self.group, "split": "tokens"}
        return fused.linear_cross_entropy(hidden, self.llama.lm_head.weight, targets, **split)


class Tiled(nn.Module):
    """A feed-forward in tiles of tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return parallel.tiled(self.inner, x, tile=4)


def data(step: int, kind: Kind) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns tokens and targets (dp, T) of a micro-step, some ignored, more of them at one end; and offsets of documents."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(97, (kind.dp, T + 1), generator=draw)
    targets = ids[:, 1:].clone()
    targets[:, : 5 + step % 7] = -100
    cu = torch.tensor([0, 1, 12 + step % 5, T]) if kind.packed else None
    return ids[:, :-1], targets, cu


def one_process(kind: Kind) -> tuple[list[float], dict[str, Tensor]]:
    """Trains on all tokens of all data-parallel rows at once."""
    torch.manual_seed(0)
    model = LanguageModel(None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        for micro in range(kind.micro_steps):
            x, y, cu = data(step * kind.micro_steps + micro, kind)
            at = torch.arange(T)[None] if cu is None else parallel.positions(T, ALONE, cu=cu)[None]
            # documents of one row do not see each other: attention takes a pack of batch 1
            count = (y >= 0).sum()
            total = torch.zeros(())
            for row in range(kind.dp):
                with parallel.context(ALONE, cu=cu):
                    loss = model(x[row : row + 1], y[row : row + 1], at)
                total = total + loss * (y[row] >= 0).sum() / count
            (total / kind.micro_steps).backward()
            losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def over_ranks(kind: Kind, mesh: Any) -> tuple[list[float], dict[str, Tensor]]:
    """Trains on a mesh (dp, cp), as examples/train_long_context.py does."""
    flat = mesh["dp", "cp"]._flatten("all") if kind.dp > 1 else mesh["cp"]
    model = LanguageModel(flat)
    if kind.tiled:
        for layer in model.llama.model.layers:
            layer.mlp = Tiled(layer.mlp)
    if kind.checkpointed:
        options = {"use_reentrant": False, "context_fn": parallel.checkpoint_contexts}
        model.llama.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    if kind.compiled:
        model.llama.model.layers[0].compile(backend="eager")
    for layer in model.llama.model.layers:
        fully_shard(layer, mesh=flat)
    fully_shard(model, mesh=flat)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, row, cp = [], mesh.get_local_rank("dp"), mesh["cp"]
    for step in range(STEPS):
        for micro in range(kind.micro_steps):
            x, y, cu = data(step * kind.micro_steps + micro, kind)
            layout = "zigzag" if cu is None else "balanced"
            x, y = (parallel.shard(part[row : row + 1], cp, layout=layout, cu=cu) for part in (x, y))
            moved: AbstractContextManager[None] = parallel.offload(min_bytes=0) if kind.offloaded else nullcontext()
            with parallel.context(cp, layout, cu=cu), moved:
                loss = model(x, y, parallel.positions(T, cp, layout, cu)[None])
            (loss * flat.size() / kind.micro_steps).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    found = {}
    for name, p in model.named_parameters():
        assert isinstance(p, DTensor)
        found[name.replace("inner.", "").replace("_orig_mod.", "")] = p.full_tensor().detach()
    return losses, found


ALONE: Any = None


def trained(rank: int) -> list[tuple[float, float]]:
    """Returns the worst difference of a loss and of a final weight for each kind."""
    global ALONE
    groups = [dist.new_group([n]) for n in range(4)]
    ALONE = groups[rank]
    found = []
    # rank 0 trains alone for all: four processes would share the cores
    alone: list[Any] = [[one_process(kind) for kind in KINDS] if rank == 0 else None]
    dist.broadcast_object_list(alone, 0)
    for kind, (due_losses, due) in zip(KINDS, alone[0], strict=True):
        whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        if kind.dp == 2:
            mesh = whole
        else:
            # two of the four ranks
            half = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("half", "dp", "cp"))
            mesh = half["dp", "cp"]
            if rank >= 2:
                continue
        torch.manual_seed(0)
        losses, weights = over_ranks(kind, mesh)
        assert weights.keys() == due.keys()
        worst = max(float((weights[name] - p).abs().max()) for name, p in due.items())
        found.append((max(abs(a - b) for a, b in zip(losses, due_losses, strict=True)), worst))
    # no rank leaves the group while others train
    dist.barrier()
    return found
