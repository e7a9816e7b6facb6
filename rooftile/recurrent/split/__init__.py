"""Recurrences over a sequence whose tokens lie on several ranks, each with a contiguous range of them.

context      calls inside `rooftile.parallel.context`
uncompiled   calls with a group, outside of graphs
"""
