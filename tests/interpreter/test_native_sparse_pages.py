"""Native Sparse Attention on a paged cache, interpreted: the kernels compute what the gathering definition does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rooftile.approximate.native_sparse import decoding as paged
from rooftile.approximate.native_sparse import decoding_kernels as sparse_kernels
from rooftile.approximate.native_sparse.decoding_kernels import block_choice, shape
from rooftile.engine import LLM, SamplingParams
from rooftile.engine.mixers.native_sparse.step import SparseStep, reads_in_place
from rooftile.kvcache import WindowPool
from rooftile.models import Decoder, ModelConfig, NativeSparseSizes
from rooftile.models.rotary import Rotary
from rooftile.runtime.launch import observe
from tests.models.sparse import checkpoint, likeliest, settings

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SIZES = {"length": 32, "stride": 16, "block_size": 64, "count": 16, "first": 1, "local": 2, "window": 512}
SMALL = {"length": 8, "stride": 4, "block_size": 16, "count": 4, "first": 1, "local": 2, "window": 21}
# tokens per page, key heads, heads of a group, head dims, blocks of a table, sizes
SHAPES: dict[str, tuple[int, int, int, int, int, int, dict[str, int]]] = {
    "the paper's": (16, 1, 16, 32, 32, 72, SIZES),
    "small": (8, 2, 3, 16, 16, 40, SMALL),
    "a page of many blocks": (64, 1, 4, 24, 8, 6, SMALL),
    "length is stride": (16, 2, 1, 16, 16, 12, SMALL | {"length": 4, "first": 0, "local": 1}),
    "a block of 48": (16, 1, 17, 16, 16, 12, SMALL | {"length": 16, "stride": 16, "block_size": 48, "window": 1}),
    "many overlaps": (16, 1, 2, 16, 16, 20, SMALL | {"length": 64, "stride": 2, "block_size": 64, "window": 64}),
}


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter runs them one after the other; the choice compares 16 blocks at a time, so that it has several steps."""
    monkeypatch.setattr(shape, "PROGRAMS", 20)
    monkeypatch.setattr(block_choice, "COMPARED", 16)
    block_choice.constants_of.cache_clear()
    yield
    block_choice.constants_of.cache_clear()


def call_of(name: str, dtype: torch.dtype = torch.float32) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of `decode` for five sequences: one is empty, one has a token, the others end anywhere."""
    size, Hk, G, D, Dv, N, sizes = SHAPES[name]
    torch.manual_seed(size + D)
    pages, near_pages = 5 * N, 3 * N
    rows = size // sizes["stride"]
    compressed = torch.randn(pages, rows, Hk, D, dtype=dtype), torch.randn(pages, rows, Hk, Dv, dtype=dtype)
    selected = torch.randn(pages, size, Hk, D, dtype=dtype), torch.randn(pages, size, Hk, Dv, dtype=dtype)
    near = torch.randn(near_pages, size, Hk, D, dtype=dtype), torch.randn(near_pages, size, Hk, Dv, dtype=dtype)
    table, near_table = torch.randperm(pages)[: 5 * N].view(5, N).int(), torch.randint(near_pages, (5, N)).int()
    lengths = torch.tensor([N * size - 3, N * size // 2, 0, 1, sizes["window"] + sizes["length"]]).int()
    for b, length in enumerate(lengths.tolist()):
        # entries past a sequence's end, and near ones behind its window, name no block
        table[b, -(-length // size) :], near_table[b, -(-length // size) :] = 10**6, -7
        near_table[b, : max(length - sizes["window"], 0) // size] = 10**6
    # as a projection leaves them: heads side by side, tokens apart
    q = torch.randn(5, (Hk * G + 2) * D, dtype=dtype)[:, : Hk * G * D].view(5, Hk * G, D)
    gates = torch.rand(5, Hk * G, 3, dtype=dtype)
    return (q, gates, compressed, selected, near, table, near_table, lengths), sizes | {"scale": D**-0.5}


def both(call: tuple[Any, ...], sizes: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns the output of the kernels, and that of the definition."""
    q, gates, compressed, selected, near, *rest = call
    assert sparse_kernels.refusal(q, *selected[1].shape[2:], sizes) is None
    return paged.decode(*call, **sizes), paged.decode_as_defined(q, gates, [*compressed, *selected, *near], *rest, **sizes)


@pytest.mark.parametrize("name", SHAPES)
def test_kernels_equal_the_definition(name: str) -> None:
    call, sizes = call_of(name)
    found, due = both(call, sizes)
    torch.testing.assert_close(found, due, atol=2e-5, rtol=2e-5)
    assert (found[2] == 0).all()
    assert found[[0, 1, 3, 4]].abs().amin((1, 2)).gt(0).any()


def test_each_branch_has_its_gate() -> None:
    call, sizes = call_of("small")
    # one branch for each of three sequences
    call[1].zero_()[[0, 1, 4], :, range(3)] = 1.0
    found, due = both(call, sizes)
    torch.testing.assert_close(found, due, atol=2e-5, rtol=2e-5)
    assert (found[[0, 1, 4]] != 0).all()


def test_bf16_is_near() -> None:
    call, sizes = call_of("small", torch.bfloat16)
    found, due = both(call, sizes)
    torch.testing.assert_close(found, due, atol=4e-2, rtol=4e-2)


