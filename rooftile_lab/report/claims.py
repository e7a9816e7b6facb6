"""The titles of the charts, computed from their numbers: if the data is slower, the title says so."""

from __future__ import annotations

from rooftile.drawing.units import number, percent, power, times, tokens
from rooftile_lab.report.block_tables import BLOCK, Samples
from rooftile_lab.report.comparison import OURS, SDPA, STANDARD, Comparison, Reading
from rooftile_lab.report.precision import PrecisionErrors
from rooftile_lab.report.serving import Check, Served, Serving
from rooftile_lab.report.tiles import TileMap, Tiling
from rooftile_lab.report.training import Run, Training

# two medians closer than this count as equal, also where their spread is smaller
ALIKE = 0.05
# errors of rounding that differ by less count as equal: each backend may err twice as much as the definition in its dtype
SAME_ROUNDING = 2.0
# two final losses, in nats per byte, closer than this lie on one another in the picture
SAME_CURVE = 0.02
# the sides of a comparison, as the page names them
NAMES = {OURS: "Rooftile", SDPA: "SDPA", STANDARD: "standard"}

WHAT = {
    "step_ms": ("less time", "more time", "the same time"),
    "peak_bytes": ("less memory", "more memory", "the same memory"),
}


def against(ours: float, theirs: float, less: str, more: str, alike: str, spread: float = 0.0) -> str:
    """Compares ours with theirs in words; less is better. Within their spread together they are alike.

    >>> against(2.0, 46.0, "less memory", "more memory", "the same memory")
    '23× less memory'
    """
    if ours == theirs or (min(ours, theirs) > 0 and max(ours, theirs) / min(ours, theirs) < 1 + max(ALIKE, spread)):
        return alike
    if min(ours, theirs) <= 0:
        return less if ours < theirs else more
    return f"{times(theirs / ours)} {less}" if ours < theirs else f"{times(ours / theirs)} {more}"


def common_length(comparison: Comparison, ours: str = OURS) -> int:
    """Returns the longest sequence that both sides finished."""
    return max(set(comparison.of(ours)) & set(comparison.of(STANDARD)))


def headline(tiling: Tiling) -> str:
    """Returns the page's first sentence, about the window."""
    window = tiling.window
    speed = window_claim(window)
    return f"A window over {window.N:,} tokens skips {percent(window.saved)} of the scores: {speed}"


def window_claim(window: TileMap) -> str:
    """Compares the forward under a mask with SDPA's."""
    spread = window.forward_spread + window.sdpa_spread
    words = ("faster than SDPA", "slower than SDPA", "as fast as SDPA")
    return against(window.forward_us, window.sdpa_us, *words, spread)


def split(standing: str) -> tuple[str, str]:
    """Splits a comparison into figure and words: ("43×", "less memory")."""
    figure, _, words = standing.partition(" ")
    return (figure, words) if figure[0].isdigit() else ("equal", standing)


def time_claim(comparison: Comparison, what: str) -> str:
    """Returns the title of a chart of times; what is "forward_us" or "backward_us"."""
    return (
        f"{what.removesuffix('_us').capitalize()}, {_beside_each(comparison, what, 'faster than', 'slower than', 'as fast as')}"
    )


def memory_claim(comparison: Comparison, what: str) -> str:
    """Returns the title of a chart of peak memory."""
    phase = {"forward_peak_bytes": "Forward", "training_peak_bytes": "Forward and backward"}[what]
    return f"{phase}, {_beside_each(comparison, what, 'less memory than', 'more memory than', 'the same memory as')}"


def _beside_each(comparison: Comparison, what: str, less: str, more: str, alike: str) -> str:
    """Compares ours with SDPA, if that got so far, and with standard attention at the common length."""
    N = common_length(comparison)
    ours = getattr(comparison.of(OURS)[N], what)
    theirs = {NAMES[side]: comparison.of(side)[N] for side in (SDPA, STANDARD) if N in comparison.of(side)}
    words = [
        against(
            ours, getattr(one, what), f"{less} {name}", f"{more} {name}", f"{alike} {name}", _spread(comparison.of(OURS)[N], one, what)
        )
        for name, one in theirs.items()
    ]  # fmt: skip
    return f"{N:,} tokens: {', '.join(words)}"


