"""How much the report does on a machine: the one place where sizes and budgets are chosen."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """The small Llama that is trained twice."""

    hidden: int
    layers: int
    heads: int
    length: int  # tokens of a sequence
    batch: int
    steps: int
    patience: float  # seconds; both runs end after it, wherever they are
    learning_rate: float
    dtype: str  # autocast to this; "fp32" for none
    written: int  # bytes of text sampled at the end

    @property
    def width(self) -> int:
        """Of the MLP: eight thirds of the hidden size, as Llama has it, in multiples of 16."""
        return self.hidden * 8 // 3 // 16 * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """The requests that the trained Llama answers, and the cache that it has for them."""

    requests: int
    sampled: int  # one request of so many asks for several answers
    samples: int  # of such a request
    prompt: tuple[int, int]  # tokens, from and to
    answer: int  # tokens, the median
    reserve: int  # tokens of a sequence at most: what the contiguous allocator sets aside for each
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the report measures. Two CPU cores finish the whole of it in under five minutes, a GPU in under three."""

    device: str  # "cpu" or "cuda"
    dtype: str  # of the comparison
    batch: int
    heads: int
    dim: int
    lengths: tuple[int, ...]  # rising; each side stops earlier where its next step passes a limit below
    memory_limit: int  # bytes that one step may be expected to need
    patience: float  # seconds that one forward and backward may be expected to take
    rounds: int  # timed calls; the median counts
    tile_length: int  # tokens in the pictures of the masks
    bits_length: int  # tokens in the experiment on number formats
    bits_dim: int
    bits_draws: int
    model: ModelPlan
    serving: ServingPlan
    seconds: dict[str, float]  # expected, by experiment: only the progress line reads it
    is_quick: bool = False


def plan_for(device: str, *, quick: bool = False) -> Plan:
    """The plan for "cpu" or "cuda"; quick: small enough for a test, and the page says so."""
    return {("cpu", False): CPU, ("cpu", True): CPU_QUICK, ("cuda", False): GPU, ("cuda", True): GPU_QUICK}[
        device, quick
    ]


# small enough that a picture shows each block
SERVING = ServingPlan(requests=24, sampled=6, samples=4, prompt=(16, 96), answer=40, reserve=256, blocks=96)
SERVING_QUICK = ServingPlan(requests=8, sampled=4, samples=4, prompt=(16, 40), answer=12, reserve=96, blocks=24)

CPU = Plan(
    device="cpu",
    dtype="fp32",
    batch=1,
    heads=4,
    dim=64,
    lengths=(256, 512, 1024, 2048, 4096, 8192, 16384),
    memory_limit=2 * GIB,
    patience=4.0,
    rounds=4,
    tile_length=4096,
    bits_length=1024,
    bits_dim=128,
    bits_draws=3,
    model=ModelPlan(
        hidden=192,
        layers=2,
        heads=6,
        length=1024,
        batch=1,
        steps=700,
        patience=140.0,
        # at twice the rate rounding grows until the two losses part by 0.1
        learning_rate=1.5e-3,
        dtype="fp32",
        written=400,
    ),
    serving=SERVING,
    seconds={"machine": 4, "comparison": 80, "tiling": 4, "few_bits": 12, "training": 95, "serving": 10},
)

CPU_QUICK = Plan(
    device="cpu",
    dtype="fp32",
    batch=1,
    heads=2,
    dim=32,
    lengths=(256, 512),
    memory_limit=GIB // 4,
    patience=2.0,
    rounds=2,
    tile_length=512,
    bits_length=200,
    bits_dim=32,
    bits_draws=1,
    model=ModelPlan(
        hidden=32,
        layers=1,
        heads=2,
        length=64,
        batch=1,
        steps=6,
        patience=60.0,
        learning_rate=3e-3,
        dtype="fp32",
        written=24,
    ),
    serving=SERVING_QUICK,
    seconds={"machine": 5, "comparison": 5, "tiling": 1, "few_bits": 1, "training": 10, "serving": 2},
    is_quick=True,
)

GPU = Plan(
    device="cuda",
    dtype="bf16",
    batch=1,
    heads=16,
    dim=128,
    lengths=(256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    memory_limit=48 * GIB,
    patience=10.0,
    rounds=20,
    tile_length=4096,
    bits_length=2048,
    bits_dim=128,
    bits_draws=6,
    model=ModelPlan(
        hidden=512,
        layers=6,
        heads=8,
        length=2048,
        batch=8,
        steps=300,
        patience=90.0,
        learning_rate=1e-3,
        dtype="bf16",
        written=600,
    ),
    serving=SERVING,
    seconds={"machine": 4, "comparison": 50, "tiling": 10, "few_bits": 30, "training": 50, "serving": 12},
)

GPU_QUICK = Plan(
    device="cuda",
    dtype="bf16",
    batch=1,
    heads=4,
    dim=64,
    lengths=(256, 1024),
    memory_limit=2 * GIB,
    patience=2.0,
    rounds=3,
    tile_length=1024,
    bits_length=512,
    bits_dim=64,
    bits_draws=1,
    model=ModelPlan(
        hidden=64,
        layers=1,
        heads=2,
        length=256,
        batch=2,
        steps=6,
        patience=60.0,
        learning_rate=1e-3,
        dtype="bf16",
        written=24,
    ),
    serving=SERVING_QUICK,
    seconds={"machine": 5, "comparison": 5, "tiling": 2, "few_bits": 3, "training": 15, "serving": 8},
    is_quick=True,
)
