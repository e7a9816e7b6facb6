"""`Plan`: a format for each layer, with the reasons; printed, kept as JSON, and applied."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from torch import nn

from rooftile.diagnosis.output.units import duration
from rooftile.diagnosis.output.written import values_of
from rooftile.errors import InvalidInput
from rooftile.planning.output.page import notebook, render
from rooftile.planning.output.table import chosen, text
from rooftile.planning.records import KEPT_NAMES, Load, Option, Other, Part, PlannedLayer, Total
from rooftile.runtime.words import answers_foreign_words, answers_words
from rooftile.weights.two_four import Recipe

FORM = "rooftile.plan/1"
Model = TypeVar("Model", bound=nn.Module)


@answers_words
@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A format for each linear layer of a model. `print(plan)` prints the table.

    Args:
        model: the class of the model, or the folder of its checkpoint.
        device: the name of the device.
        ceilings: its measured ceilings, as in `rooftile.hardware.ceilings.Ceilings`.
        layers: the linear layers, in the order of their calls; layers that read one input together are one item.
        others: all other operators.
        total: the whole step.
        notes: what the reader should know.
    """

    model: str
    device: str
    ceilings: dict[str, Any]
    layers: tuple[PlannedLayer, ...]
    others: tuple[Other, ...]
    total: Total
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return text(self)

    def __repr__(self) -> str:
        return f"Plan(for {self.model} on {self.device}: {chosen(self.layers)}; step {duration(self.total.predicted_us)})"

    def _repr_html_(self) -> str:
        return notebook(self)

    @property
    def weights(self) -> dict[str, str] | str:
        """The format of each layer that changes: {name: word}; "auto" if all stay as they are.

        `LLM(weights=...)` takes it from the plan of a checkpoint, a `Decoder` or a model of Transformers, whose names it knows.
        """
        return self._words() or "auto"

    @answers_foreign_words
    def apply(self, model: Model) -> Model:
        """Quantises the layers of a model as planned, in place, and returns it.

        Layers of a module become `rooftile.qat.QuantisedLinear`, and 2:4 ones `rooftile.qat.SparseLinear`; the projections of a
        `Decoder` are quantised.

        Raises:
            InvalidInput: the plan is for another model.

        Example:
            >>> plan.apply(model)(x)
        """
        from rooftile.planning.targets.applying import apply

        return apply(self.layers, self._words(), model)

    @answers_foreign_words
    def prepare(self, model: Model, *, estimator: str = "straight", start_step: int = 0, sparsity: Recipe | None = None) -> Model:
        """Prepares a model for training with the planned formats, as `rooftile.qat.prepare` does, and returns it.

        Args:
            model: the one that was planned.
            estimator, start_step: as in `rooftile.qat.prepare`; 2:4 layers have no estimator.
            sparsity: how 2:4 layers are trained; None for a `rooftile.sparsity.Recipe` as it comes.

        Raises:
            InvalidInput: the plan is for another model, or keeps all its layers as they are; or `sparsity` is given and no layer
                is planned as 2:4.
        """
        from rooftile.planning.targets.training import prepare

        words = self._words()
        if not words:
            raise InvalidInput("the plan keeps all layers as they are, so there is nothing to train for; allow a larger max_loss")
        return prepare(self.layers, words, model, estimator, start_step, sparsity)

    def to_json(self) -> str:
        """Returns the plan as JSON, which `from_json` reads."""
        return json.dumps({"form": FORM} | asdict(self), indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, written: str) -> Plan:
        """Reads a plan that `to_json` wrote.

        Raises:
            InvalidInput: it is something else.
        """
        values = values_of(written, FORM)
        try:
            read = {
                "layers": tuple(_layer(one) for one in values["layers"]),
                "others": tuple(Other(**one) for one in values["others"]),
                "total": Total(**values["total"]),
                "notes": tuple(values["notes"]),
            }
            return cls(**(values | read))
        except (KeyError, TypeError) as error:
            raise InvalidInput(f"the JSON is no whole plan ({error}); pass the text that to_json wrote") from None

    def to_html(self) -> str:
        """Returns the plan as one HTML file, which loads nothing: the table, the roofline, and the JSON.

        Raises:
            InvalidInput: jinja2 is not installed.
        """
        return render(self, json.loads(self.to_json()))

    def _words(self) -> dict[str, str]:
        changed = [layer for layer in self.layers if layer.chosen not in KEPT_NAMES]
        return {part.name: layer.chosen for layer in changed for part in layer.parts}


def _layer(values: Mapping[str, Any]) -> PlannedLayer:
    read = {
        "parts": tuple(Part(**one) for one in values["parts"]), "loads": tuple(Load(**one) for one in values["loads"]),
        "options": tuple(Option(**one) for one in values["options"]), "bounds": tuple(values["bounds"]),
        "doubled": tuple(values["doubled"]),
    }  # fmt: skip
    return PlannedLayer(**(dict(values) | read))
