"""Trains a UNet to predict noise, as examples of diffusers do, with its images in channels_last."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rooftile_lab.bench.diagnosis.public.course import Course


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, times: int, groups: int) -> None:
        super().__init__()
        self.before, self.first = nn.GroupNorm(groups, inner), nn.Conv2d(inner, outer, 3, padding=1)
        self.time = nn.Linear(times, outer)
        self.between, self.second = nn.GroupNorm(groups, outer), nn.Conv2d(outer, outer, 3, padding=1)
        self.beside = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(F.silu(self.before(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.second(F.silu(self.between(y))) + self.beside(x)


class Attention(nn.Module):
    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(groups, channels),
            nn.Linear(channels, 3 * channels),
            nn.Linear(channels, channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        rows = self.norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(rows)[:, None].chunk(3, dim=-1)
        y = self.out(F.scaled_dot_product_attention(q, k, v)[:, 0])
        return x + y.transpose(1, 2).reshape(batch, channels, height, width)


class UNet(nn.Module):
    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        c, times = channels, 4 * channels
        self.channels = c
        self.time = nn.Sequential(nn.Linear(c, times), nn.SiLU(), nn.Linear(times, times))
        self.enter, self.leave = nn.Conv2d(3, c, 3, padding=1), nn.Conv2d(c, 3, 3, padding=1)
        self.down = nn.ModuleList([Residual(c, c, times, groups), Residual(c, 2 * c, times, groups)])
        self.middle, self.attention = Residual(2 * c, 2 * c, times, groups), Attention(2 * c, groups)
        self.up = nn.ModuleList([Residual(4 * c, c, times, groups), Residual(2 * c, c, times, groups)])

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rates = torch.exp(torch.arange(self.channels // 2, device=x.device) * (-math.log(10000) / (self.channels // 2)))
        angles = t[:, None] * rates
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        x = self.enter(x)
        kept = []
        for block in self.down:
            x = block(x, time)
            kept.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.attention(self.middle(x, time))
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], dim=1), time)
        return self.leave(F.silu(x))


def main() -> None:
    course = Course()
    batch, side, channels, groups = course.sized((2, 32, 32, 8), (32, 64, 128, 32), (1, 4, 4, 2))
    model = UNet(channels, groups).to(course.device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    kept = torch.linspace(0.99, 0.01, 1000, device=course.device)
    images = torch.randn(64, 3, side, side, device=course.device)
    while course.goes_on():
        clean = images[torch.randint(64, (batch,))].contiguous(memory_format=torch.channels_last)  # type: ignore[call-overload]
        noise, t = torch.randn_like(clean), torch.randint(1000, (batch,), device=course.device)
        share = kept[t][:, None, None, None]
        noisy = share.sqrt() * clean + (1 - share).sqrt() * noise
        loss = F.mse_loss(model(noisy, t), noise)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()


if __name__ == "__main__":
    main()
