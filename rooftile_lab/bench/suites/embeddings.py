"""Vectors of texts of 16 to 512 tokens, mixed, by `LLM.embed`, beside padded batches of Transformers and sentence-transformers.

Each gets the same texts of words that are one token, on a model with random weights. `padded` does what sentence-transformers
does: texts sorted by length, batches of 32, the mean of the hidden states. Times have tokenising in them.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

from rooftile.cost.session import Session
from rooftile.engine import LLM
from rooftile.errors import Unsupported
from rooftile.hardware.clock import HostClock
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import beside_peers, contest, refused, with_measures
from rooftile_lab.bench.run import Progress

# hidden size, layers, heads, width of the feed-forward
SIZES = {
    "tiny": (64, 2, 2, 128), "minilm": (384, 6, 12, 1536), "bge-small": (384, 12, 12, 1536), "bge-base": (768, 12, 12, 3072),
    "bge-large": (1024, 24, 16, 4096),
}  # fmt: skip
GPU = ("bge-small-bf16", "bge-base-bf16", "bge-large-bf16")
CPU = ("tiny-fp32", "minilm-fp32", "bge-small-fp32")
QUICK = ("bge-base-bf16",)
BATCH, SHORTEST, LONGEST, WORDS = 32, 16, 512, 30_000
# the most relative distance to a peer's vectors
CLOSE = {"fp32": 1e-4, "bf16": 3e-2}


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """A row for each contestant; `tokens_per_s` counts the tokens of texts, and none of padding."""
    on_gpu = session.device.type == "cuda"
    for name in names:
        size, _, dtype = name.rpartition("-")
        texts = texts_of(2048 if on_gpu else 16 if size == "tiny" else 48)
        with tempfile.TemporaryDirectory() as place:
            folder = write(Path(place), *SIZES[size])
            say(f"{name}: {len(texts)} texts")
            embed, why = contestants(folder, dtype, session.device)
            tokens = sum(text.count(" ") + 3 for text in texts)
            _check(embed, texts[:64], CLOSE[dtype])
            works = {who: partial(run, texts) for who, run in embed.items()}
            named: dict[str, Any] = {"suite": "embeddings", "case": name, "phase": "embed", "problem": {"texts": len(texts)}}
            rows = beside_peers(contest(session, works, HostClock(400.0), rounds=3, dtype=dtype, **named))
            for row in rows.values():
                yield with_measures(row, tokens_per_s=tokens / (row.median_us or 1.0) * 1e6)
            yield from refused(session, why, dtype=dtype, **named)


def texts_of(count: int) -> list[str]:
    """Texts whose lengths are spread evenly between the shortest and the longest, in random order."""
    draw = random.Random(0)
    lengths = [SHORTEST + (LONGEST - SHORTEST) * n // max(1, count - 1) for n in range(count)]
    draw.shuffle(lengths)
    return [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(length - 2)) for length in lengths]


def write(folder: Path, hidden: int, layers: int, heads: int, ffn: int) -> Path:
    """Writes a BERT with random weights, a tokenizer of words, and the files of sentence-transformers."""
    torch.manual_seed(0)
    vocabulary = {word: id for id, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{n}" for n in range(WORDS))])}
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=ffn, max_position_embeddings=LONGEST,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    own = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="[UNK]", pad_token="[PAD]", model_max_length=LONGEST
    )  # fmt: skip
    own.save_pretrained(folder)
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    listed = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for path, said in (
        ("1_Pooling", {"word_embedding_dimension": hidden, "pooling_mode_mean_tokens": True}),
        ("2_Normalize", {}),
    ):
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(said))
    return folder


def contestants(
    folder: Path, dtype: str, device: torch.device
) -> tuple[dict[str, Callable[[list[str]], Tensor]], dict[str, str]]:  # fmt: skip
    """Returns functions from texts to vectors by their names, and why others are absent."""
    llm = LLM(folder, dtype=dtype, device=device)
    found: dict[str, Callable[[list[str]], Tensor]] = {
        "rooftile": lambda texts: torch.stack([each.embedding for each in llm.embed(texts)]),
        "padded": partial(padded, *_transformers(folder, dtype, device)),
    }
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        return found, {"sentence-transformers": "it is not installed; pip install sentence-transformers"}
    wanted = torch.bfloat16 if dtype == "bf16" else torch.float32
    model = SentenceTransformer(str(folder), device=str(device), model_kwargs={"dtype": wanted})
    found["sentence-transformers"] = lambda texts: torch.from_numpy(
        model.encode(texts, batch_size=BATCH, show_progress_bar=False).astype("float32")
    )
    return found, {}


@torch.inference_mode()
def padded(model: Any, tokenizer: Any, texts: list[str]) -> Tensor:
    """Vectors by Transformers: texts sorted by length, in padded batches."""
    order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
    found = []
    for first in range(0, len(texts), BATCH):
        batch = tokenizer([texts[place] for place in order[first : first + BATCH]], padding=True, return_tensors="pt")
        given = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")}
        hidden, mask = model(**given).last_hidden_state, given["attention_mask"][..., None]
        found.append(torch.nn.functional.normalize((hidden * mask).sum(1).float() / mask.sum(1), dim=-1))
    result = torch.empty(len(texts), found[0].shape[1])
    result[order] = torch.cat(found).cpu()
    return result


def _transformers(folder: Path, dtype: str, device: torch.device) -> tuple[Any, Any]:
    wanted = torch.bfloat16 if dtype == "bf16" else torch.float32
    model = transformers.AutoModel.from_pretrained(folder, dtype=wanted, attn_implementation="sdpa").eval().to(device)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def _check(embed: dict[str, Callable[[list[str]], Tensor]], texts: list[str], close: float) -> None:
    """Compares the vectors of all contestants before any of them is timed."""
    vectors = {who: run(texts) for who, run in embed.items()}
    for who, theirs in vectors.items():
        distance = (theirs - vectors["rooftile"]).norm(dim=1).max().item()
        if not distance <= close:
            raise Unsupported(f"the vectors of {who} are {distance:.2g} away from ours; may be at most {close:.2g}")
