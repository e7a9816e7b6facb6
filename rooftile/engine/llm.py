"""`LLM`: a language model that answers prompts together."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, cast

import torch

from rooftile.engine.chat.read_outputs import answering, read_answers
from rooftile.engine.chat.reading import marks_of
from rooftile.engine.chat.tools.choose import why_no_syntax
from rooftile.engine.chat.tools.use import read_use
from rooftile.engine.embedding.model import EmbeddingModel, Text, beside_engine, embeds, read_embedding_model
from rooftile.engine.embedding.output import EmbeddingOutput, ScoreOutput
from rooftile.engine.engine import Engine
from rooftile.engine.mixers.approximation import Approximation
from rooftile.engine.process_lock import ProcessLock
from rooftile.engine.ranks.machines import telling_ranks
from rooftile.engine.requests.output import RequestOutput
from rooftile.engine.requests.per_prompt import adapters_for, params_for, with_priorities
from rooftile.engine.requests.progress import progress_bar
from rooftile.engine.requests.readers import Readers
from rooftile.engine.requests.request import Request
from rooftile.engine.sampling.params import SamplingParams
from rooftile.engine.settings.config import EngineConfig
from rooftile.engine.start.blueprint import Blueprint, current_device
from rooftile.engine.start.build import build_runner, engine_of
from rooftile.engine.start.checkpoint import RECOMMENDED, find_folder, recommended_params
from rooftile.engine.text.prompt import Prompt, list_prompts
from rooftile.engine.text.tokenizer import Tokenizer
from rooftile.engine.vllm_names import GENERATE_WORDS, LLM_REFUSED, LLM_RENAMED, SAMPLING_RENAMED
from rooftile.errors import InvalidInput, Unsupported
from rooftile.models import Decoder, ModelConfig
from rooftile.runtime.words import answers_foreign_words, answers_with, takes_names
from rooftile.weights.files.plan import Weights

# words that callers of `generate` may mean for something else: fields of SamplingParams, and vLLM's
ASKED = GENERATE_WORDS | {
    name: f"write SamplingParams({name}=...), after the prompts"
    for name in (*(each.name for each in fields(SamplingParams)), *SAMPLING_RENAMED)
}


@takes_names(LLM_RENAMED, LLM_REFUSED)
class LLM:
    """A language model that answers prompts together, with a paged KV cache and continuous batching.

    Several threads may call it at once; their prompts are answered together. A forked process cannot use its parent's LLM.

    Args:
        model: a checkpoint folder in Hugging Face's layout (config.json, *.safetensors), the name of a model in the Hugging Face
            Hub's cache on this machine ("Qwen/Qwen3-0.6B"), or a `rooftile.models.Decoder`. A `rooftile.models.ModelConfig`
            makes random weights, to measure.
        dtype: the dtype of weights and computation, as torch.bfloat16, "bfloat16" or "bf16"; "auto" takes the checkpoint's.
        device: None or "auto" takes a GPU if there is one.
        max_model_len: the longest sequence in tokens, prompt and answer together; None takes what the model has positions for,
            or what the cache has room for if that is less.
        block_size: tokens per block of the KV cache, a power of two of at least 8.
        num_blocks: blocks in the KV cache; None takes what fits into memory.
        max_batched_tokens: the most tokens that the model reads in one step.
        gpu_memory_utilization: the share of a GPU's memory that model and cache may take, above 0 and at most 1.
        kv_dtype: the dtype of the KV cache: "auto" takes the model's, which may be named, too; "fp8" takes half of 16 bits, plus
            a scale per token, head, key and value.
        allocator: "paged", or "contiguous" to reserve max_model_len tokens for each sequence, for comparison.
        tensor_parallel_size: the processes (ranks) that share the model, each with a part of its heads and columns on a GPU of
            its own; without a GPU they compute on the CPU. They are started here, on this machine; under torchrun they are
            those that it has started, also on several machines. There, an LLM of a rank other than 0 serves rank 0 until that
            closes its own, and then raises SystemExit.
        context_parallel_size: the ranks that deal out the tokens of each sequence in the KV cache, a power of two: each holds the
            whole model and 1 / N of each sequence, for contexts that one GPU does not hold. Each block of the cache then has N
            times block_size tokens. Models whose layers all have exact attention; one of this and tensor_parallel_size.
        enable_expert_parallel: whether each rank holds some of the experts, whole, in place of a slice of each; None does so only
            where slices do not fit, since a step then reads the fewest bytes of weights.
        max_num_seqs: the most answers that run at once.
        enforce_eager: run without CUDA graphs.
        enable_prefix_caching: whether prompts that begin alike share what is cached.
        deterministic: whether tokens, logprobs and scores of a request are the same bits whatever runs beside it: alone or in
            any batch, its prompt read at once or in chunks, preempted, or with a prefix found in the cache. Sampled tokens need
            a seed besides. This holds on one machine with the same versions, dtypes and number of threads. It costs speed: a GPU
            computes by Triton's kernels alone, a CPU reads the weights for each sequence, and recurrences read a prompt token by
            token.
        seed: makes the samples of requests without a seed of their own the same in each run, if the requests come in the same
            order; None for random samples.
        tokenizer: a folder with another tokenizer than the model's.
        chat_template: a file with a chat template, or its text, in place of the model's.
        reasoning_parser: how the model marks its thoughts, in answers of `chat`: "auto" looks at the chat template, "none" leaves
            them in the text; "think" (<think>), "granite", "mistral", "gemma4", "seed_oss", "minimax_m3", "apriel", or a name of
            vLLM's for one of these.
        tool_call_parser: how the model writes calls of functions, in answers of `chat` with tools: "auto" looks at the chat
            template; "hermes", "llama3_json", "mistral" and others name a syntax; "none" reads no calls.
        download: whether a model that is named, and not in that cache, is downloaded.
        generation_config: "auto" takes temperature, top_p, top_k, min_p and repetition_penalty of requests without SamplingParams
            from the checkpoint's generation_config.json, and logs what else there is not applied; "none" takes the usual ones.
        approximate: what `rooftile calibrate` fitted to the model, as the file that it wrote or as the object: answers then read
            only a share of the cached keys. Prompts are read exactly. None for exact attention.
        weights: the format of the layers' projections: "auto" takes the checkpoint's, also one that others have quantised; a
            word of `rooftile.quantise_weight`, as "fp8" or "int4:64", quantises a 16-bit checkpoint while it is read; "2:4" keeps
            the two largest of each four weights of a row (without training for it, this costs much quality); a dictionary
            {pattern of module names: word} mixes them. Experts, too, but for "2:4"; tokens stay in 16 bits there in every format.
            Embedding, head, norms and routers stay as they are.
        state_dtype: the dtype of the states of recurrences (Mamba): "fp32", or "bf16", which takes half the memory and rounds a
            state after each token.
        state_every: recurrences keep a state for later prompts after each `state_every` tokens of a prompt (rounded up to whole
            blocks), besides after 256, 512, 1,024, ... tokens, where the prompt ends, and where it leaves an earlier one.
        state_share: the share of the caches' memory for these states, at least 0 and less than 1; the state that was used least
            recently gives way. 0 keeps no state, so no prefix is found.
        task: "embed" reads a model for `embed` and `score` alone, without a cache and an output head; "generate" for answers,
            beside which a decoder embeds, too. "auto" embeds with an encoder and with a folder of sentence-transformers.
        adapters: LoRA adapters of this model, the folder of each by its name: {"name": folder}, or words "name=folder". Prompts
            name one (`generate(..., adapter="name")`), and prompts of several adapters and of none are answered together.
        max_adapters: the most adapters at once, for which memory is kept (`load_adapter`); None for as many as `adapters` has.
        max_adapter_rank: the largest rank that there is memory for, at most 256; None for the largest of `adapters`, at least 16.
        speculative: "lookup" guesses that an answer goes on as the prompt or the answer did where its last tokens occurred
            before, and checks several guessed tokens in one step. The tokens are those that come without, up to rounding. A
            dictionary says more: {"method": "lookup", "tokens": the most that are guessed at a time, "longest" and "shortest":
            how many last tokens are looked for, "max_batch": the most answers with guesses}. {"model": a smaller model of the
            same tokenizer, or a head of EAGLE-3, "tokens": ...} has that guess, and "mtp" the layer of multi-token prediction
            that the checkpoint has. None computes tokens one by one.

    vLLM's names kv_cache_dtype, max_num_batched_tokens, num_gpu_blocks_override, max_loras and max_lora_rank are taken too; its
    other keywords are refused one by one, with the reason, unless they ask for what happens anyway.

    Raises:
        InvalidInput: the folder holds no model that can be loaded, or a setting makes no sense; the sentence says which and why.
        Unsupported: a setting names a feature that is missing here.

    Example:
        >>> llm = LLM("Llama-3.2-1B")                                                           # doctest: +SKIP
        >>> llm.generate(["The roof"], SamplingParams(temperature=0))[0].outputs[0].text        # doctest: +SKIP

    Kwon et al., PagedAttention, arXiv:2309.06180; Yu et al., Orca, OSDI 2022.
    """

    def __init__(
        self, model: str | Path | Decoder | ModelConfig, dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None, max_model_len: int | None = None, block_size: int = 16,
        num_blocks: int | None = None, max_batched_tokens: int = 8192, gpu_memory_utilization: float = 0.9,
        kv_dtype: str = "auto", allocator: Literal["paged", "contiguous"] = "paged", tensor_parallel_size: int = 1,
        *, context_parallel_size: int = 1, enable_expert_parallel: bool | None = None, max_num_seqs: int = 256,
        enforce_eager: bool = False,
        enable_prefix_caching: bool = True, deterministic: bool = False, seed: int | None = None,
        tokenizer: str | Path | None = None, chat_template: str | Path | None = None, reasoning_parser: str = "auto",
        tool_call_parser: str = "auto",
        download: bool = False,
        generation_config: Literal["auto", "none"] = "auto", approximate: Approximation | str | Path | None = None,
        weights: Weights = "auto", state_dtype: Literal["fp32", "bf16"] = "fp32", state_every: int = 8192,
        state_share: float = 0.1, task: Literal["auto", "embed", "generate"] = "auto",
        adapters: Mapping[str, str | Path] | Sequence[str] | None = None, max_adapters: int | None = None,
        max_adapter_rank: int | None = None, speculative: str | Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.config = EngineConfig(
            dtype=dtype, device=device, max_model_len=max_model_len, block_size=block_size, num_blocks=num_blocks,
            max_batched_tokens=max_batched_tokens, gpu_memory_utilization=gpu_memory_utilization, kv_dtype=kv_dtype,
            allocator=allocator, tensor_parallel_size=tensor_parallel_size, context_parallel_size=context_parallel_size,
            enable_expert_parallel=enable_expert_parallel, max_num_seqs=max_num_seqs,
            enforce_eager=enforce_eager, enable_prefix_caching=enable_prefix_caching,
            deterministic=deterministic, seed=seed, tokenizer=tokenizer, chat_template=chat_template,
            reasoning_parser=reasoning_parser, tool_call_parser=tool_call_parser, download=download,
            generation_config=generation_config, approximate=approximate, weights=weights, state_dtype=state_dtype,
            state_every=state_every, state_share=state_share, task=task, adapters=adapters, max_adapters=max_adapters,
            max_adapter_rank=max_adapter_rank, speculative=speculative,
        )  # fmt: skip
        self.model = str(model) if isinstance(model, str | Path) else "a decoder"
        self._default_params, self._has_told_defaults = SamplingParams(), True
        self.owned = False
        """Whether an AsyncEngine owns it at present."""
        # held to add a request, run a step or read outputs; re-entrant, since a stream may be opened inside another
        self._lock = ProcessLock()
        self.embedding: EmbeddingModel | None = None
        """The model as one that gives vectors; None until a decoder that generates is asked for one."""
        with telling_ranks(tensor_parallel_size):
            if isinstance(model, str | Path):
                model = find_folder(model, download=download)
            self._source = model
            if embeds(model, self.config):
                if self.config.adapter_slots:
                    raise Unsupported("adapters are asked for, and the model gives vectors, which has none: leave them out")
                if self.config.speculative is not None:
                    raise Unsupported("speculative is given, and the model gives vectors, which need no drafts: leave it out")
                self.embedding = read_embedding_model(model, self.config)
                self.tokenizer, self._end = self.embedding.tokenizer, weakref.finalize(self, lambda: None)
                return
            if isinstance(model, str | Path) and generation_config == "auto":
                self._default_params = recommended_params(model)
            self.engine, end_ranks = self._build(model)
        self._has_told_defaults = self._default_params == SamplingParams()
        # also where nobody closes it, and at the end of the interpreter
        self._end = weakref.finalize(self, end_ranks)
        self._readers = Readers(self.engine, self._lock)
        self.caches, self.pages = self.engine.runner.caches, self.engine.runner.pages
        self.tokenizer = self.engine.tokenizer
        if self.pages.storage.is_cuda:
            self._warm_up()

    @classmethod
    @answers_foreign_words
    def from_config(cls, model: str | Path | Decoder | ModelConfig, config: EngineConfig) -> LLM:
        """Makes an LLM with the settings of `config`."""
        return cls(model, **{each.name: getattr(config, each.name) for each in fields(config)})

    @answers_with(ASKED)
    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *, adapter: str | Sequence[str | None] | None = None, priority: int | Sequence[int] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answers prompts; returns when all answers are complete.

        Args:
            prompts: texts or lists of token ids, or a single one of them. Like in vLLM, a prompt may also be a dictionary with
                "prompt" or "prompt_token_ids", and "cache_salt": the prefix cache is shared only between equal salts.
            sampling_params: one for all prompts, or a list with one for each; None takes `get_default_sampling_params()`.
            adapter: the name of the adapter that answers, or a list with one for each prompt; None for the model as it is.
            priority: a number for all prompts, or one for each, in place of the `priority` in sampling_params.
            use_tqdm: whether to show a progress bar on stderr; None shows one on a terminal.

        Returns:
            One RequestOutput per prompt, in the order of the prompts. If a prompt cannot be answered, its `error` says why, and
            its `outputs` is empty.

        Raises:
            InvalidInput: prompts or sampling_params are no such lists, or an AsyncEngine owns the LLM.
        """
        outputs: dict[int, RequestOutput] = {}
        several = list_prompts(prompts)
        with progress_bar(len(several), use_tqdm) as answered:
            for place, found, prompt in self._run(several, sampling_params, adapter, priority):
                if isinstance(found, RequestOutput):
                    outputs[place] = found
                elif not found.live:
                    with self._lock:
                        # a text that cannot be made is noted in the books, which another thread may be changing
                        outputs[place] = self.engine.output_of(found, prompt)
                if place in outputs:
                    answered(sum(len(answer.token_ids) for answer in outputs[place].outputs))
        return [outputs[place] for place in sorted(outputs)]

    @answers_with(ASKED)
    def chat(
        self, messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *, add_generation_prompt: bool | None = None, continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None, tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None, adapter: str | Sequence[str | None] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:  # fmt: skip
        """Answers conversations, which the checkpoint's chat template writes.

        Args:
            messages: a conversation, or a list of them: dictionaries with a role and content each.
            sampling_params, adapter, use_tqdm: see `generate`.
            add_generation_prompt: whether a prompt ends where the model's answer begins; None does so unless
                continue_final_message is set.
            continue_final_message: whether a prompt ends in the text of its last message, the assistant's, which is continued.
            chat_template_kwargs: variables that the template reads, as {"enable_thinking": False}.
            tools: functions that the model may call, in OpenAI's form: {"type": "function", "function": {"name", "parameters"}}.
            tool_choice: "auto" (None) lets the model decide, "none" forbids calls, "required" makes the answer a call, and
                {"type": "function", "function": {"name"}} one of that function; such calls follow the functions' schemas.

        Returns:
            One RequestOutput per conversation, in their order. If the model marks its thoughts (reasoning_parser), or has tools,
            each answer has thoughts in `reasoning`, calls in `tool_calls`, and the rest of its text in `content`; marks that are
            special tokens are in the text, too.

        Raises:
            InvalidInput: there is no tokenizer or chat template, or it refuses these messages, or does not read a variable; or
                the way in which the model writes calls is not known.
        """
        tokenizer = self.get_tokenizer()
        opens = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        one = not isinstance(messages, list | tuple) or not messages or isinstance(messages[0], Mapping)
        self._check_generates()
        form, syntax, use = self.engine.thoughts, self.engine.calls, read_use(tools, tool_choice)
        if use is not None and syntax is None:
            raise InvalidInput(why_no_syntax(self.engine.tool_call_parser))
        given = None if use is None else [dict(tool.given) for tool in use.tools]
        prompts = [
            tokenizer.chat(
                each, opens, continue_final_message=continue_final_message, chat_template_kwargs=chat_template_kwargs, tools=given
            )
            for each in cast("Any", [messages] if one else messages)
        ]
        marks = tokenizer.special_tokens(marks_of(form, syntax, use))
        if form is not None or use is not None:
            given_params = self.get_default_sampling_params() if sampling_params is None else sampling_params
            if isinstance(given_params, SamplingParams | list | tuple):
                sampling_params = answering(given_params, marks, tokenizer, syntax, use, thinks=form is not None)
        outputs = self.generate(prompts, sampling_params, adapter=adapter, use_tqdm=use_tqdm)
        if form is not None or use is not None:
            for output in outputs:
                read_answers(output, tokenizer, form, syntax, use)
        return outputs

    @answers_with(ASKED)
    def load_adapter(self, name: str, path: str | Path) -> None:
        """Reads a LoRA adapter of the model, from a folder that peft's `save_pretrained` has written; prompts may name it then.

        Nothing changes if it is refused. The LLM may be answering.

        Args:
            name: what prompts call it.
            path: the folder, with adapter_config.json and adapter_model.safetensors.

        Raises:
            InvalidInput: the name is taken, no slot is free, or the adapter does not fit the model; the sentence says which.
            Unsupported: it has what is not computed, such as DoRA.

        Example:
            >>> llm = LLM("Llama-3.2-1B", max_adapters=4)                           # doctest: +SKIP
            >>> llm.load_adapter("pirate", "adapters/pirate")                       # doctest: +SKIP
            >>> llm.generate("The roof", adapter="pirate")                          # doctest: +SKIP
        """
        self._check_generates()
        with self._lock:
            self._check_free()
            with current_device(self.engine.runner.device):
                self.engine.load_adapter(name, path)

    @answers_with(ASKED)
    def unload_adapter(self, name: str) -> None:
        """Takes no more prompts for an adapter. Those that are being answered end with it; then its memory is free.

        Raises:
            InvalidInput: there is no adapter of this name.
        """
        self._check_generates()
        with self._lock:
            self._check_free()
            self.engine.unload_adapter(name)

    @property
    def adapters(self) -> dict[str, Path]:
        """The folders of the adapters that prompts may name."""
        self._check_generates()
        return {} if self.engine.adapters is None else dict(self.engine.adapters.paths)

    @answers_foreign_words
    def embed(
        self, texts: Text | Sequence[Text], *, prompt_name: str | None = None, dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingOutput]:  # fmt: skip
        """Returns the vector of each text, as the folder's sentence-transformers files say how to make it.

        Args:
            texts: texts or lists of token ids, or a single one of them. Token ids are read as they are, without a prompt.
            prompt_name: the name of a prompt in the folder, such as "query", that is put before each text; None takes the
                folder's default.
            dimensions: the numbers of a vector that are kept, of a model that was trained for it; those of a model whose
                vectors have the length 1 get it again.
            truncate_prompt_tokens: a text with more tokens loses its end, as sentence-transformers always does; -1 for the
                longest text that the model reads. None refuses such a text.

        Raises:
            InvalidInput: a text or an argument makes no sense, or a text is too long.
            Unsupported: the model gives no vectors: a cross-encoder, or a decoder with other layers than exact attention.

        Example:
            >>> llm = LLM("bge-small-en-v1.5")                              # doctest: +SKIP
            >>> llm.embed(["The roof", "A tile"])[0].embedding.shape        # doctest: +SKIP
            torch.Size([384])
        """
        with self._lock:
            return self._embeds().embed(
                list_prompts(texts), prompt_name=prompt_name, dimensions=dimensions, cut=truncate_prompt_tokens
            )  # fmt: skip

    @answers_foreign_words
    def score(
        self, query: str | Sequence[str], documents: str | Sequence[str], *, truncate_prompt_tokens: int | None = None
    ) -> list[ScoreOutput]:
        """Scores documents for a query: by a cross-encoder that reads each pair, or by the cosine of their vectors.

        Vectors are made with the folder's prompts named "query", and "document", "passage" or "corpus", where it has them.

        Args:
            query: a text for all documents, or one for each.
            documents: texts, or a single one.
            truncate_prompt_tokens: see `embed`; of a pair the longer text loses its end.

        Raises:
            InvalidInput: a text makes no sense or is too long, or there are not as many queries as documents.
            Unsupported: the model is a cross-encoder with several labels.

        Example:
            >>> llm = LLM("bge-reranker-base")                                            # doctest: +SKIP
            >>> llm.score("What keeps rain out?", ["A roof.", "A river."])[0].score       # doctest: +SKIP
        """
        with self._lock:
            return self._embeds().score(query, documents, cut=truncate_prompt_tokens)

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer; raises InvalidInput if the model has none."""
        if self.tokenizer is None:
            raise InvalidInput(f"{self.model} has no tokenizer; give a folder with one as tokenizer=")
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the sampling parameters of requests that come without; parameters of generation_config.json are logged once."""
        params = self._default_params
        if not self._has_told_defaults:
            self._has_told_defaults = True
            said = ", ".join(f"{name}={getattr(params, name)}" for name in RECOMMENDED)
            logging.getLogger(__name__).warning(
                'generation_config.json of %s gives requests without SamplingParams %s; generation_config="none" turns this off',
                self.model, said,
            )  # fmt: skip
        return params

    def __repr__(self) -> str:
        if self.embedding is not None and self.embedding.is_alone:
            return f"LLM({self.model}: {self.embedding})"
        decoder, engine = self.engine.runner.decoder, self.engine
        return (
            f"LLM({self.model}: {decoder.config.family} in {str(decoder.embedding.dtype).removeprefix('torch.')} on "
            f"{decoder.embedding.device}; cache of {engine.pool.total:,} blocks of {engine.pool.size} tokens in "
            f"{str(self.pages.storage.dtype).removeprefix('torch.')}; at most {engine.max_answers:,} answers at once, "
            f"{engine.max_len:,} tokens per sequence)"
        )

    @answers_with(ASKED)
    def stream(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *, adapter: str | Sequence[str | None] | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:  # fmt: skip
        """Answers prompts like `generate`, and yields answers while they grow.

        Yields:
            The place of a prompt in the list and its answers so far, each time they have changed. A later step changes nothing
            in what was yielded before.
        """
        for place, found, prompt in self._run(list_prompts(prompts), sampling_params, adapter):
            with self._lock:
                # another thread may be about to take in this request's next token
                output = found if isinstance(found, RequestOutput) else self.engine.output_of(found, prompt)
            yield place, output

    def close(self) -> None:
        """Ends the processes that share the model (`tensor_parallel_size`); the LLM answers no more.

        The end of the interpreter, or of the last reference to the LLM, does the same.

        Raises:
            InvalidInput: an AsyncEngine owns the LLM; close that first.
        """
        with self._lock:
            if self._end.alive:
                self._check_free()
            self._end()

    def check_process(self) -> None:
        """Raises InvalidInput in a process that was forked from the LLM's."""
        self._lock.check()

    def lend(self) -> None:
        """Hands the LLM over to an AsyncEngine, in whose thread it runs from now on.

        Raises:
            InvalidInput: the LLM is in use.
        """
        self._check_generates()
        with self._lock:
            self._check_free()
            if self._readers:
                count = len(self._readers)
                raise InvalidInput(f"the LLM is answering {count} prompts; read their streams to the end, or close them")
            self.owned = True

    def _build(self, model: str | Path | Decoder | ModelConfig) -> tuple[Engine, Callable[[], None]]:
        """Returns the engine, and what ends the other ranks."""
        blueprint = Blueprint.of(model, self.config)
        if self.config.ranks > 1:
            # here and not above: most engines have one rank
            from rooftile.engine.ranks.opening import lead

            engine, leader = lead(blueprint)
            return engine, leader.close
        return engine_of(blueprint, build_runner(blueprint)), lambda: None

    def _warm_up(self) -> None:
        """Captures CUDA graphs and answers one prompt, so that the first request waits for neither."""
        with current_device(self.pages.storage.device):
            self.engine.runner.capture()
        # a draft model reads the prompt behind its first token, and drafts where more than one token is left
        tokens, speculator = 2 if self.engine.runner.draft is None else 8, self.engine.speculator
        prompt = [0] * max(1, min(64, self.engine.max_len - tokens))
        self.generate([prompt], SamplingParams(max_tokens=tokens, ignore_eos=True), use_tqdm=False)
        if speculator is not None:
            speculator.forget()
        self.engine.pool.forget_prefixes()

    def _embeds(self) -> EmbeddingModel:
        self._check_free()
        if self.embedding is None:
            self.embedding = beside_engine(self._source, self.engine, self.config)
        return self.embedding

    def _check_generates(self) -> None:
        if self.embedding is not None and self.embedding.is_alone:
            raise InvalidInput(
                f"{self.model} was read to embed texts: ask it with embed or score; a decoder generates with "
                'LLM(..., task="generate")'
            )

    def _check_free(self) -> None:
        if not self._end.alive:
            raise InvalidInput("the LLM was closed; make another")
        if self.owned:
            raise InvalidInput("the LLM is an AsyncEngine's until that is closed; ask that engine")

    def _run(
        self, prompts: list[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        adapter: str | Sequence[str | None] | None = None, priority: int | Sequence[int] | None = None,
    ) -> Iterator[tuple[int, Request | RequestOutput, str | None]]:  # fmt: skip
        """Yields a prompt's place, its request (or the output of a refused prompt) and its text, each time it has changed."""
        self.check_process()
        self._check_generates()
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        each = with_priorities(params_for(prompts, given), priority)
        yield from self._readers.run(zip(prompts, each, adapters_for(prompts, adapter), strict=True), self._check_free)
