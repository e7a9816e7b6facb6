"""Trains an LSTM language model, as the word_language_model of PyTorch's examples: the weights are updated by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rooftile_lab.bench.diagnosis.public.course import Course

State = tuple[Tensor, Tensor]


class Model(nn.Module):
    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(words, width)
        self.lstm, self.decoder = nn.LSTM(width, width, layers, dropout=0.2), nn.Linear(width, words)

    def forward(self, ids: Tensor, state: State) -> tuple[Tensor, State]:
        output, state = self.lstm(self.drop(self.encoder(ids)), state)
        return F.log_softmax(self.decoder(self.drop(output)).flatten(0, 1), dim=1), state


def main() -> None:
    course = Course()
    words, width, layers, length, batch = course.sized((2000, 128, 2, 35, 20), (33278, 650, 2, 35, 20), (8, 4, 2, 35, 1))
    data = torch.randint(words, (length * 64 + 1, batch), device=course.device)
    model = Model(words, width, layers).to(course.device)
    state = torch.zeros(layers, batch, width, device=course.device), torch.zeros(layers, batch, width, device=course.device)
    number = 0
    while course.goes_on():
        start = number % 64 * length
        model.zero_grad()
        state = state[0].detach(), state[1].detach()
        output, state = model(data[start : start + length], state)
        loss = F.nll_loss(output, data[start + 1 : start + 1 + length].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-20.0)
        number += 1


if __name__ == "__main__":
    main()
