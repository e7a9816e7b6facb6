"""Vectors and scores of texts against Transformers and definitions, and against sentence-transformers where it is installed."""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from rooftile.engine import LLM, SamplingParams
from rooftile.engine.embedding.embedder import batches
from rooftile.engine.embedding.folder import POOLINGS
from rooftile.engine.embedding.packed import PackedDecoder
from rooftile.engine.embedding.pooling import pool
from rooftile.engine.embedding.reading import ReadText
from rooftile.errors import InvalidInput, Unsupported
from rooftile.models import Decoder
from tests.engine.embedding_folders import (
    LONGEST,
    PROMPTS,
    SIZES,
    TEXTS,
    WORDS,
    decoder_folder,
    described,
    encoder_folder,
    tokenizer,
    written,
)
from tests.models.checkpoints import prompts, saved, theirs

MEAN = ("Pooling", {"pooling_mode_mean_tokens": True})
LAST = ("Pooling", {"pooling_mode": "lasttoken"})
NORMALISE = ("Normalize", {})


def definition(folder: Path, texts: list[str]) -> list[Tensor]:
    """The hidden states of each text, read alone and cut as Transformers does."""
    model, own = transformers.AutoModel.from_pretrained(folder).eval(), transformers.AutoTokenizer.from_pretrained(folder)
    ids = [torch.tensor(own(text, truncation=True, max_length=LONGEST)["input_ids"])[None] for text in texts]
    with torch.inference_mode():
        return [model(each).last_hidden_state[0] for each in ids]


def vectors(llm: LLM, texts: Any, **options: Any) -> Tensor:
    return torch.stack([each.embedding for each in llm.embed(texts, truncate_prompt_tokens=-1, **options)])


def test_a_folder_without_modules_has_the_mean_of_an_encoder_and_the_last_token_of_a_decoder(tmp_path: Path) -> None:
    encoder, decoder = encoder_folder(tmp_path / "encoder"), decoder_folder(tmp_path / "decoder")
    expected = torch.stack([x.mean(0) for x in definition(encoder, TEXTS)])
    torch.testing.assert_close(vectors(LLM(encoder), TEXTS), expected, atol=1e-5, rtol=1e-5)
    expected = torch.stack([x[-1] for x in definition(decoder, TEXTS)])
    torch.testing.assert_close(vectors(LLM(decoder), TEXTS), expected, atol=1e-5, rtol=1e-5)


def test_batches_of_any_size_give_the_same_vectors_in_the_order_of_the_texts(tmp_path: Path) -> None:
    folder = described(encoder_folder(tmp_path), MEAN, NORMALISE)
    texts = [*TEXTS, *(" ".join(WORDS[n % 7 : n % 19]) for n in range(40))]
    alone = torch.cat([vectors(LLM(folder), text) for text in texts])
    for most in (8192, 50, 1):
        torch.testing.assert_close(vectors(LLM(folder, max_batched_tokens=most), texts), alone, atol=1e-6, rtol=1e-5)
    assert torch.allclose(alone.norm(dim=1), torch.ones(len(texts)))


def test_batches_hold_at_most_so_many_tokens_and_each_text_once() -> None:
    texts = [ReadText([7] * length) for length in (3, 4, 9, 1, 1, 1, 7)]
    found = [[len(text.tokens) for text in batch] for batch in batches(texts, 7)]
    assert found == [[3, 4], [9], [1, 1, 1], [7]]
    assert list(batches([], 7)) == []


@pytest.mark.parametrize("kind", POOLINGS)
def test_pooling_is_its_definition(kind: str) -> None:
    hidden, cu = torch.randn(14, 6), torch.tensor([0, 1, 8, 14], dtype=torch.int32)
    each = [hidden[a:b] for a, b in pairwise(cu.tolist())]
    definitions = {
        "cls": lambda x: x[0], "lasttoken": lambda x: x[-1], "max": lambda x: x.amax(0), "mean": lambda x: x.mean(0),
        "mean_sqrt_len_tokens": lambda x: x.sum(0) / len(x) ** 0.5,
        "weightedmean": lambda x: (x * torch.arange(1, len(x) + 1)[:, None]).sum(0) / sum(range(len(x) + 1)),
    }  # fmt: skip
    torch.testing.assert_close(pool(hidden, cu, [kind]), torch.stack([definitions[kind](x) for x in each]))
    both = pool(hidden, cu, [kind, "cls"])
    assert both.shape == (3, 12)
    assert torch.equal(both[:, 6:], hidden[[0, 1, 8]])


