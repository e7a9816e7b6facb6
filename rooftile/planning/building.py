"""Joins times, losses and the choice to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from rooftile.errors import InvalidInput, Unsupported
from rooftile.planning.costs import DeviceCeilings
from rooftile.planning.formats import KEPT, NAMES, weight_bytes
from rooftile.planning.knapsack import choose
from rooftile.planning.losses import Judge, all_rounded
from rooftile.planning.plan import Plan
from rooftile.planning.records import Option, Other, PlannedLayer, Total
from rooftile.planning.targets.target import Item, Target
from rooftile.planning.timing import REPLAYED, Times, machine_for, passes_for, sizes_of, with_doubled
from rooftile.weights.files.formats import why_not

# reasons of formats that do not fit are many where shapes are
MOST_NOTES = 8
# measured times above predicted ones, from which on the machine may be busy
BUSY = 5.0


class PricedItem(NamedTuple):
    """An item, its losses in the formats that it can have, and the reasons of the others."""

    item: Item
    losses: dict[str, float]
    why_not: dict[str, str]


class PlannedRun(NamedTuple):
    """The run of the whole with the chosen formats, and as it is."""

    loss: float
    measured_us: float | None
    kept_measured_us: float | None


class Builder:
    """Makes a plan of a target.

    Args:
        device: of the model.
        times: measured times; None without measuring.
        judge: measures losses.
    """

    _machine: DeviceCeilings

    def __init__(self, target: Target, device: torch.device, times: Times | None, judge: Judge) -> None:
        self._target, self._device, self._times, self._judge = target, device, times, judge

    def plan(self, words: Sequence[str], max_loss: float | None, device: str) -> Plan:
        """Returns the plan.

        Raises:
            InvalidInput: every choice loses more than max_loss.
        """
        seen = [self._look_at(item, words) for item in self._target.items]
        self._machine = machine_for(self._device, self._target.items, self._times)
        layers = [self._layer(one, words) for one in seen]
        times, losses = ([[pick(option) for option in layer.options] for layer in layers] for pick in (_us, _loss))
        numbers = choose(times, losses, max_loss)
        if numbers is None:
            least = sum(min(option.loss for option in layer.options) for layer in layers)
            raise InvalidInput(
                f"max_loss is {max_loss:g}, and the least possible sum of losses is {least:.3g} ({self._judge.kind}); allow "
                f"so much, or have {KEPT!r} among the formats"
            )
        layers = [replace(layer, chosen=layer.options[number].format) for layer, number in zip(layers, numbers, strict=True)]
        others = self._target.others(self._machine)
        changing = [word for word in words if word != KEPT]
        return Plan(
            model=self._target.name, device=device, ceilings=self._machine.ceilings.json(), layers=tuple(layers),
            others=tuple(others), total=self._total(layers, others, changing, max_loss), notes=tuple(self._notes(layers)),
        )  # fmt: skip

    def _look_at(self, item: Item, words: Sequence[str]) -> PricedItem:
        """Measures what an item loses in each format that it can have, and its times."""
        losses: dict[str, float] = {}
        reasons: dict[str, str] = {}
        for word in words:
            if word == KEPT:
                continue
            reason = item.fixed or next((why for _, K in item.products if (why := why_not(word, K))), "")
            if not reason:
                try:
                    losses[word] = self._judge.alone(item, word)
                except Unsupported as refusal:
                    reason = str(refusal).splitlines()[0]
            if reason:
                reasons[word] = reason
        if self._times is not None:
            sizes = sizes_of(item)
            self._times.take(item, {KEPT: with_doubled(sizes)} | dict.fromkeys(losses, sizes))
        return PricedItem(item, losses, reasons)

    def _layer(self, seen: PricedItem, words: Sequence[str]) -> PlannedLayer:
        item = seen.item
        options = [self._in(item, word, loss) for word, loss in seen.losses.items()]
        if KEPT in words or not options:
            options.insert(0, self._in(item, KEPT, 0.0))
        name = NAMES[item.dtype]
        kept = [(load, passes_for(item, KEPT, load.rows, self._device)) for load in item.loads]
        return PlannedLayer(
            name=item.name, parts=item.parts, loads=item.loads,
            flops=sum(load.calls * one.flops for load, passes in kept for one in passes),
            nbytes=sum(load.calls * one.bytes for load, passes in kept for one in passes),
            ridge=self._machine.ridge(name), bounds=tuple(self._machine.bound(passes) for _, passes in kept),
            doubled=self._doubled(item), options=tuple(options), why_not=seen.why_not, chosen=options[0].format,
            fuse_with="one product of its parts" if len(item.parts) > 1 else "",
        )  # fmt: skip

    def _in(self, item: Item, word: str, loss: float) -> Option:
        predicted = sum(load.calls * self._machine.us(passes_for(item, word, load.rows, self._device)) for load in item.loads)
        measured = None
        if self._times is not None:
            each = self._times.of(item, word, sizes_of(item))
            measured = sum(load.calls * us for load, us in zip(item.loads, each, strict=True))
        nbytes = sum(weight_bytes(N, K, word, item.dtype.itemsize) for N, K in item.products)
        own = NAMES[item.dtype] if word == KEPT else word
        return Option(format=own, predicted_us=predicted, measured_us=measured, loss=loss, nbytes=nbytes)

    def _doubled(self, item: Item) -> tuple[float | None, ...]:
        if self._times is None:
            return (None,) * len(item.loads)
        sizes = sizes_of(item)
        times = self._times.of(item, KEPT, with_doubled(sizes))
        return tuple(twice / once for once, twice in zip(times[: len(sizes)], times[len(sizes) :], strict=True))

    def _total(
        self, layers: Sequence[PlannedLayer], others: Sequence[Other], words: Sequence[str], max_loss: float | None
    ) -> Total:  # fmt: skip
        chosen, kept = [layer.choice for layer in layers], [self._as_it_is(layer) for layer in layers]
        rest_us = sum(other.predicted_us or 0.0 for other in others)
        whole = self._whole(layers)
        pairs = list(zip(layers, kept, strict=True))
        singles = {word: sum(_us(_in_format(layer, word, own)) for layer, own in pairs) for word in words}
        return Total(
            predicted_us=rest_us + sum(o.predicted_us for o in chosen), kept_us=rest_us + sum(o.predicted_us for o in kept),
            layers_us=sum(map(_us, chosen)), kept_layers_us=sum(map(_us, kept)),
            measured_us=whole.measured_us, kept_measured_us=whole.kept_measured_us,
            nbytes=sum(o.nbytes for o in chosen), kept_nbytes=sum(o.nbytes for o in kept),
            loss_kind=self._judge.kind, loss=sum(map(_loss, chosen)), measured_loss=whole.loss, base_loss=self._judge.base,
            max_loss=max_loss, single_us=singles,
        )  # fmt: skip

    def _as_it_is(self, layer: PlannedLayer) -> Option:
        """A layer in its own dtype, also where that was not to be chosen."""
        item = next(item for item in self._target.items if item.name == layer.name)
        own = next((option for option in layer.options if option.format == NAMES[item.dtype]), None)
        return own or self._in(item, KEPT, 0.0)

    def _whole(self, layers: Sequence[PlannedLayer]) -> PlannedRun:
        """Runs the whole once with all formats, for its loss, and for its time if times are measured."""
        items = {item.name: item for item in self._target.items}
        chosen = {layer.name: KEPT if layer.chosen == NAMES[items[layer.name].dtype] else layer.chosen for layer in layers}
        loss = self._judge.together(chosen)
        if self._times is None:
            return PlannedRun(loss, None, None)
        kept_us = self._step_us(dict.fromkeys(chosen, KEPT))
        if set(chosen.values()) == {KEPT}:
            return PlannedRun(loss, kept_us, kept_us)
        with all_rounded(self._target, chosen):
            return PlannedRun(loss, self._step_us(chosen), kept_us)

    def _step_us(self, chosen: dict[str, str]) -> float:
        assert self._times is not None
        total, steps = 0.0, self._target.step()
        phases = list(dict.fromkeys(load.phase for item in self._target.items for load in item.loads))
        for (share, run), phase in zip(steps, phases, strict=True):
            if not share:
                continue
            passes = [
                one
                for item in self._target.items
                for load in item.loads if load.phase == phase
                for one in passes_for(item, chosen[item.name], load.rows, self._device) * round(load.calls / share)
            ]  # fmt: skip
            total += share * self._times.of_step(run, passes, replayed=phase == REPLAYED)
        return total

    def _notes(self, layers: Sequence[PlannedLayer]) -> list[str]:
        found = [self._target.coverage]
        if self._judge.base is None:
            found.append("no data: a loss is the relative error of a layer's output, and max_loss bounds the sum of these errors")
        kept = [self._as_it_is(layer) for layer in layers]
        expected, taken = sum(one.predicted_us for one in kept), sum(map(_us, kept))
        if taken > BUSY * expected:
            found.append(
                f"the layers as they are take {taken / expected:.0f} times what the ceilings allow: if other programs run on "
                "this machine, plan again without them, or with measure=False"
            )
        fixed = {item.name for item in self._target.items if item.fixed}
        own = [layer for layer in layers if layer.name not in fixed]
        found += dict.fromkeys(f"{word}: {why}" for layer in own for word, why in layer.why_not.items())
        return found[:MOST_NOTES]


def _us(option: Option) -> float:
    return option.us


def _loss(option: Option) -> float:
    return option.loss


def _in_format(layer: PlannedLayer, word: str, kept: Option) -> Option:
    """A layer in a format if it has it, else as it is."""
    return next((option for option in layer.options if option.format == word), kept)
