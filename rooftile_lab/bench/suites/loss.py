"""Cross-entropy from hidden states, forward and backward, beside the peers' versions and PyTorch's product and loss.

    MODEL-TOKENS    hidden size and vocabulary of a model

FLOPs are counted for three products, 6 T V D; a contestant that makes logits twice does more in its time. `peak_bytes` is all
memory beyond the inputs, and `beyond_gradients_mib` what is left of it without the gradients. Results and gradients are compared
with the formula in fp32 first, on the first rows.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rooftile import fused
from rooftile.cost import Roof
from rooftile.cost.session import Session
from rooftile.exact.spec import DTYPES
from rooftile.hardware.clock import Clock, clock_for
from rooftile_lab.bench.fused_peers import Call, compiled, named, refusal
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import beside_peers, contest, refused, with_measures
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.works import floor_of, words_of_error

# D and V
MODELS = {"llama3-8b": (4096, 128_256), "qwen3-8b": (4096, 151_936), "gpt2": (768, 50_257), "tiny": (32, 515)}
GPU = ("llama3-8b-16384", "llama3-8b-4096", "qwen3-8b-8192", "gpt2-16384")
CPU = ("tiny-64",)
QUICK = ("llama3-8b-16384",)
# rows on which results are compared
CHECKED = 512


def _formula(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(x, w).float(), target)


def _torchs_own(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    call: Any = getattr(functional, "linear_cross_entropy", None)
    if call is None:
        raise AttributeError(f"torch {torch.__version__} has no linear_cross_entropy")
    found: Tensor = call(x, w, target)
    return found


CONTESTANTS: dict[str, Call] = {
    "rooftile": fused.linear_cross_entropy,
    "torch": _formula,
    "torch-linear-cross-entropy": _torchs_own,
    "liger": named("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"),
    "liger-fp32": partial(
        named("liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"), accum_dtype=torch.float32
    ),
    "quack": named("quack.linear_cross_entropy", "chunked_linear_cross_entropy"),
    "cut-cross-entropy": partial(named("cut_cross_entropy", "linear_cross_entropy"), impl="cce_exact"),
}


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each contestant."""
    clock = clock_for(session.device, 60.0)
    for name in names:
        say(name)
        model, _, tokens = name.rpartition("-")
        (D, V), T = MODELS[model], int(tokens)
        dtype = DTYPES[session.dtype]
        x = torch.randn(T, D, device=session.device).to(dtype).requires_grad_()
        w = (torch.randn(V, D, device=session.device) * D**-0.5).to(dtype).requires_grad_()
        target = torch.randint(V, (T,), device=session.device)
        calls = dict(CONTESTANTS)
        if session.device.type == "cuda":
            calls["torch-compile"] = compiled(_formula)
        why = {}
        for who, call in calls.items():
            say(f"{name}: {who}, results and gradients")
            why[who] = refusal(call, _formula, [x[:CHECKED], w], [target[:CHECKED]]) or _no_room(call, x, w, target)
            gc.collect()
        works = {who: partial(_step, call, x, w, target) for who, call in calls.items() if not why[who]}
        words: dict[str, Any] = {"suite": "loss", "case": name, "phase": "fwd+bwd"}
        roof = _roof(session, T, D, V)
        for who, row in beside_peers(contest(session, works, clock, roofs=roof, **words)).items():
            yield _with_peak(row, clock, works[who], x.nbytes + w.nbytes)
        yield from refused(session, why, before="refused: ", dtype=session.dtype, **words)


def _step(call: Call, x: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(call(x, w, target), (x, w))


def _no_room(call: Call, x: Tensor, w: Tensor, target: Tensor) -> str:
    """Why a contestant cannot take a whole step: most often memory."""
    try:
        _step(call, x, w, target)
    # a peer is not ours: whatever stops it is its reason
    except Exception as error:
        return words_of_error(error)
    return ""


def _with_peak(row: Row, clock: Clock, work: Any, gradients: int) -> Row:
    peak = clock.peak_bytes(work)
    row = replace(row, peak_bytes=peak, peak_kind=clock.peak_kind)
    return with_measures(row, beyond_gradients_mib=(peak - gradients) / 2**20)


def _roof(session: Session, T: int, D: int, V: int) -> Roof:
    moved = 3 * (T * D + V * D) * DTYPES[session.dtype].itemsize
    return floor_of(6 * T * V * D, moved, session.ceilings, session.dtype)