def test_a_prompt_a_projection_and_a_cut_vector(tmp_path: Path) -> None:
    folder = described(
        encoder_folder(tmp_path), MEAN, ("Dense", {"activation_function": "torch.nn.Tanh"}), NORMALISE, prompts=PROMPTS
    )
    weight, bias = torch.randn(16, 32), torch.randn(16)
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
    llm = LLM(folder)
    means = torch.stack([x.mean(0) for x in definition(folder, [PROMPTS["query"] + text for text in TEXTS])])
    whole = torch.tanh(means @ weight.T + bias)
    normal = torch.nn.functional.normalize
    torch.testing.assert_close(vectors(llm, TEXTS, prompt_name="query"), normal(whole), atol=1e-5, rtol=1e-5)
    cut = vectors(llm, TEXTS, prompt_name="query", dimensions=5)
    torch.testing.assert_close(cut, normal(whole[:, :5]), atol=1e-5, rtol=1e-5)
    # token ids are read as they are
    ids = tokenizer()("query : the roof")["input_ids"]
    torch.testing.assert_close(vectors(llm, [ids]), vectors(llm, "query : the roof"))
    assert llm.embed([ids])[0].prompt_tokens == len(ids)


def test_a_decoder_that_generates_embeds_too(tmp_path: Path) -> None:
    folder = decoder_folder(tmp_path, "Qwen3ForCausalLM")
    alone = vectors(LLM(folder, task="embed"), TEXTS)
    llm = LLM(folder, num_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    before = llm.generate(["the roof"], params)[0].outputs[0].token_ids
    torch.testing.assert_close(vectors(llm, TEXTS), alone, atol=1e-6, rtol=1e-5)
    assert llm.generate(["the roof"], params)[0].outputs[0].token_ids == before
    assert "embed" not in repr(llm)


def test_a_folder_of_sentence_transformers_embeds_unless_it_is_asked_to_generate(tmp_path: Path) -> None:
    folder = described(decoder_folder(tmp_path, "Qwen3ForCausalLM"), LAST, NORMALISE)
    llm = LLM(folder)
    with pytest.raises(InvalidInput, match="was read to embed texts"):
        llm.generate("the roof")
    with pytest.raises(InvalidInput, match="was read to embed texts"):
        llm.lend()
    assert "vectors of 32 numbers" in repr(llm)
    assert LLM(folder, task="generate", num_blocks=64).generate("the roof", SamplingParams(max_tokens=2))[0].error is None
    llm.close()
    with pytest.raises(InvalidInput, match="was closed"):
        llm.embed("the roof")


def test_a_cross_encoder_scores_as_transformers(tmp_path: Path) -> None:
    folder = encoder_folder(tmp_path, "BertForSequenceClassification", num_labels=1)
    model, own = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval(), tokenizer()
    llm, query = LLM(folder), "the roof of the house"
    for asked, answers in ((query, TEXTS), (query * 20, TEXTS), ([*TEXTS[1:], query], TEXTS)):
        queries = [asked] * len(answers) if isinstance(asked, str) else asked
        expected = []
        for one, other in zip(queries, answers, strict=True):
            # in lists: alone, an empty text is no second one for it
            given = own([one], [other], truncation=True, max_length=LONGEST, return_tensors="pt")
            with torch.inference_mode():
                expected.append(model(**given).logits.sigmoid().item())
        found = llm.score(asked, answers, truncate_prompt_tokens=-1)
        assert [each.score for each in found] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(Unsupported, match="ask it with score"):
        llm.embed("the roof")


def test_vectors_score_by_their_cosine_with_prompts(tmp_path: Path) -> None:
    llm = LLM(described(encoder_folder(tmp_path), MEAN, prompts=PROMPTS))
    answers = TEXTS[:4]
    one, others = vectors(llm, "the roof", prompt_name="query"), vectors(llm, answers, prompt_name="document")
    expected = torch.nn.functional.cosine_similarity(one, others)
    found = llm.score("the roof", answers)
    assert [each.score for each in found] == pytest.approx(expected.tolist(), abs=1e-6)
    assert found[0].prompt_tokens == 2 * len(tokenizer()("query : the roof")["input_ids"])
    with pytest.raises(InvalidInput, match="2 queries for 4 documents"):
        llm.score(["a", "b"], answers)


def test_ten_thousand_texts_and_one_of_a_megabyte(tmp_path: Path) -> None:
    llm = LLM(described(encoder_folder(tmp_path), MEAN, NORMALISE))
    found = llm.embed(["the roof", "hello"] * 5000)
    assert len(found) == 10_000
    assert all(torch.allclose(each.embedding, found[n % 2].embedding, atol=1e-6) for n, each in enumerate(found))
    with pytest.raises(InvalidInput, match="tokens, and the model reads 40"):
        llm.embed("roof " * 200_000)
    assert llm.embed("roof " * 200_000, truncate_prompt_tokens=-1)[0].prompt_tokens == LONGEST


def test_nan_is_told(tmp_path: Path) -> None:
    llm = LLM(encoder_folder(tmp_path))
    llm.embedding.embedder._encoder.embedding[VOCABULARY_TILE] = float("nan")
    with pytest.raises(InvalidInput, match="text 1 has nan"):
        llm.embed(["the roof", "a tile"])
    assert llm.embed(["the roof"])[0].embedding.isfinite().all()


VOCABULARY_TILE = 4 + WORDS.index("tile")


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda llm: llm.embed("roof " * 60), "62 tokens, and the model reads 40"),
        (lambda llm: llm.embed("a", prompt_name="passage"), "prompt_name is 'passage'; the model has 'query', 'document'"),
        (lambda llm: llm.embed([[1, 2]], prompt_name="query"), "before which no prompt is put"),
        (lambda llm: llm.embed("a", dimensions=33), "may be cut to 1 to 32"),
        (lambda llm: llm.embed("a", dimensions=0), "may be cut to 1 to 32"),
        (lambda llm: llm.embed("a", truncate_prompt_tokens=0), "truncate_prompt_tokens is 0"),
        (lambda llm: llm.embed("a", truncate_prompt_tokens=41), "from 1 to 40"),
        (lambda llm: llm.embed([[1, 99]]), "has 99 for a token"), (lambda llm: llm.embed([[]]), "no token"),
        (lambda llm: llm.embed(["\ud800"]), "surrogate"), (lambda llm: llm.embed(3), "must be a text"),
        (lambda llm: llm.embed("a", prompt_name=3), "prompt_name is 3; the model has 'query', 'document'"),
        (lambda llm: llm.embed("a", prompt_name=["query"]), r"prompt_name is \['query'\]; the model has"),
        (lambda llm: llm.score(None, "a"), "query is None; must be a text, or a list of texts"),
        (lambda llm: llm.score("a", {"text": "b"}), "documents is {'text': 'b'}; must be a text"),
        (lambda llm: llm.score("a", ["b", [1]]), r"documents has \[1\] at place 1; must be a text"),
        (lambda llm: llm.score("a", b"b"), "documents is b'b'; must be a text"),
    ],
)  # fmt: skip
def test_refusals(ask: Any, said: str, refusing: LLM) -> None:
    with pytest.raises(InvalidInput, match=said):
        ask(refusing)


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(described(encoder_folder(tmp_path_factory.mktemp("refusing")), MEAN, NORMALISE, prompts=PROMPTS))


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ([MEAN, ("LSTM", {})], "a module sentence_transformers.models.LSTM at place 2"),
        ([("Pooling", {"pooling_mode": "median"})], "has pooling"),
        ([("Pooling", {"include_prompt": False})], "include_prompt"),
        ([MEAN, ("Dense", {"activation_function": "torch.nn.Softplus"})], "Softplus"), ([NORMALISE], "Normalize at place 1"),
    ],
)  # fmt: skip
def test_modules_that_are_not_here_are_refused(modules: list[Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=said):
        LLM(described(encoder_folder(tmp_path), *modules))


def test_folders_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    folder = described(encoder_folder(tmp_path), MEAN)
    with pytest.raises(Unsupported, match="speculative is given, and the model gives vectors"):
        LLM(folder, speculative="lookup")
    with pytest.raises(InvalidInput, match="is an encoder, bert, which embeds texts"):
        LLM(folder, task="generate")
    listed = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*listed, {"type": "a.Dense", "path": "../elsewhere"}]))
    with pytest.raises(InvalidInput, match="outside of the folder"):
        LLM(folder)
    (folder / "modules.json").write_text('{"a": 1}')
    with pytest.raises(InvalidInput, match="must be a list"):
        LLM(folder)


