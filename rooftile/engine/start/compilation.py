"""`Compilation`: compiles an engine's kernels in threads, while its weights are read.

Kernels of attention and sampling follow from the model's configuration; products with quantised weights from the formats of a
layer, so they are compiled as soon as the first layer is there. The compiler spends most of its time outside of Python.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from threading import Lock

import torch

from rooftile.engine.start.warm_up import import_kernels, jobs, jobs_of_products, kind_of_products
from rooftile.models import Decoder, ModelConfig
from rooftile.models.drafts.head import DraftHead
from rooftile.models.layers import Layer

# the first phase of a compilation holds the GIL, so more threads delay the largest kernel, on which the total depends
THREADS = 4


class Compilation:
    """Compiles the kernels of an engine on a GPU.

    Args:
        config: the model's configuration.
        dtype: the dtype of weights and computation.
        device: a GPU.
        size: tokens per block of the KV cache.
        kv_dtype: the dtype of the KV cache.
        longest: the most tokens of one prompt that a step reads.
        deterministic: whether an engine is (see `batch_invariant`).
        context_ranks: among how many ranks the tokens of a sequence are dealt out.
    """

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, *, size: int, kv_dtype: torch.dtype, longest: int,
        deterministic: bool = False, context_ranks: int = 1,
    ) -> None:  # fmt: skip
        self._device, self._longest, self._deterministic = device, longest, deterministic
        self._threads = ThreadPoolExecutor(THREADS)
        self._jobs: list[Future[None]] = []
        self._kinds: set[tuple[object, ...]] = set()
        # threads that import the same module at once can fail, so products wait for the imports
        self._lock, self._ready = Lock(), False
        self._waiting: list[Callable[[], None]] = []

        def begin() -> None:
            import_kernels()
            with torch.cuda.device(device):
                # this makes Triton's driver, once, before threads use it
                import_module("triton").runtime.driver.active.get_current_target()
                words = {"size": size, "kv_dtype": kv_dtype, "longest": longest, "deterministic": deterministic}
                for job in jobs(config, dtype, device, context_ranks=context_ranks, **words):  # type: ignore[arg-type]
                    self._jobs.append(self._threads.submit(self._run, job))
            # the largest kernels of attention take longest: products that came meanwhile begin after them
            with self._lock:
                self._ready = True
                for job in self._waiting:
                    self._jobs.append(self._threads.submit(self._run, job))

        self._begun = self._threads.submit(torch.inference_mode()(begin))

    def add(self, layer: Layer) -> None:
        """Compiles a layer's products, unless a layer like it was added before; its projections have their weights."""
        kind = kind_of_products(layer)
        if not kind or kind in self._kinds:
            return
        self._kinds.add(kind)
        work = jobs_of_products(layer, longest=self._longest, deterministic=self._deterministic)
        with self._lock:
            if self._ready:
                self._jobs += [self._threads.submit(self._run, job) for job in work]
            else:
                self._waiting += work

    def add_all(self, decoder: Decoder | DraftHead) -> None:
        """Compiles the products of all layers."""
        for layer in decoder.layers:
            self.add(layer)

    def finish(self) -> None:
        """Waits until all kernels are there. Raises what a job has raised."""
        self._begun.result()
        for job in self._jobs:
            job.result()
        self._threads.shutdown()

    def stop(self) -> None:
        """Begins no further job, and waits for none: no request needs the kernels."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    @torch.inference_mode()
    def _run(self, job: Callable[[], None]) -> None:
        """Runs a job on the device in inference mode, both of which each thread must set for itself."""
        with torch.cuda.device(self._device):
            job()
