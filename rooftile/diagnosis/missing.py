"""A note on what the operators and the gaps of a step leave of its time."""

from __future__ import annotations

from rooftile.diagnosis.output.units import duration

# they are the step but for this part, or the reader is told what is missing
UNEXPLAINED = 0.02


def missing(
    *, step_us: float, profiled_us: float, operators_us: float, idle_us: float, replayed_us: float, on_gpu: bool
) -> list[str]:  # fmt: skip
    """Returns a note if operators and gaps are not the step within 2 %, else none.

    Args:
        step_us: the step, the median of several.
        profiled_us: the one step in which operators and gaps were timed.
        operators_us: all of its operators; a copy in a gap counts as the gap.
        idle_us: its gaps, in which nothing ran.
        replayed_us: kernels of CUDA graphs.
        on_gpu: where it ran.
    """
    if replayed_us > UNEXPLAINED * step_us:
        return [
            f"{duration(replayed_us)} of kernels are replayed from a CUDA graph, which asks for no operators; diagnose the "
            "program without its graph to see them"
        ]
    left_us = step_us - operators_us - idle_us
    if abs(left_us) <= UNEXPLAINED * step_us:
        return []
    if left_us < 0:
        return [
            f"operators and gaps add up to {duration(operators_us + idle_us)}, and the step takes {duration(step_us)}: some ran "
            "beside others, or took longer under the profiler"
        ]
    if step_us - profiled_us > left_us / 2:
        return [
            f"the step takes {duration(step_us)} in the median, and took {duration(profiled_us)} when its operators were timed: "
            "something else kept the machine busy in the others, or steps differ; read the times as parts of the shorter one"
        ]
    others = "kernels that no operator asked for" if on_gpu else "views and other calls that compute nothing"
    return [f"{duration(left_us)} of the step are in no operator and in no gap: {others}"]
