"""A step of the model on a device: what the scheduler planned in, the next tokens out.

What must be known of each running answer lies on the device, a row (a slot) each: its block table and its last token. The host
sends what has changed, in one copy, and takes the tokens back a step later: it never waits for the step that it has just begun.
Steps that only decode run as one CUDA graph, from embedding to sampling, one for each number of rows in a ladder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rooftile.api import prepare_paged
from rooftile.fused import runs_on
from rooftile.kvcache import Copy, PagedKV, Pages, Rotation
from rooftile.masks import CAUSAL, Mask, Window
from rooftile.models import Decoder, ModelConfig
from rooftile.serve.request import Answer, Top
from rooftile.serve.sampling.sampler import MOST_NUMBERS, SamplingState, Wants, logprobs, sample, wants_of
from rooftile.serve.scheduler import Plan, Work
from rooftile.spec import Asked

# rows of the graphs: a step of fewer is filled up. Products of 224 rows take cuBLAS longer than those of 256
LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160, 176, 192, 208, 256, 320, 384, 448, 512)


@dataclass(slots=True)
class Result:
    """What a step found, on its way to the host."""

    answers: list[Answer]
    tokens: Tensor
    tops: tuple[Tensor, ...] | None
    prompts: list[tuple[Work, tuple[Tensor, ...]]]
    """Logprobs of the tokens that follow each one that was read, as far as they are the prompt's."""
    arrived: torch.cuda.Event | None

    def wait(self) -> list[tuple[Answer, int, Top | None]]:
        """A token for each answer."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens = self.tokens.tolist()
        tops: list[Top | None] = [None] * len(tokens) if self.tops is None else list(top_rows(self.tops))
        return list(zip(self.answers, tokens, tops, strict=True))


def top_rows(found: tuple[Tensor, ...]) -> list[Top]:
    """What `logprobs` returned, row by row."""
    chosen, ids, values, ranks = (part.tolist() for part in found)
    return [Top(*row) for row in zip(chosen, ranks, ids, values, strict=True)]


def masks_of(config: ModelConfig) -> tuple[Mask, ...]:
    """Of each layer."""
    return tuple(CAUSAL if w is None else CAUSAL & Window(w - 1) for w in config.windows)


class Runner:
    """A model with its cache on a device.

    Args:
        decoder: the model.
        pages: the blocks' memory.
        max_answers: how many run at once.
        max_len: tokens of a sequence.
        graphs: whether steps that only decode are captured, on a GPU.
    """

    def __init__(self, decoder: Decoder, pages: Pages, max_answers: int, max_len: int, *, graphs: bool = True) -> None:
        self.decoder = decoder
        self.pages = pages
        self.device = decoder.embedding.device
        size = pages.storage.shape[3]
        # one more row, which fills up the steps of graphs
        self.nobody = max_answers
        self.table = torch.zeros(max_answers + 1, -(-max_len // size), dtype=torch.int32, device=self.device)
        self.last = torch.zeros(max_answers + 1, dtype=torch.int64, device=self.device)
        self.sampling = SamplingState(max_answers + 1, decoder.config.vocab_size, self.device)
        self.masks = masks_of(decoder.config)
        # of each slot's request
        self._wants = [Wants()] * (max_answers + 1)
        captures = graphs and self.table.is_cuda and runs_on(self.table)
        self._graphs: dict[tuple[int, Wants], Graph] | None = {} if captures else None
        if self._graphs is not None:
            self._memory = torch.cuda.graph_pool_handle()
            # torch's own is of the device of a process's first capture
            self._capturing = torch.cuda.Stream(self.device)

    @torch.inference_mode()
    def run(self, plan: Plan) -> Result:
        """Begins a step."""
        started = plan.started
        self.sampling.set(
            [answer.slot for answer in started],
            [answer.request.params for answer in started],
            [answer.seed for answer in started],
            [answer.request.prompt for answer in started],
            [answer.ids[len(answer.request.prompt) :] for answer in started],
        )
        for answer in started:
            self._wants[answer.slot] = wants_of(answer.request.params)
        self._place(plan.entries, plan.copies)
        heirs = [answer for work in plan.work for answer in work.heirs]
        wants = Wants()
        for wanted in {id(wanted): wanted for wanted in (self._wants[answer.slot] for answer in heirs)}.values():
            wants |= wanted
        bans = [
            (row, token)
            for row, answer in enumerate(heirs)
            if answer.generated + answer.pending - 1 < answer.request.params.min_tokens
            for token in answer.request.ends
        ]
        prompts: list[tuple[Work, tuple[Tensor, ...]]] = []
        if self._graphs is not None and not bans and all(work.tokens == 1 and len(work.heirs) == 1 for work in plan.work):
            logits, tokens = self._replay(plan.work, wants)
        else:
            hidden, rows, slots, positions = self._read(plan.work)
            prompts = self._prompt_logprobs(plan.work, hidden)
            logits = scores = self.decoder.logits(hidden.index_select(0, rows))
            if bans:
                where = self._sent(torch.tensor(bans)).T
                # logprobs are those of the model all the same
                scores = logits.index_put((where[0], where[1]), logits.new_tensor(-torch.inf))
            tokens = self._sample(scores, slots, positions, wants)
        return self._collect(heirs, logits, tokens, prompts)

    def _place(self, entries: dict[tuple[int, int], int], copies: list[Copy]) -> None:
        """Block tables and shared blocks as the plan has them."""
        if entries:
            values = self._sent(torch.tensor([(slot, column, block) for (slot, column), block in entries.items()])).T
            self.table.index_put_((values[0], values[1]), values[2].int())
        self.pages.copy(copies)

    def _read(self, works: list[Work]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hidden states of all that is read; and of each heir the row, the slot, and the position of its next token."""
        chunks = [work for work in works if work.tokens > 1]
        ordered = chunks + [work for work in works if work.tokens == 1]
        ends = np.cumsum([0, *(work.tokens for work in ordered)])
        n, c = int(ends[-1]), len(chunks)
        # what the host does not know yet, the last token of a slot, stays -1
        tokens = np.full(n, -1)
        positions, owners = np.empty((2, n), dtype=np.int64)
        last_row: dict[int, int] = {}
        for work, begin, end in zip(ordered, ends[:-1].tolist(), ends[1:].tolist(), strict=True):
            known = work.answer.ids[work.start : work.start + work.tokens]
            tokens[begin : begin + len(known)] = known
            positions[begin:end] = np.arange(work.start, work.start + work.tokens)
            owners[begin:end] = work.answer.slot
            last_row[id(work)] = end - 1
        heirs = [(last_row[id(work)], heir.slot, work.start + work.tokens) for work in works for heir in work.heirs]
        m = len(heirs)
        starts, lengths = ends[: c + 1], [work.start + work.tokens for work in chunks]
        columns = np.array(heirs, dtype=np.int64).reshape(m, 3).T.ravel()
        owned = [work.answer.slot for work in chunks]
        flat = np.concatenate([tokens, positions, owners, columns, starts, lengths, owned], dtype=np.int64, casting="unsafe")
        parts = self._sent(torch.from_numpy(flat)).split([n, n, n, m, m, m, c + 1, c, c])
        ids, places, slots, rows, heir_slots, heir_positions, cu_q, chunk_lengths, chunk_slots = parts
        held = -(-max(lengths, default=0) // self.pages.storage.shape[3])
        chunk = None
        if chunks:
            table = self.table.index_select(0, chunk_slots)[:, :held]
            chunk = Chunks(int(starts[-1]), table, chunk_lengths.int(), cu_q.int())
        return self._forward(ids, places, slots, chunk), rows, heir_slots, heir_positions

    def _forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, chunks: Chunks | None) -> Tensor:
        """Hidden states of chunks, first, and of single tokens, one a sequence; a position below 0 is nobody's."""
        size = self.pages.storage.shape[3]
        tokens = torch.where(tokens >= 0, tokens, self.last.index_select(0, slots))
        places = positions.clamp(min=0)
        blocks = self.table[slots, places // size].long()
        cells = torch.where(positions >= 0, blocks * size + places % size, -1)
        split = chunks.tokens if chunks is not None else 0
        single = None
        if split < len(tokens):
            single = self.table.index_select(0, slots[split:]), (positions[split:] + 1).int()
        config, pages, masks = self.decoder.config, self.pages, self.masks
        # layers differ in their masks at most: what one is checked for holds for the next
        known: dict[tuple[Mask, bool], Callable[[Tensor, PagedKV], tuple[Tensor, Tensor]]] = {}

        def see(layer: int, q: Tensor, cache: PagedKV) -> Tensor:
            kind = masks[layer], q.dim() == 4
            if kind not in known:
                known[kind] = prepare_paged(q, cache, masks[layer], asked=Asked(config.scale, config.softcap))
            return known[kind](q, cache)[0]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None) -> Tensor:
            q = pages.write_and_rotate(layer, q, k, v, cells, rotation)
            found = []
            if chunks is not None:
                found.append(see(layer, q[:split], pages.view(layer, chunks.table, chunks.lengths, chunks.cu_q)))
            if single is not None:
                found.append(see(layer, q[split:, None], pages.view(layer, *single)).squeeze(1))
            return found[0] if len(found) == 1 else torch.cat(found)

        hidden: Tensor = self.decoder(tokens, places, attend)
        return hidden

    def _sample(self, logits: Tensor, slots: Tensor, positions: Tensor, wants: Wants) -> Tensor:
        tokens = sample(logits, slots, positions, self.sampling, wants)
        self.last.index_copy_(0, slots, tokens)
        return tokens

    def _replay(self, works: list[Work], wants: Wants) -> tuple[Tensor, Tensor]:
        """The same for single tokens, as a graph."""
        assert self._graphs is not None
        n = len(works)
        rows = next((rows for rows in LADDER if rows >= n), n)
        filling = rows - n
        # a draw at temperature 0 is the most likely token: graphs are not made twice
        wants |= Wants(chance=True)
        sent = torch.tensor(
            [
                [work.answer.ids[work.start] if work.start < len(work.answer.ids) else -1 for work in works] + [0] * filling,
                [work.start for work in works] + [-1] * filling,
                [work.answer.slot for work in works] + [self.nobody] * filling,
            ]
        ).pin_memory()
        graph = self._graphs.get((rows, wants))
        if graph is None:
            self.sampling.prepare(wants)
            graph = self._graphs[rows, wants] = self._captured(rows, wants)
        graph.inputs.copy_(sent, non_blocking=True)
        graph.graph.replay()
        return graph.logits[:n], graph.tokens[:n]

    def capture(self) -> None:
        """Makes the graphs of steps without penalties and the like, the largest first: the others fit into its memory."""
        if self._graphs is not None:
            wants = Wants(chance=True)
            # up to the first that all slots fit in
            rungs = [rows for n, rows in enumerate(LADDER) if not n or LADDER[n - 1] < self.nobody]
            for rows in reversed(rungs):
                self._graphs[rows, wants] = self._captured(rows, wants)

    def _nobodies(self, rows: int) -> Tensor:
        """Token, position and slot of rows that fill up."""
        inputs = torch.empty(3, rows, dtype=torch.int64, device=self.device)
        return inputs.copy_(torch.tensor([[0], [-1], [self.nobody]]).expand(3, rows))

    def _decode(self, inputs: Tensor, wants: Wants) -> tuple[Tensor, Tensor]:
        """Logits and tokens of single tokens."""
        tokens, positions, slots = inputs
        logits = self.decoder.logits(self._forward(tokens, positions, slots, None))
        return logits, self._sample(logits, slots, positions + 1, wants)

    @torch.inference_mode()
    def _captured(self, rows: int, wants: Wants) -> Graph:
        inputs = self._nobodies(rows)
        # kernels are compiled and workspaces made before the capture
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._decode(inputs, wants)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._capturing):
            logits, tokens = self._decode(inputs, wants)
        return Graph(graph, inputs, logits, tokens)

    def _prompt_logprobs(self, works: list[Work], hidden: Tensor) -> list[tuple[Work, tuple[Tensor, ...]]]:
        """Of the tokens that follow each token of a chunk, as far as they are the prompt's."""
        found: list[tuple[Work, tuple[Tensor, ...]]] = []
        most = max(1, MOST_NUMBERS // self.decoder.config.vocab_size)
        row = 0
        for work in [work for work in works if work.tokens > 1] + [work for work in works if work.tokens == 1]:
            request = work.answer.request
            count = min(work.start + work.tokens, len(request.prompt) - 1) - work.start
            if request.params.prompt_logprobs is not None and count > 0:
                following = self._sent(torch.tensor(request.prompt[work.start + 1 : work.start + 1 + count]))
                # scores of a long prompt at once would be more than is kept free for a step
                parts = [
                    logprobs(self.decoder.logits(part), tokens, request.params.prompt_logprobs)
                    for part, tokens in zip(hidden[row : row + count].split(most), following.split(most), strict=True)
                ]
                found.append((work, tuple(map(torch.cat, zip(*parts, strict=True)))))
            row += work.tokens
        return found

    def _collect(
        self, heirs: list[Answer], logits: Tensor, tokens: Tensor, prompts: list[tuple[Work, tuple[Tensor, ...]]]
    ) -> Result:
        """The tokens, on their way to the host with what else was asked for."""
        wanted = [n for answer in heirs if (n := answer.request.top_count) is not None]
        tops: tuple[Tensor, ...] | None = logprobs(logits, tokens, max(wanted)) if wanted else None
        if self.device.type == "cpu":
            return Result(heirs, tokens, tops, prompts, None)
        tokens = tokens.to("cpu", non_blocking=True)
        tops = None if tops is None else tuple(part.to("cpu", non_blocking=True) for part in tops)
        prompts = [(work, tuple(part.to("cpu", non_blocking=True) for part in found)) for work, found in prompts]
        arrived = torch.cuda.Event()
        arrived.record()
        return Result(heirs, tokens, tops, prompts, arrived)

    def _sent(self, x: Tensor) -> Tensor:
        if self.device.type == "cpu":
            return x
        return x.pin_memory().to(self.device, non_blocking=True)


class Chunks(NamedTuple):
    """Parts of prompts that are read together: how many tokens, and the cache as they see it."""

    tokens: int
    table: Tensor
    lengths: Tensor
    cu_q: Tensor


class Graph(NamedTuple):
    """A captured step: token, position and slot of its rows go in; logits and tokens come out."""

    graph: torch.cuda.CUDAGraph
    inputs: Tensor  # (3, rows)
    logits: Tensor
    tokens: Tensor
