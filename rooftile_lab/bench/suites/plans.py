"""Compares predictions of plans with measurements, for five models that the plan was not written with, and for decoders.

Each model has a row for inference ("fwd") and one for a training step ("step"). Measures of a row:

    layers_us, predicted_layers_us   all linear layers as they are, measured and predicted, in sum
    near_percent                     share of the time of layers over 20 µs that is predicted within 25 %
    decided_percent, agrees_percent  share of the layers' time for which twice the rows say memory or compute, and of that the
                                     share that the model agrees with
    step_us, kept_step_us            the whole with the plan applied, timed by this suite, and as it is
    promised_us                      kept_step_us less what the plan says that the layers save
    loss_nats, max_loss_nats         of the applied plan, and what was allowed
    planning_s                       the time that the plan took

A decoder has a row for each batch: `decode_us`, the plan's layers; `single_us`, in the best single format; and the share of the
layers' weights in each format. On a CPU set OMP_NUM_THREADS=1, so that a busy neighbour does not stall the other threads.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import rooftile as rt
from rooftile.cost.session import Session
from rooftile.hardware.clock import clock_for, medians
from rooftile.planning import Plan
from rooftile.planning.costs import verdict_of
from rooftile_lab.bench.models import MODELS, decoder_named
from rooftile_lab.bench.needed import needed
from rooftile_lab.bench.results import Row
from rooftile_lab.bench.rows import timed_row, with_measures
from rooftile_lab.bench.run import Progress

GPU = CPU = ("llama", "bert", "vit", "gpt2", "convnet")
QUICK = ("bert", "convnet")
ASKED = tuple(f"decoder-{name}" for name in MODELS)
BATCHES = (1, 256)
# shorter layers are predicted to take the time of a launch
LONG_US, NEAR = 20.0, 0.25
MAX_LOSS = 0.01
CONTEXT = 640


class Case(NamedTuple):
    """A model with its input, and data that gives its loss."""

    model: nn.Module
    input: Tensor
    loss: Callable[[nn.Module], Tensor]


def measure(session: Session, names: Sequence[str], say: Progress) -> Iterator[Row]:
    """Two rows for each model, and for each decoder."""
    for name in names:
        if name in CASES:
            for training in (False, True):
                say(f"{name}: {'a training step' if training else 'inference'}")
                torch.manual_seed(0)
                yield row(session, name, CASES[name](session.device), training)
        else:
            for batch in BATCHES:
                say(f"{name}: batch {batch}")
                torch.manual_seed(0)
                yield decoder_row(session, name.removeprefix("decoder-"), batch)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _of_tokens(model: nn.Module, vocabulary: int, shape: tuple[int, int], device: torch.device) -> Case:
    ids = torch.randint(vocabulary, shape, device=device)
    return Case(model.to(device, _dtype(device)), ids, lambda it: it(input_ids=ids, labels=ids).loss)


def llama(device: torch.device) -> Case:
    """Llama of 1B, 4 x 2,048 tokens; on a CPU the report's, 1 x 1,024."""
    transformers, gpu = needed("plans", "transformers"), device.type == "cuda"
    config = transformers.LlamaConfig(
        hidden_size=2048 if gpu else 192, num_hidden_layers=16 if gpu else 2, num_attention_heads=32 if gpu else 6,
        num_key_value_heads=8 if gpu else 6, intermediate_size=8192 if gpu else 512, vocab_size=32000 if gpu else 256,
    )  # fmt: skip
    return _of_tokens(transformers.LlamaForCausalLM(config), config.vocab_size, (4, 2048) if gpu else (1, 1024), device)


def bert(device: torch.device) -> Case:
    """Base, 32 x 512 tokens; two layers of 256, 4 x 128 on a CPU."""
    transformers, gpu = needed("plans", "transformers"), device.type == "cuda"
    size = {} if gpu else {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    config = transformers.BertConfig(**size, vocab_size=30522 if gpu else 1000)
    return _of_tokens(transformers.BertForMaskedLM(config), config.vocab_size, (32, 512) if gpu else (4, 128), device)


def gpt2(device: torch.device) -> Case:
    """Small, 16 x 1,024 tokens; two layers of 256, 4 x 128 on a CPU."""
    transformers, gpu = needed("plans", "transformers"), device.type == "cuda"
    size = {} if gpu else {"n_layer": 2, "n_embd": 256, "n_head": 4, "vocab_size": 1000}
    config = transformers.GPT2Config(**size, bos_token_id=None, eos_token_id=None)
    return _of_tokens(transformers.GPT2LMHeadModel(config), config.vocab_size, (16, 1024) if gpu else (4, 128), device)


def vit(device: torch.device) -> Case:
    """Base, 64 images; two layers of 192, 4 images on a CPU."""
    transformers, gpu = needed("plans", "transformers"), device.type == "cuda"
    size = {} if gpu else {"num_hidden_layers": 2, "hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**size, num_labels=100)).to(device, _dtype(device))
    images = torch.randn(64 if gpu else 4, 3, 224, 224, device=device).to(_dtype(device))
    labels = torch.randint(100, (len(images),), device=device)
    return Case(model, images, lambda it: it(pixel_values=images, labels=labels).loss)


def convnet(device: torch.device) -> Case:
    """Four convolutions, and an MLP of three layers over their channels."""
    gpu = device.type == "cuda"
    width, hidden = (256, 8192) if gpu else (32, 512)
    layers: list[nn.Module] = []
    for channels in (3, width, width, width):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)]
    mlp = [nn.Flatten(), nn.Linear(16 * width, hidden), nn.GELU(), nn.Linear(hidden, hidden), nn.GELU(), nn.Linear(hidden, 128)]
    model = nn.Sequential(*layers, *mlp).to(device, _dtype(device))
    images = torch.randn(256 if gpu else 16, 3, 64, 64, device=device).to(_dtype(device))
    labels = torch.randint(128, (len(images),), device=device)
    return Case(model, images, lambda it: nn.functional.cross_entropy(it(images).float(), labels))


