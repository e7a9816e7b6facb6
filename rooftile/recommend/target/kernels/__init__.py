"""Triton kernels of target attention."""

from __future__ import annotations

from torch import Tensor

from rooftile.recommend.target.kernels import chosen, chosen_events, outputs
from rooftile.recommend.target.kernels.gradients_of_candidates import gradients_of_candidates
from rooftile.recommend.target.kernels.gradients_of_events import gradients_of_events
from rooftile.recommend.target.kernels.shape import delta_of
from rooftile.recommend.target.problem import Batch, Gradients, Problem


def forward(batch: Batch, problem: Problem) -> tuple[Tensor, Tensor]:
    """Returns o (total_q, H, Dv) in the dtype of q, and lse (total_q, H), which is empty without softmax."""
    batch = _in_rows(batch)
    return outputs.outputs(batch, problem) if batch.events is None else chosen.outputs(batch, problem)


def backward(do: Tensor, o: Tensor, lse: Tensor, batch: Batch, problem: Problem) -> Gradients:
    """Returns the gradients for a gradient do (total_q, H, Dv) of o."""
    batch = _in_rows(batch)
    do = do if do.stride(-1) == 1 else do.contiguous()
    delta = delta_of(do, o) if problem.weights == "softmax" else lse
    if batch.events is None:
        dq = gradients_of_candidates(do, lse, delta, batch, problem)
        dk, dv, db = gradients_of_events(do, lse, delta, batch, problem)
    else:
        dq, w, ds = chosen.gradients_of_candidates(do, lse, delta, batch, problem)
        dk, dv, db = chosen_events.gradients_of_events(do, w, ds, batch, problem)
    if batch.bias is not None and db is not None and batch.bias.shape[1] == 1:
        db = db.sum(1, keepdim=True)
    return Gradients(dq, dk, dv, db)


def _in_rows(batch: Batch) -> Batch:
    """The tensors as kernels read them: last axes, lists and offsets are contiguous."""
    q, keys, values = (x if x.stride(-1) == 1 else x.contiguous() for x in batch[:3])
    events = None if batch.events is None else batch.events.contiguous()
    return batch._replace(q=q, keys=keys, values=values, events=events, cu_q=batch.cu_q.contiguous(), cu=batch.cu.contiguous())
