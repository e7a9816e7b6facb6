"""Trains a graph convolutional network of two layers with a sparse adjacency matrix, as pygcn does."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rooftile_lab.bench.diagnosis.public.course import Course


class GraphConvolution(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inner, outer) / inner**0.5), nn.Parameter(torch.zeros(outer))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return torch.spmm(adjacency, x @ self.weight) + self.bias


class GCN(nn.Module):
    def __init__(self, features: int, width: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = GraphConvolution(features, width), GraphConvolution(width, classes)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.first(x, adjacency)), 0.5, training=self.training)
        return F.log_softmax(self.second(x, adjacency), dim=1)


def adjacency_of(nodes: int, edges: int) -> Tensor:
    """A random graph whose rows add up to 1, with an edge from each node to itself."""
    ends = torch.cat([torch.randint(nodes, (2, edges)), torch.arange(nodes).expand(2, nodes)], dim=1)
    degree = torch.bincount(ends[0], minlength=nodes)
    return torch.sparse_coo_tensor(ends, 1.0 / degree[ends[0]], (nodes, nodes), check_invariants=True).coalesce()


def main() -> None:
    course = Course()
    nodes, edges, features, width, classes = course.sized(
        (2708, 10556, 256, 64, 7), (169343, 1166243, 128, 256, 40), (4, 8, 4, 4, 2)
    )
    adjacency = adjacency_of(nodes, edges).to(course.device)
    x, labels = torch.randn(nodes, features, device=course.device), torch.randint(classes, (nodes,), device=course.device)
    train = torch.arange(0, nodes, 2, device=course.device)
    model = GCN(features, width, classes).to(course.device)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    while course.goes_on():
        model.train()
        optimiser.zero_grad()
        output = model(x, adjacency)
        loss = F.nll_loss(output[train], labels[train])
        loss.backward()
        optimiser.step()


if __name__ == "__main__":
    main()
