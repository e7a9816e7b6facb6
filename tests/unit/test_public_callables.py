"""Rules for every public callable: one type is returned, one name means one thing, and a wrong keyword gets a sentence."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import rooftile as rt
from rooftile.approximate import Features
from rooftile.runtime import words

ROOMS = (
    "rooftile", "rooftile.approximate", "rooftile.fused", "rooftile.numerics", "rooftile.weights", "rooftile.weights.two_four",
    "rooftile.kvcache", "rooftile.nn", "rooftile.qat", "rooftile.models", "rooftile.engine", "rooftile.optim",
    "rooftile.planning", "rooftile.diagnosis", "rooftile.integrations", "rooftile.recurrent",
    "rooftile.moe",
)  # fmt: skip
# nobody writes keywords to what functions return or raise, to a protocol or to a type
RECORDS = {
    "InvalidInput", "Unsupported", "OutOfBlocks", "Overloaded", "RankEnded", "Status", "BlockScaled", "Format", "Granularity",
    "QuantisedQKV", "QuantisedRows", "Scaled", "TwoLevelScaled", "BlockTable", "Copy", "Rotation", "CompletionOutput",
    "RequestOutput", "EmbeddingOutput", "ScoreOutput", "EngineStats", "Logprob", "Members", "Method", "Attend", "WeightFormat",
    # a layer has the name, too
    "rooftile.moe:Routing",
}  # fmt: skip
# layers and operators call these in each step, where a frame more would cost time
IN_EACH_STEP = {"rotate", "dequantise", "multiply", "multiply_gated", "multiply_gated_rows", "weight_format"}
# words that another word has replaced, everywhere
OLD = {"w", "b", "block", "size", "stream", "out", "return_state", "return_scores"}
# the functions that return the last state unless they are asked not to, as every user of a recurrence writes them
WITH_STATE = {"ssd", "selective_scan", "gated_delta", "causal_conv"}
# an annotation with Any, and why
ANY = {
    **dict.fromkeys(WITH_STATE, "the outputs, and the last state unless it is not wanted"),
    "Mask.first_key": "an int or a tensor, as the position is",
    "Mask.last_key": "an int or a tensor, as the position is",
    "state_dict": "states are tensors and numbers by name",
    "NativeSparseSizes.keywords": "keywords of different types",
    "TrainableDecoder.settings": "the values of a config.json",
    "AdamW.step": "what the closure returns",
}


@functools.cache
def public() -> dict[str, Any]:
    """Returns every public callable by "room:name", and methods by "room:Class.method"."""
    found: dict[str, Any] = {}
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in getattr(module, "__all__", ()):
            thing = getattr(module, name)
            if not callable(thing):
                continue
            found[f"{room}:{name}"] = thing
            if inspect.isclass(thing):
                methods = (each for each in vars(thing) if not each.startswith("_") and callable(getattr(thing, each)))
                found |= {f"{room}:{name}.{each}": getattr(thing, each) for each in methods}
    return found


def short(path: str) -> str:
    """Returns a name without its room."""
    return path.partition(":")[2]


def is_way_in(path: str) -> bool:
    """Whether this is a function, a class, or a class's other way to be made."""
    owner, _, name = path.rpartition(".")
    return owner not in public() or isinstance(vars(public()[owner])[name], classmethod | staticmethod)


def asked() -> list[str]:
    """Returns the callables to which a person writes keywords."""
    paths = [path for path in public() if not {path, short(path).partition(".")[0]} & RECORDS and short(path) not in IN_EACH_STEP]
    return [path for path in paths if is_way_in(path) or options(public()[path])]


def options(call: Any) -> list[str]:
    """Returns the names of the arguments that are given by keyword alone."""
    return [each.name for each in inspect.signature(call).parameters.values() if each.kind is each.KEYWORD_ONLY]


def given(call: Any) -> list[None]:
    """Returns what is required, or Python would miss it before it sees a wrong keyword."""
    parameters = inspect.signature(call).parameters.values()
    return [None for each in parameters if each.default is each.empty and each.kind in (0, 1)]


def test_names_are_found() -> None:
    found = {short(path) for path in asked()}
    assert {"LLM", "LLM.from_config", "SamplingParams", "Window", "merge", "Blocks.from_dense", "Decoder.random"} <= found
    assert {
        "Pages",
        "ModelConfig.from_folder",
        "step",
        "Plan.prepare",
        "Loki.choose",
        "linear",
        "encode",
        "QuantisedLinear",
    } <= found
    assert len(found) > 120
    assert {name for path in public() for name in (path, short(path))} >= RECORDS | IN_EACH_STEP


@pytest.mark.parametrize("path", asked())
def test_a_wrong_keyword_gets_a_sentence(path: str) -> None:
    call = public()[path]
    with pytest.raises(rt.InvalidInput, match=r"has no argument '?no_such_word\b.*[:;] \w+") as raised:
        call(*given(call), no_such_word=1)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("path", [path for path in asked() if short(path) != "diagnose" and options(public()[path])])
def test_a_slip_of_the_pen_is_answered_by_the_near_word(path: str) -> None:
    call = public()[path]
    word = max(options(call), key=len)
    slip = word[:-2] + word[-1] if len(word) > 4 else f"{word}s"
    if slip in inspect.signature(call).parameters:
        slip = f"{word}x"
    with pytest.raises(rt.InvalidInput, match=rf"has no argument {slip}: (did you mean {word}\?|it has .*\b{word}\b)"):
        call(*given(call), **{slip: 1})