@pytest.mark.parametrize("kind", ["encoder", "decoder", "xlm-roberta", "modernbert"])
def test_vectors_are_those_of_sentence_transformers(kind: str, tmp_path: Path) -> None:
    theirs = pytest.importorskip("sentence_transformers")
    base = pytest.importorskip("sentence_transformers.base.modules")
    pooled = pytest.importorskip("sentence_transformers.sentence_transformer.modules")

    torch.manual_seed(0)
    if kind == "encoder":
        inner, pooling = encoder_folder(tmp_path / "inner"), "cls"
    elif kind == "decoder":
        inner, pooling = decoder_folder(tmp_path / "inner"), "lasttoken"
    elif kind == "xlm-roberta":
        config = transformers.XLMRobertaConfig(**SIZES | {"type_vocab_size": 1, "pad_token_id": 0})
        inner, pooling = written(transformers.XLMRobertaModel(config), tmp_path / "inner"), "mean"
    else:
        config = transformers.ModernBertConfig(
            **SIZES | {"num_hidden_layers": 4, "local_attention": 6}, pad_token_id=0, cls_token_id=2, sep_token_id=3
        )
        inner, pooling = written(transformers.ModernBertModel(config), tmp_path / "inner"), "max"
    parts = [base.Transformer(str(inner)), pooled.Pooling(32, pooling), base.Dense(32, 16), base.Normalize()]
    model = theirs.SentenceTransformer(modules=parts, prompts=PROMPTS, device="cpu")
    model.save(str(tmp_path / "whole"))
    llm = LLM(tmp_path / "whole")
    for prompt in (None, "query"):
        expected = torch.from_numpy(model.encode(TEXTS, prompt_name=prompt))
        torch.testing.assert_close(vectors(llm, TEXTS, prompt_name=prompt), expected, atol=1e-5, rtol=1e-5)


