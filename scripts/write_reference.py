"""Writes the pages of docs/reference/api/ from the docstrings and signatures of the public names."""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rooftile import FULL

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "reference" / "api"


class Section(NamedTuple):
    """A heading, a module, and its names in the order in which a reader needs them."""

    title: str
    module: str
    names: tuple[str, ...]


class Page(NamedTuple):
    """A file of the reference, without its suffix, with its title."""

    file: str
    title: str
    sections: tuple[Section, ...]


PAGES = (
    Page(
        "attention",
        "Exact attention",
        (
            Section(
                "Functions",
                "rooftile",
                (
                    "attention", "attention_with_lse", "attention_packed", "attention_packed_with_lse", "merge", "explain",
                ),
            ),
            Section("Masks", "rooftile", ("Mask", "FULL", "CAUSAL", "Window", "Prefix", "Chunk", "Targets")),
            Section("Lists of blocks", "rooftile", ("Blocks",)),
            Section(
                "FP8 and INT8 attention",
                "rooftile",
                ("Precision", "quantise_qkv", "attention_quantised", "attention_quantised_with_lse"),
            ),
            Section("Attention to a paged KV cache", "rooftile", ("attention_paged", "attention_paged_with_lse")),
            Section("Errors", "rooftile", ("InvalidInput", "Unsupported")),
        ),
    ),
    Page(
        "kvcache",
        "The paged KV cache",
        (Section("Blocks and pages", "rooftile.kvcache", ("BlockPool", "BlockTable", "OutOfBlocks", "Pages", "PagedKV")),),
    ),
    Page(
        "integrations",
        "In other libraries",
        (
            Section("SDPA and Transformers", "rooftile", ("enable", "disable", "enabled", "is_enabled", "status")),
            Section("Fused models", "rooftile", ("fuse", "unfuse")),
            Section("FlexAttention's function", "rooftile.integrations.flex_attention", ("flex_attention",)),
        ),
    ),
    Page(
        "flash-attn",
        "Names of flash-attn",
        (
            Section(
                "flash-attn 2 names",
                "rooftile.integrations.flash_attn",
                (
                    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
                    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
                    "flash_attn_with_kvcache", "install", "uninstall",
                ),
            ),
            Section(
                "flash-attn 3 names",
                "rooftile.integrations.flash_attn_3",
                ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"),
            ),
            Section("flash-attn 4 names", "rooftile.integrations.flash_attn_4", ("flash_attn_func", "flash_attn_varlen_func")),
            Section(
                "flash-attn padding",
                "rooftile.integrations.flash_attn_padding",
                ("unpad_input", "pad_input", "index_first_axis", "index_put_first_axis"),
            ),
            Section("flash-attn rotary", "rooftile.integrations.flash_attn_rotary", ("apply_rotary_emb",)),
        ),
    ),
    Page(
        "fused",
        "Fused operations and the optimiser",
        (
            Section(
                "Fused operations",
                "rooftile.fused",
                (
                    "rms_norm", "rms_norm_gated", "layer_norm", "add_rms_norm", "add_layer_norm", "gated", "swiglu", "geglu",
                    "rotary", "softmax",
                    "cross_entropy", "linear_cross_entropy", "rms_norm_quantised", "layer_norm_quantised",
                    "add_rms_norm_quantised", "add_layer_norm_quantised", "gated_quantised", "swiglu_quantised",
                    "geglu_quantised",
                ),
            ),
            Section("Optimiser", "rooftile.optim", ("AdamW",)),
        ),
    ),
    Page(
        "moe",
        "Experts",
        (
            Section(
                "Routers, experts and their balance",
                "rooftile.moe",
                ("route", "experts", "balance_loss", "update_bias", "Router", "Routing"),
            ),
            Section("As a module", "rooftile.nn", ("DeepSeekMoE",)),
        ),
    ),
    Page(
        "numerics",
        "Number formats",
        (
            Section(
                "Formats and scales",
                "rooftile.numerics",
                (
                    "quantise", "quantise_blocks", "quantise_nvfp4", "fake_quantise", "hadamard", "inverse_hadamard", "Scaled",
                    "BlockScaled", "TwoLevelScaled", "QuantisedQKV", "quantise_rows", "QuantisedRows",
                ),
            ),
        ),
    ),
    Page(
        "weights",
        "Quantised and 2:4 weights",
        (
            Section("Quantised weights", "rooftile", ("quantise_weight", "quantise_model", "QuantisedWeight", "linear")),
            Section("2:4 weights", "rooftile.sparsity", ("two_four", "compress", "TwoFour", "Recipe")),
        ),
    ),
    Page(
        "qat",
        "Quantisation-aware training",
        (
            Section(
                "Training for a format",
                "rooftile.qat",
                (
                    "prepare", "restore", "off", "status", "convert", "save", "state_dict", "load_state_dict", "QuantisedLinear",
                    "SparseLinear", "Status",
                ),
            ),
        ),
    ),
    Page(
        "diagnosis",
        "Diagnosis and plans",
        (
            Section("What bounds a program", "rooftile", ("diagnose", "doctor")),
            Section("Steps, counts and traces", "rooftile.diagnosis", ("step", "counts", "from_trace")),
            Section("The result of `diagnose`", "rooftile.diagnosis.diagnosis", ("Diagnosis",)),
            Section("A format for each layer", "rooftile", ("plan",)),
            Section("The result of `plan`", "rooftile.planning", ("Plan",)),
            Section("The roofline", "rooftile.cost", ("Roof", "roof", "memory_roof")),
        ),
    ),
    Page(
        "approximate",
        "Approximate attention",
        (
            Section(
                "Methods",
                "rooftile.approximate",
                (
                    "linear", "linear_with_state", "linear_step", "performer", "performer_with_state",
                    "performer_step", "Features",
                    "linformer", "sparse_transformer", "reformer", "lsh", "routing", "update_centroids", "commitment_loss",
                    "Loki", "LokiLayers", "native_sparse", "compress",
                    "choose_blocks", "choose_blocks_with_scores", "selected_attention",
                ),
            ),
        ),
    ),
    Page(
        "parallel",
        "A sequence on several GPUs",
        (
            Section(
                "Exact attention over a split sequence",
                "rooftile.parallel",
                ("context", "checkpoint_contexts", "context_attention", "shard", "unshard", "positions"),
            ),
            Section("Less memory", "rooftile.parallel", ("tiled", "offload")),
            Section("Bytes", "rooftile.parallel.memory", ("Memory", "loss", "feed_forward", "offload")),
        ),
    ),
    Page(
        "recurrent",
        "Recurrences",
        (
            Section(
                "Over a state of fixed size",
                "rooftile.recurrent",
                (
                    "ssd", "ssd_step", "selective_scan", "selective_scan_step", "gated_delta", "gated_delta_step", "causal_conv",
                    "conv_step",
                ),
            ),
            Section("Layers", "rooftile.nn", ("Mamba", "Mamba2", "GatedDeltaNet")),
            Section(
                "The names of mamba-ssm",
                "rooftile.integrations.mamba_ssm",
                (
                    "selective_scan_fn", "mamba_chunk_scan_combined", "selective_state_update", "causal_conv1d_fn",
                    "causal_conv1d_update", "Mamba", "Mamba2",
                ),
            ),
        ),
    ),
    Page(
        "recommend",
        "Recommenders",
        (
            Section("Attention over users' events", "rooftile.recommend", ("hstu_attention", "RelativeBias", "time_edges")),
            Section(
                "Target attention", "rooftile.recommend",
                ("target_attention", "target_attention_with_events", "simhash", "simhash_planes"),
            ),
            Section(
                "Layers and training", "rooftile.recommend",
                ("HSTU", "HSTURecommender", "TargetRecommender", "stochastic_length"),
            ),
            Section(
                "Events of users", "rooftile.recommend.data",
                ("Events", "packed", "without_last", "read_events", "planted_events", "Planted", "planted_clicks", "Clicks"),
            ),
            Section("Measures", "rooftile.recommend.metrics", ("ranks", "hit_rate", "ndcg", "auc")),
        ),
    ),
    Page(
        "nn",
        "Layers and models",
        (
            Section("As a module", "rooftile.nn", ("Attention",)),
            Section("A decoder to train", "rooftile.models", ("TrainableDecoder",)),
            Section(
                "A decoder to serve",
                "rooftile.models",
                (
                    "Decoder", "ModelConfig", "DeltaSizes", "ExpertSizes", "LatentSizes", "LinearSizes", "Mamba2Sizes",
                    "MambaSizes", "NativeSparseSizes", "PerformerSizes",
                ),
            ),
        ),
    ),
    Page(
        "engine",
        "Engine",
        (
            Section(
                "Serving",
                "rooftile.engine",
                (
                    "LLM", "EngineConfig", "AsyncEngine", "EngineStats", "SamplingParams", "RequestOutput", "CompletionOutput",
                    "Logprob",
                ),
            ),
        ),
    ),
)  # fmt: skip

