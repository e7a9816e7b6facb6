"""The operators inside torch's machinery: compile, export, autocast, opcheck; a new length compiles nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import rooftile as rt
from rooftile.exact import dispatch
from rooftile.exact.cases import CASES, Case
from rooftile.exact.spec import CallSettings, Options, decode
from rooftile.exact.validate import spec_code
from rooftile.runtime.devices import arch
from tests.conformance.exact import answer

# deprecations inside torch
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")

OPERATOR, BACKWARD = torch.ops.rooftile.attention.default, torch.ops.rooftile.attention_backward.default
NAMES = ["causal", "everything", "packed-everything", "bias-batch", "sinks-bf16", "expanded", "transposed"]


@pytest.fixture(autouse=True)
def _compiled_before_does_not_count() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _fresh_memory_as_torch_has_it(monkeypatch: pytest.MonkeyPatch, _nan_in_fresh_memory: None) -> None:
    """Restores torch.empty for fake tensors and tracing."""
    monkeypatch.undo()


def refuses(case: Case, backend: str, device: torch.device) -> bool:
    """Returns whether the backend refuses the case; if so, asserts that its compiled call does too."""
    if not tuple(dispatch.BACKENDS[backend].refusals(case.problem(arch(device), needs_lse=True).spec)):
        return False
    with pytest.raises(rt.Unsupported):
        answer(case, "backward-lse", backend, device)
    return True


def function_of(case: Case, backend: str | None):
    """Calls attention with the case's tensors and options, between two other operators."""
    attend = rt.attention_packed_with_lse if case.lengths else rt.attention_with_lse

    def function(tensors: tuple[Tensor, ...], options: dict) -> tuple[Tensor, Tensor]:
        q, *rest = tensors
        o, lse = attend(q * 2, *rest, case.mask, backend=backend, **options)
        return o + 1, lse

    return function


def outcome(function, inputs) -> list[Tensor]:
    """Outputs and gradients."""
    tensors, _, options = inputs
    if "seed" in options:
        options["seed"] = torch.tensor([options["seed"]], device=tensors[0].device)
    leaves = [x for x in (*tensors, *options.values()) if isinstance(x, Tensor) and x.requires_grad]
    outputs = function(tensors, options)
    return [*outputs, *torch.autograd.grad(list(outputs), leaves, [torch.cos(x.detach()) for x in outputs])]


@pytest.mark.parametrize("name", NAMES)
def test_one_graph_forward_and_backward(name: str, backend: str, device: torch.device) -> None:
    case = CASES[name]
    if refuses(case, backend, device):
        return
    function = function_of(case, backend)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found = outcome(compiled, case.inputs(device, requires_grad=True))
    due = outcome(function, case.inputs(device, requires_grad=True))
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x, y)


def test_inductor_compiles_forward_and_backward(device: torch.device) -> None:
    case = CASES["sinks"]
    function = function_of(case, None)
    found = outcome(torch.compile(function, fullgraph=True), case.inputs(device, requires_grad=True))
    due = outcome(function, case.inputs(device, requires_grad=True))
    for x, y in zip(found, due, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_a_new_length_compiles_nothing(needs_grad: bool, device: torch.device) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v: rt.attention(q, k, v, rt.CAUSAL), fullgraph=True, backend=counter)
    for T in (40, 64, 65, 100, 129, 200):
        q, k, v = (torch.randn(2, T, 4, 32, device=device, requires_grad=needs_grad) for _ in range(3))
        o = compiled(q, k, v)
        torch.testing.assert_close(o, rt.attention(q, k, v, rt.CAUSAL))
        if needs_grad:
            assert all(grad.isfinite().all() for grad in torch.autograd.grad(o.sum(), (q, k, v)))
    # one for the first length, one for any length
    assert counter.frame_count <= 2


def test_a_new_packed_batch_compiles_nothing(device: torch.device) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda q, k, v, cu: rt.attention_packed(q, k, v, cu, cu, rt.CAUSAL), fullgraph=True, backend=counter)
    for lengths in ((5, 20), (40, 3), (9, 9, 30), (10, 20, 30, 7)):
        cu = torch.tensor([0, *lengths], device=device).cumsum(0)
        q, k, v = (torch.randn(sum(lengths), 2, 16, device=device) for _ in range(3))
        torch.testing.assert_close(compiled(q, k, v, cu), rt.attention_packed(q, k, v, cu, cu, rt.CAUSAL))
    # the count of sequences and the total are the only sizes: each is static once, then free
    assert counter.frame_count <= 3


@pytest.mark.parametrize("wanted", ["q", "k", "v", "bias", "sinks", "qk", ""])
def test_gradients_of_some_inputs_only(wanted: str, device: torch.device) -> None:
    shapes = {"q": (1, 33, 4, 16), "k": (1, 50, 2, 16), "v": (1, 50, 2, 16), "bias": (4, 33, 50), "sinks": (4,)}
    given = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
    leaves = [given[name].requires_grad_() for name in ((wanted,) if wanted in given else tuple(wanted))]

    def function(given: dict[str, Tensor]) -> Tensor:
        return rt.attention(**given, mask=rt.CAUSAL)

    o = torch.compile(function, fullgraph=True, backend="aot_eager")(given)
    due = rt.attention(**given, mask=rt.CAUSAL, backend="eager")
    torch.testing.assert_close(o, due, rtol=1e-5, atol=1e-5)
    assert o.requires_grad == bool(leaves)
    if leaves:
        pairs = zip(torch.autograd.grad(o.sum(), leaves), torch.autograd.grad(due.sum(), leaves), strict=True)
        for x, y in pairs:
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


