"""A `Decoder` as the target of a plan: its projections with the rows of decode steps and of prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftile.cost import flops, io, traffic
from rooftile.cost.io import Traffic
from rooftile.engine.mixers.exact.masks import masks_of
from rooftile.errors import InvalidInput, Unsupported
from rooftile.exact.spec import Problem, Sizes, Spec
from rooftile.models import Decoder
from rooftile.models.checkpoints.places import projections_of
from rooftile.models.checkpoints.quantised import merged
from rooftile.models.projection import Projection
from rooftile.planning.costs import DeviceCeilings, Pass
from rooftile.planning.formats import NAMES
from rooftile.planning.records import Load, Other, Part
from rooftile.planning.targets.decoder_steps import decoding, hidden_of, loss_of, reading
from rooftile.planning.targets.outputs import token_ids
from rooftile.planning.targets.target import SAMPLE, Item
from rooftile.qat.coverage import Coverage
from rooftile.weights.files.formats import weight_in

# tokens whose inputs of projections are looked at
TOKENS = 512
HEAD = "lm_head"


class Phase(NamedTuple):
    """A kind of step: its rows, and its share of all steps."""

    name: str  # "decode" or "prompt"
    rows: int
    share: float


def parts_of(decoder: Decoder) -> dict[str, tuple[str, tuple[int, int]]]:
    """Returns the modules of a decoder by their names in its checkpoint: what they are, and the shapes of their weights."""
    found = {HEAD: ("the output head", tuple(decoder.head.shape))}
    for projection, parts in _projections(decoder):
        found |= {name: ("a projection", (rows, projection.inputs)) for name, rows in parts.items()}
    return found  # type: ignore[return-value]


class DecoderTarget:
    """A decoder and its steps.

    Args:
        decoder: with weights in 16 or 32 bits.
        phases: the kinds of steps.
        context: tokens of each sequence.

    Raises:
        InvalidInput: its weights are quantised already, or it has fewer positions.
        Unsupported: it has layers without exact attention, with experts or with sinks.
    """

    def __init__(self, decoder: Decoder, name: str, phases: Sequence[Phase], context: int) -> None:
        config = decoder.config
        if context > config.max_len:
            raise InvalidInput(f"context is {context} tokens, and the model has {config.max_len} positions; give no more")
        other = next((mixer for mixer in config.mixers if mixer != "attention"), None)
        if other is not None:
            raise Unsupported(f"the model has layers of {other}, and a plan knows exact attention alone; plan its module instead")
        if "experts" in config.feed_forwards:
            raise Unsupported("the model has layers with experts, and a plan knows dense feed-forwards alone; plan a dense model")
        if config.sinks:
            raise Unsupported("the model has attention sinks, which a plan does not know; plan a model without them")
        self.name, self._decoder, self._phases, self._context = name, decoder, phases, context
        self._device, self._dtype = decoder.embedding.device, decoder.embedding.dtype
        self._places = dict[str, tuple[Projection, dict[str, int]]]()
        for projection, parts in _projections(decoder):
            if projection.weight is None:
                raise InvalidInput("the decoder's weights are quantised already; give the 16-bit checkpoint")
            first, *rest = parts
            folder = first.rpartition(".")[0]
            self._places[first + "".join(f", {part.removeprefix(f'{folder}.')}" for part in rest)] = projection, parts
        samples = self._samples()
        head = samples.pop(HEAD)
        # in the order of their calls
        self.items = [*(self._item(name, *self._places[name], x) for name, x in samples.items()), self._head(head)]

    @property
    def coverage(self) -> str:
        """Says which share of the weights is planned, and what is left out."""
        decoder = self._decoder
        planned = sum(N * K for item in self.items if not item.fixed for N, K in item.products)
        left = {"the embedding": ("embed_tokens", 1, decoder.embedding.numel())}
        if decoder.head is not decoder.embedding:
            left["the output head"] = HEAD, 1, decoder.head.numel()
        return str(Coverage(planned + sum(numbers for _, _, numbers in left.values()), planned, left, "planned"))

    def step(self) -> list[tuple[float, Callable[[], Any]]]:
        """Returns what runs a step of each phase, with its share."""
        return [(phase.share, self._step(phase)) for phase in self._phases]

    def _step(self, phase: Phase) -> Callable[[], Any]:
        if phase.name == "decode":
            return decoding(self._decoder, phase.rows, self._context)
        return reading(self._decoder, self._lengths(phase.rows))

    def output(self) -> Tensor:
        """Returns the hidden states of some tokens."""
        return hidden_of(self._decoder, self._tokens())

    def loss(self, data: Any) -> Callable[[], float]:
        """Returns what computes the mean loss in nats of the next token of texts."""
        texts, known = [text.to(self._device) for text in token_ids(data)], self._decoder.config.vocab_size
        beyond = next((text for text in texts if text.numel() and not 0 <= text.min() <= text.max() < known), None)
        if beyond is not None:
            raise InvalidInput(f"data has token ids from {beyond.min()} to {beyond.max()}; the model has 0 to {known - 1}")

        def mean() -> float:
            total = sum(loss_of(self._decoder, text) for text in texts)
            return total / sum(len(text) - 1 for text in texts)

        return mean

    @contextmanager
    def rounded(self, item: Item, word: str) -> Iterator[None]:
        """Within the block a projection multiplies in a format."""
        projection, parts = self._places[item.name]
        weight = projection.weight
        assert weight is not None
        rows = weight.detach().split(list(parts.values()))
        projection.fill(merged([weight_in(w, word, name) for name, w in zip(parts, rows, strict=True)]))
        try:
            yield
        finally:
            projection.weight, projection.parts = weight, ()

    def others(self, machine: DeviceCeilings) -> list[Other]:
        """Returns norms, gates, rotary positions, the cache and attention; what the engine has fused already says so."""
        config, size = self._decoder.config, self._dtype.itemsize
        H, Hk, D = config.heads, config.kv_heads, config.head_dim
        hidden, ffn, layers = config.hidden, config.ffn, config.layers

        def positions(rows: int) -> Traffic:
            rotated = config.rotary is not None
            return traffic.rotate(rows, H, D, size) + traffic.cache_write(rows, Hk, D, size, rotated=rotated)

        found = [
            self._other(
                machine, "norms", "add_norm", 2 * layers, lambda rows: traffic.norm(rows, hidden, size, added=True),
                "the residual addition (one kernel already)",
            ),
            self._other(
                machine, "layers.*.mlp", "gate", layers * config.gated, lambda rows: traffic.gate(rows, ffn, size),
                "the up projection, in formats whose kernels have both",
            ),
            self._other(
                machine, "layers.*.self_attn", "rotate, cache_write", layers, positions, "each other (one kernel already)"
            ),
        ]  # fmt: skip
        return [*(other for other in found if other.calls), *(self._attention(phase, machine) for phase in self._phases)]

    def _other(
        self, machine: DeviceCeilings, module: str, operator: str, calls: int, moved: Callable[[int], Traffic], fuse_with: str
    ) -> Other:  # fmt: skip
        name = NAMES[self._dtype]
        works = [(phase.share * calls, Pass(0, moved(phase.rows).total, name)) for phase in self._phases]
        return self._row(machine, module, operator, works, fuse_with)

    def _attention(self, phase: Phase, machine: DeviceCeilings) -> Other:
        works = []
        for n, window in enumerate(self._decoder.config.windows):
            problem = self._problem(phase, n, self._context if window is None else min(window, self._context))
            moved = traffic.decode(problem) if phase.name == "decode" else io.compulsory(problem)
            works.append((phase.share, Pass(flops.count(problem), moved.total, NAMES[self._dtype])))
        return self._row(machine, "layers.*.self_attn", f"attention, {phase.name}", works, "")

    def _row(
        self, machine: DeviceCeilings, module: str, operator: str, works: Sequence[tuple[float, Pass]], fuse_with: str
    ) -> Other:  # fmt: skip
        heaviest = max(works, key=lambda work: work[0] * machine.us([work[1]]))[1]
        return Other(
            module=module, operator=operator, calls=sum(calls for calls, _ in works),
            flops=sum(calls * one.flops for calls, one in works), nbytes=sum(calls * one.bytes for calls, one in works),
            ridge=machine.ridge(heaviest.dtype), bound=machine.bound([heaviest]),
            predicted_us=sum(calls * machine.us([one]) for calls, one in works), fuse_with=fuse_with,
        )  # fmt: skip

    def _problem(self, phase: Phase, layer: int, seen: int) -> Problem:
        config = self._decoder.config
        spec = Spec(
            dtype=self._dtype, dim=config.head_dim, dim_v=config.head_dim, group=config.heads // config.kv_heads,
            scale=config.scale, mask=masks_of(config)[layer],
        )  # fmt: skip
        if phase.name == "decode":
            return Problem(spec=spec, sizes=Sizes(B=phase.rows, T=1, S=seen, H=config.heads, Hk=config.kv_heads))
        lengths = tuple((length, length) for length in self._lengths(phase.rows))
        sizes = Sizes(B=len(lengths), T=phase.rows, S=phase.rows, H=config.heads, Hk=config.kv_heads, lengths=lengths)
        return Problem(spec=spec, sizes=sizes)

    def _lengths(self, tokens: int) -> list[int]:
        """The lengths of prompts that have `tokens` tokens together: the context each, and a rest."""
        whole, rest = divmod(tokens, self._context)
        return [self._context] * whole + [rest] * (rest > 0)

    def _loads(self, rows: Mapping[str, int]) -> tuple[Load, ...]:
        return tuple(Load(phase=phase.name, rows=rows[phase.name], calls=phase.share) for phase in self._phases)

    def _item(self, name: str, projection: Projection, parts: Mapping[str, int], sample: Tensor) -> Item:
        return Item(
            name=name, parts=tuple(Part(name=part, N=rows, K=projection.inputs) for part, rows in parts.items()),
            loads=self._loads({phase.name: phase.rows for phase in self._phases}), dtype=self._dtype,
            weights=lambda: [projection.dequantised().detach()], biases=[projection.bias], sample=sample,
            takes_codes=self._takes_codes(name),
            products=((projection.outputs, projection.inputs),),
        )  # fmt: skip

    def _takes_codes(self, name: str) -> bool:
        """Whether a norm or a gate writes the input of a projection; what attention returns is quantised by the product."""
        last = name.rpartition(".")[2]
        if last in ("down_proj", "c_proj"):
            return self._decoder.config.gated and last == "down_proj"
        return last != "o_proj" and self._decoder.config.pre_norms

    def _head(self, sample: Tensor) -> Item:
        N, K = self._decoder.head.shape
        # a prompt needs the logits of its last token alone
        rows = {p.name: p.rows if p.name == "decode" else len(self._lengths(p.rows)) for p in self._phases}
        return Item(
            name=HEAD, parts=(Part(name=HEAD, N=N, K=K),), loads=self._loads(rows), dtype=self._dtype,
            weights=lambda: [self._decoder.head.detach()], biases=[None], sample=sample,
            fixed="LLM keeps the output head as it is",
        )  # fmt: skip

    def _samples(self) -> dict[str, Tensor]:
        """Some rows of the input of each projection, and of the head."""
        found: dict[str, Tensor] = {}
        hooks = [
            projection.register_forward_pre_hook(lambda _, args, name=name: found.update({name: args[0][:SAMPLE].clone()}))
            for name, (projection, _) in self._places.items()
        ]
        try:
            found[HEAD] = self.output()[:SAMPLE].clone()
        finally:
            for hook in hooks:
                hook.remove()
        return found

    def _tokens(self) -> Tensor:
        config = self._decoder.config
        generator = torch.Generator().manual_seed(0)
        return torch.randint(config.vocab_size, (min(TOKENS, config.max_len),), generator=generator).to(self._device)


def _projections(decoder: Decoder) -> Iterator[tuple[Projection, dict[str, int]]]:
    """Yields the projections with the checkpoint's names of their parts, and the rows of each."""
    folder = "h" if decoder.config.family == "gpt2" else "layers"
    for n, layer in enumerate(decoder.layers):
        for projection, parts in projections_of(layer, decoder.config):
            yield projection, {f"{folder}.{n}.{name}": rows for name, rows in parts.items()}