def _spread(ours: Reading, theirs: Reading, what: str) -> float:
    """Returns the spread of two times together; counted bytes have no spread."""
    name = f"{what.removesuffix('_us')}_spread"
    return getattr(ours, name) + getattr(theirs, name) if what.endswith("_us") else 0.0


def error_claim(comparison: Comparison, what: str) -> str:
    """Returns the title of a chart of errors."""
    N = common_length(comparison)
    ours, theirs = (getattr(comparison.of(side)[N], what) for side in (OURS, STANDARD))
    which = {"forward_error": "output", "backward_error": "gradient"}[what]
    words = against(
        ours, theirs, "closer to fp64 than standard", "further from fp64 than standard", "as exact as standard", SAME_ROUNDING - 1
    )
    return f"The {which} is {words}, {power(ours)} off"


def traffic_claim(comparison: Comparison) -> str:
    """Returns the title of the chart of the cost model's bytes, at the longest length."""
    last = comparison.traffic[-1]
    least = against(last.compulsory, last.standard, "fewer bytes", "more bytes", "as many bytes")
    tiled = against(last.tiled, last.standard, "fewer", "more", "as many")
    return f"The model counts {least} through memory at {tokens(last.N)} tokens; without any cache, {tiled}"


def scaling_claim(comparison: Comparison) -> str:
    """States the longest sequence of each side."""
    reached = {side: max(comparison.of(side)) for side in comparison.sides}
    if len(set(reached.values())) == 1:
        return f"All reached {reached[OURS]:,} tokens"
    ends = ", ".join(f"{NAMES[side]} at {N:,}" for side, N in reached.items())
    return f"The longest sequences: {ends} tokens"


def loss_claim(training: Training) -> str:
    """Returns the title of the loss curves: whether both end in the same place."""
    ends = [learning(run)[1] for run in training.runs]
    if abs(ends[0] - ends[1]) < SAME_CURVE:
        return f"Same seed, same curve: over {len(training.runs[0].losses)} steps SDPA and Rooftile learn alike"
    return f"Same seed, two curves: SDPA ends at a loss of {ends[0]:.2f}, Rooftile at {ends[1]:.2f}"


def standing_of_step(training: Training, what: str) -> str:
    """Compares the second run with the first in one quantity, "step_ms" or "peak_bytes"."""
    sdpa, ours = (getattr(run, what) for run in training.runs)
    less, more, alike = WHAT[what]
    spread = sum(run.step_spread for run in training.runs) if what == "step_ms" else 0.0
    return against(ours, sdpa, f"{less} than with SDPA", f"{more} than with SDPA", f"{alike} as with SDPA", spread)