def test_scores_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    theirs = pytest.importorskip("sentence_transformers")
    folder = encoder_folder(tmp_path / "inner", "BertForSequenceClassification", num_labels=1)
    model = theirs.CrossEncoder(str(folder), device="cpu")
    for activation in (torch.nn.Sigmoid(), torch.nn.Identity()):
        model.activation_fn = activation
        model.save(str(tmp_path / "whole"))
        expected = model.predict([("the roof", text) for text in TEXTS])
        found = LLM(tmp_path / "whole").score("the roof", TEXTS, truncate_prompt_tokens=-1)
        assert [each.score for each in found] == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_warm_up_runs_texts_of_all_kinds_and_changes_nothing(tmp_path: Path) -> None:
    llm = LLM(encoder_folder(tmp_path))
    before = vectors(llm, TEXTS)
    seen: list[int] = []
    llm.embedding.embedder._run.register_forward_hook(lambda module, given, out: seen.append(len(out)))
    llm.embedding.embedder.warm_up(LONGEST)
    assert seen == [1, 32, 7, LONGEST]
    assert torch.equal(vectors(llm, TEXTS), before)


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "gpt_oss"])
@torch.inference_mode()
def test_a_packed_decoder_has_windows_softcaps_and_sinks(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    packed = PackedDecoder(Decoder.from_folder(saved(model, tmp_path), headless=True))
    several = prompts()
    cu = torch.tensor([0, *accumulate(map(len, several))], dtype=torch.int32)
    hidden = packed(torch.cat(several), cu).split([len(each) for each in several])
    for tokens, ours in zip(several, hidden, strict=True):
        torch.testing.assert_close(ours, model.base_model(tokens[None]).last_hidden_state[0], atol=2e-5, rtol=2e-5)