def operator_arguments(case: Case, backend: str, device: torch.device, requires_grad: bool):
    """Returns the operator's arguments for a case, forward and backward."""
    (q, k, v, *offsets), mask, options = case.inputs(device, requires_grad=requires_grad)
    bias = options.pop("bias", None)
    seed = options.pop("seed", None)
    named = Options(
        bias,
        options.pop("alibi", None),
        options.pop("sinks", None),
        torch.tensor([seed], device=device) if seed is not None else None,
        *offsets,
    )
    code = spec_code(q, k, v, mask, named, CallSettings(deterministic=False, needs_lse=True, **options))
    return (q, k, v, [x for x in named if x is not None], code, backend)


# opcheck of torch 2.15 asks for the gradients of copies that it makes itself, and hides this only where a warning is no error
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("name", ["causal", "everything", "packed-everything", "bf16", "transposed", "bias-one"])
def test_opcheck(name: str, backend: str, device: torch.device) -> None:
    case = CASES[name]
    if refuses(case, backend, device):
        return
    arguments = operator_arguments(case, backend, device, requires_grad=True)
    results = torch.library.opcheck(OPERATOR, arguments)
    assert set(results.values()) == {"SUCCESS"}
    with torch.no_grad():
        o, lse = OPERATOR(*arguments)
        q, k, v, options, code, _ = arguments
        tensors = [x.detach() for x in (q, k, v)]
        given = [x.detach() for x in options]
        backward = (torch.randn_like(o), torch.randn_like(lse), *tensors, o, lse, given, code, backend)
    results = torch.library.opcheck(BACKWARD, backward)
    assert set(results.values()) == {"SUCCESS"}
    assert decode(code).needs_grad


@pytest.mark.parametrize("missing", ["do", "dlse"])
def test_opcheck_of_a_backward_with_one_gradient(missing: str, backend: str, device: torch.device) -> None:
    case = CASES["gqa2"]
    if refuses(case, backend, device):
        return
    q, k, v, options, code, _ = operator_arguments(case, backend, device, requires_grad=True)
    with torch.no_grad():
        o, lse = OPERATOR(q, k, v, options, code, backend)
    given = {"do": torch.randn_like(o), "dlse": torch.randn_like(lse)} | {missing: None}
    arguments = (given["do"], given["dlse"], q.detach(), k.detach(), v.detach(), o, lse, options, code, backend)
    assert set(torch.library.opcheck(BACKWARD, arguments).values()) == {"SUCCESS"}


def test_autocast_runs_in_half_precision_and_gives_gradients_in_full(device: torch.device) -> None:
    (q, k, v), mask, _ = CASES["gqa2"].inputs(device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16):
        o = rt.attention(q, k, v, mask)
        function = torch.compile(lambda q, k, v: rt.attention(q, k, v, mask), fullgraph=True, backend="aot_eager")
        compiled = function(q, k, v)
    half = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    due = rt.attention(*half, mask)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, due)
    assert torch.equal(compiled, due)
    found = torch.autograd.grad(o.sum(), (q, k, v))
    for x, y in zip(found, torch.autograd.grad(due.sum(), half), strict=True):
        assert x.dtype == torch.float32
        assert torch.equal(x, y.float())


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).unbind(2)
        return rt.attention(q, k, v, rt.CAUSAL & rt.Window(16)).flatten(2)


def test_export_with_a_dynamic_length(device: torch.device) -> None:
    block = Block().to(device).eval()
    length = torch.export.Dim("length", min=2, max=4096)
    with torch.no_grad():
        program = torch.export.export(
            block, (torch.randn(2, 40, 32, device=device),), dynamic_shapes={"x": {1: length}}, strict=False
        )
    assert "rooftile.attention.default" in [str(node.target) for node in program.graph.nodes]
    for T in (40, 3, 77, 200):
        x = torch.randn(2, T, 32, device=device)
        torch.testing.assert_close(program.module()(x), block(x))


def test_an_input_that_is_wrong_is_refused_while_tracing(device: torch.device) -> None:
    q, k = torch.randn(1, 8, 4, 16, device=device), torch.randn(1, 8, 3, 16, device=device)
    compiled = torch.compile(lambda q, k: rt.attention(q, k, k), backend="aot_eager")
    with pytest.raises(rt.InvalidInput, match="q has 4 heads and k has 3"):
        compiled(q, k)


# tracing warns about every size that it treats as a constant
@pytest.mark.filterwarnings("ignore")
def test_a_trace_records_the_operator() -> None:
    q, k, v = (torch.randn(1, 20, 2, 16) for _ in range(3))
    traced = torch.jit.trace(lambda q, k, v: rt.attention(q, k, v, rt.CAUSAL), (q, k, v))
    assert "rooftile::attention" in str(traced.graph)
    assert torch.equal(traced(q + 1, k, v), rt.attention(q + 1, k, v, rt.CAUSAL))