def learning(run: Run) -> tuple[float, float]:
    """Returns the first loss and the mean of the last tenth."""
    tail = run.losses[-max(len(run.losses) // 10, 1) :]
    return run.losses[0], sum(tail) / len(tail)


def tiles_claim(maps: tuple[TileMap, ...]) -> str:
    """Returns the title of the pictures of the masks."""
    most = max(maps, key=lambda tile_map: tile_map.saved)
    return f"Hidden tiles are skipped: {most.mask} leaves out {percent(most.saved)} of the scores"


def precision_claim(bits: PrecisionErrors) -> str:
    """Returns the title of the section on FP8 and INT8."""
    fp8, int8 = (bits.of("outliers", name).better for name in ("fp8", "int8"))
    words = [against(1.0, ratio, "closer", "further off", "as close") for ratio in (fp8, int8)]
    return f"FP8 and INT8 attention: with outliers fp8 is {words[0]}, int8 {words[1]}, compared with FP8 with one scale"


def distribution_claim(bits: PrecisionErrors, distribution: str) -> str:
    """Returns the title of a distribution's chart."""
    recipes = [loss for loss in bits.losses[distribution] if loss.precision != "native"]
    best, worst = (choose(recipes, key=lambda loss: loss.rmse) for choose in (min, max))
    words = {"outliers": "With outliers", "gaussian": "Without outliers", "sink": "With a sink"}[distribution]
    if worst.rmse < (1 + ALIKE) * best.rmse:
        return f"{words} all recipes err alike"
    alike = [loss for loss in recipes if loss.rmse < (1 + ALIKE) * best.rmse]
    return (
        f"{words} {best.recipe} errs least"
        if len(alike) == 1
        else f"{words} {len(alike)} recipes err least: {'; '.join(loss.recipe for loss in alike)}"
    )


def serving_claim(serving: Serving) -> str:
    """Returns the title of the section on serving."""
    reserved, paged = serving.contiguous, serving.paged
    empty = f"{percent(paged.waste)} of the used slots are empty, against {percent(reserved.waste)}"
    return f"Served from pages, the same memory holds {held(serving)}: {empty}"


def held(serving: Serving) -> str:
    """Compares the answers that run at once, from pages and reserved."""
    reserved, paged = serving.contiguous.running, serving.paged.running
    return against(reserved, paged, "more answers at once", "fewer answers at once", "as many answers at once")


def serving_setup(serving: Serving) -> str:
    """Describes the serving experiment."""
    plan, lengths = serving.plan, sorted(serving.lengths)
    return (
        f"The Llama trained above answers {plan.requests} requests, all queued at the start, through rooftile.LLM. Each continues "
        f"a piece of its text; one in {plan.sampled} asks for {plan.samples} answers. Prompt and answer together have {lengths[0]} to "
        f"{lengths[-1]} tokens, {lengths[len(lengths) // 2]} at the median; the KV cache does not know the lengths. It has "
        f"{plan.blocks} blocks of {BLOCK} tokens, {plan.blocks * BLOCK:,} slots. In one run each answer reserves the {plan.reserve} "
        "slots of the longest; in the other it gets blocks as it grows. Model, kernels, scheduler and requests are the same."
    )


def allocator_claim(served: Served) -> str:
    """Returns the title of an allocator's picture."""
    name = {"contiguous": "Contiguous KV cache", "paged": "Paged KV cache"}[served.allocator]
    return f"{name}: {number(served.running)} answers at once on average, done in {served.steps:,} steps"


def pace_claim(serving: Serving) -> str:
    """Returns the title of the table of both allocators."""
    reserved, paged = serving.contiguous, serving.paged
    steps = against(paged.steps, reserved.steps, "fewer steps", "more steps", "as many steps")
    words = ("more tokens per second", "fewer tokens per second", "as many tokens per second")
    pace = against(reserved.tokens_s, paged.tokens_s, *words, reserved.pace_spread + paged.pace_spread)
    return f"The same requests from pages: {steps}, {pace}"


def samples_claim(samples: Samples) -> str:
    """Returns the title of the block tables of several answers."""
    return f"{len(samples.answers)} answers to one prompt take {samples.distinct} blocks, not {samples.listed}"


def check_claim(check: Check) -> str:
    """States how far the answers agree with Transformers."""
    other = check.tokens - check.agreeing
    words = (
        f"Of the {check.answers} greedy answers from pages, {check.agreeing:,} of {check.tokens:,} bytes are the trained "
        "model's own choice, computed by Transformers in fp32 with eager attention and no cache."
    )
    if not other:
        return words
    behind = short(check.behind)
    return f"{words} In the other {other:,} its best score is ahead by no more than {behind}: rounding decides there."


def tile_time_claim(tile_map: TileMap, full: TileMap) -> str:
    """Returns the caption of a mask's picture: its time relative to attention without a mask."""
    return f"{percent(tile_map.forward_us / full.forward_us)} of the time of full attention"


def short(value: float) -> str:
    """Writes a small difference with two digits."""
    return f"{value:.2g}" if value >= 1e-3 else power(value)
