"""A server of a model that embeds, and one of a cross-encoder: OpenAI's, Jina's and vLLM's routes, refusals, the queue."""

from __future__ import annotations

import base64
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftile.engine import LLM
from rooftile.server.http.embedding.call import vectors_of
from rooftile.server.refusals import Refusal
from tests.engine.embedding_folders import LONGEST, PROMPTS, TEXTS, described, encoder_folder, tokenizer
from tests.server.live import PATIENCE_S, Server
from tests.server.small import KEY, LINE
from tests.server.test_hostile_forms import EMBEDDING, assert_one_sentence, bodies

SHORT = TEXTS[:4]
# the fixture's servers of other tests read longer prompts
ROOM = ("--max-model-len", str(LONGEST), "--max-waiting-tokens", "80000")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedding") / "tiny"
    return described(
        encoder_folder(folder), ("Pooling", {"pooling_mode_mean_tokens": True}), ("Normalize", {}), prompts=PROMPTS
    )  # fmt: skip


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoder_folder(tmp_path_factory.mktemp("cross") / "ranker", "BertForSequenceClassification", num_labels=1)


@pytest.fixture(scope="module")
def embedding(place: Path):
    with Server(place, *ROOM) as made:
        yield made


@pytest.fixture(scope="module")
def ranking(cross: Path, tmp_path_factory: pytest.TempPathFactory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{LINE}\n")
    with Server(cross, *ROOM, "--api-key-file", str(keys), "--max-per-key", "1") as made:
        yield made


@pytest.fixture(scope="module")
def due(place: Path) -> torch.Tensor:
    return torch.stack([each.embedding for each in LLM(place, device="cpu").embed(SHORT)])


def found(answer: Any) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    return np.array([each["embedding"] for each in answer.json()["data"]])


def test_vectors_are_the_librarys_in_every_form_of_input(embedding: Server, due: torch.Tensor) -> None:
    answer = embedding.post("/v1/embeddings", input=SHORT, model="tiny")
    np.testing.assert_allclose(found(answer), due, atol=1e-6)
    said = answer.json()
    ids = tokenizer()(SHORT)["input_ids"]
    tokens = sum(map(len, ids))
    assert said["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert [each["index"] for each in said["data"]] == [0, 1, 2, 3]
    assert (said["object"], said["data"][0]["object"], said["model"]) == ("list", "embedding", "tiny")
    np.testing.assert_allclose(found(embedding.post("/v1/embeddings", input=ids)), due, atol=1e-6)
    np.testing.assert_allclose(found(embedding.post("/v1/embeddings", input=ids[1])), due[1:2], atol=1e-6)
    np.testing.assert_allclose(found(embedding.post("/v1/embeddings", input=SHORT[1])), due[1:2], atol=1e-6)
    coded = embedding.post("/v1/embeddings", input=SHORT, encoding_format="base64").json()["data"]
    decoded = np.stack([np.frombuffer(base64.b64decode(each["embedding"]), dtype="<f4") for each in coded])
    np.testing.assert_allclose(decoded, due, atol=1e-6)
    cut = torch.nn.functional.normalize(due[:, :5], dim=1)
    np.testing.assert_allclose(found(embedding.post("/v1/embeddings", input=SHORT, dimensions=5)), cut, atol=1e-6)


def test_prompts_and_long_texts(embedding: Server, place: Path) -> None:
    llm = LLM(place, device="cpu")
    named = found(embedding.post("/v1/embeddings", input="the roof", prompt_name="query"))
    np.testing.assert_allclose(named[0], llm.embed("the roof", prompt_name="query")[0].embedding, atol=1e-6)
    long = embedding.post("/v1/embeddings", input=TEXTS[4], truncate_prompt_tokens=-1)
    np.testing.assert_allclose(found(long)[0], llm.embed(TEXTS[4], truncate_prompt_tokens=-1)[0].embedding, atol=1e-6)
    assert long.json()["usage"]["prompt_tokens"] == LONGEST


def test_openais_package(embedding: Server, due: torch.Tensor) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{embedding.url}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="tiny", input=SHORT)
    np.testing.assert_allclose(np.array([each.embedding for each in answer.data]), due, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(EMBEDDING)).flatmap(lambda path: st.tuples(st.just(path), bodies(EMBEDDING[path]))))
def test_any_body_is_answered_or_refused(embedding: Server, asked: tuple[str, dict[str, Any]]) -> None:
    path, body = asked
    answer = embedding.post(path, body)
    assert answer.status_code in (200, 400, 404), (body, answer.text)
    if answer.status_code != 200:
        assert_one_sentence(answer.json()["error"]["message"])


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_a_ranking_has_the_best_document_first(path: str, embedding: Server, place: Path) -> None:
    scores = [each.score for each in LLM(place, device="cpu").score("the roof", SHORT)]
    order = sorted(range(4), key=lambda n: -scores[n])
    said = embedding.post(path, query="the roof", documents=[SHORT[0], {"text": SHORT[1]}, *SHORT[2:]]).json()
    assert [each["index"] for each in said["results"]] == order
    assert [each["relevance_score"] for each in said["results"]] == pytest.approx([scores[n] for n in order], abs=1e-6)
    assert [each["document"]["text"] for each in said["results"]] == [SHORT[n] for n in order]
    short = embedding.post(path, query="the roof", documents=SHORT, top_n=2, return_documents=False).json()["results"]
    assert [set(each) for each in short] == [{"index", "relevance_score"}] * 2


