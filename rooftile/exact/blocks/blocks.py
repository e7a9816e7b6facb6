"""Lists of key blocks: which blocks of keys each block of queries sees.

A kernel computes a tile of scores or skips it whole, so a sparse attention is as fast as it is sparse only if what it sees is
made of whole blocks. The lists stay on the device: the host does not wait for them.

Blocks count from the first query and the first key, also where a mask beside them is aligned at the end. In packed calls they
count within a sequence, and sequence b has the lists from place cu_q[b] // block_size[0] + b on: that is room for each of its
blocks, and no host has to read the offsets.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from rooftile.drawing import notebook as shown
from rooftile.errors import InvalidInput
from rooftile.exact.blocks.block_mask import lists_of_block_mask
from rooftile.exact.blocks.captured import Seen, captured, changed
from rooftile.exact.blocks.lists import BITS, LEAST, TransposedLists, lists_of, transposed, unpacked
from rooftile.runtime.words import answers_words

# lists by the BlockMask that they were made of, with everything that its mask_mod reads
_OF_BLOCK_MASKS: WeakKeyDictionary[Any, tuple[Blocks, list[Seen]]] = WeakKeyDictionary()


@answers_words
@dataclass(frozen=True, eq=False, repr=False)
class Blocks:
    """Lists of key blocks, an argument of `rooftile.attention`.

    Args:
        counts: how many blocks each block of queries sees, int32 (1|B, 1|Hk|H, blocks of queries). In packed calls B is 1 and the
            last axis has total_q // block_size[0] + sequences places, see `rooftile.exact.blocks`.
        indices: which, int32 (1|B, 1|Hk|H, blocks of queries, most); in any order, each once. Later entries are not read.
        block_size: queries and keys of a block: multiples of 64.
        bits: for blocks that are seen in part: int32 (1|B, 1|Hk|H, blocks of queries, n, block_size[0], block_size[1] / 32) for
            the first n blocks of each list. Bit c of word w is key 32 w + c of the block. Later blocks are seen whole.
        validate: read the lists at each call, and refuse an index that is out of range or twice in a list; on a GPU this waits.
            Lists on a CPU are always read. Without it, an index that is out of range is passed over.

    Shapes and dtypes are checked here, lengths by each call. A mask hides more inside of the listed blocks.

    Raises:
        InvalidInput: a shape, a dtype, a device or a size is wrong.

    Example:
        >>> keep = torch.rand(1, 8, 4, 4) < 0.5
        >>> q, k, v = (torch.randn(2, 512, 8, 64) for _ in range(3))
        >>> rooftile.attention(q, k, v, rooftile.CAUSAL, blocks=Blocks.from_dense(keep)).shape
        torch.Size([2, 512, 8, 64])
    """

    counts: Tensor
    indices: Tensor
    block_size: tuple[int, int] = (128, 128)
    bits: Tensor | None = None
    validate: bool = False
    _kept: dict[Any, TransposedLists] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "block_size", _checked_size(self.block_size))
        for name, x, axes in (("counts", self.counts, 3), ("indices", self.indices, 4), ("bits", self.bits, 6)):
            if x is None and name == "bits":
                continue
            if not isinstance(x, Tensor) or x.dtype != torch.int32 or x.ndim != axes:
                came = f"a {x.dtype} tensor {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
                raise InvalidInput(f"blocks: {name} is {came}; must be an int32 tensor of {axes} axes")
            if x.device != self.counts.device:
                raise InvalidInput(f"blocks: {name} is on {x.device} and counts on {self.counts.device}; must be on one device")
        if self.indices.shape[:3] != self.counts.shape:
            raise InvalidInput(
                f"blocks: indices is {tuple(self.indices.shape)}; must be {tuple(self.counts.shape)}, the shape of counts, and "
                "an axis for the list"
            )
        if self.bits is not None:
            rows, keys = self.block_size
            due = (*self.counts.shape, self.bits.shape[3], rows, keys // BITS)
            if tuple(self.bits.shape) != due or self.bits.shape[3] > self.indices.shape[3]:
                raise InvalidInput(
                    f"blocks: bits is {tuple(self.bits.shape)}; must be {(*self.counts.shape, 'n', rows, keys // BITS)}: a bit "
                    f"for each pair of the first n blocks of a list, n at most {self.indices.shape[3]}"
                )

    def __repr__(self) -> str:
        lists, keys = tuple(self.counts.shape), self.indices.shape[-1]
        part = "" if self.bits is None else f", up to {self.bits.shape[3]:,} seen in part"
        size = f"{self.block_size[0]} x {self.block_size[1]}"
        return f"Blocks(lists {lists} of up to {keys:,} blocks of {size}{part}, on {self.counts.device})"

    def _repr_html_(self) -> str:
        """Draws the lists of the first head of the first sequence, for up to 128 blocks of queries. Waits for the device."""
        if self.counts.is_meta or not self.counts.numel():
            return shown.card(shown.preformatted(f"{self!r}"))
        counts, indices = self.counts[0, 0, :128].tolist(), self.indices[0, 0, :128].tolist()
        seen = [[place for place in its[:count] if place >= 0] for count, its in zip(counts, indices, strict=True)]
        last = max((place for its in seen for place in its), default=0) + 1
        rows = [[(place / last, (place + 1) / last) for place in its] for its in seen]
        words = "The lists of the first head: blocks of queries run down, blocks of keys across; filled is seen."
        return shown.card(shown.sentence(f"{self!r}"), shown.spans(rows), shown.sentence(words))

    @classmethod
    def from_dense(cls, keep: Tensor, block_size: tuple[int, int] = (128, 128), *, validate: bool = False) -> Blocks:
        """Makes lists from booleans (1|B, 1|Hk|H, blocks of queries, blocks of keys), True for blocks that are seen.

        Nothing is read by the host. Fewer axes are the last ones.

        Example:
            >>> Blocks.from_dense(torch.eye(4, dtype=torch.bool)).counts.tolist()
            [[[1, 1, 1, 1]]]
        """
        if not isinstance(keep, Tensor) or keep.dtype != torch.bool or not 2 <= keep.ndim <= 4:
            came = f"a {keep.dtype} tensor {tuple(keep.shape)}" if isinstance(keep, Tensor) else repr(keep)
            raise InvalidInput(f"blocks: keep is {came}; must be a boolean tensor (B, H, blocks of queries, blocks of keys)")
        return cls(*lists_of(keep[(None,) * (4 - keep.ndim)]), block_size, validate=validate)

    @classmethod
    def from_block_mask(cls, block_mask: Any) -> Blocks:
        """Makes lists from FlexAttention's `BlockMask`; made once for each, and kept with it.

        Its `mask_mod` is asked for the blocks that are seen in part, and for no other. Tensors and numbers that it reads beside
        its arguments must stay as they are. A change in place is seen by the tensor's own counter, which writing through `.data`
        or NumPy does not move, and not inside of a compiled function.

        Raises:
            InvalidInput: blocks of a size that is no multiple of 64, bits that take more than 1 GiB, or a tensor or a number that
                `mask_mod` reads was changed or replaced since the first call.

        Example:
            >>> from torch.nn.attention.flex_attention import create_block_mask
            >>> causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, 300, 300, device="cpu")
            >>> Blocks.from_block_mask(causal).counts.tolist()
            [[[1, 2, 3]]]
        """
        if type(block_mask).__name__ != "BlockMask":
            raise InvalidInput(f"block_mask is a {type(block_mask).__name__}; must be FlexAttention's BlockMask")
        kept = _OF_BLOCK_MASKS.get(block_mask)
        if torch.compiler.is_compiling() and kept is not None:
            return kept[0]
        if kept is not None:
            name = changed(kept[1], captured(block_mask.mask_mod, copies=False))
            if name is not None:
                raise InvalidInput(
                    f"the BlockMask's mask_mod reads {name}, which was changed after the mask was first used; the mask lists the "
                    "blocks of before: make a new one with create_block_mask"
                )
            return kept[0]
        # kept for training too, whose backward takes no tensor that was made in inference mode
        with torch.inference_mode(False):
            made = cls(*lists_of_block_mask(block_mask))
        # a function may write down that it was called
        _OF_BLOCK_MASKS[block_mask] = made, captured(block_mask.mask_mod)
        return made

    def dense(self, key_blocks: int | None = None) -> Tensor:
        """Returns booleans (1|B, 1|heads, blocks of queries, key_blocks), True for listed blocks.

        key_blocks: None reads the largest index, which waits for a GPU.

        Example:
            >>> Blocks.from_dense(torch.eye(4, dtype=torch.bool)).dense().equal(torch.eye(4, dtype=torch.bool)[None, None])
            True
        """
        return self.slots(self._key_blocks(key_blocks)) >= 0

    def transposed(self, key_blocks: int | None = None) -> TransposedLists:
        """Returns the lists seen from the keys, which a backward walks; built on the device, once.

        key_blocks: None reads the largest index, which waits for a GPU.
        """
        n = self._key_blocks(key_blocks)
        if torch.compiler.is_compiling() or self.counts.is_inference() or _is_capturing(self.counts):
            # a graph makes them anew, since its lists may have changed
            return self._transposed(n)
        key = n, self.counts._version, self.indices._version
        if key not in self._kept:
            self._kept.clear()
            self._kept[key] = self._transposed(n)
        return self._kept[key]

    @property
    def density(self) -> Tensor:
        """The listed share of all blocks, a number on the device. It takes the longest possible list for a row of all blocks."""
        most = self.indices.shape[-1]
        return self.counts.clamp(0, most).float().mean() / max(most, 1)

    def pairs(self, T: int, S: int) -> Tensor:
        """Returns booleans (1|B, 1|heads, T, S), True for pairs in listed blocks: T x S of them, for tests and small problems."""
        rows, keys = self.block_size
        n = -(-S // keys)
        slots = self.slots(n)
        seen = (slots >= 0).repeat_interleave(rows, -2).repeat_interleave(keys, -1)[..., :T, :S]
        if self.bits is None or not self.bits.shape[3]:
            return seen
        b, h, i, j = torch.where((slots >= 0) & (slots < self.bits.shape[3]))
        part = unpacked(self.bits[b, h, i, slots[b, h, i, j].long()])
        whole = torch.ones(*seen.shape[:2], self.counts.shape[2] * rows, n * keys, dtype=torch.bool, device=seen.device)
        tiles = whole.unflatten(-1, (n, keys)).unflatten(-3, (-1, rows))  # (B, heads, blocks, rows, blocks, keys)
        tiles[b, h, i, :, j] = part
        return seen & whole[..., :T, :S]

    def of_slots(self, start: int, stop: int) -> Blocks:
        """Returns the lists of some blocks of queries: of a sequence in a packed call."""
        bits = None if self.bits is None else self.bits[:, :, start:stop]
        return Blocks(self.counts[:, :, start:stop], self.indices[:, :, start:stop], self.block_size, bits)

    def of_sequence(self, b: int) -> Blocks:
        """Returns the lists of one sequence of a dense call."""
        b = b if self.counts.shape[0] > 1 else 0
        bits = None if self.bits is None else self.bits[b : b + 1]
        return Blocks(self.counts[b : b + 1], self.indices[b : b + 1], self.block_size, bits)

    def _key_blocks(self, given: int | None) -> int:
        if given is not None:
            return int(given)
        listed = self.indices[self._is_listed()]
        return int(listed.max()) + 1 if listed.numel() else 0

    def _is_listed(self) -> Tensor:
        places = torch.arange(self.indices.shape[-1], device=self.indices.device, dtype=torch.int32)
        return places < self.counts[..., None]

    def slots(self, n: int) -> Tensor:
        """Returns the place of n blocks of keys in each list, int32 (1|B, 1|heads, blocks of queries, n); -1 if not listed."""
        shape = (*self.counts.shape, n + 1)
        places = torch.arange(self.indices.shape[-1], device=self.indices.device, dtype=torch.int32).expand(self.indices.shape)
        is_there = self._is_listed() & (self.indices >= 0) & (self.indices < n)
        # a block out of range goes to a column that is cut off
        targets = torch.where(is_there, self.indices, n).long()
        found = torch.full(shape, -1, dtype=torch.int32, device=self.indices.device)
        return found.scatter(-1, targets, places)[..., :n]

    def transposed_packed(self, key_blocks: int, cu_q: Tensor, cu_k: Tensor) -> TransposedLists:
        """`transposed` for a packed call: a list for each of `key_blocks` places, with blocks of queries within a sequence."""
        (rows, keys), device = self.block_size, self.counts.device
        sequences = torch.arange(cu_q.shape[0] - 1, device=device)
        first_row, first_key = cu_q[:-1] // rows + sequences, cu_k[:-1] // keys + sequences
        place = torch.arange(self.counts.shape[2], device=device)
        of = (torch.searchsorted(first_row, place, right=True) - 1).clamp(min=0)  # the sequence of each list
        local = torch.arange(key_blocks, device=device) - first_key[of][:, None]
        # places past a sequence's end belong to no block
        is_row = (place - first_row[of]) * rows < cu_q.diff()[of]
        is_there = is_row[:, None] & (local >= 0) & (local * keys < cu_k.diff()[of][:, None])
        slots = self.slots(key_blocks)
        moved = slots.gather(-1, local.clamp(min=0).expand(slots.shape))
        lists = transposed(torch.where(is_there, moved, -1))
        blocks, places = lists.entries.unbind(-1)
        return TransposedLists(lists.counts, torch.stack([blocks - first_row[of][blocks.long()].to(torch.int32), places], dim=-1))

    def _transposed(self, n: int) -> TransposedLists:
        return transposed(self.slots(n))


def _checked_size(block_size: Any) -> tuple[int, int]:
    pair = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    try:
        rows, keys = (operator.index(n) for n in pair)
    except (TypeError, ValueError):
        rows = keys = 0
    if min(rows, keys) < LEAST or rows % LEAST or keys % LEAST:
        raise InvalidInput(f"blocks: block_size is {block_size!r}; must be (queries, keys) of a block, multiples of {LEAST}")
    return rows, keys


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
