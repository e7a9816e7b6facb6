"""Trains a recommender on histories of different lengths: --way nested has jagged nested tensors, offsets values with offsets."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rooftile_lab.bench.diagnosis.public.course import Course


class Recommender(nn.Module):
    """Features of each user's history and of dense numbers, their products, and a network on top, as in DLRM."""

    def __init__(self, tables: int, items: int, width: int, dense: int, nested: bool) -> None:
        super().__init__()
        self.nested = nested
        self.tables = nn.ModuleList(nn.Embedding(items, width) for _ in range(tables))
        self.each = nn.Linear(width, width)
        self.bottom = nn.Sequential(nn.Linear(dense, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(pairs + width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 1))

    def forward(self, numbers: Tensor, values: list[Tensor], offsets: Tensor) -> Tensor:
        pooled = [self._pooled(table, ids, offsets) for table, ids in zip(self.tables, values, strict=True)]
        features = torch.stack([self.bottom(numbers), *pooled], dim=1)
        products = features @ features.transpose(1, 2)
        first, second = torch.triu_indices(len(pooled) + 1, len(pooled) + 1, 1, device=numbers.device)
        return self.top(torch.cat([features[:, 0], products[:, first, second]], dim=1))[:, 0]

    def _pooled(self, table: nn.Module, ids: Tensor, offsets: Tensor) -> Tensor:
        if self.nested:
            jagged = torch.nested.nested_tensor_from_jagged(table(ids), offsets)
            return torch.nested.to_padded_tensor(F.relu(self.each(jagged)), 0.0).sum(dim=1)
        rows = F.relu(self.each(table(ids)))
        lengths = offsets.diff()
        owners = torch.repeat_interleave(torch.arange(len(lengths), device=ids.device), lengths)
        return torch.zeros(len(lengths), rows.shape[1], device=rows.device).index_add_(0, owners, rows)


def main() -> None:
    course = Course(way="nested")
    tables, items, width, dense, batch, longest = course.sized(
        (4, 5000, 32, 13, 128, 24), (26, 200_000, 128, 13, 4096, 64), (4, 4, 2, 2, 2, 2)
    )
    model = Recommender(tables, items, width, dense, course.options.way == "nested").to(course.device)
    optimiser = torch.optim.Adagrad(model.parameters(), lr=0.01)
    while course.goes_on():
        lengths = torch.randint(1, longest + 1, (batch,))
        offsets = F.pad(lengths.cumsum(0), (1, 0)).to(course.device)
        count = int(lengths.sum())
        values = [torch.randint(items, (count,), device=course.device) for _ in range(tables)]
        numbers, clicked = torch.rand(batch, dense, device=course.device), torch.randint(2, (batch,), device=course.device)
        loss = F.binary_cross_entropy_with_logits(model(numbers, values, offsets), clicked.float())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


if __name__ == "__main__":
    main()
