"""An engine on CPU tensors that pass for those of a GPU: which kernels are compiled before the first request, and after.

CUDA graphs are replaced by calls of what they would capture. Kernels compute nothing, so every token is 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftile.engine.llm import LLM
from rooftile.engine.sampling.sampler import SamplingFeatures
from rooftile.engine.start import warm_up
from rooftile.engine.steps import graphs, runner
from rooftile.engine.steps.step_inputs import StepInputs
from rooftile.exact.backends.hopper import counters, plan  # noqa: F401  (each has names that are replaced below)
from rooftile.models import Decoder, ModelConfig
from rooftile.models.checkpoints.quantised import quantise_decoder
from rooftile.weights.files.plan import quantiser_of
from tests.kernels.recorded import Recorded, recorded

CPU = torch.device("cpu")
PROCESSORS = 132


class Called(graphs.DecodeGraphs):
    """Runs a step of single tokens, padded as a graph has it, without a graph."""

    def __init__(self, device: torch.device, sampling: Any, pad_slot: int, most_rows: int, adapters: int = 0) -> None:
        self.device, self.sampling, self.pad_slot, self.most_rows, self.adapters = CPU, sampling, pad_slot, most_rows, adapters

    def replay(
        self, decode: graphs.Decode, given: StepInputs, features: SamplingFeatures, adapters: Tensor
    ) -> tuple[Tensor, Tensor]:
        n = len(given.tokens)
        rows = next((rows for rows in graphs.LADDER if rows >= n), n)
        self.sampling.prepare(features)
        logits, tokens = self._run(decode, rows, features, adapters if adapters.numel() else None)
        return logits[:n], tokens[:n]

    def capture(self, decode: graphs.Decode) -> None:
        for rows in graphs.rungs(self.most_rows):
            for adapters in (None, torch.full((rows,), -1))[: 1 + (self.adapters > 0)]:
                self._run(decode, rows, SamplingFeatures(chance=True), adapters)

    @torch.inference_mode()
    def _run(
        self, decode: graphs.Decode, rows: int, features: SamplingFeatures, adapters: Tensor | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        inputs = torch.tensor([[0], [-1], [self.pad_slot]]).expand(3, rows).contiguous()
        return decode(inputs, features, None if adapters is None else self._grouped(adapters, rows))


@contextmanager
def recorded_engine(
    config: ModelConfig, *, weights: str = "auto", dtype: torch.dtype = torch.bfloat16, **settings: Any
) -> Iterator[tuple[LLM, dict[str, Recorded]]]:
    """Yields an engine that has been started, and the kernels compiled so far, which grow with each request.

    Args:
        config: the model's.
        weights: the format of its projections.
        dtype: of weights and computation.
        settings: as `LLM` takes them.
    """
    with _nothing_cached(), pytest.MonkeyPatch.context() as patch, recorded(90) as found:
        _pass_for_a_gpu(patch)
        decoder = Decoder(config, dtype=dtype, device=CPU)
        for weight in decoder.parameters():
            torch.nn.init.zeros_(weight)
        # on a CPU an engine compiles nothing
        kv_dtype = torch.float8_e4m3fn if settings.get("kv_dtype") == "fp8" else dtype
        options: dict[str, Any] = {"deterministic": bool(settings.get("deterministic"))}
        longest, size = min(settings["max_batched_tokens"], settings["max_model_len"]), settings.get("block_size", 16)
        quantiser = quantiser_of(weights)
        if quantiser is not None:
            quantise_decoder(decoder, quantiser)
        work = warm_up.jobs(config, dtype, CPU, size=size, kv_dtype=kv_dtype, longest=longest, **options)
        options["longest"] = longest
        kinds = {kind: layer for layer in decoder.layers if (kind := warm_up.kind_of_products(layer))}
        with torch.inference_mode():
            for job in (*work, *(job for layer in kinds.values() for job in warm_up.jobs_of_products(layer, **options))):
                job()
        llm = LLM(decoder, **settings)
        llm.engine.runner.capture()
        yield llm, found


@contextmanager
def _nothing_cached() -> Iterator[None]:
    """Forgets what is cached for the CPU, and afterwards what was cached for the "GPU"."""
    warm_up.import_kernels()
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    for name, module in list(sys.modules.items()):
        for value in list(vars(module).values()) if name.startswith("rooftile.") else ():
            if hasattr(value, "cache_clear") and str(getattr(value, "__module__", "")).startswith("rooftile"):
                value.cache_clear()


def _pass_for_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Replaces what asks the CUDA driver, and makes steps reach the "device" in one piece, as they do on a GPU."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("rooftile."):
            continue
        for asked, answer in (("is_capturing", False), ("current_stream", 0)):
            if hasattr(module, asked):
                patch.setattr(module, asked, _always(answer))
    patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=PROCESSORS))
    patch.setattr(runner, "DecodeGraphs", Called)
    patch.setattr(StepInputs, "to", lambda self, device: StepInputs(*torch.cat(self).split([len(part) for part in self])))


def _always(answer: Any) -> Callable[..., Any]:
    return lambda *arguments: answer
