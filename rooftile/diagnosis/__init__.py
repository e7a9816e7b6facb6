"""Finds what bounds a program: operator by operator and as a whole, by counts, ceilings of this machine and experiments.

    programs (function or script) -> watching (steps, operators, times) -> experiments -> verdicts -> remedies -> Diagnosis

programs     the step of a function, a script, a checkpoint's engine: `rooftile.diagnose` is in `diagnose_call`
observer     leads a program's steps through all that follows
watching     where steps begin and end, the operators of one, and its times
counts       the FLOPs and bytes of an operator, and the hardware's counters beside them
recorded     a step that torch.profiler has recorded, diagnosed without a run
experiments  on one operator
machine      this machine's ceilings as roofs; `examination` is `rooftile.doctor`
verdicts     from counts, ceilings and experiments to the bound; `missing` notes what they leave of the step's time
remedies     changes, and what they save
diagnosis    the result; `output` prints it, draws its page and its trace
records      what these parts hand to each other
tour         seven examples: `rooftile diagnose --tour`
"""

from typing import TYPE_CHECKING

from rooftile.diagnosis.counts import counts
from rooftile.diagnosis.watching.steps import step
from rooftile.runtime.late_names import late_names

if TYPE_CHECKING:
    from rooftile.diagnosis.recorded.diagnose_trace import from_trace

__all__ = ["counts", "from_trace", "step"]

__getattr__ = late_names("rooftile.diagnosis", {"from_trace": "rooftile.diagnosis.recorded.diagnose_trace"})
