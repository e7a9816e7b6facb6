"""`Runner`: runs a planned step on a device and returns the next tokens.

The device keeps, in one row (a slot) per running answer, its block table and its last token. The host sends what has changed, in
one copy, and reads the tokens one step later: it never waits for the step that it has just launched. Steps that only decode run
as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.engine.mixers.layers import Layers
from rooftile.engine.mixers.mixer import Mixer
from rooftile.engine.mixers.step import StepTokens
from rooftile.engine.requests.request import Answer, Top
from rooftile.engine.sampling.forbidden import banned_next
from rooftile.engine.sampling.sampler import MOST_NUMBERS, SamplingFeatures, SamplingState, features_of, logprobs, sample
from rooftile.engine.steps.batch_invariant import TILE, row_by_row, tiles_of
from rooftile.engine.steps.graphs import DecodeGraphs
from rooftile.engine.steps.rounds import Mark, MarkedChunk, Rounds, rounds_of
from rooftile.engine.steps.scheduler import ScheduledTokens, StepPlan
from rooftile.engine.steps.step_inputs import Chunks, StepInputs, in_reading_order, is_single, split_prompts
from rooftile.exact.spec import CallSettings
from rooftile.fused import linear
from rooftile.kvcache.caches import Caches
from rooftile.models import Decoder
from rooftile.models.projection import Multiply
from rooftile.runtime.devices import runs_kernels


@dataclass(slots=True)
class Result:
    """The results of a step, on their way to the host."""

    answers: list[Answer]
    tokens: Tensor
    tops: tuple[Tensor, ...] | None
    prompts: list[tuple[ScheduledTokens, tuple[Tensor, ...]]]
    """Logprobs of prompt tokens: for each work the logprobs of the tokens that follow the ones it has read."""
    arrived: torch.cuda.Event | None

    def wait(self) -> list[tuple[Answer, int, Top | None]]:
        """Waits for the results; returns a token for each answer, with logprobs if any were asked for."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens = self.tokens.tolist()
        tops: list[Top | None] = [None] * len(tokens) if self.tops is None else list(top_rows(self.tops))
        return list(zip(self.answers, tokens, tops, strict=True))


def top_rows(found: tuple[Tensor, ...]) -> list[Top]:
    """Turns what `logprobs` returned into one Top per row."""
    chosen, ids, values, ranks = (part.tolist() for part in found)
    return [Top(*row) for row in zip(chosen, ranks, ids, values, strict=True)]


