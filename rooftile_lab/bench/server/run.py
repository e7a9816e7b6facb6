"""One run of the suite: its options, the engine alone, and the server beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rooftile.cost.session import Session
from rooftile.engine import LLM
from rooftile_lab.bench.processes import environment
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import measured, timed_row, with_measures
from rooftile_lab.bench.server.process import Server


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """The options of `rooftile bench server`."""

    model: str
    num_blocks: int | None = None
    max_model_len: int = 4096
    scale: float = 1.0
    runs: int = 3
    window_s: float = 10.0
    every_s: float = 2.0
    overload_s: float = 600.0
    tokens: int = 24


class Run:
    """One run.

    Args:
        session: the machine.
        folder: the checkpoint.
        options: the command's.
    """

    def __init__(self, session: Session, folder: Path, options: ServerOptions) -> None:
        self.session, self.folder, self.options = session, folder, options

        self.sizes = {"num_blocks": options.num_blocks or 20_000, "max_model_len": options.max_model_len}

    def engine(self, **settings: Any) -> LLM:
        """Returns the engine that the server runs."""
        return LLM(self.folder, device=str(self.session.device), **self.sizes | settings)

    def server(self, *words: str, **settings: Any) -> Server:
        """Starts the server, with further words of its command; its engine has one thread on a CPU."""
        sizes = self.sizes | settings
        flags = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
        env = environment(OMP_NUM_THREADS="1") if self.session.device.type == "cpu" else environment()
        return Server(self.folder, "--device", str(self.session.device), *flags, *words, env=env)

    def bar(self, case: str, taken: Mapping[str, Sequence[float]], **settings: Any) -> Row:
        """Returns the row of a bar, from the values of each of its runs."""
        size = {"model": self.options.model, "num_blocks": self.sizes["num_blocks"], "threads": torch.get_num_threads()}
        made = self._row(case, size | settings, **measured(taken))
        return replace(made, samples=max(map(len, taken.values())))

    def once(self, case: str, measures: Mapping[str, float], settings: dict[str, Any]) -> Row:
        """Returns the row of a case that is run once."""
        return replace(with_measures(self._row(case, settings), **measures), samples=1)

    def _row(self, case: str, settings: dict[str, Any], **more: Any) -> Row:
        return timed_row(
            self.session, [], dtype=self.session.dtype, suite="server", case=f"{case}-{self.options.model}", backend="http",
            phase="serve", settings=settings, **more,
        )  # fmt: skip
