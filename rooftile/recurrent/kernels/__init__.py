"""Triton kernels of the recurrences, one module or package for each rule; each has the functions of `rule.Kernels`."""
