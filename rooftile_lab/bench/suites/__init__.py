"""The benchmarks behind `rooftile bench SUITE`, a file each. All of them yield `results.Row`.

A suite's module has

    GPU, CPU                         the cases that a GPU runs, and a CPU; () where it cannot
    QUICK                            the cases of a short run on a GPU
    ASKED                            cases that run only when they are named; a module may go without
    measure(session, names, say)     a Row for each contestant, case and phase, as soon as it is there; some take more arguments,
                                     which are options of their command

A benchmark whose cases are its options is no suite: `attention`, `serving`, `engine` and the benchmarks of single kernels
(`tiles`, `cusparselt`, `native-sparse`) are commands in `rooftile_lab.cli`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from rooftile.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    # the command line names all suites, also where torch is not needed
    from rooftile.cost.session import Session
    from rooftile_lab.bench.results import Row
    from rooftile_lab.bench.run import Progress


class Module(Protocol):
    """A suite's module."""

    GPU: Sequence[str]
    CPU: Sequence[str]
    QUICK: Sequence[str]

    def measure(self, session: Session, names: Sequence[str], say: Progress, **options: Any) -> Iterator[Row]:
        """The rows of the named cases."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A suite's name and a sentence on what it measures; with `refresh` each run measures the ceilings anew."""

    name: str
    help: str
    refresh: bool = False

    def load(self) -> Module:
        """The suite's module, imported only now: some need a kernel language or Transformers."""
        return cast(Module, import_module(f"rooftile_lab.bench.suites.{self.name.replace('-', '_')}"))

    def chosen(self, device: str, names: Sequence[str] = (), *, quick: bool = False) -> list[str]:
        """The cases to run on a kind of device, "cuda" or "cpu".

        Args:
            device: the kind.
            names: cases, or patterns such as "decode-*"; without any, all that this kind of device runs.
            quick: without names, the cases of a short run instead.

        Raises:
            InvalidInput: a name is no case of this suite.
            Unsupported: there is nothing to run on such a device.
        """
        module = self.load()
        known = list(dict.fromkeys((*module.GPU, *module.CPU, *getattr(module, "ASKED", ()))))
        for name in names:
            if not any(fnmatch(case, name) for case in known):
                raise InvalidInput(f"bench {self.name} has no case {name!r}; has {', '.join(known)}")
        here = module.GPU if device == "cuda" else module.CPU
        if not here:
            needs = "CPU" if device == "cuda" else "GPU"
            raise Unsupported(f"bench {self.name} measures a {needs}, and the device is {device}; give --device")
        if names:
            return [case for case in known if any(fnmatch(case, name) for name in names)]
        return [case for case in here if not quick or device != "cuda" or case in module.QUICK]

    def run(
        self, session: Session, names: Sequence[str] = (), *, quick: bool = False, say: Progress | None = None
    ) -> Iterator[Row]:
        """The rows of `chosen`, each as soon as it is measured."""
        chosen = self.chosen(session.device.type, names, quick=quick)
        return self.load().measure(session, chosen, say or (lambda words: None))


SUITES = {
    suite.name: suite
    for suite in (
        Suite("overhead", "Host time per call; short causal problems as called, on the device, and their kernels alone."),
        Suite("deterministic", "The price of deterministic=True in the backward."),
        Suite("precision", "Attention in FP8 and INT8 beside the fastest in 16 bits, with quantising and without."),
        Suite("bias", "The price of a bias and of its gradient, beside PyTorch's memory-efficient kernel."),
        Suite("blocks", "Attention over lists of blocks beside the whole of it, and beside FlexAttention."),
        Suite("approximate", "Approximate methods beside exact attention and beside other libraries' programs for them."),
        Suite("packed", "Packed sequences and groups of query heads beside a dense batch."),
        Suite("paged", "Attention to a paged cache: decode, prefill, a shared prefix, and writing to the cache."),
        Suite("linear", "Products with quantised weights beside 16 bits and PyTorch's own."),
        Suite("sparsity", "Products with 2:4 weights beside dense ones, and masks and compression beside a copy."),
        Suite("decoder", "Norms and gates of a decoder: bytes per second beside a copy and the plain operations."),
        Suite("fused", "Fused operations with gradients beside Liger, quack, torch.compile and PyTorch's own."),
        Suite("loss", "Cross-entropy from hidden states beside Liger's, quack's, cut-cross-entropy's and PyTorch's."),
        Suite("recurrent", "Recurrences beside mamba-ssm's and fla's kernels, and the bytes that they have to move."),
        Suite("experts", "Experts beside other libraries' experts."),
        Suite("hstu", "HSTU attention beside the public kernels' way, softmax attention, and dense users."),
        Suite("target-attention", "Candidates against histories, whole and searched, beside PyTorch's gather and a copy."),
        Suite("scorer", "Users scored and appended from pages, beside a model that reads each history anew."),
        Suite("user-histories", "Small models of clicks trained on users' last n events: AUC, time and bytes by length."),
        Suite("long", "The longest shapes under load: clock, power and the chip's counters beside the peers."),
        Suite("cpu", "Exact attention on a CPU beside PyTorch's kernel, and the memory of a long sequence."),
        Suite("training", "Whole training steps of Transformers models with eager attention, SDPA and Rooftile."),
        Suite("prepared", "Training steps of a Llama prepared for a format beside 16 bits and torchao's."),
        Suite("quality", "Nats per byte that a small Llama loses by the format of its weights."),
        Suite("qat", "What rounding costs a small Llama in each format, and what training for the format wins back."),
        Suite("plans", "Predictions of plans for models and decoders beside measurements."),
        Suite("diagnosis", "Predictions of a diagnosis beside measurements: remedies in programs, bytes of operators."),
        Suite("embeddings", "Vectors of texts beside padded batches of Transformers and sentence-transformers."),
        Suite("server", "A server beside its engine alone."),
        Suite("ladder", "The forward, from standard attention to the Hopper kernel, one technique at a time.", refresh=True),
        Suite("ladder-counters", "The chip's counters for each rung of the ladder, by Nsight Compute."),
        Suite("recall", "Small decoders trained with each method: recall, loss on English, and a needle."),
        Suite("context", "Memory and time per token against context: attention, a hybrid and Mamba-2, served."),
        Suite("context-parallel", "Attention over a sequence on several GPUs beside one GPU's, and PyTorch's. Under torchrun."),
        Suite("tensor-parallel", "An engine on two ranks beside one: steps that decode, and a workload."),
        Suite("expert-training", "Small decoders trained with experts beside a dense one: loss, and the load of each expert."),
    )
}
