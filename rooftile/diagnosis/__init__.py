"""Finds what bounds a program: operator by operator and as a whole, by counts, ceilings of this machine and experiments.

    function or script -> steps -> watch (counts), timeline (times) -> experiments -> verdicts -> remedies -> Diagnosis

run          `rooftile.diagnose`
script       a script's step
steps        where steps begin and end
watch        the operators of a step; `counts` has their FLOPs and bytes
timeline     a profiled step: times in context, and gaps
experiments  on one operator
verdicts     from counts, ceilings and experiments to the bound
remedies     changes, and what they save
diagnosis    the result; `output` prints it, draws its page and its trace
tour         seven examples: `rooftile diagnose --tour`
"""

from rooftile.diagnosis.counts import counts
from rooftile.diagnosis.steps import step

__all__ = ["counts", "step"]
