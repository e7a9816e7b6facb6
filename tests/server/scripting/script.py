"""Lets a script say what a model answers: the logits of the token that it has next are the highest by far.

Everything else is the engine's: grammars, stop strings, limits and penalties act on these logits as on a model's.
"""

from __future__ import annotations

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

SCRIPT = "ROOFTILE_TESTS_SCRIPT"
# above all logits of a tiny model, and no bias of a request changes the order
FORCED = 1e6


def follow_a_script() -> None:
    """Puts the script of the file that the environment names above the logits of every step."""
    from rooftile.engine.steps.runner import Runner

    run, sample = Runner.run, Runner._sample
    outputs: list[Any] = []

    def run_scripted(self: Runner, plan: Any) -> Any:
        outputs[:] = [answer for work in plan.work for answer in work.outputs]
        return run(self, plan)

    def sample_scripted(self: Runner, logits: Any, slots: Any, positions: Any, features: Any) -> Any:
        if len(outputs) == len(logits):
            logits = logits.clone()
            for row, (answer, position) in enumerate(zip(outputs, positions.tolist(), strict=True)):
                said = tokens_to_say(answer.request)
                place = position - len(answer.request.prompt)
                if said is not None and place < len(said):
                    logits[row, said[place]] = FORCED
        return sample(self, logits, slots, positions, features)

    Runner.run, Runner._sample = run_scripted, sample_scripted  # type: ignore[method-assign]


@lru_cache(maxsize=256)
def tokens_to_say(request: Any) -> list[int] | None:
    """Returns the tokens of the answer to a request, with the token that ends it; None if no rule fits its prompt."""
    rules = json.loads(Path(os.environ[SCRIPT]).read_text(encoding="utf-8"))
    prompt = request.tokenizer.decode(request.prompt, skip_special=False)
    for part, text in rules:
        if part in prompt:
            return [*request.tokenizer.encode(text, special=False), *sorted(request.ends)[:1]]
    return None
