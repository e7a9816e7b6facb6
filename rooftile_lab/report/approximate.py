"""The experiment on approximate attention: from which length each method is faster here, what it loses, and what it sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rooftile.cost.session import open_session
from rooftile.exact.spec import DTYPES
from rooftile_lab.bench.methods import crossover
from rooftile_lab.bench.methods.crossover import Found
from rooftile_lab.bench.methods.losses import Loss, losses
from rooftile_lab.bench.methods.table import WAYS, WHOLE, sizes_of
from rooftile_lab.bench.methods.way import Sizes
from rooftile_lab.report.plan import Plan
from rooftile_lab.report.sight import Sight, sights


@dataclass(frozen=True, slots=True, kw_only=True)
class Approximate:
    """The methods beside exact attention.

    Attributes:
        paying: the search of each method, of a forward, or of a step of decoding for Loki.
        sizes: heads and their dimensions, by method.
        losses: of exact attention and of each method.
        lost_at: tokens of the texts on which the losses were measured.
        sights: what each method sees.
        dtype: of all tensors.
    """

    paying: dict[str, Found]
    sizes: dict[str, Sizes]
    losses: list[Loss]
    lost_at: int
    sights: list[Sight]
    dtype: str

    def loss_of(self, method: str) -> Loss:
        """The loss of a method."""
        (found,) = [loss for loss in self.losses if loss.method == method]
        return found

    def json(self) -> dict[str, Any]:
        """Returns the numbers, without the tiles of the pictures."""
        return {
            "paying": {name: asdict(found) for name, found in self.paying.items()},
            "sizes": {name: sizes._asdict() for name, sizes in self.sizes.items()},
            "losses": [asdict(loss) for loss in self.losses], "lost_at": self.lost_at, "dtype": self.dtype,
            "sights": [each.json() for each in self.sights],
        }  # fmt: skip


def measure(plan: Plan, device: str, step: Callable[[float, str], None]) -> Approximate:
    """Searches the crossovers of forwards within the plan's seconds, and measures losses on short texts."""
    of = plan.approximate
    session = open_session(device)
    done = 0

    def say(words: str) -> None:
        nonlocal done
        step(min(0.7 * done / (6 * len(WHOLE)), 0.7), f"approximate attention: {words}")
        done += 1

    say("crossovers")
    # the slowest on a CPU first: they end early, and leave their time to the others
    searches = crossover.measure(
        session, WHOLE[::-1], of.limit, of.seconds, phases=("fwd", "decode"), rounds=of.rounds, turn_ms=2.0, say=say
    )  # fmt: skip
    by_name = {name: found for name, _, found, _ in searches}
    paying = {name: by_name[name] for name in WHOLE}
    lost = losses(
        Sizes(1, of.lost_at, 2, 2, plan.bits_dim // 2), torch.device(device), DTYPES[session.dtype], draws=1,
        say=lambda words: step(0.8, f"approximate attention: {words}"),
    )  # fmt: skip
    return Approximate(
        paying=paying, sizes={name: sizes_of(WAYS[name], session.device.type, 1) for name in paying}, losses=lost,
        lost_at=of.lost_at, sights=sights(of.pictured), dtype=session.dtype,
    )  # fmt: skip
