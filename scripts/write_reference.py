"""Writes docs/reference/api.md from the docstrings and signatures of the public names."""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from rooftile import FULL

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "api.md"

# the parts of the page, each by the title of its first section: a reader finds a name by a few links
PARTS = {
    "Functions": "Attention", "Serving": "Engine", "Number formats": "Formats and training", "Masks": "Masks, blocks and methods",
    "Errors": "Errors and modules", "flash-attn 2 names": "Names of flash-attn",
}  # fmt: skip
# a section: its title, its module, and its names in the order in which a reader needs them
SECTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "Functions",
        "rooftile",
        (
            "attention", "attention_with_lse", "attention_packed", "attention_packed_with_lse", "merge", "explain",
            "enable", "disable", "enabled", "is_enabled", "status", "fuse", "unfuse", "doctor",
        ),
    ),
    ("FP8 and INT8 attention", "rooftile", ("Precision", "quantise_qkv", "attention_quantised", "attention_quantised_with_lse")),
    ("Attention to a paged KV cache", "rooftile", ("attention_paged", "attention_paged_with_lse")),
    ("The paged KV cache", "rooftile.kvcache", ("BlockPool", "BlockTable", "OutOfBlocks", "Pages", "PagedKV")),
    (
        "Serving",
        "rooftile.engine",
        ("LLM", "EngineConfig", "AsyncEngine", "EngineStats", "SamplingParams", "RequestOutput", "CompletionOutput", "Logprob"),
    ),
    (
        "Number formats",
        "rooftile.numerics",
        (
            "quantise", "quantise_blocks", "quantise_nvfp4", "fake_quantise", "hadamard", "inverse_hadamard", "Scaled",
            "BlockScaled", "TwoLevelScaled", "QuantisedQKV", "quantise_rows", "QuantisedRows",
        ),
    ),
    ("Quantised weights", "rooftile", ("quantise_weight", "quantise_model", "QuantisedWeight", "linear")),
    (
        "Fused operations",
        "rooftile.fused",
        (
            "rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "gated", "swiglu", "geglu", "rotary", "softmax",
            "cross_entropy", "linear_cross_entropy",
        ),
    ),
    ("Optimiser", "rooftile.optim", ("AdamW",)),
    (
        "Quantisation-aware training",
        "rooftile.qat",
        (
            "prepare", "restore", "off", "status", "convert", "save", "state_dict", "load_state_dict", "QuantisedLinear",
            "SparseLinear", "Status",
        ),
    ),
    ("A format for each layer", "rooftile", ("plan",)),
    ("What `plan` returns", "rooftile.planning", ("Plan",)),
    ("2:4 weights", "rooftile.sparsity", ("two_four", "compress", "TwoFour", "Recipe")),
    ("Masks", "rooftile", ("Mask", "FULL", "CAUSAL", "Window", "Prefix", "Chunk")),
    ("Lists of blocks", "rooftile", ("Blocks",)),
    ("FlexAttention's function", "rooftile.integrations.flex_attention", ("flex_attention",)),
    (
        "Approximate attention",
        "rooftile.approximate",
        (
            "linear", "linear_step", "performer", "Features", "linformer", "sparse_transformer", "reformer", "lsh", "routing",
            "update_centroids", "commitment_loss", "Loki", "LokiLayers", "native_sparse", "compress", "choose_blocks",
            "selected_attention",
        ),
    ),
    ("Errors", "rooftile", ("InvalidInput", "Unsupported")),
    ("As a module", "rooftile.nn", ("Attention",)),
    ("A decoder to train", "rooftile.models", ("TrainableDecoder",)),
    (
        "flash-attn 2 names",
        "rooftile.integrations.flash_attn",
        (
            "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
            "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
            "flash_attn_with_kvcache", "install", "uninstall",
        ),
    ),
    (
        "flash-attn 3 names",
        "rooftile.integrations.flash_attn_3",
        ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"),
    ),
    ("flash-attn 4 names", "rooftile.integrations.flash_attn_4", ("flash_attn_func", "flash_attn_varlen_func")),
    (
        "flash-attn padding",
        "rooftile.integrations.flash_attn_padding",
        ("unpad_input", "pad_input", "index_first_axis", "index_put_first_axis"),
    ),
    ("flash-attn rotary", "rooftile.integrations.flash_attn_rotary", ("apply_rotary_emb",)),
)  # fmt: skip


def page() -> str:
    """Returns the whole page in Markdown."""
    head = "# Reference\n\nWritten by `scripts/write_reference.py` from the docstrings; `make tables` rewrites it."
    return "\n\n".join([head, *(part for section in SECTIONS for part in section_text(*section))]) + "\n"


def section_text(title: str, module: str, names: tuple[str, ...]) -> Iterator[str]:
    if title in PARTS:
        yield f"## {PARTS[title]}"
    yield f"### {title}"
    if module != "rooftile":
        yield f"In `{module}`."
    for name in names:
        yield from entry(name, getattr(pkgutil.resolve_name(module), name))


def entry(name: str, thing: object) -> Iterator[str]:
    """Yields the heading, the signature and the docstring of one name."""
    yield f"#### `{name}`"
    if not callable(thing):
        yield f"The mask `{thing}`: see the table of masks in [masks as intervals](../concepts/masks-as-intervals.md)."
        return
    if not (inspect.isclass(thing) and issubclass(thing, Exception)):
        yield f"```text\n{signature(name, thing)}\n```"
    yield from docstring(inspect.getdoc(thing) or "")


def signature(name: str, thing: object) -> str:
    """Returns the signature on one line if it fits, else with one argument per line."""
    found = inspect.signature(thing)
    arguments = [str(p) for p in found.parameters.values()]
    kinds = [p.kind for p in found.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        arguments.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    arguments = [re.sub(r"'([^']*)'", r"\1", argument).replace(repr(FULL), "FULL") for argument in arguments]
    returned = found.return_annotation
    tail = "" if returned is inspect.Signature.empty or inspect.isclass(thing) else f" -> {returned}".replace("'", "")
    line = f"{name}({', '.join(arguments)}){tail}"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {a},\n" for a in arguments) + f"){tail}"


def docstring(text: str) -> Iterator[str]:
    """Yields a docstring's paragraphs: `Args:` and `Raises:` as lists, `Example:` as a fence."""
    for block in re.split(r"\n\n(?=\S)", text):
        title, _, body = block.partition("\n")
        if title == "Example:":
            # leave out the directives for the docs test
            yield "```pycon\n" + re.sub(r" +# doctest:.*", "", inspect.cleandoc(body)) + "\n```"
        elif title in ("Args:", "Raises:"):
            items = re.findall(r"^(\w[\w, ]*): (.*?)(?=^\w[\w, ]*: |\Z)", inspect.cleandoc(body), re.DOTALL | re.MULTILINE)
            word = "Arguments" if title == "Args:" else "Raises"
            yield f"{word}:\n\n" + "\n".join(f"- `{name}`: {' '.join(words.split())}" for name, words in items)
        elif title == "Returns:":
            yield "Returns " + " ".join(body.split())
        elif block.startswith(">>>"):
            yield f"```pycon\n{block}\n```"
        else:
            yield block


if __name__ == "__main__":
    due = page()
    if "--check" in sys.argv:
        sys.exit(0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == due else f"{PAGE.name} is out of date")
    PAGE.write_text(due, encoding="utf-8")
    print(f"wrote {PAGE.relative_to(PAGE.parents[2])}")
