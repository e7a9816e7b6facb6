"""Trains a policy in an environment of NumPy by REINFORCE, as CleanRL's loops do; --without environment has recorded episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from rooftile_lab.bench.diagnosis.public.course import Course


class Poles:
    """Carts with poles to balance, many at once."""

    def __init__(self, carts: int) -> None:
        self.rng, self.carts = np.random.default_rng(0), carts
        self.state = self.rng.uniform(-0.05, 0.05, (carts, 4))

    def step(self, actions: Any) -> tuple[Any, Any]:
        x, speed, angle, turn = self.state.T
        # a fine integration, in Python as environments are written
        for _ in range(40):
            push = np.where(actions == 1, 10.0, -10.0)
            pull = (push + 0.05 * turn**2 * np.sin(angle)) / 1.1
            bend = (9.8 * np.sin(angle) - np.cos(angle) * pull) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
            speed, turn = speed + 5e-4 * (pull - 0.05 * bend * np.cos(angle) / 1.1), turn + 5e-4 * bend
            x, angle = x + 5e-4 * speed, angle + 5e-4 * turn
        ended = (abs(angle) > 0.2) | (abs(x) > 2.4)
        self.state = np.stack([x, speed, angle, turn], axis=1)
        self.state[ended] = self.rng.uniform(-0.05, 0.05, (int(ended.sum()), 4))
        return self.state, np.where(ended, -1.0, 1.0)


def main() -> None:
    course = Course("environment")
    carts, width, length = course.sized((64, 64, 8), (1024, 256, 64), (1, 4, 8))
    poles, recorded = Poles(carts), np.random.default_rng(1).normal(size=(carts, 4))
    policy = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)).to(
        course.device
    )
    optimiser = torch.optim.Adam(policy.parameters(), lr=1e-3)
    observed = recorded
    while course.goes_on():
        chances, rewards = [], []
        for _ in range(length):
            logits = policy(torch.as_tensor(observed, dtype=torch.float32, device=course.device))
            chosen = torch.distributions.Categorical(logits=logits)
            actions = chosen.sample()
            chances.append(chosen.log_prob(actions))
            if course.has("environment"):
                observed, reward = poles.step(actions.cpu().numpy())
            else:
                observed, reward = recorded, np.ones(carts)
            rewards.append(torch.as_tensor(reward, dtype=torch.float32, device=course.device))
        gains = torch.stack(rewards).flip(0).cumsum(0).flip(0)
        loss = -(torch.stack(chances) * (gains - gains.mean())).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


if __name__ == "__main__":
    main()
