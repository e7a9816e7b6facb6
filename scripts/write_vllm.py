"""Writes docs/reference/vllm.md: keywords, flags and fields of vLLM, and what becomes of each here.

python scripts/write_vllm.py          # writes the page
python scripts/write_vllm.py --check  # fails if the page is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from rooftile.cli.vllm_flags import SERVER_REFUSED
from rooftile.engine.settings.table import SETTINGS
from rooftile.engine.vllm_names import GENERATE_WORDS, LLM_REFUSED, LLM_RENAMED, SAMPLING_REFUSED, SAMPLING_RENAMED
from rooftile.runtime.words import Refused
from rooftile.server.http.openai.fields import REFUSED
from rooftile.server.http.openai.forms import ChatForm, CompletionForm

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "vllm.md"
# settings that vLLM has by the same name
SAME = (
    "dtype", "max_model_len", "block_size", "gpu_memory_utilization", "tensor_parallel_size", "enable_expert_parallel",
    "max_num_seqs", "enforce_eager", "enable_prefix_caching", "seed", "tokenizer", "chat_template", "reasoning_parser",
    "tool_call_parser", "generation_config", "task",
)  # fmt: skip
# fields of requests that have no place in vLLM's API
OWN = ("beam_width", "early_stopping", "enable_thinking", "best_of")
HEAD = """# Names of vLLM

This page says what becomes of each keyword, flag and field: it is taken as it is, by another word, or refused with the reason.
Values in brackets ask for what happens anyway, and are taken. `scripts/write_vllm.py` writes the page from the tables that the
library itself reads; [coming from vLLM](../coming-from/vllm.md) has the usual lines side by side.
"""


def page() -> str:
    """Returns the page."""
    fields = dict.fromkeys((*CompletionForm.model_fields, *ChatForm.model_fields))
    same_fields = sorted(name for name in fields if name not in OWN)
    refused_fields = {name: why for name, why in REFUSED.items() if name not in fields}
    return "\n".join([
        HEAD,
        *section("Keywords of `LLM`, and flags of `vllm serve`", SAME, LLM_RENAMED, LLM_REFUSED | SERVER_REFUSED),
        *section("Keywords of `SamplingParams`", (), SAMPLING_RENAMED, SAMPLING_REFUSED),
        "All other keywords of vLLM's `SamplingParams` are the same.\n",
        *section("Keywords of `generate` and `chat`", ("sampling_params", "use_tqdm", "priority"), {}, GENERATE_WORDS),
        *section("Fields of completions and chats", same_fields, {}, refused_fields),
        "A field that is on no list is refused with the nearest name.\n",
    ])  # fmt: skip


def section(
    title: str, same: tuple[str, ...] | list[str], renamed: Mapping[str, str], refused: Mapping[str, Refused | str]
) -> Iterator[str]:
    """Yields the lines of a section."""
    for name in same:
        assert name in SETTINGS or "LLM" not in title, f"{name} is no setting any more"
    yield f"## {title}\n"
    if same:
        yield f"The same: {', '.join(f'`{name}`' for name in sorted(same))}.\n"
    yield "| vLLM | here |"
    yield "|---|---|"
    rows = {name: f"the same, or `{own}`" for name, own in renamed.items()}
    rows |= {name: reason(found) for name, found in refused.items() if name not in same}
    yield from (f"| `{name}` | {rows[name]} |" for name in sorted(rows))
    yield ""


def reason(refused: Refused | str) -> str:
    """Returns why a word is refused, and the values that are taken."""
    taken, why = ((), refused) if isinstance(refused, str) else refused
    words = why.replace("|", "\\|").replace("<", "&lt;")
    shown = ", ".join(f"`{value!r}`" for value in taken)
    return words + (f" ({shown})" if shown else "")


def main() -> None:
    """Writes the page, or says that it is out of date."""
    due = page()
    if "--check" not in sys.argv:
        PAGE.write_text(due, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != due:
        sys.exit(f"{PAGE.name} is out of date")


if __name__ == "__main__":
    main()
