"""The plan of the report on a machine: its sizes and time limits, all in one place."""

from __future__ import annotations

from dataclasses import dataclass, replace

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """The small Llama that is trained twice."""

    hidden: int
    layers: int
    heads: int
    length: int  # tokens per sequence
    batch: int
    steps: int
    patience: float  # seconds, after which both runs stop
    learning_rate: float
    dtype: str  # the autocast dtype; "fp32" for none
    written: int  # bytes of text sampled at the end

    @property
    def width(self) -> int:
        """The width of the MLP: eight thirds of the hidden size, as in Llama, in multiples of 16."""
        return self.hidden * 8 // 3 // 16 * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """The requests to the trained Llama, and its KV cache."""

    requests: int
    sampled: int  # one of this many requests asks for several answers
    samples: int  # answers of such a request
    prompt: tuple[int, int]  # tokens, minimum and maximum
    answer: int  # tokens, median
    reserve: int  # maximum tokens of a sequence, which the contiguous allocator reserves for each
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosisPlan:
    """The diagnoses of the report's own steps."""

    rungs: tuple[int, ...]  # repeats of an operation in one pass
    nbytes: int  # the array that it passes over
    batch: int  # answers that decode at once
    context: int  # tokens of each
    budget: float  # seconds for the experiments on a step


@dataclass(frozen=True, slots=True, kw_only=True)
class ApproximatePlan:
    """The approximate methods beside exact attention."""

    limit: int  # tokens, of the searches for crossovers
    seconds: float  # for all searches together
    rounds: int  # turns of a method and of exact attention at each length
    lost_at: int  # tokens of the texts on which losses are measured
    pictured: int  # tokens in the pictures of what a method sees


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The measurements of the report. They take some five minutes on a CPU, where they use one core, and twelve on a GPU."""

    device: str  # "cpu" or "cuda"
    dtype: str  # the dtype of the comparison
    batch: int
    heads: int
    dim: int
    lengths: tuple[int, ...]  # ascending; a side stops early if its next step exceeds a limit below
    memory_limit: int  # bytes, expected for one step
    patience: float  # seconds, expected for one forward and backward
    rounds: int  # timed calls, of which the median counts
    tile_length: int  # tokens in the pictures of the masks
    bits_length: int  # tokens in the experiment on number formats
    bits_dim: int
    bits_draws: int
    model: ModelPlan
    serving: ServingPlan
    diagnosis: DiagnosisPlan
    approximate: ApproximatePlan
    seconds: dict[str, float]  # expected time per experiment, for the progress line only
    is_quick: bool = False


def plan_for(device: str, *, quick: bool = False) -> Plan:
    """Returns the plan for "cpu" or "cuda"; quick: small enough for a test, as the page then states."""
    return {("cpu", False): CPU, ("cpu", True): CPU_QUICK, ("cuda", False): GPU, ("cuda", True): GPU_QUICK}[device, quick]


# small enough to draw each block
SERVING = ServingPlan(requests=24, sampled=6, samples=4, prompt=(16, 96), answer=40, reserve=256, blocks=96)

CPU = Plan(
    device="cpu", dtype="fp32", batch=1, heads=2, dim=64, lengths=(256, 512, 1024, 2048, 4096), memory_limit=2 * GIB,
    patience=3.0, rounds=3, tile_length=4096, bits_length=512, bits_dim=128, bits_draws=2,
    model=ModelPlan(
        # at twice the learning rate, rounding differences grow to 0.1 between the two losses
        hidden=192, layers=2, heads=6, length=1024, batch=1, steps=300, patience=75.0, learning_rate=1.5e-3, dtype="fp32",
        written=400,
    ),
    serving=SERVING,
    diagnosis=DiagnosisPlan(rungs=(1, 2, 4, 8, 16, 32, 64), nbytes=1 << 27, batch=8, context=128, budget=4.0),
    approximate=ApproximatePlan(limit=8192, seconds=11.0, rounds=2, lost_at=512, pictured=512),
    seconds={
        "machine": 6, "comparison": 28, "tiling": 9, "precision": 7, "approximate": 13, "training": 70, "serving": 7,
        "weights": 6, "diagnosis": 45, "formats": 65, "recall": 24, "context": 6,
        "experts": 18, "histories": 36,
    },
)  # fmt: skip

CPU_QUICK = Plan(
    device="cpu", dtype="fp32", batch=1, heads=2, dim=32, lengths=(128, 256, 512), memory_limit=GIB // 4, patience=2.0,
    rounds=2, tile_length=512, bits_length=200, bits_dim=32, bits_draws=1,
    model=ModelPlan(
        hidden=32, layers=1, heads=2, length=64, batch=1, steps=6, patience=60.0, learning_rate=3e-3, dtype="fp32", written=24
    ),
    serving=ServingPlan(requests=8, sampled=4, samples=4, prompt=(16, 40), answer=12, reserve=96, blocks=24),
    diagnosis=DiagnosisPlan(rungs=(1, 2, 4), nbytes=1 << 16, batch=2, context=32, budget=0.2),
    approximate=ApproximatePlan(limit=256, seconds=0.0, rounds=1, lost_at=64, pictured=128),
    seconds={
        "machine": 5, "comparison": 5, "tiling": 1, "precision": 1, "approximate": 4, "training": 10, "serving": 2,
        "weights": 1, "diagnosis": 15, "formats": 2, "recall": 3, "context": 2,
        "experts": 2, "histories": 5,
    },
    is_quick=True,
)  # fmt: skip

GPU = Plan(
    device="cuda", dtype="bf16", batch=1, heads=16, dim=128, lengths=(256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
    memory_limit=48 * GIB, patience=10.0, rounds=20, tile_length=4096, bits_length=2048, bits_dim=128, bits_draws=6,
    model=ModelPlan(
        hidden=512, layers=6, heads=8, length=2048, batch=8, steps=300, patience=90.0, learning_rate=1e-3, dtype="bf16",
        written=600,
    ),
    serving=SERVING,
    diagnosis=DiagnosisPlan(rungs=(1, 4, 16, 32, 64, 128, 256), nbytes=1 << 29, batch=8, context=128, budget=4.0),
    approximate=ApproximatePlan(limit=32_768, seconds=20.0, rounds=2, lost_at=4096, pictured=512),
    seconds={
        "machine": 3, "comparison": 65, "tiling": 13, "precision": 30, "approximate": 120, "training": 40, "serving": 8,
        "weights": 46, "diagnosis": 32, "formats": 380, "recall": 21, "context": 60,
        "experts": 20, "histories": 60,
    },
)  # fmt: skip

GPU_QUICK = replace(
    CPU_QUICK, device="cuda", dtype="bf16", heads=4, dim=64, lengths=(256, 512, 1024), memory_limit=2 * GIB, rounds=3,
    tile_length=1024, bits_length=512, bits_dim=64,
    model=replace(CPU_QUICK.model, hidden=64, length=256, batch=2, learning_rate=1e-3, dtype="bf16"),
    seconds=CPU_QUICK.seconds | {"tiling": 2, "precision": 3, "approximate": 8, "training": 15, "serving": 8, "weights": 15},
)  # fmt: skip
