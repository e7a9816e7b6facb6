"""Compares a small model with attn_implementation="rooftile" with the same weights and "eager"."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from rooftile import Unsupported
from rooftile.integrations import transformers as integration
from tests.integrations.every_model.build import small_config
from tests.integrations.every_model.exceptions import INPUTS, OTHER_REASONS
from tests.integrations.every_model.inputs import LENGTH, inputs_of

TOO_LARGE = 30_000_000


@dataclass
class Row:
    """One line of the table."""

    family: str
    model: str
    # "equal", "refused", "no attention", "differs" or "not run"
    verdict: str
    # how many calls of attention a forward made
    calls: int
    # what was compared
    compared: str
    reason: str = ""


class Differs(AssertionError):
    """An output or gradient is not that of eager attention."""


def compare(family: str, name: str) -> Row:
    """Builds a small model of a class and compares it."""
    row = Row(family, name, "not run", 0, "")
    if name in OTHER_REASONS:
        row.reason = OTHER_REASONS[name]
        return row
    own, error = None, None
    try:
        own = build(family, name, "rooftile")
    except Unsupported as refusal:
        row.verdict, row.reason = "refused", _sentence(refusal)
        return row
    except Exception as failed:
        error = failed
    try:
        model = build(family, name, "eager")
        given, due = _first_outputs(model, INPUTS.get(name, INPUTS.get(family, {})))
    except Exception as failed:
        row.reason = _sentence(failed)
        return row
    try:
        if own is None:
            raise Differs(f"eager ran, and building it raised: {_sentence(error)}")
        own.load_state_dict(model.state_dict())
        with counted() as calls:
            found = _outputs(own, given)
        row.calls = calls[0]
        row.compared = ", ".join(dict.fromkeys(_compared(model, own, given, found, due)))
    except Unsupported as refusal:
        row.verdict, row.reason = "refused", _sentence(refusal)
    except Differs as difference:
        row.verdict, row.reason = "differs", str(difference)
    except Exception as failed:
        row.verdict, row.reason = "differs", f"eager ran, and this raised: {_sentence(failed)}"
    else:
        row.verdict = "equal" if row.calls else "no attention"
    return row


def _first_outputs(model: Any, given: dict[str, Any]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Returns inputs that the model takes, as few as do, and its outputs."""
    error: Exception = ValueError("no output")
    for attempt in range(4):
        inputs = inputs_of(model, given, beside=attempt % 2 == 1)
        if attempt > 1 and "input_features" in inputs:
            # models of speech disagree on the order of these axes
            inputs["input_features"] = inputs["input_features"].mT.contiguous()
        try:
            due = _outputs(model, inputs)
        except Exception as failed:
            error = error if attempt else failed
            continue
        if due:
            return inputs, due
    raise error


def build(family: str, name: str, implementation: str) -> Any:
    """Returns a class's small model, in evaluation mode."""
    kind = getattr(transformers, name)
    config = small_config(family, kind)
    with torch.device("meta"):
        # the check of the name comes first, and the size before the memory
        shape = kind._from_config(config, attn_implementation=implementation)
    if (size := sum(p.numel() for p in shape.parameters())) > TOO_LARGE:
        raise ValueError(f"{size:,} parameters at toy size")
    torch.manual_seed(0)
    model = kind._from_config(small_config(family, kind), attn_implementation=implementation)
    for name, p in model.named_parameters():
        if p.is_floating_point() and p.ndim > 1:
            # large enough that attention is far from uniform, and no larger: twenty layers must not blow up
            torch.nn.init.normal_(p, std=min(0.15, max(p[0].numel(), 1) ** -0.5))
        elif "sink" in name:
            torch.nn.init.normal_(p)
    return model.eval()


class counted:
    """Counts the calls of attention."""

    def __enter__(self) -> list[int]:
        self._before = integration.refusal._seen.calls
        self._calls = [0]
        return self._calls

    def __exit__(self, *_: object) -> None:
        self._calls[0] = integration.refusal._seen.calls - self._before


