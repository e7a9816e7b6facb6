"""`rooftile generate`: streams the answers of a checkpoint's model to the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rooftile.cli.engine_flags import takes_engine_flags
from rooftile.cli.output import JsonOption, print_json, progress
from rooftile.engine.adapters.names import adapters_of
from rooftile.engine.ranks.machines import telling_ranks
from rooftile.errors import InvalidInput

if TYPE_CHECKING:
    from rooftile.engine import LLM, RequestOutput, SamplingParams


@takes_engine_flags
def generate(
    model: Annotated[
        str, typer.Argument(help="A checkpoint's folder (config.json, *.safetensors, tokenizer.json), or its name on the Hub.")
    ],
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="A prompt; may be given several times.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option("--prompt-file", help="A file that holds one more prompt; - for stdin.")
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send each prompt as a user message, with the checkpoint's chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Maximum number of tokens per answer.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="Divides the scores; 0 takes the most likely token.")] = 1.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Keep the most likely tokens up to this total probability.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Keep this many of the most likely tokens; 0 for all.")] = 0,
    min_p: Annotated[
        float, typer.Option("--min-p", help="Keep tokens with at least this fraction of the highest probability.")
    ] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", help="The same seed gives the same answer.")] = None,
    n: Annotated[int, typer.Option("--n", help="Answers per prompt.")] = 1,
    beam_width: Annotated[
        int | None, typer.Option("--beam-width", help="Use beam search with this many beams instead of sampling.")
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="A text that ends an answer; may be given several times.")
    ] = None,
    json: JsonOption = False,
    *,
    settings: dict[str, Any],
) -> None:
    """Generates text with a checkpoint's model. Streams answers to stdout; prints speed and memory to stderr.

    Example: rooftile generate Llama-3.2-1B -p "The roof" --max-tokens 50 --temperature 0.7
    """
    prompts = [*(prompt or []), *([] if prompt_file is None else [_text_of(prompt_file)])]
    if not prompts:
        raise InvalidInput("generate got no prompt; give one with -p or --prompt-file")
    from rooftile.engine.sampling.params import SamplingParams
    from rooftile.engine.start.checkpoint import find_folder

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, n=n,
        beam_width=beam_width, stop=stop or (),
    )  # fmt: skip
    adapters = list(adapters_of(settings.get("adapters")))
    if len(adapters) > 1:
        raise InvalidInput(f"--adapter is given {len(adapters)} times; one adapter answers all prompts here: give one")
    with telling_ranks(settings.get("tensor_parallel_size", 1)):
        folder = find_folder(model, download=settings.get("download", False))
    # all that can be refused without torch is refused by now, before its import and the model's
    from rooftile.engine import LLM
    from rooftile.engine.start.tokenizers import TOKENIZER_FILES

    if "tokenizer" not in settings and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InvalidInput(f"{model} has no tokenizer.json; text prompts need a tokenizer")
    with progress() as say:
        say(f"reading {model}")
        llm = LLM(folder, **settings)
    run = _Run(llm, prompts, params, chat=chat, adapter=adapters[0] if adapters else None)
    if json:
        with progress() as say:
            run.go(lambda: say(f"{run.tokens:,} tokens"))
        print_json({"model": str(model), "device": str(llm.pages.storage.device)} | run.json())
        return
    writer = _Writer(run)
    run.go(writer.write)
    print(run, file=sys.stderr)


class _Run:
    """Runs all prompts together; holds the latest output of each, and the time."""

    def __init__(
        self, llm: LLM, prompts: Sequence[str], params: SamplingParams, *, chat: bool, adapter: str | None = None
    ) -> None:  # fmt: skip
        self.llm = llm
        self.adapter = adapter
        self.prompts = prompts
        self.params = params
        self.outputs: dict[int, RequestOutput] = {}
        self.seconds = 0.0
        self.first: float | None = None
        """Seconds to the first token of any answer."""
        self._asked: Sequence[Any] = [self._chat(prompt) for prompt in prompts] if chat else prompts

    def go(self, changed: Callable[[], None]) -> None:
        """Runs to the end; calls `changed` after each new output."""
        start = time.perf_counter()
        for place, output in self.llm.stream(self._asked, self.params, adapter=self.adapter):
            if output.error is not None:
                which = f"prompt {place + 1}: " if len(self.prompts) > 1 else ""
                raise InvalidInput(which + output.error)
            self.seconds = time.perf_counter() - start
            if self.first is None:
                self.first = self.seconds
            self.outputs[place] = output
            changed()

    @property
    def tokens(self) -> int:
        """The number of tokens of all answers."""
        return sum(len(answer.token_ids) for output in self.outputs.values() for answer in output.outputs)

    @property
    def rate(self) -> float:
        """Tokens per second, including prefill."""
        return self.tokens / self.seconds

    def json(self) -> dict[str, Any]:
        return {
            "outputs": [
                {
                    "prompt": prompt,
                    "prompt_tokens": len(self.outputs[place].prompt_token_ids),
                    "answers": [
                        {
                            "text": answer.text, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason,
                            "stop_reason": answer.stop_reason, "score": answer.score,
                        }
                        for answer in self.outputs[place].outputs
                    ],
                }
                for place, prompt in enumerate(self.prompts)
            ],
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.rate,
            "seconds_to_first_token": self.first,
            "cache": str(self.llm.caches),
            "cache_bytes": self.llm.caches.nbytes,
        }  # fmt: skip

    def __str__(self) -> str:
        return (
            f"{self.tokens:,} tokens in {self.seconds:.2f} s: {self.rate:,.1f} tokens/s, the first after {self.first:.2f} s; "
            f"cache: {self.llm.caches}"
        )

    def _chat(self, prompt: str) -> list[int]:
        assert self.llm.tokenizer is not None
        return self.llm.tokenizer.chat([{"role": "user", "content": prompt}])


class _Writer:
    """Writes answers to stdout in order: streams the current one, and holds back the others until their turn."""

    def __init__(self, run: _Run) -> None:
        self._run = run
        self._turns = [(place, index) for place in range(len(run.prompts)) for index in range(run.params.n)]
        # written characters of the current answer; None before it begins
        self._written: int | None = None
        self._terminal = sys.stdout.isatty()

    def write(self) -> None:
        """Writes all new text."""
        while self._turns:
            place, index = self._turns[0]
            output = self._run.outputs.get(place)
            # beams change their order until the search ends
            if output is None or (self._run.params.beam_width is not None and not output.finished):
                return
            answer = output.outputs[index]
            if self._written is None:
                self._head(place, index)
                self._written = 0
            self._put(answer.text[self._written :])
            self._written = len(answer.text)
            if answer.finish_reason is None:
                return
            self._turns.pop(0)
            self._written = None
            print("\n" if self._turns else "", flush=True)

    def _head(self, place: int, index: int) -> None:
        """Prints the heading of an answer, if there are several."""
        if len(self._run.prompts) > 1 and index == 0:
            print(*(f"> {line}" for line in self._run.prompts[place].splitlines() or [""]), sep="\n")
        if self._run.params.n > 1:
            print(f"[{index + 1}]")

    def _put(self, text: str) -> None:
        if self._terminal:
            # keep a model's control characters from the terminal
            text = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
        if text:
            print(text, end="", flush=True)


def _text_of(file: Path) -> str:
    """Reads a file, or stdin for -, without the final newline."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInput(f"--prompt-file {file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidInput(f"--prompt-file {file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    return text.removesuffix("\n")
