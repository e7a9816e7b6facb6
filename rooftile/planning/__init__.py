"""A plan of precision: which format each layer of a model should have on this machine, and why.

    print(rooftile.plan(model, *inputs, data=tokens, max_loss=0.01))

    model or folder -> targets -> formats of each layer -> costs, timing, losses -> knapsack -> Plan -> apply, prepare, weights

make_plan  `plan`
targets    what is planned, modules (seen by hooks) and decoders, and what puts a plan into them
formats    names of formats, and weights in them
costs      times by the ceilings
timing     measured times
losses     the loss of a format
knapsack   chooses a format for each layer
building   joins them
records    the rows of a plan
plan       `Plan`; `output` shows it
"""

from rooftile.planning.make_plan import plan
from rooftile.planning.plan import Plan

__all__ = ["Plan", "plan"]
