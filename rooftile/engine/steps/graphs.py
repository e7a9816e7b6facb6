"""CUDA graphs of steps that only decode: from embedding to sampling in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.engine.adapters.groups import RowGroups, group_rows, most_tiles
from rooftile.engine.sampling.features import SamplingFeatures
from rooftile.engine.sampling.state import SamplingState
from rooftile.engine.steps.step_inputs import StepInputs
from rooftile.runtime.early_weights import weights_stay

# numbers of rows that are captured: a step of fewer is padded. Products of 224 rows take cuBLAS longer than products of 256 rows
LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160, 176, 192, 208, 256, 320, 384, 448, 512)

# runs tokens, positions and slots, (3, rows), eagerly, with the adapters of the rows; returns logits and the next tokens
Decode = Callable[[Tensor, SamplingFeatures, RowGroups | None], tuple[Tensor, Tensor]]


# the features of most steps, whose graphs are captured before the first request
PLAIN = SamplingFeatures(chance=True)
# with drafts a step of few answers has as many rows as this, at most: more graphs take longer to capture
DRAFTED_ROWS = 64


def rungs(rows: int) -> list[int]:
    """Returns the numbers of rows to capture: up to the first that `rows` rows fit in."""
    return [rung for n, rung in enumerate(LADDER) if not n or LADDER[n - 1] < rows]


def most_rows(answers: int, drafted: int) -> int:
    """Returns the most rows of a step that only decodes: a row per answer, and rows for `drafted` tokens of some."""
    return max(answers, min(answers * (1 + drafted), DRAFTED_ROWS))


class Graph(NamedTuple):
    """A captured step: it reads `inputs` and writes `logits` and `tokens`."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # (3, rows): token, position and slot
    groups: RowGroups | None  # the rows by their adapters, if any has one
    logits: Tensor
    tokens: Tensor


class DecodeGraphs:
    """The graphs of one runner, one per number of rows in LADDER, per set of sampling features, and with adapters or without.

    Args:
        device: the GPU.
        sampling: the state that the graphs' sampling reads and writes.
        pad_slot: the slot of the rows that pad a step to a number in LADDER.
        most_rows: the most rows of a step.
        adapters: how many adapters there may be at once.
    """

    def __init__(
        self, device: torch.device, sampling: SamplingState, pad_slot: int, most_rows: int, adapters: int = 0
    ) -> None:  # fmt: skip
        self.device, self.most_rows = device, most_rows
        self.sampling = sampling
        self.pad_slot = pad_slot
        self.adapters = adapters
        self._padding = torch.tensor([[0], [-1], [pad_slot]])
        self._graphs: dict[tuple[int, SamplingFeatures, bool], Graph] = {}
        self._last: Graph | None = None
        self._memory = torch.cuda.graph_pool_handle()
        # torch's default capture stream belongs to the device of the process's first capture
        self._stream = torch.cuda.Stream(device)

    def capture(self, decode: Decode) -> None:
        """Captures the graphs of steps without penalties and the like, the largest first: the others fit into its memory."""
        for rows in reversed(rungs(self.most_rows)):
            for adapted in (False, True) if self.adapters else (False,):
                self._graphs[rows, PLAIN, adapted] = self._capture(decode, rows, PLAIN, adapted=adapted)

    def replay(
        self, decode: Decode, given: StepInputs, features: SamplingFeatures, adapters: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Runs a step of single tokens; returns logits and tokens, a row per token. `adapters` is `Step.adapters`."""
        n = len(given.tokens)
        rows = next((rows for rows in LADDER if rows >= n), n)
        inputs = torch.cat((torch.stack(given[:3]), self._padding.expand(3, rows - n)), 1).pin_memory()
        adapted = adapters.numel() > 0
        graph = self._graphs.get((rows, features, adapted))
        if graph is None:
            self.sampling.prepare(features)
            graph = self._graphs[rows, features, adapted] = self._capture(decode, rows, features, adapted=adapted)
        graph.inputs.copy_(inputs, non_blocking=True)
        if graph.groups is not None:
            graph.groups.buffer.copy_(self._grouped(adapters, rows).buffer.pin_memory(), non_blocking=True)
        graph.graph.replay()
        self._last = graph
        return graph.logits[:n], graph.tokens[:n]

    def repeat(self, rows: int) -> Tensor:
        """Runs the last step, of this number of rows, once more: each a position further, with the token that its slot drew last.

        Nothing is sent from the host, which takes longer over a step than a small model. Returns the tokens.
        """
        assert self._last is not None
        assert self._last.groups is None
        tokens, positions, _ = self._last.inputs
        tokens.fill_(-1)
        # rows that pad stay where they are
        positions += positions >= 0
        self._last.graph.replay()
        return self._last.tokens[:rows]

    def _grouped(self, adapters: Tensor, rows: int) -> RowGroups:
        return group_rows(adapters, rows=rows, tiles=most_tiles(rows, self.adapters))

    @torch.inference_mode()
    def _capture(self, decode: Decode, rows: int, features: SamplingFeatures, *, adapted: bool) -> Graph:
        inputs = torch.empty(3, rows, dtype=torch.int64, device=self.device)
        inputs.copy_(self._padding.expand(3, rows))
        groups = None
        if adapted:
            groups = self._grouped(torch.full((rows,), -1), rows)
            groups = groups._replace(buffer=groups.buffer.to(self.device))
        # one eager run first: it compiles kernels and makes workspaces, which a capture must not do
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            decode(inputs, features, groups)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # weights were loaded before, so a product need not wait to read its own; threads of NCCL ask for their events meanwhile
        mode = "thread_local"
        with weights_stay(), torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode=mode):
            logits, tokens = decode(inputs, features, groups)
        return Graph(graph, inputs, groups, logits, tokens)
