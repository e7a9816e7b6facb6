"""One serving engine on one device, part by part as its peers publish them, and Transformers' continuous batching beside it.

    start          seconds from the weights to an engine that is ready, and how many kernels Triton compiled for it
    W1, W10, W11   output tokens per second of 256 requests, of one alone, and of four samples for each of 64 prompts:
                   a whole run first, then `runs` that count
    decode-step    milliseconds per step while all requests decode, each step begun before the last has ended
    idle           a second process, which finds Triton's cache filled: how long its engine takes to start, and how long
                   no kernel, copy or fill runs in such steps, from the profiler and beside unprofiled steps
    W8             the first requests of W8 in a cache of 15.7k slots, with whole reservations and with pages
    speculative    output tokens per second with drafts, over the same requests without, by batch and by how likely a drafted
                   token is accepted: greedy answers of one token, which a bias forces, and guesses that are wrong so often,
                   or where a look-up is wrong in an edit of code or in a summary of quoted sentences
    speculative-draft  the same with a draft model, Llama's 1B for its 8B, whose steps are computed and whose guesses are replaced
    context        decode steps of a few requests with 1k to 128k tokens each: output tokens per second, and a sequence's memory
    adapters       64 requests without adapters, and dealt out to 16 of rank 16: output tokens per second
    peers          the first requests of W1 on ours, then on Transformers on the same weights

Weights are random, in bf16 on a GPU. On a CPU the idle time is absent: `--model tiny --device cpu --scale 0.03` tries the suite.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from time import perf_counter
from typing import Any

import torch

from rooftile.cost.session import Session
from rooftile.diagnosis.programs import decode_step
from rooftile.engine.llm import LLM
from rooftile.errors import InvalidInput
from rooftile.models import ModelConfig
from rooftile_lab.bench import adapter_rates, contexts, speculative
from rooftile_lab.bench.driver import fitted
from rooftile_lab.bench.engine_start import in_second_process, started, workloads_for
from rooftile_lab.bench.measures import Measures
from rooftile_lab.bench.models import check_llama, decoder_named, formats_of
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import figures, measured, timed_row
from rooftile_lab.bench.run import Progress
from rooftile_lab.bench.serving import case_name, costs_of, repeat, settings_of
from rooftile_lab.bench.workloads import Workload, named
from rooftile_lab.bench.works import tidy, words_of_error

PARTS = (
    "start",
    "W1",
    "W10",
    "W11",
    "decode-step",
    "idle",
    "W8",
    "context",
    "speculative",
    "speculative-draft",
    "adapters",
    "peers",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options of `rooftile bench engine`."""

    model: str
    parts: Sequence[str] = PARTS
    scale: float = 1.0
    batch: int | None = None
    weights: str = "auto"
    peer_requests: int = 64
    peer_limit_s: float = 90.0
    w8_requests: int = 200
    runs: int = 2

    def check(self) -> None:
        """Raises InvalidInput for a part that there is not, and for a model that the peer has not."""
        for part in self.parts:
            if part not in PARTS:
                raise InvalidInput(f"bench engine has no case {part!r}; has {', '.join(PARTS)}")
        if self.runs < 1:
            raise InvalidInput(f"runs is {self.runs}; must be at least 1")
        if "peers" in self.parts:
            check_llama("engine", self.model)


def measure(asked: EngineOptions, session: Session, say: Progress | None = None) -> Iterator[Row]:
    """The rows of all parts that are asked for, each as soon as it is measured."""
    asked.check()
    run = _Run(asked, session, say or (lambda words: None))
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "start": run.start, "W1": partial(run.rate, "W1"), "W10": partial(run.rate, "W10"), "W11": partial(run.rate, "W11"),
        "decode-step": run.decode, "idle": run.second_process, "W8": run.allocators, "context": run.contexts,
        "speculative": run.drafts, "speculative-draft": run.model_drafts, "adapters": run.adapters, "peers": run.peers,
    }  # fmt: skip
    for part in PARTS:
        if part in asked.parts:
            run.say(part)
            yield from parts[part]()


