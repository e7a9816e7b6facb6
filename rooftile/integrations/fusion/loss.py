"""Forward functions of models with a head for language: with labels, the loss is computed from hidden states.

They compute the loss of Transformers' `ForCausalLMLoss`. A model with another `loss_function` runs as Transformers wrote it, and
one whose head is no plain `nn.Linear` (an adapter, hooks, a sharded head) has its loss computed from the head's logits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from rooftile.fused.linear_loss import linear_cross_entropy
from rooftile.fused.loss import cross_entropy


def without_logits(self: Any, *arguments: Any, **words: Any) -> Any:
    """For LlamaForCausalLM and its like. `logits` of the result is None where labels are given."""
    return _forward(self, False, *arguments, **words)


def with_logits(self: Any, *arguments: Any, **words: Any) -> Any:
    """The same, but the loss is computed from logits, which are returned."""
    return _forward(self, True, *arguments, **words)


def _forward(self: Any, keep_logits: bool, *arguments: Any, **words: Any) -> Any:
    given = dict(zip(self.fused_parameters, arguments, strict=False)) | words
    labels = given.get("labels")
    if labels is None or not _has_usual_loss(self):
        return self.fused_from.forward(self, **given)
    return_dict = given.pop("return_dict", None)
    del given["labels"]
    if keep_logits or not _is_plain(self.lm_head):
        output = self.fused_from.forward(self, **given, return_dict=True)
        loss = _loss(self, output.logits, None, labels, given)
        output = type(output)(loss=loss, **output)
    else:
        given.pop("logits_to_keep", None)
        base = self.base_model(**given, return_dict=True)
        loss = _loss(self, base.last_hidden_state, self.lm_head, labels, given)
        rest = {name: value for name, value in base.items() if name != "last_hidden_state"}
        output = _output_of(self)(loss=loss, **rest)
    as_tuple = return_dict is False or (return_dict is None and not getattr(self.config, "return_dict", True))
    return output.to_tuple() if as_tuple else output


def _loss(self: Any, x: Tensor, head: Any, labels: Tensor, given: dict[str, Any]) -> Tensor:
    """The loss of logits x (B, T, V), or of hidden states x (B, T, D) under a head."""
    ignore_index = given.get("ignore_index", -100)
    target, count = given.get("shift_labels"), given.get("num_items_in_batch")
    if target is None:
        # the last token of a row predicts nothing
        target = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = target.reshape(-1).to(x.device)
    words = {"ignore_index": ignore_index, "reduction": "mean" if count is None else "sum"}
    rows = x.reshape(-1, x.shape[-1])
    if head is None:
        loss = cross_entropy(rows, target, **words)
    else:
        softcap = getattr(self.config, "final_logit_softcapping", None)
        loss = linear_cross_entropy(rows, head.weight, target, linear_bias=head.bias, softcap=softcap, **words)
    if count is None:
        return loss
    return loss / (count.to(loss.device) if isinstance(count, Tensor) else count)


def _has_usual_loss(self: Any) -> bool:
    """Whether `loss_function` is that for causal language models, asked without the property's warning, which breaks graphs."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    function = getattr(self, "_loss_function", None) or LOSS_MAPPING.get(getattr(self, "loss_type", None), ForCausalLMLoss)
    return function is ForCausalLMLoss


def _is_plain(head: nn.Module) -> bool:
    """Whether a head is a matrix product that no hook watches."""
    hooked = head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head)
    return type(head) is nn.Linear and not hooked


def _output_of(self: Any) -> Any:
    from transformers import modeling_outputs

    if hasattr(self, "transformer"):
        return modeling_outputs.CausalLMOutputWithCrossAttentions
    return modeling_outputs.CausalLMOutputWithPast
