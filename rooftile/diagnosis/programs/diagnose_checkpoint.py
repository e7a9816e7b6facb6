"""`rooftile diagnose --checkpoint`: what bounds Rooftile's own engine, in a decode step and in the reading of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch

from rooftile.diagnosis.diagnosis import Diagnosis
from rooftile.diagnosis.programs.decode_step import DecodeSizes, decoding
from rooftile.diagnosis.programs.diagnose_call import diagnose_call
from rooftile.diagnosis.remedies.apply import BY_RUNNING, check
from rooftile.engine.engine import Engine
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.settings.config import EngineConfig
from rooftile.engine.start.build import build_engine
from rooftile.errors import InvalidInput
from rooftile.models import Decoder

# tokens that the engine decodes beyond the steps of a diagnosis
SPARE = 8


def diagnose_checkpoint(
    model: str | Path | Decoder, *, batch: int = 1, context: int = 1024, device: str = "auto", apply: Sequence[str] = (),
    budget: float = 60.0, ncu: bool = False,
) -> tuple[Diagnosis, Diagnosis]:  # fmt: skip
    """Diagnoses a step in which `batch` answers of about `context` tokens each get one more, and a prompt of `context` tokens.

    The engine runs without CUDA graphs, so that each of its operators is seen.

    Args:
        model: a checkpoint's folder, or a decoder.
        batch: answers that decode at once.
        context: tokens of each answer, and of the prompt.
        device: "cpu", "cuda" or "auto".
        apply: remedies to try, as in `rooftile.diagnose`.
        budget: seconds for the experiments of each of the two.
        ncu: also count bytes by Nsight Compute.

    Returns:
        The diagnoses of the decode step and of the prompt.

    Raises:
        InvalidInput: batch or context is not positive, or the model has fewer positions.
    """
    check(apply)
    for name, value in (("batch", batch), ("context", context)):
        if value < 1:
            raise InvalidInput(f"{name} is {value}; must be at least 1")
    # warm-up, timed, watched, profiled and recorded steps, and the steps of each remedy that is tried
    steps = 2 * (16 + 20 * len([name for name in apply if name in BY_RUNNING]) + SPARE)
    config = EngineConfig(
        device=device, max_model_len=context + steps, max_num_seqs=batch, max_batched_tokens=max(context, batch),
        num_blocks=(batch + 1) * -(-(context + steps) // 16), enforce_eager=True, enable_prefix_caching=False,
        generation_config="none",
    )  # fmt: skip
    engine = build_engine(model, config)
    with torch.inference_mode(), decoding(engine, DecodeSizes(batch, context, steps // 2)):

        def decode() -> None:
            engine.step()

        decode.__qualname__ = f"decode step of {batch} answers of {context} tokens"
        # each step decodes a token, for as many as are planned
        decoded = diagnose_call(decode, (), {}, apply=apply, budget=budget, ncu=ncu, compiles=False)
    return decoded, _of_prompt(engine, context, apply, budget, ncu)


def _of_prompt(engine: Engine, context: int, apply: Sequence[str], budget: float, ncu: bool) -> Diagnosis:
    rng, vocabulary = Random(0), engine.runner.decoder.config.vocab_size
    ids = [rng.randrange(vocabulary) for _ in range(context)]

    def read() -> None:
        engine.add(ids, SamplingParams(max_tokens=1))
        while not engine.idle:
            engine.step()

    read.__qualname__ = f"prompt of {context} tokens"
    return diagnose_call(read, (), {}, apply=apply, budget=budget, ncu=ncu, compiles=False)