class _Run:
    """A model, and an engine while one is needed: the second process and the peer need the memory."""

    def __init__(self, asked: EngineOptions, session: Session, say: Progress) -> None:
        self.asked, self.session, self.say = asked, session, say
        say("the model")
        began = perf_counter()
        self.decoder = decoder_named(asked.model, session.device, asked.weights)
        if session.device.type == "cuda":
            torch.cuda.synchronize(session.device)
        self.weights_s = perf_counter() - began
        self.workloads = workloads_for(asked.scale, self.decoder)
        self._llm: LLM | None = None
        self._started: dict[str, Any] = {}

    @property
    def llm(self) -> LLM:
        """The engine, started when it is first asked for."""
        if self._llm is None:
            self._llm, self._started = started(self.workloads, self.decoder)
        return self._llm

    def close(self) -> None:
        """Gives back the engine's memory."""
        self._llm = None
        tidy(self.session.device)

    def row(self, name: str, samples: Sequence[float], *, backend: str = "rooftile", **more: Any) -> Row:
        """A row of this run. Samples are in µs."""
        asked = self.asked
        weights = {"weights": formats_of(self.decoder)}
        settings = {"model": asked.model, "scale": asked.scale} | weights | more.pop("settings", {})
        case = case_name(name, asked.model, asked.scale, weights)
        return timed_row(
            self.session,
            samples,
            dtype=self.session.dtype,
            suite="engine",
            case=case,
            backend=backend,
            settings=settings,
            **more,
        )

    def start(self) -> Iterator[Row]:
        self.close()
        _ = self.llm
        yield self._start("start", self._started, {"weights_s": figures(self.weights_s)})

    def _start(self, name: str, found: dict[str, Any], more: dict[str, float]) -> Row:
        measures = {"compiled": found["compiled"]} | more
        return self.row(name, [found["seconds"] * 1e6], phase="start", measures=measures, settings=found["settings"])

    def rate(self, name: str) -> Iterator[Row]:
        workload = self.workloads[name]
        yield self._rate(name, workload, *repeat(self.llm, workload, self.asked.runs, costs=costs_of(self.llm, self.session)))

    def _rate(self, name: str, workload: Workload, first_s: float | None, found: list[Measures], **more: Any) -> Row:
        names = (
            "output_tok_s",
            "output_tokens",
            "requests",
            "host_us_step",
            "running",
            "waste_percent",
            "preemptions",
            "steps",
        )
        spreads = measured({name: [getattr(one, name) for one in found] for name in names})
        if first_s is not None:
            spreads["measures"]["first_run_s"] = figures(first_s)
        spreads["measures"] |= more.pop("measures", {})
        floors = [one.floor_percent for one in found if one.floor_percent is not None]
        settings = {"as_asked": all(_as_asked(one, workload) for one in found)}
        return self.row(
            name, [one.seconds * 1e6 for one in found], phase="serve", settings=settings,
            roofline_percent=figures(sum(floors) / len(floors)) if floors else None, **spreads, **more,
        )  # fmt: skip

    def decode(self) -> Iterator[Row]:
        sizes, costs = self.sizes, costs_of(self.llm, self.session)
        found = [decode_step.milliseconds(self.llm.engine, sizes) for _ in range(self.asked.runs)]
        samples = [1e3 * ms for ms, _ in found]
        spreads = measured({"context_tokens": [context for _, context in found]})
        if costs is not None:
            floor_us = 1e6 * costs.model.seconds(costs.rates, steps=1, cached=sizes.batch * sizes.context, running=sizes.batch)
            spreads["measures"] |= {"floor_us": figures(floor_us), "steps": sizes.steps}
            spreads["measures"]["over_floor_ratio"] = figures(sum(samples) / len(samples) / floor_us)
        yield self.row(f"decode-step-{sizes}", samples, phase="decode", **spreads)

    @property
    def sizes(self) -> decode_step.DecodeSizes:
        """Requests, context and steps of the decode steps."""
        sizes = decode_step.DecodeSizes.of(self.asked.scale)
        return sizes if self.asked.batch is None else sizes._replace(batch=self.asked.batch)

    def second_process(self) -> Iterator[Row]:
        self.close()
        found = in_second_process(self.asked.model, self.asked.scale, self.session.device, self.asked.weights)
        if "reason" in found:
            yield self.row("start-again", [], phase="start", reason=found["reason"])
            yield self.row(f"idle-{self.sizes}", [], phase="decode", reason=found["reason"])
            return
        yield self._start("start-again", found["start"], {})
        idle = found["idle"]
        measures = {name: value for name, value in idle.items() if name != "profiled_ms"}
        if idle:
            measures["idle_percent_unprofiled"] = figures(100 * (1 - idle["busy_ms"] / idle["unprofiled_ms"]))
        samples = [1e3 * idle["profiled_ms"]] if idle else []
        reason = "" if idle else "refused: only a GPU has idle time"
        yield self.row(f"idle-{self.sizes}", samples, phase="decode", measures=measures, reason=reason)

    def allocators(self) -> Iterator[Row]:
        """The paper's comparison in time: the same kernels and scheduler, with room for the longest reserved or not."""
        self.close()
        (w8,) = named(["W8"], factor=self.asked.scale)
        w8 = replace(w8, requests=fitted(w8, self.decoder.config.vocab_size)[: self.asked.w8_requests])
        reserved = None
        for allocator in ("contiguous", "paged"):
            llm = LLM(self.decoder, **settings_of(w8, self.decoder.config) | {"allocator": allocator})
            _, found = repeat(llm, w8, 1, costs=costs_of(llm, self.session))
            rate = found[0].output_tok_s
            more: dict[str, float] = {} if reserved is None else {"output_tok_s_over_reserved": figures(rate / reserved)}
            yield self._rate(f"W8-first-{len(w8.requests)}", w8, None, found, backend=f"rooftile, {allocator}", measures=more)
            reserved = rate
            del llm
            tidy(self.session.device)

    def contexts(self) -> Iterator[Row]:
        """A row for each context. Where the sequences do not fit into memory its reason says how many do."""
        self.close()
        lengths = contexts.contexts_for(self.asked.scale, self.decoder.config.max_len)
        batch = contexts.BATCH if self.asked.batch is None else self.asked.batch
        llm = contexts.engine_for(self.decoder, lengths, batch)
        costs = costs_of(llm, self.session)
        for length in lengths:
            name = f"context-{batch}x{length}"
            fit = min(contexts.most_sequences(llm, length), llm.engine.max_answers)
            measures = {"sequence_mb": figures(contexts.sequence_bytes(llm, length) / 1e6)}
            if fit < batch:
                yield self.row(name, [], phase="decode", reason=f"refused: {fit} sequences fit", measures=measures)
                continue
            self.say(f"context {length:,}")
            taken = [contexts.milliseconds(llm, batch, length) for _ in range(self.asked.runs)]
            spreads = measured({"output_tok_s": [batch / ms * 1e3 for ms in taken]})
            spreads["measures"] |= measures
            if costs is not None:
                floor_ms = 1e3 * costs.model.seconds(costs.rates, steps=1, cached=batch * length, running=batch)
                spreads["measures"]["over_floor_ratio"] = figures(sum(taken) / len(taken) / floor_ms)
            yield self.row(name, [1e3 * ms for ms in taken], phase="decode", **spreads)
        del llm
        tidy(self.session.device)

    def drafts(self) -> Iterator[Row]:
        """A row for each batch, and each share of accepted tokens or text."""
        yield from self._drafts("speculative", speculative.sizes_for(self.asked.scale), None)

    def model_drafts(self) -> Iterator[Row]:
        """The same for guesses of a draft model."""
        sizes = speculative.sizes_for(self.asked.scale, draft=True)
        yield from self._drafts("speculative-draft", sizes, speculative.draft_for(self.decoder.config))

    def _drafts(self, part: str, sizes: speculative.SpeculativeSizes, draft: ModelConfig | None) -> Iterator[Row]:
        self.close()
        llm = speculative.engine_for(self.decoder, sizes, draft)
        for batch in sizes.batches if self.asked.batch is None else (self.asked.batch,):
            without: float | None = None
            for way, guessed in speculative.ways(sizes, draft=draft is not None).items():
                self.say(f"{batch} answers, guesses: {way}")
                found = [speculative.run(llm, sizes, batch, guessed) for _ in range(1 + self.asked.runs)][1:]
                spreads = measured({name: [getattr(one, name) for one in found] for name in speculative.MEASURES})
                rate = spreads["measures"]["output_tok_s"]
                if without is None:
                    without = rate
                else:
                    spreads["measures"]["over_without_ratio"] = figures(rate / without)
                settings = {"prompt": sizes.prompt, "answer": sizes.answer}
                taken = [one.seconds * 1e6 for one in found]
                yield self.row(f"{part}-b{batch}-{way}", taken, phase="decode", settings=settings, **spreads)
        del llm
        tidy(self.session.device)

    def adapters(self) -> Iterator[Row]:
        """A row for each way to answer the first requests of W1, each with its rate over the base's."""
        self.close()
        w1 = self.workloads["W1"]
        share = replace(w1, requests=w1.requests[: adapter_rates.REQUESTS])
        name, base = f"adapters-{len(share.requests)}x{adapter_rates.ADAPTERS}", None
        for found in adapter_rates.rates(self.decoder, share, settings_of(share, self.decoder.config), self.asked.runs):
            spreads = measured({"output_tok_s": [found.tokens / seconds for seconds in found.seconds]})
            base = base or spreads["measures"]["output_tok_s"]
            spreads["measures"]["over_base_ratio"] = figures(spreads["measures"]["output_tok_s"] / base)
            samples = [1e6 * seconds for seconds in found.seconds]
            yield self.row(name, samples, backend=f"rooftile, {found.way}", phase="serve", **spreads)

    def peers(self) -> Iterator[Row]:
        """Ours first; then a row for each peer. One that fails has a reason and no rate, and the others go on."""
        w1 = self.workloads["W1"]
        share = replace(w1, requests=w1.requests[: self.asked.peer_requests])
        name = f"W1-first-{len(share.requests)}"
        ours = self._rate(name, share, *repeat(self.llm, share, self.asked.runs, costs=costs_of(self.llm, self.session)))
        yield ours
        self.close()
        for attention in ("paged|sdpa", "paged|rooftile"):
            self.say(f"Transformers with {attention}")
            yield self._peer(name, share, attention, ours.measures["output_tok_s"])
            tidy(self.session.device)

    def _peer(self, name: str, share: Workload, attention: str, our_rate: float) -> Row:
        backend = f"transformers, {attention}"
        try:
            from rooftile_lab.bench.transformers_batching import answers

            found = answers(self.decoder, share.requests, attention, self.asked.peer_limit_s)
        except Exception as error:
            # another program: what it raises is the row's reason, and its traceback goes to stderr
            traceback.print_exc()
            return self.row(name, [], backend=backend, phase="serve", reason=f"failed: {words_of_error(error, 600)}")
        if not found.output_tok_s:
            return self.row(name, [], backend=backend, phase="serve", reason=found.reason)
        measures = {
            "output_tok_s": figures(found.output_tok_s),
            "output_tokens": found.output_tokens,
            "requests": found.requests,
        }
        measures["rooftile_over_this"] = figures(our_rate / found.output_tok_s)
        settings = (found.settings or {}) | {"as_asked": found.as_asked, "transformers": version("transformers")}
        return self.row(
            name,
            [found.seconds * 1e6],
            backend=backend,
            phase="serve",
            measures=measures,
            settings=settings,
            reason=found.reason,
        )


def _as_asked(found: Measures, workload: Workload) -> bool:
    """Whether all requests were answered, and with as many tokens as they asked for."""
    due = sum((ask.params.max_tokens or 0) * ask.params.n for ask in workload.requests)
    return found.requests == len(workload.requests) and found.output_tokens == due