def _compared(
    model: Any, own: Any, given: dict[str, Tensor], found: list[Tensor], due: list[Tensor]
) -> Iterator[str]:  # fmt: skip
    """Compares the outputs and more, and yields the name of what was equal."""
    _equal(found, due, "output")
    yield "outputs"
    if any(x.requires_grad for x in due):
        _equal_gradients(_gradients(own, found), _gradients(model, due), "gradient")
        yield "gradients"
    changed = _change_the_future(given)
    if changed is not None:
        before, after = (_outputs(m, changed) for m in (model, own))
        _equal(after, before, "output after a change in the future")
        yield "future"
    for side in ("right", "left"):
        padded = _padded(model, given, side)
        if padded is None:
            continue
        inputs, real = padded
        try:
            due_padded = _outputs(model, inputs, real)
        except Exception:
            # eager itself takes no such mask
            continue
        found = _outputs(own, inputs, real)
        _equal(found, due_padded, f"output, padded {side}")
        if any(x.requires_grad for x in due_padded):
            _equal_gradients(_gradients(own, found), _gradients(model, due_padded), f"gradient, padded {side}")
        yield "padding"


def _change_the_future(given: dict[str, Tensor]) -> dict[str, Tensor] | None:
    name = next((name for name in ("decoder_input_ids", "input_ids") if name in given), None)
    if name is None or given[name].ndim != 2:
        return None
    ids = given[name].clone()
    ids[:, -3:] = ids[:, -3:] + 1
    return given | {name: ids.clamp(max=63)}


def _padded(model: Any, given: dict[str, Tensor], side: str) -> tuple[dict[str, Tensor], Tensor] | None:
    if "attention_mask" not in inspect.signature(model.forward).parameters or "input_ids" not in given:
        return None
    real = torch.ones(given["input_ids"].shape, dtype=torch.bool)
    if side == "left":
        real[0, :5] = False
    else:
        real[0, -5:] = False
    inputs = given | {"attention_mask": real.long()}
    decoder = given.get("decoder_input_ids")
    if decoder is not None and "decoder_attention_mask" in inspect.signature(model.forward).parameters:
        there = torch.ones(decoder.shape, dtype=torch.bool)
        there[1, -4:] = False
        inputs["decoder_attention_mask"] = there.long()
        return inputs, there
    return inputs, real if decoder is None else torch.ones(decoder.shape, dtype=torch.bool)


def _outputs(model: Any, given: dict[str, Tensor], real: Tensor | None = None) -> list[Tensor]:
    """Returns all floating outputs of a forward, those of real tokens only."""
    torch.manual_seed(1)
    out = model(**given)
    found = [x for x in _tensors(out) if x.is_floating_point()]
    if real is not None:
        by_token = [x.ndim > 1 and x.shape[:2] == real.shape for x in found]
        # other outputs may be those of padded tokens, which mean nothing under a causal mask
        found = [
            x[real] if is_token else x
            for x, is_token in zip(found, by_token, strict=True)
            if is_token or (x.ndim < 3 and not any(by_token))
        ]
        if "decoder_input_ids" in given:
            # the encoder's own outputs have another length
            found = [x for x in found if not (x.ndim > 2 and x.shape[:2] == (real.shape[0], LENGTH))]
    return found


def _tensors(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, dict):
        for name, value in out.items():
            if name not in ("past_key_values", "cache", "cache_params", "attentions"):
                yield from _tensors(value)
    elif isinstance(out, list | tuple):
        for value in out:
            yield from _tensors(value)


def _gradients(model: Any, outputs: list[Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    outputs = [x for x in outputs if x.requires_grad]
    sum((x * torch.linspace(-1, 1, x.numel()).reshape(x.shape)).mean() for x in outputs).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _equal(found: list[Tensor], due: list[Tensor], what: str) -> None:
    if [x.shape for x in found] != [x.shape for x in due]:
        raise Differs(f"{what}: shapes")
    for x, y in zip(found, due, strict=True):
        _close(x, y, y.detach()[y.isfinite()].abs().max().item() if y.isfinite().any() else 1.0, what)


def _equal_gradients(found: dict[str, Tensor], due: dict[str, Tensor], what: str) -> None:
    if found.keys() != due.keys():
        raise Differs(f"{what}: of other parameters: {sorted(found.keys() ^ due.keys())[:3]}")
    largest = max((y[y.isfinite()].abs().max().item() for y in due.values() if y.isfinite().any()), default=1.0)
    for name, y in due.items():
        _close(found[name], y, largest, f"{what} of {name}")


def _close(x: Tensor, y: Tensor, scale: float, what: str) -> None:
    if not torch.allclose(x, y, rtol=2e-3, atol=1e-6 + 1e-3 * scale, equal_nan=True):
        raise Differs(f"{what}: {(x - y).abs().max().item() / (scale + 1e-9):.2g} of its largest value")


def _sentence(error: BaseException | None) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if not isinstance(error, Unsupported) else text
