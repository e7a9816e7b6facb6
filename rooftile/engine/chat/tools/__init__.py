"""Calls of functions: how each family of models writes them.

tool        `Tool`: a function that may be called
cursor      reads a text that is still growing
reader      `CallReader`: content, marks, and what is told of a broken call
json_calls  calls that are JSON objects
hermes, llama_json, mistral   a syntax each
"""
