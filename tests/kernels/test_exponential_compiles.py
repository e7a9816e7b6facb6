"""The kernels of Performer's positive features compile for the chips that they are for, without one; few registers spill."""

from __future__ import annotations

import re

import pytest
import torch

from tests.grids import swept

triton = pytest.importorskip("triton", reason="Triton is not installed on this platform")

from tests.kernels.test_sampling_compiles import stack  # noqa: E402

WORDS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
NAMES = ("exponents", "sums", "outputs", "queries", "keys", "values")
IN_DTYPE = {"q_ptr", "k_ptr", "v_ptr", "x_ptr", "y_ptr", "o_ptr", "do_ptr", "dq_ptr", "dk_ptr", "dv_ptr", "w_ptr", "rest_ptr"}
# the state is read in the dtype of its products
STATES = {"s_ptr", "r_ptr"}


def compiled(name: str, sm: int, dtype: torch.dtype, dim: int, *, causal: bool = True, group: int = 1, packed: bool = False):
    """A kernel as it is launched for tensors that are aligned to 16 bytes, with 256 features."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rooftile.recurrent.linear.kernels import by_features, exponential, exponential_gradients, exponents

    places = (exponents, exponential, exponential_gradients)
    word = "_exponents" if name == "exponents" else f"_exponential_{name}"
    kernel = next(getattr(place, word) for place in places if hasattr(place, word))
    constants = by_features.tile_of(name, dim, dim, 256, dtype, sm == 90)
    constants |= {"HEADS": 4, "GROUP": group, "D": dim, "DV": dim, "F": 256, "PACKED": packed}
    constants |= {"CAUSAL": causal, "WEIGHTED": group > 1, "KEYS": True}
    options = {word: constants.pop(word) for word in ("num_warps", "num_stages")}
    constants = {word: value for word, value in constants.items() if word in kernel.arg_names}
    signature = {}
    for argument in kernel.arg_names:
        given = argument in IN_DTYPE or (argument in STATES and dtype == torch.bfloat16)
        pointer = WORDS[dtype] if given else "*i32" if argument == "cu_ptr" else "*fp32"
        number = "fp32" if argument == "root" else "i32"
        signature[argument] = "constexpr" if argument in constants else pointer if argument.endswith("_ptr") else number
        if argument.endswith("_strides"):
            signature[argument] = ("i32",) * 3
    names = list(enumerate(kernel.arg_names))
    even: list[tuple[int, ...]] = [(n,) for n, argument in names if argument.endswith("_ptr")]
    even += [(n, axis) for n, argument in names if argument.endswith("_strides") for axis in range(3)]
    source = ASTSource(
        kernel, signature, {(kernel.arg_names.index(argument),): value for argument, value in constants.items()},
        {place: [["tt.divisibility", 16]] for place in even},
    )  # fmt: skip
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


def most_spilled(sm: int, dtype: torch.dtype, dim: int) -> int:
    """Bytes of a thread. Wide heads in bf16 have tiles of outputs that are too large for its registers, and so have groups."""
    return 384 if dtype == torch.bfloat16 else 32


CHIPS = [(sm, dtype) for sm in (80, 90) for dtype in WORDS]
GRID = [(name, *chip, dim) for name in NAMES for chip in CHIPS for dim in (64, 128)]


def _traits(case: tuple) -> tuple:
    """`make test` compiles every kernel for Hopper in bf16 with wide heads, and every chip, dtype and width with some kernel."""
    name, sm, dtype, dim = case
    return (sm == 90 and dtype == torch.bfloat16 and dim == 128 and name), (sm, dtype), dim


@pytest.mark.parametrize(("name", "sm", "dtype", "dim"), swept(GRID, _traits), ids=str)
def test_kernels_compile(name: str, sm: int, dtype: torch.dtype, dim: int) -> None:
    built = compiled(name, sm, dtype, dim)
    assert built.metadata.shared <= (227 if sm == 90 else 163) * 1024
    assert stack(built) <= most_spilled(sm, dtype, dim)
    if dtype == torch.bfloat16:
        # products of 16-bit numbers run on the matrix units
        assert re.search(r"wgmma|mma\.sync", built.asm["ptx"])


FORMS = [
    ("sums", {"group": 4}),
    ("outputs", {"group": 4, "packed": True}),
    ("outputs", {"causal": False}),
    ("queries", {"causal": False}),
    ("keys", {"group": 4, "packed": True}),
    ("keys", {"causal": False}),
    ("values", {"group": 4, "packed": True}),
    ("values", {"causal": False}),
]


@pytest.mark.parametrize(
    ("sm", "name", "options"),
    swept([(sm, *form) for sm in (90, 80) for form in FORMS], lambda case: (case[0] == 90 and str(case), case[:2])),
    ids=str,
)
def test_other_forms_spill_little(sm: int, name: str, options: dict) -> None:
    assert stack(compiled(name, sm, torch.bfloat16, 64, **options)) <= most_spilled(sm, torch.bfloat16, 64)
