"""Serving language models from a paged cache.

    llm              LLM: prompts in, answers out
    async_engine     AsyncEngine: the same for many callers at once, as in a server
    engine           requests in, tokens out, a step at a time
    scheduler        what the model reads next
    runner           a step on a device
    sampler          the next tokens
    beam_search      which beams go on
    detokeniser      text while tokens come

    prompt, sampling_params, request, output     what is asked for, and what comes back
    memory           how many blocks a cache has
    tokenizer        of a checkpoint
"""

from rooftile.serve.async_engine import AsyncEngine, Overloaded
from rooftile.serve.llm import LLM
from rooftile.serve.output import CompletionOutput, RequestOutput
from rooftile.serve.request import Logprob
from rooftile.serve.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncEngine", "CompletionOutput", "Logprob", "Overloaded", "RequestOutput", "SamplingParams"]
