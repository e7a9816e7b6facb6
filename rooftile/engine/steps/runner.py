"""`Runner`: runs a planned step on a device and returns the next tokens.

The device keeps, in one row (a slot) per running answer, its block table and its last token. The host sends what has changed, in
one copy, and reads the tokens one step later: it never waits for the step that it has just launched. Steps that only decode run
as CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from rooftile.engine.adapters.groups import RowGroups, group_rows
from rooftile.engine.adapters.slots import AdapterSlots
from rooftile.engine.mixers.layers import Layers
from rooftile.engine.mixers.mixer import Mixer
from rooftile.engine.mixers.step import StepTokens
from rooftile.engine.requests.request import Answer, Top
from rooftile.engine.sampling.features import SamplingFeatures
from rooftile.engine.sampling.sampler import MOST_NUMBERS, NOTHING, logprobs, sample
from rooftile.engine.sampling.state import SamplingState, words_of
from rooftile.engine.speculation.features import Features
from rooftile.engine.steps.batch_invariant import TILE, row_by_row, tiles_of
from rooftile.engine.steps.graphs import PLAIN, DecodeGraphs, most_rows
from rooftile.engine.steps.rounds import Rounds, rounds_of
from rooftile.engine.steps.scheduler import ScheduledTokens, StepPlan
from rooftile.engine.steps.step import Step
from rooftile.engine.steps.step_inputs import Chunks, StepInputs
from rooftile.engine.steps.step_maker import StepMaker, bare_step
from rooftile.exact.spec import CallSettings
from rooftile.fused import linear
from rooftile.kvcache import Copy
from rooftile.kvcache.caches import Caches
from rooftile.models import Decoder
from rooftile.models.projection import Multiply
from rooftile.runtime.devices import runs_kernels


@dataclass(slots=True)
class Result:
    """The results of a step, on their way to the host."""

    outputs: list[tuple[Answer, tuple[int, ...]]]
    """Answers, and the tokens that were drafted for each."""
    works: list[ScheduledTokens]
    """Work whose prompts' logprobs were computed."""
    found: Computed

    def wait(self) -> Iterator[tuple[Answer, tuple[int, ...], list[int], list[Top] | None]]:
        """Waits for the results; yields for each answer its draft, a token from each row, and logprobs if any were asked for."""
        if self.found.arrived is not None:
            self.found.arrived.synchronize()
        tokens = self.found.tokens.tolist()
        tops = None if self.found.tops is None else top_rows(self.found.tops)
        end = 0
        for answer, draft in self.outputs:
            begin, end = end, end + 1 + len(draft)
            yield answer, draft, tokens[begin:end], None if tops is None else tops[begin:end]
        assert end == len(tokens)

    def prompt_tops(self) -> Iterator[tuple[ScheduledTokens, list[Top]]]:
        """Yields logprobs of prompts, once they are there: for work, logprobs of the tokens that follow the ones it has read."""
        for work, found in zip(self.works, self.found.prompts, strict=True):
            yield work, top_rows(found)


class Arrival(Protocol):
    """Something on a device that can be waited for."""

    def synchronize(self) -> None: ...