def test_a_function_returns_the_type_that_it_says() -> None:
    found = set()
    for path, call in public().items():
        if short(path) in RECORDS or inspect.isclass(call):
            continue
        signature = inspect.signature(call)
        assert signature.return_annotation is not signature.empty, path
        if re.search(r"\bAny\b", str(signature.return_annotation)):
            found.add(short(path))
        switches = [name for name in signature.parameters if name.startswith("return_")]
        assert not switches or short(path) in WITH_STATE, f"{path} has {switches}: write a function that returns the other type"
    assert found == set(ANY), "an exception needs a reason, and one that is over goes"


def test_no_signature_has_an_old_word() -> None:
    for path in asked():
        own = {"return_state"} if short(path) in WITH_STATE else set()
        old = OLD & set(inspect.signature(public()[path]).parameters) - own
        assert not old, f"{path} has {old}"


X, BIT = torch.randn(2, 4, 8), torch.ones(8)
QUERY = torch.randn(1, 4, 2, 8)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: rt.approximate.linear(QUERY, QUERY, QUERY, return_state=True), "linear .* return_state: call linear_with_state"),
        (
            lambda: rt.approximate.performer(QUERY, QUERY, QUERY, features=Features.draw(8, 4), return_state=True),
            "performer .* return_state: call performer_with_state",
        ),
        (
            lambda: rt.approximate.choose_blocks(QUERY, QUERY, return_scores=True),
            "choose_blocks .* return_scores: call choose_blocks_with_scores",
        ),
        (lambda: rt.fused.rms_norm(X, BIT, out="fp8"), r"rms_norm .* out: call rms_norm_quantised\(..., format=\)"),
        (lambda: rt.fused.add_layer_norm(X, X, BIT, BIT, out="fp8"), "add_layer_norm .* out: call add_layer_norm_quantised"),
        (lambda: rt.fused.swiglu(X, X, out="int8"), "swiglu .* out: call swiglu_quantised"),
        (lambda: rt.fused.gated(X, "silu", out="int8"), "gated .* out: call gated_quantised"),
        (lambda: rt.fused.rms_norm(X, w=BIT), "rms_norm has no argument w: write weight="),
        (lambda: rt.fused.layer_norm(X, BIT, b=BIT), "layer_norm has no argument b: write bias="),
        (lambda: rt.fused.add_rms_norm(X, stream=X, weight=BIT), "add_rms_norm has no argument stream: write residual="),
        (lambda: rt.quantise_weight(w=X[0], format="fp8"), "quantise_weight has no argument w: write weight="),
        (lambda: rt.sparsity.compress(w=X[0], mask=X[0]), "compress has no argument w: write weight="),
        (lambda: rt.approximate.choose_blocks(QUERY, QUERY, block=8), "choose_blocks has no argument block: write block_size="),
        (lambda: rt.nn.NativeSparse(16, 2, block=8), "NativeSparse has no argument block: write block_size="),
        (lambda: rt.kvcache.BlockPool(8, size=4), "BlockPool has no argument size: write block_size="),
        (lambda: rt.kvcache.Pages(8, 1, 1, 8, size=4), "Pages has no argument size: write block_size="),
        (lambda: rt.Blocks(BIT, BIT, size=(64, 64)), "Blocks has no argument size: write block_size="),
        (
            lambda: rt.approximate.sparse_transformer(QUERY, QUERY, QUERY, heads="split"),
            "sparse_transformer has no argument heads: write sets=",
        ),
        (
            lambda: rt.approximate.commitment_loss(QUERY, QUERY, QUERY[0], weight=1.0),
            "commitment_loss has no argument weight: write commitment=",
        ),
    ],
)  # fmt: skip
def test_an_old_word_is_answered_by_the_new_one(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(rt.InvalidInput, match=sentence):
        call()


def test_what_an_answer_names_is_there() -> None:
    import rooftile.approximate as ap
    from rooftile import fused

    assert {"linear_with_state", "performer_with_state", "choose_blocks_with_scores"} <= set(ap.__all__)
    for name in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "gated", "swiglu", "geglu"):
        assert f"{name}_quantised" in fused.__all__


def test_a_class_answers_for_its_other_ways_to_be_made_and_for_no_method() -> None:
    @words.answers_words
    class Thing:
        def __init__(self, colour: str = "red") -> None:
            self.colour = colour

        @classmethod
        def painted(cls, colour: str) -> Thing:
            return cls(colour)

        @staticmethod
        def twice(number: int) -> int:
            return 2 * number

        def method(self) -> str:
            return self.colour

    class Child(Thing):
        pass

    assert type(Child.painted("blue")) is Child
    assert (Thing.painted("blue").method(), Thing.twice(4)) == ("blue", 8)
    for call in (Thing, Thing.painted, Thing.twice):
        assert list(inspect.signature(call).parameters) == (["number"] if call == Thing.twice else ["colour"])
    with pytest.raises(rt.InvalidInput, match=r"painted has no argument color: did you mean colour\?"):
        Thing.painted(color="blue")
    with pytest.raises(rt.InvalidInput, match="twice has no argument colour: it has number"):
        Thing.twice(colour="blue")
    assert not hasattr(Thing.method, "__wrapped__")


def test_compiled_programs_have_one_graph() -> None:
    weight = rt.quantise_weight(torch.randn(6, 8), "int8")

    def program(x: torch.Tensor) -> torch.Tensor:
        o, (sums, _) = rt.approximate.linear_with_state(x, x, x, rt.CAUSAL)
        again = rt.QuantisedWeight(weight.codes, weight.scales, None, None, "int8", weight.group, weight.shape)
        return rt.linear(rt.fused.linear(o, BIT.diag()), again).sum() + sums.sum()

    torch.testing.assert_close(torch.compile(program, backend="eager", fullgraph=True)(QUERY), program(QUERY))
