"""The words of OpenAI's API.

forms      the fields of each route
fields     reads a form; which fields are refused, and the nearest name of an unknown one
asks       turns a form into prompts and sampling parameters
prompts    the logprobs of prompts, as completions and vLLM write them
gathered   the answers to all prompts of a form, as they grow
objects    the answers in OpenAI's form
"""
