"""Diagnoses a step that torch.profiler has recorded, on this machine or another one: by counts and models, without a run.

diagnose_trace  leads a recorded step through all that follows
file            reads a trace, and refuses what is none
event           one event of it
step            the step that is diagnosed: its events, and its time on host and device
places          where the host is in the program at a time: module, phase, line
operators       which events are operators, and the rows of the table
calls           an operator's call again from its recorded inputs, for its counts
machine         the machine of the trace, and whose ceilings its operators are compared with
"""
