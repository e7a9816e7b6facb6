"""Calls of functions: how each family of models writes them.

tool        `Tool`: a function that may be called
cursor      reads a text that is still growing
reader      `CallReader`: content, marks, and what is told of a broken call
json_calls  calls that are JSON objects
beginnings  finds where a call begins
grammar     the grammar of calls; schema_types for values that are no JSON
constraint  how answers with tools are held to it
syntaxes    the syntaxes
choose      the choice of one by the chat template
"""
