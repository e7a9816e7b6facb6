"""Serving language models from a paged cache.

llm            LLM: prompts in, answers out
async_engine   AsyncEngine: the same for many callers at once, as in a server
checkpoint     finds the folder of a model's name, and its authors' sampling parameters
config         EngineConfig: the settings of an engine
settings       the table of all settings, for Python and for the commands
build          builds an engine from a checkpoint folder
engine         one step at a time: requests in, tokens out
scheduler      which requests the model reads in the next step (continuous batching)
runner         runs a step on a device
request        a request and its answers while they are being computed
grammar        structured output, and in grammar_errors what is wrong with one
output         what a caller gets back
growth         outputs that hold only what is new
stats          how an engine stands after a step
beam_search    which beams go on
process_lock   keeps forked processes out
progress       a progress bar
vllm_names     vLLM's keywords that have another name here, or none
warm_up        compiles kernels while weights load

mixers/        what each kind of layer brings: its attention, what it keeps, its kernels, its checks
caches/        what a block, a row and a running sequence hold, and how many blocks fit into memory
text/          prompts, chat templates, tokenizer, detokenizer
sampling/      parameters, sampler, its kernels
"""

from typing import TYPE_CHECKING

from rooftile.runtime.late_names import late_names

if TYPE_CHECKING:
    from rooftile.engine.async_engine import AsyncEngine, Overloaded
    from rooftile.engine.config import EngineConfig
    from rooftile.engine.llm import LLM
    from rooftile.engine.output import CompletionOutput, RequestOutput
    from rooftile.engine.request import Logprob
    from rooftile.engine.sampling.params import SamplingParams
    from rooftile.engine.stats import EngineStats

__all__ = [
    "LLM", "AsyncEngine", "CompletionOutput", "EngineConfig", "EngineStats", "Logprob", "Overloaded", "RequestOutput",
    "SamplingParams",
]  # fmt: skip

# late: the server's process reads texts and parameters without torch
__getattr__ = late_names(
    "rooftile.engine",
    {
        "LLM": "rooftile.engine.llm", "AsyncEngine": "rooftile.engine.async_engine", "Overloaded": "rooftile.engine.async_engine",
        "CompletionOutput": "rooftile.engine.output", "RequestOutput": "rooftile.engine.output",
        "EngineConfig": "rooftile.engine.config", "Logprob": "rooftile.engine.request",
        "SamplingParams": "rooftile.engine.sampling.params", "EngineStats": "rooftile.engine.stats",
    },
)  # fmt: skip


def __dir__() -> list[str]:
    """Returns the public names."""
    return sorted(__all__)
