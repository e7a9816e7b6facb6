"""The router of every family of models as one record.

    z = E u + logit_bias                            E the centroids, in fp32
    s = softmax(z) or sigmoid(z)                    over the routed experts
    chosen: the best `active` of s + bias           in the best `active_groups` of `groups`; ties go to the lower index
    g = scale s, or scale s / (sum of the chosen)   "chosen softmax": the best z are chosen, g is the softmax over those

DeepSeekMoE, arXiv:2401.06066; DeepSeek-V2, arXiv:2405.04434; DeepSeek-V3, arXiv:2412.19437.
"""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.errors import InvalidInput
from rooftile.runtime.arguments import check_choice, check_count, check_flag, check_number
from rooftile.runtime.words import answers_words

SCORES = ("softmax", "sigmoid", "chosen softmax")
GROUP_SCORES = ("maximum", "sum of best two")


@answers_words
@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """The options of a router, without its tensors.

    Args:
        active: experts that each token uses.
        active_groups: groups in which a token may choose.
        group_score: of a group of experts: "maximum" (DeepSeek-V2) or "sum of best two" (DeepSeek-V3) of its scores.
        groups: groups of experts, neighbours of equal number; 1 for no groups.
        normalise: whether the gates of a token are divided by their sum, to which 1e-20 is added as in DeepSeek-V3.
        round_gates: whether gates are rounded to the dtype of the tokens, as Granite, OLMoE and Qwen 3 do.
        scale: of the gates.
        score: "softmax" over all routed experts, "sigmoid", or "chosen softmax", over the logits of the chosen experts (Granite,
            gpt-oss).

    Raises:
        InvalidInput: an option is wrong; says what came and what is due.

    Example:
        >>> Router(active=8, score="sigmoid", groups=8, active_groups=4, group_score="sum of best two", normalise=True, scale=2.5)
        Router(active=8, active_groups=4, group_score='sum of best two', groups=8, normalise=True, round_gates=False, scale=2.5, score='sigmoid')
    """  # noqa: E501

    active: int
    active_groups: int = 1
    group_score: str = "maximum"
    groups: int = 1
    normalise: bool = False
    round_gates: bool = False
    scale: float = 1.0
    score: str = "softmax"

    def __post_init__(self) -> None:
        for name in ("active", "active_groups", "groups"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        check_choice("score", self.score, SCORES)
        check_choice("group_score", self.group_score, GROUP_SCORES)
        check_flag("normalise", self.normalise)
        check_flag("round_gates", self.round_gates)
        object.__setattr__(self, "scale", check_number("scale", self.scale))
        if self.active_groups > self.groups:
            raise InvalidInput(f"active_groups is {self.active_groups} and groups is {self.groups}; must be at most that")

    def check_experts(self, experts: int) -> None:
        """Checks that a router chooses among this number of experts.

        Raises:
            InvalidInput: it cannot.
        """
        if self.active > experts:
            raise InvalidInput(f"active is {self.active} and there are {experts} experts; must be at most that")
        if experts % self.groups:
            raise InvalidInput(f"groups is {self.groups} and there are {experts} experts; must divide that")
        size = experts // self.groups
        if self.groups > 1 and self.group_score == "sum of best two" and size < 2:
            raise InvalidInput(f"groups is {self.groups} for {experts} experts; the sum of best two needs groups of two or more")
        if self.active > self.active_groups * size:
            raise InvalidInput(
                f"active is {self.active} and active_groups is {self.active_groups}, with {self.active_groups * size} experts; "
                "must be at most that"
            )
