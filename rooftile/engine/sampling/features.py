"""`SamplingFeatures`: the features of sampling that a batch computes."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from rooftile.engine.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingFeatures:
    """The features of sampling that some row of a batch asks for; the batch computes no other. `|` gives the union of two."""

    chance: bool = False
    truncation: bool = False
    penalties: bool = False
    bias: bool = False
    mask: bool = False

    @property
    def changes_logits(self) -> bool:
        """Whether some row's logits are changed before the draw."""
        return self.penalties or self.bias or self.mask

    @property
    def bits(self) -> int:
        """The features as a number, a bit for each, the first the lowest."""
        return sum(flag << n for n, flag in enumerate(astuple(self)))

    @classmethod
    def of_bits(cls, bits: int) -> SamplingFeatures:
        """Returns the features whose number this is."""
        return cls(*(bool(bits >> n & 1) for n in range(5)))

    def __or__(self, other: SamplingFeatures) -> SamplingFeatures:
        return SamplingFeatures(
            self.chance or other.chance,
            self.truncation or other.truncation,
            self.penalties or other.penalties,
            self.bias or other.bias,
            self.mask or other.mask,
        )


def features_of(params: SamplingParams) -> SamplingFeatures:
    """Returns the features that one request asks for.

    Truncation never removes the most likely token, so a greedy request asks for none.
    """
    chance = params.temperature > 0
    return SamplingFeatures(
        chance=chance,
        truncation=chance and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0),
        penalties=params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1,
        bias=bool(params.logit_bias) or params.allowed_token_ids is not None,
        mask=params.grammar is not None or params.thinking_token_budget is not None,
    )
