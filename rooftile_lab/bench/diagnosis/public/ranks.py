"""Trains decoder blocks in two processes of torchrun, --way ddp or fsdp; --without exchange lets each train by itself."""

from __future__ import annotations

import os

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from rooftile_lab.bench.diagnosis.public.course import Course


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.grow, self.shrink = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shrink(F.gelu(self.grow(self.norm(x))))


def main() -> None:
    course = Course("exchange", way="ddp")
    batch, width, layers = course.sized((16, 384, 4), (4096, 2048, 8), (1, 8, 4))
    gpu = course.device.type == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else course.device
    if gpu:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if gpu else "gloo")
    model: nn.Module = nn.Sequential(*(Block(width) for _ in range(layers))).to(device)
    if course.has("exchange") and course.options.way == "ddp":
        model = DistributedDataParallel(model)
    elif course.has("exchange"):
        mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
        for block in model.children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    while course.goes_on():
        x = torch.randn(batch, width, device=device)
        optimiser.zero_grad()
        model(x).square().mean().backward()
        optimiser.step()
    # the reducer holds the group: a group that ends with it, under Python's lock, may wait for a thread that waits for the lock
    del model, optimiser
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
