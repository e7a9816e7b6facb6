"""The parts that converted layers share: `weight` for those who read it, state dicts that no plain layer takes, a way back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rooftile.errors import InvalidInput
from rooftile.nn import reading


class Converted(nn.Module):
    """A linear layer whose weight is codes.

    Args:
        out_features, in_features: of the weight.
        dtype: of `weight`, as others read it; None for the dtype of the bias, or PyTorch's default without one.
        bias: (out_features,).
    """

    bias: nn.Parameter | None
    # whether it stands for a Conv1D of Transformers, whose weight is (in, out)
    is_conv1d = False

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype | None, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.dtype = dtype or (torch.get_default_dtype() if bias is None else bias.dtype)
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Tensor:
        """The weight (out_features, in_features) as numbers, made when they are used; it cannot be changed."""
        return reading.read(self)

    @property
    def device(self) -> torch.device:
        """The device of the weight."""
        return next(self.buffers()).device

    def trained(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns nothing: the weight has no gradient."""
        return None, None

    def place(self) -> tuple[torch.Size, torch.dtype, torch.device]:
        """Returns shape, dtype and device of the weight."""
        return torch.Size((self.out_features, self.in_features)), self.dtype, self.device

    def parameter_to_change(self) -> Tensor:
        """Raises InvalidInput: nothing of the weight can be changed."""
        raise InvalidInput(
            "the weight of a converted layer is codes, which cannot be changed or have gradients; change the model before "
            "rooftile.qat.convert, or call rooftile.qat.dequantise(model)"
        )

    def part(self, index: object) -> Tensor | None:
        """Returns nothing: all numbers are made."""
        return None

    def numbers(self) -> Tensor:
        """Returns the weight in `dtype`."""
        raise NotImplementedError

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Returns the product of the layer with another bias."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in_features) to (..., out_features), in the dtype of x, or in autocast's dtype."""
        return self.multiply(x, self.bias)

    def to_linear(self) -> nn.Linear:
        """Returns an `nn.Linear` with the numbers that the codes stand for, which can be trained."""
        with torch.inference_mode(False), torch.no_grad():
            made = nn.Linear(self.in_features, self.out_features, bias=False, device="meta")
            made.weight = nn.Parameter(self.numbers().clone())
        made.bias = self.bias  # type: ignore[assignment]
        return made.train(self.training)

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        before = {name: x for name, x in self.named_buffers(recurse=False) if self.keeps_dtype(x)}
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        super()._apply(fn, recurse)
        # `.to(dtype)`, `.half()` and `.bfloat16()` mean activations, not codes
        for name, x in before.items():
            after = getattr(self, name)
            if after.dtype != x.dtype:
                setattr(self, name, x.to(after.device))
        return self

    def keeps_dtype(self, x: Tensor) -> bool:
        """Whether a buffer is part of codes, and no plain number."""
        return True

    # a plain layer takes what it finds by its names, and keeps its random weight without a word where loading is not strict.
    # One number under the name of its weight does not fit, so PyTorch raises an error that names it.
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight"] = torch.zeros(1)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, missing_keys: Any, unexpected_keys: Any,
        error_msgs: list[str],
    ) -> None:  # fmt: skip
        found = state_dict.get(f"{prefix}weight")
        if found is not None and found.ndim > 1:
            error_msgs.append(
                f"{prefix}weight is a plain weight, and the layer is converted: load it before rooftile.qat.convert"
            )
        rest = {name: x for name, x in state_dict.items() if name != f"{prefix}weight"}
        super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)


# how a model of Transformers is written; Trainer and accelerate's wrappers call them, too
_SAVING = ("save_pretrained", "push_to_hub")


def refuse_saving(*unused: Any, **others: Any) -> None:
    """Stands in for `save_pretrained` of a converted model, which would write codes that Transformers does not know.

    Raises:
        InvalidInput: always.
    """
    raise InvalidInput(
        "the model is converted, and save_pretrained would write its codes without a quantization_config, so that "
        "from_pretrained fills in random weights; write rooftile.qat.save(model, folder), whose folder Transformers, vLLM and "
        "rooftile.LLM read"
    )


def guard_saving(modules: Iterable[nn.Module]) -> None:
    """Lets models of Transformers refuse `save_pretrained`, as it is called by Trainer, `push_to_hub` and wrappers, too."""
    for module in modules:
        for name in _SAVING:
            if hasattr(module, name):
                vars(module)[name] = refuse_saving


def unguard_saving(modules: Iterable[nn.Module]) -> None:
    """Undoes `guard_saving`."""
    for module in modules:
        for name in _SAVING:
            if vars(module).get(name) is refuse_saving:
                del vars(module)[name]
