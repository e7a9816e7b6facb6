"""`LLM`: a language model from a folder, for prompts that are all there; and its parts, for others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import RLock
from typing import Literal

import torch

from rooftile.errors import InvalidInput, Unsupported
from rooftile.kvcache import BlockPool, Pages, ReservedPool
from rooftile.models import Decoder, ModelConfig
from rooftile.serve import memory
from rooftile.serve.engine import Engine
from rooftile.serve.output import RequestOutput, output_of
from rooftile.serve.request import Request
from rooftile.serve.runner import Runner
from rooftile.serve.sampling.params import SamplingParams
from rooftile.serve.text.prompt import Prompt, asked, listed
from rooftile.serve.text.tokenizer import Tokenizer
from rooftile.serve.warm_up import compile_kernels

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class LLM:
    """A language model that answers prompts together, from a paged key/value cache; also those of several threads.

    Args:
        model: a checkpoint's folder in Hugging Face's layout (config.json, *.safetensors), or a `rooftile.models.Decoder`.
        dtype: of weights and computation; "auto" for the checkpoint's.
        device: None for a GPU if there is one.
        max_model_len: tokens of a sequence, prompt and answer; None for what the model has, or the cache has room for.
        block_size: tokens of a block of the cache, a power of two of at least 8.
        num_blocks: of the cache; None for what fits into memory.
        max_batched_tokens: that the model reads in a step.
        gpu_memory_utilization: the share of a GPU's memory that model and cache may take.
        kv_dtype: of the cache; "auto" for the model's, "fp8" for half of 16 bits, with a scale for each token's key and value.
        allocator: "paged", or "contiguous" to reserve max_model_len tokens for each sequence, for comparison.
        tensor_parallel_size: 1.
        max_num_seqs: answers that run at once.
        enforce_eager: no CUDA graphs.

    Raises:
        InvalidInput: the folder holds no model that it knows, or a number makes no sense; the sentence says which and why.

    Example:
        >>> llm = LLM("Llama-3.2-1B")                                                           # doctest: +SKIP
        >>> llm.generate(["The roof"], SamplingParams(temperature=0))[0].outputs[0].text        # doctest: +SKIP

    Kwon et al., PagedAttention, arXiv:2309.06180; Yu et al., Orca, OSDI 2022.
    """

    def __init__(
        self, model: str | Path | Decoder, dtype: torch.dtype | str = "auto", device: torch.device | str | None = None,
        max_model_len: int | None = None, block_size: int = 16, num_blocks: int | None = None, max_batched_tokens: int = 8192,
        gpu_memory_utilization: float = 0.9, kv_dtype: str = "auto", allocator: Literal["paged", "contiguous"] = "paged",
        tensor_parallel_size: int = 1, *, max_num_seqs: int = 256, enforce_eager: bool = False,
    ) -> None:  # fmt: skip
        if tensor_parallel_size != 1:
            raise Unsupported(f"tensor_parallel_size is {tensor_parallel_size}; has 1")
        if kv_dtype not in ("auto", "fp8"):
            raise Unsupported(f'kv_dtype is {kv_dtype!r}; has "auto", the dtype of the model, and "fp8"')
        if allocator not in ("paged", "contiguous"):
            raise InvalidInput(f'allocator is {allocator!r}; must be "paged" or "contiguous"')
        if not _is_whole(block_size) or block_size < 8 or block_size & (block_size - 1):
            raise InvalidInput(f"block_size is {block_size}; must be a power of two of at least 8")
        for name, value in (
            ("max_batched_tokens", max_batched_tokens), ("max_num_seqs", max_num_seqs), ("num_blocks", num_blocks)
        ):  # fmt: skip
            if value is not None and (not _is_whole(value) or value < 1):
                raise InvalidInput(f"{name} is {value!r}; must be a whole number of at least 1")
        if not isinstance(gpu_memory_utilization, int | float) or not 0 < gpu_memory_utilization <= 1:
            raise InvalidInput(f"gpu_memory_utilization is {gpu_memory_utilization!r}; must be above 0 and at most 1")
        if max_model_len is not None and not _is_whole(max_model_len):
            raise InvalidInput(f"max_model_len is {max_model_len!r}; must be a whole number")
        at = _device_of(model, dtype, device)
        # what can be said before gigabytes are read is
        config = model.config if isinstance(model, Decoder) else ModelConfig.from_folder(model)
        if max_model_len is not None and not 2 <= max_model_len <= config.max_len:
            raise InvalidInput(f"max_model_len is {max_model_len:,}; the model has positions for 2 to {config.max_len:,}")
        max_len = config.max_len if max_model_len is None else max_model_len
        computed = model.embedding.dtype if isinstance(model, Decoder) else config.dtype if dtype == "auto" else dtype
        compiled = None
        if at.type == "cuda" and isinstance(computed, torch.dtype):
            # while weights are read, and before memory is measured
            beside = ThreadPoolExecutor(1)
            compiled = beside.submit(
                compile_kernels, config, computed, at, size=block_size,
                kv_dtype=torch.float8_e4m3fn if kv_dtype == "fp8" else computed, longest=min(max_batched_tokens, max_len),
            )  # fmt: skip
            # who hears that there are no weights does not wait for kernels
            beside.shutdown(wait=False)
        decoder = model if isinstance(model, Decoder) else Decoder.from_folder(model, dtype, at)
        if compiled is not None:
            compiled.result()
        cached = torch.float8_e4m3fn if kv_dtype == "fp8" else decoder.embedding.dtype
        if num_blocks is None:
            with _current(at):
                num_blocks = memory.blocks_that_fit(
                    decoder, block_size, cached, utilization=gpu_memory_utilization, max_batched_tokens=max_batched_tokens,
                    max_answers=max_num_seqs, max_len=max_len,
                )  # fmt: skip
        if max_model_len is None:
            max_len = min(max_len, num_blocks * block_size)
        if num_blocks * block_size < max_len:
            raise InvalidInput(
                f"{num_blocks:,} blocks of {block_size} are room for {num_blocks * block_size:,} tokens; a sequence may have "
                f"{max_len:,}: make num_blocks larger, or max_model_len smaller"
            )
        try:
            self.pages = Pages(
                num_blocks, config.layers, config.kv_heads, config.head_dim, size=block_size, dtype=cached,
                device=decoder.embedding.device,
            )  # fmt: skip
        except RuntimeError as error:
            each = memory.block_bytes(decoder, block_size, cached)
            raise InvalidInput(
                f"no memory for a cache: {num_blocks:,} blocks (num_blocks) of {each:,} bytes take "
                f"{num_blocks * each / 1e9:,.1f} GB"
            ) from error
        if allocator == "paged":
            pool = BlockPool(num_blocks, block_size)
        else:
            pool = ReservedPool(num_blocks, block_size, reserve=max_len)
        runner = Runner(decoder, self.pages, max_num_seqs, max_len, graphs=not enforce_eager)
        self.tokenizer = None if isinstance(model, Decoder) else _tokenizer_of(Path(model))
        self.engine = Engine(
            runner, pool, max_len=max_len, max_answers=max_num_seqs, max_batched_tokens=max_batched_tokens,
            tokenizer=self.tokenizer,
        )  # fmt: skip
        self.lent = False
        """Whether an AsyncEngine has it."""
        self._readers: dict[Request, dict[Request, None]] = {}
        # of a thread that adds, computes a step or looks; a stream within a stream is of the same thread
        self._lock = RLock()
        if decoder.embedding.is_cuda:
            # as what was compiled before, what is captured now does not keep the first requests waiting
            with _current(at):
                runner.capture()
            self.generate([[0] * min(64, max_len - 2)], SamplingParams(max_tokens=2, ignore_eos=True))
            pool.forget_prefixes()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Answers to prompts, in their order.

        Args:
            prompts: texts, or lists of token ids; or one of them. As in vLLM, a prompt may be a dictionary with "prompt" or
                "prompt_token_ids", and "cache_salt": prefixes are shared with prompts of the same salt only.
            sampling_params: of all, or of each.

        Returns:
            A RequestOutput for each. A prompt that cannot be answered has the reason in `error`, and no outputs.
        """
        outputs: dict[int, RequestOutput] = {}
        for place, found, prompt in self._run(listed(prompts), sampling_params):
            if isinstance(found, RequestOutput):
                outputs[place] = found
            elif not found.live:
                outputs[place] = output_of(found, prompt)
        return [outputs[place] for place in sorted(outputs)]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[tuple[int, RequestOutput]]:
        """As `generate`, while the answers grow: the place of a prompt and its answers so far, whenever they have changed."""
        for place, found, prompt in self._run(listed(prompts), sampling_params):
            with self._lock:
                # another thread may be about to compute the next token of it
                output = found if isinstance(found, RequestOutput) else output_of(found, prompt)
            yield place, output

    def lend(self) -> None:
        """Leaves it to an AsyncEngine, in whose thread it runs from now on.

        Raises:
            InvalidInput: somebody uses it.
        """
        with self._lock:
            self._check_free()
            if self._readers:
                count = len(self._readers)
                raise InvalidInput(f"the LLM is answering {count} prompts; read their streams to the end, or close them")
            self.lent = True

    def _check_free(self) -> None:
        if self.lent:
            raise InvalidInput("the LLM is an AsyncEngine's until that is closed; ask that engine")

    def _run(
        self, prompts: list[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Iterator[tuple[int, Request | RequestOutput, str | None]]:
        """A prompt's place, what has become of it, and its text, whenever something has."""
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams | list | tuple):
            raise InvalidInput(f"sampling_params is {params!r}; must be SamplingParams, or a list of them")
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise InvalidInput(f"there are {len(each)} sampling_params for {len(prompts)} prompts; give one, or one for each")
        texts: list[str | None] = [None] * len(prompts)
        places: dict[Request, int] = {}
        news: dict[Request, None] = {}
        try:
            for place, (prompt, wanted) in enumerate(zip(prompts, each, strict=True)):
                refused = None
                with self._lock:
                    self._check_free()
                    try:
                        texts[place], tokens, salt = asked(prompt, self.tokenizer)
                        request = self.engine.add(tokens, wanted, salt=salt)
                        places[request], self._readers[request] = place, news
                    except InvalidInput as error:
                        refused = str(error)
                if refused is not None:
                    text = prompt if isinstance(prompt, str) else None
                    ids = list(prompt) if isinstance(prompt, list | tuple) else []
                    yield place, RequestOutput(-1, text, ids, finished=True, error=refused), text
            left = len(places)
            while True:
                with self._lock:
                    # what is in flight of nobody any more is waited for, too
                    if not left and not (self.engine.scheduler.idle and not self.engine.idle):
                        break
                    if not self.engine.idle:
                        self._step()
                    elif not news:
                        # somebody has ended them
                        news |= {request: None for request in places if request in self._readers}
                    changed = list(news)
                    news.clear()
                    for request in changed:
                        if not request.live:
                            del self._readers[request]
                            left -= 1
                for request in changed:
                    yield places[request], request, texts[places[request]]
        finally:
            # of a caller who has seen enough
            with self._lock:
                for request in places:
                    self._readers.pop(request, None)
                    self.engine.abort(request)

    def _step(self) -> None:
        """Tells each stream which of its requests have changed: one may be begun inside of another."""
        try:
            with _current(self.engine.runner.device):
                changed = self.engine.step()
        except BaseException:
            # which has ended all; other threads hear of it from here
            for request, news in self._readers.items():
                news[request] = None
            raise
        for request in changed:
            if request in self._readers:
                self._readers[request][request] = None


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Kernels are started on the current device of a thread."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _device_of(model: str | Path | Decoder, dtype: torch.dtype | str, device: torch.device | str | None) -> torch.device:
    """Where the model is to be; a decoder that is there must be what is asked for."""
    try:
        asked_for = None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise InvalidInput(f'device is {device!r}; must be a device of torch, such as "cuda" or "cpu", or None') from None
    if isinstance(model, Decoder):
        its = model.embedding
        if dtype not in ("auto", its.dtype):
            raise InvalidInput(f"dtype is {dtype} and the decoder's {its.dtype}; make it with that dtype, or leave dtype out")
        if asked_for is not None and (asked_for.type != its.device.type or asked_for.index not in (None, its.device.index)):
            raise InvalidInput(f"device is {asked_for} and the decoder is on {its.device}; make it there, or leave device out")
        return its.device
    if asked_for is None:
        asked_for = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if asked_for.type != "cuda":
        return asked_for
    if not torch.cuda.is_available():
        raise InvalidInput(f'device is {str(asked_for)!r}, and PyTorch finds no GPU; has "cpu"')
    # threads have a current device of their own
    return torch.device("cuda", torch.cuda.current_device() if asked_for.index is None else asked_for.index)


def _tokenizer_of(folder: Path) -> Tokenizer | None:
    """The checkpoint's tokenizer; None if it has no file of one."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    return Tokenizer.from_folder(folder)
