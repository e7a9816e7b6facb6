"""Trains a ResNet on images that a DataLoader crops, resizes and flips, with --workers; --without loader has one batch."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from rooftile_lab.bench.diagnosis.public.course import Course


def resized(image: Any, side: int) -> Any:
    """Resizes an image of bytes; by Pillow where it is installed, else by two products with weights of a triangle filter."""
    if find_spec("PIL"):
        from PIL import Image  # type: ignore[import-not-found]

        return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BILINEAR))
    across, down = (triangle(length, side) for length in (image.shape[1], image.shape[0]))
    return np.einsum("yh,hwc,xw->yxc", down, image, across, optimize=True)


def triangle(length: int, side: int) -> Any:
    centres = (np.arange(side) + 0.5) * length / side - 0.5
    weights = np.maximum(0, 1 - abs(np.arange(length) - centres[:, None]) / max(1.0, length / side))
    return weights / weights.sum(axis=1, keepdims=True)


class Images(Dataset[tuple[Tensor, int]]):
    """Photographs of random bytes, each decoded and augmented when it is asked for."""

    def __init__(self, stored: int, side: int) -> None:
        self.stored, self.side = stored, side

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        rng = np.random.default_rng(number)
        image = rng.integers(0, 256, (self.stored, self.stored, 3), dtype=np.uint8)
        top, left = rng.integers(0, self.stored // 4 + 1, 2)
        image = resized(image[top : top + self.stored * 3 // 4, left : left + self.stored * 3 // 4], self.side)
        if rng.random() < 0.5:
            image = image[:, ::-1]
        image = (image / 255.0 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
        return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1), dtype=np.float32)), number % 10


class Block(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False)
        self.second = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outer) for _ in range(2))
        self.beside = nn.Conv2d(inner, outer, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)))))
        return F.relu(y + self.beside(x))


def main() -> None:
    course = Course("loader", workers=0)
    batch, stored, side, width = course.sized((8, 512, 32, 8), (128, 500, 224, 64), (2, 16, 8, 2))
    blocks = [Block(width * n, width * m, s) for n, m, s in ((1, 1, 1), (1, 2, 2), (2, 4, 2), (4, 8, 2))]
    stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
    model = nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10)).to(course.device)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    loader: Iterable[Any] = DataLoader(Images(stored, side), batch, shuffle=True, num_workers=course.options.workers)
    if not course.has("loader"):
        loader = repeat((torch.randn(batch, 3, side, side), torch.arange(batch) % 10))
    for images, labels in loader:
        if not course.goes_on():
            break
        loss = F.cross_entropy(model(images.to(course.device)), labels.to(course.device))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


if __name__ == "__main__":
    main()
