"""Trains a GRU on sentences whose lengths differ from batch to batch, packed, as tutorials of sequence labelling do."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from rooftile_lab.bench.diagnosis.public.course import Course


class Tagger(nn.Module):
    def __init__(self, words: int, width: int, tags: int) -> None:
        super().__init__()
        self.words, self.tags = nn.Embedding(words, width, padding_idx=0), nn.Linear(2 * width, tags)
        self.gru = nn.GRU(width, width, batch_first=True, bidirectional=True)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(ids), lengths, batch_first=True, enforce_sorted=False)
        return self.tags(pad_packed_sequence(self.gru(packed)[0], batch_first=True)[0])


def main() -> None:
    course = Course()
    # the tiny size has as many steps of time
    words, width, tags, batch, longest = course.sized((5000, 96, 20, 16, 48), (50000, 512, 50, 64, 256), (8, 2, 2, 2, 48))
    model = Tagger(words, width, tags).to(course.device)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    while course.goes_on():
        lengths = torch.randint(longest // 4, longest + 1, (batch,))
        lengths[0] = longest
        ids = torch.randint(1, words, (batch, longest))
        ids[torch.arange(longest) >= lengths[:, None]] = 0
        ids = ids.to(course.device)
        optimiser.zero_grad()
        output = model(ids, lengths)
        loss = F.cross_entropy(output.flatten(0, 1), ids.flatten() % tags)
        loss.backward()
        optimiser.step()


if __name__ == "__main__":
    main()