WRITTEN = "Written by `scripts/write_reference.py` from the docstrings; `make tables` rewrites it."


def files() -> dict[str, str]:
    """Returns the text of each file of the reference."""
    return {"index.md": index(), **{f"{page.file}.md": text(page) for page in PAGES}}


def index() -> str:
    """Returns the first page, which leads to every name."""
    lines = []
    for page in PAGES:
        names = [f"[`{name}`]({page.file}.md#{name.lower()})" for section in page.sections for name in section.names]
        lines.append(f"| [{page.title}]({page.file}.md) | {', '.join(dict.fromkeys(names))} |")
    return "\n".join([f"# API\n\n{WRITTEN}\n\n| page | names |\n|---|---|", *lines]) + "\n"


def text(page: Page) -> str:
    """Returns a page in Markdown."""
    parts = [part for section in page.sections for part in section_text(*section)]
    return "\n\n".join([f"# {page.title}\n\n{WRITTEN}", *parts]) + "\n"


def section_text(title: str, module: str, names: tuple[str, ...]) -> Iterator[str]:
    yield f"## {title}"
    if module != "rooftile":
        yield f"In `{module}`."
    for name in names:
        yield from entry(name, getattr(pkgutil.resolve_name(module), name))


def entry(name: str, thing: object) -> Iterator[str]:
    """Yields the heading, the signature and the docstring of one name."""
    yield f"### `{name}`"
    if not callable(thing):
        yield f"The mask `{thing}`: see the table of masks in [masks as intervals](../../concepts/masks-as-intervals.md)."
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
            yield "Returns " + re.sub(r"^(A|An|The)\b", lambda found: found[0].lower(), " ".join(body.split()))
        elif block.startswith(">>>"):
            yield f"```pycon\n{block}\n```"
        else:
            yield block


def stale(due: dict[str, str]) -> list[str]:
    """Returns the names of files that are missing, old, or left from before."""
    found = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*")}
    return sorted(name for name in found.keys() | due.keys() if found.get(name) != due.get(name))


if __name__ == "__main__":
    due = files()
    changed = stale(due)
    if "--check" in sys.argv:
        sys.exit(f"{', '.join(changed)} in {FOLDER.name}/: out of date" if changed else 0)
    FOLDER.mkdir(exist_ok=True)
    for name in changed:
        if name in due:
            (FOLDER / name).write_text(due[name], encoding="utf-8")
        else:
            (FOLDER / name).unlink()
        print(f"{'wrote' if name in due else 'removed'} docs/reference/api/{name}")
