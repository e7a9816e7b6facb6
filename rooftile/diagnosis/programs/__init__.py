"""Finds and runs the step of a program: of a function, a script, a checkpoint's engine, or each process of torchrun.

diagnose_call        `rooftile.diagnose`
arguments            what a caller gives to a function or module, in its order
unchanged            leaves a program as it was
diagnose_script      `rooftile diagnose SCRIPT`
script               runs a script and finds its step
diagnose_checkpoint  `rooftile diagnose --checkpoint`
decode_step          times an engine's steps while all requests decode
ranks                joins what the processes of torchrun found
"""