class Runner:
    """A model with its KV cache on a device.

    Args:
        decoder: the model.
        caches: the memory of what its layers keep.
        mixers: one for each kind of layer.
        max_answers: the most answers that run at once.
        max_len: the longest sequence in tokens.
        graphs: whether steps that only decode run as CUDA graphs, on a GPU.
        deterministic: whether an answer's bits may not depend on what runs beside it (see `batch_invariant`).
    """

    def __init__(
        self, decoder: Decoder, caches: Caches, mixers: Sequence[Mixer], max_answers: int, max_len: int, *, graphs: bool = True,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        self.decoder = decoder
        self.caches, self.pages = caches, caches.pages
        self.device = decoder.embedding.device
        self.deterministic = deterministic
        # without a kernel, a deterministic step computes one tile and one row at a time
        self._tile_by_tile = deterministic and not decoder.embedding.is_cuda
        self._multiply: Multiply = linear if deterministic else functional.linear
        # a GPU has one kernel for chunks of any size; the fast ones for single tokens and for long prompts add in other orders
        settings = CallSettings(
            decoder.config.scale, decoder.config.softcap, deterministic=deterministic or None,
            backend="triton" if deterministic and not self._tile_by_tile else None,
        )  # fmt: skip
        if self._tile_by_tile:
            max_len = -(-max_len // TILE) * TILE
        self.size = self.pages.storage.shape[3]
        # one more slot, for the rows that pad the steps of graphs
        self.pad_slot = max_answers
        self.table = torch.zeros(max_answers + 1, -(-max_len // self.size), dtype=torch.int32, device=self.device)
        self.sampling = SamplingState(max_answers + 1, decoder.config.vocab_size, self.device)
        self.layers = Layers(mixers, decoder, caches, settings)
        # the features that each slot's request asks for
        self._features = [SamplingFeatures()] * (max_answers + 1)
        self._graphs: DecodeGraphs | None = None
        if graphs and self.layers.captures and self.table.is_cuda and runs_kernels(self.table):
            self._graphs = DecodeGraphs(self.device, self.sampling, self.pad_slot)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> Result:
        """Launches a step; on a GPU the result arrives later."""
        self._start(plan.started)
        self._update_tables(plan)
        answers = [answer for work in plan.work for answer in work.outputs]
        features = self._features_of(answers)
        befores = [answer.generated + answer.pending - 1 for answer in answers]
        bans = [(row, token) for row, answer in enumerate(answers) for token in banned_next(answer, befores[row])]
        masked = [(answer.slot, answer.grammar.mask) for answer in answers if answer.grammar is not None]
        self.sampling.allow([slot for slot, _ in masked], [mask for _, mask in masked])
        prompts: list[tuple[ScheduledTokens, tuple[Tensor, ...]]] = []
        if self._graphs is not None and not bans and self._only_decodes(plan.work):
            logits, tokens = self._graphs.replay(self._decode, plan.work, features)
        else:
            works = split_prompts(plan.work) if self.layers.separates_prompts else plan.work
            inputs, hidden = self._read(works)
            prompts = self._prompt_logprobs(works, hidden)
            logits = scores = self._logits(hidden.index_select(0, inputs.rows))
            if bans:
                rows, banned = self._send(torch.tensor(bans)).T
                # a copy: logprobs come from the model, with nothing banned
                scores = logits.index_put((rows, banned), logits.new_tensor(-torch.inf))
            tokens = self._sample(scores, inputs.output_slots, inputs.output_positions, features)
        if plan.states_after:
            self.caches.finish(plan.states_after)
        return self._collect(answers, logits, tokens, prompts)

    def capture(self) -> None:
        """Captures the graphs that most steps need, before the first request comes."""
        if self._graphs is not None:
            self._graphs.capture(self._decode)

    def _only_decodes(self, works: list[ScheduledTokens]) -> bool:
        """Whether a graph can run a step: each answer in it reads one token and gets one."""
        separate = self.layers.separates_prompts
        return all(is_single(work, prompts_in_chunks=separate) and len(work.outputs) == 1 for work in works)

    def _start(self, started: list[Answer]) -> None:
        """Gives the sampler the parameters of answers that have got a slot."""
        self.sampling.set(
            [answer.slot for answer in started],
            [answer.request.params for answer in started],
            [answer.seed for answer in started],
            [answer.request.prompt for answer in started],
            [answer.ids[len(answer.request.prompt) :] for answer in started],
        )
        for answer in started:
            self._features[answer.slot] = features_of(answer.request.params)

    def _features_of(self, answers: list[Answer]) -> SamplingFeatures:
        """Returns the union of what the answers ask for."""
        # a draw at temperature 0 is the most likely token, so on a GPU greedy steps need no kernels and graphs of their own
        features = SamplingFeatures(chance=self.table.is_cuda)
        for wanted in {id(wanted): wanted for wanted in (self._features[answer.slot] for answer in answers)}.values():
            features |= wanted
        return features

    def _update_tables(self, plan: StepPlan) -> None:
        """Writes new entries of the block tables, and copies what is shared no longer."""
        if plan.entries:
            values = self._send(torch.tensor([(slot, column, block) for (slot, column), block in plan.entries.items()])).T
            self.table.index_put_((values[0], values[1]), values[2].int())
        if plan.copies or plan.rows or plan.row_copies or plan.states:
            self.caches.prepare(plan.copies, plan.rows, plan.row_copies, plan.states)

    def _read(self, works: list[ScheduledTokens]) -> tuple[StepInputs, Tensor]:
        """Runs the model on chunks and single tokens; returns its inputs on the device and the hidden states (n, hidden)."""
        on_host = StepInputs.of(works, all_chunks=self.deterministic, prompts_in_chunks=self.layers.separates_prompts)
        if self._tile_by_tile:
            return on_host, self._forward_tiles(on_host, {(work.answer.slot, *kept) for work in works for kept in work.kept})
        inputs = on_host.to(self.device)
        chunks = None
        if len(on_host.chunk_slots):
            columns = -(-int(on_host.chunk_lengths.max()) // self.size)
            table = self.table.index_select(0, inputs.chunk_slots)[:, :columns]
            chunks = Chunks(int(on_host.cu_q[-1]), table, inputs.chunk_lengths.int(), inputs.cu_q.int())
        return inputs, self._forward(inputs.tokens, inputs.positions, inputs.slots, chunks, on_host, self._rounds(works, on_host))

    def _rounds(self, works: list[ScheduledTokens], on_host: StepInputs) -> Rounds | None:
        """Returns the rounds of a step; None if each chunk is read at once."""
        if self.caches.states is None:
            return None
        chunks = [
            MarkedChunk(work.tokens, work.answer.slot, tuple(Mark(end - work.start, row) for end, row in work.kept))
            for work in in_reading_order(works)[: len(on_host.chunk_slots)]
        ]
        single = self.deterministic and any(chunk.tokens > 1 for chunk in chunks)
        return rounds_of(chunks, self.device, single=single) if single or any(chunk.marks for chunk in chunks) else None

    def _forward_tiles(self, inputs: StepInputs, kept: Collection[tuple[int, int, int]]) -> Tensor:
        """Returns the hidden states of a step, computed tile by tile.

        Args:
            inputs: the step.
            kept: where states are kept: slots, tokens before it, and rows of states.
        """
        found, rounds = [], None
        for tile in tiles_of(inputs, self.table, self.size):
            if self.caches.states is not None:
                rounds = tile.rounds(kept)
            hidden = self._forward(tile.tokens, tile.positions, tile.slots, tile.chunks, rounds=rounds)
            found.append(hidden[tile.places])
        return torch.cat(found)

    def _forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, chunks: Chunks | None, on_host: StepInputs | None = None,
        rounds: Rounds | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns the hidden states of chunks, which come first, and of single tokens, one per sequence.

        A row with a position below 0 is padding.
        """
        size = self.size
        tokens = torch.where(tokens >= 0, tokens, self.sampling.last.index_select(0, slots))
        places = positions.clamp(min=0)
        blocks = self.table[slots, places // size].long()
        cells = torch.where(positions >= 0, blocks * size + places % size, -1)
        split = chunks.tokens if chunks is not None else 0
        single = None
        if split < len(tokens):
            single = self.table.index_select(0, slots[split:]), (positions[split:] + 1).int()
        rows = self.caches.rows
        attend = self.layers.on(StepTokens(size, cells, positions, slots, self.table, chunks, single, on_host, rows, rounds))
        hidden: Tensor = self.decoder(tokens, places, attend, self._multiply)
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits (n, vocab) of hidden states (n, hidden)."""
        if self._tile_by_tile:
            return row_by_row(self.decoder.logits, hidden)
        return self.decoder.logits(hidden, multiply=self._multiply)

    def _logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, ...]:
        # the order of its sums depends on where a row begins, also on a GPU
        compute = partial(logprobs, k=k, ordered=self.deterministic)
        return row_by_row(compute, logits, tokens) if self.deterministic else compute(logits, tokens)

    def _sample(self, logits: Tensor, slots: Tensor, positions: Tensor, features: SamplingFeatures) -> Tensor:
        compute = partial(sample, state=self.sampling, features=features)
        return row_by_row(compute, logits, slots, positions) if self._tile_by_tile else compute(logits, slots, positions)

    def _decode(self, inputs: Tensor, features: SamplingFeatures) -> tuple[Tensor, Tensor]:
        """Runs single tokens, given as token, position and slot in (3, rows); returns logits and next tokens."""
        tokens, positions, slots = inputs
        chunks = None
        if self.deterministic:
            ends = torch.arange(len(slots) + 1, dtype=torch.int32, device=self.device)
            chunks = Chunks(len(slots), self.table.index_select(0, slots), (positions + 1).int(), ends)
        logits = self._logits(self._forward(tokens, positions, slots, chunks))
        return logits, self._sample(logits, slots, positions + 1, features)

    def _prompt_logprobs(self, works: list[ScheduledTokens], hidden: Tensor) -> list[tuple[ScheduledTokens, tuple[Tensor, ...]]]:
        """Computes the logprobs of prompt tokens, where they are asked for, from the hidden states before them."""
        found: list[tuple[ScheduledTokens, tuple[Tensor, ...]]] = []
        most = max(1, MOST_NUMBERS // self.decoder.config.vocab_size)
        row = 0
        for work in in_reading_order(works, prompts_in_chunks=self.layers.separates_prompts):
            request = work.answer.request
            count = min(work.start + work.tokens, len(request.prompt) - 1) - work.start
            if request.params.prompt_logprobs is not None and count > 0:
                following = self._send(torch.tensor(request.prompt[work.start + 1 : work.start + 1 + count]))
                # in parts: the logits of a long prompt at once take more memory than is kept free for a step
                parts = [
                    self._logprobs(self._logits(part), tokens, request.params.prompt_logprobs)
                    for part, tokens in zip(hidden[row : row + count].split(most), following.split(most), strict=True)
                ]
                found.append((work, tuple(map(torch.cat, zip(*parts, strict=True)))))
            row += work.tokens
        return found

    def _collect(
        self, answers: list[Answer], logits: Tensor, tokens: Tensor, prompts: list[tuple[ScheduledTokens, tuple[Tensor, ...]]]
    ) -> Result:
        """Sends tokens and logprobs on their way to the host."""
        wanted = [n for answer in answers if (n := answer.request.top_count) is not None]
        tops: tuple[Tensor, ...] | None = None
        if wanted:
            # a row without a token has no use for its logprobs
            tops = self._logprobs(logits, tokens.clamp(min=0), max(wanted))
        if self.device.type == "cpu":
            return Result(answers, tokens, tops, prompts, None)
        tokens = tokens.to("cpu", non_blocking=True)
        tops = None if tops is None else tuple(part.to("cpu", non_blocking=True) for part in tops)
        prompts = [(work, tuple(part.to("cpu", non_blocking=True) for part in found)) for work, found in prompts]
        arrived = torch.cuda.Event()
        arrived.record()
        return Result(answers, tokens, tops, prompts, arrived)

    def _send(self, x: Tensor) -> Tensor:
        """Copies a tensor to the device without waiting for it."""
        if self.device.type == "cpu":
            return x
        return x.pin_memory().to(self.device, non_blocking=True)