def test_a_cross_encoder_scores_behind_a_key(ranking: Server, cross: Path) -> None:
    assert ranking.post("/score", text_1="the roof", text_2=SHORT).status_code == 401
    ranking.client.headers["Authorization"] = f"Bearer {KEY}"
    scores = [each.score for each in LLM(cross, device="cpu").score("the roof", SHORT)]
    for path in ("/score", "/v1/score"):
        said = ranking.post(path, text_1="the roof", text_2=SHORT).json()
        assert [each["score"] for each in said["data"]] == pytest.approx(scores, abs=1e-5)
        assert said["usage"]["prompt_tokens"] > 0
    pairs = ranking.post("/score", text_1=["the roof", "a tile"], text_2=[SHORT[3], "the roof"]).json()["data"]
    assert len(pairs) == 2
    assert pairs[0]["score"] == pytest.approx(scores[3], abs=1e-5)
    ranked = ranking.post("/v1/rerank", query="the roof", documents=SHORT).json()["results"]
    assert [each["relevance_score"] for each in ranked] == pytest.approx(sorted(scores, reverse=True), abs=1e-5)
    refused = ranking.post("/v1/embeddings", input="a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported")


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("/v1/embeddings", {"input": TEXTS[4]}, "62 tokens, and the model reads 40"),
        ("/v1/embeddings", {"input": "roof " * 200_000}, "tokens, and the model reads 40"),
        ("/v1/embeddings", {"input": ["a"] * 10_000}, "input has 10,000 texts; may have at most 2,048"),
        ("/v1/embeddings", {"input": []}, "input must be a text"),
        ("/v1/embeddings", {"input": [1, "a"]}, "input must be a text"),
        ("/v1/embeddings", {"input": [[1], []]}, "input must be a text"), ("/v1/embeddings", {"input": [[1, 9999]]}, "has 9999"),
        ("/v1/embeddings", {"input": None}, "input must be"), ("/v1/embeddings", {}, "input is missing"),
        ("/v1/embeddings", {"input": "a", "dimensions": 33}, "1 to 32"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ("/v1/embeddings", {"input": "a", "prompt_name": "x"}, "the model has 'query', 'document'"),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 41}, "from 1 to 40"),
        ("/v1/embeddings", {"input": "a", "temperature": 1}, "'temperature' is no field"),
        ("/v1/embeddings", {"input": "\ud800"}, ""), ("/v1/embeddings", {"input": "a", "model": "b"}, "is not served here"),
        ("/rerank", {"query": "a", "documents": []}, "documents must be"), ("/rerank", {"query": "a"}, "documents is missing"),
        ("/rerank", {"query": "a", "documents": ["b", 1]}, "documents must be"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n is 0"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "must have one, or as many"),
        ("/score", {"text_1": 3, "text_2": "a"}, "text_1 must be a text"),
        ("/v1/completions", {"prompt": "a"}, "generates none"), ("/v1/chat/completions", {"messages": []}, "generates none"),
        ("/v1/responses", {"input": "a"}, "generates none"),
    ],
)  # fmt: skip
def test_refusals(path: str, fields: dict[str, Any], said: str, embedding: Server) -> None:
    # half of a surrogate pair is written as an escape
    answer = embedding.client.post(path, content=json.dumps(fields), headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert said in error["message"]
    if "model reads" in said:
        assert error["param"] == "input"
    if "from 1 to 40" in said:
        assert error["param"] == "truncate_prompt_tokens"


def test_nan_is_told_and_not_sent() -> None:
    data = np.array([[1, 2], [3, np.nan], [np.inf, 0]], dtype="<f4")
    assert vectors_of(data[:1].tobytes(), 1).tolist() == [[1, 2]]
    with pytest.raises(Refusal, match="text 1 has nan or infinity") as caught:
        vectors_of(data.tobytes(), 3)
    assert caught.value.status == 500


def test_a_generating_server_embeds_nothing(server: Server) -> None:
    for path, fields in (("/v1/embeddings", {"input": "a"}), ("/rerank", {"query": "a", "documents": ["b"]})):
        answer = server.post(path, **fields)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported")
        assert "--task embed" in answer.json()["error"]["message"]


def test_many_requests_at_once_are_batched_and_each_gets_its_own(embedding: Server, due: torch.Tensor) -> None:
    def ask(n: int) -> np.ndarray:
        return found(embedding.post("/v1/embeddings", input=[SHORT[n % 4]] * (1 + n % 5)))

    with ThreadPoolExecutor(16) as threads:
        for n, vectors in enumerate(threads.map(ask, range(120))):
            assert vectors.shape == (1 + n % 5, 32)
            np.testing.assert_allclose(vectors, due[n % 4].expand(1 + n % 5, -1), atol=1e-5)
    metrics = embedding.client.get("/metrics").text
    assert 'request_success_total{finished_reason="stop",model_name="tiny"}' in metrics
    assert 'num_requests_waiting{model_name="tiny"} 0.0' in metrics


def test_the_queue_is_bounded_and_a_client_that_leaves_frees_its_place(embedding: Server) -> None:
    refused = embedding.post("/v1/embeddings", input=[[5] * LONGEST] * 2048)
    assert refused.status_code == 400
    assert "queue has room for 80,000 (--max-waiting-tokens)" in refused.json()["error"]["message"]
    assert found(embedding.post("/v1/embeddings", input=[[5] * (LONGEST - 2)] * 2048)).shape == (2048, 32)
    body = {"input": [" ".join(["roof"] * (LONGEST - 4))] * 2048}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{embedding.url}/v1/embeddings", json=body, timeout=httpx.Timeout(10, read=0.05), trust_env=False)
    assert found(embedding.post("/v1/embeddings", input="the roof")).shape == (1, 32)
    # the one that has left is noticed a moment later
    until = time.monotonic() + PATIENCE_S
    while 'num_requests_waiting{model_name="tiny"} 0.0' not in (text := embedding.client.get("/metrics").text):
        assert time.monotonic() < until, text
        time.sleep(0.05)
