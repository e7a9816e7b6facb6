"""Checkpoints that others have quantised, served: the greedy tokens of Transformers' `generate`, in a batch and alone.

Where activations stay in 16 bits, Transformers has the weights that the codes stand for. Where they are quantised, its linear
layers are replaced by a definition in plain PyTorch that multiplies the codes in the file.

The last bits of a sum depend on its order, which is another here than there. So some more prompts are made than are asked, and
the reference alone decides which ones are left out: those whose answers hang on such bits.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

import rooftile as rt
from tests.engine.asking import tokens_of
from tests.models.checkpoints import VOCABULARY
from tests.models.quantised import KINDS, quantised

MADE, ASKED, TOKENS, LONGEST = 88, 64, 6, 72
GREEDY = rt.SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
# without a prefix cache each prompt is computed anew when it comes alone
ROOM = {"max_model_len": 80, "num_blocks": 600, "enable_prefix_caching": False}
WEIGHT_ONLY = [kind for kind, (_, _, exact) in KINDS.items() if exact]
OF_CODES = [kind for kind in KINDS if kind not in WEIGHT_ONLY]
# the two largest logits of each step are this far apart, as a share of the largest; both sides differ by some 3e-6
GAP = 1e-3


class Answers(NamedTuple):
    """Greedy answers, and for each the least gap between the two largest logits of a step, over the largest."""

    tokens: list[list[int]]
    gaps: Tensor


def made() -> list[list[int]]:
    """Prompts of 1 to 72 tokens."""
    rng = random.Random(11)
    return [[rng.randrange(VOCABULARY) for _ in range(1 + n % LONGEST)] for n in rng.sample(range(MADE), MADE)]


def answers(model: transformers.PreTrainedModel, prompts: list[list[int]]) -> Answers:
    """Returns what `generate` says to all prompts as one batch, padded on the left."""
    ids = torch.tensor([[0] * (LONGEST - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (LONGEST - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    model.generation_config.eos_token_id = None
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    logits = torch.stack(found.logits, dim=1)
    first, second = logits.topk(2).values.unbind(-1)
    return Answers(found.sequences[:, LONGEST:].tolist(), ((first - second) / logits.abs().amax(-1)).amin(1))


def assert_same_tokens(folder: Path, due: Answers) -> None:
    """An engine says what the reference says to the prompts with the largest gaps."""
    prompts, clearest = made(), due.gaps.argsort(descending=True)[:ASKED].sort().values.tolist()
    assert due.gaps[clearest].min() > GAP, "the reference itself can hardly decide: choose other prompts"
    asked, expected = [prompts[n] for n in clearest], [[due.tokens[n]] for n in clearest]
    assert len({tuple(answer) for (answer,) in expected}) > ASKED // 2, "answers that are all alike would show little"
    llm = rt.LLM(folder, **ROOM)
    assert tokens_of(llm, asked, GREEDY) == expected
    # one in four also alone: a step takes as long for one prompt as for all of them
    assert [tokens_of(llm, [prompt], GREEDY)[0] for prompt in asked[::4]] == expected[::4]


@pytest.mark.parametrize("kind", WEIGHT_ONLY)
def test_weights_alone(kind: str, tmp_path: Path) -> None:
    model = quantised(kind, tmp_path)
    assert_same_tokens(tmp_path, answers(model, made()))


class Codes(nn.Module):
    """A linear layer that multiplies codes of 8 bits, by the rule and without this library.

    One division finds what a row of x, or 128 numbers of it, is multiplied by: 448 / amax for e4m3, 1 / (amax / 127) for int8.
    Sums of products are exact in fp64 for int8, and nearly so for e4m3. Then both scales multiply them.
    """

    def __init__(self, codes: Tensor, scales: Tensor, given: Tensor | None, *, tiles: bool) -> None:
        super().__init__()
        N, K = codes.shape
        self.is_integer, self.codes, self.given = codes.dtype == torch.int8, codes.double(), given
        self.block = 128 if tiles else K
        # (N, blocks of K)
        self.scales = scales.repeat_interleave(128, 0)[:N].double() if tiles else scales.double().view(-1, 1).expand(N, 1)
        self.noise = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = x * (1 + self.noise * torch.randn_like(x))
        parts = zip(x.split(self.block, -1), self.codes.split(self.block, 1), self.scales.T, strict=True)
        return sum(self._product(part, codes) * scales for part, codes, scales in parts).to(x.dtype)

    def _product(self, x: Tensor, w: Tensor) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True)
        if self.is_integer:
            scales = largest / 127
            codes = (x * (1 / scales)).round()
        elif self.given is not None:
            scales = self.given
            codes = (x / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
        else:
            scales = largest / 448
            codes = (x * (448 / largest)).to(torch.float8_e4m3fn)
        return codes.double() @ w.T * scales.double()


def linears(model: transformers.PreTrainedModel, folder: Path, *, tiles: bool) -> list[Codes]:
    """Replaces the linear layers of a model, but for its head, by the codes in a file."""
    tensors, found = load_file(folder / "model.safetensors"), []
    for name in [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != "lm_head"]:
        mine = {key.removeprefix(f"{name}."): x for key, x in tensors.items() if key.startswith(f"{name}.")}
        codes = mine.get("weight", mine.get("_weight_qdata"))
        scales = next(mine[key] for key in ("weight_scale", "weight_scale_inv", "_weight_scale") if key in mine)
        found.append(Codes(codes, scales, mine.get("input_scale", mine.get("activation_scale")), tiles=tiles))
        model.set_submodule(name, found[-1])
    return found


@pytest.mark.parametrize("kind", OF_CODES)
def test_weights_and_activations(kind: str, tmp_path: Path) -> None:
    """A number in the middle between two codes takes one of them by its last bit, and moves all that follow.

    So an answer counts that the reference also gives when its activations are changed by a millionth, four times.
    """
    # down_proj has rows of two tiles, and gate_proj columns; the second one is narrow
    model = quantised(kind, tmp_path, intermediate_size=192)
    layers = linears(model, tmp_path, tiles="tiles" in kind)
    assert len(layers) == 14
    due = answers(model, made())
    for layer in layers:
        layer.noise = 1e-6
    for _ in range(4):
        same = [a == b for a, b in zip(answers(model, made()).tokens, due.tokens, strict=True)]
        due = due._replace(gaps=due.gaps * torch.tensor(same))
    assert_same_tokens(tmp_path, due)
