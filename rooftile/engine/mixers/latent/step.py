"""Multi-head latent attention in one step: prompts from keys and values of their latents, single tokens from the latents.

With K and V the maps of a latent c to a head's key and value, and r the key that rotates:

    prompts        keys [K c, r], values V c: 320 numbers a head and token are made of 576 that all heads share (DeepSeek-V3)
    single tokens  queries K^T q: scores <K^T q, c> + <q_r, r>, outputs V (sum of p c); nothing is made of a latent

Both give the same numbers but for rounding. Heads and sequences are taken in parts, so that what is made of latents stays
bounded. On a GPU kernels read single tokens' latents where they are; elsewhere they are gathered, and all is in fp32.

DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rooftile.engine.mixers.step import StepTokens
from rooftile.exact.api import attention_packed
from rooftile.exact.masks import CAUSAL
from rooftile.kvcache.operators import gather, write
from rooftile.models.latent.latent_layer import LatentLayer
from rooftile.runtime.devices import runs_kernels

# kernels take these
LARGEST_RANK = 512
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# the most bytes of gathered latents, and of keys and values that are made of them, at a time
MOST_BYTES = 1 << 28


class LatentAttention:
    """The attention of one layer to its latents.

    Args:
        layer: the layer.
        cache: (blocks, size, 1, kept): latents, and behind each the key that rotates.
        scale: of the scores.
    """

    def __init__(self, layer: LatentLayer, cache: Tensor, scale: float) -> None:
        self.cache, self.scale, self.sizes = cache, scale, layer.sizes
        self.has_kernels = runs_kernels(cache) and layer.sizes.rank <= LARGEST_RANK and cache.dtype in DTYPES
        self.keys, self.values = layer.by_head()  # (H, unrotated, rank), (H, value_dim, rank)

    def write(self, latent: Tensor, r: Tensor, cells: Tensor) -> None:
        """Writes tokens (total, rank) and (total, rotated) into their cells; a token whose cell is below 0 is left out."""
        row, half = torch.cat((latent, r), dim=-1)[:, None], self.sizes.kept // 2
        write(row[..., :half], row[..., half:], self.cache[..., :half], self.cache[..., half:], cells, None)

    def expanded(self, q: Tensor, table: Tensor, lengths: Sequence[int], cu_q: Tensor) -> Tensor:
        """Returns the outputs (total, H, value_dim) of packed queries (total, H, head_dim), the last tokens of prompts."""
        sizes = self.sizes
        ends = torch.tensor(lengths, dtype=torch.int32)
        if table.is_cuda:
            ends = ends.pin_memory().to(table.device, non_blocking=True)
        latents, turning, cu_k = gather(
            self.cache[..., : sizes.rank], self.cache[..., sizes.rank :], table, ends, None, None, q.dtype
        )
        latents, turning = latents[: sum(lengths), 0], turning[: sum(lengths)]
        each = len(latents) * (2 * sizes.unrotated + sizes.rotated + sizes.value_dim) * q.element_size()
        o = q.new_empty(*q.shape[:2], sizes.value_dim)
        for heads in _parts(q.shape[1], each):
            keys, values = (latents @ maps[heads].flatten(0, 1).T for maps in (self.keys, self.values))
            keys = keys.unflatten(-1, (-1, sizes.unrotated))
            k = torch.cat((keys, turning.expand(-1, keys.shape[1], -1)), dim=-1)
            v = values.unflatten(-1, (-1, sizes.value_dim))
            o[:, heads] = attention_packed(q[:, heads], k, v, cu_q, cu_k, CAUSAL, scale=self.scale)
        return o

    def absorbed(self, q: Tensor, turning: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        """Returns the outputs (B, H, value_dim) of single tokens' queries, (B, H, unrotated) and (B, H, rotated)."""
        q = torch.einsum("bhn,hnr->bhr", q, self.keys)
        if self.has_kernels:
            from rooftile.engine.mixers.latent import kernels

            sums = kernels.attend(q, turning, self.cache, table, lengths, self.sizes.rotated, self.scale)
        else:
            sums = self._sums(torch.cat((q, turning), dim=-1), table, lengths)
        return torch.einsum("bhr,hvr->bhv", sums.to(self.values.dtype), self.values)

    def _sums(self, q: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        """Returns sums of latents (B, H, rank) for absorbed queries (B, H, kept), in plain operations."""
        sizes, wide = self.sizes, torch.promote_types(q.dtype, torch.float32)
        q = q.to(wide)
        S, found = table.shape[1] * self.cache.shape[1], []
        each = S * (2 * sizes.kept + 3 * q.shape[1]) * wide.itemsize
        for rows in _parts(len(q), each):
            there = torch.arange(S, device=q.device) < lengths[rows, None]  # (b, S)
            # a NaN of another sequence stays there: it would pass a weight of zero
            latents = self.cache[table[rows].long()].flatten(1, 3).to(wide).masked_fill_(~there[..., None], 0.0)  # (b, S, kept)
            scores = (q[rows] @ latents.mT).mul_(self.scale).masked_fill_(~there[:, None], -torch.inf)  # (b, H, S)
            found.append(scores.softmax(-1) @ latents[..., : sizes.rank])
        return torch.cat(found)


def _parts(count: int, each: int) -> Iterator[slice]:
    """Yields slices of `count` things of which each takes `each` bytes: one thing at least, and MOST_BYTES at most."""
    some = max(1, MOST_BYTES // max(each, 1))
    yield from (slice(start, min(start + some, count)) for start in range(0, count, some))


class LatentStep:
    """Mixes the tokens of a step; for all layers of the kind.

    Args:
        attention: by the layer's number.
        step: where the tokens are.
    """

    def __init__(self, attention: Mapping[int, LatentAttention], step: StepTokens) -> None:
        self.attention, self.step = attention, step

    def __call__(self, layer: int, /, q: Tensor, turning: Tensor, latent: Tensor, r: Tensor) -> Tensor:
        """Mixes the tokens of one layer; see `rooftile.models.Attend`."""
        one, step = self.attention[layer], self.step
        split, found = step.split, []
        one.write(latent, r, step.cells)
        if step.chunks is not None:
            found.append(self._read_chunks(one, torch.cat((q[:split], turning[:split]), dim=-1)))
        if step.single is not None:
            found.append(one.absorbed(q[split:], turning[split:], *step.narrow(*step.single)))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _read_chunks(self, one: LatentAttention, q: Tensor) -> Tensor:
        """Reads prompts in parts, so that their gathered latents stay bounded."""
        chunks, host = self.step.chunks, self.step.known()
        assert chunks is not None
        lengths, cu_q = host.chunk_lengths.tolist(), host.cu_q.tolist()
        found = []
        for group in self._groups(lengths, one.sizes.kept * q.element_size()):
            columns = -(-max(lengths[group]) // self.step.size)
            begin, end = cu_q[group.start], cu_q[group.stop]
            offsets = chunks.cu_q[group.start : group.stop + 1] - begin
            found.append(one.expanded(q[begin:end], chunks.table[group, :columns], lengths[group], offsets))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _groups(self, lengths: list[int], line: int) -> Iterator[slice]:
        """Yields neighbours whose latents, `line` bytes per token, are gathered together; each has room for the longest."""
        start = longest = 0
        for n, length in enumerate(lengths):
            longest = max(longest, -(-length // self.step.size) * self.step.size)
            if n > start and (n + 1 - start) * longest * line > MOST_BYTES:
                yield slice(start, n)
                start, longest = n, -(-length // self.step.size) * self.step.size
        yield slice(start, len(lengths))
