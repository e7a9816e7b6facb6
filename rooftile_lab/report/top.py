"""The top of the page: the numbers that a reader cares for, the load of the machine, and the table of contents."""

from __future__ import annotations

from rooftile.drawing.units import duration, number, percent, size, times
from rooftile.hardware import load
from rooftile_lab.report import claims, weights_section
from rooftile_lab.report.comparison import OURS, STANDARD
from rooftile_lab.report.experiments import Report

# the sections in their order, each after those that it refers to: its anchor, and a name for the table of contents
CONTENTS = (
    ("machine", "This machine"), ("masks", "Masks as tiles"), ("comparison", "Without a mask"), ("why", "Why it works"),
    ("precision", "FP8 and INT8"), ("model", "A model, trained"), ("serving", "The model, served"), ("weights", "The model, in each format"),
    ("formats", "Training for a format"), ("diagnosis", "What bounds a program"), ("approximate", "Approximate attention"),
    ("recall", "What a state forgets"), ("context", "Memory and time against context"), ("experts", "Experts"),
    ("histories", "Long user histories"),
)  # fmt: skip
# the names of the experiments, for the reader
PARTS = (("tiling", "Masks as tiles"), ("training", "A model, trained"), *CONTENTS)


def numbers(report: Report) -> list[dict[str, str]]:
    """Returns the numbers at the top: time, memory, serving and size, each against what a reader has without Rooftile."""
    shown = []
    if report.tiling:
        window = report.tiling.window
        big, small = claims.split(claims.window_claim(window))
        shown.append(
            {
                "big": big,
                "small": f"{small}: a forward over {window.N:,} tokens under {window.mask}, in {duration(window.forward_us)}",
            }
        )
    if report.comparison:
        N = claims.common_length(report.comparison)
        ours, plain = (report.comparison.of(side)[N].training_peak_bytes for side in (OURS, STANDARD))
        big, small = claims.split(claims.against(ours, plain, "less memory than", "more memory than", "as much memory as"))
        shown.append({"big": big, "small": f"{small} standard attention, forward and backward over {N:,} tokens: {size(ours)}"})
    if report.serving:
        paged = report.serving.paged
        big, small = claims.split(claims.held(report.serving))
        shown.append(
            {
                "big": big,
                "small": f"{small} in the same memory, from pages beside reserved; {number(paged.tokens_s)} tokens per second",
            }
        )
    if report.weights and (best := weights_section.smallest(report.weights)):
        plain_bytes = report.weights.weighed[0].nbytes
        shown.append(
            {
                "big": times(plain_bytes / best.nbytes),
                "small": f"smaller projections of the Llama in {best.format}, at a loss that does not show",
            }
        )
    return shown


def load_words(report: Report) -> str:
    """Says how busy other programs kept the machine, before the experiments and during them."""
    before = report.before
    cores = before.cores if before else load.cores()
    words = [f"Before the experiments {before.load}"] if before else []
    words.append(f"{'during them' if words else 'During the experiments'} {load.words(report.busy, cores)}")
    if report.others:
        name = max(report.others, key=report.others.__getitem__)
        words.append(f"at most {report.others[name]:.1f}, in the part {dict(PARTS)[name]!r}")
    spread = (
        f" Half of the repeated times lie within {percent(report.spread)} of their median; times that differ by less than their spread are "
        "called equal."
    )
    return f"{', '.join(words)}.{spread if report.spread else ''}"
