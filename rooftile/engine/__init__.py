"""Serving language models from a paged cache.

llm            LLM: prompts in, answers out
async_engine   AsyncEngine: the same for many callers at once, inside one program
engine         one step at a time: requests in, tokens out
process_lock   keeps forked processes out
vllm_names     vLLM's keywords that have another name here, or none

loop/          takes orders and runs steps, for the server's process and for AsyncEngine's thread
settings/      EngineConfig, and the table of all settings
ranks/         several processes that share a model: orders, failures, the end
start/         builds an engine from a model's name; compiles kernels while weights load
requests/      a request, its answers, and the outputs that a caller gets back
steps/         which tokens the model reads in a step (scheduler), and how a device computes them (runner)
mixers/        what each kind of layer brings: its attention, what it keeps, its kernels, its checks
caches/        what a block, a row and a running sequence hold, and how many blocks fit into memory
embedding/     vectors and scores of texts, by encoders and by decoders without a cache
text/          prompts, chat templates, tokenizer, detokenizer
sampling/      how the next token is chosen: parameters, sampler, forbidden tokens, grammars, beams
"""

from typing import TYPE_CHECKING

from rooftile.runtime.late_names import late_names

if TYPE_CHECKING:
    from rooftile.engine.async_engine import AsyncEngine, Overloaded
    from rooftile.engine.embedding.output import EmbeddingOutput, ScoreOutput
    from rooftile.engine.llm import LLM
    from rooftile.engine.ranks.failures import RankEnded
    from rooftile.engine.requests.output import CompletionOutput, RequestOutput
    from rooftile.engine.requests.request import Logprob
    from rooftile.engine.requests.stats import EngineStats
    from rooftile.engine.sampling.params import SamplingParams
    from rooftile.engine.settings.config import EngineConfig

__all__ = [
    "LLM", "AsyncEngine", "CompletionOutput", "EmbeddingOutput", "EngineConfig", "EngineStats", "Logprob", "Overloaded",
    "RankEnded", "RequestOutput", "SamplingParams", "ScoreOutput",
]  # fmt: skip

# late: the server's process reads texts and parameters without torch
__getattr__ = late_names(
    "rooftile.engine",
    {
        "LLM": "rooftile.engine.llm", "AsyncEngine": "rooftile.engine.async_engine", "Overloaded": "rooftile.engine.async_engine",
        "RankEnded": "rooftile.engine.ranks.failures",
        "CompletionOutput": "rooftile.engine.requests.output", "RequestOutput": "rooftile.engine.requests.output",
        "EmbeddingOutput": "rooftile.engine.embedding.output", "ScoreOutput": "rooftile.engine.embedding.output",
        "EngineConfig": "rooftile.engine.settings.config", "Logprob": "rooftile.engine.requests.request",
        "SamplingParams": "rooftile.engine.sampling.params", "EngineStats": "rooftile.engine.requests.stats",
    },
)  # fmt: skip


def __dir__() -> list[str]:
    """Returns the public names."""
    return sorted(__all__)