def test_what_is_not_seen_is_not_read() -> None:
    """NaN in everything that no row may read: past the end, behind the window, and in blocks that are not chosen."""
    call, sizes = call_of("small")
    _, _, compressed, selected, near, table, near_table, lengths = call
    clean = paged.decode(*call, **sizes)
    size, length = selected[0].shape[1], lengths[1].item()
    for x in (*compressed, *selected):
        kept = x[table[1, : length // size].long()].clone()
        x[table[0].long()] = torch.nan
        x[table[1, : length // size].long()] = kept
    begin = length - sizes["window"]
    for x in near:
        kept = x.clone()
        x.fill_(torch.nan)
        seen = torch.arange(begin, length)
        pages = near_table[1, seen // size].long()
        x[pages, seen % size] = kept[pages, seen % size]
    found = paged.decode(*call, **sizes)
    assert torch.equal(found[1], clean[1])
    assert found[0].isnan().any()


# the operators that copy some of a tensor; the interpreter has others of its own
COPIES = {"cat", "clone", "gather", "index", "index_select", "repeat", "take_along_dim", "to", "_to_copy"}


class Operators(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **kwargs or {})


def test_a_step_copies_no_key() -> None:
    """Keys of all branches are read where they lie; the definition gathers them."""
    (q, gates, compressed, selected, near, *rest), sizes = call_of("small")
    scale = sizes.pop("scale")
    with Operators() as seen:
        sparse_kernels.decode(q, gates, [*compressed, *selected, *near], *rest, scale=scale, **sizes)
    assert not seen.names & COPIES
    with Operators() as seen:
        paged.decode_as_defined(q, gates, [*compressed, *selected, *near], *rest, scale=scale, **sizes)
    assert seen.names & COPIES


def test_how_many_programs_share_a_sequence_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    call, sizes = call_of("small")
    due = paged.decode(*call, **sizes)
    made = []
    for programs in (1, 200):
        monkeypatch.setattr(shape, "PROGRAMS", programs)
        made.append(shape.shape_of(call[0], 2, 16, 8, **{name: sizes[name] for name in paged.SIZES}))
        torch.testing.assert_close(paged.decode(*call, **sizes), due, atol=2e-5, rtol=2e-5)
    assert [one.SPLITS for one in made] == [1, 16]
    assert [one.EACH for one in made] == [4, 1]


def test_an_engine_decodes_by_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few answers, so that rows of windows are given back."""
    monkeypatch.setattr(shape, "PROGRAMS", 1)
    decoder = Decoder.from_folder(checkpoint(tmp_path, settings(mixers=["attention", "native_sparse", "attention"])))
    llm = LLM(decoder, block_size=8, max_model_len=48, num_blocks=30, max_num_seqs=2, max_batched_tokens=16)
    launched: list[str] = []
    prompt = [5, 3, 8, 1, 9] * 4
    with observe(launched.append):
        (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    answer = output.outputs[0].token_ids
    assert likeliest(decoder, prompt, answer) == answer
    # a step of the prompt's last tokens gives the first, and two steps decode
    assert [launched.count(name) for name in ("_decode_compressed", "_decode_tokens", "_merge_branches")] == [2, 2, 2]
    assert isinstance(llm.engine.pool, WindowPool)


def test_ties_go_to_the_lower_block() -> None:
    """Equal compressed keys give equal scores: the choice is the first blocks, and the last two."""
    call, sizes = call_of("small")
    _, gates, compressed, *_ = call
    compressed[0].zero_()
    gates.zero_()[..., 1] = 1.0
    found, due = both(call, sizes | {"count": 6})
    torch.testing.assert_close(found, due, atol=2e-5, rtol=2e-5)


def test_prompts_are_read_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equals a copy of the pages: two prompts in a step, one of them beyond its window, in chunks, with few rows."""
    said = settings(mixers=["attention", "native_sparse", "attention"], count=2)
    decoder = Decoder.from_folder(checkpoint(tmp_path, said))
    prompts, sizes, read = [[5, 3, 8], [7, 1, 4] * 9], [], SparseStep._read_in_place

    def compared(self: SparseStep, layer: int, q: Tensor, gates: Tensor) -> Tensor:
        found = read(self, layer, q, gates)
        sequences = [(slice(begin, end), table, length) for begin, end, length, table in self.step.sequences()]
        due = [self._read_prompt(layer, q[own], gates[own], table, length) for own, table, length in sequences]
        torch.testing.assert_close(found, torch.cat(due), atol=2e-5, rtol=2e-5)
        sizes.append([len(one) for one in due])
        return found

    monkeypatch.setattr(SparseStep, "_read_in_place", compared)
    llm = LLM(decoder, block_size=8, max_model_len=48, num_blocks=30, max_num_seqs=2, max_batched_tokens=20)
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    assert sizes == [[3, 17], [10]]
    assert isinstance(llm.engine.pool, WindowPool)


def test_what_is_read_in_place() -> None:
    """Copies are made where the kernels of chosen blocks refuse a call."""
    config = ModelConfig(
        family="llama", vocab_size=9, layers=1, hidden=64, heads=32, kv_heads=2, head_dim=256, ffn=64, max_len=64, scale=1.0,
        windows=(None,), mixers=("native_sparse",), native_sparse=NativeSparseSizes(), rotary=Rotary(dim=256),
    )  # fmt: skip
    for dtype, due in ((torch.bfloat16, True), (torch.float32, True), (torch.float64, False)):
        assert reads_in_place(config, dtype, CPU) == due
    # 32 heads of 512 numbers do not fit in fp32
    more = replace(config, heads=64)
    assert reads_in_place(more, torch.bfloat16, CPU)
    assert not reads_in_place(more, torch.float32, CPU)
