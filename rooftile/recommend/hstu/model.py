"""A generative recommender: it reads users' events, and scores the item that comes next.

Zhai et al., Actions Speak Louder than Words, arXiv:2402.17152.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rooftile.errors import InvalidInput
from rooftile.recommend.hstu.layer import HSTU
from rooftile.runtime.arguments import check_count, check_number, shown, whole
from rooftile.runtime.tensors import check_offsets
from rooftile.runtime.words import answers_foreign_words


class HSTURecommender(nn.Module):
    """Embeddings of items, layers of `HSTU`, and scores by the cosine between a state and an item.

    Args:
        items: how many there are; item numbers are 0 to items - 1.
        dim: the width of embeddings and layers.
        layers: how many.
        heads: of each layer.
        longest: the most rows of a user: the columns of the table of positions, and the divisor of attention's sums.
        buckets: of the time between events; 0 for a model without times.
        dropout: as in `HSTU`, and of the embeddings.
        temperature: of the cosine in the loss.
        backend: as in `hstu_attention`.
        device, dtype: of the parameters.

    Raises:
        InvalidInput: sizes do not match.

    Example:
        >>> model = HSTURecommender(1000, dim=32, layers=2, heads=2, longest=64, buckets=0)
        >>> events, cu = torch.randint(1000, (90,)), torch.tensor([0, 30, 90])
        >>> model(events, cu).shape
        torch.Size([90, 32])

    Zhai et al., arXiv:2402.17152.
    """

    @answers_foreign_words
    def __init__(
        self, items: int, *, backend: str | None = None, buckets: int = 64, device: torch.device | str | None = None,
        dim: int = 64, dropout: float = 0.2, dtype: torch.dtype | None = None, heads: int = 2,
        layers: int = 2, longest: int = 256, temperature: float = 0.05,
    ) -> None:  # fmt: skip
        super().__init__()
        self.items, self.longest = check_count("items", items), check_count("longest", longest)
        self.temperature, self.dropout = check_number("temperature", temperature), dropout
        if self.temperature <= 0:
            raise InvalidInput(f"temperature is {temperature}; must be above 0")
        dim = check_count("dim", dim)
        self.embedding = nn.Embedding(self.items, dim, device=device, dtype=dtype)
        self.place = nn.Embedding(self.longest, dim, device=device, dtype=dtype)
        for table in (self.embedding, self.place):
            nn.init.trunc_normal_(table.weight, std=0.02)
        self.layers = nn.ModuleList(
            HSTU(
                dim, heads, positions=self.longest, buckets=buckets, scale=1 / self.longest, dropout=dropout, backend=backend,
                device=device, dtype=dtype,
            )
            for _ in range(check_count("layers", layers))
        )  # fmt: skip

    @answers_foreign_words
    def forward(self, events: Tensor, cu: Tensor, times: Tensor | None = None, *, targets: Tensor | int | None = None) -> Tensor:
        """Returns the state of each event, (total, dim): what the model knows when it has read it.

        Args:
            events: item numbers (total,), of users one after the other.
            cu: offsets (B + 1,) of users.
            times: seconds (total,), for a model with buckets, and no other.
            targets: how many last events of each user are candidates, as in `hstu_attention`.
        """
        cu = self._check(events, cu, times)
        rows = torch.arange(events.shape[0], device=events.device)
        lengths = cu.diff().to(events.device)
        first = torch.repeat_interleave(cu[:-1].to(events.device), lengths, output_size=events.shape[0])
        place = rows - first
        if targets is not None:
            # all candidates stand where the next event would
            last = _targets(targets, lengths)
            end = torch.repeat_interleave(lengths - last, lengths, output_size=events.shape[0])
            place = torch.minimum(place, end)
        x = F.dropout(self.embedded(events, place), self.dropout, self.training)
        for layer in self.layers:
            x = layer(x, cu, times=times if layer.time_table is not None else None, targets=targets)
        return x

    @property
    def timed(self) -> bool:
        """Whether the model reads times."""
        return any(layer.time_table is not None for layer in self.layers)

    def embedded(self, events: Tensor, place: Tensor) -> Tensor:
        """Returns the rows (total, dim) that enter the first layer: of items, each with its number in the user's history."""
        x: Tensor = self.embedding(events) * self.embedding.embedding_dim**0.5 + self.place(place)
        return x

    def loss(
        self, events: Tensor, cu: Tensor, times: Tensor | None = None, *, negatives: int = 128,
        generator: torch.Generator | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns the sampled softmax loss of each event but a user's first, given the events before it; a mean.

        Args:
            events, cu, times: as in `forward`.
            negatives: how many items are drawn to stand against the true one, the same for all events.
            generator: of the random numbers, on the device of the events.

        Raises:
            InvalidInput: no user has two events.
        """
        cu = self._check(events, cu, times)
        states = self(events, cu, times)
        there = torch.ones(events.shape[0], dtype=torch.bool, device=events.device)
        ends = cu[1:][cu.diff() > 0].to(events.device).long()
        there[ends - 1] = False
        rows = there.nonzero()[:, 0]
        if not rows.shape[0]:
            raise InvalidInput("no user has two events, so there is no next event to learn from")
        states, due = F.normalize(states[rows], dim=-1), events[rows + 1].long()
        drawn = torch.randint(self.items, (check_count("negatives", negatives),), device=events.device, generator=generator)
        right = (states * F.normalize(self.embedding(due), dim=-1)).sum(-1, keepdim=True)
        wrong = states @ F.normalize(self.embedding(drawn), dim=-1).mT
        wrong = wrong.masked_fill(drawn[None] == due[:, None], -torch.inf)
        scores = torch.cat([right, wrong], dim=1).float() / self.temperature
        return F.cross_entropy(scores, torch.zeros_like(due))

    def scores(self, states: Tensor, items: Tensor | None = None) -> Tensor:
        """Returns the cosine of states (..., dim) and items (n,), or all items, as (..., n)."""
        dim = self.embedding.embedding_dim
        if not isinstance(states, Tensor) or not states.ndim or states.shape[-1] != dim:
            raise InvalidInput(f"states is {shown(states)}; must be a tensor (..., {dim})")
        if items is not None:
            self._check_items("items", items, "(n,)")
        table = self.embedding.weight if items is None else self.embedding(items)
        return F.normalize(states, dim=-1) @ F.normalize(table, dim=-1).mT

    def _check(self, events: Tensor, cu: Tensor, times: Tensor | None) -> Tensor:
        """Returns the offsets on the device of the events."""
        self._check_items("events", events, "(total,)")
        if times is not None and not self.timed:
            raise InvalidInput("times came, and the model has no buckets of time; give it buckets, or leave times out")
        if times is None and self.timed:
            raise InvalidInput(f"times is None; the model has buckets of time, and needs seconds ({len(events)},)")
        cu = check_offsets("cu", cu, events.shape[0], "events", events.device, False)
        if torch.compiler.is_compiling():
            return cu
        if cu.is_cpu and cu.numel() > 1 and int(cu.diff().max()) > self.longest:
            raise InvalidInput(f"a user has {int(cu.diff().max())} events; longest is {self.longest}: give its last ones")
        return cu

    def _check_items(self, name: str, x: Tensor, due: str) -> None:
        if not isinstance(x, Tensor) or x.ndim != 1 or x.dtype not in (torch.int32, torch.int64):
            raise InvalidInput(f"{name} is {shown(x)}; must be int64 {due}, the numbers of items")
        # on a GPU PyTorch's embeddings stop the program at a number that they do not have
        readable = x.is_cpu and x.numel() > 0 and not torch.compiler.is_compiling()
        if readable and not 0 <= int(x.min()) <= int(x.max()) < self.items:
            worst = int(x.min()) if int(x.min()) < 0 else int(x.max())
            raise InvalidInput(f"{name} has the item {worst}; items are 0 to {self.items - 1}")


def _targets(targets: Tensor | int, lengths: Tensor) -> Tensor:
    """The candidates of each user (B,), which are no more than its events."""
    number = whole(targets) if not isinstance(targets, Tensor) or not targets.ndim else None
    if number is not None:
        last = torch.full_like(lengths, number)
    elif isinstance(targets, Tensor) and targets.shape == lengths.shape and targets.dtype in (torch.int32, torch.int64):
        last = targets.to(lengths.device)
    else:
        raise InvalidInput(f"targets is {shown(targets)}; must be an int, or int32 or int64 of shape ({lengths.shape[0]},)")
    if last.is_cpu and not torch.compiler.is_compiling():
        wrong = (last < 0) | (last > lengths) & (lengths > 0)
        if bool(wrong.any()):
            b = int(wrong.nonzero()[0])
            raise InvalidInput(
                f"user {b} has {int(lengths[b])} events and {int(last[b])} targets; must be 0 to {int(lengths[b])}"
            )
    return last
