"""Trains a text classifier on bags of words: sparse gradients of a large table with SparseAdam, Adam for the rest."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from rooftile_lab.bench.diagnosis.public.course import Course


def main() -> None:
    course = Course()
    words, width, batch, length = course.sized((50000, 128, 128, 64), (2_000_000, 256, 4096, 128), (8, 4, 2, 2))
    bags = nn.EmbeddingBag(words, width, sparse=True).to(course.device)
    classifier = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)).to(course.device)
    optimisers = torch.optim.SparseAdam(bags.parameters(), lr=1e-3), torch.optim.Adam(classifier.parameters(), lr=1e-3)
    while course.goes_on():
        # some words are far more frequent than others
        ids = (words * torch.rand(batch * length, device=course.device) ** 3).long().clamp_(max=words - 1)
        offsets = torch.arange(0, batch * length, length, device=course.device)
        labels = torch.randint(4, (batch,), device=course.device)
        for optimiser in optimisers:
            optimiser.zero_grad()
        F.cross_entropy(classifier(bags(ids, offsets)), labels).backward()
        for optimiser in optimisers:
            optimiser.step()


if __name__ == "__main__":
    main()