class Computed(NamedTuple):
    """The tensors that a step leaves, on their way to the host."""

    tokens: Tensor
    tops: tuple[Tensor, ...] | None
    prompts: list[tuple[Tensor, ...]]
    """Logprobs of prompt tokens, for each of `Step.scored`."""
    arrived: Arrival | None
    """The end of the step on the device; None where the tensors are there."""


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
        adapters: the memory of adapters; None if there are none.
        drafted: the most tokens that are drafted for an answer.
        beside: the runner of a larger model for which this one drafts: they have block tables and sampling parameters in common.
    """

    behind = 1
    """How far the token that a row draws is behind the row's position."""

    has_ranks = False
    """Whether other processes run its steps, too, and may end."""

    def __init__(
        self, decoder: Decoder, caches: Caches, mixers: Sequence[Mixer], max_answers: int, max_len: int, *, graphs: bool = True,
        deterministic: bool = False, adapters: AdapterSlots | None = None, drafted: int = 0, beside: Runner | None = None,
    ) -> None:  # fmt: skip
        self.decoder = decoder
        self.adapters = adapters
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
        self.size = self.pages.storage.shape[3] if caches.share is None else caches.share.block
        # one more slot, for the rows that pad the steps of graphs
        self.pad_slot = max_answers
        slots, vocab = max_answers + 1, decoder.config.vocab_size
        self.table = torch.zeros(slots, -(-max_len // self.size), dtype=torch.int32, device=self.device)
        self.sampling = SamplingState(slots, vocab, self.device)
        if beside is not None:
            self.table, self.sampling = beside.table, beside.sampling.beside(vocab)
        self.layers = Layers(mixers, decoder, caches, settings)
        # a draw at temperature 0 is the most likely token, so on a GPU greedy steps need no kernels and graphs of their own
        self._maker = StepMaker(
            max_answers, decoder.config.vocab_size, always=SamplingFeatures(chance=self.table.is_cuda),
            all_chunks=deterministic, separates_prompts=self.layers.separates_prompts,
        )  # fmt: skip
        self.features: Features | None = None
        """Keeps hidden states of each token for a head that drafts; None without one."""
        self.draft: Runner | None = None
        """Runs a draft model, beside this one; None without one."""
        self.most_rows = most_rows(max_answers, drafted)
        """The most tokens that all answers read together in a step that only decodes."""
        self._graphs: DecodeGraphs | None = None
        if graphs and self.layers.captures and self.table.is_cuda and runs_kernels(self.table):
            slots = 0 if adapters is None else adapters.count
            self._graphs = DecodeGraphs(self.device, self.sampling, self.pad_slot, self.most_rows, slots)

    def run(self, plan: StepPlan) -> Result:
        """Launches a step; on a GPU the result arrives later."""
        step = self._maker.make(plan)
        with torch.inference_mode():
            found = self._collect(step, *self.execute(step))
        outputs = [(answer, work.draft.tokens) for work in plan.work for answer in work.outputs]
        return Result(outputs, self._maker.scored_works(plan.work), found)

    def check(self) -> None:
        """Raises the reason why no step can run any more, if there is one."""

    @torch.inference_mode()
    def execute(self, step: Step) -> tuple[Tensor, Tensor, list[tuple[Tensor, ...]]]:
        """Launches a step that is given in integers; returns logits and tokens of its outputs, and logprobs of its prompts."""
        self.sampling.set(step.started)
        self._update_tables(step)
        chained = step.depths.numel() > 0 and (step.features.penalties or step.features.mask)
        if not chained:
            self._allow(step)
        prompts: list[tuple[Tensor, ...]] = []
        graphs = self._graphs if step.only_decodes else None
        if graphs is not None and not step.bans.numel() and not chained:
            logits, tokens = graphs.replay(self._decode, step.inputs, step.features, step.adapters)
        else:
            if graphs is not None and step.depths.numel():
                # its tokens are drawn once more, with all that is asked for
                inputs, (logits, _) = step.inputs.to(self.device), graphs.replay(self._decode, step.inputs, PLAIN, step.adapters)
            else:
                inputs, hidden = self._read(step)
                prompts = self._prompt_logprobs(step, hidden)
                logits = self._logits(hidden.index_select(0, inputs.rows))
            scores = logits
            if step.bans.numel():
                rows, banned = self._send(step.bans)
                # a copy: logprobs come from the model, with nothing banned
                scores = logits.index_put((rows, banned), logits.new_tensor(-torch.inf))
            draw = partial(self._draw_along, step, inputs) if chained else self._sample
            tokens = draw(scores, inputs.output_slots, inputs.output_positions, step.features)
        if step.states_after.numel():
            self.caches.finish(dict(step.states_after.T.tolist()))
        return logits, tokens, prompts

    @torch.inference_mode()
    def execute_next(self, slots: Tensor, positions: Tensor, features: SamplingFeatures, *, again: bool) -> Tensor:
        """Launches the step that reads the token which each slot has drawn last; returns the tokens that are drawn behind them.

        Args:
            slots: (n,), on the host, of answers without adapters.
            positions: (n,), on the host, of those tokens.
            features: the features of the draw.
            again: whether the step before it was the same, of the same slots, each one position in front.
        """
        if again and self._graphs is not None and not self.has_ranks:
            return self._graphs.repeat(len(slots))
        inputs = StepInputs.of_rows(torch.full_like(slots, -1), positions, slots, behind=self.behind)
        return self.execute(bare_step(inputs, features, single=True))[1]

    def load_adapter(self, slot: int, path: str | Path) -> Path:
        """Reads an adapter into a slot that no request uses; returns the folder.

        Raises:
            InvalidInput, Unsupported: it is refused; the slot then adds nothing.
        """
        assert self.adapters is not None
        adapter = self.adapters.read(path)
        self.adapters.write(slot, adapter)
        return adapter.path

    def capture(self) -> None:
        """Captures the graphs that most steps need, before the first request comes."""
        if self._graphs is not None:
            self._graphs.capture(self._decode)
        if self.draft is not None:
            self.draft.capture()

    def forget_graphs(self) -> None:
        """Lets go of all graphs; later steps run without."""
        self._graphs = None

    def _update_tables(self, step: Step) -> None:
        """Writes new entries of the block tables, and copies what is shared no longer."""
        if step.entries.numel():
            slots, columns, blocks = self._send(step.entries)
            self.table.index_put_((slots, columns), blocks.int())
        if any(part.numel() for part in (step.copies, step.rows, step.row_copies, step.states)):
            copies, row_copies = ([Copy(*pair) for pair in part.T.tolist()] for part in (step.copies, step.row_copies))
            self.caches.prepare(copies, dict(step.rows.T.tolist()), row_copies, dict(step.states.T.tolist()))

    def _read(self, step: Step) -> tuple[StepInputs, Tensor]:
        """Runs the model on chunks and single tokens; returns its inputs on the device and the hidden states (n, hidden)."""
        on_host = step.inputs
        if self._tile_by_tile:
            return on_host, self._forward_tiles(on_host, {(slot, end, row) for slot, end, row in step.marks.T.tolist()})
        inputs = on_host.to(self.device)
        chunks = None
        if len(on_host.chunk_slots):
            columns = -(-int(on_host.chunk_lengths.max()) // self.size)
            table = self.table.index_select(0, inputs.chunk_slots)[:, :columns]
            chunks = Chunks(int(on_host.cu_q[-1]), table, inputs.chunk_lengths.int(), inputs.cu_q.int())
        groups = self._groups(step)
        return inputs, self._forward(inputs.tokens, inputs.positions, inputs.slots, chunks, on_host, self._rounds(step), groups)

    def _groups(self, step: Step) -> RowGroups | None:
        """Returns the rows of a step by their adapters; None if none has one."""
        if self.adapters is None or not step.adapters.numel():
            return None
        groups = group_rows(step.adapters)
        return groups._replace(buffer=self._send(groups.buffer))

    def _rounds(self, step: Step) -> Rounds | None:
        """Returns the rounds of a step; None if each chunk is read at once."""
        if self.caches.states is None:
            return None
        chunks = step.chunks()
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
        rounds: Rounds | None = None, groups: RowGroups | None = None,
    ) -> Tensor:  # fmt: skip
        """Returns the hidden states of chunks, which come first, and of single tokens, one per sequence.

        A row with a position below 0 is padding.
        """
        size = self.size
        drawn = tokens < 0
        tokens = torch.where(drawn, self.sampling.last.index_select(0, slots), tokens)
        places = positions.clamp(min=0)
        blocks, share = self.table[slots, places // size].long(), self.caches.share
        cells = blocks * size + places % size if share is None else share.cells(blocks, places)
        cells = torch.where(positions >= 0, cells, -1)
        split = chunks.tokens if chunks is not None else 0
        single = None
        if split < len(tokens):
            single = self.table.index_select(0, slots[split:]), (positions[split:] + 1).int()
        rows = self.caches.rows
        step = StepTokens(size, cells, positions, slots, self.table, chunks, single, on_host, rows, rounds)
        with nullcontext() if self.adapters is None else self.adapters.reading(groups):
            return self._compute(tokens, drawn, places, step)

    def _compute(self, tokens: Tensor, drawn: Tensor, places: Tensor, step: StepTokens) -> Tensor:
        """Returns the hidden states of tokens, of which those that are `drawn` were not known to the host."""
        attend, features = self.layers.on(step), self.features
        if features is None:
            hidden: Tensor = self.decoder(tokens, places, attend, self._multiply)
            return hidden
        streams: dict[int, Tensor | None] = dict.fromkeys(features.taps)
        hidden = self.decoder(tokens, places, attend, self._multiply, streams)
        features.write(streams, hidden, step.cells)
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
        tokens = row_by_row(compute, logits, slots, positions) if self._tile_by_tile else compute(logits, slots, positions)
        if self.caches.share is not None:
            # each rank has computed the logits by itself; one that has rounded otherwise must not go on with another token
            tokens = self.caches.share.first(tokens)
            self.sampling.last.index_copy_(0, slots, tokens.clamp(min=0))
        return tokens

    def _allow(self, step: Step, depth: int = 0) -> None:
        """Writes the masks of the rows that follow `depth` drafted tokens."""
        if len(step.masks):
            slots, depths = step.masked
            there = depths == depth
            masks = step.masks.view(torch.int32)[:, : words_of(self.sampling.vocab)]
            self.sampling.allow(slots[there], masks[there])

    def _draw_along(
        self, step: Step, inputs: StepInputs, logits: Tensor, slots: Tensor, positions: Tensor, features: SamplingFeatures
    ) -> Tensor:
        """Draws the tokens of drafts one depth after the other, since what a row may draw depends on the tokens before it.

        A row behind a guess that was not drawn is the pad slot's: it counts nowhere.
        """
        tokens, reached = torch.full_like(slots, NOTHING), torch.ones_like(slots, dtype=torch.bool)
        for depth in range(int(step.depths.max()) + 1):
            self._allow(step, depth)
            rows = self._send((step.depths == depth).nonzero()[:, 0])
            own = slots[rows]
            if depth:
                # the row before is the same answer's
                reached[rows] = reached[rows - 1] & (tokens[rows - 1] == inputs.tokens[inputs.rows[rows]])
                own = torch.where(reached[rows], own, self.pad_slot)
            tokens[rows] = self._sample(logits[rows], own, positions[rows], features)
        return tokens

    def _decode(self, inputs: Tensor, features: SamplingFeatures, groups: RowGroups | None) -> tuple[Tensor, Tensor]:
        """Runs single tokens, given as token, position and slot in (3, rows); returns logits and next tokens."""
        tokens, positions, slots = inputs
        chunks = None
        if self.deterministic:
            ends = torch.arange(len(slots) + 1, dtype=torch.int32, device=self.device)
            chunks = Chunks(len(slots), self.table.index_select(0, slots), (positions + 1).int(), ends)
        logits = self._logits(self._forward(tokens, positions, slots, chunks, groups=groups))
        return logits, self._sample(logits, slots, positions + self.behind, features)

    def _prompt_logprobs(self, step: Step, hidden: Tensor) -> list[tuple[Tensor, ...]]:
        """Computes the logprobs of prompt tokens, where they are asked for, from the hidden states before them."""
        found: list[tuple[Tensor, ...]] = []
        most = max(1, MOST_NUMBERS // self.decoder.config.vocab_size)
        begin = 0
        for row, count, k in step.scored.T.tolist():
            following = self._send(step.following[begin : begin + count])
            # in parts: the logits of a long prompt at once take more memory than is kept free for a step
            parts = [
                self._logprobs(self._logits(part), tokens, k)
                for part, tokens in zip(hidden[row : row + count].split(most), following.split(most), strict=True)
            ]
            found.append(tuple(map(torch.cat, zip(*parts, strict=True))))
            begin += count
        return found

    def _collect(self, step: Step, logits: Tensor, tokens: Tensor, prompts: list[tuple[Tensor, ...]]) -> Computed:
        """Sends tokens and logprobs on their way to the host."""
        tops: tuple[Tensor, ...] | None = None
        if step.tops is not None:
            # a row without a token has no use for its logprobs
            tops = self._logprobs(logits, tokens.clamp(min=0), step.tops)
        if self.device.type == "cpu":
            return Computed(tokens, tops, prompts, None)
        tokens = tokens.to("cpu", non_blocking=True)
        tops = None if tops is None else tuple(part.to("cpu", non_blocking=True) for part in tops)
        prompts = [tuple(part.to("cpu", non_blocking=True) for part in found) for found in prompts]
        arrived = torch.cuda.Event()
        arrived.record()
        return Computed(tokens, tops, prompts, arrived)

    def _send(self, x: Tensor) -> Tensor:
        """Copies a tensor to the device without waiting for it."""
        if self.device.type == "cpu":
            return x
        return x.pin_memory().to(self.device, non_blocking=True)
