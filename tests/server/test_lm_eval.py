"""lm-evaluation-harness against the server: likelihoods are the library's, and so are the texts that it generates."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rooftile import SamplingParams
from tests.server.live import Server

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


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory):
    """A server whose tokenizer puts no token before a text: lm-eval counts the tokens of texts without one."""
    path = shutil.copytree(folder, tmp_path_factory.mktemp("plain") / "tiny")
    file = path / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"post_processor": None}))
    with Server(path) as made:
        yield made


@pytest.mark.parametrize("tokenized", [True, False])
@pytest.mark.parametrize("size", [1, 4])
def test_likelihoods_are_a_direct_computation(server, plain, llm, folder, size: int, tokenized: bool) -> None:
    """Requests are tokens, or texts."""
    more = {"batch_size": size, "tokenized_requests": tokenized}
    asks = server if tokenized else plain
    model = model_of("LocalCompletionsAPI", asks, folder, tokenizer_backend="huggingface", **more)
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


QUESTIONS = [
    {"question": "The roof is", "choices": [" tiled", " a stream"], "answer": 0},
    {"question": "A tile's edge", "choices": [" isn't its end", " stops"], "answer": 1},
    {"question": "Grüße aus", "choices": [" Köln", " 1234"], "answer": 0},
]


def tasks_of(place: Path) -> list[dict[str, Any]]:
    """A task of choices, and one of texts that must be equal, as task files have them."""
    file = place / "questions.json"
    file.write_text("\n".join(map(json.dumps, QUESTIONS)))
    data = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}, "test_split": "test",
        "doc_to_text": "{{question}}", "num_fewshot": 0, "metadata": {"version": 1},
    }  # fmt: skip
    chosen = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    written = {
        "output_type": "generate_until", "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["zz"], "max_gen_toks": 6, "do_sample": False},
    }  # fmt: skip
    return [
        data | chosen | {"task": "choices", "target_delimiter": "", "metric_list": [{"metric": "acc"}]},
        data | written | {"task": "texts", "metric_list": [{"metric": "exact_match"}]},
    ]


def test_two_tasks_from_their_files_to_their_scores(server, llm, folder, tmp_path, monkeypatch) -> None:
    pytest.importorskip("datasets", reason="lm-eval reads the data of its tasks with datasets")
    evaluator = pytest.importorskip("lm_eval.evaluator")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model = model_of("LocalCompletionsAPI", server, folder, tokenizer_backend="huggingface", batch_size=2)
    found = evaluator.simple_evaluate(model, tasks=tasks_of(tmp_path), bootstrap_iters=0)
    right = 0
    for each in QUESTIONS:
        pairs = [model._encode_pair(each["question"], choice) for choice in each["choices"]]
        scores = [likelihood(llm, *pair)[0] for pair in pairs]
        right += scores.index(max(scores)) == each["answer"]
    assert found["results"]["choices"]["acc,none"] == pytest.approx(right / len(QUESTIONS))
    params = SamplingParams(temperature=0, max_tokens=6, stop=["zz"])
    prompts = [{"prompt_token_ids": model.tok_encode(each["question"])} for each in QUESTIONS]
    texts = [output.outputs[0].text for output in llm.generate(prompts, params)]
    assert [sample["resps"][0][0] for sample in found["samples"]["texts"]] == texts
    equal = [text == each["choices"][0] for text, each in zip(texts, QUESTIONS, strict=True)]
    assert found["results"]["texts"]["exact_match,none"] == sum(equal) / len(equal)