CASES = dict(zip(GPU, (llama, bert, vit, gpt2, convnet), strict=True))


def row(session: Session, name: str, case: Case, training: bool) -> Row:
    model = case.model.train(training)
    began = time.perf_counter()
    plan = rt.plan(model, case.input, data=case.loss, max_loss=MAX_LOSS, backward=training)
    seconds = time.perf_counter() - began
    measures = _of_layers(plan) | _of_the_whole(plan, case, session.device, training) | {"planning_s": seconds}
    made = timed_row(
        session, [], dtype=session.dtype, suite="plans", case=name, backend="rooftile", phase="step" if training else "fwd",
        problem=f"{tuple(case.input.shape)}, {sum(x.numel() for x in model.parameters()) / 1e6:.1f}M parameters",
        settings={"chosen": dict(Counter(layer.chosen for layer in plan.layers)), "threads": torch.get_num_threads()},
    )  # fmt: skip
    return with_measures(made, **measures)


def _of_layers(plan: Plan) -> dict[str, float]:
    kept = [(layer, layer.options[0]) for layer in plan.layers]
    times = [(option.predicted_us, option.measured_us or 0.0) for _, option in kept]
    long = [(predicted, measured) for predicted, measured in times if measured > LONG_US]
    near = sum(measured for predicted, measured in long if abs(predicted - measured) <= NEAR * measured)
    decided = agrees = total = 0.0
    for layer, option in kept:
        us = (option.measured_us or 0.0) / len(layer.loads)
        for bound, doubled in zip(layer.bounds, layer.doubled, strict=True):
            verdict = verdict_of(doubled or 0.0)
            total += us
            if verdict != "both":
                decided += us
                # a launch stays as it is with twice the rows, as memory does
                agrees += us * ((verdict == "compute") == (bound == "compute"))
    found = {
        "layers_us": sum(measured for _, measured in times), "predicted_layers_us": sum(predicted for predicted, _ in times),
        "decided_percent": 100 * decided / total,
    }  # fmt: skip
    if long:
        found["near_percent"] = 100 * near / sum(measured for _, measured in long)
    if decided:
        found["agrees_percent"] = 100 * agrees / decided
    return found


def _of_the_whole(plan: Plan, case: Case, device: torch.device, training: bool) -> dict[str, float]:
    applied = deepcopy(case.model)
    if plan.weights != "auto":
        applied = plan.prepare(applied) if training and not _has_conv1d(plan, applied) else plan.apply(applied)

    def stepping(model: nn.Module) -> Callable[[], Any]:
        def step() -> None:
            with torch.set_grad_enabled(training):
                loss = case.loss(model)
                if training:
                    loss.backward()

        return step

    times = medians({"kept": stepping(case.model), "applied": stepping(applied)}, clock_for(device, 100.0))
    with torch.no_grad():
        lost = case.loss(applied.eval()).item() - case.loss(case.model.eval()).item()
    case.model.zero_grad()
    return {
        "step_us": times["applied"], "kept_step_us": times["kept"],
        "promised_us": times["kept"] - (plan.total.kept_layers_us - plan.total.layers_us), "loss_nats": lost,
        "max_loss_nats": MAX_LOSS,
    }  # fmt: skip


def _has_conv1d(plan: Plan, model: nn.Module) -> bool:
    """Whether the plan is about layers of GPT-2, which are quantised and not trained."""
    return any(type(model.get_submodule(name)) is not nn.Linear for name in plan.weights)


def decoder_row(session: Session, name: str, batch: int) -> Row:
    """Plans decoding of a model with random weights; without data, so by time alone."""
    decoder = decoder_named(name, session.device)
    context = min(CONTEXT, decoder.config.max_len)
    began = time.perf_counter()
    plan = rt.plan(decoder, rows={"decode": batch}, context=context)
    seconds = time.perf_counter() - began
    weights: Counter[str] = Counter()
    for layer in plan.layers[:-1]:
        weights[layer.chosen] += sum(part.N * part.K for part in layer.parts)
    measures = {
        "decode_us": plan.total.layers_us, "kept_us": plan.total.kept_layers_us,
        "single_us": min([*plan.total.single_us.values(), plan.total.kept_layers_us]), "planning_s": seconds,
    }  # fmt: skip
    measures |= {f"{word}_percent".replace(":", "-"): 100 * count / weights.total() for word, count in weights.items()}
    made = timed_row(
        session, [], dtype=session.dtype, suite="plans", case=f"decoder-{name}-batch-{batch}", backend="rooftile", phase="decode",
        problem=f"{batch} answers of {context} tokens",
    )  # fmt: skip
    return with_measures(made, **measures)
