"""CUDA graphs of steps that only decode: from embedding to sampling in one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rooftile.engine.sampling.features import SamplingFeatures
from rooftile.engine.sampling.state import SamplingState
from rooftile.engine.steps.step_inputs import StepInputs
from rooftile.runtime.early_weights import weights_stay

# numbers of rows that are captured: a step of fewer is padded. Products of 224 rows take cuBLAS longer than products of 256 rows
LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160, 176, 192, 208, 256, 320, 384, 448, 512)

# runs tokens, positions and slots, (3, rows), eagerly; returns logits and the next tokens
Decode = Callable[[Tensor, SamplingFeatures], tuple[Tensor, Tensor]]


def rungs(answers: int) -> list[int]:
    """Returns the numbers of rows to capture: up to the first that `answers` answers fit in."""
    return [rows for n, rows in enumerate(LADDER) if not n or LADDER[n - 1] < answers]


class Graph(NamedTuple):
    """A captured step: it reads `inputs` and writes `logits` and `tokens`."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # (3, rows): token, position and slot
    logits: Tensor
    tokens: Tensor


class DecodeGraphs:
    """The graphs of one runner, one per number of rows in LADDER and per set of sampling features.

    Args:
        device: the GPU.
        sampling: the state that the graphs' sampling reads and writes.
        pad_slot: the slot of the rows that pad a step to a number in LADDER.
    """

    def __init__(self, device: torch.device, sampling: SamplingState, pad_slot: int) -> None:
        self.device = device
        self.sampling = sampling
        self.pad_slot = pad_slot
        self._padding = torch.tensor([[0], [-1], [pad_slot]])
        self._graphs: dict[tuple[int, SamplingFeatures], Graph] = {}
        self._memory = torch.cuda.graph_pool_handle()
        # torch's default capture stream belongs to the device of the process's first capture
        self._stream = torch.cuda.Stream(device)

    def capture(self, decode: Decode) -> None:
        """Captures the graphs of steps without penalties and the like, the largest first: the others fit into its memory."""
        features = SamplingFeatures(chance=True)
        for rows in reversed(rungs(self.pad_slot)):
            self._graphs[rows, features] = self._capture(decode, rows, features)

    def replay(self, decode: Decode, given: StepInputs, features: SamplingFeatures) -> tuple[Tensor, Tensor]:
        """Runs a step of single tokens; returns logits and tokens, a row per token."""
        n = len(given.tokens)
        rows = next((rows for rows in LADDER if rows >= n), n)
        inputs = torch.cat((torch.stack(given[:3]), self._padding.expand(3, rows - n)), 1).pin_memory()
        graph = self._graphs.get((rows, features))
        if graph is None:
            self.sampling.prepare(features)
            graph = self._graphs[rows, features] = self._capture(decode, rows, features)
        graph.inputs.copy_(inputs, non_blocking=True)
        graph.graph.replay()
        return graph.logits[:n], graph.tokens[:n]

    @torch.inference_mode()
    def _capture(self, decode: Decode, rows: int, features: SamplingFeatures) -> Graph:
        inputs = torch.empty(3, rows, dtype=torch.int64, device=self.device)
        inputs.copy_(self._padding.expand(3, rows))
        # one eager run first: it compiles kernels and makes workspaces, which a capture must not do
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            decode(inputs, features)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # weights were loaded before, so a product need not wait to read its own; threads of NCCL ask for their events meanwhile
        mode = "thread_local"
        with weights_stay(), torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode=mode):
            logits, tokens = decode(inputs, features)
        return Graph(graph, inputs, logits, tokens)
