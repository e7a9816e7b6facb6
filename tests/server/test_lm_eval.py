"""lm-evaluation-harness against the server: likelihoods are the library's, and so are the texts that it generates."""

from __future__ import annotations

from typing import Any

import pytest

from rooftile import SamplingParams

completions = pytest.importorskip("lm_eval.models.openai_completions", reason="lm-eval is not installed")
from lm_eval.api.instance import Instance  # noqa: E402

PAIRS = [
    ("The roof", " is tiled"), ("A tile's edge", " isn't its end."), ("a", "b"), ("Grüße aus Köln", " – naïve café"),
    ("The roof is tiled, and a tile's edge", " stops the stream of strings"), ("", "The roof"),
]  # fmt: skip


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    return [Instance(request_type=kind, doc={}, arguments=each, idx=n) for n, each in enumerate(arguments)]


def likelihood(llm, before: list[int], after: list[int]) -> tuple[float, bool]:
    """The sum of the logprobs of some tokens behind others, and whether each is the most likely one."""
    (output,) = llm.generate(before + after, SamplingParams(prompt_logprobs=0, max_tokens=1))
    found = [output.prompt_logprobs[n][token] for n, token in enumerate(after, len(before))]
    return sum(one.logprob for one in found), all(one.rank == 1 for one in found)


def model_of(kind: str, server, folder, **more: Any) -> Any:
    path = "chat/completions" if "Chat" in kind else "completions"
    return getattr(completions, kind)(
        model="tiny", base_url=f"{server.url}/v1/{path}", tokenizer=str(folder), max_retries=1, max_gen_toks=12, **more
    )


@pytest.mark.parametrize("more", [{"batch_size": 1}, {"batch_size": 4}], ids=str)
def test_likelihoods_are_a_direct_computation(server, llm, folder, more) -> None:
    model = model_of("LocalCompletionsAPI", server, folder, tokenizer_backend="huggingface", **more)
    tokens = [model._encode_pair(*pair) if pair[0] else ([model.prefix_token_id], model.tok_encode(pair[1])) for pair in PAIRS]
    found = model.loglikelihood(asked("loglikelihood", *PAIRS))
    for (sum_, greedy), (before, after) in zip(found, tokens, strict=True):
        due, is_greedy = likelihood(llm, before, after)
        assert sum_ == pytest.approx(due, abs=1e-4)
        assert greedy == is_greedy


def test_texts_are_the_librarys(server, llm, folder) -> None:
    prompts = ["The roof", "A tile's edge", "Grüße"]
    model = model_of("LocalCompletionsAPI", server, folder, tokenizer_backend="huggingface", batch_size=2)
    how = {"until": ["zz"], "max_gen_toks": 9, "do_sample": False, "temperature": 0.0}
    found = model.generate_until(asked("generate_until", *((prompt, dict(how)) for prompt in prompts)))
    params = SamplingParams(temperature=0, max_tokens=9, stop=["zz"])
    due = llm.generate([{"prompt_token_ids": model.tok_encode(prompt)} for prompt in prompts], params)
    assert found == [output.outputs[0].text for output in due]


def test_chats_are_the_librarys(server, llm, folder) -> None:
    model = model_of("LocalChatCompletion", server, folder)
    talks = [[{"role": "user", "content": text}] for text in ("The roof", "Grüße")]
    written = [(model.apply_chat_template(talk), {"until": ["zz"], "max_gen_toks": 9}) for talk in talks]
    found = model.generate_until(asked("generate_until", *written))
    due = llm.chat(talks, SamplingParams(temperature=0, max_tokens=9, stop=["zz"]))
    assert found == [output.outputs[0].text for output in due]
